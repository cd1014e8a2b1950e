#!/bin/bash
# raise-hugepages.sh, and a restart of the kubelet where the number was raised: it counts the hugepages
# at its start. Takes the same arguments.
#
# KUBELET_UNIT is systemd's name of the kubelet; without it nothing is restarted. Needs the host's
# process namespace. /state is kept while this pod lives: a restart that did not come about is made up.
set -euo pipefail
count() { cat /sys/kernel/mm/hugepages/*/nr_hugepages; }

before=$(count)
status=0
bash "$(dirname "$0")/raise-hugepages.sh" "$@" || status=$?
[ "$before" = "$(count)" ] || touch /state/raised
if [ -n "${KUBELET_UNIT:-}" ] && [ -e /state/raised ]; then
    nsenter --target 1 --mount --uts --ipc --net --pid -- systemctl restart "$KUBELET_UNIT"
    rm /state/raised
    echo "hugepages: restarted $KUBELET_UNIT"
fi
exit "$status"
