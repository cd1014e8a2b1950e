"""Claims about reading the value of SGLang's extra config; files are tested with the settings."""

from pathlib import Path

import pytest

from configurations import SECRET, write
from hicache_nixl.errors import SettingsError
from hicache_nixl.sources import read_extra_config, read_settings_file


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.toml", "prefetch_threshold = 16\n[plugin.posix]\nactive = true"),
        ("x.json", '{"prefetch_threshold": 16, "plugin": {"posix": {"active": true}}}'),
        ("x.yaml", "prefetch_threshold: 16\nplugin:\n  posix:\n    active: true\n"),
        ("x.YML", "prefetch_threshold: 16\nplugin: {posix: {active: true}}\n"),
    ],
)
def test_at_and_a_file(name: str, content: str, tmp_path: Path) -> None:
    """@ and a file, or JSON, give the same mapping."""
    expected = {"prefetch_threshold": 16, "plugin": {"posix": {"active": True}}}
    file = write(tmp_path / name, content)
    assert read_extra_config(f"@{file}") == expected
    assert read_settings_file(f"@{file}") == read_settings_file(file) == expected
    assert read_extra_config('{"prefetch_threshold":16,"plugin":{"posix":{"active":true}}}') == (
        expected
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "line 1, column 1"),
        ("/etc/nixl.toml", "or @ and the name of a file"),
        (f'{{"salt": {SECRET}', "line 1, column 10"),
        ("[1]", "holds a list"),
        ('{"a": 1, "a": 2}', "'a' is written twice"),
        ("[" * 100_000, "nested too deeply"),
        ("@/nowhere/x.toml", "/nowhere/x.toml does not exist"),
        ("@/etc/hostname", "must end in .toml"),
    ],
)
def test_refused_extra_config(text: str, reason: str) -> None:
    """What is neither JSON nor a file is one line that quotes nothing."""
    with pytest.raises(SettingsError) as caught:
        read_extra_config(text)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)
