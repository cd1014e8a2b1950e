"""The in-tree connector's own parser beside ours, on the same configurations.

Whatever the in-tree connector understands as plug-in X with parameters P, ours understands alike
or refuses, naming a key of the configuration.
"""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings, strategies
from nixl._api import nixl_agent, nixl_agent_config

import pools  # noqa: F401 - before SGLang

# isort: split
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.storage.nixl.nixl_utils import NixlBackendConfig

from configurations import PLUGIN_VARIABLE, STORAGE_DIR, load
from hicache_nixl.bucket import Bucket
from hicache_nixl.errors import SettingsError
from hicache_nixl.intree_plugins import PARAMETERS, QUEUES, REFUSED_QUEUE
from hicache_nixl.settings import Settings, load_settings
from hicache_nixl.sources import read_extra_config
from hicache_nixl.units import parse_bool

DIRECT_IO = "SGLANG_HICACHE_NIXL_USE_DIRECT_IO"
OBJECTS = ("obj", "azure_blob")
BUCKET = {"AWS_DEFAULT_BUCKET": "from-aws", "AZURE_STORAGE_CONTAINER_NAME": "from-azure"}
ACCOUNT = {"AZURE_STORAGE_ACCOUNT_URL": "https://acct.blob.core.windows.net"}
# In lower case: the in-tree connector activates a section in capitals and drops its parameters.
NAMES = ("posix", "gds", "gds_mt", "3fs", *OBJECTS)

truths = strategies.sampled_from([True, False, "true", "True", "false", "False"])
odd_truths = truths | strategies.sampled_from(["yes", "TRUE", "on", 1, 0, None, "", "perhaps", 2])
numbers = strategies.integers(64, 1 << 20) | strategies.integers(64, 1 << 20).map(str)
odd_numbers = numbers | strategies.sampled_from([0, -1, 1.5, True, "many", "", None, "0x10"])
TEXTS = {
    "mount_point": ["/nvme0"],
    "mem_config": ["dram"],
    "scheme": ["http", "https"],
    "req_checksum": ["required"],
    "resp_checksum": ["required", "supported"],
    "endpoint_override": ["http://minio:9000", "https://s3.example.org/", "minio:9000", ""],
    "region": ["eu-west-1", ""],
    "ca_bundle": ["/etc/ca.pem", ""],
    "bucket": ["kv-cache", ""],
    "container_name": ["kv-cache", ""],
    "account_url": ["https://other.blob.core.windows.net", ""],
    "type": ["dell", ""],
}
THREADS = strategies.integers(1, 64) | strategies.integers(1, 64).map(str)


def values(name: str, odd: bool) -> strategies.SearchStrategy[Any]:
    """Values of the parameter `name`; among the odd ones are some that mean nothing."""
    if name in (*QUEUES, REFUSED_QUEUE, "use_virtual_addressing", "accelerated"):
        return odd_truths if odd else truths
    if name in TEXTS:
        return strategies.sampled_from(TEXTS[name])
    if name == "num_threads":
        return THREADS
    return odd_numbers if odd else numbers


@strategies.composite
def sections(draw: strategies.DrawFn, odd: bool) -> dict[str, Any]:
    """A plug-in map."""
    found: dict[str, Any] = {}
    for name in draw(strategies.lists(strategies.sampled_from(NAMES), unique=True)):
        section = found.setdefault(name, {})
        if draw(strategies.booleans()):
            section["active"] = draw(odd_truths if odd else truths)
        for key in draw(strategies.lists(strategies.sampled_from(sorted(PARAMETERS[name])))):
            section[key] = draw(values(key, odd))
    return found


@strategies.composite
def configurations(draw: strategies.DrawFn, odd: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """An extra config and an environment as somebody might write them for the in-tree connector."""
    config: dict[str, Any] = {}
    environ: dict[str, str] = {}
    if draw(strategies.booleans()):
        config["plugin"] = draw(sections(odd))
    if "plugin" not in config or (odd and draw(strategies.booleans())):
        owner = draw(strategies.sampled_from(NAMES))
        flat = sorted(PARAMETERS[owner])
        if odd:
            flat += sorted(PARAMETERS["posix"])
        for name in draw(strategies.lists(strategies.sampled_from(flat), max_size=4)):
            config[name] = draw(values(name, odd))
        if draw(strategies.booleans()):
            environ[PLUGIN_VARIABLE] = owner.upper()
    if draw(strategies.booleans()):
        config["use_direct_io"] = draw(strategies.booleans())
    for key, choices in {
        "l3_cleaner_enabled": strategies.booleans(),
        "l3_cleaner_high_watermark": strategies.sampled_from([75, 90.5, "85"]),
        "l3_cleaner_low_watermark": strategies.sampled_from([50, "60.5"]),
    }.items():
        if draw(strategies.booleans()):
            config[key] = draw(choices)
    if PLUGIN_VARIABLE not in environ and draw(strategies.booleans()):
        names = ["POSIX", "GDS", "GDS_MT", "3FS", "OBJ", "AZURE_BLOB", "auto"] + (
            ["posix", "pozix"] if odd else []
        )
        environ[PLUGIN_VARIABLE] = draw(strategies.sampled_from(names))
    if draw(strategies.booleans()):
        flags = ["1", "0", "true", "False", "yes", "n"] + (["maybe"] if odd else [])
        environ[DIRECT_IO] = draw(strategies.sampled_from(flags))
    return config, environ


def in_tree(
    config: dict[str, Any], environ: dict[str, str]
) -> tuple[str, dict[str, str], bool, dict[str, Any]]:
    """Plug-in, parameters for NIXL, O_DIRECT and cleaner, as the in-tree connector reads them."""
    with mock.patch.dict(os.environ, environ, clear=True):
        parsed = NixlBackendConfig(config)
        plugin = parsed.get_specified_plugin()
        return (
            plugin,
            parsed.get_backend_initparams("POSIX" if plugin == "auto" else plugin),
            parsed.get_use_direct_io(),
            parsed.get_l3_cleaner_config(),
        )


def ours_of(config: dict[str, Any], environ: dict[str, str]) -> Settings:
    """Our reading. Directories and buckets come from the environment, as in-tree has them."""
    directories = {STORAGE_DIR: "/nvme0/kv"}
    return load_settings(config, environ=directories | BUCKET | ACCOUNT | environ)


def flag(text: str) -> str:
    """What NIXL understands, which knows yes and on, too."""
    return str(parse_bool(text)).lower()


def agrees_on_the_bucket(bucket: Bucket, plugin: str, parameters: dict[str, str]) -> None:
    """Fail unless NIXL, with in-tree's `parameters`, would talk to this bucket in the same way."""
    extra = dict(bucket.nixl)
    if plugin == "azure_blob":
        place = {
            "container_name": bucket.name,
            "account_url": bucket.endpoint,
            "ca_bundle": bucket.ca_bundle,
        }
        defaults = {
            "container_name": BUCKET["AZURE_STORAGE_CONTAINER_NAME"],
            "account_url": ACCOUNT["AZURE_STORAGE_ACCOUNT_URL"],
        }
    else:
        place = {
            "bucket": bucket.name,
            "endpoint_override": bucket.endpoint,
            "region": bucket.region,
            "use_virtual_addressing": str(bucket.virtual_addressing).lower(),
            "ca_bundle": bucket.ca_bundle,
        }
        defaults = {
            "bucket": BUCKET["AWS_DEFAULT_BUCKET"],
            "region": "us-east-1",
            "use_virtual_addressing": "false",
        }
        scheme = parameters.pop("scheme", "https")
        endpoint = parameters.get("endpoint_override", "")
        if endpoint and "://" not in endpoint:
            endpoint = parameters["endpoint_override"] = f"{scheme}://{endpoint}"
        if endpoint.startswith("http://"):
            parameters.pop("ca_bundle", None)  # nobody asks it
    for name, value in place.items():
        theirs = parameters.pop(name, defaults.get(name))
        if name == "use_virtual_addressing" and theirs is not None:
            theirs = flag(theirs)
        if name == "endpoint_override" and theirs is not None:
            theirs = theirs.rstrip("/")
        assert value == theirs, name
    if "accelerated" in parameters:
        parameters["accelerated"] = flag(parameters["accelerated"])
    assert extra == parameters


def agrees(ours: Settings, theirs: tuple[str, dict[str, str], bool, dict[str, Any]]) -> None:
    """Fail unless both sides mean the same."""
    plugin, parameters, direct_io, cleaner = theirs
    if plugin.lower() in OBJECTS:
        assert ours.bucket is not None
        given = {key: text for key, text in parameters.items() if text not in ("", "None")}
        given.pop("active", None)
        agrees_on_the_bucket(ours.bucket, plugin.lower(), given)
        return
    assert ours.bucket is None
    assert ours.plugin.upper() == plugin.upper()
    assert ours.use_direct_io == direct_io
    assert cleaner["low_watermark"] < cleaner["high_watermark"] or not cleaner["enabled"]
    used = "posix" if ours.plugin == "auto" else ours.plugin
    parameters = {key: text for key, text in parameters.items() if text not in ("", "None")}
    parameters.pop("active", None)
    flags = {key: parameters.pop(key) for key in (*QUEUES, REFUSED_QUEUE) if key in parameters}
    queues = {QUEUES[key] for key, text in flags.items() if parse_bool(text)}
    if queues:
        assert {ours.queue} == queues
    else:
        # NIXL takes AIO then; ours may be faster, unless io_uring is ruled out.
        assert ours.queue in ("auto", "aio")
    assert ours.parameters_for(used) == parameters


def mentioned(config: dict[str, Any], environ: dict[str, str]) -> set[str]:
    """Every key that a refusal may name."""
    names = {*config, *environ}
    for name, section in config.get("plugin", {}).items():
        names |= {f"plugin.{name}", *section}
    return names


@settings(max_examples=400, deadline=None)
@given(configurations(odd=True))
@example(({"bucket": "b", "use_virtual_addressing": "yes"}, {PLUGIN_VARIABLE: "OBJ"}))
@example(({"accelerated": "on"}, {PLUGIN_VARIABLE: "OBJ"}))
@example(
    (
        {"endpoint_override": "http://minio:9000", "ca_bundle": "/etc/ca.pem"},
        {PLUGIN_VARIABLE: "OBJ"},
    )
)
def test_alike_or_refused(written: tuple[dict[str, Any], dict[str, str]]) -> None:
    """Whatever is accepted means what it means in-tree; what is refused is named."""
    config, environ = written
    refused = ""
    try:
        ours = ours_of(config, environ)
    except SettingsError as error:
        refused = str(error)
    if refused:
        assert any(name in refused for name in mentioned(config, environ)), refused
    else:
        agrees(ours, in_tree(config, environ))


@settings(max_examples=400, deadline=None)
@given(configurations(odd=False))
def test_what_makes_sense_is_accepted(written: tuple[dict[str, Any], dict[str, str]]) -> None:
    """What the in-tree connector and NIXL's plug-ins can serve is accepted."""
    config, environ = written
    try:
        theirs = in_tree(config, environ)
    except UnboundLocalError:  # a map in which nothing is active
        with pytest.raises(SettingsError, match="none is active"):
            ours_of(config, environ)
        return
    plugin = theirs[0].lower()
    flags = [key for key in (*QUEUES, REFUSED_QUEUE) if theirs[1].get(key, "").lower() == "true"]
    foreign = set(theirs[1]) - {"active", *PARAMETERS["posix" if plugin == "auto" else plugin]}
    if REFUSED_QUEUE in flags or len(flags) > 1 or foreign:
        with pytest.raises(SettingsError):
            ours_of(config, environ)
        return
    agrees(ours_of(config, environ), theirs)


@pytest.mark.parametrize(
    ("parameters", "accepted"),
    [
        ({"use_uring": "True"}, True),
        ({"use_uring": "yes"}, True),
        ({"use_uring": "perhaps"}, False),
        ({"use_uring": "true", "use_aio": "true"}, False),
        ({"ios_pool_size": "65536", "kernel_queue_size": "256"}, True),
        ({"ios_pool_size": "65536.0"}, False),
        ({"ios_pool_size": "many"}, False),
        ({"ios_pool_size": "-1"}, False),
    ],
)
def test_nixl_agrees_on_values(parameters: dict[str, str], accepted: bool) -> None:
    """What is accepted for the POSIX plug-in is what NIXL itself accepts."""
    agent = nixl_agent(f"values-{parameters}", nixl_agent_config(backends=[]))
    config = {"plugin": {"posix": {"active": True} | parameters}}
    if accepted:
        agent.create_backend("POSIX", parameters)
        load(config)
    else:
        with pytest.raises(Exception, match="NIXL_ERR_BACKEND"):
            agent.create_backend("POSIX", parameters)
        with pytest.raises(SettingsError):
            load(config)


def test_nixl_knows_no_other_parameter() -> None:
    """Every parameter that NIXL's POSIX plug-in offers is known."""
    agent = nixl_agent("parameters", nixl_agent_config(backends=[]))
    assert set(agent.get_plugin_params("POSIX")) == set(PARAMETERS["posix"])


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml"])
def test_sglang_reads_the_same_file(suffix: str, tmp_path: Path) -> None:
    """A file behind @ gives SGLang the configuration that we read from it."""
    content = {
        "toml": 'prefetch_threshold = 16\n[plugin.posix]\nactive = true\nuse_uring = "true"\n',
        "json": '{"prefetch_threshold":16,"plugin":{"posix":{"active":true,"use_uring":"true"}}}',
        "yaml": "prefetch_threshold: 16\nplugin:\n  posix: {active: true, use_uring: 'true'}\n",
    }[suffix]
    file = tmp_path / f"nixl.{suffix}"
    file.write_text(content)
    theirs, threshold, *_ = HybridCacheController.parse_storage_backend_extra_config(f"@{file}")
    ours = read_extra_config(f"@{file}")
    assert ours == theirs | {"prefetch_threshold": threshold}
    assert load(ours) == load(theirs)
