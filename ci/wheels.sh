#!/usr/bin/env bash
# The library's wheel, and pinned ones of what an image of SGLang lacks for it, for its Python.
#
#   ci/wheels.sh IMAGE DIRECTORY
#
# For connector.install = wheel of the Helm chart (docs/kubernetes.md): a pod of that image finds them
# by PYTHONPATH, so what the image has is not among them. The image is pulled where it is not here. An
# image with a version that does not fit is refused. Wheels that the directory had are removed.
set -euo pipefail
[ "$#" -eq 2 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2 && exit 2; }
mkdir -p "$2"
image=$1 directory=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
exec </dev/null
# Docker 20.10's client takes the older builder unless told.
export DOCKER_BUILDKIT=1

# Not into the directory at once: a failure leaves what it had.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "wheels: what $image lacks"
docker build --progress=plain --file docker/sglang-gpu/Dockerfile --target wheels \
    --build-arg "SGLANG_IMAGE=$image" --output "type=local,dest=$work/wheels" . >"$work/log" 2>&1 || {
    tail -n 30 "$work/log" >&2
    echo "wheels: none for $image, the reason is above" >&2
    exit 1
}
rm -f "$directory"/*.whl
cp "$work"/wheels/*.whl "$directory"
chmod 644 "$directory"/*.whl
ls "$directory"
