"""The CPU copies put each row where SGLang's layouts say it belongs."""

from collections.abc import Callable

import pytest
import torch
from engine_cpu import kvcopy

PAGE, PAGES, LAYERS, HEADS, WIDTH = 4, 3, 2, 2, 8
TOKENS = PAGE * PAGES
ROW = HEADS * WIDTH * 2

# One side (K or V) of a host pool, as [token, layer, head, width] in the order of its layout.
HOSTS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "layer_first": ((LAYERS, TOKENS, HEADS, WIDTH), lambda host: host.transpose(0, 1)),
    "page_first": ((TOKENS, LAYERS, HEADS, WIDTH), lambda host: host),
    "page_first_direct": (
        (PAGES, LAYERS, PAGE, HEADS, WIDTH),
        lambda host: host.transpose(1, 2).reshape(TOKENS, LAYERS, HEADS, WIDTH),
    ),
    "page_head": (
        (PAGES, HEADS, PAGE, LAYERS, WIDTH),
        lambda host: host.permute(0, 2, 3, 1, 4).reshape(TOKENS, LAYERS, HEADS, WIDTH),
    ),
}


def table(layers: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)


def random_rows(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (TOKENS, HEADS, WIDTH)
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(LAYERS)]


def to_host(
    layout: str, k: list[torch.Tensor], v: list[torch.Tensor], hosts: list[torch.Tensor],
    device: torch.Tensor, host: torch.Tensor,
) -> None:  # fmt: skip
    indices = {"src_indices": device, "dst_indices": host}
    sources = {"src_k_layers": table(k), "src_v_layers": table(v)}
    targets = {"dst_k": hosts[0], "dst_v": hosts[1]}
    sizes = {"item_size": ROW, "num_layers": LAYERS}
    if layout == "layer_first":
        layers = {"dst_k_layers": table(list(hosts[0])), "dst_v_layers": table(list(hosts[1]))}
        kvcopy.transfer_kv_all_layer(**sources, **layers, **indices, **sizes, block_quota=1)
    elif layout == "page_first":
        stride = {"dst_layout_dim": ROW * LAYERS}
        kvcopy.transfer_kv_all_layer_lf_pf(**sources, **targets, **indices, **sizes, **stride)
    elif layout == "page_head":
        pages = {"dst_layout_dim": ROW * LAYERS, "page_size": PAGE, "head_num": HEADS}
        kvcopy.transfer_kv_all_layer_lf_ph(**sources, **targets, **indices, **sizes, **pages)
    else:
        kvcopy.transfer_kv_all_layer_direct_lf_pf(
            src_ptrs=[*k, *v], dst_ptrs=hosts, **indices, page_size=PAGE
        )


def to_device(
    layout: str, layer: int, hosts: list[torch.Tensor], k: torch.Tensor, v: torch.Tensor,
    host: torch.Tensor, device: torch.Tensor,
) -> None:  # fmt: skip
    indices = {"src_indices": host, "dst_indices": device}
    targets = {"dst_k": k, "dst_v": v}
    sources = {"src_k": hosts[0], "src_v": hosts[1]}
    stride = {"layer_id": layer, "item_size": ROW, "src_layout_dim": ROW * LAYERS}
    if layout == "layer_first":
        layers = {"src_k": hosts[0][layer], "src_v": hosts[1][layer]}
        kvcopy.transfer_kv_per_layer(**layers, **targets, **indices, item_size=ROW)
    elif layout == "page_first":
        kvcopy.transfer_kv_per_layer_pf_lf(**sources, **targets, **indices, **stride)
    elif layout == "page_head":
        pages = {"page_size": PAGE, "head_num": HEADS}
        kvcopy.transfer_kv_per_layer_ph_lf(**sources, **targets, **indices, **stride, **pages)
    else:
        kvcopy.transfer_kv_per_layer_direct_pf_lf(
            src_ptrs=hosts, dst_ptrs=[k, v], **indices, layer_id=layer, page_size=PAGE
        )


@pytest.mark.parametrize("layout", HOSTS)
def test_rows_land_where_the_layout_says(layout: str) -> None:
    """Rows lie in the host pool at their token, layer and head, and come back."""
    shape, as_rows = HOSTS[layout]
    k, v = random_rows(1), random_rows(2)
    hosts = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)]
    device = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3])
    host = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])

    to_host(layout, k, v, hosts, device, host)
    for side, layers in zip(hosts, (k, v), strict=True):
        expected = torch.zeros(TOKENS, LAYERS, HEADS, WIDTH, dtype=torch.bfloat16)
        expected[host] = torch.stack([layer[device] for layer in layers], dim=1)
        assert torch.equal(as_rows(side), expected)

    back = torch.tensor([4, 5, 6, 7, 8, 9, 10, 11])
    for layer in range(LAYERS):
        new_k, new_v = (torch.zeros(TOKENS, HEADS, WIDTH, dtype=torch.bfloat16) for _ in "kv")
        to_device(layout, layer, hosts, new_k, new_v, host, back)
        for new, old in ((new_k, k[layer]), (new_v, v[layer])):
            assert torch.equal(new[back], old[device])
            assert not new[:4].any()


def test_direct_copy_moves_whole_layers_rows() -> None:
    """The layout-free direct copy moves the chosen rows of each buffer and no other."""
    sources = random_rows(3)
    targets = [torch.zeros_like(source) for source in sources]
    rows, places = torch.tensor([1, 2]), torch.tensor([5, 0])
    kvcopy.transfer_kv_direct(
        src_layers=sources, dst_layers=targets, src_indices=rows, dst_indices=places, page_size=1
    )
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target[places], source[rows])
        assert int(target.any(dim=(1, 2)).sum()) == 2


@pytest.mark.parametrize("row", [-1, TOKENS])
def test_row_outside_the_pool_is_refused(row: int) -> None:
    """An index before or behind the tensor raises IndexError and writes nothing."""
    source, target = random_rows(4)
    before = target.clone()
    with pytest.raises(IndexError):
        kvcopy.transfer_kv_per_layer_mla(
            src=source,
            dst=target,
            src_indices=torch.tensor([0]),
            dst_indices=torch.tensor([row]),
            item_size=ROW,
        )
    assert torch.equal(target, before)
