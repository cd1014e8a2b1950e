"""The unmodified SGLang on a CPU.

`platform` and `plugin` are SGLang's own entry points, loaded in every engine process when
``SGLANG_PLATFORM=hicache_cpu``. `kvcopy` holds the host<->device copies the GPU kernels do
elsewhere, `ranks` lets several ranks exchange tensors, `models` writes tiny models to disk,
`server` starts and stops a server, `client` asks and administers one, `replies` reads its answers,
`verdict` compares two of them. `serve` and `e2e` are the commands of containers.

Only `platform`, `plugin` and `models` import SGLang or torch, so that the others pay for neither.
"""

PLATFORM = "hicache_cpu"
"""The value of ``SGLANG_PLATFORM`` that selects this package."""
