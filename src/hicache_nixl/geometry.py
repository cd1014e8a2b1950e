"""Where the bytes of a page lie in a host pool.

Owns: the address arithmetic from page number to memory segments, the check of the engine's token
indices, and copying between a pool and a flat payload. Must not know: SGLang or torch as imports,
keys, namespaces, records, stores, transfers.

Every buffer of a pool is a C-contiguous array `(outer, rows, inner bytes)`, a row for each page.
So a page is one segment per outer index and buffer, and
`address(segment, page) = bases[segment] + page * strides[segment]`.
Segments follow the byte order of the page, which is that of SGLang's own flat data page.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_nixl.errors import RegistrationError
from hicache_nixl.host_pools import read_pool
from hicache_nixl.record import ALIGNMENT


@dataclass(frozen=True)
class Region:
    """One contiguous piece of host memory: address and bytes."""

    address: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class PoolGeometry:
    """Page -> memory segments of one host pool; immutable.

    The arrays have one element per segment, in payload order, and are read-only. Addresses are good
    as long as what `memory` holds is kept. Construction raises `RegistrationError`
    when a segment of any page leaves its region.
    """

    layout: str
    byte_order: str
    page_tokens: int
    pages: int
    bases: npt.NDArray[np.uint64]
    strides: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    regions: tuple[Region, ...]
    resolve: Callable[[Any], Any] | None = None
    """For pools whose pages move in memory: from the engine's indices to where they are now."""
    memory: tuple[Any, ...] = ()
    """The pool's tensors: SGLang drops its own reference to them before it detaches the storage."""

    def __post_init__(self) -> None:
        for name, dtype in (("bases", np.uint64), ("strides", np.int64), ("lengths", np.int64)):
            array = np.array(getattr(self, name), dtype=dtype, ndmin=1)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if self.page_tokens < 1 or self.pages < 1:
            raise RegistrationError(
                f"page_tokens={self.page_tokens}, pages={self.pages}: a pool holds at least one "
                "page of at least one token"
            )
        shape = self.bases.shape
        if not (shape == self.strides.shape == self.lengths.shape and len(shape) == 1 and shape[0]):
            raise RegistrationError(
                f"segment arrays of shapes {shape}, {self.strides.shape}, {self.lengths.shape}: "
                "pass three of one length"
            )
        if (self.lengths < 1).any() or (self.strides < self.lengths).any():
            raise RegistrationError("segments of consecutive pages overlap or are empty")
        self._region_of_segment  # noqa: B018  evaluates the bounds check

    @cached_property
    def _region_of_segment(self) -> npt.NDArray[np.int64]:
        """(S,) index of the region that holds the segment of every page."""
        owner = np.full(self.bases.shape, -1, dtype=np.int64)
        ends = self.bases + (self.strides * (self.pages - 1) + self.lengths).astype(np.uint64)
        for number, region in enumerate(self.regions):
            inside = (self.bases >= region.address) & (ends <= region.address + region.nbytes)
            owner[inside] = number
        if (owner < 0).any():
            lost = int(np.flatnonzero(owner < 0)[0])
            raise RegistrationError(
                f"segment {lost} of layout {self.layout!r} leaves the pool's memory: "
                f"[{int(self.bases[lost]):#x}, {int(ends[lost]):#x}) is in none of "
                f"{[(hex(r.address), r.nbytes) for r in self.regions]}"
            )
        return owner

    @cached_property
    def _blocks(self) -> list[tuple[npt.NDArray[np.uint8], slice]]:
        """Host memory as few windows (pages, segments, length), each with its place in the payload.

        A window holds neighbours of one length that are evenly spaced in one region, so that a page
        is copied by one call and not by one for each segment.
        """
        memory = [
            np.ctypeslib.as_array((ctypes.c_uint8 * r.nbytes).from_address(r.address))
            for r in self.regions
        ]
        owners, bases = self._region_of_segment.tolist(), self.bases.tolist()
        alike = list(zip(owners, self.strides.tolist(), self.lengths.tolist(), strict=True))
        blocks = []
        first = end = 0
        while first < len(bases):
            last, step = first, 0
            while last + 1 < len(bases) and alike[last + 1] == alike[first]:
                distance = bases[last + 1] - bases[last]
                if distance < 0 or distance != (step or distance):
                    break
                last, step = last + 1, distance
            owner, stride, length = alike[first]
            window = np.lib.stride_tricks.as_strided(
                memory[owner][bases[first] - self.regions[owner].address :],
                shape=(self.pages, last + 1 - first, length),
                strides=(stride, step, 1),
            )
            nbytes = length * window.shape[1]
            blocks.append((window, slice(end, end + nbytes)))
            end += nbytes
            first = last + 1
        return blocks

    @cached_property
    def windows(self) -> tuple[npt.NDArray[np.uint8], ...]:
        """Per segment, a (pages, length) view of host memory: row p is that segment of page p."""
        return tuple(block[:, i] for block, _ in self._blocks for i in range(block.shape[1]))

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of one page: the sum of its segments."""
        return int(self.lengths.sum())

    @cached_property
    def _token_offsets(self) -> npt.NDArray[np.int64]:
        return np.arange(self.page_tokens, dtype=np.int64)

    def page_numbers(self, host_indices: Any, n_keys: int) -> npt.NDArray[np.int64]:
        """(n_keys,) page numbers of `n_keys * page_tokens` token indices.

        `host_indices` is a one-dimensional integer array or CPU tensor; each run of `page_tokens`
        indices must be consecutive, start on a page boundary and lie in the pool. In a pool whose
        pages move, the numbers hold for the transfer that the engine is calling for.
        Raises `RegistrationError`, which names the first index that does not fit.
        """
        indices = _as_integers(host_indices)
        tokens = self.page_tokens
        if indices.size != n_keys * tokens:
            raise RegistrationError(
                f"{indices.size} host indices for {n_keys} keys: pass {n_keys * tokens}, "
                f"{tokens} tokens for each page"
            )
        if not n_keys:
            return np.empty(0, dtype=np.int64)
        numbers = self._whole_pages(indices)
        if self.resolve is not None:
            numbers = self._whole_pages(_as_integers(self.resolve(host_indices)))
        return numbers

    def _whole_pages(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The pages that token indices cover, each wholly and in order."""
        tokens = self.page_tokens
        by_page = indices.reshape(-1, tokens)
        first = by_page[:, 0]
        pages = first // tokens
        limit = self.pages * tokens
        if first.min() < 0 or first.max() >= limit:
            wrong = int(first[(first < 0) | (first >= limit)][0])
            raise RegistrationError(f"host index {wrong} is outside the pool of {limit} tokens")
        if (pages * tokens != first).any():
            wrong = int(first[pages * tokens != first][0])
            raise RegistrationError(
                f"host index {wrong} starts a page but is no multiple of {tokens} tokens"
            )
        expected = first[:, None] + self._token_offsets
        if (by_page != expected).any():
            row, column = np.argwhere(by_page != expected)[0]
            raise RegistrationError(
                f"host index {int(by_page[row, column])} follows {int(by_page[row, column - 1])}: "
                "the tokens of a page are consecutive"
            )
        return pages

    def _checked(self, pages: Any) -> npt.NDArray[np.int64]:
        numbers = np.asarray(pages, dtype=np.int64)
        if numbers.ndim != 1:
            raise RegistrationError(f"page numbers of shape {numbers.shape}: pass one dimension")
        if numbers.size and (numbers.min() < 0 or numbers.max() >= self.pages):
            wrong = int(numbers[(numbers < 0) | (numbers >= self.pages)][0])
            raise RegistrationError(f"page {wrong} is outside the pool of {self.pages} pages")
        return numbers

    def addresses(self, pages: npt.ArrayLike) -> npt.NDArray[np.uint64]:
        """(n, S) addresses of the segments of `pages`; segment s is `lengths[s]` bytes long.

        Raises `RegistrationError` for a page outside the pool.
        """
        numbers = self._checked(pages).astype(np.uint64)
        return self.bases + numbers[:, None] * self.strides.astype(np.uint64)

    def is_aligned(self, alignment: int = ALIGNMENT) -> bool:
        """Whether every segment of every page starts and ends on a multiple of `alignment`."""
        return not (
            (self.bases % np.uint64(alignment)).any()
            or (self.strides % alignment).any()
            or (self.lengths % alignment).any()
        )

    def gather(self, pages: npt.ArrayLike, out: npt.NDArray[np.uint8]) -> None:
        """Copy `pages` from the pool into `out`, (n, >= payload_bytes) uint8; blocks.

        Bytes of a row behind the payload stay as they are. The GIL is released in large copies.
        """
        numbers = self._checked(pages)
        self._check_rows(out, numbers.size)
        for block, place in self._blocks:
            for row, page in enumerate(numbers.tolist()):
                out[row, place].reshape(block.shape[1:])[:] = block[page]

    def scatter(self, pages: npt.ArrayLike, source: npt.NDArray[np.uint8]) -> None:
        """Copy rows of `source`, (n, >= payload_bytes) uint8, into `pages` of the pool; blocks."""
        numbers = self._checked(pages)
        self._check_rows(source, numbers.size)
        for block, place in self._blocks:
            for row, page in enumerate(numbers.tolist()):
                block[page] = source[row, place].reshape(block.shape[1:])

    def _check_rows(self, rows: npt.NDArray[np.uint8], count: int) -> None:
        if (
            rows.dtype != np.uint8
            or rows.ndim != 2
            or rows.shape[0] < count
            or rows.shape[1] < self.payload_bytes
            or (rows.size > 1 and rows.strides[1] != 1)
        ):
            raise RegistrationError(
                f"buffer of shape {rows.shape} and dtype {rows.dtype}: pass uint8 of at least "
                f"({count}, {self.payload_bytes}), each row contiguous"
            )


def _as_integers(values: Any) -> npt.NDArray[np.int64]:
    if values is None:
        raise RegistrationError("host indices are missing: pass the token indices of the pages")
    device = getattr(values, "device", None)
    if getattr(device, "type", "cpu") != "cpu":
        values = values.cpu()
    array = values.numpy() if hasattr(values, "numpy") else np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RegistrationError(
            f"host indices of shape {array.shape} and dtype {array.dtype}: pass one dimension "
            "of integers"
        )
    return array.astype(np.int64, copy=False)


def describe_pool(pool: Any) -> PoolGeometry:
    """Geometry of an SGLang host pool, read by its attributes.

    Raises a `RegistrationError` that names the class, layout or attribute that is not understood.
    """
    known = read_pool(pool)
    bases: list[int] = []
    steps: list[int] = []
    for block in known.blocks:
        step = block.nbytes // (block.outer * block.rows)
        bases += range(block.address, block.address + block.nbytes, step * block.rows)
        steps += [step] * block.outer
    return PoolGeometry(
        layout=known.layout,
        byte_order=known.byte_order,
        page_tokens=known.page_tokens,
        pages=known.pages,
        bases=np.array(bases, dtype=np.uint64),
        strides=np.array(steps, dtype=np.int64),
        lengths=np.array(steps, dtype=np.int64),
        regions=tuple(Region(block.address, block.nbytes) for block in known.blocks),
        resolve=known.resolve,
        memory=known.memory,
    )
