"""Pinning host memory for a CUDA device, by cudaHostRegister.

Owns the calls and their errors. It must not map or free memory. torch is imported on the first
call and only for its CUDA runtime.
"""

from __future__ import annotations

from typing import Protocol, cast

from hicache_nixl.errors import HostMemoryError
from hicache_nixl.units import format_size

__all__ = ["CudaRuntime", "pin", "unpin"]

_SUCCESS = 0
_DEFAULT_FLAGS = 0


class _Status(Protocol):
    def __int__(self) -> int: ...


class CudaRuntime(Protocol):
    """The part of `torch.cuda.cudart()` that is used here."""

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int, /) -> _Status:  # noqa: N802
        """Page-lock a range and map it into the device's address space."""

    def cudaHostUnregister(self, pointer: int, /) -> _Status:  # noqa: N802
        """Undo cudaHostRegister, given the same pointer."""

    def cudaGetErrorString(self, status: _Status, /) -> str:  # noqa: N802
        """The meaning of a status."""


def pin(address: int, nbytes: int, *, cudart: CudaRuntime | None = None) -> None:
    """Page-lock `nbytes` bytes at `address`, so that a device can copy from and to them.

    Blocks while the driver locks the pages. They must be mapped and populated, and stay mapped
    until `unpin`. `cudart` stands in for torch's CUDA runtime.

    Raises:
        HostMemoryError: there is no CUDA device, or the driver refused.
    """
    runtime = cudart or _torch_runtime()
    status = runtime.cudaHostRegister(address, nbytes, _DEFAULT_FLAGS)
    if int(status) != _SUCCESS:
        raise HostMemoryError(
            f"cudaHostRegister of {nbytes} bytes ({format_size(nbytes, digits=1)}) at "
            f"{address:#x} failed: {_describe(runtime, status)}; "
            "pin less, and only memory that is mapped and not pinned yet"
        )


def unpin(address: int, nbytes: int, *, cudart: CudaRuntime | None = None) -> None:
    """Undo `pin`, given the same `address` and `nbytes`. Blocks until the device is done with it.

    Raises:
        HostMemoryError: there is no CUDA device, or the range is not pinned.
    """
    runtime = cudart or _torch_runtime()
    status = runtime.cudaHostUnregister(address)
    if int(status) != _SUCCESS:
        raise HostMemoryError(
            f"cudaHostUnregister of {nbytes} bytes at {address:#x} failed: "
            f"{_describe(runtime, status)}; unpin each range once, by the address it was pinned at"
        )


def _describe(runtime: CudaRuntime, status: _Status) -> str:
    return f"rc={int(status)}, {runtime.cudaGetErrorString(status)}"


def _torch_runtime() -> CudaRuntime:
    try:
        import torch
    except ImportError as error:
        raise HostMemoryError(f"cannot pin host memory: {error}; install torch") from error
    if not torch.cuda.is_available():
        raise HostMemoryError(
            "cannot pin host memory: torch sees no CUDA device; run on a GPU or do not pin"
        )
    return cast(CudaRuntime, torch.cuda.cudart())
