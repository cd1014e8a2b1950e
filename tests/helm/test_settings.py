"""The rendered ConfigMap as the library reads it."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hicache_nixl.errors import SettingsError
from hicache_nixl.launch import LOADER_KEYS, launch_args
from hicache_nixl.settings import KEYS, Settings, load_settings
from hicache_nixl.units import GIB, MIB, TIB

from .charts import CHART, SCENARIOS, environment, render, template

pytestmark = pytest.mark.helm


def loaded(directory: Path, scenario: str | None, values: dict[str, Any] | None = None) -> Settings:
    """The settings of the server, from its file and its environment."""
    manifests = render(scenario, values)
    file = directory / "settings.yaml"
    file.write_text(manifests.settings_text, encoding="utf-8")
    variables = environment(manifests.container)
    texts = {name: value for name, value in variables.items() if isinstance(value, str)}
    assert texts.pop("HICACHE_NIXL_CONFIG") == "/etc/hicache-nixl/settings.yaml"
    return load_settings(config_file=file, environ=texts)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_library_accepts_them(scenario: str, tmp_path: Path) -> None:
    """The settings of each scenario load, without a note about one that is not used."""
    settings = loaded(tmp_path, scenario)
    assert settings.notes == ()
    assert settings.store


def test_values_arrive(tmp_path: Path) -> None:
    """What the chart's values say is what the library uses."""
    given = {
        "capacity": "3TiB",
        "segment": "1GiB",
        "staging": 1000000000,
        "verify": "trailer",
        "deadline": "1500ms",
        "use_direct_io": False,
        "queue": "aio",
        "plugin": "posix",
    }
    settings = loaded(
        tmp_path,
        "slab-hostpath",
        {
            **{f"connector.settings.{key}": value for key, value in given.items()},
            "model.revision": "abc",
        },
    )
    assert [str(url) for url in settings.store] == [
        f"slab:///hicache/disk-{disk}/store" for disk in range(4)
    ]
    assert (settings.capacity, settings.segment, settings.staging) == (3 * TIB, GIB, 10**9)
    assert (settings.verify, settings.deadline, settings.use_direct_io) == ("trailer", 1.5, False)
    assert (settings.queue, settings.plugin) == ("aio", "posix")
    assert (settings.hugepages, settings.hugepage_size) == ("required", GIB)
    assert settings.host_pool_allocator
    assert settings.model_revision == "abc"


def test_null_leaves_a_setting_to_the_library(tmp_path: Path) -> None:
    """A setting that is null is not in the file."""
    settings = loaded(tmp_path, "files", {"connector.settings.capacity": None})
    assert settings.capacity == 64 * GIB


BOTH: list[tuple[str, object, bool]] = [
    *(
        ("deadline", value, accepted)
        for accepted, values in {
            True: ("10s", "1500ms", "10m", "0.1h", 10, 0.5, "1us", "10 S", "600"),
            False: ("0s", "1.5h", "601s", "11m", 0, "soon", "-1s", "10d", "", "1e3s"),
        }.items()
        for value in values
    ),
    *(
        ("capacity", value, accepted)
        for accepted, values in {
            True: ("64GiB", "64 gib", "64Gi", "1.5TiB", "7EiB", "64GB", 67108864, "67108864B"),
            False: ("16385PiB", "8EiB", "64G", "1KiB", "1.0001GiB", "-1GiB", "", "GiB", 0, 1.5),
        }.items()
        for value in values
    ),
    *(
        ("store", f"s3://{rest}", accepted)
        for accepted, rests in {
            True: (
                *("kv-cache", "kv-cache/", "kv-cache/team/a_b=c", "a.b", f"{'b' * 63}"),
                *("kv-cache?endpoint=http://h", "kv-cache?endpoint=https://h.example.com:65535/"),
                *(
                    "kv-cache?endpoint=http://[::1]:9000&region=eu-west-1",
                    "kv-cache/?requests=auto",
                ),
                *("kv-cache?addressing=virtual&requests=1024", "kv-cache?ca_bundle=/etc/ca.crt"),
                *("kv-cache?requests=0008", f"kv-cache/{'p' * 512}"),
            ),
            False: (
                *("", "kv", "KV-cache", "kv_cache", "a..b", "-kv", "192.168.0.1", f"{'b' * 64}"),
                *(
                    "kv-cache/../x",
                    "kv-cache/./x",
                    "kv-cache/a//b",
                    "kv-cache/a%20b",
                    "kv-cache/a+b",
                ),
                *("kv-cache?addressing=foo", "kv-cache?requests=abc", "kv-cache?requests=0"),
                *("kv-cache?requests=1025", "kv-cache?region=a_b", "kv-cache?ca_bundle=ca.crt"),
                *("kv-cache?endpoint=http://h:99999", "kv-cache?endpoint=http://:9000"),
                *("kv-cache?endpoint=http://a:b:c", "kv-cache?endpoint=h:9000"),
                *("kv-cache?endpoint=http://h/path", "kv-cache?endpoint=http://me:pw@h"),
                *("kv-cache?endpoint=http://h&endpoint=http://h", "kv-cache?endpoint="),
                *("kv-cache?endpiont=http://h", "kv-cache?secret_key=a", "kv-cache#a"),
                *(f"kv-cache/{'p' * 513}", "kv-cache?ca_bundle=/a%40b", "kv-cache/a b"),
            ),
        }.items()
        for rest in rests
    ),
]
"""Values of settings, and whether they are right."""


def by_library(key: str, value: object) -> bool:
    """Whether the library takes it."""
    try:
        load_settings({"store": "slab:///nvme0", key: value}, environ={})
    except SettingsError:
        return False
    return True


def by_chart(key: str, value: object) -> bool:
    """Whether the chart does."""
    files = {"store.kind": "files", "store.files.existingClaim": "shared"}
    values = {"store.kind": "s3", "store.s3.url": value}
    if key != "store":
        values = {**files, f"connector.settings.{key}": value}
    return template(None, values).status == 0


@pytest.mark.parametrize(("key", "value", "accepted"), BOTH)
def test_chart_and_library_agree(key: str, value: object, accepted: bool) -> None:
    """What the library refuses fails at helm install, and what it takes does not."""
    assert by_library(key, value) is accepted
    assert by_chart(key, value) is accepted


@pytest.mark.parametrize("endpoint", ["http://h:0", "HTTP://h", "http://h:"])
def test_endpoints_of_the_library_alone(endpoint: str) -> None:
    """The chart takes no endpoint whose port its NetworkPolicy could not open."""
    url = f"s3://kv-cache?endpoint={endpoint}"
    assert by_library("store", url)
    assert not by_chart("store", url)


@pytest.mark.parametrize(
    ("scenario", "url"),
    [
        ("files", "files:///hicache/shared/hicache"),
        ("files-hostpath", "files:///hicache/shared/team/hicache"),
        ("slab-claim", "slab:///hicache/disk-0/store"),
        ("minio", "s3://hicache/demo?endpoint=http://trial-hicache-nixl-minio:9000"),
        ("s3-role", "s3://kv-cache/team"),
    ],
)
def test_store(scenario: str, url: str, tmp_path: Path) -> None:
    """The store is where the volumes are mounted, or the bucket."""
    assert [str(store) for store in loaded(tmp_path, scenario).store] == [url]


def test_endpoint_certificate_and_credentials(tmp_path: Path) -> None:
    """Those of a bucket are found where they are mounted."""
    bucket = loaded(tmp_path, "s3").bucket
    assert bucket is not None
    mounts = {mount["name"]: mount["mountPath"] for mount in render("s3").container["volumeMounts"]}
    assert (bucket.name, bucket.prefix, bucket.region) == ("kv-cache", "team", "eu-west-1")
    assert bucket.endpoint == "https://s3.example.com:8443"
    assert bucket.ca_bundle == f"{mounts['ca']}/ca.crt"
    assert bucket.credentials.file == f"{mounts['credentials']}/credentials"


@pytest.mark.parametrize(("shortage", "word"), [("fail", "required"), ("fallback", "prefer")])
@pytest.mark.parametrize(("size", "name"), [("2Mi", "2MB"), ("1Gi", "1GB")])
def test_hugepages(shortage: str, word: str, size: str, name: str, tmp_path: Path) -> None:
    """Library, SGLang and Kubernetes hear of the same pages."""
    values = {"mode": "preallocated", "pageSize": size, "onShortage": shortage}
    given = {f"hugepages.{key}": value for key, value in values.items()} | {"hicache.size": 10}
    settings = loaded(tmp_path, None, given)
    assert (settings.hugepages, settings.hugepage_size) == (word, 2 * MIB if name == "2MB" else GIB)
    container = render(None, given).container
    assert environment(container)["SGLANG_HUGEPAGE_SIZE"] == name
    assert environment(container)["HICACHE_NIXL_HUGEPAGES"] == word
    assert container["resources"]["requests"][f"hugepages-{size}"] == "16Gi"


def test_sglang_finds_the_connector() -> None:
    """The flag that names the connector says what `hicache-nixl launch-args` says."""
    flags = render("cpu").flags
    extra = json.loads(flags["--hicache-storage-backend-extra-config"])
    assert flags["--hicache-storage-backend"] == "dynamic"
    assert extra == {**LOADER_KEYS, "prefetch_threshold": 16}


def test_sglang_accepts_the_flags() -> None:
    """SGLang's own parser takes the flags of every scenario, after those of an image, and the
    schema offers what it offers; of its other flags the chart refuses those that it sets, or
    that cannot work, and no more."""
    pytest.importorskip("pools", reason="SGLang is not installed")
    server_args = pytest.importorskip("sglang.srt.server_args", reason="SGLang is not installed")
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    for scenario in SCENARIOS:
        manifests = render(scenario)
        of_the_image = launch_args({"store": "slab:///elsewhere"}, environ={})
        known = parser.parse_args([*of_the_image, *manifests.container["args"]])
        assert known.model_path == manifests.flags["--model-path"]
        assert known.port == manifests.container["ports"][0]["containerPort"]
        extra = json.loads(known.hicache_storage_backend_extra_config)
        assert "store" not in extra
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    offered = schema["properties"]["hicache"]["properties"]
    choices = {action.dest: action.choices for action in parser._actions}
    assert set(offered["layout"]["enum"]) <= set(choices["hicache_mem_layout"])
    assert set(offered["writePolicy"]["enum"]) == set(choices["hicache_write_policy"])
    assert set(offered["prefetchPolicy"]["enum"]) == set(choices["hicache_storage_prefetch_policy"])
    text = (CHART / "templates" / "_validate-pod.tpl").read_text(encoding="utf-8")
    refused = set(re.findall(r'"(--[a-z-]+)"', text))
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert refused - flags <= {"--tp", "--dp", "--pp"}
    others = sorted(flag for flag in flags - refused if flag.startswith("--"))
    assert template(None, {"server.extraArgs": others}).status == 0


def test_every_setting_can_be_set() -> None:
    """The schema has each setting of the library that the chart does not make itself, or refuse."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    offered = schema["properties"]["connector"]["properties"]["settings"]["properties"]
    made = {"store", "credentials_file", "hugepages", "hugepage_size"}
    secret = {"access_key", "secret_key", "session_token", "connection_string", "salt"}
    assert set(offered) == set(KEYS) - made - secret
