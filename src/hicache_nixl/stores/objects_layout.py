"""Names in a store of objects, and the small objects beside the pages.

    <prefix>/store.json                       format
    <prefix>/namespaces/<digest>.json         what the pages are
    <prefix>/pages/<digest>/<key>             one page record
    <prefix>/probes/<writer>                  there for a moment, while somebody tries

Digests and keys are 64 hexadecimal digits. Whatever has another name belongs to somebody else and
is left alone.
"""

import json
import logging
import re

from hicache_nixl.bucket import Bucket
from hicache_nixl.errors import HiCacheNixlError, StoreError, StoreFormatError
from hicache_nixl.identity import Namespace, namespace_from_manifest
from hicache_nixl.stores.directory import UNREADABLE

logger = logging.getLogger(__name__)

FORMAT = 1
KIND = "objects"
_HEX_NAME = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Names:
    """Names of the objects of one store."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.marker = f"{bucket.root}store.json"
        self.manifests = f"{bucket.root}namespaces/"

    def page(self, namespace: bytes, key: bytes) -> str:
        return f"{self.pages(namespace)}{key.hex()}"

    def pages(self, namespace: bytes) -> str:
        """What the names of all pages of a namespace begin with."""
        return f"{self._bucket.root}pages/{namespace.hex()}/"

    def key(self, namespace: bytes, name: str) -> bytes | None:
        """The key of a page, None if the object is none."""
        digits = name.removeprefix(self.pages(namespace))
        return bytes.fromhex(digits) if _HEX_NAME.fullmatch(digits) else None

    def manifest(self, namespace: bytes) -> str:
        return f"{self.manifests}{namespace.hex()}.json"

    def digest(self, name: str) -> str | None:
        """The digest of the namespace of a manifest, None if the object is none."""
        digits = name.removeprefix(self.manifests).removesuffix(".json")
        return digits if _HEX_NAME.fullmatch(digits) else None

    def probe(self, writer: bytes) -> str:
        return f"{self._bucket.root}probes/{writer.hex()}"


def marker_content() -> bytes:
    return json.dumps({"format": FORMAT, "kind": KIND}).encode()


def check_marker(content: bytes, bucket: Bucket) -> None:
    """Raises StoreError, StoreFormatError for a store of a later version."""
    try:
        marker = json.loads(content)
    except (ValueError, RecursionError):
        marker = None
    if not isinstance(marker, dict) or marker.get("kind") != KIND:
        raise StoreError(
            f"{bucket} holds a store.json of something else; name another bucket or prefix"
        )
    if marker.get("format") != FORMAT:
        raise StoreFormatError(
            f"{bucket} holds a store of format {marker.get('format')}, this version reads "
            f"{FORMAT}; upgrade hicache-nixl or use another prefix"
        )


def manifest_content(namespace: Namespace) -> bytes:
    return json.dumps(namespace.manifest, indent=1, sort_keys=True).encode()


def read_manifest(content: bytes, name: str, digest: str) -> Namespace | None:
    """The namespace of a manifest; None if it is not right."""
    try:
        namespace = namespace_from_manifest(json.loads(content))
    except (*UNREADABLE, HiCacheNixlError) as error:
        logger.warning("%s cannot be used: %s", name, error)
        return None
    if namespace.digest.hex() != digest:
        logger.warning("%s is the manifest of another namespace", name)
        return None
    return namespace
