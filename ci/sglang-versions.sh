#!/usr/bin/env bash
# Install the versions of SGLang in ci/sglang-versions.txt, each into a directory of its own.
#
#   ci/sglang-versions.sh VENV DIRECTORY
#
# Only SGLang's own package, 133 MB in all: what it imports comes from VENV. A version that is
# there already is kept.
set -euo pipefail
venv=$1 directory=$2
unfinished=$(mktemp -d)
trap 'rm -rf "$unfinished"' EXIT

mkdir -p "$directory"
grep '^sglang==' "$(dirname "$0")/sglang-versions.txt" | while read -r pin; do
    version=${pin#sglang==}
    [ ! -d "$directory/$version" ] || continue
    echo "installing SGLang $version into $directory/$version"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --ignore-requires-python --target "$unfinished/$version" "$pin"
    mv "$unfinished/$version" "$directory/$version"
done
