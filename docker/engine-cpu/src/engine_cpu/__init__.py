"""The unmodified SGLang on a CPU.

`platform` and `plugin` are SGLang's own entry points, loaded in every engine process when
``SGLANG_PLATFORM=hicache_cpu``. `kvcopy` holds the host<->device copies the GPU kernels do
elsewhere, `ranks` lets several ranks exchange tensors, `models` writes tiny models to disk,
`server` starts, asks and stops a server, `replies` reads its answers.

Only `platform`, `plugin` and `models` import SGLang or torch, so that `server` starts a server
without paying for either.
"""

PLATFORM = "hicache_cpu"
"""The value of ``SGLANG_PLATFORM`` that selects this package."""
