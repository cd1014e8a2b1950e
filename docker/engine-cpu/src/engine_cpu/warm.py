"""Compiles what SGLang would compile at its first request with HiCache, and leaves it in its cache.

Command: ``python -m engine_cpu.warm``. Takes a quarter of a minute once, then a few seconds.
"""

import sys


def warm() -> None:
    """Build SGLang's page hash; blocks until the compiled module is loaded.

    Raises RuntimeError with SGLang's reason where it cannot be compiled.
    """
    from sglang.srt.mem_cache.utils import get_hash_str

    get_hash_str(list(range(16)), page_size=16)


if __name__ == "__main__":
    warm()
    sys.exit(0)
