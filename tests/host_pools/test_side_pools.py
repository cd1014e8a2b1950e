"""Pages of the pools beside the KV pool, against SGLang's own view of them."""

from typing import Any

import numpy as np
import pytest
import torch

import pools
import side_pools
from hicache_nixl.errors import RegistrationError
from hicache_nixl.geometry import PoolGeometry, describe_pool

parametrize_pools = pytest.mark.parametrize("name", side_pools.SIDE_POOLS)


def gathered(geometry: PoolGeometry, pages: list[int]) -> np.ndarray:
    """The payloads of pages."""
    out = np.zeros((len(pages), geometry.payload_bytes), np.uint8)
    geometry.gather(pages, out)
    return out


@parametrize_pools
def test_gather_is_get_data_page(name: str) -> None:
    """A page's payload is the flat data page that SGLang gives, byte by byte."""
    pool = side_pools.make_side_pool(name, seed=7)
    geometry = describe_pool(pool)
    pages = list(range(geometry.pages))[::-1]
    for page, payload in zip(pages, gathered(geometry, pages), strict=True):
        assert payload.tobytes() == pools.page_bytes(pool, page)


@parametrize_pools
def test_scatter_fills_another_pool(name: str) -> None:
    """Pages scattered into a second pool are there what they were, and no other byte changes."""
    source, target = (side_pools.make_side_pool(name, seed=seed) for seed in (1, 2))
    geometry = describe_pool(source)
    untouched = [pools.page_bytes(target, page) for page in range(geometry.pages)]
    describe_pool(target).scatter([2, 0], gathered(geometry, [1, 3]))
    expected = {2: pools.page_bytes(source, 1), 0: pools.page_bytes(source, 3)}
    for page, before in enumerate(untouched):
        assert pools.page_bytes(target, page) == expected.get(page, before)


@parametrize_pools
def test_every_byte_of_a_pool_is_in_one_page(name: str) -> None:
    """The pages' segments tile the pool's tensors, apart from spare rows behind the last page."""
    pool = side_pools.make_side_pool(name)
    geometry = describe_pool(pool)
    addresses = geometry.addresses(range(geometry.pages))
    covered = [
        (int(address), int(address) + int(length))
        for row in addresses
        for address, length in zip(row, geometry.lengths, strict=True)
    ]
    assert all(a[1] <= b[0] for a, b in zip(sorted(covered), sorted(covered)[1:], strict=False))
    total = sum(buffer.nbytes for buffer in pools.buffers_of(pool))
    spare = sum(
        buffer.nbytes // rows * (rows - geometry.pages)
        for buffer in pools.buffers_of(pool)
        if (rows := getattr(pool, "indexer_page_num", geometry.pages)) != geometry.pages
    )
    assert geometry.pages * geometry.payload_bytes == total - spare


@parametrize_pools
def test_addresses_are_those_of_the_zero_copy_interface(name: str) -> None:
    """Where SGLang names the memory of a page, it is the same memory, in the same order."""
    pool = side_pools.make_side_pool(name)
    geometry = describe_pool(pool)
    indices = pools.token_indices([2, 1], geometry.page_tokens)
    try:
        addresses, _ = pool.get_page_buffer_meta(indices)
    except (NotImplementedError, ValueError):
        # SGLang has no such view of this pool; the bytes are compared above.
        return
    ours = geometry.addresses([2, 1])
    assert set(addresses) >= set(ours[:, 0].tolist())
    if len(addresses) == ours.size:
        assert addresses == ours.ravel().tolist()


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (side_pools.make_mamba_pool, "page_first", "page_first_direct"),
        *(
            (make, "layer_first", layout)
            for layout in ("page_first", "page_first_direct")
            for make in (
                side_pools.make_dsa_indexer_pool,
                side_pools.make_compressed_pool,
                side_pools.make_state_pool,
                side_pools.make_qsa_indexer_pool,
                side_pools.make_nvfp4_pool,
            )
        ),
    ],
)
def test_layouts_of_equal_bytes(make: Any, one: str, other: str) -> None:
    """Pools whose pages are rows give the same page in every layout, and say so."""
    first, second = make(one, seed=5), make(other)
    describe_pool(second).scatter([0, 1], gathered(describe_pool(first), [1, 2]))
    assert pools.page_bytes(second, 0) == pools.page_bytes(first, 1)
    assert describe_pool(first).byte_order == describe_pool(second).byte_order


def test_mxfp8_pages_hold_their_scales() -> None:
    """An MXFP8 page is K, V, the scales of K and those of V."""
    pool = side_pools.make_mxfp8_pool(seed=4)
    geometry = describe_pool(pool)
    for page, payload in enumerate(gathered(geometry, list(range(geometry.pages)))):
        rows = slice(page * pool.page_size, (page + 1) * pool.page_size)
        parts = [
            pool.kv_buffer[0, rows],
            pool.kv_buffer[1, rows],
            pool.k_scale_host[page],
            pool.v_scale_host[page],
        ]
        flat = [part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts]
        assert payload.tobytes() == b"".join(flat)


def test_envelopes_are_found_where_they_moved() -> None:
    """After SGLang compacted its shared memory, the same indices name the same bytes."""
    full, window = side_pools.make_envelope_pools()
    geometry = describe_pool(window)
    indices = window.alloc(5 * window.page_size)
    generator = torch.Generator().manual_seed(1)
    expected = []
    for page in range(5):
        content = torch.randint(
            0, 256, (geometry.payload_bytes,), dtype=torch.uint8, generator=generator
        )
        window.set_from_flat_data_page(int(indices[page * window.page_size]), content)
        expected.append(content.numpy().tobytes())
    before = geometry.page_numbers(indices, 5)
    window.free(indices[: 2 * window.page_size])
    kept = indices[2 * window.page_size :]
    # As much as fits only when the pages that are left move together.
    wanted = window.available_size() - window.page_size
    assert full.alloc(full.available_size()) is not None or window.alloc(wanted) is not None
    after = geometry.page_numbers(kept, 3)
    assert [row.tobytes() for row in gathered(geometry, after.tolist())] == expected[2:]
    assert before[2:].tolist() != after.tolist()


def test_envelope_that_is_not_allocated() -> None:
    """An index that SGLang holds no page for is refused in one line."""
    _, window = side_pools.make_envelope_pools()
    with pytest.raises(RegistrationError, match="not allocated") as caught:
        describe_pool(window).page_numbers(pools.token_indices([0], window.page_size), 1)
    assert "\n" not in str(caught.value)
