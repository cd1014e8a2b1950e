"""Pages in a bucket without NIXL: listed, read whole and checked, removed.

For people who look at a store.
"""

import itertools
import logging
from collections.abc import Iterable, Iterator

from hicache_nixl import record
from hicache_nixl.identity import Namespace
from hicache_nixl.stores.base import CheckedPage, NamespaceUse
from hicache_nixl.stores.objects_client import Listed, ObjectClient
from hicache_nixl.stores.objects_layout import Names, read_manifest
from hicache_nixl.stores.whole_record import trailer_of

logger = logging.getLogger(__name__)

_READ_AT_ONCE = 8


class PageObjects:
    """The pages of one store. Safe for threads. All raise StoreError where the bucket does not
    answer, and block until `deadline` at most."""

    def __init__(self, client: ObjectClient, names: Names) -> None:
        self._client = client
        self._names = names

    def noted_namespaces(self, *, deadline: float) -> list[Namespace]:
        """The namespaces whose manifest is there and right."""
        found = []
        for chunk in self._client.listed(self._names.manifests, deadline=deadline):
            for each in chunk:
                digest = self._names.digest(each.name)
                content = self._client.read(each.name, deadline=deadline) if digest else None
                if digest and content is not None:
                    found.append(read_manifest(content, each.name, digest))
        return [namespace for namespace in found if namespace is not None]

    def use(self, namespace: Namespace, *, deadline: float) -> NamespaceUse:
        """What one namespace holds. A page's last use is when it was written."""
        pages = [page for chunk in self._chunks(namespace.digest, deadline) for _, page in chunk]
        times = [page.modified_ns for page in pages]
        return NamespaceUse(
            namespace,
            pages=len(pages),
            record_bytes=sum(page.nbytes for page in pages),
            oldest_use_ns=min(times, default=0),
            newest_use_ns=max(times, default=0),
        )

    def clear(self, namespace: bytes, *, deadline: float) -> int:
        """Remove every page of a namespace, 1000 at a time; how many went."""
        count = 0
        for chunk in self._chunks(namespace, deadline):
            self._client.delete([page.name for _, page in chunk], deadline=deadline)
            count += len(chunk)
        return count

    def verify(self, namespace: Namespace, *, deadline: float) -> Iterator[CheckedPage]:
        """Read and check every page; damaged ones are removed."""
        for chunk in self._chunks(namespace.digest, deadline):
            yield from self._checked(namespace, [key for key, _ in chunk], deadline)

    def _checked(
        self, namespace: Namespace, keys: Iterable[bytes], deadline: float
    ) -> Iterator[CheckedPage]:
        remaining = iter(keys)
        while some := list(itertools.islice(remaining, _READ_AT_ONCE)):
            names = [self._names.page(namespace.digest, key) for key in some]
            blocks = self._client.read_many(names, deadline=deadline)
            damaged = []
            for key, name, block in zip(some, names, blocks, strict=True):
                if block is None:  # gone meanwhile: neither good nor damaged
                    continue
                good = trailer_of(block, key, namespace) is not None
                if not good and not record.is_of_later_format(block):
                    damaged.append(name)
                yield CheckedPage(namespace.digest, key, good)
            self._client.delete(damaged, deadline=deadline)

    def _chunks(self, namespace: bytes, deadline: float) -> Iterator[list[tuple[bytes, Listed]]]:
        prefix = self._names.pages(namespace)
        for chunk in self._client.listed(prefix, deadline=deadline):
            pages = [(self._names.key(namespace, page.name), page) for page in chunk]
            yield [(key, page) for key, page in pages if key is not None]
