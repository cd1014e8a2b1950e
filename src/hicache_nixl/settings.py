"""The settings: one frozen object, and the one function that gathers it from every source.

This module owns the keys, their defaults, the order of sources, and the process environment, which
no other module reads. It must not look at NIXL or SGLang, nor at the disk but through
`FileSystems`.

Sources, later wins: defaults, environment, file, mapping (SGLang's extra config). A key in the
environment is `HICACHE_NIXL_` + the key in capitals; `HICACHE_NIXL_CONFIG` names the file. A null
value and an empty variable count as not given.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

from hicache_nixl import intree, intree_objects
from hicache_nixl.aws_configuration import configured_region
from hicache_nixl.bucket import Bucket, CredentialSource
from hicache_nixl.errors import SettingsError
from hicache_nixl.file_systems import FileSystems
from hicache_nixl.intree import Reading
from hicache_nixl.merging import Merged, merge
from hicache_nixl.setting_values import PARSERS, parse_hugepages
from hicache_nixl.sources import ENVIRONMENT, Given, read_settings_file, unknown_key
from hicache_nixl.store_url import StoreUrl
from hicache_nixl.units import GIB, MIB, format_size

PREFIX = "HICACHE_NIXL_"
CONFIG_VARIABLE = "HICACHE_NIXL_CONFIG"

# What Kubernetes puts into every pod beside a Service whose name starts with "hicache-nixl".
_KUBERNETES = re.compile(
    r"(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?)"
)


KEYS = tuple(PARSERS)
RETRIES = {"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "1"}
"""Variables of the AWS clients, and the values that make them fail at once."""


def _by(key: str) -> BeforeValidator:
    return BeforeValidator(PARSERS[key])


class Settings(BaseModel):
    """How the cache is kept. Immutable; sizes are bytes, times seconds.

    Made by `load_settings`, whose errors are one line; made directly, values are parsed the same
    way and pydantic's `ValidationError` is raised.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", hide_input_in_errors=True)

    store: Annotated[tuple[StoreUrl, ...], _by("store")] = Field(
        default=(),
        description='Where pages are kept: "slab:///nvme0/hicache", or several, striped, or '
        '"files:///mnt/shared/hicache", or "s3://bucket/prefix", or "azure://container/prefix".',
    )
    capacity: Annotated[int, _by("capacity")] = Field(
        default=64 * GIB, description='Byte budget of the store, such as "2TiB"; at least 1MiB.'
    )
    staging: Annotated[int, _by("staging")] = Field(
        default=256 * MIB,
        description="Memory for pages that cannot move between host pool and disk directly; "
        "at least 1MiB.",
    )
    segment: Annotated[int | None, _by("segment")] = Field(
        default=None,
        description="Size of one segment file, a multiple of 4KiB, at most the capacity; "
        "chosen from the capacity when not given.",
    )
    verify: Annotated[Literal["full", "trailer"], _by("verify")] = Field(
        default="full",
        description="What is checked when a page is read: payload and trailer (full), or the "
        "trailer alone (trailer).",
    )
    deadline: Annotated[float, _by("deadline")] = Field(
        default=10.0,
        description='Longest time a get or set may take, such as "10s"; at most 10m.',
    )
    use_direct_io: Annotated[bool, _by("use_direct_io")] = Field(
        default=True,
        description="Bypass the page cache with O_DIRECT; falls back where it is refused.",
    )
    queue: Annotated[Literal["auto", "uring", "aio"], _by("queue")] = Field(
        default="auto", description="Kernel interface for disk I/O: auto, uring or aio."
    )
    plugin: Annotated[
        Literal["auto", "posix", "gds", "gds_mt", "3fs", "obj", "azure_blob"], _by("plugin")
    ] = Field(
        default="auto",
        description="NIXL plug-in: auto; for files posix, gds, gds_mt or 3fs; for objects obj or "
        "azure_blob.",
    )
    plugin_parameters: tuple[tuple[str, str, str], ...] = Field(
        default=(),
        description="(plug-in, name, value) of each parameter in an in-tree plugin.<name> map.",
    )
    hugepages: Annotated[Literal["off", "prefer", "required"], _by("hugepages")] = Field(
        default="off",
        description="Huge pages for host memory: off, prefer (fall back with a warning) or "
        "required (a shortage is an error).",
    )
    hugepage_size: Annotated[int | None, _by("hugepage_size")] = Field(
        default=None,
        description='Size of a huge page, "2MB" or "1GB"; 2MB when huge pages are on.',
    )
    host_pool_allocator: Annotated[bool, _by("host_pool_allocator")] = Field(
        default=False,
        description="Let SGLang's host pools use this package's allocator, and let SGLang count "
        "hugepages as host memory. Read before SGLang "
        f"parses its flags: set {PREFIX}HOST_POOL_ALLOCATOR=1 or write it to the settings file.",
    )
    model_revision: Annotated[str | None, _by("model_revision")] = Field(
        default=None, description="Keeps pages of one revision of a model apart from another's."
    )
    salt: Annotated[str | None, _by("salt")] = Field(
        default=None, repr=False, description="Keeps pages apart from those under another salt."
    )
    credentials_file: Annotated[str | None, _by("credentials_file")] = Field(
        default=None,
        description="File with the keys for the bucket, like ~/.aws/credentials; read again when "
        "it changes.",
    )
    profile: Annotated[str | None, _by("profile")] = Field(
        default=None,
        description="Section of credentials_file, or profile of the AWS configuration.",
    )
    access_key: Annotated[SecretStr | None, _by("access_key")] = Field(
        default=None, description="Access key for the bucket; better kept in credentials_file."
    )
    secret_key: Annotated[SecretStr | None, _by("secret_key")] = Field(
        default=None, description="Secret key for the bucket; better kept in credentials_file."
    )
    session_token: Annotated[SecretStr | None, _by("session_token")] = Field(
        default=None, description="Session token that belongs to the two keys."
    )
    connection_string: Annotated[SecretStr | None, _by("connection_string")] = Field(
        default=None, description="Account and key of an azure:// store."
    )
    create_bucket: Annotated[bool, _by("create_bucket")] = Field(
        default=False, description="Make the bucket at start if it does not exist."
    )
    requests: Annotated[int | None, _by("requests")] = Field(
        default=None,
        description="Requests to the object store at a time, 1 to 1024; chosen at start when not "
        "given.",
    )
    in_tree_directories: tuple[str, ...] = Field(
        default=(),
        description="Directories of the in-tree connector that the store lies in; made at start "
        "like there, with every directory above.",
    )
    notes: tuple[str, ...] = Field(
        default=(), description="How keys of the in-tree connector were understood."
    )

    @model_validator(mode="before")
    @classmethod
    def _pair_hugepages(cls, data: Any) -> Any:
        """A size alone means prefer, a mode alone means 2 MiB, and off has no size."""
        if not isinstance(data, dict):
            return data
        size = data.get("hugepage_size")
        mode = parse_hugepages(data.get("hugepages", "off" if size is None else "prefer"))
        size = None if mode == "off" else 2 * MIB if size is None else size
        return {**data, "hugepages": mode, "hugepage_size": size}

    @model_validator(mode="after")
    def _segment_fits(self) -> Self:
        if self.segment is not None and self.segment > self.capacity:
            raise SettingsError(
                f"segment = {format_size(self.segment)} is larger than "
                f"capacity = {format_size(self.capacity)}; lower the one or raise the other"
            )
        return self

    def parameters_for(self, plugin: str) -> dict[str, str]:
        """The given NIXL parameters of `plugin`, such as "posix"; without the queue."""
        return {name: text for owner, name, text in self.plugin_parameters if owner == plugin}

    @property
    def bucket(self) -> Bucket | None:
        """Where an object store is and whose credentials it uses; None for one in a directory."""
        if not self.store or self.store[0].is_directory:
            return None
        (url,) = self.store
        is_azure = url.scheme == "azure"
        extra = self.parameters_for("azure_blob" if is_azure else "obj")
        requests = self.requests or url.parameter("requests")
        if requests not in (None, "auto"):
            extra["num_threads"] = str(requests)
        return Bucket(
            kind="azure" if is_azure else "s3",
            name=url.bucket,
            prefix=url.prefix,
            endpoint=url.parameter("account_url" if is_azure else "endpoint"),
            region=url.parameter("region") or "us-east-1",
            virtual_addressing=url.parameter("addressing") == "virtual",
            ca_bundle=url.parameter("ca_bundle"),
            credentials=CredentialSource(
                access_key=self.access_key,
                secret_key=self.secret_key,
                session_token=self.session_token,
                file=self.credentials_file,
                profile=self.profile,
                connection_string=self.connection_string,
            ),
            nixl=tuple(extra.items()),
        )


def load_settings(
    extra_config: Mapping[str, object] | None = None,
    *,
    config_file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    require_store: bool = True,
    file_systems: FileSystems | None = None,
) -> Settings:
    """The settings from environment, file and `extra_config`, later wins.

    `config_file` takes the place of `HICACHE_NIXL_CONFIG`; `environ` that of the process
    environment, with which goes the AWS configuration in files. Reads the file and resolves links
    of store directories. For keys of the in-tree connector it also asks `file_systems` what is
    under the directories and how full that is.

    Raises `SettingsError`, one line that names key, value (never a credential's) and source: for
    an unknown key, a value out of its range, two sources that contradict each other, or no store
    where `require_store`.
    """
    env = os.environ if environ is None else environ
    file = config_file if config_file is not None else env.get(CONFIG_VARIABLE, "").strip()
    readings = [_from_environment(env)]
    if file:
        source, content = f"file {file}", read_settings_file(file)
        readings.append(_from_mapping(content, source))
        readings[-1].notes += intree.tuning_notes(content, source)
    if extra_config is not None:
        readings.append(_from_extra_config(extra_config))

    region_of = configured_region if environ is None else None
    merged = merge(readings, intree_objects.variables(env), region_of)
    if require_store:
        merged.complete(FileSystems() if file_systems is None else file_systems)
        if not merged.values.get("store"):
            raise SettingsError(
                'no store is configured; name one, "slab:///nvme0/hicache" or '
                '"s3://bucket/prefix", by --store, as store in SGLang\'s extra config, in the '
                f"settings file, or as {PREFIX}STORE"
            )
    _note_what_is_not_used(merged, readings[: 1 + bool(file)])
    try:
        return Settings(**merged.values, notes=merged.notes)
    except ValidationError as error:
        reason = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise SettingsError(reason.removeprefix("Value error, ")) from None


def load_host_pool_settings(environ: Mapping[str, str] | None = None) -> Settings | None:
    """The settings if `host_pool_allocator` is on, else None. No store is needed.

    Raises as `load_settings`, but only where its variable or `HICACHE_NIXL_CONFIG` is set.
    """
    env = os.environ if environ is None else environ
    if not (env.get(f"{PREFIX}HOST_POOL_ALLOCATOR") or env.get(CONFIG_VARIABLE)):
        return None
    settings = load_settings(environ=env, require_store=False)
    return settings if settings.host_pool_allocator else None


@dataclass(frozen=True)
class Retries:
    """What the AWS clients of this process do about a request that failed."""

    shown: str
    at_once: bool
    """They report it at once."""


def fail_fast(environ: MutableMapping[str, str] | None = None) -> Retries:
    """Let the AWS clients of this process report a failure at once, and say what counts.

    Their own retries take up to 25 s for each request, in which nothing here can be said of a page;
    trying again is the guard's business. What the user set stays. Call it before the first client
    is made.
    """
    env = os.environ if environ is None else environ
    for name, value in RETRIES.items():
        if not env.get(name, "").strip():
            env[name] = value
    own = [name for name, value in RETRIES.items() if env[name] != value]
    shown = ", ".join(f"{name}={env[name]}" for name in RETRIES)
    return Retries(
        shown + (f" ({' and '.join(own)} as set)" if own else ""),
        at_once="AWS_MAX_ATTEMPTS" not in own,
    )


def _note_what_is_not_used(merged: Merged, early: list[Reading]) -> None:
    """`early`: the sources that SGLang's plug-in sees before the flags are parsed."""
    values, winners = merged.values, merged.winners
    if values.get("hugepages") == "off" and values.get("hugepage_size") is not None:
        merged.note(f"{winners['hugepage_size'][0].origin} is not used: hugepages is off")
    seen = any(given.setting == "host_pool_allocator" for layer in early for given in layer.given)
    if values.get("host_pool_allocator") and not seen:
        merged.note(
            f"{winners['host_pool_allocator'][0].origin} comes too late for SGLang's host pools; "
            f"set {PREFIX}HOST_POOL_ALLOCATOR=1"
        )


def _from_environment(environ: Mapping[str, str]) -> Reading:
    found = intree.from_environment(environ)
    for name, value in environ.items():
        if not name.startswith(PREFIX) or name == CONFIG_VARIABLE:
            continue
        key = name.removeprefix(PREFIX)
        if key.lower() in KEYS and key.isupper():
            if value.strip():
                found.append(Given(key.lower(), value, name, ENVIRONMENT))
        elif not _KUBERNETES.fullmatch(key):
            known = (*KEYS, "config")
            raise unknown_key(key, ENVIRONMENT, known, prefix=PREFIX, spell=str.upper)
    return Reading(found)


def _from_mapping(mapping: Mapping[str, object], source: str) -> Reading:
    known = {*KEYS, *intree.FLAT_KEYS}
    for key in mapping:
        dotted = isinstance(key, str) and key.startswith("plugin.")
        if key not in known and key not in intree.SGLANG_KEYS and not dotted:
            raise unknown_key(key, source, known, listed=KEYS)
    reading = intree.from_mapping(mapping, source)
    for key, value in mapping.items():
        in_tree_form = key == "plugin" and isinstance(value, Mapping)
        if key in KEYS and value is not None and not in_tree_form:
            reading.given.append(Given(key, value, key, source))
    return reading


def _from_extra_config(mapping: Mapping[str, object]) -> Reading:
    if not isinstance(mapping, Mapping):
        raise SettingsError(f"the extra config is a {type(mapping).__name__}; pass a mapping")
    by_sglang = "backend_name" in mapping or "class_name" in mapping
    if by_sglang and not mapping.get("interface_v1"):
        raise SettingsError(
            'SGLang\'s extra config: set "interface_v1": 1; without it SGLang moves pages through '
            "single-tensor calls, which this connector does not serve"
        )
    return _from_mapping(mapping, "SGLang's extra config" if by_sglang else "given settings")
