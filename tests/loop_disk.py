"""A disk that fails on demand: ext4 on a loop device of its own.

    with LoopDisk(tmp_path, mib=96) as disk:
        store in disk.place
        with disk.failing(): ...        # EIO for every block
        with disk.stalled(): ...        # reads and writes hang
        with disk.frozen(): ...         # writes hang
        disk.break_down(); ...; disk.repair()    # read-only, as after an error of the file system

Whatever was done to it is undone at the end.
"""

import contextlib
import errno
import fcntl
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_LOOP_SET_STATUS64 = 0x4C04
_LOOP_GET_STATUS64 = 0x4C05
_STATUS_BYTES = 232
_SIZE_LIMIT_AT = 32
_BLKIO = Path("/sys/fs/cgroup/blkio")
_STALLED_BYTES_PER_S = 1


def run(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )


class LoopDisk:
    """Skips the test where a loop device cannot be had.

    Args:
        directory: for the image and the mount point.
        journal: without one, errors of the device leave the file system as it is.
    """

    def __init__(self, directory: Path, *, mib: int = 96, journal: bool = True) -> None:
        self.place = directory / "disk"
        self._image = directory / "disk.img"
        self._mib = mib
        self._journal = journal
        self._device = ""

    def __enter__(self) -> "LoopDisk":
        if os.geteuid() != 0:
            pytest.skip("only root may mount a loop device")
        self.place.mkdir()
        with self._image.open("wb") as file:
            file.truncate(self._mib << 20)
        features = [] if self._journal else ["-O", "^has_journal"]
        try:
            made = run("mkfs.ext4", "-q", "-F", "-m", 0, *features, self._image)
            bound = run("losetup", "-f", "--show", self._image)
        except FileNotFoundError as error:
            pytest.skip(f"no loop device with ext4 here: {error}")
        self._device = bound.stdout.strip()
        if made.returncode or bound.returncode or not self._mount():
            self.__exit__()
            pytest.skip(f"no loop device with ext4 here: {made.stderr}{bound.stderr}")
        return self

    def __exit__(self, *_: object) -> None:
        run("fsfreeze", "-u", self.place)
        if self._device:
            with contextlib.suppress(OSError):
                self._limit(0)
        while run("umount", "-l", self.place).returncode == 0:
            pass
        if self._device:
            run("losetup", "-d", self._device)

    def _mount(self) -> bool:
        how = "remount-ro" if self._journal else "continue"
        return run("mount", "-o", f"errors={how}", self._device, self.place).returncode == 0

    # -- faults -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def full(self, leave: int = 0) -> Iterator[None]:
        """No more than `leave` bytes are free."""
        filler = self.place / "filler"
        with filler.open("wb", buffering=0) as file:  # nothing is left to fail at its close
            disk = os.statvfs(self.place)
            free = disk.f_bavail * disk.f_frsize
            with contextlib.suppress(OSError):  # others may have taken it meanwhile
                os.posix_fallocate(file.fileno(), 0, free - max(leave, 1 << 20))
            file.seek(0, os.SEEK_END)
            with contextlib.suppress(OSError):
                while leave == 0:
                    file.write(bytes(1 << 12))
        try:
            yield
        finally:
            filler.unlink()

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Every block is beyond the end of the device: EIO at once."""
        self._limit(65536)
        try:
            yield
        finally:
            self._limit(0)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """What writes, or makes a file, hangs."""
        frozen = run("fsfreeze", "-f", self.place)
        assert frozen.returncode == 0, frozen.stderr
        try:
            yield
        finally:
            run("fsfreeze", "-u", self.place)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """What this process reads from the device or writes to it hangs."""
        if not _BLKIO.is_dir():
            pytest.skip("needs the blkio controller of cgroup v1")
        group = _BLKIO / f"hicache-nixl-test-{os.getpid()}"
        home = next(
            line.split(":")[2].strip()
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if "blkio" in line.split(":")[1].split(",")
        )
        device = Path(self._device).stat().st_rdev
        numbers = f"{os.major(device)}:{os.minor(device)}"
        group.mkdir()
        (group / "cgroup.procs").write_text(str(os.getpid()))

        def throttle(rate: int) -> None:
            for way in ("read", "write"):
                (group / f"blkio.throttle.{way}_bps_device").write_text(f"{numbers} {rate}")

        throttle(_STALLED_BYTES_PER_S)
        try:
            yield
        finally:
            throttle(0)
            (_BLKIO / home.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
            end = time.monotonic() + 10
            while time.monotonic() < end:
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.05)

    def break_down(self) -> None:
        """The file system meets an error and goes read-only."""
        trigger = Path("/sys/fs/ext4") / Path(self._device).name / "trigger_fs_error"
        if not trigger.exists():
            pytest.skip("this kernel has no way to make ext4 fail")
        trigger.write_text("tried by a test")
        with pytest.raises(OSError) as failed:  # noqa: PT011 - looked at below
            (self.place / "x").touch()
        assert failed.value.errno == errno.EROFS

    def repair(self, seconds: float = 20.0) -> None:
        """Unmount, check, mount again: possible once nobody has a file open any more."""
        assert run("umount", "-l", self.place).returncode == 0
        end = time.monotonic() + seconds
        while (checked := run("fsck.ext4", "-fy", self._device)).returncode > 1:
            assert time.monotonic() < end, f"still in use: {checked.stderr}"
            time.sleep(0.2)
        assert self._mount()

    def _limit(self, nbytes: int) -> None:
        """Let the device end there; 0 for all of it."""
        descriptor = os.open(self._device, os.O_RDWR)
        try:
            status = bytearray(_STATUS_BYTES)
            fcntl.ioctl(descriptor, _LOOP_GET_STATUS64, status)
            struct.pack_into("<Q", status, _SIZE_LIMIT_AT, nbytes)
            fcntl.ioctl(descriptor, _LOOP_SET_STATUS64, status)
        finally:
            os.close(descriptor)
