"""Who may use the machine's hugepages, and a note of how many there were before.

Needs nothing else of this project, so that the watcher of a killed run can give back what that had
raised.
"""

import json
import os
import tempfile
from pathlib import Path

from filelock import FileLock

# Every user of the machine takes it, whoever was the first.
LOCK = FileLock(Path(tempfile.gettempdir()) / "hicache-nixl-hugepages.lock", mode=0o666)
NOTE = Path("/run/hicache-nixl-hugepages.json")
"""Files of pools, and what is to be written there again. It goes with the machine's power, as the
pages do."""


def restore() -> None:
    """Give back what a process raised that was killed. Blocks while others use hugepages."""
    with LOCK:
        restore_locked()


def restore_locked() -> None:
    """As `restore`, with the lock held: who wrote the note is dead, or calls this."""
    if not os.access(NOTE, os.W_OK):
        return
    for knob, before in json.loads(NOTE.read_text()).items():
        if int(Path(knob).read_text()) != before:
            Path(knob).write_text(str(before))
    NOTE.unlink()


def note(knob: Path, before: int) -> None:
    """With the lock held: `before` is what `restore` writes into `knob`."""
    draft = NOTE.with_suffix(".new")
    draft.write_text(json.dumps({str(knob): before}))
    draft.replace(NOTE)
