"""Install the wheel into SGLang's image: `install.py DIRECTORY`, which has a wheel and pins.txt.

What the image has is left as it is, whatever its version; what it lacks is installed as pinned.
Fails if the image then does not have what the wheel needs. `install.py DIRECTORY TO` installs
nothing and puts the wheel, and wheels of what the image lacks, into the directory TO, for a pod
that finds them by PYTHONPATH.
"""

import shutil
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


def pip(command: str, *options: str) -> None:
    """Call pip for exactly what is named."""
    call = [sys.executable, "-m", "pip", command, "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*call, *options], check=True)


def install(wheels: list[Path], missing: list[str]) -> None:
    """Install the wheels, and what is missing from the package index."""
    options = ("--no-cache-dir", "--no-compile")
    if missing:
        pip("install", *options, *missing)
    if any(pin.startswith("botocore==") for pin in missing):
        packages = sysconfig.get_path("purelib")
        subprocess.run([sys.executable, PRUNE, packages, "botocore"], check=True)
    pip("install", *options, "--no-index", *map(str, wheels))


def collect(wheels: list[Path], missing: list[str], to: Path) -> None:
    """Put what `install` would install into a directory as wheels; they then count as installed."""
    to.mkdir(parents=True, exist_ok=True)
    if missing:
        pip("download", "--only-binary=:all:", f"--dest={to}", *missing)
    for wheel in wheels:
        shutil.copy(wheel, to)
    sys.path[:0] = map(str, to.glob("*.whl"))


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


def main(directory: Path, to: Path | None = None) -> int:
    """Returns the exit status."""
    wheels = list(directory.glob("*.whl"))
    pins = (directory / "pins.txt").read_text().split()
    # SGLang's image has NIXL's implementation under the name of its CUDA version.
    nixl = installed("nixl") or installed("nixl-cu12") or installed("nixl-cu13")
    missing = [
        pin
        for pin in pins
        if installed(pin.split("==")[0]) is None and not (nixl and pin.startswith("nixl"))
    ]
    if to is None:
        install(wheels, missing)
    else:
        collect(wheels, missing, to)
    problems = unmet()
    sys.stdout.write("".join(f"{line}\n" for line in problems))
    done = "collected" if to else "added to the image"
    sys.stdout.write(f"{done}: hicache-nixl {' '.join(missing)}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
