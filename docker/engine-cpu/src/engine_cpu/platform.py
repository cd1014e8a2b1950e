"""The SGLang platform of this package: every operation on its torch-native path.

Owns the device description only. Imported in each engine process by the entry point
``sglang.srt.platforms``.
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn


def _declare_torchvision_operators() -> None:
    """Let a CUDA build of torchvision be imported beside a CPU build of torch.

    Such a torchvision skips its compiled library, then registers shape functions for operators of
    that library and fails because torch has no schema for them.
    """
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )


if torch.version.cuda is None:
    # SGLang's platform modules import torchvision through transformers.
    _declare_torchvision_operators()

from sglang.srt.platforms.cpu import CpuSRTPlatform  # noqa: E402
from sglang.srt.platforms.device_mixin import PlatformEnum  # noqa: E402
from sglang.srt.platforms.interface import PlatformCapabilities  # noqa: E402


class CpuEnginePlatform(CpuSRTPlatform):  # type: ignore[misc]
    """SGLang's own CPU device, without the AMX kernels its in-tree CPU engine requires."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """Torch's scaled dot product attention over the paged KV."""
        return "torch_native"

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Checkpoints of the recurrent state at page boundaries work as on a GPU."""
        return True

    def post_load_model(self, model: "nn.Module") -> None:
        """Keep DeepSeek models on the absorbed MLA path, in prefill too.

        ``torch_native`` reads nothing but the latent KV pages, while SGLang's default for a backend
        it has no handler for expands the first prefill to MHA.
        """
        if ".deepseek" not in type(model).__module__:
            return
        from sglang.srt.models.deepseek_common.attention_backend_handler import (
            AttentionBackendRegistry,
        )
        from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
            AttnForwardMethod,
        )

        AttentionBackendRegistry.register(
            "torch_native", lambda _attention, _batch: AttnForwardMethod.MLA
        )


def activate() -> str:
    """Name the platform class, as SGLang's entry point asks."""
    return "engine_cpu.platform:CpuEnginePlatform"
