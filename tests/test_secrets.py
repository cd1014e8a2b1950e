"""No secret is ever printed, logged or put into an exception, whatever is done with a bucket."""

import base64
import json
import os
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

from s3_access import ADMIN
from s3_server import S3Address

CHILD = Path(__file__).with_name("secrets_child.py")
FRAGMENT = 10
"""Characters at either end of a secret that are one, too: some messages cut out the middle."""
WRONG = "wRoNg/secret+that/nobody=accepts/0123456789"
OTHER = "oThEr/secret+put/into=the/file/later/987654"
TOKEN = "sEsSiOn/token+that=belongs/to/the/keys/5555"


def forms(secret: str) -> list[str]:
    """How a secret could be spelled, and its ends."""
    raw = secret.encode()
    return [
        urllib.parse.quote(secret, safe=""),
        urllib.parse.quote(urllib.parse.quote(secret, safe=""), safe=""),
        base64.b64encode(raw).decode(),
        raw.hex(),
        secret[:FRAGMENT],
        secret[-FRAGMENT:],
    ]


@pytest.mark.parametrize("keys", ["right", "wrong"])
def test_no_output_holds_a_secret(
    s3: S3Address, module_bucket: str, tmp_path: Path, keys: str
) -> None:
    """Nothing that a run prints or logs at DEBUG and TRACE holds a secret, nor its ends."""
    secret = ADMIN.secret_key if keys == "right" else WRONG
    plan = {
        "endpoint": s3.endpoint,
        "bucket": module_bucket,
        "directory": str(tmp_path),
        "access_key": ADMIN.access_key,
        "secret_key": secret,
        "session_token": TOKEN if keys == "wrong" else "",
        "other_secret_key": OTHER,
    }
    ran = subprocess.run(
        # Not in clear: an exception of this test shows the command.
        [sys.executable, CHILD, base64.b64encode(json.dumps(plan).encode()).decode()],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=300,
        env={
            **os.environ,
            "NIXL_LOG_LEVEL": "TRACE",
            "RUST_LOG": "trace",
            "AWS_EC2_METADATA_DISABLED": "true",
        },
    )
    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, output[-4000:]
    for secret in (ADMIN.secret_key, WRONG, OTHER, TOKEN):
        for form in forms(secret):
            lines = [line for line in output.splitlines() if form in line]
            assert not lines, f"{len(lines)} lines hold {form!r}, the first is {lines[0][:300]!r}"
    worked = json.loads(output.split("\nworked: ")[1].splitlines()[0])
    assert set(worked.values()) == {keys == "right"}, worked
    # Those that know the most did speak.
    assert "INFO:botocore" in output
    if keys == "right":
        assert "DEBUG:hicache_nixl" in output
        assert "nixl_agent.cpp" in output
