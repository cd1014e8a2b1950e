"""MIGRATING.md names every key and variable of the in-tree connector, and each is handled.

The names are read from the installed connector's source, sample file and README, so that a new
one in another SGLang version is noticed.
"""

import ast
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from configurations import LOADER, STORE, Disks, load
from hicache_nixl.errors import SettingsError
from hicache_nixl.intree_objects import VARIABLES
from hicache_nixl.intree_plugins import PARAMETERS
from hicache_nixl.settings import RETRIES

GUIDE = Path(__file__).parents[1] / "MIGRATING.md"
BUCKET = {
    "AWS_DEFAULT_BUCKET": "kv-cache",
    "AZURE_STORAGE_CONTAINER_NAME": "kv-cache",
    "AZURE_STORAGE_ACCOUNT_URL": "https://account.blob.core.windows.net",
}
# Words in the source that are neither keys nor variables of the connector.
NOT_KEYS = {"enabled", "high_watermark", "low_watermark"}


@pytest.fixture(scope="module")
def folder() -> Path:
    """The in-tree connector's sources."""
    spec = importlib.util.find_spec("sglang")  # not imported, it takes seconds
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("SGLang is not installed")
    return Path(spec.submodule_search_locations[0], "srt", "mem_cache", "storage", "nixl")


@pytest.fixture(scope="module")
def guide() -> str:
    return GUIDE.read_text(encoding="utf-8")


def variables(folder: Path) -> set[str]:
    """Variables that the connector's sources and README mention, and SGLang's with NIXL in them."""
    text = "".join(
        file.read_text(encoding="utf-8") for file in [*folder.glob("*.py"), folder / "README.md"]
    )
    environ = (folder.parents[2] / "environ.py").read_text(encoding="utf-8")
    return {
        *re.findall(r"\b(?:SGLANG|AWS)_[A-Z_]{4,}\b", text),
        *re.findall(r"\bSGLANG_HICACHE_NIXL_[A-Z_]+\b", environ),
        *re.findall(r"\bSGLANG_HUGEPAGE_SIZE\b", environ),
    }


def top_level_keys(folder: Path) -> set[str]:
    """Texts by which the connector's configuration class looks something up in its mapping."""
    tree = ast.parse((folder / "nixl_utils.py").read_text(encoding="utf-8"))
    (config,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == "NixlBackendConfig"
    )
    found: set[str] = set()
    for node in ast.walk(config):
        if isinstance(node, ast.Subscript | ast.Compare | ast.Dict):
            keys = (
                node.keys
                if isinstance(node, ast.Dict)
                else [node.slice if isinstance(node, ast.Subscript) else node.left]
            )
            found |= {key.value for key in keys if isinstance(key, ast.Constant)}
    (own,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "_SGLANG_NIXL_CONFIG_KEYS"
    )
    return (found | ast.literal_eval(own)) - NOT_KEYS


def section_keys(folder: Path) -> set[tuple[str, str]]:
    """(plug-in, key) of the sample file, commented ones too, and of the tables in the README."""
    sample = (folder / "nixl.config.toml.sample").read_text(encoding="utf-8")
    readme = (folder / "README.md").read_text(encoding="utf-8")
    sections = [
        *(
            (part, r"^#? *(\w+) = ")
            for part in re.findall(r"^\[(plugin\.[^#]+(?:#[^#]+)*)", sample, re.M)
        ),
        *(
            (part, r"^\| `(\w+)` +\| (?:string|integer|boolean|float)")
            for part in re.findall(r"\(`(plugin\..*?)^### ", readme, re.M | re.S)
        ),
    ]
    found = {
        (plugin, key) for plugin, keys in tomllib.loads(sample)["plugin"].items() for key in keys
    }
    for text, key in sections:
        plugin = text.split(".")[1]
        found |= {(re.split(r"\W", plugin)[0], name) for name in re.findall(key, text, re.M)}
    return found


def test_every_variable_is_named(folder: Path, guide: str) -> None:
    """Each variable of the in-tree connector is in the guide."""
    found = variables(folder)
    assert "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR" in found
    assert {name for name in found if f"`{name}`" not in guide} == set()


def test_every_top_level_key_is_named(folder: Path, guide: str) -> None:
    """Each top-level key is in the guide, and is accepted or refused by its name."""
    found = top_level_keys(folder)
    assert {"plugin", "use_direct_io", "l3_cleaner_high_watermark"} <= found
    assert {key for key in found if f"`{key}" not in guide} == set()
    for key in found - {"plugin"}:
        for value in (True, 75):
            assert _is_handled({key: value}, key), key


def test_every_section_key_is_named(folder: Path, guide: str) -> None:
    """Each key of a plug-in's section is in the guide, and is noted or refused by its name."""
    found = section_keys(folder)
    assert {("posix", "use_aio"), ("obj", "secrete_key"), ("3fs", "mem_config")} <= found
    for plugin, key in found:
        name = f"plugin.{plugin}.{key}"
        if key == "active":
            assert f"`plugin.{plugin}`" in guide
            assert _is_handled({"plugin": {plugin: {"active": True}}}, f"plugin.{plugin}")
            continue
        assert f"`{name}`" in guide, name
        for value in ("true", 128, "x"):
            config = {"plugin": {plugin: {"active": True, key: value}}}
            assert _is_handled(config, name, f"plugin.{plugin}.active"), (name, value)


def test_the_guide_names_no_key_that_does_not_exist(guide: str) -> None:
    """A parameter in the guide is one that is known, or a credential."""
    named = set(re.findall(r"`plugin\.(\w+)\.(\w+)`", guide)) - {("posix", "active")}
    known = {(plugin, key) for plugin, keys in PARAMETERS.items() for key in keys}
    secrets = {("obj", key) for key in ("access_key", "secret_key", "secrete_key", "session_token")}
    assert named == known | secrets | {("azure_blob", "connection_string")}


def test_variables_of_the_guide_are_read(guide: str) -> None:
    """The AWS and Azure variables of the guide are those that are read, in the order given."""
    rows = re.findall(r"^\| (`(?:AWS|AZURE)_.*?) \|", guide, re.M)
    named = [name for row in rows for name in re.findall(r"`([A-Z_0-9]+)`", row)]
    read = [name for scheme in VARIABLES.values() for names in scheme.values() for name in names]
    assert sorted(named) == sorted([*read, *RETRIES])
    assert named.index("AWS_ENDPOINT_OVERRIDE") < named.index("AWS_ENDPOINT_URL_S3")


def test_lines_of_the_guide_are_what_is_printed(guide: str, tmp_path: Path) -> None:
    """The notes that the guide shows are the program's own."""
    config: dict[str, Any] = {"plugin": {"posix": {"active": True, "use_uring": "true"}}}
    for note in load(config, file_systems=Disks(tmp_path / "mounts").file_systems()).notes:
        assert f"note: {note}" in guide
    flags = re.search(r"extra-config '(\{.*?),? …what", guide)
    assert flags is not None
    assert all(f'"{key}":' in flags[1] for key in LOADER)


def _is_handled(config: dict[str, Any], *names: str) -> bool:
    """Whether a note, a setting or the refusal names one of `names`."""
    in_bucket = any(name.startswith(("plugin.obj", "plugin.azure_blob")) for name in names)
    try:
        settings = load({"store": None if in_bucket else STORE} | config, BUCKET)
    except SettingsError as error:
        return any(name in str(error) for name in names)
    return any(name in note for name in names for note in settings.notes) or any(
        name in type(settings).model_fields for name in names
    )
