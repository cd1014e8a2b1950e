"""Writes or reads stores under one version of SGLang, and says what came of it.

    PYTHONPATH=VERSION python -m versions.child write|read REPORT STORE...

The report is a JSON object; `test_versions` says what must be in it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from versions import engine, pages
from versions.cells import CELLS, READ_ONLY, Cell
from versions.controller import Controller
from versions.engine import PAGE, Shape

PAGES = 4
TOKENS = [1000 + position for position in range(PAGES * PAGE)]
DEVICE_TOKENS = 4 * PAGE
"""Tokens of a device pool; its host pool has twice as many and a page."""
_WRITTEN_TO, _READ_TO = [3, 0, 2, 1], [7, 4, 6, 0]

Report = dict[str, Any]


def _pool(cell: Cell) -> Any:
    return engine.host_pool(engine.device_pool(cell.shape, DEVICE_TOKENS), cell.shape, cell.layout)


def _content(cell: Cell) -> pages.Pages:
    return pages.meaning(cell.meaning, cell.shape, PAGES)


def _write(cell: Cell, store: Path, keys: list[str]) -> Report:
    pool = _pool(cell)
    pages.unwrite(pool, cell.shape)
    pages.in_pool(pool, cell.shape)[:, :, _WRITTEN_TO] = _content(cell)
    connector = engine.connector(store, pool, **cell.config)
    extra = _extra()
    written = connector.batch_set_v1(keys, pages.indices(_WRITTEN_TO), extra)
    found = connector.batch_exists(keys, extra)
    stats = connector.get_stats()
    connector.close()
    return {"exists": found, "written": written, "counted": stats.backup_pgs}


def _read(cell: Cell, store: Path, keys: list[str]) -> Report:
    """What is found, and whether every byte of every layer is right and no other one touched."""
    pool = _pool(cell)
    pages.unwrite(pool, cell.shape)
    connector = engine.connector(store, pool, **cell.config)
    found = connector.batch_exists(keys, _extra())
    read = connector.batch_get_v1(keys, pages.indices(_READ_TO), _extra())
    connector.close()
    memory, expected = pages.in_pool(pool, cell.shape), _content(cell)
    wrong = [
        f"page {number}, layer {layer}"
        for number in range(PAGES)
        for layer in range(cell.shape.layers)
        if read[number] and (memory[:, layer, _READ_TO[number]] != expected[:, layer, number]).any()
    ]
    others = [page for page in range(pool.page_num) if page not in _READ_TO]
    if not pages.is_unwritten(memory[:, :, others]):
        wrong.append("a page that was not asked for")
    return {"exists": found, "read": read, "wrong": wrong}


def _extra() -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

    return HiCacheStorageExtraInfo(prefix_keys=["0" * 64])


def _clear(store: Path, keys: list[str]) -> Report:
    """Two models in one store; one of them is cleared."""
    with engine.configured("page_first"):
        cell = CELLS["mha page_first"]
        other = CELLS["another model"]
        for each in (cell, other):
            _write(each, store, keys)
        connector = engine.connector(store, _pool(cell), **cell.config)
        cleared = connector.clear()
        left = connector.batch_exists(keys)
        connector.close()
        return {"cleared": cleared, "left": left, "others": _read(other, store, keys)}


def _through_controllers(store: Path, action: str) -> Report:
    """A prompt through L1, L2 and L3 in each layout; each layout has a store of its own."""
    outcome: Report = {}
    with ExitStack() as open_controllers:
        # Ending a controller waits for its threads, so they are ended together.
        closing = open_controllers.enter_context(ThreadPoolExecutor())
        for name, cell in CELLS.items():
            if cell.is_plain:
                place = store / name.replace(" ", "-")
                with engine.configured(cell.layout):
                    controller = Controller(place, cell.shape, cell.layout, len(TOKENS))
                    outcome[name] = _through(controller, cell.shape, name, action)
                open_controllers.callback(closing.submit, controller.close)
    return outcome


def _through(controller: Controller, shape: Shape, meaning: str, action: str) -> str:
    content = pages.meaning(meaning, shape, PAGES)
    if action == "write":
        controller.store(TOKENS, content)
        return "stored"
    back = controller.load(TOKENS)
    if back is None:
        return "missing"
    return "right" if (back == content).all() else "wrong"


def _refused(store: Path) -> dict[str, str]:
    """What an older version does not tell, or may store in a way that is not known: the errors."""
    cell, mla = CELLS["mha page_first"], CELLS["mla page_first"]
    sparse = engine.device_pool(mla.shape, DEVICE_TOKENS)
    sparse.__class__ = type("NSATokenToKVPool", (type(sparse),), {})
    unequal = engine.device_pool(cell.shape, DEVICE_TOKENS)
    unequal.v_head_dim = cell.shape.width // 2
    plain = _pool(cell)
    made = engine.connector(store, plain, **cell.config)

    def in_stages() -> None:
        engine.set_arguments(pp_size=2)
        engine.connector(store, plain, **cell.config)

    attempts: dict[str, Callable[[], Any]] = {
        "device pool": lambda: engine.connector(
            store, engine.host_pool(sparse, mla.shape, mla.layout), **mla.config
        ),
        "V width": lambda: engine.connector(
            store, engine.host_pool(unequal, cell.shape, cell.layout), **cell.config
        ),
        "swa": lambda: made.register_mem_host_pool_v2(_pool(cell), "swa"),
        "pp_size": in_stages,
    }
    outcome = {name: _error_of(attempt) for name, attempt in attempts.items()}
    made.close()
    return outcome


def _error_of(attempt: Callable[[], Any]) -> str:
    from hicache_nixl.errors import RegistrationError

    try:
        attempt()
    except RegistrationError as error:
        return str(error)
    return "accepted"


def _all(action: str, store: Path, keys: list[str]) -> Report:
    perform, cells = (_write, CELLS) if action == "write" else (_read, CELLS | READ_ONLY)
    (store / "controller").mkdir(parents=True, exist_ok=True)
    outcome: Report = {"cells": {}}
    for name, cell in cells.items():
        with engine.configured(cell.layout, cell.shape.dtype):
            outcome["cells"][name] = perform(cell, store / "interface", keys)
    outcome["controller"] = _through_controllers(store / "controller", action)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("write", "read"))
    parser.add_argument("report", type=Path)
    parser.add_argument("stores", type=Path, nargs="+")
    options = parser.parse_args()
    keys = engine.page_keys(TOKENS)
    report: Report = {"version": engine.VERSION, "keys": keys}
    with tempfile.TemporaryDirectory(dir=options.report.parent) as name:
        directory = Path(name).resolve()
        with engine.running(directory):
            for store in options.stores:
                report[store.name] = _all(options.action, store, keys)
            if options.action == "write":
                report["cleared"] = _clear(directory / "cleared", keys)
                report["refused"] = {} if engine.IS_CURRENT else _refused(directory / "refused")
    options.report.write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
