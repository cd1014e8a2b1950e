#!/usr/bin/env bash
# Build a project's wheel and install it into a virtual environment.
#
#   ci/install-wheel.sh VENV PROJECT_DIRECTORY WHEEL_DIRECTORY
#
# Builds from a copy: setuptools leaves build/ and *.egg-info beside the sources, and a module
# deleted since would come back from there.
set -euo pipefail
venv=$1 project=$2 wheels=$3
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT

for part in pyproject.toml README.md LICENSE src; do
    [ ! -e "$project/$part" ] || cp -r "$project/$part" "$copy/"
done
rm -rf "$copy"/src/*.egg-info
rm -rf "$wheels" && mkdir -p "$wheels"
"$venv/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
    --no-build-isolation --wheel-dir "$wheels" "$copy"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-index \
    --force-reinstall "$wheels"/*.whl
echo "installed $(basename "$wheels"/*.whl)"
