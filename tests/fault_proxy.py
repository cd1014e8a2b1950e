"""A proxy in front of an S3 server that misbehaves on request, in a process of its own.

How to use it:

    with FaultProxy(server.port) as proxy:            # passes everything on
        there = bucket(server, name, endpoint=proxy.endpoint)
        proxy.set(stall("body", 60, methods=("GET",)))  # these faults and no others, from now on
        proxy.set(status(503, share=0.3), reset())    # the first that applies to a request
        proxy.set()                                   # well again; what was stalled goes on
        proxy.set_round_trip(0.010)                   # seconds that every answer takes at least
        proxy.requests()                              # Counter: "GET", "PUT", …, "faults"

A fault applies to the requests with one of `methods` whose target (path and query) contains
`matching` and whose body is larger than `above` bytes; `share` of them are chosen by a seeded
generator; all of them if nothing is said.

It stores and forwards: a request reaches the server when it is whole, and so does the answer the
client. Signatures stay right, because the Host header is passed on as it is. `refuse` closes the
port and all connections. The process ends with whoever made it.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Literal

from ports import hold_port

Place = Literal["request", "header", "body"]
"""request: before the server sees it. header: after it did, before the first byte of the answer.
body: in the middle of the answer's body (before the end of the header, if there is no body)."""


@dataclass(frozen=True)
class Fault:
    """One kind of misbehaviour and whom it befalls; made by the functions below."""

    action: str
    place: Place = "header"
    seconds: float = 0.0
    chunk: int = 0
    status: int = 0
    code: str = ""
    methods: tuple[str, ...] = ()
    matching: str = ""
    above: int = -1
    share: float = 1.0

    def applies_to(self, method: str, target: str, nbytes: int) -> bool:
        if self.methods and method not in self.methods:
            return False
        return self.matching in target and nbytes > self.above


def refuse() -> Fault:
    """Nobody listens, and open connections are reset. Befalls everybody."""
    return Fault("refuse")


def reset(place: Place = "header", **whom: Any) -> Fault:
    """The connection is reset."""
    return Fault("reset", place=place, **whom)


def stall(place: Place = "header", seconds: float = 3600.0, **whom: Any) -> Fault:
    """Nothing happens for that long, or until the faults change; then it goes on as if nothing
    had been."""
    return Fault("stall", place=place, seconds=seconds, **whom)


def slow(chunk: int, seconds: float, **whom: Any) -> Fault:
    """The answer comes in pieces of `chunk` bytes, `seconds` apart, until the faults change."""
    return Fault("slow", chunk=chunk, seconds=seconds, **whom)


def truncate(*, announced: bool, **whom: Any) -> Fault:
    """Half of the body. If `announced`, under a length that says so, on a connection that stays;
    else under the whole length, and the connection is closed."""
    return Fault("truncate", status=announced, **whom)


def status(number: int, **whom: Any) -> Fault:
    """The server is not asked; the answer is an S3 error document with this status."""
    codes = {
        403: "AccessDenied",
        404: "NoSuchBucket",
        413: "EntityTooLarge",
        429: "TooManyRequests",
        500: "InternalError",
        503: "SlowDown",
    }
    return Fault("status", status=number, code=codes[number], **whom)


def error_under_200(**whom: Any) -> Fault:
    """The server is not asked; an S3 error document comes under status 200."""
    return Fault("status", status=200, code="InternalError", **whom)


def other_content(kind: Literal["html", "bit"], **whom: Any) -> Fault:
    """A body of the same length, with the headers of the right one: a page of HTML, or one bit
    flipped in the middle."""
    return Fault("other", code=kind, **whom)


class FaultProxy:
    """Listens on `port` of 127.0.0.1 for the server on `upstream`. A context manager.

    Args:
        upstream: the server's port, plain HTTP.
        seed: of the choice of requests where a fault has a share.
    """

    def __init__(self, upstream: int, *, seed: int = 0) -> None:
        self._held = hold_port()
        self.port: int = self._held.getsockname()[1]
        self._lock = threading.Lock()
        arguments = [str(self.port), str(upstream), str(seed)]
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._ask({})  # listens now

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set(self, *faults: Fault) -> None:
        """These faults and no others, for requests that come from now on."""
        self._ask({"faults": [asdict(fault) for fault in faults]})

    def set_round_trip(self, seconds: float) -> None:
        """Every answer comes at the earliest so long after its request."""
        self._ask({"round_trip": seconds})

    def set_upstream(self, port: int) -> None:
        """Another server, for connections that come from now on."""
        self._ask({"upstream": port})

    def requests(self) -> Counter[str]:
        """Requests by method since the start or `forget`, and "faults", those that met one."""
        return Counter(self._ask({})["counts"])

    def connections(self) -> int:
        """Clients' connections that are open."""
        return int(self._ask({})["connections"])

    def forget(self) -> None:
        """Count from zero."""
        self._ask({"forget": True})

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._held.close()

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fault proxy ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


# -- the process --------------------------------------------------------------------------------


class _ClosedError(Exception):
    """This connection is over."""


@dataclass
class _Message:
    """A request or an answer."""

    first: list[str]
    headers: list[tuple[str, str]]
    body: bytes = b""

    @classmethod
    def parse(cls, head: bytes) -> "_Message":
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers = [(name, value.strip()) for name, _, value in (li.partition(":") for li in lines)]
        return cls(first.split(" ", 2), headers)

    def header(self, wanted: str) -> str:
        return next((value for name, value in self.headers if name.lower() == wanted), "")

    def without(self, *unwanted: str) -> "_Message":
        headers = [(name, value) for name, value in self.headers if name.lower() not in unwanted]
        return replace(self, headers=headers)

    def head(self) -> bytes:
        lines = [" ".join(self.first), *(f"{name}: {value}" for name, value in self.headers)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class _Proxy:
    def __init__(self, port: int, upstream: int, seed: int) -> None:
        self._port = port
        self._upstream = upstream
        self._random = random.Random(seed)
        self._faults: list[Fault] = []
        self._changed = asyncio.Event()
        self._round_trip = 0.0
        self._counts: Counter[str] = Counter()
        self._clients: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def run(self) -> None:
        await self._listen()
        loop = asyncio.get_running_loop()
        control = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(control), sys.stdin)
        while line := await control.readline():
            answer = await self._control(json.loads(line))
            os.write(1, (json.dumps(answer) + "\n").encode())

    async def _control(self, message: dict[str, Any]) -> dict[str, Any]:
        self._round_trip = message.get("round_trip", self._round_trip)
        self._upstream = message.get("upstream", self._upstream)
        if message.get("forget"):
            self._counts.clear()
        if "faults" in message:
            faults = [Fault(**{**f, "methods": tuple(f["methods"])}) for f in message["faults"]]
            self._faults = faults
            self._changed.set()
            self._changed = asyncio.Event()
            if any(fault.action == "refuse" for fault in faults):
                await self._refuse()
            else:
                await self._listen()
        return {"counts": dict(self._counts), "connections": len(self._clients)}

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(
                self._serve, "127.0.0.1", self._port, limit=1 << 22, backlog=1024
            )

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for client in list(self._clients):
            _abort(client)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        upstream: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        try:
            while True:
                await self._exchange(reader, writer, upstream)
        except (_ClosedError, OSError, EOFError, asyncio.LimitOverrunError):
            pass
        finally:
            self._clients.discard(writer)
            for _, other in upstream:
                _abort(other)
            with contextlib.suppress(OSError):
                writer.close()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        upstream: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
    ) -> None:
        request = _Message.parse(await reader.readuntil(b"\r\n\r\n"))
        arrived = asyncio.get_running_loop().time()
        method, target = request.first[0], request.first[1]
        fault = self._choose(method, target, int(request.header("content-length") or 0))
        if request.header("expect").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.body = await _body(request, reader)
        if fault is not None:
            await self._misbehave(fault, "request", writer)
        if fault is not None and fault.action == "status":
            answer = _error_document(fault, target)
        else:
            answer = await self._forward(request.without("expect"), upstream)
        silent = method == "HEAD" or answer.first[1] in ("204", "304")
        if silent:
            answer.body = b""
        due = arrived + self._round_trip
        if (wait := due - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(wait)
        if fault is not None:
            await self._misbehave(fault, "header", writer)
        await self._answer(fault, answer, writer)
        if answer.header("connection").lower() == "close":
            raise _ClosedError

    def _choose(self, method: str, target: str, nbytes: int) -> Fault | None:
        self._counts[method] += 1
        for fault in self._faults:
            if fault.applies_to(method, target, nbytes) and self._random.random() < fault.share:
                self._counts["faults"] += 1
                return fault
        return None

    async def _forward(
        self,
        request: _Message,
        upstream: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
    ) -> _Message:
        if not upstream:
            upstream.append(
                await asyncio.open_connection("127.0.0.1", self._upstream, limit=1 << 22)
            )
        reader, writer = upstream[0]
        writer.write(request.head())
        writer.write(request.body)
        await writer.drain()
        answer = _Message.parse(await reader.readuntil(b"\r\n\r\n"))
        if request.first[0] != "HEAD" and answer.first[1] not in ("204", "304"):
            answer.body = await _body(answer, reader)
        return answer

    async def _misbehave(self, fault: Fault, place: Place, writer: asyncio.StreamWriter) -> None:
        """Reset or stall, if this is the place for it."""
        if fault.place != place:
            return
        if fault.action == "reset":
            _abort(writer)
            raise _ClosedError
        if fault.action == "stall":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), fault.seconds)

    async def _answer(
        self, fault: Fault | None, answer: _Message, writer: asyncio.StreamWriter
    ) -> None:
        head, body = answer.head(), answer.body
        middle = len(body) // 2
        if fault is None or fault.action in ("status", "refuse"):
            await _send(writer, head, body)
        elif fault.action in ("reset", "stall"):
            if fault.place != "body":
                await _send(writer, head, body)
                return
            first, second = (head + body[:middle], body[middle:]) if body else (head[:8], head[8:])
            await _send(writer, first)
            await self._misbehave(fault, "body", writer)
            await _send(writer, second)
        elif fault.action == "slow":
            await self._trickle(fault, head + body, writer)
        elif fault.action == "truncate":
            if fault.status:
                short = answer.without("content-length")
                short.headers.append(("Content-Length", str(middle)))
                await _send(writer, short.head(), body[:middle])
            else:
                await _send(writer, head, body[:middle])
                raise _ClosedError
        elif fault.action == "other":
            await _send(writer, head, _other(fault.code, body))

    async def _trickle(self, fault: Fault, content: bytes, writer: asyncio.StreamWriter) -> None:
        changed = self._changed
        for at in range(0, len(content), fault.chunk):
            await _send(writer, content[at : at + fault.chunk])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), fault.seconds)
            if changed.is_set():
                await _send(writer, content[at + fault.chunk :])
                return


async def _send(writer: asyncio.StreamWriter, *parts: bytes) -> None:
    for part in parts:
        writer.write(part)
    await writer.drain()


async def _body(message: _Message, reader: asyncio.StreamReader) -> bytes:
    """The bytes after a header, as they came; up to the end of the stream if nothing says how
    many and it is not a request."""
    if length := message.header("content-length"):
        return await reader.readexactly(int(length))
    if message.header("transfer-encoding").lower() == "chunked":
        parts = []
        while True:
            parts.append(await reader.readuntil(b"\r\n"))
            size = int(parts[-1].split(b";")[0], 16)
            parts.append(await reader.readexactly(size + 2))
            if size == 0:
                return b"".join(parts)
    is_answer = message.first[0].startswith("HTTP/")
    return await reader.read() if is_answer else b""


def _error_document(fault: Fault, target: str) -> _Message:
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{fault.code}</Code><Message>a fault of the tests</Message>"
        f"<Resource>{target.partition('?')[0]}</Resource><RequestId>0</RequestId></Error>"
    ).encode()
    reasons = {200: "OK", 403: "Forbidden", 404: "Not Found", 429: "Too Many Requests"}
    first = ["HTTP/1.1", str(fault.status), reasons.get(fault.status, "Internal Server Error")]
    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
    return _Message(first, headers, body)


def _other(kind: str, body: bytes) -> bytes:
    if not body:
        return body
    if kind == "html":
        page = b"<html><body><h1>It works!</h1></body></html>\n"
        return (page * (len(body) // len(page) + 1))[: len(body)]
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with a reset instead of a farewell."""
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _main(arguments: Sequence[str]) -> None:
    port, upstream, seed = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_Proxy(port, upstream, seed).run())


if __name__ == "__main__":
    _main(sys.argv[1:])
