"""The kinds of pages that every version writes and reads, under the same keys.

Cells that mean the same share their pages; of the others none may ever hit one that is not its own.
"""

import dataclasses
from typing import Any

import torch

from versions.engine import Shape


@dataclasses.dataclass(frozen=True)
class Cell:
    """A pool and the fields of the storage configuration that differ from the usual."""

    shape: Shape
    layout: str = "page_first"
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    same_as: str = ""
    """What it means, where another cell means the same."""

    @property
    def is_plain(self) -> bool:
        """Whether it differs from the usual in nothing but the layout."""
        return self.shape in (MHA, MLA) and self.config == _config(self.shape)

    @property
    def meaning(self) -> str:
        """Equal for cells whose pages are the same, whatever the layout."""
        return self.same_as or f"{self.shape} {sorted(self.config.items())}"


def _config(shape: Shape, **changes: Any) -> dict[str, Any]:
    return {"is_mla_model": shape.kind == "mla", **changes}


MHA = Shape()
MLA = Shape("mla")
_LAYOUTS = {
    "mha": ("layer_first", "page_first", "page_first_direct", "page_head"),
    "mla": ("layer_first", "page_first", "page_first_direct"),
}
_OTHER_SHAPES = {
    "8 heads of 16": Shape(heads=8, width=16),
    "layers 3 to 5": Shape(first_layer=3),
    "float16": Shape(dtype=torch.float16),
    "fp8 e5m2": Shape(dtype=torch.float8_e5m2),
    "fp8 e4m3": Shape(dtype=torch.float8_e4m3fn),
    "24 latent and 24 rotary": Shape("mla", width=24, rotary=24),
}

CELLS = (
    {
        f"{shape.kind} {layout}": Cell(shape, layout, _config(shape))
        for shape in (MHA, MLA)
        for layout in _LAYOUTS[shape.kind]
    }
    | {name: Cell(shape, config=_config(shape)) for name, shape in _OTHER_SHAPES.items()}
    | {
        "another model": Cell(MHA, config=_config(MHA, model_name="org/another")),
        "rank 1 of 2": Cell(MHA, config=_config(MHA, tp_rank=1, tp_size=2)),
    }
)
"""What is written and read."""

READ_ONLY = {
    # One rank writes an MLA page, all read it.
    "mla rank 1 of 2": Cell(
        MLA, config=_config(MLA, tp_rank=1, tp_size=2), same_as=CELLS["mla page_first"].meaning
    ),
    "rank 1 of 4": Cell(MHA, config=_config(MHA, tp_rank=1, tp_size=4)),
}
"""What is only read."""
