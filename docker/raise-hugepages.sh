#!/bin/bash
# Have at least COUNT hugepages of 2 MiB on this host:  raise-hugepages.sh COUNT [prefer]
#
# Fewer is an error, and with `prefer` only said.
#
# Only raises, because others may use what is there. As root on the host, or in a privileged
# container. HUGEPAGES_FILE is the setting's file, for tests.
set -euo pipefail
want=${1:?how many hugepages of 2 MiB}
file=${HUGEPAGES_FILE:-/proc/sys/vm/nr_hugepages}
have=$(cat "$file")
if [ "$have" -ge "$want" ]; then
    echo "hugepages: $have of 2 MiB, $want wanted"
    exit 0
fi
echo "$want" >"$file"
got=$(cat "$file")
echo "hugepages: raised from $have to $got of 2 MiB, $want wanted"
if [ "$got" -lt "$want" ]; then
    echo "hugepages: memory is too fragmented for $want — set vm.nr_hugepages at boot" >&2
    [ "${2:-}" = prefer ] || exit 1
fi
