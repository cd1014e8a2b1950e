"""Several ranks on one CPU: the paths that SGLang takes between them.

Owns what SGLang's own modules decide at their import from its in-tree CPU engine, which this
package does not use, and what its torch attention lacks for the padding of data-parallel attention.
"""

import importlib
from typing import Any

DECIDING_MODULES = (
    "sglang.srt.distributed.parallel_state",
    "sglang.srt.model_executor.forward_batch_info",
)
"""Modules whose `_is_cpu` chooses between collectives of torch and operators of the GPU."""


def provide() -> None:
    """Let ranks exchange tensors with what SGLang has for CPUs."""
    for name in DECIDING_MODULES:
        module: Any = importlib.import_module(name)
        module._is_cpu = True
    exchange: Any = importlib.import_module("sglang.srt.layers.dp_attention")
    exchange.memcpy_func = exchange.memcpy_cpu
    attention: Any = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
    # Ranks with fewer requests are padded with requests of this length.
    attention.TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _backend: 1
