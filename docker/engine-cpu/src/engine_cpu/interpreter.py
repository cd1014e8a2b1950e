"""SGLang's Triton kernels on a CPU, run by Triton's interpreter.

Owns what the kernels of recurrent layers (Mamba) miss where there is no GPU. The interpreter is
Triton's own and is chosen by ``TRITON_INTERPRET=1``, which has to be set before Triton is imported;
without it `provide` does nothing. It computes wrongly in bfloat16 and rightly in float16 and
float32.
"""

import contextlib
import importlib
import os
from typing import Any

import torch

_MIXER = "sglang.srt.layers.attention.mamba.mamba"
_CONVOLUTIONS = {
    "causal_conv1d_fn": "sglang.srt.layers.attention.mamba.causal_conv1d",
    "causal_conv1d_update": "sglang.srt.layers.attention.mamba.causal_conv1d",
    "causal_conv1d_fn_triton": "sglang.kernels.ops.mamba.causal_conv1d_triton",
    "causal_conv1d_update_triton": "sglang.kernels.ops.mamba.causal_conv1d_triton",
}
"""Functions the mixer binds on a GPU only, and the modules that have them."""


def _provide_convolutions() -> None:
    mixer = importlib.import_module(_MIXER)
    for function, module in _CONVOLUTIONS.items():
        if not hasattr(mixer, function):
            source = importlib.import_module(module)
            setattr(mixer, function, getattr(source, function.removesuffix("_triton")))


def _first_configuration(*_args: object, **_kwargs: object) -> list[float]:
    # Triton measures a kernel's configurations on the GPU and takes the fastest.
    return [0.0, 0.0, 0.0]


def provide() -> None:
    """Complete SGLang's modules for interpreted kernels."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    autotuner = importlib.import_module("triton.runtime.autotuner")
    autotuner.Autotuner._bench = _first_configuration
    device: Any = torch.cpu
    if not hasattr(device, "device"):
        # The kernels are launched inside ``torch.<device>.device(index)``.
        device.device = lambda _index: contextlib.nullcontext()
    _provide_convolutions()
