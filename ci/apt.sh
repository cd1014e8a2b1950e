#!/usr/bin/env bash
# Install Debian packages, as root.
#
#   ci/apt.sh PACKAGE...
#
# Says on standard error what it installs, or why it cannot.
set -euo pipefail
exec </dev/null
export DEBIAN_FRONTEND=noninteractive

fail() {
    echo "$*" >&2
    exit 1
}

command -v apt-get >/dev/null || fail "missing, under Debian's names of the packages: $*"
[ "$(id -u)" -eq 0 ] || fail "missing — as root: apt-get install $*"
echo "installing $*" >&2
apt-get update -qq
apt-get install -y -qq --no-install-recommends "$@" >/dev/null
