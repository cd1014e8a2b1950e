"""What a server gives without a store: a plain client and bare NIXL, one request a page.

The peers of the object store, as fio is of the disk: no checksum, no trailer, no looking before
writing. Pages lie back to back in memory of their own, so no gathering is in their time either.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.object_place import ObjectPlace
from bench.plan import BenchError
from bench.pools import HostPages

_DEADLINE = 120.0
_POLL = 300e-6  # a request takes milliseconds, and the server may need this core
_PIECE = 1 << 20


class _Flat:
    """A client that moves pages between objects and one buffer."""

    name = ""
    page_bytes: int

    def __init__(self, place: ObjectPlace) -> None:
        self._place = place

    def setup(self, host: HostPages, directory: Path, capacity: int) -> None:  # noqa: ARG002
        """Connect and make the buffer."""
        self._host, self.page_bytes = host, host.page_bytes
        self._pages = np.zeros((host.count, host.page_bytes), np.uint8)
        self._connect()

    def load(self) -> None:
        """Fill the buffer from the host pool. Not part of what is measured."""
        self._host.copy_to(self._pages)

    def unload(self) -> None:
        """Put what was read into the host pool. Not part of what is measured."""
        self._host.copy_from(self._pages)

    def _connect(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Let go of connections and registrations."""


class RawClient(_Flat):
    """obstore under asyncio, as many requests in flight as the others have."""

    name = "raw"

    def _connect(self) -> None:
        from obstore.store import S3Store

        place = self._place
        self._store = S3Store(
            place.bucket,
            prefix=self.name,
            config={
                "access_key_id": place.access_key,
                "secret_access_key": place.secret_key,
                "region": place.region,
                "endpoint": place.endpoint,
                "virtual_hosted_style_request": False,
            },
            client_options={"allow_http": True},
        )

    def set(self, keys: Sequence[str]) -> list[bool]:
        import obstore

        async def put(key: str, page: npt.NDArray[np.uint8]) -> None:
            await obstore.put_async(self._store, key, page.data, use_multipart=False)

        self._run([put(key, page) for key, page in zip(keys, self._pages, strict=True)])
        return [True] * len(keys)

    def get(self, keys: Sequence[str]) -> list[bool]:
        import obstore

        async def get(key: str, page: npt.NDArray[np.uint8]) -> bool:
            answer = await obstore.get_async(self._store, key)
            end = 0
            # Several times as fast as the whole body at once from 1 MiB on.
            async for piece in answer.stream(min_chunk_size=_PIECE):
                start, end = end, end + len(piece)
                page[start:end] = np.frombuffer(piece, np.uint8)
            return end == self.page_bytes

        return list(
            self._run([get(key, page) for key, page in zip(keys, self._pages, strict=True)])
        )

    def _run(self, work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        async def everything() -> list[Any]:
            turns = asyncio.Semaphore(self._place.concurrency or len(work))

            async def one(job: Coroutine[Any, Any, Any]) -> Any:
                async with turns:
                    return await job

            return await asyncio.gather(*map(one, work))

        return asyncio.run(everything())


class BareObjects(_Flat):
    """NIXL's OBJ plug-in, one transfer an object, all posted at once."""

    name = "nixl"

    def _connect(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._name = f"bench-objects-{os.getpid()}-{id(self)}"
        self._agent = nixl_agent(self._name, nixl_agent_config(backends=[]))
        self._agent.create_backend("OBJ", self._place.nixl_parameters())
        memory = (self._pages.ctypes.data, self._pages.nbytes, 0, "")
        self._memory = self._agent.register_memory(self._agent.get_reg_descs([memory], "DRAM"))
        self._next = 1

    def set(self, keys: Sequence[str]) -> list[bool]:
        return self._transfer("WRITE", keys)

    def get(self, keys: Sequence[str]) -> list[bool]:
        return self._transfer("READ", keys)

    def _transfer(self, operation: str, keys: Sequence[str]) -> list[bool]:
        agent, size = self._agent, self.page_bytes
        first, self._next = self._next, self._next + len(keys)
        objects = agent.register_memory(
            agent.get_reg_descs(
                [(0, size, first + i, f"{self.name}/{key}") for i, key in enumerate(keys)], "OBJ"
            )
        )
        start = self._pages.ctypes.data
        handles = []
        for number in range(len(keys)):
            handle = agent.initialize_xfer(
                operation,
                agent.get_xfer_descs([(start + number * size, size, 0)], "DRAM"),
                agent.get_xfer_descs([(0, size, first + number)], "OBJ"),
                self._name,
            )
            agent.transfer(handle)
            handles.append(handle)
        self._wait(operation, handles)
        for handle in handles:
            agent.release_xfer_handle(handle)
        agent.deregister_memory(objects)
        return [True] * len(keys)

    def _wait(self, operation: str, handles: Sequence[Any]) -> None:
        deadline = time.monotonic() + _DEADLINE
        for handle in handles:
            while (state := self._agent.check_xfer_state(handle)) != "DONE":
                if state == "ERR" or time.monotonic() > deadline:
                    raise BenchError(f"nixl: {operation} of an object ended as {state}")
                time.sleep(_POLL)

    def close(self) -> None:
        if getattr(self, "_agent", None) is not None:
            self._agent.deregister_memory(self._memory)
            self._agent = None
