"""Claims about where settings come from, what is refused and in which words."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from configurations import GIB, LOADER, MIB, SECRET, STORAGE_DIR, STORE, load, refusal, write
from hicache_nixl.settings import KEYS, Settings, load_host_pool_settings, load_settings
from hicache_nixl.store_url import StoreUrl, parse_store_urls


def test_defaults() -> None:
    """With a store and nothing else, everything has its documented default."""
    assert load() == Settings(store=(StoreUrl("slab", "/nvme0/hicache"),))
    assert load().model_dump(exclude={"store"}) == {
        "capacity": 64 * GIB,
        "staging": 256 * MIB,
        "segment": None,
        "verify": "full",
        "deadline": 10.0,
        "use_direct_io": True,
        "queue": "auto",
        "plugin": "auto",
        "plugin_parameters": (),
        "hugepages": "off",
        "hugepage_size": None,
        "host_pool_allocator": False,
        "model_revision": None,
        "salt": None,
        "credentials_file": None,
        "profile": None,
        "access_key": None,
        "secret_key": None,
        "session_token": None,
        "connection_string": None,
        "create_bucket": False,
        "requests": None,
        "in_tree_directories": (),
        "notes": (),
    }


def test_settings_are_frozen_and_strict() -> None:
    """A settings object takes no change, no unknown field and no value of a wrong type."""
    with pytest.raises(ValidationError, match="frozen"):
        load().capacity = 1  # type: ignore[misc]
    with pytest.raises(ValidationError, match="forbidden"):
        Settings(capcity=GIB)  # type: ignore[call-arg]
    with pytest.raises(ValidationError) as caught:
        Settings(salt=[SECRET])  # type: ignore[arg-type]
    assert SECRET not in str(caught.value)


def test_every_field_is_described() -> None:
    """Every field has a description, and every key is a field."""
    assert all(field.description for field in Settings.model_fields.values())
    assert set(KEYS) == set(Settings.model_fields) - {
        "plugin_parameters",
        "in_tree_directories",
        "notes",
    }


TYPICAL: dict[str, tuple[Any, Any]] = {
    "capacity": ("2TiB", 2 << 40),
    "staging": ("64MiB", 64 * MIB),
    "segment": ("1GiB", GIB),
    "verify": ("trailer", "trailer"),
    "deadline": ("2s", 2.0),
    "use_direct_io": ("false", False),
    "queue": ("aio", "aio"),
    "plugin": ("posix", "posix"),
    "hugepages": ("required", "required"),
    "hugepage_size": ("1GB", GIB),
    "host_pool_allocator": ("1", True),
    "model_revision": ("r2", "r2"),
    "salt": ("blue", "blue"),
    "credentials_file": ("/run/secrets/s3", "/run/secrets/s3"),
    "profile": ("prod", "prod"),
    "create_bucket": ("true", True),
    "requests": ("32", 32),
}


@pytest.mark.parametrize("key", TYPICAL)
@pytest.mark.parametrize("source", ["mapping", "environment", "toml", "json", "yaml"])
def test_every_key_in_every_source(key: str, source: str, tmp_path: Path) -> None:
    """Every key can be given in the mapping, the environment and each kind of file."""
    text, value = TYPICAL[key]
    if source == "mapping":
        settings = load({key: text})
    elif source == "environment":
        settings = load(environ={f"HICACHE_NIXL_{key.upper()}": text})
    else:
        written = f"{key} = {json.dumps(text)}\n" if source == "toml" else json.dumps({key: text})
        settings = load(config_file=write(tmp_path / f"settings.{source}", written))
    assert getattr(settings, key) == value


def test_later_sources_win(tmp_path: Path) -> None:
    """The mapping wins over the file, the file over the environment, that over defaults."""
    file = write(tmp_path / "s.toml", 'capacity = "2GiB"\nstaging = "2MiB"\nqueue = "aio"\n')
    environ = {
        "HICACHE_NIXL_CONFIG": str(file),
        "HICACHE_NIXL_CAPACITY": "1GiB",
        "HICACHE_NIXL_STAGING": "1MiB",
        "HICACHE_NIXL_VERIFY": "trailer",
    }
    settings = load({"capacity": "3GiB"}, environ)
    assert settings.capacity == 3 * GIB
    assert settings.staging == 2 * MIB
    assert settings.verify == "trailer"
    assert settings.queue == "aio"
    assert settings.deadline == 10.0


def test_config_file_argument_replaces_variable(tmp_path: Path) -> None:
    """A file named by argument is read instead of the one the environment names."""
    file = write(tmp_path / "s.yaml", "capacity: 2GiB\n")
    environ = {"HICACHE_NIXL_CONFIG": "/nowhere.toml"}
    assert load(environ=environ, config_file=file).capacity == 2 * GIB


def test_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `environ`, the environment of the process counts."""
    monkeypatch.setenv("HICACHE_NIXL_DEADLINE", "3s")
    assert load_settings({"store": STORE}).deadline == 3.0


def test_empty_and_null_count_as_not_given() -> None:
    """An empty variable, a null value and an empty store leave what an earlier source said."""
    environ = {
        "HICACHE_NIXL_CAPACITY": "2GiB",
        "HICACHE_NIXL_QUEUE": "",
        "HICACHE_NIXL_CONFIG": " ",
        "HICACHE_NIXL_STORE": STORE,
        STORAGE_DIR: "",
        "SGLANG_HUGEPAGE_SIZE": "",
    }
    settings = load_settings({"capacity": None, "store": "", "salt": ""}, environ=environ)
    assert settings == load({"capacity": "2GiB"})


def test_kubernetes_service_variables_are_ignored() -> None:
    """What Kubernetes puts into pods beside a Service named hicache-nixl is no setting."""
    environ = {
        "HICACHE_NIXL_SERVICE_HOST": "10.0.0.1",
        "HICACHE_NIXL_SERVICE_PORT": "9000",
        "HICACHE_NIXL_SERVICE_PORT_METRICS": "9000",
        "HICACHE_NIXL_PORT": "tcp://10.0.0.1:9000",
        "HICACHE_NIXL_PORT_9000_TCP_ADDR": "10.0.0.1",
        "HICACHE_NIXL_METRICS_SERVICE_HOST": "10.0.0.2",
        "HICACHE_NIXL_METRICS_PORT_80_TCP": "tcp://10.0.0.2:80",
    }
    assert load(environ=environ) == load()


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ({"use_urnig": "true"}, "use_uring"),
        ({"capactiy": "1GiB"}, "capacity"),
        ({"use-direct-io": True}, "use_direct_io"),
        ({"Deadline": "1s"}, "deadline"),
        ({"hugepage": "off"}, "hugepages"),
        ({"l3_cleaner_enable": True}, "l3_cleaner_enabled"),
        ({"plugin": {"posx": {"active": True}}}, "plugin.posix"),
        ({"plugin": {"posix": {"active": True, "use_urnig": "true"}}}, "plugin.posix.use_uring"),
        ({"plugin": {"posix": {"actve": True}}}, "plugin.posix.active"),
        ({"plugin": {"posix": {"active": True}, "gds_mt": {"threads": 4}}}, "thread_count"),
    ],
)
def test_unknown_key_names_the_nearest(written: dict[str, Any], known: str) -> None:
    """An unknown key is named with its source and the nearest known key."""
    message = refusal({"store": STORE} | LOADER | written)
    assert "SGLang's extra config: unknown key" in message
    assert f"did you mean {known}?" in message or known in message


def test_unknown_key_without_a_near_one_lists_all() -> None:
    """A key like no other is refused with the list of known keys."""
    message = refusal({"zzz": 1})
    assert "given settings: unknown key zzz" in message
    assert all(key in message for key in KEYS)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("HICACHE_NIXL_CAPACTIY", "HICACHE_NIXL_CAPACITY"),
        ("HICACHE_NIXL_CONFG", "HICACHE_NIXL_CONFIG"),
        ("HICACHE_NIXL_capacity", "HICACHE_NIXL_CAPACITY"),
    ],
)
def test_unknown_variable_names_the_nearest(name: str, known: str) -> None:
    """An unknown variable of ours is named with the nearest known one."""
    message = refusal({"store": STORE}, {name: "1"})
    assert message == f"environment: unknown key {name}; did you mean {known}?"


@pytest.mark.parametrize("key", [1, True, None, ("a",)])
def test_keys_must_be_texts(key: object) -> None:
    """A key that is not a text is refused by its type."""
    assert "keys are texts" in refusal({key: 1})  # type: ignore[dict-item]


WRONG: list[tuple[str, Any, str]] = [
    ("capacity", "12 parsecs", '"256MiB"'),
    ("capacity", "64k", "64KiB"),
    ("capacity", 0, "minimum of 1MiB"),
    ("capacity", "1023KiB", "minimum of 1MiB"),
    ("capacity", True, '"256MiB"'),
    ("capacity", 1.5, '"256MiB"'),
    ("capacity", [1], '"256MiB"'),
    ("staging", "-1", '"256MiB"'),
    ("staging", 4096, "minimum of 1MiB"),
    ("segment", 1, "minimum of 1MiB"),
    ("segment", MIB + 1, "multiple of 4KiB"),
    ("verify", "none", "choose one of full, trailer"),
    ("verify", "trialer", "did you mean trailer?"),
    ("verify", True, "choose one of full, trailer"),
    ("deadline", 0, "above zero"),
    ("deadline", "-1s", '"30s"'),
    ("deadline", "nan", '"30s"'),
    ("deadline", float("nan"), '"30s"'),
    ("deadline", "601s", "maximum of 10m"),
    ("deadline", "soon", '"30s"'),
    ("use_direct_io", "maybe", "write true or false"),
    ("use_direct_io", 2, "write true or false"),
    ("use_direct_io", [], "write true or false"),
    ("queue", "io_uring", "did you mean uring?"),
    ("queue", "posix_aio", "choose one of auto, uring, aio"),
    ("plugin", "pozix", "did you mean posix?"),
    ("plugin", ["posix"], "choose one of auto, posix"),
    ("plugin", "s3", "choose one of auto, posix"),
    ("credentials_file", "keys.ini", "not the absolute name of a file"),
    ("profile", 7, "write it in quotes"),
    ("access_key", 7, "write it in quotes"),
    ("secret_key", ["x"], "write it in quotes"),
    ("session_token", " ", "nothing but spaces"),
    ("connection_string", {"AccountKey": "x"}, "write it in quotes"),
    ("create_bucket", "perhaps", "write true or false"),
    ("requests", 0, "from 1 to 1024"),
    ("requests", "many", '"auto"'),
    ("requests", True, "from 1 to 1024"),
    ("requests", 1.5, "from 1 to 1024"),
    ("hugepages", "maybe", "choose one of off, prefer, required"),
    ("hugepages", True, "choose one of off, prefer, required"),
    ("hugepage_size", "4MB", 'write "2MB" or "1GB"'),
    ("hugepage_size", 2_000_000, 'write "2MB" or "1GB"'),
    ("host_pool_allocator", "perhaps", "write true or false"),
    ("model_revision", 7, "write it in quotes"),
    ("model_revision", "two\nlines", "printable"),
    ("salt", "x" * 1025, "at most 1024"),
]


@pytest.mark.parametrize(("key", "value", "accepted"), WRONG)
@pytest.mark.parametrize("source", ["mapping", "yaml"])
def test_wrong_value(key: str, value: object, accepted: str, source: str, tmp_path: Path) -> None:
    """A wrong value is one line with its key, its source, itself and what is accepted."""
    if source == "mapping":
        message = refusal({"store": STORE, key: value})
        assert message.startswith(f"{key} (given settings): ")
    else:
        file = write(tmp_path / "s.yaml", yaml.safe_dump({"store": STORE, key: value}))
        message = refusal(config_file=file)
        assert message.startswith(f"{key} (file {file}): ")
    assert accepted in message
    shown = key not in ("credentials_file", "session_token")
    if shown and isinstance(value, str) and value.isprintable() and len(value) < 80:
        assert value in message


def test_wrong_variable_is_named() -> None:
    """A wrong value in the environment is reported under the variable's name."""
    message = refusal({"store": STORE}, {"HICACHE_NIXL_CAPACITY": "12 parsecs"})
    assert message.startswith("environment variable HICACHE_NIXL_CAPACITY: '12 parsecs' ")


def test_segment_within_capacity() -> None:
    """A segment larger than the capacity is refused with both sizes."""
    message = refusal({"store": STORE, "capacity": "512MiB", "segment": "1GiB"})
    assert "segment = 1GiB" in message
    assert "capacity = 512MiB" in message
    assert load({"capacity": "1GiB", "segment": "1GiB"}).segment == GIB


# --- files


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("s.toml", "capacity = = 1", "line 1"),
        ("s.toml", 'capacity = "1GiB"\ncapacity = "2GiB"', "overwrite a value"),
        ("s.json", "{", "line 1, column 2"),
        ("s.json", '{"capacity": 1, "capacity": 2}', "'capacity' is written twice"),
        ("s.json", "[1]", "holds a list"),
        ("s.yaml", "a: [", "line 1"),
        ("s.yaml", "capacity: 1GiB\ncapacity: 2GiB", "line 2, column 1: key 'capacity' is written"),
        ("s.yaml", "- capacity", "holds a list"),
        ("s.yaml", "a: \0", "not allowed"),
        ("s.yaml", "!!python/object/apply:os.system [ls]", "constructor"),
        ("s.json", "[" * 100_000, "nested too deeply"),
        ("s.ini", "[a]", "must end in .toml, .json or .yaml"),
    ],
)
def test_broken_file(name: str, content: str, reason: str, tmp_path: Path) -> None:
    """A file that cannot be read is one line with its name, the place and the reason."""
    file = write(tmp_path / name, content)
    message = refusal(config_file=file)
    assert str(file) in message
    assert reason in message


def test_missing_and_binary_files(tmp_path: Path) -> None:
    """A file that is missing, a directory or not text is one line with its name."""
    assert "does not exist" in refusal(environ={"HICACHE_NIXL_CONFIG": "/nowhere/s.toml"})
    (tmp_path / "d.toml").mkdir()
    assert "cannot be read: Is a directory" in refusal(config_file=tmp_path / "d.toml")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refusal(config_file=tmp_path / "b.json")


def test_yaml_off_is_off(tmp_path: Path) -> None:
    """A bare `off` in YAML, which is a boolean there, means hugepages off."""
    file = write(tmp_path / "s.yml", f"store: {STORE}\nhugepages: off\n")
    assert load_settings(config_file=file, environ={}).hugepages == "off"


# --- stores


def test_store_is_required() -> None:
    """Without a store the error says how to set one, unless none is asked for."""
    message = refusal()
    assert "by --store" in message
    assert "HICACHE_NIXL_STORE" in message
    assert "slab:///nvme0/hicache" in message
    assert load_settings(environ={}, require_store=False).store == ()


@pytest.mark.parametrize(
    "value",
    [
        "slab:///a/x,slab:///b/x",
        " slab:///a/x , slab:///b/x ",
        ["slab:///a/x", "slab:///b/x"],
        ("SLAB:///a/x/", "slab:///b/./x"),
        [StoreUrl("slab", "/a/x"), "slab:///b/x"],
    ],
)
def test_slab_stores_are_striped(value: Any) -> None:
    """Several slab URLs, in a list or separated by commas, keep their order."""
    assert load({"store": value}).store == (StoreUrl("slab", "/a/x"), StoreUrl("slab", "/b/x"))


@pytest.mark.parametrize(
    "url",
    [
        StoreUrl("slab", "/a b/c,d/100%/e?f#g/ü"),
        StoreUrl("slab", "/not-\udcff-utf8"),
        StoreUrl("files", "/mnt/3fs/hicache"),
    ],
)
def test_store_urls_round_trip(url: StoreUrl) -> None:
    """A store's text is read back as the same store."""
    assert parse_store_urls(str(url)) == (url,)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("/nvme0/hicache", 'write "slab:///nvme0/hicache"'),
        ("nvme0", "is not a store URL"),
        ("slab:/nvme0", "is not a store URL"),
        ("slba:///nvme0", "did you mean slab://?"),
        ("http://host/x", "known are slab, files, s3, azure"),
        ("slab://nvme0/hicache", "'slab:///nvme0/hicache'"),
        ("slab:///", "names no directory"),
        ("slab:///a/..", "names no directory"),
        ("slab://", "not an absolute directory"),
        ("slab:///a?capacity=1", "%3F"),
        ("slab:///a#b", "%23"),
        ("slab:///a%00b", "not a directory name"),
        ("slab:///a\tb", "control character"),
        ("slab:///a,", "an empty entry"),
        ("slab:///a,slab:///a", "are the same"),
        (["slab:///a", "slab:///b/../a/"], "are the same"),
        ("slab:///a,s3://bucket", "only slab stores can be striped"),
        ("files:///mnt/3fs?x=1", "a files URL takes none"),
        ("files:///a,files:///b", "only slab stores can be striped"),
        (7, "is not a store URL"),
        ({"url": "slab:///a"}, "is not a store URL"),
    ],
)
def test_refused_stores(value: object, reason: str) -> None:
    """A store that cannot be served is refused in one line that names the key and the fix."""
    message = refusal({"store": value})
    assert message.startswith("store (given settings): ")
    assert reason in message


def test_one_directory_under_two_names(tmp_path: Path) -> None:
    """Two names that lead to one directory are refused, also through a link."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    message = refusal({"store": [f"slab://{tmp_path}/a", f"slab://{tmp_path}/b"]})
    assert f"{tmp_path}/a" in message
    assert f"{tmp_path}/b" in message


# --- SGLang's own keys


def test_keys_of_sglang_are_dropped() -> None:
    """What SGLang's loader leaves in the extra config is accepted and means nothing here."""
    others = {
        "interface_v2": 1,
        "allocator": "x",
        "prefetch_threshold": 16,
        "prefetch_timeout_base": 1,
        "prefetch_timeout_per_ki_token": 0.25,
        "hicache_storage_pass_prefix_keys": True,
        "tp_lcm_size": 4,
        "file_storage_path": "/x",
    }
    assert load(LOADER | others) == load()


@pytest.mark.parametrize("value", ["absent", 0, None, False])
def test_interface_v1_is_required_by_sglang(value: object) -> None:
    """SGLang's extra config without interface_v1 is refused with what to set."""
    config = {key: LOADER[key] for key in LOADER if key != "interface_v1"} | {"store": STORE}
    if value != "absent":
        config["interface_v1"] = value
    assert 'set "interface_v1": 1' in refusal(config)


def test_extra_config_must_be_a_mapping() -> None:
    """An extra config that is not a mapping is refused by its type."""
    assert "pass a mapping" in refusal([("store", STORE)])  # type: ignore[arg-type]


# --- huge pages


@pytest.mark.parametrize(
    ("config", "environ", "expected"),
    [
        ({}, {}, ("off", None)),
        ({"hugepages": "prefer"}, {}, ("prefer", 2 * MIB)),
        ({"hugepages": "required"}, {"SGLANG_HUGEPAGE_SIZE": "1GB"}, ("required", GIB)),
        ({"hugepage_size": "1GiB"}, {}, ("prefer", GIB)),
        ({"hugepages": "off"}, {"SGLANG_HUGEPAGE_SIZE": "2MB"}, ("off", None)),
        ({"hugepage_size": 2 * MIB}, {"SGLANG_HUGEPAGE_SIZE": "1GB"}, ("prefer", 2 * MIB)),
    ],
)
def test_hugepages(
    config: dict[str, Any], environ: dict[str, str], expected: tuple[str, int | None]
) -> None:
    """A mode alone means 2 MiB pages, a size alone means prefer, off has no size."""
    settings = load(config, environ)
    assert (settings.hugepages, settings.hugepage_size) == expected
    direct = Settings(hugepages=settings.hugepages)
    assert direct.hugepage_size == (None if expected[0] == "off" else 2 * MIB)


def test_unused_hugepage_size_is_noted() -> None:
    """A size that does not count, because huge pages are off, leaves a note."""
    settings = load({"hugepages": "off"}, {"SGLANG_HUGEPAGE_SIZE": "2MB"})
    assert any("is not used: hugepages is off" in note for note in settings.notes)


# --- host pool allocator


def test_host_pool_settings_only_when_switched_on(tmp_path: Path) -> None:
    """The plug-in's settings need the switch, in the environment or the file, and no store."""
    on = {"HICACHE_NIXL_HOST_POOL_ALLOCATOR": "1", "HICACHE_NIXL_HUGEPAGES": "required"}
    settings = load_host_pool_settings(on)
    assert settings is not None
    assert settings.hugepages == "required"
    assert load_host_pool_settings({"HICACHE_NIXL_CAPACTIY": "1"}) is None
    assert load_host_pool_settings(on | {"HICACHE_NIXL_HOST_POOL_ALLOCATOR": "0"}) is None
    file = write(tmp_path / "s.toml", "host_pool_allocator = true")
    assert load_host_pool_settings({"HICACHE_NIXL_CONFIG": str(file)}) is not None


def test_host_pool_allocator_too_late_is_noted() -> None:
    """Switched on in the extra config alone, where the plug-in cannot see it, it leaves a note."""
    late = {"host_pool_allocator": True}
    assert any("comes too late" in note for note in load(late).notes)
    assert load(late, {"HICACHE_NIXL_HOST_POOL_ALLOCATOR": "1"}).notes == ()


# --- secrets


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"secret_key": SECRET}, "secret_key"),
        ({"access_key": SECRET}, "access_key"),
        ({"secrete_key": SECRET}, "secrete_key"),
        ({"connection_string": SECRET}, "connection_string"),
        ({"session_token": SECRET}, "session_token"),
        ({"password": SECRET}, "password"),
        ({"aws-secret-access-key": SECRET}, "aws-secret-access-key"),
        ({"plugin": {"posix": {"active": True, "secret_key": SECRET}}}, "plugin.posix.secret_key"),
    ],
)
def test_credentials_are_refused_by_name(config: dict[str, Any], name: str) -> None:
    """For a store in a directory a credential is refused by its name; its value is not shown."""
    message = refusal({"store": STORE} | LOADER | config)
    assert name in message
    assert "is a credential" in message
    assert SECRET not in message


@pytest.mark.parametrize("name", ["HICACHE_NIXL_SECRET_KEY", "HICACHE_NIXL_PASSWORD"])
def test_credential_in_the_environment_is_refused_by_name(name: str) -> None:
    """A credential under our prefix is refused by its variable's name."""
    message = refusal({"store": STORE}, {name: SECRET})
    assert f"{name} is a credential" in message
    assert SECRET not in message


@pytest.mark.parametrize(
    "value",
    [
        f"s3://AKIA:{SECRET}@bucket",
        f"s4://AKIA:{SECRET}@bucket",
        f"AKIA:{SECRET}@bucket",
        f"slab://AKIA:{SECRET}@[x/dir",
        f"s3://bucket?secret_key={SECRET}",
        f"s4://bucket?secret_key={SECRET}",
        f"s3://bucket?endpoint=http://AKIA:{SECRET}@minio",
        f"slab:///dir?token={SECRET}",
        {"url": "s3://bucket", "secret_key": SECRET},
    ],
)
def test_no_secret_of_a_store_url_is_printed(value: object) -> None:
    """A store that carries a credential is refused without showing it."""
    assert SECRET not in refusal({"store": value})


REFUSING_KEYS = sorted(
    {*KEYS, "use_uring", "ios_pool_size"} - {"model_revision", "salt", "profile"}
)


@pytest.mark.parametrize("key", REFUSING_KEYS)
@pytest.mark.parametrize(
    "value",
    [{"secret_key": SECRET}, f"secret_key={SECRET}", json.dumps({"token": SECRET}), SECRET * 4],
)
def test_no_nested_secret_is_printed(key: str, value: Any) -> None:
    """A credential that lands in the value of another key is not printed with it."""
    if key == "store" and value == SECRET * 4:
        value = f"password:{value}"
    assert SECRET not in refusal({"store": STORE} | {key: value})


def test_no_secret_of_a_broken_file_is_printed(tmp_path: Path) -> None:
    """The message about a file that does not parse quotes nothing from it."""
    for name in ("s.toml", "s.json", "s.yaml"):
        file = write(tmp_path / name, f'secret_key: "{SECRET}" = {{"x\n')
        assert SECRET not in refusal(config_file=file)


def test_salt_is_not_shown() -> None:
    """The salt is in no representation of the settings."""
    assert SECRET not in repr(load({"salt": SECRET}))
