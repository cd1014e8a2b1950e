"""`hicache-nixl launch-args` for people who come from the in-tree connector."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hicache_nixl.cli.main import app

TOML = 'prefetch_threshold = 16\n[plugin.posix]\nactive = true\nuse_uring = "true"\n'
STORAGE_DIR = "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The in-tree connector's directory, and the configuration as a file."""
    monkeypatch.setenv(STORAGE_DIR, str(tmp_path / "kv"))
    (tmp_path / "nixl.toml").write_text(TOML)


def launch_args(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["launch-args", *args])
    assert result.exit_code == code, result.output
    return result


def extra_config(result: Result) -> dict[str, Any]:
    words = shlex.split(result.stdout)
    config = json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1])
    assert isinstance(config, dict)
    return config


@pytest.mark.parametrize("form", ["--extra-config=@{file}", "--config={file}", "--config=@{file}"])
def test_in_tree_file(form: str, tmp_path: Path) -> None:
    """The in-tree connector's file becomes flags, under SGLang's option and ours."""
    config = extra_config(launch_args(form.format(file=tmp_path / "nixl.toml")))
    assert config["class_name"] == "HiCacheNixlConnector"
    assert config["plugin"] == {"posix": {"active": True, "use_uring": "true"}}
    assert config["prefetch_threshold"] == 16


def test_inline_json_with_changes(tmp_path: Path) -> None:
    """JSON as SGLang takes it is understood, and the command line's own settings win."""
    result = launch_args(
        "--extra-config", '{"use_uring": "true", "capacity": "1GiB"}', "--set", "capacity=2GiB"
    )
    assert extra_config(result)["capacity"] == "2GiB"
    assert not (tmp_path / "kv").exists()


def test_notes_are_on_standard_error(tmp_path: Path) -> None:
    """How each in-tree key was understood is told, apart from the flags."""
    result = launch_args("--extra-config", f"@{tmp_path}/nixl.toml", "--storage-only")
    assert "note: plugin.posix.use_uring (given settings) is read as queue = uring" in (
        result.stderr
    )
    assert f"note: environment variable {STORAGE_DIR} is read as store = slab://" in result.stderr
    assert "note" not in result.stdout
    assert shlex.split(result.stdout)[:2] == ["--hicache-storage-backend", "dynamic"]
    assert len(shlex.split(result.stdout)) == 4


def test_attach_body(tmp_path: Path) -> None:
    """--attach prints the request by which a running server takes the connector."""
    body = json.loads(launch_args("--extra-config", f"@{tmp_path}/nixl.toml", "--attach").stdout)
    assert body["hicache_storage_backend"] == "dynamic"
    config = json.loads(body["hicache_storage_backend_extra_config_json"])
    assert config["interface_v1"] == 1
    assert config["prefetch_threshold"] == 16


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("@/nowhere.toml", "/nowhere.toml does not exist"),
        ("use_uring=true", "write JSON"),
        ('{"use_urnig": "true"}', "did you mean use_uring?"),
        ('{"plugin": {"posix": {}}}', "none is active"),
        ('{"plugin": {"posix": {"active": true, "use_direct_io": 1}}}', "first [plugin.…] line"),
    ],
)
def test_errors_are_one_line(text: str, words: str) -> None:
    """What cannot be used is one line on standard error, with all its characters."""
    result = launch_args("--extra-config", text, code=1)
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
