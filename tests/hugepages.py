"""Real hugepages and hugetlb cgroups for tests, given back afterwards.

The kernel's pools are one for the whole machine: a lock file makes the tests that use them take
turns, across workers and runs. A pool is only ever raised.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

MIB = 1 << 20
SIZE = 2 * MIB
LOCK = FileLock(Path(tempfile.gettempdir()) / "hicache-nixl-hugepages.lock")
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
again() { for _ in $(seq 50); do "$@" 2>/dev/null && return; sleep 0.1; done; return 1; }
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
        before = int(knob.read_text())
        if pages > free(size):
            if not os.access(knob, os.W_OK):
                pytest.skip(f"{knob} cannot be written: raising it needs root")
            knob.write_text(str(before + pages - free(size)))
        try:
            if pages > free(size):
                pytest.skip(f"the kernel found no {pages} free hugepages of {size >> 10} KiB")
            yield
        finally:
            if int(knob.read_text()) != before:
                knob.write_text(str(before))


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
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("making a cgroup needs root and unshare(1)")
    directory.mkdir()
    name = f"hicache-nixl-test-{os.getpid()}"
    reasons = []
    for version in versions:
        script = _COMMON + (_V1 if version == 1 else _V2)
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, "sh", directory, name, str(limit), *command],
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
