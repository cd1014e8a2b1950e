"""`hicache-nixl launch-args`: the exact SGLang flags for a configuration."""

import shlex

from hicache_nixl.cli.common import (
    ConfigOption,
    JsonOption,
    SetOption,
    StoreOption,
    errors_as_one_line,
    given,
    out,
    print_json,
)
from hicache_nixl.launch import launch_args
from hicache_nixl.sources import read_settings_file

EXAMPLE = "Example: hicache-nixl launch-args --store slab:///nvme0/hicache --set capacity=2TiB"


def launch(
    store: StoreOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Print the flags that make SGLang's server keep its KV cache in this store."""
    with errors_as_one_line():
        from_file = {} if config is None else read_settings_file(config)
        args = launch_args(from_file | given(store, settings))
    if json:
        print_json(args)
    else:
        out.print(shlex.join(args), markup=False)
