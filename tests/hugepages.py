"""Real hugepages and hugetlb cgroups for tests, given back afterwards.

The kernel's pools are one for the whole machine: a lock file makes the tests that use them take
turns, across workers and runs. A pool is only ever raised. If the process that raised it is killed,
the next one that uses the pools, or the watcher of a killed run, gives the pages back.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from hicache_nixl import memory_limits
from hugepage_notes import LOCK, note, restore_locked

MIB = 1 << 20
SIZE = 2 * MIB
CANNOT = 77

# Lines of /proc/self/mountinfo.
V1_MOUNT = "63 43 0:39 {root} /sys/fs/cgroup/hugetlb rw shared:9 - cgroup cgroup rw,hugetlb\n"
V2_MOUNT = "30 24 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"

# A removed cgroup is freed a little later and keeps its controller until then, so that moving the
# controller between v1 and v2 takes patience.
_COMMON = r"""
set -u
directory=$1 name=$2 limit=$3; shift 3
cannot() { echo "$*" >&2; exit 77; }
again() { for _ in $(seq 150); do "$@" 2>/dev/null && return; sleep 0.1; done; return 1; }
inside() { sh -c 'echo $$ > "$0/cgroup.procs" && exec "$@"' "$directory/$name" "$@"; }
"""

# A v1 hierarchy that was busy at its last unmount stays behind; mounting it once more ends it.
_V1 = r"""
attach() { mount -t cgroup -o hugetlb hugetlb "$directory"; }
detached() { ! grep -q '^[1-9][0-9]*:\([^:]*,\)\?hugetlb[,:]' /proc/self/cgroup; }
detach() { detached || { attach; umount "$directory"; detached; }; }
detached; before=$?
again attach || cannot "mount: $(attach 2>&1)"
mkdir "$directory/$name" || cannot "no new cgroup"
echo "$limit" > "$directory/$name/hugetlb.2MB.limit_in_bytes"
inside "$@"; code=$?
again rmdir "$directory/$name"
umount "$directory"
[ $before = 1 ] || again detach
exit $code
"""

_V2 = r"""
mount -t cgroup2 cgroup2 "$directory" || cannot "no cgroup v2"
again grep -qw hugetlb "$directory/cgroup.controllers" || cannot "hugetlb is on another hierarchy"
grep -qw hugetlb "$directory/cgroup.subtree_control"; before=$?
sh -c 'echo +hugetlb > "$0"' "$directory/cgroup.subtree_control" || cannot "v2 refuses hugetlb"
mkdir "$directory/$name" || cannot "no new cgroup"
echo "$limit" > "$directory/$name/hugetlb.2MB.max"
inside "$@"; code=$?
again rmdir "$directory/$name"
[ $before = 0 ] || sh -c 'echo -hugetlb > "$0"' "$directory/cgroup.subtree_control"
exit $code
"""


# Takes other processes into the cgroup it is in, until its input ends. They outlive the cgroup.
_JOIN = r"""
root=$0
cgroup=$(grep -l "^$$\$" "$root"/hicache-nixl-test-*/cgroup.procs)
for process; do echo "$process" > "$cgroup"; done
echo joined
cat
for process in $(cat "$cgroup"); do echo "$process" > "$root/cgroup.procs" 2>/dev/null; done
"""


def write(root: Path, files: Mapping[str, object]) -> None:
    """Files below a made-up root directory, each with a final newline."""
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")


def write_pool(root: Path, size: int, **counters: int) -> None:
    """A made-up pool of hugepages of `size` bytes; counters not given are 0."""
    names = ("nr", "free", "resv", "surplus", "nr_overcommit")
    directory = f"sys/kernel/mm/hugepages/hugepages-{size >> 10}kB"
    write(root, {f"{directory}/{name}_hugepages": counters.get(name, 0) for name in names})


def pool(size: int = SIZE) -> Path:
    """The kernel's directory for hugepages of `size` bytes."""
    return Path(f"/sys/kernel/mm/hugepages/hugepages-{size >> 10}kB")


def count(name: str, size: int = SIZE) -> int:
    """A counter of the pool, for instance `free_hugepages`."""
    return int((pool(size) / name).read_text())


def free(size: int = SIZE) -> int:
    """Pages that can be mapped now."""
    return count("free_hugepages", size) - count("resv_hugepages", size)


@contextlib.contextmanager
def raised(pages: int, size: int = SIZE) -> Iterator[None]:
    """Have the machine's hugepages to oneself, at least `pages` of them free."""
    with LOCK:
        knob = pool(size) / "nr_hugepages"
        if not knob.exists():
            pytest.skip(f"this kernel has no hugepages of {size >> 10} KiB")
        restore_locked()
        # What a process had that is about to end is on loan, and goes by itself.
        before = count("nr_hugepages", size) - count("surplus_hugepages", size)
        missing = max(0, pages - free(size))
        total = count("nr_hugepages", size) + missing
        raises = os.access(knob, os.W_OK)
        if missing and not raises:
            pytest.skip(f"raising {knob} needs root — run, as root: {_command(total, size)}")
        try:
            if raises:
                note(knob, before)
            if missing:
                knob.write_text(str(total))
            if pages > free(size):
                pytest.skip(
                    f"the kernel found no {pages} free hugepages of {size >> 10} KiB — before "
                    f"memory is fragmented, run, as root: {_command(total, size)}"
                )
            yield
        finally:
            restore_locked()


def _command(total: int, size: int) -> str:
    if size == memory_limits.default_hugepage_size():
        return f"sysctl -w vm.nr_hugepages={total}"
    return f"echo {total} > {pool(size) / 'nr_hugepages'}"


def run_limited(
    versions: Sequence[int],
    limit: int,
    command: Sequence[str],
    directory: Path,
    env: Mapping[str, str],
) -> subprocess.CompletedProcess[str]:
    """Run `command` in a cgroup with a hugetlb limit of `limit` bytes on 2 MiB pages.

    Takes the first of the cgroup `versions` that works here, skips where none does. The mount, on
    `directory`, is private to the child. Call it with the machine's hugepages held.
    """
    reasons = []
    for version in versions:
        done = subprocess.run(
            [*_in_cgroup(version, limit, directory), *command],
            capture_output=True,
            text=True,
            timeout=300,
            env=dict(env),
            check=False,
        )
        if done.returncode != CANNOT and not done.stderr.startswith("unshare:"):
            return done
        reasons.append(f"v{version}: {done.stderr.strip()}")
    pytest.skip(f"no hugetlb cgroup can be made here ({'; '.join(reasons)})")


@contextlib.contextmanager
def limited(pids: Sequence[int], limit: int, directory: Path) -> Iterator[None]:
    """Have running processes under a hugetlb limit of `limit` bytes on 2 MiB pages for a block.

    It is set on their own cgroup where that has one, and stays; else they are moved for so long to
    a new one, by a mount on `directory` that nobody else sees. Use it with the machine's hugepages
    held.
    """
    own = _own_limit(pids[0])
    if own is not None:
        own.write_text(str(limit))
        yield
        return
    reasons = []
    for version in (2, 1):
        command = [*_in_cgroup(version, limit, directory), "sh", "-c", _JOIN]
        with subprocess.Popen(
            [*command, str(directory), *map(str, pids)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as joined:
            assert joined.stdin is not None
            assert joined.stdout is not None
            assert joined.stderr is not None
            if joined.stdout.readline():
                try:
                    yield
                finally:
                    joined.stdin.close()
                    joined.wait()
                return
            reasons.append(f"v{version}: {joined.stderr.read().strip()}")
    pytest.skip(f"no hugetlb cgroup can be made here ({'; '.join(reasons)})")


def _own_limit(pid: int) -> Path | None:
    """The file of the hugetlb limit of a process's own cgroup, if that can be set."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        version = 1 if "hugetlb" in names.split(",") else 2
        if version == 2 and number != "0":
            continue
        mounted = memory_limits._mount(version, "hugetlb", Path("/"))
        if mounted is not None and path != "/":
            name = f"hugetlb.2MB.{'limit_in_bytes' if version == 1 else 'max'}"
            file = mounted[0] / path.lstrip("/") / name
            if os.access(file, os.W_OK):
                return file
    return None


def _in_cgroup(version: int, limit: int, directory: Path) -> list[str]:
    """What a command is put behind to run in a new cgroup with this limit. CANNOT if there is
    none; skips where it cannot even be tried."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("making a cgroup needs root and unshare(1)")
    directory.mkdir(exist_ok=True)
    script = _COMMON + (_V1 if version == 1 else _V2)
    name = f"hicache-nixl-test-{os.getpid()}"
    return ["unshare", "--mount", "sh", "-c", script, "sh", str(directory), name, str(limit)]
