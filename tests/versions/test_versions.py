"""The connector under several versions of SGLang, and pages that go from one version to another.

Every version has processes of its own: one writes a store, one reads the stores of all versions.
Both go through the version's own storage factory and interface with its own host pools, and through
its own cache controller and threads.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import pytest
from engine_cpu import PLATFORM
from filelock import FileLock

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PINS = ROOT / "ci" / "sglang-versions.txt"
OLDER = [
    line.removeprefix("sglang==")
    for line in PINS.read_text().splitlines()
    if line.startswith("sglang==")
]
VERSIONS = [*OLDER, installed_version("sglang")]
LAYOUTS = [
    "mha layer_first",
    "mha page_first",
    "mha page_first_direct",
    "mha page_head",
    "mla layer_first",
    "mla page_first",
    "mla page_first_direct",
]
WHOLE = {"exists": 4, "read": [True] * 4, "wrong": []}
MISS = {"exists": 0, "read": [False] * 4, "wrong": []}
TELLS_ITS_STAGE = {"0.5.14"}
"""Older versions that tell their storage which pipeline stage it serves."""

Report = dict[str, Any]
Run = Callable[[str, str], Report]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The report of a version's process, which runs once for all tests and workers."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    directory = base / "versions"
    directory.mkdir(exist_ok=True)

    def run(version: str, action: str) -> Report:
        stores = [version] if action == "write" else VERSIONS
        if action == "read":
            for writer in VERSIONS:
                run(writer, "write")
        report = directory / f"{version}-{action}.json"
        with FileLock(f"{report}.lock"):
            if not report.exists():
                output = _child(version, action, report, [directory / store for store in stores])
                if not report.exists():
                    report.write_text(json.dumps({"failed": output}))
        outcome: Report = json.loads(report.read_text())
        if "failed" in outcome:
            pytest.fail(f"SGLang {version}, {action}:\n{outcome['failed']}", pytrace=False)
        return outcome

    return run


def _child(version: str, action: str, report: Path, stores: list[Path]) -> str:
    """Run a process; what it printed at last."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SGLANG_PLATFORM": PLATFORM}
    path = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    if version in OLDER:
        package = ROOT / ".sglang" / version
        if not package.is_dir():
            pytest.skip(f"SGLang {version} is not in {package}: run ci/sglang-versions.sh")
        path.insert(0, str(package))
        del environment["SGLANG_PLATFORM"]
    child = subprocess.run(
        [sys.executable, "-m", "versions.child", action, str(report), *map(str, stores)],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return f"status {child.returncode}\n{child.stdout[-6000:]}"


@pytest.mark.parametrize("version", VERSIONS)
def test_pages_are_stored(version: str, run: Run) -> None:
    """Each kind of page is stored through the interface, each layout through the controller."""
    report = run(version, "write")
    assert report["version"] == version
    outcome = report[version]
    whole = {"exists": 4, "written": [True] * 4, "counted": [4]}
    assert {name for name, cell in outcome["cells"].items() if cell != whole} == set()
    assert outcome["controller"] == dict.fromkeys(LAYOUTS, "stored")


@pytest.mark.parametrize("writer", VERSIONS)
@pytest.mark.parametrize("reader", VERSIONS)
def test_pages_of_a_version_are_right_in_another(reader: str, writer: str, run: Run) -> None:
    """Every byte of every layer is what the reader would have stored itself, and nothing else is
    touched; what no version wrote is a miss."""
    report = run(reader, "read")
    assert report["keys"] == run(writer, "write")["keys"]
    cells = report[writer]["cells"]
    assert cells.pop("rank 1 of 4") == MISS
    assert {name: cell for name, cell in cells.items() if cell != WHOLE} == {}
    assert report[writer]["controller"] == dict.fromkeys(LAYOUTS, "right")


@pytest.mark.parametrize("version", VERSIONS)
def test_clear_leaves_other_models_alone(version: str, run: Run) -> None:
    """After `clear` the pages of the connector's model are gone and those of another are whole."""
    assert run(version, "write")["cleared"] == {"cleared": True, "left": 0, "others": WHOLE}


@pytest.mark.parametrize("version", OLDER)
def test_what_a_version_does_not_tell_is_refused(version: str, run: Run) -> None:
    """Unknown device pools, pools beside the KV pool and stages that cannot be told apart raise a
    RegistrationError that names them."""
    refused = run(version, "write")["refused"]
    accepted = {name for name, error in refused.items() if name not in error}
    assert accepted == ({"pp_size"} if version in TELLS_ITS_STAGE else set())
