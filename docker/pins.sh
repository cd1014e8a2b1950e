#!/bin/sh
# Print the pins of paragraphs of requirements.lock.
#
#   docker/pins.sh LOCK HEADING...
#
# A heading is the comment above a paragraph, from its beginning; enough of it is enough.
set -eu
lock=$1
shift
for heading; do
    awk -v heading="# $heading" '
        /^#/ { inside = index($0, heading) == 1 }
        inside && /==/ { print; found = 1 }
        END { exit !found }' "$lock" || {
        echo "pins: $lock has no paragraph \"$heading\" with pins" >&2
        exit 1
    }
done
