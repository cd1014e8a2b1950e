#!/usr/bin/env bash
# What the project needs from the operating system, and which Debian package brings it.
#
#   ci/system.sh python     print the Python interpreter the virtual environment is made with
#   ci/system.sh check      say what is missing, a line each, with its remedy; status 1 if anything is
#   ci/system.sh packages   print the Debian packages that bring what is missing
#
# PYTHON=/path/to/python chooses an interpreter; FIO=1 makes fio, which only measurements use, a need.
set -euo pipefail

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3}; do
        # Run it: pyenv's shim of an interpreter that is not active exists and fails.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

python=$(find_python || true)

has_python() { [ -n "$python" ]; }
has_venv() { has_python && "$python" -c 'import ensurepip, venv' 2>/dev/null; }
has_python_header() {
    has_python && "$python" -c '
import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file())'
}
has_compiler() { command -v g++ >/dev/null; }
has_ninja() { command -v ninja >/dev/null; }
has_openssl_header() {
    has_compiler && echo '#include <openssl/sha.h>' | g++ -E -x c++ - >/dev/null 2>&1
}
has_openssl() { command -v openssl >/dev/null; }
# What is below is used as root alone: the tests of failing disks skip without.
is_root() { [ "$(id -u)" = 0 ]; }
has_util_linux() { ! is_root || { command -v setpriv && command -v fsfreeze && command -v unshare; } >/dev/null; }
has_mount() { ! is_root || { command -v mount && command -v losetup; } >/dev/null; }
has_e2fsprogs() { ! is_root || { command -v mkfs.ext4 && command -v e2fsck; } >/dev/null; }
has_fio() { [ "${FIO:-0}" != 1 ] || command -v fio >/dev/null; }

# test | Debian package | what it is
needs='
has_python|python3|Python 3.11 or newer
has_venv|python3-venv|the venv module of Python
has_python_header|python3-dev|the header Python.h
has_compiler|g++|a C++ compiler
has_ninja|ninja-build|ninja
has_openssl_header|libssl-dev|the header openssl/sha.h
has_openssl|openssl|openssl
has_util_linux|util-linux|setpriv, fsfreeze or unshare
has_mount|mount|mount or losetup
has_e2fsprogs|e2fsprogs|mkfs.ext4 or e2fsck
has_fio|fio|fio
'

each_missing() { # CALLBACK, called with package and name
    local test package name
    while IFS='|' read -r test package name; do
        [ -n "$test" ] || continue
        "$test" || "$1" "$package" "$name"
    done <<<"$needs"
}

tell() { echo "missing: $2 — install it with: apt-get install $1" >&2; }
name() { echo "$1"; }

case "${1:-}" in
    python)
        has_python || { each_missing tell; exit 1; }
        echo "$python"
        ;;
    check)
        each_missing tell
        [ -z "$(each_missing name)" ]
        ;;
    packages)
        each_missing name
        ;;
    *)
        sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac
