"""Pages of real SGLang host pools, against SGLang's own view of them."""

import ctypes
import gc
import timeit
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pools
from hicache_nixl.errors import RegistrationError
from hicache_nixl.geometry import PoolGeometry, Region, describe_pool
from hicache_nixl.record import ALIGNMENT

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32)
WIDTHS = (1, 3, 8, 16, 64, 128)

examples = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def mha_shapes(draw: st.DrawFn, layouts: tuple[str, ...] = pools.MHA_LAYOUTS) -> dict[str, Any]:
    """Arguments of `make_mha_pool`."""
    layout = draw(st.sampled_from(layouts))
    layers, draft_layers = draw(st.integers(1, 5)), draw(st.integers(0, 2))
    return {
        "layout": layout,
        "pages": draw(st.integers(layers + draft_layers if layout == "page_head" else 1, 8)),
        "page_size": draw(st.integers(1, 64)),
        "layers": layers,
        "heads": draw(st.integers(1, 4)),
        "head_dim": draw(st.sampled_from(WIDTHS)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "draft_layers": draft_layers,
        "seed": draw(st.integers(0, 2**31)),
    }


@st.composite
def mla_shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `make_mla_pool`."""
    layout, layers = draw(st.sampled_from(pools.MLA_LAYOUTS)), draw(st.integers(1, 5))
    return {
        "layout": layout,
        "pages": draw(st.integers(layers if layout == "page_first_direct" else 1, 8)),
        "page_size": draw(st.integers(1, 64)),
        "layers": layers,
        "kv_lora_rank": draw(st.sampled_from((1, 7, 64, 448))),
        "qk_rope_head_dim": draw(st.sampled_from((1, 8, 64))),
        "dtype": draw(st.sampled_from(DTYPES)),
        "seed": draw(st.integers(0, 2**31)),
    }


makers: st.SearchStrategy[Callable[..., Any]] = st.one_of(
    mha_shapes().map(lambda shape: lambda **more: pools.make_mha_pool(**{**shape, **more})),
    mla_shapes().map(lambda shape: lambda **more: pools.make_mla_pool(**{**shape, **more})),
)


def raw(pool: Any) -> list[bytes]:
    """Every byte of the pool's buffers."""
    return [b.view(-1).view(torch.uint8).numpy().tobytes() for b in pools.buffers_of(pool)]


@examples
@given(make=makers, data=st.data())
def test_gather_is_get_data_page(make: Callable[..., Any], data: st.DataObject) -> None:
    """Gathered pages, in any order, are the bytes SGLang gives; nothing behind them is touched."""
    pool = make()
    geometry = describe_pool(pool)
    pages = data.draw(st.permutations(range(pool.page_num)))
    out = np.full((len(pages), geometry.payload_bytes + 5), 0xA5, dtype=np.uint8)
    geometry.gather(pages, out)
    for row, page in zip(out, pages, strict=True):
        assert row[: geometry.payload_bytes].tobytes() == pools.page_bytes(pool, page)
        assert (row[geometry.payload_bytes :] == 0xA5).all()


@examples
@given(make=makers, data=st.data())
def test_scatter_is_set_from_flat_data_page(make: Callable[..., Any], data: st.DataObject) -> None:
    """Scattering some pages leaves the whole pool as SGLang's own setter leaves it."""
    source, ours, theirs = make(), make(), make()
    pools.clear(ours)
    pools.clear(theirs)
    pages = data.draw(st.lists(st.integers(0, source.page_num - 1), unique=True))
    geometry = describe_pool(ours)
    rows = np.zeros((len(pages), geometry.payload_bytes), dtype=np.uint8)
    describe_pool(source).gather(pages, rows)
    geometry.scatter(pages, rows)
    for page in pages:
        index = page * source.page_size
        theirs.set_from_flat_data_page(index, source.get_data_page(index, flat=True))
    assert raw(ours) == raw(theirs)


@examples
@given(make=makers)
def test_addresses_tile_the_pool(make: Callable[..., Any]) -> None:
    """Segments of all pages lie in the regions, never overlap, and together are the pool."""
    pool = make()
    geometry = describe_pool(pool)
    addresses = geometry.addresses(np.arange(pool.page_num))
    assert addresses.dtype == np.uint64
    assert addresses.shape == (pool.page_num, geometry.lengths.size)
    segments = sorted(
        (int(address), int(length))
        for row in addresses
        for address, length in zip(row, geometry.lengths, strict=True)
    )
    ends = [address + length for address, length in segments]
    assert all(end == start for end, (start, _) in zip(ends[:-1], segments[1:], strict=True))
    (region,) = geometry.regions
    assert (region.address, region.nbytes) == (pool.kv_buffer.data_ptr(), pool.kv_buffer.nbytes)
    assert segments[0][0] == region.address
    assert ends[-1] == region.address + region.nbytes


@examples
@given(make=makers)
def test_segments_hold_the_payload_in_order(make: Callable[..., Any]) -> None:
    """Memory read at the addresses, segment after segment, is the page SGLang gives."""
    pool = make()
    geometry = describe_pool(pool)
    for page, row in enumerate(geometry.addresses(range(pool.page_num))):
        segments = zip(row, geometry.lengths, strict=True)
        payload = b"".join(ctypes.string_at(int(a), int(n)) for a, n in segments)
        assert payload == pools.page_bytes(pool, page)


@examples
@given(shape=mha_shapes())
def test_addresses_are_those_of_the_zero_copy_interface(shape: dict[str, Any]) -> None:
    """Addresses and lengths are the ones SGLang hands to storage backends, in payload order."""
    pool = pools.make_mha_pool(**shape)
    geometry = describe_pool(pool)
    for page in range(pool.page_num):
        theirs = pool.get_page_buffer_meta(pools.token_indices([page], pool.page_size))
        ours = (geometry.addresses([page])[0].tolist(), geometry.lengths.tolist())
        assert sorted(zip(*ours, strict=True)) == sorted(zip(*theirs, strict=True))


@examples
@given(make=makers, power=st.integers(0, 13))
def test_alignment_is_that_of_every_address(make: Callable[..., Any], power: int) -> None:
    """`is_aligned` says whether all addresses and lengths are multiples; SGLang's yes is a yes."""
    pool = make()
    geometry = describe_pool(pool)
    alignment = 1 << power
    addresses = geometry.addresses(range(pool.page_num))
    # One page more than the pool has: with a single page no stride shows in the addresses.
    beyond = geometry.bases + np.uint64(pool.page_num) * geometry.strides.astype(np.uint64)
    assert geometry.is_aligned(alignment) == (
        not (addresses % np.uint64(alignment)).any()
        and not (beyond % np.uint64(alignment)).any()
        and not (geometry.lengths % alignment).any()
    )
    if pool.is_stride_page_aligned(alignment):
        assert geometry.is_aligned(alignment)


@pytest.mark.parametrize("layout", pools.MHA_LAYOUTS)
@pytest.mark.parametrize(("page_size", "aligned"), [(64, True), (63, False)])
def test_alignment_verdict(layout: str, page_size: int, aligned: bool) -> None:
    """Pages of 4 KiB segments on a page-aligned buffer are aligned in every layout."""
    pool = pools.make_mha_pool(layout, page_size=page_size, heads=1, head_dim=32, layers=3)
    assert describe_pool(pool).is_aligned(ALIGNMENT) is aligned


@examples
@given(shape=mha_shapes(layouts=("layer_first",)), data=st.data())
def test_layer_first_pages_load_into_page_first_direct(
    shape: dict[str, Any], data: st.DataObject
) -> None:
    """A page gathered from layer_first and scattered into page_first_direct is the same page."""
    source = pools.make_mha_pool(**shape)
    target = pools.make_mha_pool(**{**shape, "layout": "page_first_direct"})
    pools.clear(target)
    order = data.draw(st.permutations(range(source.page_num)))
    ours, theirs = describe_pool(source), describe_pool(target)
    assert ours.byte_order == theirs.byte_order == "layer-major"
    rows = np.zeros((len(order), ours.payload_bytes), dtype=np.uint8)
    ours.gather(order, rows)
    theirs.scatter(range(len(order)), rows)
    for place, page in enumerate(order):
        assert pools.page_bytes(target, place) == pools.page_bytes(source, page)


@pytest.mark.parametrize("length", [8 * 1024, 32 * 1024])
def test_copies_of_small_and_large_segments(length: int) -> None:
    """Segments below and above the pagewise threshold are copied alike, both ways."""
    shape = {"page_size": 64, "heads": 1, "head_dim": length // 128, "layers": 2, "pages": 6}
    source = pools.make_mha_pool("layer_first", seed=1, **shape)
    target = pools.make_mha_pool("layer_first", seed=2, **shape)
    geometry = describe_pool(source)
    assert set(geometry.lengths.tolist()) == {length}
    rows = np.zeros((3, geometry.payload_bytes), dtype=np.uint8)
    geometry.gather([5, 0, 3], rows)
    describe_pool(target).scatter([1, 2, 4], rows)
    for page, place in ((5, 1), (0, 2), (3, 4)):
        assert pools.page_bytes(target, place) == pools.page_bytes(source, page)


@settings(max_examples=30, deadline=None)
@given(shape=mha_shapes(layouts=pools.ASYMMETRIC_LAYOUTS), v_head_dim=st.sampled_from((2, 32)))
def test_asymmetric_pools_hold_k_then_v(shape: dict[str, Any], v_head_dim: int) -> None:
    """With K and V of different widths a page is its K, then its V, each in its own buffer."""
    pool = pools.make_mha_pool(**shape, v_head_dim=v_head_dim)
    geometry = describe_pool(pool)
    out = np.zeros((pool.page_num, geometry.payload_bytes), dtype=np.uint8)
    geometry.gather(range(pool.page_num), out)
    assert len(geometry.regions) == 2
    for page in range(pool.page_num):
        pointers, sizes = pool.get_page_buffer_meta(pools.token_indices([page], pool.page_size))
        assert geometry.addresses([page])[0].tolist() == pointers
        assert geometry.lengths.tolist() == sizes
        expected = b"".join(map(ctypes.string_at, pointers, sizes))
        assert out[page].tobytes() == expected
    if pool.is_stride_page_aligned(64):
        assert geometry.is_aligned(64)
    before = raw(pool)
    pools.clear(pool)
    geometry.scatter(range(pool.page_num), out)
    assert raw(pool) == before


@pytest.mark.parametrize("as_array", [lambda t: t, lambda t: t.numpy(), lambda t: t.int(), list])
def test_page_numbers(as_array: Callable[[torch.Tensor], Any]) -> None:
    """Token indices, as tensor, array or list, become page numbers in their order."""
    geometry = describe_pool(pools.make_mha_pool(pages=8, page_size=16))
    indices = as_array(pools.token_indices([7, 0, 3], 16))
    pages = geometry.page_numbers(indices, 3)
    assert pages.dtype == np.int64
    assert pages.tolist() == [7, 0, 3]


def test_no_keys_are_no_pages() -> None:
    """Zero keys with zero indices are an empty batch."""
    geometry = describe_pool(pools.make_mha_pool())
    pages = geometry.page_numbers(torch.empty(0, dtype=torch.int64), 0)
    assert pages.size == 0
    assert geometry.addresses(pages).shape == (0, 2)


@pytest.mark.parametrize(
    ("indices", "keys", "message"),
    [
        (None, 1, "host indices are missing"),
        (range(8), 3, "8 host indices for 3 keys: pass 12"),
        (range(7), 2, "7 host indices for 2 keys"),
        (range(4), 0, "4 host indices for 0 keys"),
        ([], 1, "0 host indices for 1 keys"),
        ([1, 2, 3, 4], 1, "host index 1 starts a page but is no multiple of 4"),
        ([0, 1, 3, 2], 1, "host index 3 follows 1"),
        ([0, 1, 2, 3, 4, 5, 6, 4], 2, "host index 4 follows 6"),
        ([-4, -3, -2, -1], 1, "host index -4 is outside the pool of 16 tokens"),
        ([16, 17, 18, 19], 1, "host index 16 is outside the pool"),
        ([0.0, 1.0, 2.0, 3.0], 1, "pass one dimension of integers"),
        ([True, True, True, True], 1, "pass one dimension of integers"),
        ([[0, 1, 2, 3]], 1, "pass one dimension of integers"),
    ],
)
def test_page_numbers_refuses(indices: Any, keys: int, message: str) -> None:
    """Indices that are not whole pages of this pool are one error that names the first of them."""
    geometry = describe_pool(pools.make_mha_pool(pages=4, page_size=4))
    given = indices if indices is None else np.array(indices)
    with pytest.raises(RegistrationError, match=message):
        geometry.page_numbers(given, keys)


def test_page_numbers_of_a_full_batch_are_quick() -> None:
    """128 pages of 64 tokens take well under a millisecond, index check included."""
    geometry = describe_pool(pools.make_mha_pool(pages=256, page_size=64))
    indices = pools.token_indices(list(range(255, 127, -1)), 64)
    assert min(timeit.repeat(lambda: geometry.page_numbers(indices, 128), number=1, repeat=30)) < (
        0.0005
    )


@pytest.mark.parametrize("pages", [[-1], [4], [[0]]])
def test_pages_outside_the_pool_are_refused(pages: list[Any]) -> None:
    """No address, gather or scatter leaves the pool."""
    geometry = describe_pool(pools.make_mha_pool(pages=4))
    rows = np.zeros((1, geometry.payload_bytes), dtype=np.uint8)
    for call in (
        lambda: geometry.addresses(pages),
        lambda: geometry.gather(pages, rows),
        lambda: geometry.scatter(pages, rows),
    ):
        with pytest.raises(RegistrationError, match="page"):
            call()


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 1 << 20), np.uint8), ((2, 8), np.uint8), ((2, 1 << 20), np.int8)]
)
def test_buffers_that_do_not_fit_are_refused(shape: tuple[int, int], dtype: type) -> None:
    """Rows too few, too short or of another type are an error before a byte moves."""
    geometry = describe_pool(pools.make_mha_pool())
    rows = np.zeros(shape, dtype=dtype)
    with pytest.raises(RegistrationError, match="pass uint8 of at least"):
        geometry.gather([0, 1], rows)
    with pytest.raises(RegistrationError, match="pass uint8 of at least"):
        geometry.scatter([0, 1], rows)


def hand_made(**changes: Any) -> PoolGeometry:
    """Two segments of 8 bytes over 4 pages at an address that is never read."""
    fields: dict[str, Any] = {
        "layout": "page_first",
        "byte_order": "token-major",
        "page_tokens": 1,
        "pages": 4,
        "bases": np.array([4096, 4128]),
        "strides": np.array([8, 8]),
        "lengths": np.array([8, 8]),
        "regions": (Region(4096, 64),),
    }
    return PoolGeometry(**{**fields, **changes})


@pytest.mark.parametrize("v_head_dim", [8, 4])
def test_pages_outlive_the_pool(v_head_dim: int) -> None:
    """A pool that SGLang has destroyed can still be copied from: its memory is kept."""
    pool = pools.make_mha_pool(v_head_dim=v_head_dim, seed=1)
    geometry = describe_pool(pool)
    expected = b"".join(
        buffer.reshape(-1)[3 * length : 4 * length].view(torch.uint8).numpy().tobytes()
        for buffer in (pool.k_buffer, pool.v_buffer)
        for length in [buffer.numel() // 4]
    )
    released = [weakref.ref(buffer) for buffer in geometry.memory]
    pool.kv_buffer = None
    pool.__dict__.clear()
    del pool
    gc.collect()
    out = np.zeros((1, geometry.payload_bytes), np.uint8)
    geometry.gather([3], out)
    assert out.tobytes() == expected
    assert all(reference() is not None for reference in released)
    del geometry
    gc.collect()
    assert all(reference() is None for reference in released)


def test_payload_bytes_is_the_sum_of_segments() -> None:
    """A page of two 8-byte segments is 16 bytes."""
    assert hand_made().payload_bytes == 16


def test_segment_arrays_are_read_only() -> None:
    """A geometry can't be changed behind the stores' back."""
    geometry = hand_made()
    with pytest.raises(ValueError, match="read-only"):
        geometry.bases[0] = 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"regions": (Region(4096, 63),)}, "segment 1 of layout 'page_first' leaves the pool"),
        ({"regions": (Region(4104, 64),)}, "segment 0"),
        ({"regions": ()}, "segment 0"),
        ({"pages": 5}, "segment 1"),
        ({"pages": 0}, "at least one page"),
        ({"lengths": np.array([16, 8])}, "overlap"),
        ({"lengths": np.array([0, 8])}, "empty"),
        ({"lengths": np.array([8])}, "pass three of one length"),
    ],
)
def test_segments_stay_in_their_regions(changes: dict[str, Any], message: str) -> None:
    """A geometry that would reach outside its memory can't be made."""
    with pytest.raises(RegistrationError, match=message):
        hand_made(**changes)


@pytest.mark.parametrize(
    ("bases", "strides", "lengths"),
    [
        ([0, 64, 128, 192], [8] * 4, [8] * 4),
        ([0, 64, 128, 512], [8] * 4, [8] * 4),
        ([192, 128, 64, 0], [8] * 4, [8] * 4),
        ([0, 64, 0, 64], [8] * 4, [8] * 4),
        ([0, 8, 256, 264], [16] * 4, [8] * 4),
        ([0, 64, 128, 256], [8, 8, 16, 16], [8, 8, 16, 9]),
        ([0, 8, 512], [16, 16, 40], [8, 8, 33]),
    ],
)
def test_copies_do_not_depend_on_how_segments_lie(
    bases: list[int], strides: list[int], lengths: list[int]
) -> None:
    """Even, uneven, backward and interleaved segments of several lengths: gather is the bytes at
    the addresses, scatter puts them back, windows show them."""
    memory = np.random.default_rng(1).integers(0, 256, 1024, dtype=np.uint8)
    start = memory.ctypes.data
    geometry = hand_made(
        bases=np.array(bases) + start,
        strides=np.array(strides),
        lengths=np.array(lengths),
        regions=(Region(start, memory.size),),
    )
    numbers = [3, 0, 2]
    rows = np.full((3, sum(lengths) + 5), 7, np.uint8)
    geometry.gather(numbers, rows)
    for row, number in zip(rows, numbers, strict=True):
        segments = [
            memory[base + number * stride :][:length]
            for base, stride, length in zip(bases, strides, lengths, strict=True)
        ]
        assert row.tobytes() == b"".join(map(bytes, segments)) + b"\7" * 5
        shown = [bytes(window[number]) for window in geometry.windows]
        assert shown == list(map(bytes, segments))
    before = memory.copy()
    memory[:] = 0
    geometry.scatter(numbers, rows)
    again = np.zeros_like(rows)
    geometry.gather(numbers, again)
    assert np.array_equal(again[:, :-5], rows[:, :-5])
    touched = memory != 0
    assert np.array_equal(memory[touched], before[touched])


def test_rows_that_are_not_contiguous_are_refused() -> None:
    """A buffer with gaps between the bytes of a row is an error, not a lost copy."""
    geometry = hand_made()
    with pytest.raises(RegistrationError, match="each row contiguous"):
        geometry.gather([0], np.zeros((1, 64), np.uint8)[:, ::2])
