"""The commands of `hicache-nixl` on a bucket."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run, run_json
from typer.testing import CliRunner

from configurations import SECRET
from hicache_nixl.cli.main import app
from s3_access import ADMIN, READER, STRANGER
from s3_server import S3Address

pytestmark = pytest.mark.usefixtures("in_chain")


def rows(url: str, *args: str) -> dict[str, dict[str, str]]:
    """The findings of a probe by topic."""
    found = run_json("probe", "--store", url, "--set", "staging=1MiB", *args)
    return {row["topic"]: row for row in found}


def test_probe_of_a_bucket(bucket_url: str, s3: S3Address) -> None:
    """probe tries the bucket through NIXL, leaves nothing behind, and says how it is reached."""
    found = rows(bucket_url)
    name = bucket_url.split("/")[2]
    assert f"s3://{name}/some/prefix at {s3.endpoint}" in found["store"]["found"]
    assert "path addressing" in found["store"]["found"]
    assert found["credentials"]["found"] == "the credential chain"
    assert "written, read and removed through NIXL" in found["bucket"]["found"]
    assert "requests at once: a round trip takes" in found["I/O"]["found"]
    assert found["retries"] == {
        "topic": "retries",
        "found": "AWS_RETRY_MODE=standard, AWS_MAX_ATTEMPTS=1",
        "better": None,
    }
    assert "no bound" in found["capacity"]["found"]
    assert f"--store '{bucket_url}' --expire-days" in found["capacity"]["better"]
    assert s3.keys(name) == ["some/prefix/store.json"]


def test_requests_and_lifecycle_are_told(bucket_url: str) -> None:
    """What was set, number of requests and lifecycle rule, is what the probe shows."""
    run("lifecycle", "--store", bucket_url, "--expire-days", "3")
    found = rows(bucket_url, "--set", "requests=5")
    assert "5 requests at once" in found["I/O"]["found"]
    assert found["capacity"]["found"] == "pages expire 3 days after they were written"


def test_slow_retries_come_with_advice(bucket_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries that the user has set stay, and their price is told."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    found = rows(bucket_url)["retries"]
    assert "AWS_MAX_ATTEMPTS=3 (AWS_MAX_ATTEMPTS as set)" in found["found"]
    assert "unset" in found["better"]


def test_lifecycle(bucket_url: str) -> None:
    """The rule is set, shown, changed and removed; nothing else of the bucket changes."""
    store = ["--store", bucket_url]
    assert run("lifecycle", *store).output == "pages do not expire\n"
    assert run_json("lifecycle", *store, "--expire-days", "7") == {"expire_days": 7}
    assert "7 days after" in run("lifecycle", *store).output
    assert "1 day after" in run("lifecycle", *store, "--expire-days", "1").output
    assert run_json("lifecycle", *store, "--remove") == {"expire_days": None}
    assert run_json("lifecycle", *store, "--remove") == {"expire_days": None}


@pytest.mark.parametrize("command", ["ls", "verify", "clear"])
def test_looking_makes_nothing(command: str, bucket_url: str, s3: S3Address) -> None:
    """Where the prefix holds no store, administration says so and writes nothing."""
    assert "holds no store" in run(command, "--store", bucket_url, code=1).stderr
    assert s3.keys(bucket_url.split("/")[2]) == []


def test_bucket_is_made_only_when_asked(s3: S3Address) -> None:
    """A missing bucket is an error that says so; create_bucket makes it."""
    name = f"test-made-{SECRET[:4].lower()}-{id(s3) % 10**6}"
    url = f"s3://{name}?endpoint={s3.endpoint}"
    try:
        refused = run("probe", "--store", url, "--set", "staging=1MiB", code=1)
        assert name in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1
        assert "made; " in rows(url, "--set", "create_bucket=true")["bucket"]["found"]
        assert "made; " not in rows(url, "--set", "create_bucket=true")["bucket"]["found"]
    finally:
        s3.remove_bucket(name)


@pytest.mark.parametrize("who", [STRANGER, READER])
def test_refused_credentials_are_one_line_without_them(
    who: object, bucket_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials that the server refuses, or that may only read, are one line that hides them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", who.access_key)  # type: ignore[attr-defined]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", who.secret_key)  # type: ignore[attr-defined]
    result = run("probe", "--store", bucket_url, "--set", "staging=1MiB", code=1)
    assert len(result.stderr.strip().splitlines()) == 1
    assert "the credential chain" in result.stderr
    assert who.secret_key not in result.output  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", ["probe", "ls", "verify", "clear", "lifecycle"])
def test_no_server_is_one_line(command: str) -> None:
    """Where nothing answers, every command says so in one line that names the endpoint."""
    url = "s3://kv-cache/p?endpoint=http://127.0.0.1:1"
    result = run(command, "--store", url, "--set", "deadline=2s", code=1)
    assert "127.0.0.1:1" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_credentials_file(bucket_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in a file of their own are used, and the file is named."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    file = tmp_path / "keys.ini"
    file.write_text(
        f"[kv]\naws_access_key_id = {ADMIN.access_key}\n"
        f"aws_secret_access_key = {ADMIN.secret_key}\n"
    )
    found = rows(bucket_url, "--set", f"credentials_file={file}", "--set", "profile=kv")
    assert found["credentials"]["found"] == f"file {file}, section kv"
    assert ADMIN.secret_key not in json.dumps(found)


# --- launch-args

KEYS = {"access_key": "AKIA" + SECRET, "secret_key": SECRET, "session_token": "T" + SECRET}


@pytest.mark.parametrize(
    "config",
    [
        {"store": "s3://kv-cache/p?endpoint=http://minio:9000"} | KEYS,
        {"plugin": {"obj": {"active": True, "bucket": "kv-cache"} | KEYS}},
        {
            "plugin.obj.active": True,
            "plugin.obj.bucket": "kv-cache",
            "plugin.obj.access_key": "A",
            "plugin.obj.secrete_key": SECRET,
        },
        {"plugin": "obj", "bucket": "kv-cache", "access_key": "A", "secrete_key": SECRET},
        {"store": "azure://cc1", "connection_string": SECRET},
    ],
)
@pytest.mark.parametrize("form", [[], ["--attach"], ["--storage-only"], ["--json"]])
def test_flags_hold_no_credential(config: dict[str, object], form: list[str]) -> None:
    """Credentials are left out of what is printed, by name, and the rest is what was given."""
    result = run("launch-args", "--extra-config", json.dumps(config), *form)
    assert SECRET not in result.output
    assert "left out of the flags" in result.stderr
    assert "credentials_file" in result.stderr
    if not form:
        words = shlex.split(result.stdout)
        extra = json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1])
        assert extra.get("store") == config.get("store")
        assert "secret" not in json.dumps(extra)


def test_flags_of_a_bucket() -> None:
    """Without credentials in it, a configuration of a bucket becomes flags as it is, no note."""
    args = ["launch-args", "--store", "s3://kv-cache/p?endpoint=http://minio:9000"]
    result = run(*args, "--set", "requests=8")
    assert result.stderr == ""
    extra = json.loads(run_json(*args, "--storage-only")[3])
    assert extra["store"] == "s3://kv-cache/p?endpoint=http://minio:9000"


def test_a_missing_library_is_one_line(
    monkeypatch: pytest.MonkeyPatch, make_bucket: Callable[[], str]
) -> None:
    """Without the optional libraries, a bucket is refused with how to install them."""
    for module in ("obstore", "obstore.store"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    result = CliRunner().invoke(app, ["ls", "--store", "s3://kv-cache?endpoint=http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert 'pip install "hicache-nixl[objects]"' in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
