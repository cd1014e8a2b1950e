"""`hicache-nixl launch-args`: the exact SGLang flags for a configuration."""

import shlex
from typing import Annotated

import typer

from hicache_nixl.cli.common import (
    ConfigOption,
    JsonOption,
    SetOption,
    StoreOption,
    err,
    errors_as_one_line,
    given,
    out,
    print_json,
    print_notes,
)
from hicache_nixl.launch import attach_request, launch_args, left_out
from hicache_nixl.settings import load_settings
from hicache_nixl.sources import read_extra_config, read_settings_file

EXAMPLE = "Example: hicache-nixl launch-args --store slab:///nvme0/hicache --set capacity=2TiB"

ExtraConfigOption = Annotated[
    str | None,
    typer.Option(
        "--extra-config",
        help="What --hicache-storage-backend-extra-config says today, for the in-tree connector "
        "too: JSON, or @ and a file.",
    ),
]
StorageOnlyOption = Annotated[
    bool,
    typer.Option(
        "--storage-only", help="Only the two flags that name the connector, without advice."
    ),
]
AttachOption = Annotated[
    bool,
    typer.Option(
        "--attach", help="Print the body of PUT /hicache/storage-backend for a running server."
    ),
]


def launch(
    store: StoreOption = None,
    config: ConfigOption = None,
    extra_config: ExtraConfigOption = None,
    settings: SetOption = None,
    storage_only: StorageOnlyOption = False,
    attach: AttachOption = False,
    json: JsonOption = False,
) -> None:
    """Print the flags that make SGLang's server keep its KV cache in this store.

    How keys of SGLang's in-tree connector were understood is on standard error.
    """
    with errors_as_one_line():
        source = {} if config is None else read_settings_file(config)
        source |= {} if extra_config is None else read_extra_config(extra_config)
        source |= given(store, settings)
        printed = (
            attach_request(source) if attach else launch_args(source, storage_only=storage_only)
        )
        print_notes(load_settings(source))
        if (note := left_out(source)) is not None:
            err.print(f"note: {note}", markup=False)
    if isinstance(printed, list) and not json:
        out.print(shlex.join(printed), markup=False)
    else:
        print_json(printed)
