"""SGLang's radix cache of hybrid models, with its own threads, over the connector: every pool's
bytes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_cpu import PLATFORM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

CHILD = Path(__file__).with_name("hybrid_child.py")
ROWS = ("layer_first", "page_first", "page_first_direct")
# SGLang's pool of Mamba states has these two.
STATES = ("page_first", "page_first_direct")
MODELS = {
    "rows-of-the-kv": {"draft": (*ROWS, "page_head"), "dsa": ROWS},
    "window": {"swa": (*ROWS, "page_head"), "swa_draft": ROWS},
    "state": {"mamba": STATES, "mamba_swa": STATES, "compressed": ROWS},
}


@pytest.mark.parametrize("models", [pytest.param(kinds, id=name) for name, kinds in MODELS.items()])
def test_every_pool_returns_through_every_tier(
    models: dict[str, tuple[str, ...]], tmp_path: Path
) -> None:
    """Whole prompts, shared prefixes and prompts read while others are stored come back byte for
    byte in every pool and layer, and a prefix that lacks a pool's page does not."""
    runs = [f"{kind}:{layout}" for kind, layouts in models.items() for layout in layouts]
    child = subprocess.run(
        [sys.executable, str(CHILD), str(tmp_path / "store"), *runs],
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
