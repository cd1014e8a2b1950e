"""The CPU copies put each recurrent state where SGLang's host pool keeps it."""

import pytest
import torch
from engine_cpu import kvcopy

LAYERS, SLOTS, SHAPE = 3, 5, (4, 8)
STATE = 4 * 8 * 4
DEVICE, HOST = torch.tensor([4, 1]), torch.tensor([0, 2])


def states(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((SLOTS, *SHAPE), generator=generator) for _ in range(LAYERS)]


def to_host(layers: list[torch.Tensor], host: torch.Tensor, io_backend: str) -> None:
    if io_backend == "direct":
        kvcopy.transfer_kv_all_layer_direct_lf_pf(
            src_ptrs=layers, dst_ptrs=[host], src_indices=DEVICE, dst_indices=HOST, page_size=1
        )
        return
    kvcopy.transfer_kv_mamba_lf_pf(
        src_ptrs=torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64),
        dst=host,
        src_indices=DEVICE,
        dst_indices=HOST,
        item_size=STATE,
        dst_layout_dim=STATE * LAYERS,
        num_layers=LAYERS,
    )


def to_device(host: torch.Tensor, layer: int, target: torch.Tensor, io_backend: str) -> None:
    if io_backend == "direct":
        kvcopy.transfer_kv_per_layer_direct_pf_lf(
            src_ptrs=[host], dst_ptrs=[target], src_indices=HOST, dst_indices=DEVICE, layer_id=layer
        )
        return
    kvcopy.transfer_kv_mamba_pf_lf(
        src=host,
        dst=target,
        src_indices=HOST,
        dst_indices=DEVICE,
        layer_id=layer,
        item_size=STATE,
        src_layout_dim=STATE * LAYERS,
    )


@pytest.mark.engine
@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
def test_states_land_in_their_slot_and_layer(io_backend: str) -> None:
    """A state lies in the host pool at its slot and layer, and comes back to its slot."""
    layers = states(5)
    host = torch.zeros((SLOTS, LAYERS, 1, *SHAPE))
    to_host(layers, host, io_backend)

    expected = torch.zeros_like(host)
    expected[HOST] = torch.stack([layer[DEVICE] for layer in layers], dim=1).unsqueeze(2)
    assert torch.equal(host, expected)
    for number, layer in enumerate(layers):
        target = torch.zeros_like(layer)
        to_device(host, number, target, io_backend)
        assert torch.equal(target[DEVICE], layer[DEVICE])
        assert int(target.any(dim=(1, 2)).sum()) == len(DEVICE)
