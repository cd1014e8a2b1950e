#!/usr/bin/env bash
# Run the tests.   ci/test.sh VENV [PYTEST OPTIONS]
#
# Leaves reports/junit.xml and reports/pytest.log. Says what ran in which suite and what skipped and
# why; the last line printed is pytest's closing line. WORKERS is the number of processes.
set -euo pipefail
venv=$1
shift
mkdir -p reports
rm -f reports/junit.xml
status=0
# Temporary files on the disk of the project: /tmp may be memory, which takes no O_DIRECT.
"$venv/bin/python" -m pytest -n "${WORKERS:-2}" --dist worksteal \
    --basetemp=reports/tmp --override-ini tmp_path_retention_policy=failed \
    --junitxml=reports/junit.xml --durations=10 "$@" | tee reports/pytest.log || status=$?
if [ -s reports/junit.xml ]; then
    "$venv/bin/python" ci/summary.py reports/junit.xml
    tail -n 1 reports/pytest.log
fi
exit "$status"
