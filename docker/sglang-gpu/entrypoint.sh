#!/bin/bash
# Say what this container may use, then serve SGLang with its KV cache in the configured store.
#
#   entrypoint SGLANG_FLAG...     python3 -m sglang.launch_server, the flags of `hicache-nixl
#                                 launch-args`, then these
#   entrypoint PROGRAM ARGUMENT…  that program instead
#
# HICACHE_NIXL_HUGEPAGES=required makes a shortage an error; otherwise ordinary pages are used.
set -euo pipefail

say() { echo "container: $*"; }
fail() {
    say "$*" >&2
    exit 1
}
first_of() { # FILE..., the content of the first that is there
    local file
    for file; do
        [ ! -r "$file" ] || { cat "$file" && return; }
    done
}

check_gpus() {
    local count advice=
    # Where the driver does not fit it fails, and says so on the same stream.
    count=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c '^GPU' || true)
    [ "$count" -gt 0 ] || advice=' — run with --gpus all and the NVIDIA container toolkit'
    say "GPUs: $count$advice"
}

check_memlock() {
    local limit
    limit=$(ulimit -l)
    if [ "$limit" = unlimited ]; then
        say "memlock: unlimited"
    else
        say "memlock: $limit KiB — locking more needs --ulimit memlock=-1"
    fi
}

check_hugepages() {
    local kib pages free limit
    case "${SGLANG_HUGEPAGE_SIZE:-}" in
        2MB) kib=2048 pages=2MB ;;
        1GB) kib=1048576 pages=1GB ;;
        "") say "hugepages: not asked for — SGLANG_HUGEPAGE_SIZE=2MB" && return ;;
        *) fail "SGLANG_HUGEPAGE_SIZE is ${SGLANG_HUGEPAGE_SIZE} — set it to 2MB or 1GB" ;;
    esac
    free=$(first_of "${HUGEPAGES_ROOT:-/sys/kernel/mm/hugepages}/hugepages-${kib}kB/free_hugepages")
    # A limit below what is used is not refused when memory is mapped, but kills at the first touch.
    limit=$(first_of "/sys/fs/cgroup/hugetlb.$pages.max" \
        "/sys/fs/cgroup/hugetlb/hugetlb.$pages.limit_in_bytes")
    say "hugepages: ${free:-0} of $pages free, limit of the container ${limit:-none}"
    [ "${free:-0}" -gt 0 ] && [ "${limit:-max}" != 0 ] && return
    if [ "${HICACHE_NIXL_HUGEPAGES:-}" = required ]; then
        fail "no hugepages of $pages, and HICACHE_NIXL_HUGEPAGES is required — on the host, as root:" \
            "echo N > /sys/kernel/mm/hugepages/hugepages-${kib}kB/nr_hugepages"
    fi
    say "hugepages: ordinary pages will be used"
}

check_gpus
check_memlock
check_hugepages
say "/dev/shm: $(df --output=size --block-size=1M /dev/shm | tail -n 1 | tr -d ' ') MiB"

if [ "$#" -gt 0 ] && [ "${1#-}" = "$1" ]; then
    exec "$@"
fi
hicache-nixl probe
flags=$(hicache-nixl launch-args)
eval "storage=($flags)"
# shellcheck disable=SC2154  # eval assigned it
exec python3 -m sglang.launch_server --host 0.0.0.0 --port 30000 "${storage[@]}" "$@"
