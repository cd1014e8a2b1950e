"""What a host pool of SGLang is made of: the classes, layouts and buffers that are understood.

    registry    which class is read by which reader; checks what a reader says against the memory
    attention   K and V of tokens: MHA, MLA and what is like them
    paged       rows of bytes, one per page: indexers, compressed attention, packed quantised KV
    state       the state of recurrent layers
    reading     what a reader returns, and how it reads attributes

A pool is read by its attributes and refused by name where it is not known. These modules import
neither SGLang nor torch, and know nothing of page addresses, namespaces or stores. A new kind of
pool is one reader and one line in `registry.KINDS`.
"""

from hicache_nixl.host_pools.reading import Facts, RowFormat, attribute, count, integer
from hicache_nixl.host_pools.registry import Block, HostPool, is_replicated, pool_kind, read_pool

__all__ = [
    "Block",
    "Facts",
    "HostPool",
    "RowFormat",
    "attribute",
    "count",
    "integer",
    "is_replicated",
    "pool_kind",
    "read_pool",
]
