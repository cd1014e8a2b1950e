#!/usr/bin/env bash
# Set up a bare Debian 12 or 13 and run every check: lint, types and all tests.
#
#   ci/run.sh [PYTEST OPTIONS]
#
# Root is needed only where something is missing: Debian packages, a Docker daemon, its plug-ins, base
# images. What is there already is kept, so a second run goes to the checks within seconds. Another
# system is taken as it is: what apt-get cannot bring is named. WORKERS is the number of test
# processes, 3 unless set, because some wait more than they work.
#
# Leaves reports/: junit.xml, pytest.log, images.log. The last line printed is pytest's closing line, or
# the reason why the tests were not reached.
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null
export CI=true WORKERS=${WORKERS:-3}

case "${1:-}" in
    -h | --help)
        sed -n '2,14s/^# \{0,1\}//p' "$0"
        exit
        ;;
esac

step() { echo "ci: $SECONDS s: $*"; }
fail() {
    echo "ci: $*" >&2
    exit 1
}

install_packages() {
    local missing
    missing=$(FIO=1 ci/system.sh packages | tr '\n' ' ')
    command -v make >/dev/null || missing+='make '
    command -v git >/dev/null || missing+='git '
    [ -n "$missing" ] || return 0
    step "Debian packages"
    # shellcheck disable=SC2086  # a list of words
    ci/apt.sh $missing
}

# Tests that need containers wait for the lock (tests/containers/conftest.py); others run meanwhile.
make_images() {
    exec 9>reports/images.lock
    flock 9
    # The daemon outlives this, so it must not hold the lock.
    ci/docker.sh 9>&-
    ci/podman.sh 9>&-
    ci/base-images.sh 9>&-
    ci/images.sh 9>&-
}

. /etc/os-release
free=$(df --output=avail --block-size=1G . | tail -n 1 | tr -d ' ')
step "$PRETTY_NAME, $(nproc) cores, $free GiB free; a first run takes about 15 of them"
[ "$ID" = debian ] || step "Debian 12 and 13 are what this script sets up, $PRETTY_NAME is taken as it is"
mkdir -p reports
rm -f reports/junit.xml reports/pytest.log
install_packages

# Both wait for downloads most of the time. A process group of its own, to end it as a whole.
set -m
make_images >reports/images.log 2>&1 &
images=$!
set +m
trap 'kill -- "-$images" 2>/dev/null || true' EXIT
step "setting up .venv, and beside it the container images"
make --silent venv .sglang/.pins .helm/.pins || fail ".venv was not set up, the reason is above"
step "lint and types"
make lint || fail "lint or types, the reason is above"
step "tests"
status=0
ci/test.sh .venv "$@" || status=$?
if ! wait "$images"; then
    tail -n 20 reports/images.log >&2
    [ "$status" -ne 0 ] || fail "no container images — $(tail -n 1 reports/images.log)"
    tail -n 1 reports/pytest.log
fi
exit "$status"
