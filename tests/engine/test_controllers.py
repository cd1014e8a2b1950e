"""SGLang's cache controllers, with their own threads, over the connector in every layout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_cpu import PLATFORM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

CHILD = Path(__file__).with_name("controller_child.py")
LAYOUTS = {
    "mha": (
        ("layer_first", "kernel"),
        ("page_first", "kernel"),
        ("page_first_direct", "direct"),
        ("page_head", "kernel"),
    ),
    "mla": (
        ("layer_first", "kernel"),
        ("page_first", "kernel"),
        ("page_first_direct", "direct"),
    ),
}


@pytest.mark.parametrize(
    ("kind", "layout", "io_backend"),
    [
        pytest.param(kind, layout, io_backend, id=f"{kind}-{layout}")
        for kind, layouts in LAYOUTS.items()
        for layout, io_backend in layouts
    ],
)
@pytest.mark.parametrize("controller", ["hicache", "hybrid"])
def test_pages_return_through_every_tier(
    controller: str, kind: str, layout: str, io_backend: str, tmp_path: Path
) -> None:
    """Pages come back byte for byte: alone, while others are stored, and after a re-attach."""
    store = tmp_path / "store"
    store.mkdir()
    child = subprocess.run(
        [sys.executable, str(CHILD), str(store), controller, kind, layout, io_backend],
        env={**os.environ, "SGLANG_PLATFORM": PLATFORM, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    if child.returncode != 0:
        pytest.fail(f"status {child.returncode}:\n{child.stdout[-6000:]}", pytrace=False)
