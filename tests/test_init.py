"""What the package exports, and what it costs to import."""

import subprocess
import sys

import hicache_nixl
from hicache_nixl import errors


def test_exported_names() -> None:
    """The public names are exactly these."""
    assert sorted(hicache_nixl.__all__) == [
        "DeadlineExceededError",
        "HiCacheNixlConnector",
        "HiCacheNixlError",
        "HostMemoryError",
        "RegistrationError",
        "SettingsError",
        "StagingShortageError",
        "StoreError",
        "StoreFormatError",
        "TransferError",
    ]


def test_every_error_has_one_base() -> None:
    """Each error of the tree is a HiCacheNixlError and exported."""
    tree = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert all(issubclass(kind, errors.HiCacheNixlError) for kind in tree.values())
    assert set(tree) == set(hicache_nixl.__all__) - {"HiCacheNixlConnector"}


def test_importing_the_package_is_cheap() -> None:
    """Without asking for the connector, neither sglang, torch nor nixl is imported."""
    code = (
        "import sys, hicache_nixl.cli.main, hicache_nixl.connector_plugin;"
        "print(sorted({'sglang', 'torch', 'nixl'} & set(sys.modules)))"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.strip() == "[]"
