"""Claims about the plug-in, by SGLang's own loader and host pools in processes of their own."""

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import hugepages
import pools  # noqa: F401 - before SGLang

# isort: split
from sglang.srt.mem_cache.pool_host.base import HICACHE_HOST_MEMORY_RESERVE_BYTES as RESERVE

from hicache_nixl import connector_plugin
from hicache_nixl.connector_plugin import allocate_tensor, available_bytes
from hicache_nixl.errors import HostMemoryError
from hicache_nixl.settings import Settings, load_host_pool_settings
from hugepages import MIB, V2_MOUNT, write, write_pool

ON = {"HICACHE_NIXL_HOST_POOL_ALLOCATOR": "1"}
SGLANG_HUGEPAGES = {"SGLANG_HUGEPAGE_SIZE": "2MB"}
OUR_VARIABLES = ("HICACHE_NIXL_", "SGLANG_HUGEPAGE", "SGLANG_HICACHE", "SGLANG_PLUGINS")

BEGIN = """
import gc, json, logging, sys
import torch

for name in ("nms", "qnms"):  # for a CUDA build of torchvision beside a CPU build of torch
    if torch.version.cuda is None and not hasattr(torch.ops.torchvision, name):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor"
        )
"""
CHILD = """
records = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: records.append(record.getMessage())
logging.getLogger("hicache_nixl").addHandler(handler)

if sys.argv[1] == "pools first":
    import pools
from sglang.srt.plugins import load_plugins
load_plugins()
plugin_modules = sorted(name for name in sys.modules if name.startswith("hicache_nixl."))
import pools
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.mem_cache.storage import mmap
from sglang.srt.mem_cache.storage.mmap import mmap_allocator

def smaps(address):
    inside, fields = False, {}
    for line in open("/proc/self/smaps"):
        if "-" in line.split(" ", 1)[0]:
            first, last = (int(end, 16) for end in line.split(" ", 1)[0].split("-"))
            inside = first <= address < last
            fields = {"start": first} if inside else fields
        elif inside and line.endswith(" kB\\n"):
            fields[line.split(":")[0]] = int(line.split()[1])
    return fields

seen = {
    "hooked": hasattr(mmap_allocator.alloc_mmap, "__wrapped__"),
    "same": common.alloc_mmap is mmap.alloc_mmap is mmap_allocator.alloc_mmap,
    "modules": plugin_modules,
}
try:
    tensor = common.HostTensorAllocator().allocate((32, 1024, 1024), torch.float16, "cpu")
    address = tensor.data_ptr()
    fields = smaps(address)
    expected = torch.arange(tensor.numel(), dtype=torch.int32).to(torch.uint8).view(torch.float16)
    zero = not tensor.view(torch.uint8).any().item()
    tensor.view(-1)[: expected.numel()] = expected
    seen |= {
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "zero": zero,
        "kept": torch.equal(
            tensor.view(-1)[: expected.numel()].view(torch.uint8), expected.view(torch.uint8)
        ),
        "starts": fields["start"] == address,
        "page_kb": fields["KernelPageSize"],
        "resident_kb": fields["Rss"] + fields.get("Shared_Hugetlb", 0)
        + fields.get("Private_Hugetlb", 0),
    }
    del tensor
    gc.collect()
    seen["freed"] = smaps(address).get("start") != address
    pool = pools.make_mha_pool(pages=128, page_size=64, heads=8, head_dim=128, seed=5)
    seen["pool_page_kb"] = smaps(pool.kv_buffer.data_ptr())["KernelPageSize"]
    seen["pool_bytes"] = pool.kv_buffer.nbytes
except MemoryError as error:
    seen["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(seen | {"warnings": records}))
"""

BUDGET_CHILD = """
from sglang.srt.plugins import load_plugins
load_plugins()
import contextlib
import pools
from sglang.srt.mem_cache.pool_host import base

pools.host_memory_budget_scope = lambda budget: contextlib.nullcontext()
# More than any machine has: of ordinary memory nothing is left.
base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 50
seen = {"chosen": base.host_memory_budget_bytes(auto_size=True)}
try:
    pool = pools.make_mha_pool(pages=128, page_size=64, heads=8, head_dim=128, seed=5)
    seen["pool_bytes"] = pool.kv_buffer.nbytes
except ValueError as error:
    seen["error"] = str(error)
print(json.dumps(seen))
"""


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(OUR_VARIABLES)}
    only_ours = {"SGLANG_PLUGINS": "hicache_nixl", "PYTHONPATH": os.pathsep.join(sys.path)}
    return {**kept, **only_ours, **changes}


def command(order: str = "plug-ins first", child: str = CHILD) -> list[str]:
    installed = importlib.metadata.entry_points(group="sglang.srt.plugins", name="hicache_nixl")
    if not installed:
        pytest.skip("hicache-nixl is not installed, so SGLang cannot find its entry point")
    return [sys.executable, "-c", BEGIN + child, order]


def seen_by_sglang(
    changes: Mapping[str, str], order: str = "plug-ins first", child: str = CHILD
) -> dict[str, Any]:
    """What the child saw, run with these environment variables."""
    done = subprocess.run(
        command(order, child),
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(changes),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def said_by_plugin(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages of the plug-in."""
    return [
        record.getMessage() for record in caplog.records if record.name == connector_plugin.__name__
    ]


def check_memory(seen: dict[str, Any], page_kb: int) -> None:
    """The tensor and the pool are what SGLang expects, on pages of this size."""
    assert "error" not in seen
    assert (seen["dtype"], seen["shape"]) == ("torch.float16", [32, 1024, 1024])
    assert (seen["zero"], seen["kept"], seen["starts"], seen["freed"]) == (True,) * 4
    assert seen["resident_kb"] == 64 * 1024
    assert (seen["page_kb"], seen["pool_page_kb"]) == (page_kb, page_kb)
    assert seen["pool_bytes"] == 64 * MIB


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({}, False),
        ({"HICACHE_NIXL_HOST_POOL_ALLOCATOR": ""}, False),
        ({"HICACHE_NIXL_HOST_POOL_ALLOCATOR": "0"}, False),
        ({"HICACHE_NIXL_STORE": "nonsense", "SGLANG_HUGEPAGE_SIZE": "3MB"}, False),
        (ON, True),
    ],
)
def test_one_setting_switches_it_on(environ: dict[str, str], on: bool) -> None:
    """Only host_pool_allocator does, and without it no other setting is even looked at."""
    assert (load_host_pool_settings(environ) is not None) == on


def test_the_settings_file_switches_it_on(tmp_path: Path) -> None:
    """The file that HICACHE_NIXL_CONFIG names counts too."""
    file = tmp_path / "settings.toml"
    environ = {"HICACHE_NIXL_CONFIG": str(file)}
    file.write_text('host_pool_allocator = true\nhugepages = "required"\n')
    settings = load_host_pool_settings(environ)
    assert settings is not None
    assert settings.hugepages == "required"
    file.write_text("host_pool_allocator = false\n")
    assert load_host_pool_settings(environ) is None


def test_wrong_settings_are_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """register() never raises into SGLang: it logs what is wrong and hooks nothing."""
    monkeypatch.setenv("HICACHE_NIXL_HOST_POOL_ALLOCATOR", "perhaps")
    connector_plugin.register()
    (said,) = said_by_plugin(caplog)
    assert said.startswith("SGLang's host pools keep SGLang's own memory: ")
    assert "HICACHE_NIXL_HOST_POOL_ALLOCATOR" in said
    assert "\n" not in said


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_tensors_own_their_memory(dtype: torch.dtype) -> None:
    """Shape, dtype and bytes are as asked for, and a view outlives the tensor."""
    tensor = allocate_tensor((3, 5, 7), dtype, Settings())
    assert (tuple(tensor.shape), tensor.dtype, tensor.device.type) == ((3, 5, 7), dtype, "cpu")
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 4096 == 0
    raw = tensor.view(-1).view(torch.uint8)
    assert not raw.any()
    expected = torch.arange(raw.numel(), dtype=torch.int32).to(torch.uint8)
    raw.copy_(expected)
    del tensor
    assert torch.equal(raw, expected)


def test_nothing_is_no_tensor() -> None:
    """A shape without elements is refused as memory is."""
    with pytest.raises(HostMemoryError, match="cannot map 0 bytes"):
        allocate_tensor((0, 4), torch.uint8, Settings())


@pytest.mark.engine
def test_off_leaves_sglang_untouched() -> None:
    """Without the setting SGLang's function stays, and none of the library's memory is imported."""
    seen = seen_by_sglang({})
    assert (seen["hooked"], seen["same"]) == (False, True)
    assert "hicache_nixl.connector_plugin" in seen["modules"]
    assert "hicache_nixl.memory" not in seen["modules"]


@pytest.mark.engine
def test_on_without_hugepages() -> None:
    """Host pools get populated ordinary pages, also where their modules came before the hook."""
    seen = seen_by_sglang(ON, "pools first")
    assert (seen["hooked"], seen["same"], seen["warnings"]) == (True, True, [])
    check_memory(seen, page_kb=4)


@pytest.mark.engine
def test_on_with_hugepages() -> None:
    """SGLang's own SGLANG_HUGEPAGE_SIZE gives host pools hugepages where they are free."""
    with hugepages.raised(32):
        seen = seen_by_sglang(ON | SGLANG_HUGEPAGES)
    assert (seen["hooked"], seen["warnings"]) == (True, [])
    check_memory(seen, page_kb=2048)


@pytest.mark.engine
def test_a_hugetlb_limit_does_not_kill_the_engine(tmp_path: Path) -> None:
    """16 MiB allowed of 64 MiB: ordinary pages and one warning instead of SIGBUS."""
    with hugepages.raised(72):
        done = hugepages.run_limited(
            [2, 1],
            16 * MIB,
            command(),
            tmp_path / "cgroup",
            environment(ON | SGLANG_HUGEPAGES),
        )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    check_memory(seen, page_kb=4)
    (warning,) = seen["warnings"]
    assert "cannot map 64.0MiB on 32 hugepages of 2.0MiB: the cgroup allows 16.0MiB" in warning
    assert warning.endswith("; using ordinary pages")


@pytest.mark.engine
def test_the_limit_kills_an_engine_without_it(tmp_path: Path) -> None:
    """What the plug-in is for: SGLang's own memory ends in SIGBUS under the same limit."""
    with hugepages.raised(72):
        done = hugepages.run_limited(
            [2, 1], 16 * MIB, command(), tmp_path / "cgroup", environment(SGLANG_HUGEPAGES)
        )
    assert (done.returncode, done.stdout) == (135, "")


@pytest.mark.engine
def test_required_is_one_error() -> None:
    """Under `required` a shortage is a HostMemoryError, which SGLang raises at start."""
    with hugepages.raised(0):
        if hugepages.free() >= 32:
            pytest.skip("too many hugepages are free here for a shortage of 64 MiB")
        seen = seen_by_sglang(ON | {"HICACHE_NIXL_HUGEPAGES": "required"})
    assert seen["error"].startswith("HostMemoryError: cannot map 64.0MiB on 32 hugepages of 2.0MiB")
    assert "run `sysctl -w vm.nr_hugepages=" in seen["error"]


def limited(root: Path, limit: int, used: int) -> None:
    """64 hugepages of which 40 are free, and a cgroup that may have `limit` of them."""
    write_pool(root, 2 * MIB, nr=64, free=40)
    write(
        root,
        {
            "proc/self/cgroup": "0::/pod",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/pod/hugetlb.2MB.max": limit,
            "sys/fs/cgroup/pod/hugetlb.2MB.current": used,
        },
    )


@pytest.mark.parametrize(
    ("limit", "used", "fixed", "free"),
    [
        (32 * MIB, 20 * MIB, 32 * MIB, 12 * MIB),
        (100 * MIB, 0, 100 * MIB, 80 * MIB),
        (1 << 40, 0, 128 * MIB, 80 * MIB),
    ],
    ids=["limit", "others", "kernel"],
)
def test_hugepages_count_as_host_memory(
    tmp_path: Path, limit: int, used: int, fixed: int, free: int
) -> None:
    """A fixed size is checked against all that the ranks may map, and a size is chosen by what is
    free; SGLang's reserve is not taken from hugepages."""
    limited(tmp_path, limit, used)
    for word, ordinary in (("required", RESERVE + (1 << 40)), ("prefer", RESERVE)):
        settings = Settings(hugepages=word)
        for fixed_size, expected in ((True, fixed), (False, free)):
            answer = available_bytes(
                lambda ordinary=ordinary: ordinary, settings, fixed_size=fixed_size, root=tmp_path
            )
            assert answer == RESERVE + expected, word


@pytest.mark.parametrize("populates", [True, False], ids=["no pages", "old kernel"])
def test_ordinary_memory_counts_where_it_is_taken(
    tmp_path: Path,
    populates: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Under `prefer` a pool may lie in ordinary memory instead, and under `required` it may not;
    pages that the kernel cannot populate count as none, which is said."""
    pages = 0 if populates else 1 << 20
    write_pool(tmp_path, 2 * MIB, nr=pages, free=pages)
    monkeypatch.setattr("hicache_nixl.memory._can_populate", lambda: populates)
    answers = {
        word: available_bytes(
            lambda: RESERVE + 5, Settings(hugepages=word), fixed_size=True, root=tmp_path
        )
        for word in ("prefer", "required")
    }
    assert answers == {"prefer": RESERVE + 5, "required": RESERVE}
    assert "SGLang's host pools may have 0" in said_by_plugin(caplog)[0]


@pytest.mark.engine
@pytest.mark.parametrize("word", ["prefer", "required"])
def test_a_pool_that_fits_hugepages_alone(word: str) -> None:
    """SGLang builds a host pool that its hugepages have room for where no ordinary memory is
    left."""
    with hugepages.raised(40):
        changes = ON | SGLANG_HUGEPAGES | {"HICACHE_NIXL_HUGEPAGES": word}
        seen = seen_by_sglang(changes, child=BUDGET_CHILD)
    assert seen["pool_bytes"] == 64 * MIB
    assert seen["chosen"] >= 80 * MIB


@pytest.mark.engine
@pytest.mark.parametrize("changes", [{}, ON], ids=["off", "ordinary pages"])
def test_ordinary_memory_is_checked_by_sglang(changes: dict[str, str]) -> None:
    """Without hugepages SGLang's own check stands."""
    seen = seen_by_sglang(changes, child=BUDGET_CHILD)
    assert seen["chosen"] < 0
    assert seen["error"].startswith("Not enough host memory available")


def test_a_version_without_the_function(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What this version of SGLang does not have is named in one line, and left alone."""
    monkeypatch.setattr(connector_plugin, "ALLOCATION", "sglang.no_such_module.alloc")
    monkeypatch.setattr(connector_plugin, "AVAILABLE", "sglang.srt.plugins.no_such_function")
    monkeypatch.setenv("HICACHE_NIXL_HOST_POOL_ALLOCATOR", "1")
    monkeypatch.setenv("HICACHE_NIXL_HUGEPAGES", "prefer")
    connector_plugin.register()
    assert said_by_plugin(caplog) == [
        f"this version of SGLang has no {target}, so that is not hooked"
        for target in ("sglang.no_such_module.alloc", "sglang.srt.plugins.no_such_function")
    ]
