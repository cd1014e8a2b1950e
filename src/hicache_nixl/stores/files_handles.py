"""Open page files on their way through an engine: registered, moved, let go.

A descriptor is registered for one transfer, and closed only when no engine knows it any more: its
number is what transfers refer to. This module knows descriptors; what they are of, it does not.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from hicache_nixl.batch import Extents, OnLate
from hicache_nixl.errors import TransferError
from hicache_nixl.registrations import Registration
from hicache_nixl.transfer import TransferEngine

logger = logging.getLogger(__name__)


class _Opened(Protocol):
    @property
    def descriptor(self) -> int: ...


Page = TypeVar("Page", bound=_Opened)


class Handles(Generic[Page]):
    """Some open pages of `nbytes` each, registered with an engine (with none if it is None).

    Belongs to one call. `pages` are those that could be registered, `rows` which these are of those
    given; `let_go` gets the others, and in the end each one, unless the engine does not let go.
    """

    def __init__(
        self,
        given: Sequence[Page],
        engine: TransferEngine | None,
        nbytes: int,
        let_go: Callable[[Page], object],
    ) -> None:
        self._engine = engine
        self._let_go = let_go
        self._registrations: list[Registration | None] = []
        self.pages: list[Page] = []
        self.late: set[int] = set()
        """Of `pages`, those that a transfer still needs after its call."""
        rows = []
        for row, page in enumerate(given):
            try:
                registration = (
                    None if engine is None else engine.register_file(page.descriptor, nbytes)
                )
            except TransferError as error:
                logger.warning("%s", error)
                let_go(page)
                continue
            self._registrations.append(registration)
            self.pages.append(page)
            rows.append(row)
        self.rows: npt.NDArray[np.int64] = np.array(rows, np.int64)

    def extents(self) -> Extents:
        """One record a page, from the start of its file."""
        files = np.array([page.descriptor for page in self.pages], np.int64)
        return Extents(files, np.zeros(len(files), np.int64))

    def on_late(self, begun: Callable[[int], object], ended: Callable[[int], object]) -> OnLate:
        """Keeps late pages open until their transfer has ended, then lets them go.

        `begun` and `ended` get how many.
        """

        def on_late(rows: npt.NDArray[np.int64]) -> Callable[[], None]:
            late = [int(row) for row in rows]
            self.late.update(late)
            begun(len(late))

            def on_end() -> None:
                try:
                    for row in late:
                        if self.end(row):
                            self._let_go(self.pages[row])
                finally:
                    ended(len(late))

            return on_end

        return on_late

    def end(self, row: int) -> bool:
        """End the registration of a page; whether its descriptor may be closed."""
        registration = self._registrations[row]
        if self._engine is None or registration is None:
            return True
        try:
            self._engine.deregister(registration)
        except TransferError as error:  # NIXL may still use the descriptor: it stays open
            logger.warning("%s", error)
            return False
        return True

    def ended(self) -> list[int]:
        """End the registrations of all that are not late; those whose descriptor may be closed."""
        return [row for row in range(len(self.pages)) if row not in self.late and self.end(row)]
