"""Claims about how configurations of SGLang's in-tree NIXL connector are understood."""

import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest

from configurations import (
    GIB,
    LOADER,
    MIB,
    PLUGIN_VARIABLE,
    STORAGE_DIR,
    STORE,
    Disks,
    load,
    refusal,
    write,
)
from hicache_nixl.intree_plugins import PARAMETERS
from hicache_nixl.settings import load_settings

SAMPLE = """
use_direct_io = true
l3_cleaner_enabled = true
l3_cleaner_high_watermark = 80.0
l3_cleaner_low_watermark = 70.0
[plugin.posix]
use_uring = "true"
active = true
[plugin.gds]
batch_pool_size = 128
batch_limit = 128
max_request_size = 16777216
[plugin.gds_mt]
thread_count = 4
[plugin.3fs]
mount_point = "/mnt/3fs"
mem_config = "dram"
iopool_size = 64
[plugin.obj]
num_threads = 4
endpoint_override = ""
crtMinLimit = 5242880
throughput_target_gbps = 25
scheme = "http"
region = ""
req_checksum = "required"
ca_bundle = ""
access_key = ""
secrete_key = ""
session_token = ""
use_virtual_addressing = "true"
bucket = ""
"""


def test_everything_at_once(tmp_path: Path) -> None:
    """A file that lists everything the in-tree connector knows is understood, with notes."""
    file = write(tmp_path / "nixl.toml", SAMPLE)
    settings = load_settings(
        LOADER,
        config_file=file,
        environ={STORAGE_DIR: "/a, /b,"},
        file_systems=Disks(tmp_path / "mountinfo").file_systems(),
    )
    assert [url.path for url in settings.store] == ["/a/hicache-nixl", "/b/hicache-nixl"]
    assert (settings.plugin, settings.queue, settings.use_direct_io) == ("posix", "uring", True)
    assert settings.capacity == 819 * GIB
    assert settings.plugin_parameters == ()
    text = "\n".join(settings.notes)
    assert f"environment variable {STORAGE_DIR} is read as store = slab:///a/hicache-nixl" in text
    assert f"plugin.posix.use_uring (file {file}) is read as queue = uring" in text
    assert f"l3_cleaner_high_watermark = 80 (file {file}) is read as capacity = 819GiB" in text
    idle = "plugin.gds, plugin.gds_mt, plugin.3fs, plugin.obj"
    assert f"{idle} (file {file}) are not active" in text
    assert all("\n" not in note for note in settings.notes)


def test_sample_file_of_the_installed_sglang_is_understood() -> None:
    """The sample that SGLang ships is accepted as it is."""
    spec = importlib.util.find_spec("sglang")  # not imported, it takes seconds
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("SGLang is not installed")
    folder = Path(spec.submodule_search_locations[0], "srt", "mem_cache", "storage", "nixl")
    sample = (folder / "nixl.config.toml.sample").read_text(encoding="utf-8")
    assert load(LOADER | tomllib.loads(sample)).queue == "uring"


# --- where a configuration is written


@pytest.mark.parametrize("form", ["extra config", "file", "@file", "variable", "@variable"])
def test_same_meaning_wherever_it_is_written(form: str, tmp_path: Path) -> None:
    """The in-tree TOML means the same in SGLang's extra config and as our settings file."""
    content = 'use_direct_io = false\n[plugin.posix]\nactive = "true"\nios_pool_size = "1024"\n'
    file = write(tmp_path / "nixl.toml", content)
    if form == "extra config":
        settings = load(LOADER | tomllib.loads(content))
    elif form.endswith("file"):
        settings = load(config_file=form.replace("file", str(file)))
    else:
        settings = load(environ={"HICACHE_NIXL_CONFIG": form.replace("variable", str(file))})
    assert settings.use_direct_io is False
    assert settings.plugin == "posix"
    assert settings.parameters_for("posix") == {"ios_pool_size": "1024"}


@pytest.mark.parametrize(
    "config",
    [
        {"plugin": {"posix": {"active": True, "ios_pool_size": 9}, "gds": {"batch_limit": 1}}},
        {"plugin.posix.active": True, "plugin.posix.ios_pool_size": 9, "plugin.gds.batch_limit": 1},
        {"plugin.posix": {"active": True, "ios_pool_size": 9}, "plugin.gds": {"batch_limit": 1}},
        {"plugin": {"posix": {"active": True}, "gds": {}}, "plugin.posix.ios_pool_size": 9},
        {"plugin": {"posix.active": "true", "posix.ios_pool_size": "9", "gds": {}}},
    ],
)
def test_dotted_keys_are_nested_ones(config: dict[str, Any]) -> None:
    """plugin.<name>.<key> may be nested, dotted or both."""
    settings = load(config)
    assert settings.plugin == "posix"
    assert settings.plugin_parameters == (("posix", "ios_pool_size", "9"),)
    assert "plugin.gds (given settings) is not active" in settings.notes


def test_tuning_in_a_settings_file_is_noted(tmp_path: Path) -> None:
    """What SGLang reads from its extra config has no effect in a settings file, which is said."""
    file = write(tmp_path / "s.toml", "prefetch_threshold = 16\ntp_lcm_size = 4\n")
    notes = load(config_file=file).notes
    assert notes == tuple(
        f"{key} (file {file}) is not used: SGLang reads it from its extra config only"
        for key in ("prefetch_threshold", "tp_lcm_size")
    )
    assert load({"prefetch_threshold": 16, "tp_lcm_size": 4}).notes == ()


# --- which plug-in


@pytest.mark.parametrize("truth", [True, "true", "True", 1])
@pytest.mark.parametrize("name", ["posix", "POSIX", "gds", "gds_mt", "3fs", "hf3fs"])
def test_active_plugin(name: str, truth: object) -> None:
    """The active section chooses the plug-in, in any case and under NIXL's name for 3FS."""
    settings = load({"plugin": {name: {"active": truth}}})
    chosen = {"hf3fs": "3fs"}.get(name, name.lower())
    assert settings.plugin == chosen
    assert settings.notes == (
        f"plugin.{chosen}.active (given settings) is read as plugin = {chosen}",
    )


def test_first_active_plugin_counts() -> None:
    """Of several active plug-ins the first counts, as in-tree, and the others are named."""
    sections = {"gds": {}, "posix": {"active": True}, "gds_mt": {"active": "true"}}
    settings = load({"plugin": sections})
    assert settings.plugin == "posix"
    assert (
        "plugin.gds_mt.active (given settings) is not used: plugin.posix.active comes first"
        in settings.notes
    )


def test_plugin_map_comes_before_the_variable() -> None:
    """The variable chooses where no plug-in map does; otherwise it is not even looked at."""
    for value in ("GDS", "OBJ", "pozix"):
        settings = load({"plugin": {"posix": {"active": True}}}, {PLUGIN_VARIABLE: value})
        assert settings.plugin == "posix"
        assert any(
            f"{PLUGIN_VARIABLE} is not used: given settings has a plugin map" in note
            for note in settings.notes
        )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"plugin": {"posix": {}}},
            ["plugin (given settings)", "none is active", "plugin.posix.active"],
        ),
        ({"plugin": {}}, ["none is active", "plugin.posix.active"]),
        ({"plugin": {"gds": {"active": "false"}}}, ["none is active", "plugin.gds.active"]),
        ({"plugin": {"gds": {"active": None}}}, ["none is active"]),
        ({"plugin.posix.ios_pool_size": 4}, ["none is active"]),
        ({"plugin": {"posix": {"active": "yes"}}}, ["plugin.posix.active", "'yes'", "write true"]),
        ({"plugin": {"posix": {"active": "TRUE"}}}, ["plugin.posix.active", "write true"]),
        ({"plugin": {"posix": {"active": "perhaps"}}}, ["plugin.posix.active", "'perhaps'"]),
        ({"plugin": {"posix": {"active": 2}}}, ["plugin.posix.active", "2", "true or false"]),
        ({"plugin": {"posix": {"actve": True}}}, ["plugin.posix.actve", "plugin.posix.active"]),
        ({"plugin": {"posx": {"active": True}}}, ["plugin.posx", "did you mean plugin.posix?"]),
        ({"plugin": {"ucx": {"active": True}}}, ["plugin.ucx", "known are 3fs, azure_blob, gds"]),
        ({"plugin.posx.active": True}, ["plugin.posx", "did you mean plugin.posix?"]),
        ({"plugin.": True}, ["unknown key plugin."]),
        ({"plugin": {7: {}}}, ["keys are texts"]),
        ({"plugin": {"posix": True}}, ["plugin.posix", "true is not a map", '{"active": true}']),
        (
            {"plugin": {"posix": {"active": True}, "POSIX": {}}},
            ["plugin.posix is given twice"],
        ),
        (
            {"plugin": {"posix": {"active": True}}, "plugin.POSIX.ios_pool_size": 9},
            ["plugin.posix is given twice"],
        ),
        (
            {"plugin": {"3fs": {"active": True}, "hf3fs": {}}},
            ["plugin.3fs is given twice"],
        ),
        (
            {"plugin": {"posix": {"active": True}}, "plugin.posix.active": True},
            ["plugin.posix.active is given twice"],
        ),
        ({"plugin": "posix", "plugin.posix.active": True}, ["plugin = 'posix' stands beside"]),
        ({"plugin": {"obj": {"active": True}}}, ["plugin.obj.active", "s3:// stores", "slab://"]),
        (
            {"plugin": {"azure_blob": {"active": True}}},
            ["plugin.azure_blob.active", "azure:// stores", "slab://"],
        ),
    ],
)
def test_refused_plugins(config: dict[str, Any], words: list[str]) -> None:
    """A map that activates nothing that is served is one line with the key and the fix."""
    message = refusal({"store": STORE} | config)
    assert all(word in message for word in words), message


# --- parameters of plug-ins

GOOD: list[tuple[str, str, Any, str]] = [
    ("posix", "ios_pool_size", 65536, "65536"),
    ("posix", "kernel_queue_size", " 256 ", "256"),
    ("gds", "batch_pool_size", "128", "128"),
    ("gds", "batch_limit", 128, "128"),
    ("gds", "max_request_size", 16777216, "16777216"),
    ("gds_mt", "thread_count", "04", "4"),
    ("3fs", "mount_point", "/mnt/3fs", "/mnt/3fs"),
    ("3fs", "mem_config", "dram_zc", "dram_zc"),
    ("3fs", "iopool_size", "64", "64"),
]


@pytest.mark.parametrize(("plugin", "name", "value", "text"), GOOD)
@pytest.mark.parametrize("form", ["map", "flat"])
def test_parameters_reach_nixl(form: str, plugin: str, name: str, value: Any, text: str) -> None:
    """A parameter of the active plug-in is kept as text for NIXL, and noted."""
    if form == "map":
        settings = load({"plugin": {plugin: {"active": True, name: value}}})
        key = f"plugin.{plugin}.{name}"
    else:
        settings = load({name: value}, {PLUGIN_VARIABLE: plugin.upper()})
        key = name
    assert settings.parameters_for(plugin) == {name: text}
    assert f"{key} (given settings) is passed to NIXL as {text}" in settings.notes
    assert settings.parameters_for("auto") == {}


def test_sections_that_are_not_active_reach_nobody() -> None:
    """Parameters of a plug-in that is not in use are not passed on."""
    settings = load({"plugin": {"posix": {"active": True}, "gds": {"batch_limit": 1}}})
    assert settings.plugin_parameters == ()


def test_parameters_of_an_overridden_plugin_are_noted(tmp_path: Path) -> None:
    """Where a later source chooses another plug-in, the earlier one's parameters are not used."""
    file = write(tmp_path / "s.toml", "[plugin.gds]\nactive = true\nbatch_limit = 8\n")
    settings = load({"plugin": "posix"}, config_file=file)
    assert settings.parameters_for("posix") == {}
    assert f"plugin.gds.batch_limit (file {file}) is not used: plugin is posix" in settings.notes


BAD: list[tuple[str, str, Any, list[str]]] = [
    ("posix", "kernel_queue_size", 0, ["0", "above zero"]),
    ("posix", "kernel_queue_size", True, ["true", "above zero"]),
    ("posix", "ios_pool_size", "many", ["'many'", "256"]),
    ("posix", "ios_pool_size", 65536.0, ["65536.0", "whole number"]),
    ("posix", "ios_pool_size", "-1", ["'-1'"]),
    ("posix", "ios_pool_size", "9" * 19, ["whole number"]),
    ("posix", "ios_pool_size", [1], ["a list"]),
    ("posix", "use_uring", "perhaps", ["'perhaps'", "true or false"]),
    ("gds_mt", "thread_count", "four", ["'four'"]),
    ("3fs", "mount_point", 3, ["3", "not a text"]),
    ("3fs", "mem_config", "dram_cz", ["did you mean dram_zc?"]),
    ("3fs", "mem_config", "vram", ["'vram'"]),
    ("3fs", "iopool_size", 63, ["63", "from 64 to 1048576"]),
    ("3fs", "iopool_size", "1048577", ["from 64 to 1048576"]),
    ("obj", "req_checksum", "require", ["did you mean required?"]),
    ("obj", "resp_checksum", "none", ["choose one of required, supported"]),
    ("obj", "scheme", "htps", ["did you mean https?"]),
    ("obj", "num_threads", 0, ["above zero"]),
    ("obj", "crtMinLimit", "5MiB", ["whole number"]),
    ("obj", "throughput_target_gbps", 2.5, ["2.5"]),
    ("obj", "use_virtual_addressing", "perhaps", ["true or false"]),
    ("obj", "bucket", 7, ["not a text"]),
    ("azure_blob", "num_threads", -1, ["-1"]),
    ("azure_blob", "container_name", [], ["a list"]),
]


@pytest.mark.parametrize(("plugin", "name", "value", "words"), BAD)
def test_refused_parameters(plugin: str, name: str, value: Any, words: list[str]) -> None:
    """A value that NIXL would refuse or misread is one line with key, value and what is right."""
    message = refusal({"store": STORE, "plugin": {plugin: {"active": True, name: value}}})
    assert message.startswith(f"plugin.{plugin}.{name} (given settings): ")
    assert all(word in message for word in words), message
    idle = {"posix" if plugin != "posix" else "gds": {"active": True}, plugin: {name: value}}
    assert load({"plugin": idle}).parameters_for(plugin) == {}


@pytest.mark.parametrize(
    ("plugin", "written", "known"),
    [
        ("posix", "use_urnig", "use_uring"),
        ("posix", "thread_count", "plugin.posix."),
        ("gds", "batch_limits", "batch_limit"),
        ("gds_mt", "threads", "thread_count"),
        ("3fs", "mountpoint", "mount_point"),
        ("obj", "crt_min_limit", "crtMinLimit"),
        ("obj", "end_point", "endpoint_override"),
        ("azure_blob", "container", "container_name"),
    ],
)
@pytest.mark.parametrize("active", [True, False])
def test_unknown_parameters(plugin: str, written: str, known: str, active: bool) -> None:
    """A parameter its plug-in does not have is refused with the nearest, active or not."""
    sections = {plugin: {"active": active, written: "1"}}
    if not active:
        sections["gds" if plugin != "gds" else "posix"] = {"active": True}
    message = refusal({"store": STORE, "plugin": sections})
    assert f"unknown key plugin.{plugin}.{written}" in message
    assert known in message


@pytest.mark.parametrize(
    "key", ["use_direct_io", "l3_cleaner_enabled", "l3_cleaner_high_watermark"]
)
def test_top_level_keys_in_a_section(key: str) -> None:
    """A key that the in-tree connector skips in a section is sent to where it counts."""
    message = refusal({"store": STORE, "plugin": {"posix": {"active": True, key: False}}})
    assert f"plugin.posix.{key} is read by nobody" in message
    assert "outside the plugin map" in message


def test_empty_values_count_as_not_given() -> None:
    """An empty parameter, as the sample has them, and a null one set nothing."""
    posix = {"active": True, "use_uring": "", "ios_pool_size": "", "kernel_queue_size": None}
    settings = load({"plugin": {"posix": posix}})
    assert (settings.queue, settings.plugin_parameters) == ("auto", ())
    assert "plugin.posix.use_uring (given settings) is empty and counts as not given" in (
        settings.notes
    )


@pytest.mark.parametrize(
    "name", sorted({n for p in ("gds", "gds_mt", "3fs") for n in PARAMETERS[p]})
)
@pytest.mark.parametrize("environ", [{}, {PLUGIN_VARIABLE: "POSIX"}])
def test_flat_parameter_of_another_plugin(name: str, environ: dict[str, str]) -> None:
    """A flat parameter that the plug-in in use would ignore is refused, with whose it is."""
    value = {"mount_point": "/mnt/3fs", "mem_config": "dram"}.get(name, 128)
    message = refusal({"store": STORE, name: value}, environ)
    assert message.startswith(f"{name} (given settings) is a parameter of plugin ")
    assert "plugin is posix" in message


@pytest.mark.parametrize("key", ["use_uring", "ios_pool_size"])
def test_flat_posix_parameter_for_another_plugin(key: str) -> None:
    """The same for the default plug-in's parameters."""
    message = refusal({"store": STORE, key: 1}, {PLUGIN_VARIABLE: "GDS_MT"})
    assert f"{key} (given settings) is a parameter of plugin posix" in message
    assert "plugin is gds_mt" in message


@pytest.mark.parametrize("key", ["bucket", "num_threads", "ca_bundle", "account_url"])
def test_flat_object_store_parameters(key: str) -> None:
    """Flat parameters of object stores are refused for a store in a directory."""
    message = refusal({"store": STORE, key: "8"})
    assert f"{key} (given settings) is a parameter of plugin " in message
    assert "plugin is posix" in message


def test_flat_beside_a_map() -> None:
    """What the in-tree connector would ignore beside a map is refused, with where it belongs."""
    message = refusal({"store": STORE, "use_uring": True, "plugin": {"posix": {"active": True}}})
    assert "use_uring stands beside a plugin map" in message
    assert "plugin.posix.use_uring" in message


# --- queues and O_DIRECT


@pytest.mark.parametrize("truth", [True, "true", "True", "yes", 1])
@pytest.mark.parametrize("form", ["map", "flat"])
@pytest.mark.parametrize(("flag", "queue"), [("use_uring", "uring"), ("use_aio", "aio")])
def test_queue_flags(truth: object, form: str, flag: str, queue: str) -> None:
    """use_uring and use_aio choose the queue, as JSON boolean or text, nested or flat."""
    config = (
        {"plugin": {"POSIX": {"active": True, flag: truth}}} if form == "map" else {flag: truth}
    )
    settings = load(config | {"use_direct_io": False})
    assert settings.queue == queue
    assert settings.use_direct_io is False
    assert settings.plugin == ("posix" if form == "map" else "auto")
    assert any(f"is read as queue = {queue}" in note for note in settings.notes)


@pytest.mark.parametrize("false", [False, "false", "False", "no", 0])
@pytest.mark.parametrize(
    ("flags", "queue"),
    [
        (("use_uring", "use_aio", "use_posix_aio"), "auto"),
        (("use_aio",), "auto"),
        (("use_posix_aio",), "auto"),
        (("use_uring",), "aio"),  # what NIXL takes without io_uring
        (("use_uring", "use_posix_aio"), "aio"),
    ],
)
def test_queue_flags_that_are_off(flags: tuple[str, ...], queue: str, false: object) -> None:
    """A flag that is off rules its queue out, and each flag has a note."""
    settings = load(dict.fromkeys(flags, false))
    assert settings.queue == queue
    for flag in flags:
        assert any(note.startswith(f"{flag} ") for note in settings.notes), flag


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_posix_aio": True}, ["use_posix_aio", "every later one fails", '"aio"']),
        (
            {"plugin": {"posix": {"active": True, "use_posix_aio": "true"}}},
            ["plugin.posix.use_posix_aio", "every later one fails"],
        ),
        ({"use_uring": True, "use_aio": True}, ["use_uring", "use_aio", "disagree"]),
        ({"use_uring": True, "queue": "aio"}, ["use_uring", "queue", "disagree"]),
        ({"use_uring": "perhaps"}, ["use_uring", "'perhaps'", "true or false"]),
    ],
)
def test_refused_queues(config: dict[str, Any], words: list[str]) -> None:
    """Two queues, or one that does not survive an error, are refused."""
    message = refusal({"store": STORE} | config)
    assert all(word in message for word in words), message


def test_posix_aio_of_an_idle_section() -> None:
    """A queue that is refused may stand in a section that is not active."""
    sections = {"posix": {"use_posix_aio": True}, "gds": {"active": True}}
    assert load({"plugin": sections}).plugin == "gds"


def test_direct_io_as_text() -> None:
    """The text "false" is false here, other than in-tree, which is noted."""
    settings = load({"use_direct_io": "false"})
    assert settings.use_direct_io is False
    assert any("the in-tree connector takes every text for true" in n for n in settings.notes)
    for value in (False, True, "true"):
        assert load({"use_direct_io": value}).notes == ()


# --- variables


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({PLUGIN_VARIABLE: "POSIX"}, "plugin", "posix"),
        ({PLUGIN_VARIABLE: "auto"}, "plugin", "auto"),
        ({PLUGIN_VARIABLE: "GDS_MT"}, "plugin", "gds_mt"),
        ({PLUGIN_VARIABLE: "3FS"}, "plugin", "3fs"),
        ({PLUGIN_VARIABLE: "HF3FS"}, "plugin", "3fs"),
        ({"SGLANG_HICACHE_NIXL_USE_DIRECT_IO": "0"}, "use_direct_io", False),
        ({"SGLANG_HICACHE_NIXL_USE_DIRECT_IO": "Yes"}, "use_direct_io", True),
        ({"SGLANG_HUGEPAGE_SIZE": "2MB"}, "hugepage_size", 2 * MIB),
        ({"SGLANG_HUGEPAGE_SIZE": " 1gb"}, "hugepage_size", GIB),
        ({"SGLANG_HUGEPAGE_SIZE": "2MB"}, "hugepages", "prefer"),
    ],
)
def test_variables(environ: dict[str, str], field: str, value: object) -> None:
    """SGLang's variables set what they mean here, each with a note."""
    settings = load(environ=environ)
    assert getattr(settings, field) == value
    assert len(settings.notes) == 1
    assert settings.notes[0].startswith(f"environment variable {next(iter(environ))} is read as")


def test_extra_config_comes_before_variables() -> None:
    """As in-tree, the extra config decides where a variable says otherwise."""
    environ = {"SGLANG_HICACHE_NIXL_USE_DIRECT_IO": "0", PLUGIN_VARIABLE: "GDS"}
    settings = load({"use_direct_io": True, "plugin": "posix"}, environ)
    assert (settings.use_direct_io, settings.plugin) == (True, "posix")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SGLANG_HUGEPAGE_SIZE": "4MB"}, ["SGLANG_HUGEPAGE_SIZE", "'4MB'", '"2MB" or "1GB"']),
        ({"SGLANG_HUGEPAGE_SIZE": "2097153"}, ["SGLANG_HUGEPAGE_SIZE", '"2MB" or "1GB"']),
        ({PLUGIN_VARIABLE: "pozix"}, [PLUGIN_VARIABLE, "'pozix'", "did you mean posix?"]),
        (
            {"SGLANG_HICACHE_NIXL_USE_DIRECT_IO": "maybe"},
            ["SGLANG_HICACHE_NIXL_USE_DIRECT_IO", "'maybe'"],
        ),
        (
            {"SGLANG_HICACHE_NIXL_USE_DIRECT_IO": "1", "HICACHE_NIXL_USE_DIRECT_IO": "0"},
            ["SGLANG_HICACHE_NIXL_USE_DIRECT_IO", "HICACHE_NIXL_USE_DIRECT_IO", "disagree"],
        ),
    ],
)
def test_refused_variables(environ: dict[str, str], words: list[str]) -> None:
    """A variable that cannot be used is named with its value and what is accepted."""
    message = refusal({"store": STORE}, environ)
    assert all(word in message for word in words), message
