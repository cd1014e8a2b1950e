"""Install the wheel into SGLang's image: `install.py DIRECTORY`, which has a wheel and pins.txt.

What the image has is left as it is, whatever its version; what it lacks is installed as pinned.
Fails if the image then does not have what the wheel needs.
"""

import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

EXTRA = "objects"
PRUNE = Path(__file__).parents[1] / "prune.py"


def installed(name: str) -> str | None:
    """The version of a package that is there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def install(*what: str) -> None:
    """Install exactly these."""
    pip = [sys.executable, "-m", "pip", "install", "--no-cache-dir", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--disable-pip-version-check", *what], check=True)


def unmet() -> list[str]:
    """What the library needs and the image has not, a line each."""
    lines = []
    for text in requires("hicache-nixl") or []:
        need = Requirement(text)
        if need.marker and not need.marker.evaluate({"extra": EXTRA}):
            continue
        there = installed(need.name)
        if there is None or not need.specifier.contains(there, prereleases=True):
            lines.append(f"{need.name}{need.specifier} is needed, the image has {there}")
    return lines


def main(directory: Path) -> int:
    """Returns the exit status."""
    pins = (directory / "pins.txt").read_text().split()
    # SGLang's image has NIXL's implementation under the name of its CUDA version.
    nixl = installed("nixl") or installed("nixl-cu12") or installed("nixl-cu13")
    missing = [
        pin
        for pin in pins
        if installed(pin.split("==")[0]) is None and not (nixl and pin.startswith("nixl"))
    ]
    if missing:
        install(*missing)
    if any(pin.startswith("botocore==") for pin in missing):
        packages = sysconfig.get_path("purelib")
        subprocess.run([sys.executable, PRUNE, packages, "botocore"], check=True)
    install("--no-index", *map(str, directory.glob("*.whl")))
    problems = unmet()
    sys.stdout.write("".join(f"{line}\n" for line in problems))
    sys.stdout.write(f"added to the image: hicache-nixl {' '.join(missing)}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
