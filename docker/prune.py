"""Remove of some packages what this project never loads: `prune.py SITE_PACKAGES nixl botocore`.

NIXL's wheel carries plug-ins for networks and GPUs and the libraries that only they need, its
second copy of every plug-in, a CUDA library for expert parallelism, and examples. botocore
describes every service of AWS. numpy brings its tests, what they alone load, and what extensions
are compiled with. pydantic has its first version beside it. Pygments knows hundreds of languages.
"""

import re
import shutil
import sys
from pathlib import Path

PLUGINS = ("POSIX", "OBJ", "AZURE_BLOB", "GDS", "GDS_MT")
"""NIXL's plug-ins for storage."""

SERVICES = ("s3", "sts", "sso", "sso-oidc", "signin")
"""What botocore needs for buckets and for every source of credentials."""

LEXERS = ("__init__.py", "_mapping.py", "python.py", "special.py")

_LIBRARY = re.compile(rb"\0(lib[\w.+-]{1,100}\.so[\w.-]*)(?=\0)")


def named_libraries(program: Path) -> set[str]:
    """The names of shared libraries among the strings of an ELF file: at least those it needs."""
    return {name.decode() for name in _LIBRARY.findall(program.read_bytes())}


def prune_nixl(packages: Path) -> None:
    """Keep NIXL's bindings, `PLUGINS`, and the libraries they reach."""
    built = packages / ".nixl_cu12.mesonpy.libs"
    bundled = packages / "nixl_cu12.libs"
    for unused in ("nixl_ep", "nixl_ep_cu12", "nixl_cu12.scripts"):
        shutil.rmtree(packages / unused)
    shutil.rmtree(bundled / "ucx")
    # NIXL loads plug-ins from where its build put them.
    shutil.rmtree(bundled / "nixl")
    kept = {built / "plugins" / f"libplugin_{name}.so" for name in PLUGINS}
    for plugin in set((built / "plugins").iterdir()) - kept:
        plugin.unlink()

    libraries = {path.name: path for place in (built, bundled) for path in place.glob("*.so*")}
    reached: set[str] = set()
    frontier = [*kept, *(packages / "nixl_cu12").glob("*.so")]
    while frontier:
        for name in named_libraries(frontier.pop()) & libraries.keys() - reached:
            reached.add(name)
            frontier.append(libraries[name])
    for name in libraries.keys() - reached:
        libraries[name].unlink()


def prune_botocore(packages: Path) -> None:
    """Keep the descriptions of `SERVICES`."""
    for place in (packages / "botocore" / "data").iterdir():
        if place.is_dir() and place.name not in SERVICES:
            shutil.rmtree(place)


def prune_numpy(packages: Path) -> None:
    """Remove numpy's tests, headers and stubs, and its tools for building extensions."""
    numpy = packages / "numpy"
    for place in [*numpy.rglob("tests"), *numpy.rglob("include")]:
        shutil.rmtree(place)
    for tool in ("f2py", "distutils"):
        shutil.rmtree(numpy / tool)
    for pattern in ("*.pyi", "*.pxd", "*.a", "_core/_simd.*", "_core/*_tests.*.so"):
        for file in numpy.rglob(pattern):
            file.unlink()


def prune_pydantic(packages: Path) -> None:
    """Remove the copy of its first version."""
    shutil.rmtree(packages / "pydantic" / "v1")


def prune_pygments(packages: Path) -> None:
    """Keep the lexers of Python, for tracebacks, and of text without colours."""
    for lexer in (packages / "pygments" / "lexers").glob("*.py"):
        if lexer.name not in LEXERS:
            lexer.unlink()


PRUNE = {
    "nixl": prune_nixl,
    "botocore": prune_botocore,
    "numpy": prune_numpy,
    "pydantic": prune_pydantic,
    "pygments": prune_pygments,
}

if __name__ == "__main__":
    for package in sys.argv[2:]:
        PRUNE[package](Path(sys.argv[1]))
