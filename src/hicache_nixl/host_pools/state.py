"""Reader of pools that hold the state of recurrent layers, one slot for each state."""

from typing import Any

from hicache_nixl.errors import RegistrationError
from hicache_nixl.host_pools.reading import (
    Buffer,
    Reading,
    RowFormat,
    attribute,
    by_layout,
    count,
    dtype_name,
    held_tensor,
    tensor_format,
)


def mamba(pool: Any) -> Reading:
    """`MambaPoolHost`: temporal and convolution states of all layers, and what else belongs to the
    slot, as one page of one index. A model without a temporal state has an empty tensor for it."""
    by_layout(pool, {"page_first": None, "page_first_direct": None})
    held_tensor(pool)
    slots, n = count(pool, "size"), count(pool, "num_mamba_layers")
    temporal, convs = attribute(pool, "temporal_buffer"), attribute(pool, "conv_buffer")
    sides = attribute(pool, "slot_state_buffers")
    parts = [("temporal_buffer", temporal, (slots, n, 1, *attribute(pool, "temporal_state_shape")))]
    shapes = attribute(pool, "conv_state_shapes")
    if len(shapes) != len(convs):
        raise RegistrationError(
            f"MambaPoolHost has {len(convs)} convolution tensors of {len(shapes)} shapes"
        )
    parts += [
        (f"conv_buffer[{i}]", conv, (slots, n, 1, *shape))
        for i, (conv, shape) in enumerate(zip(convs, shapes, strict=True))
    ]
    parts += [
        (f"slot_state_buffers[{i}]", side, (slots, *side.shape[1:])) for i, side in enumerate(sides)
    ]
    return Reading(
        pages=slots,
        page_tokens=count(pool, "page_size"),
        byte_order="layer-major",
        buffers=tuple(
            Buffer(name, tensor, shape, tensor.element_size(), 1, slots)
            for name, tensor, shape in parts
            if tensor.numel()
        ),
        facts={
            "layers": n,
            "draft_layers": len(attribute(pool, "mtp_draft_buffer_infos")),
            "temporal": tensor_format(temporal, 3),
            "convolution": ";".join(tensor_format(conv, 3) for conv in convs),
            "slot_states": ";".join(tensor_format(side, 1) for side in sides),
        },
        dtype=dtype_name(temporal.dtype),
        row_format=RowFormat.DESCRIBED,
    )
