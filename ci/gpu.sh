#!/usr/bin/env bash
# Run what needs a GPU: the tests marked `gpu`, inside SGLang's image and around it.
#
#   ci/gpu.sh
#
# Needs an NVIDIA GPU with its driver, Docker with the NVIDIA container toolkit, and what ci/run.sh needs.
# SGLANG_IMAGE is the image that the library is added to, docker/sglang-gpu/Dockerfile's unless set.
# Leaves reports/gpu-containers.xml and reports/gpu-image.xml.
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null
export CI=true

fail() {
    echo "gpu: $*" >&2
    exit 1
}
[ -n "$(nvidia-smi --list-gpus 2>/dev/null)" ] || fail "nvidia-smi finds no GPU here"
docker info --format '{{json .Runtimes}}' 2>/dev/null | grep -q '"nvidia"' ||
    fail "Docker has no NVIDIA runtime — nvidia-ctk runtime configure --runtime=docker"

# An empty one is none.
[ -n "${SGLANG_IMAGE:-}" ] || unset SGLANG_IMAGE
ci/docker.sh
ci/base-images.sh
ci/images.sh connector objectstore sglang-gpu
make venv
mkdir -p reports
rm -f reports/gpu-*.xml
status=0

# The server on the GPU, from outside.
.venv/bin/python -m pytest -m gpu tests/containers --junitxml=reports/gpu-containers.xml || status=1

# The library's own tests with the CUDA torch, NIXL and Python of the image, which lacks only pytest.
mapfile -t files < <(grep -rlE 'mark\.gpu' tests --include='test_*.py' --exclude-dir=containers)
# shellcheck disable=SC2016  # for the shell in the container
docker run --rm --init --gpus all --user 0 --cap-add IPC_LOCK --shm-size 8g \
    --volume "$PWD:/project" --workdir /project --env CI --env SGLANG_HUGEPAGE_SIZE= \
    "hicache-nixl/sglang-gpu:${TAG:-local}" bash -euc '
        sh docker/pins.sh requirements.lock Tests >/tmp/pins.txt
        python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps \
            --target /tmp/packages --requirement /tmp/pins.txt
        export PYTHONPATH=/tmp/packages PYTHONDONTWRITEBYTECODE=1
        python3 -m pytest -m gpu -p no:cacheprovider --junitxml=reports/gpu-image.xml "$@"
    ' tests "${files[@]}" || status=1

[ ! -s reports/gpu-containers.xml ] || .venv/bin/python ci/summary.py reports/gpu-*.xml
exit "$status"
