"""`hicache-nixl launch-args`: the exact SGLang flags for a configuration."""

EXAMPLE = "Example: hicache-nixl launch-args --store slab:///nvme0/hicache --set capacity=2TiB"


def launch(
    store: StoreOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Print the flags that make `python -m sglang.launch_server` use this store."""
    raise NotImplementedError
