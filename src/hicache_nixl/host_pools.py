"""What a host pool of SGLang is made of: the classes, layouts and buffers that are understood.

Owns: reading a pool by its attributes, refusing by name what is not known, and the shape of each
buffer in each layout. Must not know: SGLang or torch as imports, page addresses, namespaces,
stores. A new kind of pool is one function that names its buffers, their shapes and their outer
counts, and one line in `_KINDS`.

Byte orders of a page:

    layer-major   [K, V] x layer x token x head x width    layer_first, page_first_direct
    token-major   [K, V] x token x layer x head x width    page_first
    head-major    [K, V] x head x token x layer x width    page_head

An MLA page has no K/V axis and one head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hicache_nixl.errors import RegistrationError

BYTE_ORDERS = {
    "layer_first": "layer-major",
    "page_first": "token-major",
    "page_first_direct": "layer-major",
    "page_head": "head-major",
}
"""Layout of a host pool -> byte order of its pages."""


@dataclass(frozen=True)
class Block:
    """One buffer: `nbytes` at `address`, C-contiguous over (outer, pages, inner bytes)."""

    address: int
    nbytes: int
    outer: int


@dataclass(frozen=True)
class HostPool:
    """A pool that is understood; `blocks` in the order of a page's bytes."""

    layout: str
    pages: int
    page_tokens: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class _Buffer:
    """One tensor of a pool, the shape it must have and the outer axes that a page cuts through."""

    name: str
    tensor: Any
    shape: tuple[int, ...]
    outer: int


@dataclass(frozen=True)
class _Sizes:
    pages: int
    page_tokens: int
    slots: int


_Shapes = dict[str, tuple[int, tuple[int, ...]]]
_Reader = Callable[[Any, str, _Sizes], list[_Buffer]]


def attribute(owner: Any, name: str) -> Any:
    """`owner.name`; a `RegistrationError` that names class and attribute where there is none."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise RegistrationError(
            f"{type(owner).__name__} has no attribute {name!r}: this version of SGLang keeps its "
            "pages in a way that is not known here"
        ) from None


def count(pool: Any, name: str) -> int:
    """`pool.name` as a positive integer."""
    value = attribute(pool, name)
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 1:
        raise RegistrationError(
            f"{type(pool).__name__}.{name} is {value!r}: a positive integer is needed"
        )
    return int(value)


def _pick(pool: Any, layout: str, shapes: _Shapes) -> tuple[int, tuple[int, ...]]:
    if layout not in shapes:
        raise RegistrationError(
            f"unknown layout {layout!r} of pool class {type(pool).__name__}: "
            f"use one of {', '.join(shapes)}"
        )
    return shapes[layout]


def _mha(pool: Any, layout: str, sizes: _Sizes) -> list[_Buffer]:
    layers, heads, width = (count(pool, name) for name in ("layer_num", "head_num", "head_dim"))
    if count(pool, "v_head_dim") != width:
        raise RegistrationError(
            f"{type(pool).__name__} with K width {width} and V width {pool.v_head_dim}: "
            "one tensor can't hold both"
        )
    pages, tokens, slots = sizes.pages, sizes.page_tokens, sizes.slots
    outer, shape = _pick(
        pool,
        layout,
        {
            "layer_first": (2 * layers, (2, layers, slots, heads, width)),
            "page_first": (2, (2, slots, layers, heads, width)),
            "page_first_direct": (2, (2, pages, layers, tokens, heads, width)),
            "page_head": (2, (2, pages, heads, tokens, layers, width)),
        },
    )
    return [_Buffer("kv_buffer", attribute(pool, "kv_buffer"), shape, outer)]


def _asymmetric_mha(pool: Any, layout: str, sizes: _Sizes) -> list[_Buffer]:
    layers, heads = count(pool, "layer_num"), count(pool, "head_num")
    pages, tokens, slots = sizes.pages, sizes.page_tokens, sizes.slots
    buffers = attribute(pool, "kv_buffer")
    if not isinstance(buffers, tuple) or len(buffers) != 2:
        raise RegistrationError(f"{type(pool).__name__}.kv_buffer is not a pair of K and V tensors")
    found = []
    for name, buffer, size in (
        ("k_buffer", buffers[0], "head_dim"),
        ("v_buffer", buffers[1], "v_head_dim"),
    ):
        width = count(pool, size)
        outer, shape = _pick(
            pool,
            layout,
            {
                "page_first": (1, (slots, layers, heads, width)),
                "page_first_direct": (1, (pages, layers, tokens, heads, width)),
            },
        )
        found.append(_Buffer(name, buffer, shape, outer))
    return found


def _mla(pool: Any, layout: str, sizes: _Sizes) -> list[_Buffer]:
    if attribute(pool, "dsa_kv_cache_store_fp8"):
        raise RegistrationError(
            "MLATokenToKVPoolHost with packed fp8 rows and scales is not supported: "
            "use --kv-cache-dtype bfloat16"
        )
    if attribute(pool, "_layer_shard_enabled"):
        # Each context-parallel rank then holds other layers, and unused rows behind them.
        raise RegistrationError(
            "MLATokenToKVPoolHost with layers sharded over context-parallel ranks is not "
            "supported: switch the layer split off"
        )
    layers, width = count(pool, "layer_num"), count(pool, "kv_cache_dim")
    pages, tokens, slots = sizes.pages, sizes.page_tokens, sizes.slots
    outer, shape = _pick(
        pool,
        layout,
        {
            "layer_first": (layers, (layers, slots, 1, width)),
            "page_first": (1, (slots, layers, 1, width)),
            "page_first_direct": (1, (pages, layers, tokens, 1, width)),
        },
    )
    return [_Buffer("kv_buffer", attribute(pool, "kv_buffer"), shape, outer)]


_KINDS: dict[str, tuple[str, _Reader]] = {
    "MHATokenToKVPoolHost": ("mha", _mha),
    "AsymmetricMHATokenToKVPoolHost": ("mha", _asymmetric_mha),
    "MLATokenToKVPoolHost": ("mla", _mla),
}


def pool_kind(pool: Any) -> str:
    """`"mha"` (heads sharded over TP ranks) or `"mla"` (one latent row, same on every TP rank).

    The pool's own class must carry a known name, once in its MRO: a subclass, whatever its name,
    may keep more or other bytes than its base. Raises `RegistrationError`.
    """
    return _kind(pool)[0]


def _kind(pool: Any) -> tuple[str, _Reader]:
    names = [base.__name__ for base in type(pool).__mro__]
    if names[0] not in _KINDS or names.count(names[0]) > 1:
        known = next((name for name in names[1:] if name in _KINDS), None)
        derived = f", which extends {known} and may store other bytes" if known else ""
        raise RegistrationError(
            f"unknown pool class {names[0]}{derived}: supported are {', '.join(_KINDS)}"
        )
    return _KINDS[names[0]]


def read_pool(pool: Any) -> HostPool:
    """Layout, sizes and buffers of an SGLang host pool.

    Understood are the classes in `_KINDS`, in the layouts that each of them names, on the CPU,
    without decode context parallelism. Anything else raises a `RegistrationError` that names it.
    """
    _, buffers_of = _kind(pool)
    name = type(pool).__name__
    if getattr(pool, "dcp_size", 1) != 1:
        raise RegistrationError(
            f"{name} with decode context parallel size {pool.dcp_size} is not supported: "
            "start with --dcp-size 1"
        )
    if getattr(pool, "shared_allocation_domain", None) is not None:
        raise RegistrationError(f"{name} in a shared, relocatable allocation is not supported")
    layout = attribute(pool, "layout")
    sizes = _Sizes(
        pages=count(pool, "page_num"),
        page_tokens=count(pool, "page_size"),
        slots=count(pool, "size"),
    )
    if sizes.pages * sizes.page_tokens != sizes.slots:
        raise RegistrationError(
            f"{name}: {sizes.pages} pages of {sizes.page_tokens} tokens are not the "
            f"{sizes.slots} tokens of the pool"
        )
    if attribute(pool, "kv_buffer") is None:
        raise RegistrationError(
            f"{name}.kv_buffer is None: a logical or released pool has no bytes to store"
        )
    itemsize = attribute(attribute(pool, "dtype"), "itemsize")
    return HostPool(
        layout=layout,
        pages=sizes.pages,
        page_tokens=sizes.page_tokens,
        blocks=tuple(_block(name, buffer, itemsize) for buffer in buffers_of(pool, layout, sizes)),
    )


def _block(pool_name: str, wanted: _Buffer, itemsize: int) -> Block:
    """The memory of a tensor, its shape, item size, device and contiguity checked."""
    what = f"{pool_name}.{wanted.name}"
    buffer = wanted.tensor
    if not hasattr(buffer, "data_ptr"):
        raise RegistrationError(f"{what} is a {type(buffer).__name__}, not one tensor")
    shape = tuple(int(n) for n in buffer.shape)
    if shape != wanted.shape:
        raise RegistrationError(f"{what} has shape {shape}: its layout says {wanted.shape}")
    if buffer.device.type != "cpu":
        raise RegistrationError(f"{what} is on device {buffer.device}: host pools are on the CPU")
    if not buffer.is_contiguous():
        raise RegistrationError(f"{what} is not contiguous (strides {tuple(buffer.stride())})")
    if buffer.element_size() != itemsize:
        raise RegistrationError(
            f"{what} has elements of {buffer.element_size()} bytes: the pool's dtype has {itemsize}"
        )
    return Block(int(buffer.data_ptr()), int(buffer.numel()) * itemsize, wanted.outer)
