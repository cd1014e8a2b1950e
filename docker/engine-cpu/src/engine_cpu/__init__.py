"""The unmodified SGLang on a CPU.

`platform` and `plugin` are SGLang's own entry points, loaded in every engine process when
``SGLANG_PLATFORM=hicache_cpu``. `kvcopy` holds the host<->device copies the GPU kernels do
elsewhere, `models` writes tiny models to disk, `server` starts and stops a server.

Only `platform`, `plugin` and `models` import SGLang or torch, so that `server` starts a server
without paying for either.
"""

PLATFORM = "hicache_cpu"
"""The value of ``SGLANG_PLATFORM`` that selects this package."""
