"""The SGLang flags that put this connector behind a server.

This module owns the flags and the keys by which SGLang finds the connector. It must not import
SGLang, nor know what a setting means.
"""

import json
from collections.abc import Mapping
from typing import Any

from hicache_nixl.errors import SettingsError
from hicache_nixl.intree_plugins import CREDENTIALS
from hicache_nixl.settings import load_settings
from hicache_nixl.store_keys import SECRETS

BACKEND = "dynamic"
"""SGLang's name for a storage backend that the extra config loads."""

# How SGLang's dynamic backend finds and calls the connector.
LOADER_KEYS: dict[str, Any] = {
    "backend_name": "hicache_nixl",
    "module_path": "hicache_nixl",
    "class_name": "HiCacheNixlConnector",
    "interface_v1": 1,
    # Eviction frees a prefix from its deepest page, so each page must come with its chain.
    "hicache_storage_pass_prefix_keys": True,
}
_CREDENTIALS = {*SECRETS, *(name for names in CREDENTIALS.values() for name in names)}
# The first is the one recommended for the layout. SGLang itself would change a pair that is not
# here, with a warning, or fail on the first transfer.
IO_BACKENDS = {
    "page_first_direct": ("direct",),
    "page_first": ("kernel",),
    "layer_first": ("kernel", "direct"),
    "page_head": ("kernel",),
}
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
PREFETCH_POLICIES = ("timeout", "wait_complete", "best_effort")


def launch_args(
    settings_source: Mapping[str, object],
    *,
    layout: str = "page_first_direct",
    io_backend: str | None = None,
    write_policy: str = "write_through",
    prefetch_policy: str = "timeout",
    page_size: int | None = 64,
    cache_report: bool = True,
    storage_only: bool = False,
    environ: Mapping[str, str] | None = None,
) -> list[str]:
    """The flags for `python -m sglang.launch_server`, one list item per word.

    Args:
        settings_source: what the user set, as written; keys of SGLang such as
            `prefetch_threshold` and of the in-tree connector pass through. Settings in the
            environment or in the file that `HICACHE_NIXL_CONFIG` names count, and stay there: the
            server reads them itself.
        layout: order of KV in host memory. `page_first_direct` keeps a page in few pieces.
        io_backend: how SGLang copies between GPU and host memory; by default the layout's own.
        write_policy: when pages go to host memory and on to the store.
        prefetch_policy: when a request stops waiting for pages; `timeout` bounds the wait.
        page_size: tokens in a page; None leaves it to SGLang, whose default of 1 makes records
            so small that their trailers outweigh them.
        cache_report: report cached tokens in each answer.
        storage_only: only the two flags that name the connector, for a server that has its others.
        environ: replaces the process environment while the settings are checked.

    Credentials are left out, see `left_out`. Raises `SettingsError` for settings that the server
    would refuse.
    """
    extra_config = extra_config_text(settings_source, environ=environ)
    _choose("layout", layout, tuple(IO_BACKENDS))
    io_backends = IO_BACKENDS[layout]
    backend = io_backends[0] if io_backend is None else io_backend
    _choose(f"io_backend of layout {layout}", backend, io_backends)
    _choose("write_policy", write_policy, WRITE_POLICIES)
    _choose("prefetch_policy", prefetch_policy, PREFETCH_POLICIES)
    if page_size is not None and page_size < 1:
        raise SettingsError(f"page_size = {page_size} is below 1; write for example 64")
    storage = ["--hicache-storage-backend", BACKEND]
    storage += ["--hicache-storage-backend-extra-config", extra_config]
    if storage_only:
        return storage
    args = ["--enable-hierarchical-cache"]
    if page_size is not None:
        args += ["--page-size", str(page_size)]
    args += ["--hicache-mem-layout", layout, "--hicache-io-backend", backend]
    args += ["--hicache-write-policy", write_policy]
    args += ["--hicache-storage-prefetch-policy", prefetch_policy]
    args += storage
    return [*args, "--enable-cache-report"] if cache_report else args


def attach_request(
    settings_source: Mapping[str, object], *, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The JSON body by which a running server takes the connector.

    It is for `PUT /hicache/storage-backend`. Raises as `launch_args`. A `store` in the environment
    counts as long as the server has the same environment.
    """
    return {
        "hicache_storage_backend": BACKEND,
        "hicache_storage_backend_extra_config_json": extra_config_text(
            settings_source, environ=environ
        ),
    }


def extra_config_text(
    settings_source: Mapping[str, object], *, environ: Mapping[str, str] | None = None
) -> str:
    """The value of `--hicache-storage-backend-extra-config`: what was set, and how to load it.

    Credentials are left out, because SGLang logs its flags; `left_out` names them. Raises
    `SettingsError` for settings that the server would refuse.
    """
    config = _extra_config(settings_source)
    load_settings(config, environ=environ)
    config = _without_credentials(config)
    try:
        return json.dumps(config, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError):
        raise SettingsError("the settings hold a value JSON cannot express; use texts") from None


def left_out(settings_source: Mapping[str, object]) -> str | None:
    """What to tell a user whose credentials `extra_config_text` leaves out; None if there are
    none."""
    names = _credentials(settings_source)
    if not names:
        return None
    return (
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} left out of the flags, which "
        "SGLang logs; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (for azure:// "
        "AZURE_STORAGE_CONNECTION_STRING) in the server's environment, or credentials_file"
    )


def _credentials(source: Mapping[str, object], prefix: str = "") -> list[str]:
    """The dotted names of all credentials that are not empty, at any depth."""
    found = []
    for key, value in source.items():
        if isinstance(value, Mapping):
            found += _credentials(value, f"{prefix}{key}.")
        elif _is_credential(key) and value not in ("", None):
            found.append(f"{prefix}{key}")
    return found


def _without_credentials(source: Mapping[str, object]) -> dict[str, object]:
    return {
        key: _without_credentials(value) if isinstance(value, Mapping) else value
        for key, value in source.items()
        if not _is_credential(key)
    }


def _is_credential(key: object) -> bool:
    return isinstance(key, str) and key.rpartition(".")[2] in _CREDENTIALS


def _extra_config(source: Mapping[str, object]) -> dict[str, object]:
    given = {key: value for key, value in source.items() if value is not None}
    for key, value in LOADER_KEYS.items():
        if given.get(key, value) != value:
            raise SettingsError(f"{key} must be {json.dumps(value)}; remove it or set it so")
    return {**LOADER_KEYS, **given, **LOADER_KEYS}


def _choose(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingsError(f"{name} = {value!r} is not accepted; choose {' or '.join(choices)}")
