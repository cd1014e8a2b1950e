#!/bin/bash
# Have at least COUNT hugepages on this host.
#
#   raise-hugepages.sh [--size 2MB|1GB] [--numa] [--or-less] COUNT
#
# --size     of a page, 2MB unless given
# --numa     COUNT is spread evenly over the NUMA nodes, rounded up
# --or-less  a shortage is said and no error
#
# Only raises, because others may use what is there, and leaves the host a twentieth of its memory.
# As root on the host, or in a privileged container. HOST_ROOT is where /sys and /proc are, for tests.
set -euo pipefail
size=2MB numa='' or_less=''
root=${HOST_ROOT:-}

say() { echo "hugepages: $*"; }
fail() {
    say "$*" >&2
    exit 1
}
usage() {
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
}
sum() { # FILE..., the sum of the numbers in them
    local file number total=0
    for file; do
        read -r number <"$file"
        total=$((total + number))
    done
    echo "$total"
}
memory() { # NAME, KiB of /proc/meminfo
    awk -v name="$1:" '$1 == name { print $2 }' "$root/proc/meminfo"
}

while [ $# -gt 1 ]; do
    case $1 in
        --size) size=$2 && shift ;;
        --numa) numa=1 ;;
        --or-less) or_less=1 ;;
        *) usage ;;
    esac
    shift
done
[[ ${1:-} =~ ^[0-9]{1,12}$ ]] || usage
want=$1
case $size in
    2MB) kib=2048 ;;
    1GB) kib=1048576 ;;
    *) fail "--size is $size — write 2MB or 1GB" ;;
esac

setting=hugepages/hugepages-${kib}kB/nr_hugepages
places=("$root/sys/kernel/mm/$setting")
[ -z "$numa" ] || places=("$root"/sys/devices/system/node/node[0-9]*/"$setting")
[ -e "${places[0]}" ] || fail "this kernel has no hugepages of $size${numa:+ on NUMA nodes}"

# What each place lacks, and what the host can give.
each=$(((want + ${#places[@]} - 1) / ${#places[@]}))
lacking=0
for place in "${places[@]}"; do
    have=$(sum "$place")
    [ "$have" -ge "$each" ] || lacking=$((lacking + each - have))
done
before=$(sum "${places[@]}")
if [ "$lacking" -eq 0 ]; then
    say "$before of $size, $want wanted"
    exit 0
fi
room=$((($(memory MemAvailable) - $(memory MemTotal) / 20) / kib))
[ "$room" -gt 0 ] || room=0
if [ "$room" -lt "$lacking" ]; then
    # The kernel would take all memory that there is for them.
    [ -n "$or_less" ] || fail "$before of $size, $want wanted, and this host has memory for $room more:" \
        "ask for less, or free memory; nothing was changed"
    each=$((each - (lacking - room + ${#places[@]} - 1) / ${#places[@]}))
fi

# Free memory in one piece, then take it. Read again right before: another may be raising, too.
echo 1 >"$root/proc/sys/vm/compact_memory" || say "memory was not compacted"
for place in "${places[@]}"; do
    [ "$(sum "$place")" -ge "$each" ] || echo "$each" >"$place"
done

say "raised from $before to $(sum "${places[@]}") of $size, $want wanted"
each=$(((want + ${#places[@]} - 1) / ${#places[@]}))
short=''
for place in "${places[@]}"; do
    have=$(sum "$place")
    [ "$have" -ge "$each" ] || short+="${place#"$root"} is $have, "
done
[ -n "$short" ] || exit 0
[ -n "$or_less" ] || fail "${short}memory is too fragmented for $want — reserve them at boot with" \
    "hugepagesz=${size%B} hugepages=$want"
say "${short}ordinary pages will be used for the rest"
