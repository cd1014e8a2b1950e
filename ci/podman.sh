#!/usr/bin/env bash
# Have podman here, with which the tests run the pods of the Helm chart.
#
#   ci/podman.sh          install what is missing, from Debian's packages
#   ci/podman.sh check    say what is missing; status 1 if anything is
#
# Root is needed only where something is missing. Nothing is configured: the tests bring their own
# settings and storage, and leave those of the machine alone.
set -euo pipefail
exec </dev/null
export DEBIAN_FRONTEND=noninteractive

say() { echo "podman: $*"; }
fail() {
    echo "podman: $*" >&2
    exit 1
}

missing() { # the names of Debian's packages
    local program
    for program in podman runc catatonit; do
        command -v "$program" >/dev/null || echo "$program"
    done
    for program in netavark aardvark-dns; do
        [ -x "/usr/lib/podman/$program" ] || [ -x "/usr/libexec/podman/$program" ] || echo "$program"
    done
}

mapfile -t packages < <(missing)
case "${1:-}" in
    check)
        [ "${#packages[@]}" -eq 0 ] || fail "missing: ${packages[*]} — as root: ci/podman.sh"
        ;;
    "")
        if [ "${#packages[@]}" -gt 0 ]; then
            [ "$(id -u)" -eq 0 ] || fail "missing — as root: apt-get install ${packages[*]}"
            say "installing ${packages[*]}"
            apt-get update -qq
            apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
        fi
        ;;
    *)
        sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac
say "$(podman --version | cut -d ' ' -f 3)"
