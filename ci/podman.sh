#!/usr/bin/env bash
# Have podman here, with which the tests run the pods of the Helm chart.
#
#   ci/podman.sh          install what is missing, from Debian's packages
#   ci/podman.sh check    say what is missing; status 1 if anything is
#
# Root is needed only where something is missing. Nothing is configured: the tests bring their own
# settings and storage, and leave those of the machine alone.
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null

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
        [ "${#packages[@]}" -eq 0 ] || {
            echo "podman: missing: ${packages[*]} — as root: ci/podman.sh" >&2
            exit 1
        }
        ;;
    "")
        [ "${#packages[@]}" -eq 0 ] || ci/apt.sh "${packages[@]}"
        ;;
    *)
        sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac
echo "podman: $(podman --version | cut -d ' ' -f 3)"
