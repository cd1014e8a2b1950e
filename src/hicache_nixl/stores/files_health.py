"""Whether the directory of a files store works, and is still the one that was opened.

The directory of a running server can go away: unmounted, moved, removed. What is open then lives on
without a name. It is noticed here, and what is open is exchanged when the directory is back.
"""

import time
from collections.abc import Sequence

from hicache_nixl.errors import StoreError
from hicache_nixl.stores.base import Direction
from hicache_nixl.stores.directory import as_store_error, read_block, write_and_read_back
from hicache_nixl.stores.files_crew import Crew
from hicache_nixl.stores.files_layout import FilesRoot
from hicache_nixl.stores.files_pages import PageFiles

_LOOK_S = 1.0


class FilesHealth:
    """Safe for threads."""

    def __init__(self, root: FilesRoot, crew: Crew, *, direct_io: bool) -> None:
        self._root = root
        self._crew = crew
        self._direct_io = direct_io

    def check(self, direction: Direction, spaces: Sequence[PageFiles], deadline: float) -> None:
        """See `Store.check`; `spaces` are the namespaces that are open."""
        directory = self._root.directory

        def try_it(place: str) -> bool:
            self._root.see_that_it_is_there()
            for files in spaces:
                files.follow()
            if direction == "read":
                read_block(directory / "store.json", direct_io=self._direct_io)
            else:
                write_and_read_back(directory / place, direct_io=self._direct_io)
            return True

        place = spaces[0].place if spaces else "."
        with as_store_error(directory):
            (done,) = self._crew.map(try_it, [place], deadline=deadline)
        if done is None:
            raise self._does_not_answer()

    def follow(self, files: PageFiles, deadline: float) -> None:
        """Now and then, see that the directory was not replaced under us. Raises StoreError."""
        if time.monotonic() < files.next_look:
            return
        (done,) = self._crew.map(PageFiles.follow, [files], deadline=deadline)
        if done is None:
            raise self._does_not_answer()
        files.next_look = time.monotonic() + _LOOK_S

    def refuse(self, files: PageFiles, before: int, deadline: float) -> None:
        """After a call that had nothing from the medium: StoreError if that is for trouble.

        `before`: the troubles there had been when the call began.
        """
        if files.troubles > before:
            raise StoreError(f"{self._root.directory}: {files.last_trouble}")
        if time.monotonic() >= deadline:
            raise self._does_not_answer()

    def _does_not_answer(self) -> StoreError:
        return StoreError(
            f"{self._root.directory} does not answer in time; see whether its server is there"
        )
