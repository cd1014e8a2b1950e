"""The SGLang of this process, whichever version it is: pools, storage factory, configuration.

Owns everything that depends on the version, which is the first one on Python's path. Import this
module before SGLang: it makes old versions importable where there is no GPU and where the other
packages are younger than they are. They miss

- operators of a torchvision for CUDA beside a torch for CPU,
- names of model configurations that transformers has taken since,
- ``sgl_kernel``, of which they need the copies between L1 and L2: those of ``engine_cpu``.
"""

import contextlib
import dataclasses
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed
import transformers
from engine_cpu import kvcopy

for _operator in ("nms", "qnms"):
    if torch.version.cuda is None and not hasattr(torch.ops.torchvision, _operator):
        torch.library.define(
            f"torchvision::{_operator}", "(Tensor dets, Tensor scores, float threshold) -> Tensor"
        )


def _allow_taken_names() -> None:
    register = transformers.AutoConfig.register

    def allowing(name: str, configuration: Any, exist_ok: bool = True) -> None:
        register(name, configuration, exist_ok=True)

    transformers.AutoConfig.register = staticmethod(allowing)


def _provide_kernels() -> None:
    for name in ("sgl_kernel", "sgl_kernel.kvcacheio", "sgl_kernel.allreduce"):
        module = sys.modules[name] = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    kernels = sys.modules["sgl_kernel.kvcacheio"]
    kernels.__dict__.update(kvcopy.OPERATIONS)
    # Younger versions bind them on a GPU only.
    pools = importlib.import_module("sglang.srt.mem_cache.memory_pool_host")
    pools.__dict__.update(kvcopy.OPERATIONS)


_allow_taken_names()
IS_CURRENT = importlib.util.find_spec("sglang.srt.mem_cache.device_pool_info") is not None
"""Whether host pools are built from descriptions of device pools, as in the pinned version."""
if IS_CURRENT:
    from sglang.srt.plugins import load_plugins

    load_plugins()
else:
    _provide_kernels()

import sglang  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402

VERSION = str(sglang.__version__)
PAGE = 16
"""Tokens of a page."""

# SGLang leaves 10 GiB of the machine free, however small the pool is.
_memory = psutil.virtual_memory()
psutil.virtual_memory = lambda: _memory._replace(available=1 << 40)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the rows of a KV pool are. An MLA row has `width` latent and `rotary` other elements."""

    kind: str = "mha"
    layers: int = 3
    first_layer: int = 0
    heads: int = 4
    width: int = 32
    rotary: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def row(self) -> tuple[int, int, int]:
        """Sides (K and V), heads and bytes of a token in a layer."""
        if self.kind == "mla":
            return 1, 1, (self.width + self.rotary) * self.dtype.itemsize
        return 2, self.heads, self.width * self.dtype.itemsize


@contextlib.contextmanager
def running(directory: Path) -> Iterator[None]:
    """What the engine has set up when it makes a cache controller, for one rank of one."""
    if IS_CURRENT:
        from sglang.srt.runtime_context import get_parallel

        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{directory}/group", rank=0, world_size=1
        )
        get_parallel().override_permanently(
            tp_rank=0, pp_rank=0, attn_tp_rank=0, attn_dp_rank=0, attn_dcp_rank=0
        )
    else:
        from sglang.srt import distributed

        set_arguments()
        distributed.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{directory}/group",
            backend="gloo",
        )
        distributed.initialize_model_parallel(backend="gloo")
    yield
    torch.distributed.destroy_process_group()


def set_arguments(**changes: Any) -> None:
    """Server arguments of an older version: the defaults of its own class, and `changes`."""
    from sglang.srt import server_args

    arguments = object.__new__(server_args.ServerArgs)
    for name, value in changes.items():
        setattr(arguments, name, value)
    server_args.set_global_server_args_for_scheduler(arguments)


@contextlib.contextmanager
def configured(layout: str, dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """The current version's configuration; older ones ask for none of it."""
    if not IS_CURRENT:
        yield
        return
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args(
        page_size=PAGE,
        hicache_mem_layout=layout,
        hicache_io_backend=io_backend(layout),
        hicache_ratio=2.0,
        hicache_storage_backend="dynamic",
        kv_cache_dtype=str(dtype).removeprefix("torch."),
    ):
        yield


def io_backend(layout: str) -> str:
    """How SGLang moves pages between L1 and L2 in a layout."""
    return "direct" if layout == "page_first_direct" else "kernel"


def device_pool(shape: Shape, tokens: int) -> Any:
    """The version's own device pool, in ordinary memory."""
    from sglang.srt.mem_cache import memory_pool

    sizes: dict[str, Any] = {
        "size": tokens,
        "page_size": PAGE,
        "dtype": shape.dtype,
        "layer_num": shape.layers,
        "device": "cpu",
        "enable_memory_saver": False,
        "start_layer": shape.first_layer,
        "end_layer": shape.first_layer + shape.layers,
    }
    if shape.kind == "mla":
        return memory_pool.MLATokenToKVPool(
            **sizes, kv_lora_rank=shape.width, qk_rope_head_dim=shape.rotary
        )
    return memory_pool.MHATokenToKVPool(**sizes, head_num=shape.heads, head_dim=shape.width)


def host_pool(device: Any, shape: Shape, layout: str) -> Any:
    """The version's own host pool over a device pool, twice its size. Within `configured`."""
    if IS_CURRENT:
        from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool

        return build_kv_host_pool(kv_pool=device, page_size=PAGE)
    from sglang.srt.mem_cache import memory_pool_host

    name = "MLATokenToKVPoolHost" if shape.kind == "mla" else "MHATokenToKVPoolHost"
    return getattr(memory_pool_host, name)(device, 2.0, 0, PAGE, layout, pin_memory=False)


def backend_settings(store: Path) -> dict[str, Any]:
    """The extra configuration that makes SGLang load the connector."""
    return {
        "backend_name": "hicache_nixl",
        "module_path": "hicache_nixl",
        "class_name": "HiCacheNixlConnector",
        "interface_v1": 1,
        "store": f"slab://{store}",
        "capacity": "64MiB",
        "staging": "4MiB",
    }


def connector(store: Path, pool: Any, **fields: Any) -> Any:
    """The connector as SGLang's own factory makes it, with the pool registered.

    `fields` change the storage configuration; those that this version does not have must not be
    given.
    """
    values: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": pool.layout == "page_first",
        "model_name": "org/model",
    }
    known = {field.name for field in dataclasses.fields(HiCacheStorageConfig)}
    config = HiCacheStorageConfig(
        **{name: value for name, value in values.items() if name in known} | fields,
        extra_config=backend_settings(store),
    )
    made = StorageBackendFactory.create_backend("dynamic", config, pool)
    made.register_mem_pool_host(pool)
    return made


def page_keys(tokens: list[int]) -> list[str]:
    """The names that this version gives to the pages of a prompt."""
    utilities = importlib.import_module("sglang.srt.mem_cache.utils")
    if hasattr(utilities, "get_storage_hash_str"):
        keys: list[str] = utilities.get_storage_hash_str(tokens, None, page_size=PAGE)
        return keys
    if hasattr(utilities, "get_hash_str"):
        get_hash_str = utilities.get_hash_str
    else:
        from sglang.srt.mem_cache.hicache_storage import get_hash_str
    names: list[str] = []
    for start in range(0, len(tokens), PAGE):
        names.append(get_hash_str(tokens[start : start + PAGE], names[-1] if names else None))
    return names
