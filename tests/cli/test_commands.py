"""The commands of `hicache-nixl`, as a person or a program calls them."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run, run_json
from typer.testing import CliRunner

from hicache_nixl import __version__
from hicache_nixl.cli.main import app
from s3_server import S3Address


def url(store: str | Path) -> list[str]:
    """The option that names a store; a directory is one of a slab store."""
    return ["--store", store if isinstance(store, str) else f"slab://{store}"]


@pytest.mark.parametrize("command", ["probe", "launch-args", "ls", "verify", "clear", "lifecycle"])
def test_help_has_an_example(command: str) -> None:
    """Every command explains itself with an example."""
    assert f"hicache-nixl {command}" in run(command, "--help").output


def test_version_and_no_arguments() -> None:
    """--version prints the version, no arguments print the help."""
    assert __version__ in run("--version").output
    assert "launch-args" in CliRunner().invoke(app, []).output


def test_the_command_is_a_module() -> None:
    """Where it is not on the PATH, Python finds it by the library's name, with its exit status."""
    for arguments, status in ((["--version"], 0), (["no-such-command"], 2)):
        command = [sys.executable, "-m", "hicache_nixl", *arguments]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == status, ran.stderr
        assert ran.stdout == (f"hicache-nixl {__version__}\n" if status == 0 else "")


def test_ls_names_models_and_pages(store: str) -> None:
    """ls lists each namespace with model, pages, bytes and age."""
    output = run("ls", *url(store)).output
    assert "org/one" in output
    assert "org/other" in output
    rows = run_json("ls", *url(store))["namespaces"]
    assert {row["manifest"]["model_name"]: row["pages"] for row in rows} == {
        "org/one": 8,
        "org/other": 4,
    }
    assert all(row["bytes"] > 0 and row["newest_use_ns"] > 0 for row in rows)


def damage_first_page(store: str, s3: S3Address) -> None:
    """Flip a bit in the payload of one page."""
    kind, _, place = store.partition("://")
    if kind == "s3":
        bucket, _, prefix = place.partition("?")[0].partition("/")
        name = s3.keys(bucket, f"{prefix}/pages/")[0]
        record = s3.client().get_object(Bucket=bucket, Key=name)["Body"].read()
        record = bytes([record[0] ^ 1]) + record[1:]
        s3.client().put_object(Bucket=bucket, Key=name, Body=record)
        return
    files = Path(place).glob("*.slab" if kind == "slab" else "namespaces/*/??/??/?*")
    with next(files).open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))


def test_verify_finds_and_repairs_damage(store: str, s3: S3Address) -> None:
    """verify reads every page, forgets damaged ones with exit code 1, and is content afterwards."""
    assert run_json("verify", *url(store)) != {}
    assert "12 pages are right" in run("verify", *url(store)).output
    damage_first_page(store, s3)
    assert "11 pages are right, 1 were damaged" in run("verify", *url(store), code=1).output
    assert "11 pages are right, 0" in run("verify", *url(store)).output


def test_clear_takes_only_what_it_is_told(store: str) -> None:
    """clear asks first, clears one namespace by the start of its digest, and leaves the others."""
    rows = {r["manifest"]["model_name"]: r for r in run_json("ls", *url(store))["namespaces"]}
    one = rows["org/one"]["digest"][:12]
    run("clear", *url(store), "--namespace", one, code=1, answer="n\n")
    answered = run("clear", *url(store), "--namespace", one, "--json", answer="y\n")
    assert json.loads(answered.stdout.removeprefix(" y\n")) == {one: 8}  # the terminal's echo
    assert "Forget all pages of" in answered.stderr
    left = run_json("ls", *url(store))["namespaces"]
    assert {row["digest"][:12] == one: row["pages"] for row in left} == {True: 0, False: 4}


def test_clear_of_an_unknown_namespace(store: str) -> None:
    """A namespace that is not there is one line that names those that are."""
    result = run("clear", *url(store), "--namespace", "zz", "--yes", code=1)
    assert "no namespace starts with 'zz'" in result.stderr


@pytest.mark.parametrize("command", ["ls", "verify", "clear"])
@pytest.mark.parametrize("kind", ["slab", "files"])
def test_looking_makes_nothing(command: str, kind: str, tmp_path: Path) -> None:
    """Where there is no store, administration says so and creates none."""
    result = run(command, *url(f"{kind}://{tmp_path / 'nothing'}"), code=1)
    assert "holds no store" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_probe_starts_a_tier(tmp_path: Path) -> None:
    """probe tries a configuration for real and prints the block, or rows as JSON."""
    args = [*url(tmp_path / "store"), "--set", "capacity=32MiB", "--set", "staging=1MiB"]
    assert "O_DIRECT" in run("probe", *args).output
    rows = run_json("probe", *args)
    assert {"topic", "found", "better"} == set(rows[0])


def test_launch_args_are_what_sglang_takes(tmp_path: Path) -> None:
    """launch-args prints flags whose extra config loads this connector with these settings."""
    args = ["launch-args", *url(tmp_path / "store"), "--set", "capacity=2TiB"]
    flags = shlex.split(run(*args).output)
    assert flags == run_json(*args)
    assert flags[flags.index("--hicache-storage-backend") + 1] == "dynamic"
    extra = json.loads(flags[flags.index("--hicache-storage-backend-extra-config") + 1])
    assert extra["class_name"] == "HiCacheNixlConnector"
    assert extra["capacity"] == "2TiB"
    assert extra["hicache_storage_pass_prefix_keys"] is True


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["probe", "--store", "slab:///a", "--set", "capcity=1GiB"], "capacity"),
        (["probe", "--store", "slab:///nowhere/at/all"], "/nowhere/at"),
        (["ls", "--store", "s3://bucket/prefix?endpont=http://h"], "did you mean endpoint?"),
        (["lifecycle", "--store", "slab:///a"], "rule is for s3://"),
        (["lifecycle", "--store", "s3://bucket", "--expire-days", "0"], "below 1"),
        (["lifecycle", "--store", "s3://bucket", "--expire-days", "1", "--remove"], "exclude"),
        (["lifecycle", "--store", "azure://cc1?account_url=https://h"], "Azure"),
        (["launch-args", "--store", "relative/path"], "slab:///"),
    ],
)
def test_errors_are_one_line(args: list[str], words: str) -> None:
    """Bad input is one line on standard error and exit code 1."""
    result = run(*args, code=1)
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
