"""What a load in another process does (load_child.py) and says, for both sides."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spec:
    """What to do."""

    store: str
    """As in the settings; credentials come from the environment."""
    settings: dict[str, Any] = field(default_factory=dict)
    deadline_s: float = 2.0
    backups: int = 1
    prefetches: int = 2
    groups: int = 6
    seed: int = 0
    others: int = 0
    """Threads that set and get groups of their own."""
    clear_every_s: float = 0.0
    """Seconds from one `clear` to the next; 0 for none."""


@dataclass(frozen=True)
class State:
    """How it stands since the start."""

    sets: int
    gets: int
    stored: int
    """Pages of new groups that were stored."""
    read: int
    """Pages that were read, each compared."""
    clears: int
    longest_s: float
    """The longest call."""
    files: int
    connections: int
    threads: int
    resident_bytes: int
    evicted: int | None
    """Pages, by everybody; None where the store does not evict."""
    circuits: dict[str, str]
    """Direction to closed, open or half-open."""
