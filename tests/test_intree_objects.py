"""Claims about object stores in the in-tree connector's words, and about the AWS variables."""

from typing import Any

import pytest

from configurations import LOADER, PLUGIN_VARIABLE, SECRET, STORAGE_DIR, STORE, refusal
from hicache_nixl.bucket import Bucket
from hicache_nixl.settings import Settings, load_settings

MINIO = "http://minio:9000"
OBJ = {"active": True, "bucket": "kv-cache"}


def load(
    config: dict[str, Any] | None = None, environ: dict[str, str] | None = None, **changes: Any
) -> Settings:
    return load_settings(config or {}, environ=environ or {}, **changes)


def bucket(config: dict[str, Any] | None = None, environ: dict[str, str] | None = None) -> Bucket:
    found = load(config, environ).bucket
    assert found is not None
    return found


def notes(config: dict[str, Any] | None = None, environ: dict[str, str] | None = None) -> str:
    return "\n".join(load(config, environ).notes)


# --- the in-tree forms


@pytest.mark.parametrize(
    ("config", "environ"),
    [
        ({"plugin": {"obj": OBJ | {"endpoint_override": MINIO, "num_threads": 8}}}, {}),
        (
            {
                "plugin.obj.active": "true",
                "plugin.obj.bucket": "kv-cache",
                "plugin.obj.endpoint_override": MINIO,
                "plugin.obj.num_threads": "8",
            },
            {},
        ),
        ({"plugin.obj": OBJ | {"endpoint_override": MINIO, "num_threads": 8}}, {}),
        (
            {"bucket": "kv-cache", "endpoint_override": MINIO, "num_threads": 8},
            {PLUGIN_VARIABLE: "OBJ"},
        ),
        (
            {"endpoint_override": MINIO, "num_threads": "8"},
            {PLUGIN_VARIABLE: "OBJ", "AWS_DEFAULT_BUCKET": "kv-cache"},
        ),
        (
            {"plugin": {"obj": {"active": True, "num_threads": 8}}},
            {"AWS_DEFAULT_BUCKET": "kv-cache", "AWS_ENDPOINT_OVERRIDE": MINIO},
        ),
        ({"plugin": {"OBJ": OBJ | {"endpoint_override": "minio:9000", "scheme": "http"}}}, {}),
    ],
)
@pytest.mark.parametrize("extra", [{}, LOADER])
def test_every_form_is_the_same_store(
    config: dict[str, Any], environ: dict[str, str], extra: dict[str, Any]
) -> None:
    """Nested, dotted, flat and by variables, a section is one store below its own prefix."""
    settings = load(config | extra, environ)
    assert settings.store[0].path == "kv-cache/hicache-nixl"
    found = settings.bucket
    assert found is not None
    assert (found.kind, found.name, found.prefix, found.endpoint) == (
        "s3",
        "kv-cache",
        "hicache-nixl",
        MINIO,
    )
    assert not found.virtual_addressing
    assert dict(found.nixl) in ({"num_threads": "8"}, {})
    assert "is read as store = s3://kv-cache/hicache-nixl; in-tree objects are not read" in (
        "\n".join(settings.notes)
    )


def test_all_parameters() -> None:
    """Every parameter of the section counts: in the URL, as a setting, or passed to NIXL."""
    section = OBJ | {
        "endpoint_override": "https://s3.example.org",
        "scheme": "https",
        "region": "eu-west-1",
        "use_virtual_addressing": "true",
        "ca_bundle": "/etc/ca.pem",
        "num_threads": 4,
        "crtMinLimit": "5242880",
        "throughput_target_gbps": 25,
        "req_checksum": "required",
        "resp_checksum": "supported",
        "accelerated": "false",
        "type": "",
    }
    found = bucket({"plugin": {"obj": section}})
    assert found.endpoint == "https://s3.example.org"
    assert (found.region, found.virtual_addressing, found.ca_bundle) == (
        "eu-west-1",
        True,
        "/etc/ca.pem",
    )
    assert dict(found.nixl) == {
        "num_threads": "4",
        "crtMinLimit": "5242880",
        "throughput_target_gbps": "25",
        "req_checksum": "required",
        "resp_checksum": "supported",
        "accelerated": "false",
    }
    text = notes({"plugin": {"obj": section}})
    for name in section.keys() - {"active"}:
        assert f"plugin.obj.{name} " in text, name
    assert "plugin.obj.crtMinLimit (given settings) is passed to NIXL as 5242880" in text
    assert "plugin.obj.region (given settings) is read as region = eu-west-1" in text


def test_the_sample_section_as_it_is() -> None:
    """In-tree's sample with its empty values, made active, needs only a bucket."""
    section = {
        "active": True,
        "num_threads": 4,
        "endpoint_override": "",
        "crtMinLimit": 5242880,
        "throughput_target_gbps": 25,
        "scheme": "http",
        "region": "",
        "req_checksum": "required",
        "ca_bundle": "",
        "access_key": "",
        "secrete_key": "",
        "session_token": "",
        "use_virtual_addressing": "true",
        "bucket": "",
    }
    found = bucket({"plugin": {"obj": section}}, {"AWS_DEFAULT_BUCKET": "kv-cache"})
    assert (found.name, found.endpoint, found.region) == ("kv-cache", None, "us-east-1")
    assert found.credentials.access_key is None
    assert found.virtual_addressing


@pytest.mark.parametrize(
    ("section", "endpoint", "words"),
    [
        ({"endpoint_override": "minio:9000"}, "https://minio:9000", ""),
        (
            {"endpoint_override": "minio:9000", "scheme": "http"},
            MINIO,
            "plugin.obj.scheme (given settings) is read as part of endpoint",
        ),
        (
            {"endpoint_override": MINIO, "scheme": "https"},
            MINIO,
            "plugin.obj.scheme (given settings) is not used: the endpoint's URL says it",
        ),
        (
            {"scheme": "http"},
            None,
            "plugin.obj.scheme (given settings) is not used: there is no endpoint",
        ),
    ],
)
def test_scheme(section: dict[str, str], endpoint: str | None, words: str) -> None:
    """The scheme counts where the endpoint has none, and https where nothing says otherwise."""
    config = {"plugin": {"obj": OBJ | section}}
    assert bucket(config).endpoint == endpoint
    assert words in notes(config)


def test_crt_client_can_be_off() -> None:
    """crtMinLimit = 0, which for NIXL is off, is passed on."""
    assert bucket({"plugin": {"obj": OBJ | {"crtMinLimit": 0}}}).nixl == (("crtMinLimit", "0"),)


def test_virtual_addressing_of_an_address() -> None:
    """A bucket cannot be part of an IP address: path style, as NIXL then uses, and a note."""
    section = OBJ | {"endpoint_override": "http://127.0.0.1:9000", "use_virtual_addressing": "true"}
    assert not bucket({"plugin": {"obj": section}}).virtual_addressing
    assert "127.0.0.1 is an address" in notes({"plugin": {"obj": section}})
    assert bucket(
        {"store": f"s3://kv-cache?endpoint={MINIO}&addressing=virtual"}
    ).virtual_addressing


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("map", "secret_key"),
        ("map", "secrete_key"),
        ("flat", "secret_key"),
        ("flat", "secrete_key"),
    ],
)
def test_keys_in_clear(form: str, name: str) -> None:
    """Credentials count wherever in-tree has them, also misspelt, with a warning, and unseen."""
    keys = {"access_key": "AKIA" + SECRET, name: SECRET, "session_token": "T" + SECRET}
    if form == "map":
        config: dict[str, Any] = {"plugin": {"obj": OBJ | keys}}
        environ = {}
    else:
        config = {"bucket": "kv-cache"} | keys
        environ = {PLUGIN_VARIABLE: "OBJ"}
    settings = load(config, environ)
    assert settings.bucket is not None
    given = settings.bucket.credentials
    assert given.secret_key is not None
    assert given.secret_key.get_secret_value() == SECRET
    assert given.access_key is not None
    assert given.access_key.get_secret_value() == "AKIA" + SECRET
    assert any("stand in clear in a configuration" in note for note in settings.notes)
    for shown in (settings.notes, settings, settings.bucket, settings.model_dump()):
        assert SECRET not in repr(shown)
        assert SECRET not in str(shown)
    assert SECRET not in settings.model_dump_json()


def test_two_spellings_of_one_key() -> None:
    """Two different secrets under the two spellings are refused, and neither is shown."""
    keys = {"access_key": "A", "secret_key": SECRET, "secrete_key": SECRET + "2"}
    message = refusal({"plugin": {"obj": OBJ | keys}})
    assert "plugin.obj.secret_key (given settings) and plugin.obj.secrete_key" in message
    assert SECRET not in message


def test_a_section_that_is_not_active_gives_nothing() -> None:
    """Credentials and places of an idle section count for nothing and are not shown."""
    idle = {"bucket": "kv-cache", "access_key": "A", "secret_key": SECRET}
    settings = load({"store": STORE, "plugin": {"posix": {"active": True}, "obj": idle}})
    assert settings.bucket is None
    assert settings.secret_key is None
    assert SECRET not in "\n".join(settings.notes)


def test_azure_section() -> None:
    """plugin.azure_blob is an azure:// store."""
    section = {
        "active": True,
        "account_url": "https://acct.blob.core.windows.net/",
        "container_name": "kv-cache",
        "ca_bundle": "/etc/ca.pem",
        "num_threads": 4,
    }
    found = bucket({"plugin": {"azure_blob": section}})
    assert (found.kind, found.name, found.prefix) == ("azure", "kv-cache", "hicache-nixl")
    assert found.endpoint == "https://acct.blob.core.windows.net"
    assert (found.ca_bundle, dict(found.nixl)) == ("/etc/ca.pem", {"num_threads": "4"})
    by_string = {"active": True, "container_name": "kv-cache", "connection_string": SECRET}
    settings = load({"plugin": {"azure_blob": by_string}})
    assert settings.bucket is not None
    assert settings.bucket.credentials.connection_string is not None
    assert SECRET not in repr(settings)


def test_in_tree_directories_are_not_looked_at() -> None:
    """As in-tree, the directories mean nothing to objects; that is said."""
    text = notes({"plugin": {"obj": OBJ}}, {STORAGE_DIR: "/nvme0/kv"})
    assert f"{STORAGE_DIR} is not used: objects are not kept in files" in text


# --- which kind of store


@pytest.mark.parametrize(
    ("config", "environ", "words"),
    [
        (
            {"plugin": {"obj": {"active": True}}},
            {},
            ["plugin obj has no bucket", "plugin.obj.bucket", "AWS_DEFAULT_BUCKET"],
        ),
        ({}, {PLUGIN_VARIABLE: "AZURE_BLOB"}, ["plugin.azure_blob.container_name"]),
        ({"store": "s3://kv-cache", "plugin": "posix"}, {}, ["posix serves slab://", "s3://"]),
        ({"store": STORE, "plugin": "obj"}, {}, ["obj serves s3://", "slab://"]),
        (
            {"store": "azure://container", "plugin": "obj"},
            {},
            ["obj serves s3://", "azure://"],
        ),
        ({"store": "azure://container"}, {}, ["names no account", "account_url=https://ACCOUNT"]),
        ({"store": "s3://kv-cache", "use_uring": "true"}, {}, ["parameter of plugin posix"]),
        (
            {"plugin": {"obj": {"active": True, "bucket": "B"}}},
            {},
            ["plugin.obj.bucket", "3 to 63"],
        ),
        (
            {"plugin": {"obj": OBJ | {"endpoint_override": "http://h/kv-cache"}}},
            {},
            ["plugin.obj.endpoint_override", "has a path"],
        ),
        ({"store": "s3://kv-cache"}, {"AWS_ENDPOINT_URL": "ftp://h"}, ["AWS_ENDPOINT_URL", "http"]),
        ({"store": "s3://kv-cache?requests=4", "requests": 8}, {}, ["requests", "disagree"]),
        ({"plugin": {"obj": OBJ | {"num_threads": 5000}}}, {}, ["plugin.obj.num_threads", "1024"]),
        ({"plugin": {"obj": OBJ | {"access_key": "A"}}}, {}, ["access_key", "without secret_key"]),
        ({"store": "s3://kv-cache", "session_token": "t"}, {}, ["without access_key"]),
        (
            {"store": "s3://kv-cache", "access_key": "a", "secret_key": "b", "profile": "p"},
            {},
            ["access_key", "profile", "two sources"],
        ),
        ({"store": "s3://kv-cache", "connection_string": "x"}, {}, ["for azure:// stores"]),
        ({"store": "azure://cc1", "profile": "x"}, {}, ["for s3:// stores"]),
    ],
)
def test_refused(config: dict[str, Any], environ: dict[str, str], words: list[str]) -> None:
    """What contradicts itself or lacks something is one line with the key and the fix."""
    message = refusal(config, environ)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("variable", "store", "kept"),
    [("OBJ", STORE, "slab"), ("POSIX", "s3://kv-cache", "s3"), ("AZURE_BLOB", STORE, "slab")],
)
def test_a_later_store_counts(variable: str, store: str, kept: str) -> None:
    """A store in the extra config counts instead of a plug-in the environment names."""
    settings = load({"store": store}, {PLUGIN_VARIABLE: variable})
    assert settings.store[0].scheme == kept
    assert settings.plugin == "auto"
    assert any(f"{PLUGIN_VARIABLE} is not used: store" in note for note in settings.notes)


AWS = {
    "AWS_DEFAULT_BUCKET": "kv-cache",
    "AWS_ENDPOINT_OVERRIDE": MINIO,
    "AWS_ENDPOINT_URL_S3": "http://two:1",
    "AWS_ENDPOINT_URL": "http://three:1",
    "AWS_REGION": "eu-west-1",
    "AWS_DEFAULT_REGION": "eu-west-2",
    "AWS_CA_BUNDLE": "/etc/ca.pem",
    "AZURE_STORAGE_CONNECTION_STRING": SECRET,
    "AZURE_STORAGE_ACCOUNT_URL": "https://acct.blob.core.windows.net",
    "AZURE_STORAGE_CONTAINER_NAME": "kv-cache",
}


def test_variables_alone_make_no_object_store() -> None:
    """A configuration of directories is the same with every AWS and Azure variable set."""
    assert load({"store": STORE}, AWS) == load({"store": STORE})
    assert "no store is configured" in refusal({}, AWS)


@pytest.mark.parametrize(
    ("without", "endpoint", "region"),
    [
        ((), MINIO, "eu-west-1"),
        (("AWS_ENDPOINT_OVERRIDE",), "http://two:1", "eu-west-1"),
        (
            ("AWS_ENDPOINT_OVERRIDE", "AWS_ENDPOINT_URL_S3", "AWS_REGION"),
            "http://three:1",
            "eu-west-2",
        ),
    ],
)
def test_variables_complete_a_store(without: tuple[str, ...], endpoint: str, region: str) -> None:
    """Endpoint and region come from the first variable that is set, and are in the store's URL."""
    environ = {name: value for name, value in AWS.items() if name not in without}
    settings = load({"store": "s3://other"}, environ)
    assert settings.bucket is not None
    assert (settings.bucket.name, settings.bucket.endpoint) == ("other", endpoint)
    assert settings.bucket.region == region
    assert f"endpoint={endpoint}" in str(settings.store[0])
    assert any("is read as endpoint" in note for note in settings.notes)


def test_no_certificate_authority_for_http() -> None:
    """With an endpoint that has no TLS, the CA of a section is noted and that of a variable is
    not used."""
    section = OBJ | {"endpoint_override": MINIO, "ca_bundle": "/etc/ca.pem"}
    config = {"plugin": {"obj": section}}
    assert bucket(config).ca_bundle is None
    note = "plugin.obj.ca_bundle (given settings) is not used: the endpoint is http"
    assert note in notes(config)
    variable = {"AWS_CA_BUNDLE": "/etc/ca.pem"}
    config = {"plugin": {"obj": OBJ | {"endpoint_override": MINIO}}}
    assert bucket(config, variable).ca_bundle is None
    assert "CA_BUNDLE" not in notes(config, variable)


def test_what_the_store_says_comes_first() -> None:
    """The URL wins over in-tree sections, which win over variables."""
    section = {"active": True, "bucket": "third", "region": "us-west-2", "endpoint_override": MINIO}
    config = {"store": "s3://kv-cache?endpoint=https://own:1", "plugin": {"obj": section}}
    found = bucket(config, AWS)
    assert (found.name, found.endpoint, found.region) == ("kv-cache", "https://own:1", "us-west-2")
    text = notes(config, AWS)
    assert "plugin.obj.bucket (given settings) is not used: store names kv-cache" in text
    assert "plugin.obj.endpoint_override (given settings) is not used: store says endpoint" in text


def test_configured_endpoints_can_be_ignored() -> None:
    """AWS_IGNORE_CONFIGURED_ENDPOINT_URLS takes the AWS endpoint variables away, as in the SDKs."""
    environ = {"AWS_ENDPOINT_URL": MINIO, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}
    assert bucket({"store": "s3://kv-cache"}, environ).endpoint is None
    assert bucket({"store": "s3://kv-cache"}, environ | AWS).endpoint == MINIO


def test_azure_variables() -> None:
    """An azure:// store takes account and connection string from Azure's variables."""
    found = bucket({"store": "azure://container"}, AWS)
    assert found.endpoint == "https://acct.blob.core.windows.net"
    assert found.credentials.connection_string is not None
    assert SECRET not in notes({"store": "azure://container"}, AWS)
    assert bucket({}, AWS | {PLUGIN_VARIABLE: "AZURE_BLOB"}).name == "kv-cache"
