"""What a reader says of a pool, and how it reads the pool's attributes.

Byte orders of a page:

    layer-major   [K, V] x layer x token x head x width
    token-major   [K, V] x token x layer x head x width
    head-major    [K, V] x head x token x layer x width
    group-major   head group x layer x [K, V] x token x head in group x width
    envelope      token x layer x [K, V] x head x width, as SGLang's unified memory pool keeps it
    rows          layer x bytes of a row that only the engine reads

An MLA page has no K/V axis and one head. Other parts of a page, as scales or the states of
recurrent layers, follow each other in the order of the reader's buffers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hicache_nixl.errors import RegistrationError
from hicache_nixl.host_pools import mirrored

Facts = dict[str, int | str]
"""What tells the bytes of a page apart from others of the same size, by name."""


class RowFormat(Enum):
    """Who says what the bytes of an element mean."""

    TYPED = "the pool's dtype; where that is uint8, the engine's fp8 format"
    DESCRIBED = "the facts"
    ENGINE = "the engine's KV dtype beside the facts"


@dataclass(frozen=True)
class Buffer:
    """One tensor of a pool: the shape and item size it must have, and how pages cut it.

    It is C-contiguous over (outer, rows, inner bytes); `rows` are pages, at least as many as the
    pool has.
    """

    name: str
    tensor: Any
    shape: tuple[int, ...]
    itemsize: int
    outer: int
    rows: int


@dataclass(frozen=True)
class Reading:
    """A pool as its reader understands it; `buffers` in the order of a page's bytes."""

    pages: int
    page_tokens: int
    """Indices that the engine passes for a page."""
    byte_order: str
    buffers: tuple[Buffer, ...]
    facts: Facts
    dtype: str
    row_format: RowFormat = RowFormat.TYPED
    resolve: Callable[[Any], Any] | None = None
    """From the engine's indices to those of the memory as it lies now; None where they are the
    same. To be called once for each transfer."""


def attribute(owner: Any, name: str) -> Any:
    """`owner.name`, in older versions of SGLang from the device pool that a host pool mirrors.

    Raises a `RegistrationError` that names class and attribute where there is none.
    """
    try:
        return getattr(owner, name) if hasattr(owner, name) else mirrored.fact(owner, name)
    except AttributeError:
        raise RegistrationError(
            f"{type(owner).__name__} has no attribute {name!r}: this version of SGLang keeps its "
            "pages in a way that is not known here"
        ) from None


def held_tensor(pool: Any, name: str = "kv_buffer") -> Any:
    """`pool.name`, or what holds several tensors; a `RegistrationError` where it was released."""
    tensor = attribute(pool, name)
    if tensor is None:
        raise RegistrationError(
            f"{type(pool).__name__}.{name} is None: a released pool has no bytes to store"
        )
    return tensor


def integer(owner: Any, name: str) -> int:
    """`owner.name` as an integer."""
    value = attribute(owner, name)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise RegistrationError(f"{type(owner).__name__}.{name} is {value!r}: an integer is needed")
    return int(value)


def count(owner: Any, name: str) -> int:
    """`owner.name` as a positive integer."""
    value = attribute(owner, name)
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 1:
        raise RegistrationError(
            f"{type(owner).__name__}.{name} is {value!r}: a positive integer is needed"
        )
    return int(value)


def dtype_name(dtype: Any) -> str:
    """Name of a torch dtype without its module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def item_bytes(owner: Any, name: str = "dtype") -> int:
    """Bytes of an element of the dtype `owner.name`."""
    return count(attribute(owner, name), "itemsize")


def tensor_format(tensor: Any, skip: int) -> str:
    """Element type and shape of a tensor behind its first `skip` axes: "float32[4,8]"."""
    shape = ",".join(str(int(n)) for n in tensor.shape[skip:])
    return f"{dtype_name(tensor.dtype)}[{shape}]"


def slots(pool: Any) -> tuple[int, int, int]:
    """Pages, tokens of a page and tokens of a pool whose memory is counted in tokens."""
    pages, tokens, total = (count(pool, name) for name in ("page_num", "page_size", "size"))
    if pages * tokens != total:
        raise RegistrationError(
            f"{type(pool).__name__}: {pages} pages of {tokens} tokens are not the {total} tokens "
            "of the pool"
        )
    return pages, tokens, total


def layers(pool: Any, *, target: str = "target_layer_num") -> Facts:
    """Layers of the model that a page covers; those behind the target's are draft layers."""
    return {
        "layer_start": integer(pool, "start_layer"),
        "layer_end": integer(pool, "end_layer"),
        "layers": count(pool, "layer_num"),
        "target_layers": integer(pool, target),
    }


def by_layout(pool: Any, choices: Mapping[str, Any]) -> Any:
    """The choice for the pool's layout; a `RegistrationError` that names the layouts if none."""
    layout = attribute(pool, "layout")
    if layout not in choices:
        raise RegistrationError(
            f"unknown layout {layout!r} of pool class {type(pool).__name__}: "
            f"use one of {', '.join(choices)}"
        )
    return choices[layout]
