#!/bin/bash
# raise-hugepages.sh with the same arguments, and a restart of the kubelet where the number was raised: it
# counts the hugepages at its start.
#
# KUBELET_UNIT is systemd's name of the kubelet; without it nothing is restarted. Needs the host's
# process namespace. /state is kept while this pod lives: a restart that did not come about is made up.
# HOST_ROOT is where /sys, /proc and /state are, for tests.
set -euo pipefail
root=${HOST_ROOT:-}
count() { cat "$root"/sys/kernel/mm/hugepages/*/nr_hugepages; }

before=$(count)
status=0
bash "$(dirname "$0")/raise-hugepages.sh" "$@" || status=$?
[ "$before" = "$(count)" ] || touch "$root/state/raised"
if [ -n "${KUBELET_UNIT:-}" ] && [ -e "$root/state/raised" ]; then
    nsenter --target 1 --mount --uts --ipc --net --pid -- systemctl restart "$KUBELET_UNIT"
    rm "$root/state/raised"
    echo "hugepages: restarted $KUBELET_UNIT"
fi
exit "$status"
