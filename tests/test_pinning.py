"""Claims about pinning, on a stand-in for the CUDA runtime and, where there is a GPU, on it."""

import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from hicache_nixl import pinning
from hicache_nixl.errors import HostMemoryError
from hicache_nixl.memory import allocate
from hicache_nixl.pinning import pin, unpin

MIB = 1 << 20


class Status:
    """Like torch's: an enumeration value that converts to int and is no int."""

    def __init__(self, code: int) -> None:
        self._code = code

    def __int__(self) -> int:
        return self._code


@dataclass
class FakeRuntime:
    """Answers every call with `code` and writes down what it got."""

    code: int = 0
    calls: list[tuple[object, ...]] = field(default_factory=list)

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> Status:  # noqa: N802
        self.calls.append(("register", pointer, nbytes, flags))
        return Status(self.code)

    def cudaHostUnregister(self, pointer: int) -> Status:  # noqa: N802
        self.calls.append(("unregister", pointer))
        return Status(self.code)

    def cudaGetErrorString(self, status: Status) -> str:  # noqa: N802
        assert isinstance(status, Status)
        return f"meaning of {int(status)}"


def test_pin_and_unpin_name_the_range() -> None:
    """The runtime gets the address and bytes that were given, and default flags."""
    runtime = FakeRuntime()
    pin(0x7000, 8192, cudart=runtime)
    unpin(0x7000, 8192, cudart=runtime)
    assert runtime.calls == [("register", 0x7000, 8192, 0), ("unregister", 0x7000)]


def test_a_refused_pin_says_everything() -> None:
    """rc, its meaning, pointer and size are in one line."""
    with pytest.raises(HostMemoryError) as caught:
        pin(0x7F00_0000_0000, 2 * MIB, cudart=FakeRuntime(2))
    assert str(caught.value) == (
        "cudaHostRegister of 2097152 bytes (2.0MiB) at 0x7f0000000000 failed: rc=2, meaning of 2; "
        "pin less, and only memory that is mapped and not pinned yet"
    )


def test_a_refused_unpin_says_everything() -> None:
    """rc, its meaning, pointer and size are in one line."""
    with pytest.raises(HostMemoryError) as caught:
        unpin(0x7000, 8192, cudart=FakeRuntime(713))
    assert str(caught.value) == (
        "cudaHostUnregister of 8192 bytes at 0x7000 failed: rc=713, meaning of 713; "
        "unpin each range once, by the address it was pinned at"
    )


def test_torch_provides_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a stand-in the calls go to torch.cuda.cudart()."""
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pin(0x7000, 8192)
    unpin(0x7000, 8192)
    assert [call[0] for call in runtime.calls] == ["register", "unregister"]


def test_without_a_device_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch without a CUDA device is one clear error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(HostMemoryError, match="torch sees no CUDA device; run on a GPU"):
        pin(0x7000, 8192)


def test_without_torch_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing torch is one clear error."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(HostMemoryError, match=r"cannot pin host memory: .*; install torch"):
        pinning.pin(0x7000, 8192)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
@pytest.mark.parametrize("hugepages", ["off", "prefer"])
def test_a_device_copies_from_pinned_memory(hugepages: str) -> None:
    """Pinned memory is pinned in torch's eyes, copies byte for byte, and pins only once."""
    buffer = allocate(16 * MIB, hugepages=hugepages)
    view = buffer.view()
    view[:] = np.random.default_rng(3).integers(0, 256, view.size, dtype=np.uint8)
    pin(buffer.address, buffer.mapped_bytes)
    try:
        tensor = torch.from_numpy(view)
        assert tensor.is_pinned()
        assert torch.equal(tensor.to("cuda", non_blocking=True).cpu(), tensor)
        with pytest.raises(HostMemoryError, match=f"at {buffer.address:#x} failed: rc="):
            pin(buffer.address, buffer.mapped_bytes)
    finally:
        unpin(buffer.address, buffer.mapped_bytes)
    with pytest.raises(HostMemoryError, match="failed: rc="):
        unpin(buffer.address, buffer.mapped_bytes)
