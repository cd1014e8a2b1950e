"""Which class of host pool is read how, and the check of a reading against the pool's memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hicache_nixl.errors import RegistrationError
from hicache_nixl.host_pools import attention, paged, state
from hicache_nixl.host_pools.reading import Buffer, Facts, Reading, RowFormat, attribute


@dataclass(frozen=True)
class Block:
    """One buffer: `nbytes` at `address`, C-contiguous over (outer, rows, inner bytes), a page a
    row."""

    address: int
    nbytes: int
    outer: int
    rows: int


@dataclass(frozen=True)
class HostPool:
    """A pool that is understood; `blocks` in the order of a page's bytes."""

    layout: str
    byte_order: str
    pages: int
    page_tokens: int
    blocks: tuple[Block, ...]
    facts: Facts
    dtype: str
    row_format: RowFormat
    resolve: Callable[[Any], Any] | None
    """See `Reading.resolve`."""
    memory: tuple[Any, ...]
    """What has to be kept for the blocks to stay mapped."""


@dataclass(frozen=True)
class _Kind:
    name: str
    replicated: bool
    """Its bytes are the same on every TP rank, in models whose KV is."""
    read: Callable[[Any], Reading]


KINDS = {
    "MHATokenToKVPoolHost": _Kind("mha", False, attention.mha),
    "AsymmetricMHATokenToKVPoolHost": _Kind("mha", False, attention.asymmetric_mha),
    "MHATokenToKVPoolMXFP8Host": _Kind("mha", False, attention.mxfp8_mha),
    "MHATokenToKOnlyPoolHost": _Kind("indexer", False, attention.k_only),
    "MLATokenToKVPoolHost": _Kind("mla", True, attention.mla),
    "DSAIndexerPoolHost": _Kind("indexer", True, paged.dsa_indexer),
    "QSAIndexerPoolHost": _Kind("indexer", False, paged.qsa_indexer),
    "DeepSeekV4PagedHostPool": _Kind("compressed", True, paged.compressed),
    "DeepSeekV4StateHostPool": _Kind("state", True, paged.compress_state),
    "MiniMaxM3Nvfp4MainKVPoolHost": _Kind("mha", False, paged.nvfp4),
    "MiniMaxM3Nvfp4IndexKPoolHost": _Kind("indexer", False, paged.nvfp4),
    "UnifiedPageEnvelopeHostPool": _Kind("mha", False, paged.envelope),
    "MambaPoolHost": _Kind("state", False, state.mamba),
}
"""By the name of the class in SGLang."""

_LOGICAL = "LogicalHostPool"


def pool_kind(pool: Any) -> str:
    """What a pool is: `"mha"`, `"mla"`, `"indexer"`, `"compressed"`, `"state"`; `"logical"` for
    SGLang's pool that counts pages and has no bytes.

    The pool's own class must carry a known name, once in its MRO: a subclass, whatever its name,
    may keep more or other bytes than its base. Raises `RegistrationError`.
    """
    if type(pool).__name__ == _LOGICAL:
        return "logical"
    return _kind(pool).name


def is_replicated(pool: Any) -> bool:
    """Whether the pool's bytes are the same on every TP rank, in models whose KV is."""
    return _kind(pool).replicated


def _kind(pool: Any) -> _Kind:
    names = [base.__name__ for base in type(pool).__mro__]
    if names[0] not in KINDS or names.count(names[0]) > 1:
        known = next((name for name in names[1:] if name in KINDS), None)
        derived = f", which extends {known} and may store other bytes" if known else ""
        raise RegistrationError(
            f"unknown pool class {names[0]}{derived}: supported are {', '.join(KINDS)}"
        )
    return KINDS[names[0]]


def read_pool(pool: Any) -> HostPool:
    """Layout, sizes, buffers and facts of an SGLang host pool.

    Understood are the classes in `KINDS`, in the layouts that their readers name, in CPU memory.
    Anything else raises a `RegistrationError` that names it.
    """
    kind = _kind(pool)
    name = type(pool).__name__
    if getattr(pool, "dcp_size", 1) != 1 and kind.name != "mla":
        raise RegistrationError(
            f"{name} with decode context parallel size {pool.dcp_size} is not supported: "
            "start with --dcp-size 1"
        )
    reading = kind.read(pool)
    if reading.resolve is None and getattr(pool, "shared_allocation_domain", None) is not None:
        raise RegistrationError(f"{name} in a shared, relocatable allocation is not supported")
    return HostPool(
        layout=str(attribute(pool, "layout")),
        byte_order=reading.byte_order,
        pages=reading.pages,
        page_tokens=reading.page_tokens,
        blocks=tuple(_block(name, buffer) for buffer in reading.buffers),
        facts=reading.facts,
        dtype=reading.dtype,
        row_format=reading.row_format,
        resolve=reading.resolve,
        memory=tuple(buffer.tensor for buffer in reading.buffers),
    )


def _block(pool_name: str, wanted: Buffer) -> Block:
    """The memory of a tensor, its shape, item size, device and contiguity checked."""
    what = f"{pool_name}.{wanted.name}"
    tensor = wanted.tensor
    if not hasattr(tensor, "data_ptr"):
        raise RegistrationError(f"{what} is a {type(tensor).__name__}, not one tensor")
    shape = tuple(int(n) for n in tensor.shape)
    if shape != wanted.shape:
        raise RegistrationError(f"{what} has shape {shape}: its layout says {wanted.shape}")
    if tensor.device.type != "cpu":
        raise RegistrationError(f"{what} is on device {tensor.device}: host pools are on the CPU")
    if not tensor.is_contiguous():
        raise RegistrationError(f"{what} is not contiguous (strides {tuple(tensor.stride())})")
    if tensor.element_size() != wanted.itemsize:
        raise RegistrationError(
            f"{what} has elements of {tensor.element_size()} bytes: the pool's dtype has "
            f"{wanted.itemsize}"
        )
    nbytes = int(tensor.numel()) * wanted.itemsize
    return Block(int(tensor.data_ptr()), nbytes, wanted.outer, wanted.rows)
