"""What stored bytes are: the namespace of a pool's pages.

Owns: the facts that tell two kinds of page bytes apart, their canonical encoding, its digest,
and the form of page keys. Must not know: addresses, stores, transfers; SGLang's storage config
and pools are read by their attributes.

A namespace is the digest of a manifest, a dictionary of strings, integers, nulls and, as `page`,
one more of strings and integers:

    format              version of this list (2)
    model_name          exactly as the engine names it; nothing is slugged
    model_revision      from the settings; tells apart models under one name or path
    salt                blake2b-256 of the settings' salt, never the salt itself
    pool                name of the pool: "kv" and, for hybrid models, others
    pool_class          class of the host pool
    storage_format_tag  the pool's own name of its page format, where it has one
    kv_dtype            logical type of the elements ("float8_e5m2"), not their size
    byte_order          order of the page's axes
    page                what else tells such pages apart (`host_pools`): layers, heads, widths, …
    page_tokens, payload_bytes
    tp_rank, tp_size    null for pages that are the same on every TP rank (MLA)
    pp_rank, pp_size, cp_rank, cp_size, dcp_rank, dcp_size

The data-parallel rank is absent: replicas share. Which heads a rank holds follows from its TP rank
and size. `digest` is the hex of blake2b-256, personalised, over the JSON text of all fields above:
keys sorted, no spaces, no floats, UTF-8.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hicache_nixl.errors import RegistrationError
from hicache_nixl.geometry import PoolGeometry
from hicache_nixl.host_pools import (
    HostPool,
    RowFormat,
    attribute,
    integer,
    is_replicated,
    pool_kind,
    read_pool,
)

FORMAT_VERSION = 2
"""Raised whenever a field is added, dropped or read differently; old pages then miss."""

# Personal strings keep the three uses of one hash apart; blake2b takes 16 bytes.
_NAMESPACE_TAG = b"hicache-nixl ns1"
_SALT_TAG = b"hicache-nixl slt"
_KEY_TAG = b"hicache-nixl key"

_HEX_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)

_FIELDS: dict[str, tuple[type, ...]] = {
    "format": (int,),
    "model_name": (str,),
    "model_revision": (str, type(None)),
    "salt": (str, type(None)),
    "pool": (str,),
    "pool_class": (str,),
    "storage_format_tag": (str, type(None)),
    "kv_dtype": (str,),
    "byte_order": (str,),
    "page": (dict,),
    "page_tokens": (int,),
    "payload_bytes": (int,),
    "tp_rank": (int, type(None)),
    "tp_size": (int, type(None)),
    "pp_rank": (int,),
    "pp_size": (int,),
    "cp_rank": (int,),
    "cp_size": (int,),
    "dcp_rank": (int,),
    "dcp_size": (int,),
}

_COMMON_FIELDS = {"format", "model_name", "pool", "payload_bytes"}
"""Fields that every format version has."""

_DTYPES = {
    name: name
    for name in (
        "bfloat16",
        "float16",
        "float32",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
    )
}
# The engine's spellings, for pools that keep fp8 as raw bytes.
_FP8_NAMES = {name: name for name in _DTYPES if name.startswith("float8")} | {
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


@dataclass(frozen=True)
class Namespace:
    """Digest (32 bytes) and manifest of one kind of page bytes; equal when the digests are."""

    digest: bytes
    manifest: dict[str, object] = field(compare=False, repr=False)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one page."""
        return int(str(self.manifest["payload_bytes"]))

    @property
    def is_replicated(self) -> bool:
        """Whether every TP rank has the same pages, so that one of them writes for all."""
        return self.manifest["tp_rank"] is None

    def __str__(self) -> str:
        model = "".join(c if c.isprintable() else "?" for c in str(self.manifest["model_name"]))
        return f"{self.digest.hex()[:12]} {model} {self.manifest['pool']}"


def identify(
    *,
    pool: Any,
    geometry: PoolGeometry,
    storage_config: Any,
    settings: Any,
    pool_name: str = "kv",
    kv_dtype: str | None = None,
) -> Namespace:
    """Namespace of the pages of `pool`.

    `storage_config` is SGLang's, `settings` has `model_revision` and `salt`. `kv_dtype` is the
    engine's KV dtype; it is needed, and read, only for a pool that keeps raw bytes (uint8), where
    SGLang's host pool does not say what they are.
    Raises `RegistrationError` for everything that can't be told.
    """
    known = read_pool(pool)
    replicated = is_replicated(pool) and bool(attribute(storage_config, "is_mla_model"))
    _refuse_unsupported(pool, storage_config, pool_name)
    if geometry.page_tokens != known.page_tokens:
        raise RegistrationError(
            f"geometry of {geometry.page_tokens}-token pages for a pool of "
            f"{known.page_tokens}-token pages: describe this pool"
        )
    tp_rank, tp_size = _rank(storage_config, "tp")
    pp_rank, pp_size = _rank(storage_config, "pp")
    cp_rank, cp_size = _rank(storage_config, "attn_cp")
    dcp_rank, dcp_size = _dcp_rank(storage_config)
    return _seal(
        {
            "format": FORMAT_VERSION,
            "model_name": _model_name(storage_config),
            "model_revision": _optional_text("model_revision", settings.model_revision),
            "salt": _salt_digest(settings.salt),
            "pool": _text("pool name", str(pool_name)),
            "pool_class": type(pool).__name__,
            "storage_format_tag": _optional_text(
                "storage_format_tag", getattr(pool, "storage_format_tag", None)
            ),
            "kv_dtype": _logical_dtype(type(pool).__name__, known, kv_dtype),
            "byte_order": geometry.byte_order,
            "page": known.facts,
            "page_tokens": geometry.page_tokens,
            "payload_bytes": geometry.payload_bytes,
            "tp_rank": None if replicated else tp_rank,
            "tp_size": None if replicated else tp_size,
            "pp_rank": pp_rank,
            "pp_size": pp_size,
            "cp_rank": cp_rank,
            "cp_size": cp_size,
            "dcp_rank": dcp_rank,
            "dcp_size": dcp_size,
        }
    )


def namespace_from_manifest(manifest: Mapping[str, object]) -> Namespace:
    """Namespace of a stored manifest, its digest computed anew and compared.

    A manifest of another format version has other fields; what its digest and the common ones say
    is enough to list, evict and clear it, and its pages are never looked up.
    Raises `RegistrationError` for a manifest that is damaged: a field missing, unknown, of the
    wrong type, or a digest that does not match.
    """
    facts = {name: value for name, value in manifest.items() if name != "digest"}
    own = facts.get("format") == FORMAT_VERSION
    names = _FIELDS.keys() if own else _COMMON_FIELDS
    unknown = facts.keys() - names if own else set()
    if differing := (names - facts.keys()) | unknown:
        name = sorted(map(str, differing))[0]
        raise RegistrationError(
            f"namespace manifest is damaged: field {name!r} is "
            f"{'unknown' if name in facts else 'missing'}"
        )
    for name in names:
        # An exact type: True would pass for 1 and encode as another text.
        if type(facts[name]) not in _FIELDS[name]:
            raise RegistrationError(
                f"namespace manifest is damaged: field {name!r} is {facts[name]!r}"
            )
    page = facts.get("page") if own else {}
    if isinstance(page, dict):
        for name, value in page.items():
            if type(name) is not str or type(value) not in (int, str):
                raise RegistrationError(
                    f"namespace manifest is damaged: fact {name!r} of its pages is {value!r}"
                )
    namespace = _seal(facts)
    if manifest.get("digest") != namespace.digest.hex():
        raise RegistrationError(
            f"namespace manifest is damaged: it says digest {manifest.get('digest')!r}, "
            f"its fields give {namespace.digest.hex()}"
        )
    return namespace


def key_bytes(key: str) -> bytes:
    """The 32 bytes a page key is stored under.

    64 lowercase hex digits, the engine's own form, are taken as they are; any other string is
    hashed, so that upper case is another key. Raises `TypeError` for anything but a string and
    `RegistrationError` for an empty one.
    """
    if not isinstance(key, str):
        raise TypeError(f"page key is a {type(key).__name__}: pass a string")
    if _HEX_KEY.fullmatch(key):
        return bytes.fromhex(key)
    if not key:
        raise RegistrationError("page key is empty: pass the hash of the page's tokens")
    return hashlib.blake2b(_utf8("page key", key), digest_size=32, person=_KEY_TAG).digest()


def _seal(facts: dict[str, object]) -> Namespace:
    text = json.dumps(
        facts, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    digest = hashlib.blake2b(
        _utf8("namespace manifest", text), digest_size=32, person=_NAMESPACE_TAG
    ).digest()
    return Namespace(digest, {**facts, "digest": digest.hex()})


def _utf8(what: str, text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise RegistrationError(f"{what} {text!r} is not valid Unicode") from None


def _refuse_unsupported(pool: Any, config: Any, pool_name: str) -> None:
    kind, replicated = pool_kind(pool), is_replicated(pool)
    engine_replicates = bool(attribute(config, "is_mla_model"))
    if pool_name == "kv" and engine_replicates and not replicated:
        # The engine writes from one rank only, so the others would wait for pages for ever.
        raise RegistrationError(
            f"the engine says is_mla_model=True but its KV pool is {kind}: "
            "this model is not supported"
        )
    if getattr(config, "should_split_heads", False):
        raise RegistrationError(
            f"tp_lcm_size {getattr(config, 'tp_lcm_size', None)} asks for pages shared between TP "
            "sizes, which is not supported: remove tp_lcm_size from the extra config"
        )
    if replicated and engine_replicates and _rank(config, "attn_cp")[1] != 1:
        # The engine writes from TP rank 0 alone, which is in one of the CP groups.
        raise RegistrationError(
            f"{kind} pages with context parallel size {config.attn_cp_size} are not supported, "
            "because the engine stores those of one CP rank only: start with --attn-cp-size 1"
        )
    sizes = getattr(pool, "dcp_size", 1), _dcp_rank(config)[1]
    if sizes[0] != sizes[1] and (kind == "mla" or sizes[1] == 1):
        raise RegistrationError(
            f"host pool of decode context parallel size {sizes[0]} in an engine of {sizes[1]}"
        )
    if kind != "mla" and sizes[1] != 1:
        raise RegistrationError(
            f"{kind} pages with decode context parallel size {sizes[1]} are not supported: "
            "start with --dcp-size 1"
        )


def _rank(config: Any, prefix: str) -> tuple[int, int]:
    rank, size = integer(config, f"{prefix}_rank"), integer(config, f"{prefix}_size")
    if not 0 <= rank < size:
        raise RegistrationError(f"{prefix}_rank {rank} is outside {prefix}_size {size}")
    return rank, size


def _dcp_rank(config: Any) -> tuple[int, int]:
    """Decode context parallelism is younger than the dynamic storage interface."""
    return _rank(config, "dcp") if hasattr(config, "dcp_size") else (0, 1)


def _text(what: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise RegistrationError(f"{what} is {value!r}: a string that is not empty is needed")
    return value


def _optional_text(what: str, value: object) -> str | None:
    # An empty string is "not set": an unset variable in a template gives one.
    return None if value is None or value == "" else _text(what, value)


def _model_name(config: Any) -> str:
    name = attribute(config, "model_name")
    if not isinstance(name, str) or not name:
        raise RegistrationError(
            f"model name is {name!r}, so pages of different models could not be told apart: "
            "set --served-model-name"
        )
    return name


def _salt_digest(salt: object) -> str | None:
    if salt is None or salt == "":
        return None
    if not isinstance(salt, str):
        raise RegistrationError(f"salt is a {type(salt).__name__}: a string is needed")
    return hashlib.blake2b(
        salt.encode("utf-8", "surrogatepass"), digest_size=32, person=_SALT_TAG
    ).hexdigest()


def _logical_dtype(pool_class: str, known: HostPool, kv_dtype: str | None) -> str:
    if known.row_format is RowFormat.DESCRIBED:
        return known.dtype
    if known.row_format is RowFormat.ENGINE:
        if not kv_dtype:
            raise RegistrationError(
                f"{pool_class} keeps raw rows and the engine's KV dtype is not known: "
                "name it by --kv-cache-dtype"
            )
        return kv_dtype
    if known.dtype in _DTYPES:
        return known.dtype
    if known.dtype == "uint8":
        if kv_dtype in _FP8_NAMES:
            return _FP8_NAMES[kv_dtype]
        raise RegistrationError(
            f"the pool keeps fp8 as raw bytes and kv_dtype is {kv_dtype!r}: name the format, "
            "--kv-cache-dtype fp8_e4m3 or fp8_e5m2"
        )
    raise RegistrationError(
        f"unknown KV dtype {known.dtype!r} of pool class {pool_class}: "
        f"use one of {', '.join(_DTYPES)}"
    )
