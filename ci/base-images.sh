#!/usr/bin/env bash
# Have the base images of docker/ here, also where no container registry can be reached.
#
#   ci/base-images.sh           what is missing is pulled; what cannot be pulled is made
#   ci/base-images.sh --list    print each image with where it came from
#
# A made image is a look-alike from the distribution's packages: Debian by mmdebstrap, and Python as
# Debian's own. It trusts the certificate authorities that this machine's administrator added, and it
# has the label `hicache-nixl.look-alike`; an image with this label is for tests, not for publishing.
# An image that is here, whatever it is, is kept: `docker rmi` it to have it pulled or made again.
# Making needs root. PULL_TIMEOUT is how long a registry may take to answer, in seconds.
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null
export DEBIAN_FRONTEND=noninteractive

debian=debian:bookworm-slim
python=python:3.11-slim-bookworm
label=hicache-nixl.look-alike
timeout=${PULL_TIMEOUT:-600}

say() { echo "base images: $*"; }
fail() {
    echo "base images: $*" >&2
    exit 1
}
is_here() { docker image inspect "$1" >/dev/null 2>&1; }
origin() { # of an image that is here
    local made
    made=$(docker image inspect --format "{{index .Config.Labels \"$label\"}}" "$1")
    echo "${made:-a registry}"
}

no_registry=
pull() {
    [ -z "$no_registry" ] || return 1
    say "pulling $1"
    # A registry that is there answers with its version within seconds.
    timeout "$timeout" docker pull --quiet "$1" 2>"$work/pull" && return 0
    say "$1 cannot be pulled: $(tail -n 1 "$work/pull")"
    no_registry=1
    return 1
}

make_debian() {
    command -v mmdebstrap >/dev/null || ci/apt.sh mmdebstrap
    say "making $debian from Debian's packages"
    local authorities=/usr/local/share/ca-certificates hooks=()
    if compgen -G "$authorities/*.crt" >/dev/null; then
        # shellcheck disable=SC2016  # for the shell of the hook
        hooks=(--customize-hook="copy-in $authorities /usr/local/share"
            --customize-hook='chroot "$1" update-ca-certificates >/dev/null')
    fi
    # usr-is-merged instead of usrmerge, which would bring Perl's library. apt keeps nothing that a
    # layer would carry, as in the original.
    mmdebstrap --variant=minbase --include=ca-certificates,usr-is-merged \
        --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
        --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-include=/usr/share/doc/*/copyright' \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --aptopt='APT::Install-Recommends "false"' \
        --aptopt='Dir::Cache::pkgcache ""' --aptopt='Dir::Cache::srcpkgcache ""' \
        --aptopt='DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb || true"; }' \
        "${hooks[@]}" bookworm "$work/debian.tar" >"$work/log" 2>&1 || {
        tail -n 20 "$work/log" >&2
        fail "mmdebstrap did not make $debian"
    }
    # Python programs bring certificates of their own; the variables point them to the system's.
    docker import --change 'CMD ["bash"]' \
        --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
        --change 'ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt' \
        --change 'ENV REQUESTS_CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt' \
        --change 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt' \
        --change "LABEL $label=mmdebstrap" \
        "$work/debian.tar" "$debian" >/dev/null
}

make_python() {
    have "$debian" make_debian
    say "making $python from $debian"
    # An environment in /usr/local has the original's places: python and pip in /usr/local/bin,
    # packages in /usr/local/lib/python3.11/site-packages. Python's headers belong to the original,
    # the libraries that Debian packs with them do not.
    docker build --quiet --tag "$python" --label "$label=mmdebstrap + Debian's python3" - \
        >/dev/null <<DOCKERFILE
FROM $debian
RUN apt-get update \\
 && apt-get install -y --no-install-recommends python3-venv \\
 && cd /tmp && apt-get download libpython3.11-dev \\
 && dpkg --fsys-tarfile libpython3.11-dev_*.deb | tar -x -C / ./usr/include \\
 && rm -rf /tmp/* /var/lib/apt/lists/* \\
 && python3 -m venv /usr/local
ENV PYTHONUNBUFFERED=1
CMD ["python3"]
DOCKERFILE
}

have() { # IMAGE FUNCTION_THAT_MAKES_IT
    is_here "$1" || pull "$1" || "$2"
}

case "${1:-}" in
    --list) ;;
    "")
        work=$(mktemp -d)
        trap 'rm -rf "$work"' EXIT
        have "$debian" make_debian
        have "$python" make_python
        ;;
    *)
        sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac
for image in "$debian" "$python"; do
    if is_here "$image"; then
        say "$image from $(origin "$image")"
    else
        say "$image is not here"
    fi
done
