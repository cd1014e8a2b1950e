"""Claims about the flags that SGLang is started with."""

import argparse
import json
from typing import Any

import pytest

import hicache_nixl
from hicache_nixl.errors import SettingsError
from hicache_nixl.launch import (
    IO_BACKENDS,
    PREFETCH_POLICIES,
    WRITE_POLICIES,
    attach_request,
    launch_args,
)
from hicache_nixl.settings import load_settings

STORE = {"store": "slab:///nvme0/hicache"}


def flags(source: dict[str, Any], **changes: Any) -> dict[str, str | None]:
    """The flags and the word after each; None for a switch."""
    words = launch_args(source, environ={}, **changes)
    following = [*words[1:], "--"]
    return {
        word: None if after.startswith("--") else after
        for word, after in zip(words, following, strict=True)
        if word.startswith("--")
    }


def extra_config(source: dict[str, Any], **changes: Any) -> dict[str, Any]:
    text = flags(source, **changes)["--hicache-storage-backend-extra-config"]
    assert text is not None
    config = json.loads(text)
    assert isinstance(config, dict)
    return config


def refusal(source: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        launch_args(source, **({"environ": {}} | changes))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_recommended_flags() -> None:
    """Without wishes, the flags are the recommended ones, the extra config among them."""
    found = flags(STORE)
    assert found.pop("--hicache-storage-backend-extra-config") is not None
    assert found == {
        "--enable-hierarchical-cache": None,
        "--page-size": "64",
        "--hicache-mem-layout": "page_first_direct",
        "--hicache-io-backend": "direct",
        "--hicache-write-policy": "write_through",
        "--hicache-storage-prefetch-policy": "timeout",
        "--hicache-storage-backend": "dynamic",
        "--enable-cache-report": None,
    }


def test_extra_config_holds_what_was_set_and_no_default() -> None:
    """The extra config is the loader's keys and the user's, as written; null ones are left out."""
    given = STORE | {"capacity": "2TiB", "use_direct_io": False, "prefetch_threshold": 16}
    assert extra_config(given | {"salt": None}) == given | {
        "backend_name": "hicache_nixl",
        "module_path": "hicache_nixl",
        "class_name": "HiCacheNixlConnector",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
    }


def test_in_tree_configuration_passes_through() -> None:
    """A plugin map reaches the server as it was written."""
    plugin = {"posix": {"active": True, "use_uring": "true"}}
    assert extra_config(STORE | {"plugin": plugin})["plugin"] == plugin


@pytest.mark.parametrize(
    "given",
    [
        {"plugin": {"posix": {"active": True, "use_uring": "true"}}, "use_direct_io": False},
        {"plugin.posix.active": "true", "l3_cleaner_high_watermark": 85.5},
        {"use_uring": "true", "prefetch_threshold": 16},
    ],
)
def test_in_tree_configuration_gives_the_same_settings(given: dict[str, Any]) -> None:
    """What the server reads from the printed flags is what the in-tree configuration says."""
    environ = {"SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": "/nvme0/kv"}
    words = launch_args(given, environ=environ)
    printed = json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1])
    theirs, ours = (load_settings(config, environ=environ) for config in (given, printed))
    unnamed = {"notes": ()}
    assert theirs.model_copy(update=unnamed) == ours.model_copy(update=unnamed)
    assert [note.replace("SGLang's extra config", "given settings") for note in ours.notes] == list(
        theirs.notes
    )


def test_storage_flags_alone() -> None:
    """For a server that has its other flags, the two that name the connector are enough."""
    words = launch_args(STORE, storage_only=True, environ={})
    assert words[:2] == ["--hicache-storage-backend", "dynamic"]
    assert words[2:] == launch_args(STORE, environ={})[-3:-1]


def test_attach_request() -> None:
    """The body for a running server names the backend, and its configuration as a text."""
    body = attach_request(STORE | {"prefetch_threshold": 16}, environ={})
    assert body["hicache_storage_backend"] == "dynamic"
    config = json.loads(body["hicache_storage_backend_extra_config_json"])
    assert config == extra_config(STORE | {"prefetch_threshold": 16})
    assert set(body) == {"hicache_storage_backend", "hicache_storage_backend_extra_config_json"}
    with pytest.raises(SettingsError, match="by --store"):
        attach_request({}, environ={})


def test_sglang_accepts_the_attach_request() -> None:
    """The body has the fields of SGLang's own request, and its parser reads the configuration."""
    pytest.importorskip("pools", reason="SGLang is not installed")
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    body = attach_request(STORE | {"prefetch_threshold": 16}, environ={})
    request = AttachHiCacheStorageReqInput(**body)
    parse = HybridCacheController.parse_storage_backend_extra_config
    config, threshold, _, _, prefix_keys = parse(request.hicache_storage_backend_extra_config_json)
    assert (threshold, prefix_keys) == (16, True)
    assert load_settings(config, environ={}).store == load_settings(STORE, environ={}).store


def test_server_reads_the_same_settings() -> None:
    """The printed extra config gives the settings that were asked for."""
    given = {"store": ["slab:///a/x", "slab:///b/x"], "deadline": "2s", "plugin": "posix"}
    config = extra_config(given)
    assert load_settings(config, environ={}) == load_settings(given, environ={})


def test_settings_of_the_environment_stay_there() -> None:
    """A store that the environment names is enough, and is not repeated in the flags."""
    words = launch_args({}, environ={"HICACHE_NIXL_STORE": STORE["store"]})
    assert STORE["store"] not in " ".join(words)


@pytest.mark.parametrize(
    ("changes", "flag", "word"),
    [
        *[({"layout": k}, "--hicache-io-backend", v[0]) for k, v in IO_BACKENDS.items()],
        ({"layout": "layer_first", "io_backend": "direct"}, "--hicache-io-backend", "direct"),
        *[({"write_policy": name}, "--hicache-write-policy", name) for name in WRITE_POLICIES],
        *[
            ({"prefetch_policy": name}, "--hicache-storage-prefetch-policy", name)
            for name in PREFETCH_POLICIES
        ],
        ({"page_size": 16}, "--page-size", "16"),
    ],
)
def test_wishes_become_flags(changes: dict[str, Any], flag: str, word: str) -> None:
    """What was asked for is in the flags, with the I/O backend that fits the layout."""
    assert flags(STORE, **changes)[flag] == word


def test_switches_can_be_left_out() -> None:
    """The page size and the cache report can be left to SGLang."""
    assert flags(STORE).keys() - flags(STORE, page_size=None, cache_report=False).keys() == {
        "--page-size",
        "--enable-cache-report",
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": "page_first", "io_backend": "direct"}, ["page_first", "'direct'", "kernel"]),
        ({"layout": "page_first_direct", "io_backend": "kernel"}, ["'kernel'", "direct"]),
        ({"layout": "page_head", "io_backend": "direct"}, ["page_head", "kernel"]),
        ({"layout": "page_last"}, ["layout = 'page_last'", "layer_first"]),
        ({"io_backend": "kernel_ascend"}, ["'kernel_ascend'"]),
        ({"write_policy": "write_around"}, ["write_policy", "write_through"]),
        ({"prefetch_policy": "never"}, ["prefetch_policy", "best_effort"]),
        ({"page_size": 0}, ["page_size = 0", "64"]),
    ],
)
def test_refused_wishes(changes: dict[str, Any], words: list[str]) -> None:
    """A flag value that SGLang would refuse or change is one line with what is accepted."""
    message = refusal(STORE, **changes)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({}, ["by --store"]),
        (STORE | {"capactiy": "1GiB"}, ["capactiy", "capacity"]),
        (STORE | {"class_name": "Other"}, ["class_name", '"HiCacheNixlConnector"']),
        (STORE | {"interface_v1": 0}, ["interface_v1 must be 1"]),
        (STORE | {"hicache_storage_pass_prefix_keys": False}, ["must be true"]),
        (STORE | {"prefetch_threshold": float("nan")}, ["JSON"]),
        (STORE | {"secret_key": "hush"}, ["secret_key", "is a credential"]),
    ],
)
def test_refused_settings(source: dict[str, Any], words: list[str]) -> None:
    """Settings that the server would refuse are refused here, without a value of a credential."""
    message = refusal(source)
    assert all(word in message for word in words), message
    assert "hush" not in message


def test_sglang_accepts_the_flags() -> None:
    """SGLang's own parser takes the flags, and knows every layout and policy offered."""
    pytest.importorskip("pools", reason="SGLang is not installed")
    server_args = pytest.importorskip("sglang.srt.server_args", reason="SGLang is not installed")
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    for layout, io_backends in IO_BACKENDS.items():
        for io_backend in io_backends:
            words = launch_args(STORE, layout=layout, io_backend=io_backend, environ={})
            known = parser.parse_args(["--model-path", "m", *words])
            assert known.hicache_mem_layout == layout
            assert known.hicache_io_backend == io_backend
    assert known.enable_hierarchical_cache
    assert known.hicache_storage_backend == "dynamic"
    assert json.loads(known.hicache_storage_backend_extra_config)["store"] == STORE["store"]
    choices = {action.dest: action.choices for action in parser._actions}
    assert set(WRITE_POLICIES) == set(choices["hicache_write_policy"])
    assert set(PREFETCH_POLICIES) == set(choices["hicache_storage_prefetch_policy"])


def test_flags_lead_to_the_connector() -> None:
    """The module and class in the extra config are this package's connector."""
    pytest.importorskip("pools", reason="SGLang is not installed")
    config = extra_config(STORE)
    assert config["module_path"] == hicache_nixl.__name__
    assert config["class_name"] == hicache_nixl.HiCacheNixlConnector.__name__
