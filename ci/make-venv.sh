#!/usr/bin/env bash
# Make the virtual environment from requirements.lock.   ci/make-venv.sh DIRECTORY
#
# An environment of an interrupted run or of another lock is filled up, not made anew. The mark
# DIRECTORY/.pins is written last.
set -euo pipefail
venv=$1
here=$(dirname "$0")

"$here/system.sh" check
if [ ! -x "$venv/bin/python" ]; then
    python=$("$here/system.sh" python)
    echo "making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
total=$(grep -c '==' requirements.lock)
echo "installing $total pinned packages into $venv: 2.8 GB, some minutes"
# --no-deps: see the head of the lock. pip names each requirement once, as it fetches it.
"$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --progress-bar off \
    --requirement requirements.lock |
    awk -v total="$total" '
        /^(Collecting|Processing|Requirement already satisfied)/ {
            fetched = $0
            sub(/^(Collecting|Processing|Requirement already satisfied:) /, "", fetched)
            sub(/ .*/, "", fetched)
            sub(/.*\//, "", fetched)
            printf "  %3d/%d %s\n", ++count, total, fetched
        }
        /^Installing collected packages/ { print "  unpacking" }
        { fflush() }'

build=$("$venv/bin/python" -c 'import torch; print(torch.version.cuda or "cpu")' 2>&1 | tail -n 1)
if [ "$build" != cpu ]; then
    "$venv/bin/python" -m pip uninstall --quiet --yes torch
    echo "torch is not a CPU build ($build) — put PyTorch's CPU wheel index into" \
        "PIP_EXTRA_INDEX_URL and run again: make venv" >&2
    exit 1
fi
touch "$venv/.pins"
