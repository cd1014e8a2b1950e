"""Why a plug-in of NIXL is not there: its file cannot be loaded, most often for want of a library.

NIXL itself only says that it has no such plug-in. Must not import nixl.
"""

import ctypes
from pathlib import Path


def why_not_loaded(package: Path, plugin: str) -> str | None:
    """What the dynamic loader says of the file of `plugin`, or None if it is absent or loads.

    Args:
        package: directory of the wheel that is in use, such as ".../nixl_cu12".
        plugin: NIXL's name, such as "OBJ".
    """
    name = f"libplugin_{plugin}.so"
    places = (f".{package.name}.mesonpy.libs/plugins", f"{package.name}.libs/nixl")
    for place in places:
        file = package.parent / place / name
        if file.is_file():
            try:
                ctypes.CDLL(str(file))
            except OSError as error:
                return str(error)
    return None
