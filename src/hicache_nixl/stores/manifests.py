"""The manifest of a namespace, as it lies beside its pages in a directory or bucket."""

import json
import logging

from hicache_nixl.errors import HiCacheNixlError
from hicache_nixl.identity import Namespace, namespace_from_manifest
from hicache_nixl.stores.directory import UNREADABLE

logger = logging.getLogger(__name__)


def read_manifest(content: str | bytes, place: object, digest: str) -> Namespace | None:
    """The namespace of the manifest that lies at `place` under the name `digest`; None, with a line
    in the log, if it is not right."""
    try:
        namespace = namespace_from_manifest(json.loads(content))
    except (*UNREADABLE, HiCacheNixlError) as error:
        logger.warning("%s cannot be used: %s", place, error)
        return None
    if namespace.digest.hex() != digest:
        logger.warning("%s is the manifest of another namespace", place)
        return None
    return namespace
