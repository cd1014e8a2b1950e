"""What stored bytes are: the namespace of a pool's pages.

Owns: the facts that tell two kinds of page bytes apart, their canonical encoding, its digest,
and the form of page keys. Must not know: addresses, stores, transfers; SGLang's storage config
and pools are read by their attributes.

A namespace is the digest of a manifest, a flat dictionary of strings, integers and nulls:

    format              version of this list (1)
    model_name          exactly as the engine names it; nothing is slugged
    model_revision      from the settings; tells apart models under one name or path
    salt                blake2b-256 of the settings' salt, never the salt itself
    pool                name of the pool: "kv" and, for hybrid models, others
    pool_class          class of the host pool
    storage_format_tag  the pool's own name of its page format, where it has one
    kv_dtype            logical type of the elements ("float8_e5m2"), not their size
    row_layout          axis order of one token in the device pool (MHA; "nhd")
    byte_order          order of the page's axes
    page_tokens, payload_bytes
    layer_start, layer_end, layer_count, target_layer_count (the rest are draft layers)
    kv_heads            local heads (1 for MLA)
    k_width, v_width    elements per head (MLA: latent rank and rotary width)
    row_width           elements a token takes in one layer of one component
    tp_rank, tp_size    null for MLA, whose page is the same on every TP rank
    pp_rank, pp_size, cp_rank, cp_size
    digest              hex of the digest of all fields above

The data-parallel rank is absent: replicas share. Which heads a rank holds follows from its TP rank
and size. The digest is blake2b-256, personalised, over the JSON text of the manifest without
`digest`: keys sorted, no spaces, no floats, UTF-8.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hicache_nixl.errors import RegistrationError, StoreFormatError
from hicache_nixl.geometry import PoolGeometry
from hicache_nixl.host_pools import attribute, count, pool_kind

FORMAT_VERSION = 1
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
    "row_layout": (str,),
    "byte_order": (str,),
    "page_tokens": (int,),
    "payload_bytes": (int,),
    "layer_start": (int,),
    "layer_end": (int,),
    "layer_count": (int,),
    "target_layer_count": (int,),
    "kv_heads": (int,),
    "k_width": (int,),
    "v_width": (int,),
    "row_width": (int,),
    "tp_rank": (int, type(None)),
    "tp_size": (int, type(None)),
    "pp_rank": (int,),
    "pp_size": (int,),
    "cp_rank": (int,),
    "cp_size": (int,),
}

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
    logical element type; it is needed, and read, only for a pool that keeps fp8 as raw bytes
    (uint8), where SGLang's host pool no longer says which fp8 it is.
    Raises `RegistrationError` for everything that can't be told.
    """
    kind = pool_kind(pool)
    engine_says_mla = bool(attribute(storage_config, "is_mla_model"))
    replicated = kind == "mla" and engine_says_mla
    _refuse_unsupported(storage_config, replicated)
    if pool_name == "kv" and engine_says_mla != (kind == "mla"):
        # The engine writes from one rank only, so the others would wait for pages for ever.
        raise RegistrationError(
            f"the engine says is_mla_model={engine_says_mla} but its KV pool is {kind}: "
            "this model is not supported"
        )
    if geometry.page_tokens != count(pool, "page_size"):
        raise RegistrationError(
            f"geometry of {geometry.page_tokens}-token pages for a pool of "
            f"{pool.page_size}-token pages: describe this pool"
        )
    tp_rank, tp_size = _rank(storage_config, "tp")
    pp_rank, pp_size = _rank(storage_config, "pp")
    cp_rank, cp_size = _rank(storage_config, "attn_cp")
    if kind == "mla":
        heads, row_layout, row_width = 1, "latent", count(pool, "kv_cache_dim")
        k_width, v_width = count(pool, "kv_lora_rank"), count(pool, "qk_rope_head_dim")
    else:
        heads, row_layout = count(pool, "head_num"), _row_layout(pool)
        k_width, v_width = count(pool, "head_dim"), count(pool, "v_head_dim")
        row_width = heads * k_width
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
            "kv_dtype": _logical_dtype(pool, kv_dtype),
            "row_layout": row_layout,
            "byte_order": geometry.byte_order,
            "page_tokens": geometry.page_tokens,
            "payload_bytes": geometry.payload_bytes,
            "layer_start": _integer(pool, "start_layer"),
            "layer_end": _integer(pool, "end_layer"),
            "layer_count": count(pool, "layer_num"),
            "target_layer_count": _integer(pool, "target_layer_num"),
            "kv_heads": heads,
            "k_width": k_width,
            "v_width": v_width,
            "row_width": row_width,
            "tp_rank": None if replicated else tp_rank,
            "tp_size": None if replicated else tp_size,
            "pp_rank": pp_rank,
            "pp_size": pp_size,
            "cp_rank": cp_rank,
            "cp_size": cp_size,
        }
    )


def namespace_from_manifest(manifest: Mapping[str, object]) -> Namespace:
    """Namespace of a stored manifest, its digest computed anew and compared.

    Raises `StoreFormatError` for another format version, `RegistrationError` for a manifest
    that is damaged: a field missing, unknown, of the wrong type, or a digest that does not match.
    """
    version = manifest.get("format")
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise StoreFormatError(
            f"namespace manifest of format {version}: this version reads {FORMAT_VERSION}"
        )
    facts = {name: value for name, value in manifest.items() if name != "digest"}
    if differing := facts.keys() ^ _FIELDS.keys():
        raise RegistrationError(
            f"namespace manifest is damaged: field {sorted(map(str, differing))[0]!r} is "
            f"{'missing' if differing & _FIELDS.keys() else 'unknown'}"
        )
    for name, types in _FIELDS.items():
        # An exact type: True would pass for 1 and encode as another text.
        if type(facts[name]) not in types:
            raise RegistrationError(
                f"namespace manifest is damaged: field {name!r} is {facts[name]!r}"
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


def _refuse_unsupported(config: Any, replicated: bool) -> None:
    if getattr(config, "dcp_size", 1) != 1:
        raise RegistrationError(
            f"decode context parallel size {config.dcp_size} is not supported: "
            "start with --dcp-size 1"
        )
    if getattr(config, "should_split_heads", False):
        raise RegistrationError(
            f"tp_lcm_size {getattr(config, 'tp_lcm_size', None)} asks for pages shared between TP "
            "sizes, which is not supported: remove tp_lcm_size from the extra config"
        )
    if replicated and _rank(config, "attn_cp")[1] != 1:
        # One TP rank writes; whether its bytes are those of another CP rank isn't known.
        raise RegistrationError(
            f"MLA with context parallel size {config.attn_cp_size} is not supported: "
            "start with --attn-cp-size 1"
        )


def _rank(config: Any, prefix: str) -> tuple[int, int]:
    rank, size = _integer(config, f"{prefix}_rank"), _integer(config, f"{prefix}_size")
    if not 0 <= rank < size:
        raise RegistrationError(f"{prefix}_rank {rank} is outside {prefix}_size {size}")
    return rank, size


def _integer(owner: Any, name: str) -> int:
    value = attribute(owner, name)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise RegistrationError(f"{type(owner).__name__}.{name} is {value!r}: an integer is needed")
    return int(value)


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


def _row_layout(pool: Any) -> str:
    """Axis order inside one token row, which the host pool copies from the device pool as it is."""
    infos = attribute(pool, "_buffer_infos")
    layouts = {str(info.buffers.layout.value) for info in infos}
    if len(layouts) != 1:
        raise RegistrationError(
            f"{type(pool).__name__} mirrors device pools of layouts {sorted(layouts)}: "
            "one is needed"
        )
    return layouts.pop()


def _logical_dtype(pool: Any, kv_dtype: str | None) -> str:
    name = str(attribute(pool, "dtype")).removeprefix("torch.")
    if name in _DTYPES:
        return name
    if name == "uint8":
        if kv_dtype in _FP8_NAMES:
            return _FP8_NAMES[kv_dtype]
        raise RegistrationError(
            f"the pool keeps fp8 as raw bytes and kv_dtype is {kv_dtype!r}: name the format, "
            "--kv-cache-dtype fp8_e4m3 or fp8_e5m2"
        )
    raise RegistrationError(
        f"unknown KV dtype {name!r} of pool class {type(pool).__name__}: "
        f"use one of {', '.join(_DTYPES)}"
    )
