#!/bin/sh
# Print what this system holds, Debian's and Python's packages, as a CycloneDX SBOM.
#
#   sbom.sh [DIRECTORY]     Python's are looked for there, in / unless given
#
# For the end of an image's build, so with nothing but a shell and awk. Ubuntu is told from Debian.
set -eu
. /etc/os-release
{
    # shellcheck disable=SC2016  # dpkg-query's own variables
    dpkg-query --show --showformat \
        '${db:Status-Status} ${Package} ${Version} deb/'"$ID"' ?arch=${Architecture}\n' |
        sed -n 's/^installed //p'
    find "${1:-/}" -xdev -path '*.dist-info/METADATA' -exec awk '
        { sub(/\r$/, "") }
        FNR == 1 { head = 1; name = version = "" }
        /^$/ { head = 0 }
        head && /^Name: / { name = $2 }
        head && /^Version: / { version = $2 }
        name && version { print name, version, "pypi"; name = version = "" }' {} +
} | sort -u | awk '
    function escaped(text) {
        gsub(/%/, "%25", text); gsub(/\+/, "%2B", text); gsub(/:/, "%3A", text)
        return text
    }
    BEGIN { printf "{\"bomFormat\": \"CycloneDX\", \"specVersion\": \"1.6\", \"version\": 1, \"components\": [" }
    {
        package = $1
        # Python names a package in several ways, a package URL in one.
        if ($3 == "pypi") { package = tolower(package); gsub(/[_.]/, "-", package) }
        url = "pkg:" $3 "/" escaped(package) "@" escaped($2) $4
        printf "%s\n{\"type\": \"library\", \"name\": \"%s\", \"version\": \"%s\", \"purl\": \"%s\"}", \
            separator, $1, $2, url
        separator = ","
    }
    END { print "\n]}" }'
