#!/usr/bin/env bash
# Build images, those that need no GPU unless named: connector, objectstore, sglang-cpu.
#
#   ci/images.sh [IMAGE...]
#
# Where the package index offers this machine a CPU build of torch and containers would get the CUDA
# build (gigabytes), its wheel is put into docker/wheels first, from which builds take it. TAG is the
# tag, `local` unless set; SGLANG_IMAGE what sglang-gpu is built on.
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null
# Docker 20.10's client takes the older builder unless told.
export DOCKER_BUILDKIT=1
images=("$@")
[ "${#images[@]}" -gt 0 ] || images=(connector objectstore sglang-cpu)
revision=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)

provide_torch() {
    local pin python
    pin=$(grep -m 1 '^torch==' requirements.lock)
    # A CPU wheel says so in its version, torch-2.13.0+cpu-…; an index of CPU wheels is fine, too.
    ! compgen -G "docker/wheels/${pin/==/-}*cpu*.whl" >/dev/null || return 0
    [ -z "${PIP_EXTRA_INDEX_URL:-}" ] || return 0
    echo "images: fetching the wheel of $pin for $(uname -m)"
    python=$(ci/system.sh python)
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    "$python" -m venv "$work/venv"
    "$work/venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps \
        --dest "$work" "$pin"
    if compgen -G "$work/*cpu*.whl" >/dev/null; then
        cp "$work"/torch-*.whl docker/wheels/
    else
        echo "images: this index has no CPU build of torch — set PIP_EXTRA_INDEX_URL to one" >&2
        exit 1
    fi
}

for image in "${images[@]}"; do
    [ "$image" != sglang-cpu ] || provide_torch
    echo "images: building $image"
    docker build --quiet --file "docker/$image/Dockerfile" --build-arg "REVISION=$revision" \
        --build-arg PIP_EXTRA_INDEX_URL --build-arg SGLANG_IMAGE \
        --tag "hicache-nixl/$image:${TAG:-local}" .
done
