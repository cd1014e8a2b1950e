"""One line of what was found at start."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the block that a start prints."""

    topic: str
    found: str
    better: str | None = None
    """What would be better and how to get it."""
