"""Host pools of SGLang's in cases of memory, each in a process of its own that may be killed.

    python -m memory_child JSON

JSON is a list of the fields of `Case`. It prints `ready`, then for each SIGUSR1 the next case's
`Seen` as a line of JSON.
"""

import ctypes
import gc
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pools
from connectors import HiCacheStorageExtraInfo, config, keys
from hicache_nixl import pinning
from hicache_nixl.errors import HostMemoryError
from memory_spec import Case, Seen, Trip
from observed import TransferWatch, mapping, warnings_of_library

BATCH = 16
NEXT = {signal.SIGUSR1}


def see(case: Case) -> Seen:
    """Carry a case out; raises for a wrong byte."""
    seen = Seen()
    os.environ.update(case.environment)
    with warnings_of_library() as warnings, TransferWatch().watching() as watch:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        try:
            pool = pools.make_mha_pool("page_first_direct", pages=case.pages, **case.shape, seed=1)
        except MemoryError as error:
            seen.error = f"{type(error).__name__}: {error}"
        else:
            _see_pages(pool, seen)
            seen.trips = [_trip(pool, watch, *store) for store in case.stores]
            if case.pins:
                _see_pinning(pool, seen)
    seen.warnings = warnings
    return seen


def _see_pages(pool: Any, seen: Seen) -> None:
    first = pool.kv_buffer.data_ptr()
    fields = mapping(first)
    assert fields == mapping(first + pool.kv_buffer.nbytes - 1), "the pool is in two mappings"
    seen.page_kb = fields["KernelPageSize"]
    seen.hugetlb_kb = fields["Private_Hugetlb"] + fields["Shared_Hugetlb"]
    seen.pool_kb = pool.kv_buffer.nbytes >> 10


def _trip(pool: Any, watch: TransferWatch, store: str, settings: dict[str, Any]) -> Trip:
    # Not at the top: NIXL must not be loaded where cases are forked.
    from hicache_nixl.connector import HiCacheNixlConnector

    pools.fill(pool, seed=1)
    content = [pools.page_bytes(pool, page) for page in range(pool.page_num)]
    names, extra = keys(pool.page_num), HiCacheStorageExtraInfo(prefix_keys=[])
    connector = HiCacheNixlConnector(config(Path("/unused"), store=store, **settings), {})
    try:
        connector.register_mem_pool_host(pool)
        connector.on_host_pools_registered()
        watch.take((0, 0))  # what the start has tried
        stored = read = 0
        batches = [range(pool.page_num)[at : at + BATCH] for at in range(0, pool.page_num, BATCH)]
        for move in (connector.batch_set_v1, connector.batch_get_v1):
            for batch in batches:
                indices = pools.token_indices(list(batch), pool.page_size)
                flags = move([names[page] for page in batch], indices, extra)
                if move == connector.batch_set_v1:
                    stored += sum(flags)
                    continue
                for page in (page for page, good in zip(batch, flags, strict=True) if good):
                    assert pools.page_bytes(pool, page) == content[page], f"{store}: page {page}"
                    read += 1
            if move == connector.batch_set_v1:
                pools.clear(pool)
        buffer = pool.kv_buffer
        extents = watch.take((buffer.data_ptr(), buffer.nbytes))
    finally:
        connector.close()
        gc.collect()
    return Trip(stored, read, asdict(extents))


def _see_pinning(pool: Any, seen: Seen) -> None:
    address, nbytes = pool.kv_buffer.data_ptr(), pool.kv_buffer.nbytes
    try:
        pinning.pin(address, nbytes)
    except HostMemoryError as error:
        seen.pinned = str(error)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    if libc.mlock(address, nbytes):
        seen.locked = os.strerror(ctypes.get_errno())


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _see_apart(case: Case) -> Seen:
    """`see` in a process that has ended, and so given its memory back, when this returns."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, json.dumps(asdict(see(case))).encode())  # less than a pipe holds
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as result:
        text = result.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status > 0:
        sys.exit(status)
    return Seen(**json.loads(text)) if status == 0 else Seen(signal=signal.Signals(-status).name)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, NEXT)
    _say("ready")
    for fields in json.loads(sys.argv[1]):
        signal.sigwait(NEXT)
        _say(json.dumps(asdict(_see_apart(Case(**fields)))))


if __name__ == "__main__":
    main()
