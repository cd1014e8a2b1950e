"""Namespaces: bytes that differ never share one, bytes that are the same do."""

import hashlib
import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pools
from hicache_nixl.errors import RegistrationError, StoreFormatError
from hicache_nixl.geometry import describe_pool
from hicache_nixl.identity import Namespace, identify, key_bytes, namespace_from_manifest
from pools import StorageConfig

HEX_KEY = hashlib.sha256(b"tokens").hexdigest()


def namespace(
    pool: Any = None,
    config: Any = None,
    *,
    model_revision: str | None = None,
    salt: str | None = None,
    **more: Any,
) -> Namespace:
    """The namespace of a pool, by default a small MHA one on a single rank."""
    pool = pools.make_mha_pool() if pool is None else pool
    return identify(
        pool=pool,
        geometry=describe_pool(pool),
        storage_config=config or StorageConfig(),
        settings=SimpleNamespace(model_revision=model_revision, salt=salt),
        **more,
    )


def mha(config: dict[str, Any] | None = None, **pool: Any) -> Callable[[], Namespace]:
    """Namespace of an MHA pool with these differences from the default."""
    return lambda: namespace(pools.make_mha_pool(**pool), StorageConfig(**(config or {})))


def mla(config: dict[str, Any] | None = None, **pool: Any) -> Callable[[], Namespace]:
    """Namespace of an MLA pool with these differences from the default."""
    return lambda: namespace(
        pools.make_mla_pool(**pool), StorageConfig(is_mla_model=True, **(config or {}))
    )


def fp8(kv_dtype: str, maker: Callable[..., Any] = pools.make_mha_pool) -> Callable[[], Namespace]:
    """Namespace of a pool that keeps fp8 as raw bytes."""
    config = StorageConfig(is_mla_model=maker is pools.make_mla_pool)
    return lambda: namespace(maker(dtype=torch.uint8), config, kv_dtype=kv_dtype)


def setting(**values: Any) -> Callable[[], Namespace]:
    """Namespace of the default pool under other settings or another pool name."""
    return lambda: namespace(**values)


def tagged() -> Namespace:
    """Namespace of a pool that names its own page format."""
    pool = pools.make_mha_pool()
    pool.storage_format_tag = "v2"
    return namespace(pool)


# All of these store other bytes, or bytes of something else, under the same keys.
VARIANTS: dict[str, Callable[[], Namespace]] = {
    "base": mha(),
    "fp16": mha(dtype=torch.float16),
    "fp32": mha(dtype=torch.float32),
    "fp32 of half the width": mha(dtype=torch.float32, head_dim=4),
    "fp8 e4m3": mha(dtype=torch.float8_e4m3fn),
    "fp8 e5m2": mha(dtype=torch.float8_e5m2),
    "fp8 e4m3fnuz of twice the width": mha(dtype=torch.float8_e4m3fnuz, head_dim=16),
    "fp8 e4m3fn of twice the width": mha(dtype=torch.float8_e4m3fn, head_dim=16),
    "page_first_direct": mha(layout="page_first_direct"),
    "page_head": mha(layout="page_head"),
    "page of 8 tokens": mha(page_size=8),
    "page of 2 tokens, 4 layers": mha(page_size=2, layers=4),
    "4 layers": mha(layers=4),
    "1 layer": mha(layers=1),
    "1 layer and a draft layer": mha(layers=1, draft_layers=1),
    "1 layer and a draft layer, ending at 2": mha(layers=1, draft_layers=1, end_layer=2),
    "a draft layer more": mha(draft_layers=1),
    "3 layers": mha(layers=3),
    "layers 2-3": mha(start_layer=2),
    "layers 0-3 ending elsewhere": mha(end_layer=3),
    "1 head, twice the width": mha(heads=1, head_dim=16),
    "4 heads, half the width": mha(heads=4, head_dim=4),
    "4 heads": mha(heads=4),
    "V of half the width": mha(v_head_dim=4),
    "K of half the width": mha(head_dim=4, v_head_dim=8),
    "K and V of 6 and 10": mha(head_dim=6, v_head_dim=10),
    "device rows head first": mha(row_layout="hnd"),
    "device rows in vectors": mha(row_layout="vectorized_5d"),
    "PP 0 of 2": mha({"pp_size": 2}),
    "PP 1 of 2": mha({"pp_rank": 1, "pp_size": 2}),
    "PP 1 of 2, layers 2-3": mha({"pp_rank": 1, "pp_size": 2}, start_layer=2),
    "TP 0 of 2": mha({"tp_size": 2}),
    "TP 1 of 2": mha({"tp_rank": 1, "tp_size": 2}),
    "TP 1 of 4": mha({"tp_rank": 1, "tp_size": 4}),
    "CP 0 of 2": mha({"attn_cp_size": 2}),
    "CP 1 of 2": mha({"attn_cp_rank": 1, "attn_cp_size": 2}),
    "model org/a-b": mha({"model_name": "org/a-b"}),
    "model org-a/b": mha({"model_name": "org-a/b"}),
    "model Org/model": mha({"model_name": "Org/model"}),
    "model with a space": mha({"model_name": "org/model "}),
    "model in composed letters": mha({"model_name": "é"}),
    "model in combining letters": mha({"model_name": "e\u0301"}),
    "model that looks like JSON": mha({"model_name": 'x","salt":"y'}),
    "revision": setting(model_revision="y"),
    "other revision": setting(model_revision="z"),
    "salt": setting(salt="y"),
    "other salt": setting(salt="z"),
    "salt and revision": setting(salt="y", model_revision="y"),
    "pool swa": setting(pool_name="swa"),
    "pool draft": setting(pool_name="draft"),
    "storage format tag": tagged,
    "MLA": mla(),
    "MLA fp16": mla(dtype=torch.float16),
    "MLA fp8": fp8("fp8_e4m3", pools.make_mla_pool),
    "MLA fp8 e5m2": fp8("fp8_e5m2", pools.make_mla_pool),
    "MLA page_first_direct": mla(layout="page_first_direct"),
    "MLA 4 layers": mla(layers=4),
    "MLA layers 2-3": mla(start_layer=2),
    "MLA page of 8 tokens": mla(page_size=8),
    "MLA rank 8 and rotary 16": mla(kv_lora_rank=8, qk_rope_head_dim=16),
    "MLA wider": mla(kv_lora_rank=32),
    "MLA PP 0 of 2": mla({"pp_size": 2}),
    "MLA PP 1 of 2": mla({"pp_rank": 1, "pp_size": 2}),
    "MLA side pool of an MHA model": lambda: namespace(pools.make_mla_pool(), pool_name="side"),
    "MLA side pool of an MHA model, TP 1 of 2": lambda: namespace(
        pools.make_mla_pool(), StorageConfig(tp_rank=1, tp_size=2), pool_name="side"
    ),
    "MHA draft of an MLA model, TP 0 of 2": lambda: namespace(
        config=StorageConfig(is_mla_model=True, tp_size=2), pool_name="draft"
    ),
    "MHA draft of an MLA model, TP 1 of 2": lambda: namespace(
        config=StorageConfig(is_mla_model=True, tp_rank=1, tp_size=2), pool_name="draft"
    ),
}


def test_variants_never_share() -> None:
    """Of all pairs of configurations whose bytes differ, none has one namespace."""
    digests = {name: make().digest for name, make in VARIANTS.items()}
    assert len(digests) >= 60
    for (one, a), (other, b) in itertools.combinations(digests.items(), 2):
        assert a != b, f"{one} shares with {other}"


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param(mha(dtype=torch.bfloat16), mha(dtype=torch.float8_e4m3fn), id="1-bf16-fp8"),
        pytest.param(mha(), fp8("fp8_e4m3"), id="1-bf16-raw-fp8"),
        pytest.param(fp8("fp8_e4m3"), fp8("fp8_e5m2"), id="1-raw-fp8-formats"),
        pytest.param(mha(dtype=torch.bfloat16), mha(dtype=torch.float16), id="2-bf16-fp16"),
        pytest.param(mha(layout="page_first"), mha(layout="page_first_direct"), id="3-byte-orders"),
        pytest.param(
            mha({"pp_size": 2}), mha({"pp_rank": 1, "pp_size": 2}, start_layer=2), id="5-pp-stages"
        ),
        pytest.param(
            mha({"model_name": "org/a-b"}), mha({"model_name": "org-a/b"}), id="6-model-names"
        ),
    ],
)
def test_cases_that_must_not_share(
    writer: Callable[[], Namespace], reader: Callable[[], Namespace]
) -> None:
    """What one of the two writes is never looked up by the other."""
    assert writer() != reader()
    assert writer().digest != reader().digest


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param(
            mha(layout="layer_first"), mha(layout="page_first_direct"), id="4-layer-major"
        ),
        pytest.param(
            mla(layout="layer_first"), mla(layout="page_first_direct"), id="4-layer-major-mla"
        ),
        *(
            pytest.param(
                mla({"tp_size": 4}), mla({"tp_rank": rank, "tp_size": 4}), id=f"7-mla-rank-{rank}"
            )
            for rank in (1, 2, 3)
        ),
        pytest.param(
            mla({"tp_rank": 3, "tp_size": 4}), mla({"tp_rank": 1, "tp_size": 2}), id="mla-tp-sizes"
        ),
        pytest.param(mha({"dp_rank": 0}), mha({"dp_rank": 5}), id="dp-replicas"),
        pytest.param(mla({"dp_rank": 0}), mla({"dp_rank": 5}), id="dp-replicas-mla"),
        pytest.param(mha(pages=4), mha(pages=9), id="pool-sizes"),
        pytest.param(mha(dtype=torch.float8_e4m3fn), fp8("fp8_e4m3"), id="fp8-typed-and-raw"),
        pytest.param(fp8("float8_e5m2"), fp8("fp8_e5m2"), id="fp8-spellings"),
        pytest.param(mha(), mha({"tp_lcm_size": 8}), id="tp-lcm-unused"),
        pytest.param(setting(salt=""), setting(salt=None), id="empty-salt"),
        pytest.param(setting(model_revision=""), mha(), id="empty-revision"),
        pytest.param(setting(kv_dtype="auto"), mha(), id="dtype-from-the-pool"),
    ],
)
def test_cases_that_must_share(
    writer: Callable[[], Namespace], reader: Callable[[], Namespace]
) -> None:
    """Equal bytes have one namespace, whoever wrote them."""
    assert writer() == reader()
    assert hash(writer()) == hash(reader())
    assert writer().manifest == reader().manifest


def test_digest_is_stable() -> None:
    """The encoding did not change under stored pages; a change needs a new format version."""
    name = namespace(model_revision="main", salt="pepper")
    text = json.dumps(
        {
            "byte_order": "token-major",
            "cp_rank": 0,
            "cp_size": 1,
            "format": 1,
            "k_width": 8,
            "kv_dtype": "bfloat16",
            "kv_heads": 2,
            "layer_count": 2,
            "layer_end": 2,
            "layer_start": 0,
            "model_name": "org/model",
            "model_revision": "main",
            "page_tokens": 4,
            "payload_bytes": 512,
            "pool": "kv",
            "pool_class": "MHATokenToKVPoolHost",
            "pp_rank": 0,
            "pp_size": 1,
            "row_layout": "nhd",
            "row_width": 16,
            "salt": hashlib.blake2b(
                b"pepper", digest_size=32, person=b"hicache-nixl slt"
            ).hexdigest(),
            "storage_format_tag": None,
            "target_layer_count": 2,
            "tp_rank": 0,
            "tp_size": 1,
            "v_width": 8,
        },
        separators=(",", ":"),
    )
    person = b"hicache-nixl ns1"
    assert name.digest == hashlib.blake2b(text.encode(), digest_size=32, person=person).digest()


def test_namespace_reads_well() -> None:
    """It prints as short digest, model and pool, knows its page size, and hides the salt."""
    name = namespace(config=StorageConfig(model_name="org/mo\ndel"), salt="pepper")
    assert len(name.digest) == 32
    assert str(name) == f"{name.digest.hex()[:12]} org/mo?del kv"
    assert name.payload_bytes == describe_pool(pools.make_mha_pool()).payload_bytes
    assert "pepper" not in json.dumps(name.manifest) + repr(name)


def test_manifest_round_trip() -> None:
    """A manifest that went through JSON gives the same namespace, for every variant."""
    for make in VARIANTS.values():
        name = make()
        again = namespace_from_manifest(json.loads(json.dumps(name.manifest)))
        assert again == name
        assert again.manifest == name.manifest


@pytest.mark.parametrize("field", sorted(namespace().manifest))
def test_damaged_manifests_are_refused(field: str) -> None:
    """A field changed, of another type or missing is an error that says so."""
    manifest = namespace().manifest
    value = manifest[field]
    changed = value + 1 if isinstance(value, int) else f"{value}x"
    error = StoreFormatError if field == "format" else RegistrationError
    for damaged in (
        {**manifest, field: changed},
        {**manifest, field: [value]},
        {key: value for key, value in manifest.items() if key != field},
    ):
        with pytest.raises((error, RegistrationError)):
            namespace_from_manifest(damaged)
    if isinstance(value, int) and field != "format":
        with pytest.raises(RegistrationError, match=field):
            namespace_from_manifest({**manifest, field: bool(value)})
        with pytest.raises(RegistrationError, match=field):
            namespace_from_manifest({**manifest, field: float(value)})


def test_manifest_of_another_format() -> None:
    """A newer format is told apart from damage."""
    with pytest.raises(StoreFormatError, match="format 2: this version reads 1"):
        namespace_from_manifest({"format": 2, "anything": "else"})


def test_manifest_with_an_unknown_field() -> None:
    """A field that this version does not know is not ignored."""
    with pytest.raises(RegistrationError, match="'colour' is unknown"):
        namespace_from_manifest({**namespace().manifest, "colour": "blue"})


def pool_without(name: str) -> Any:
    """The default MHA pool after one of its attributes went."""
    pool = pools.make_mha_pool()
    delattr(pool, name)
    return pool


def pool_with(**changes: Any) -> Any:
    """The default MHA pool with attributes replaced."""
    pool = pools.make_mha_pool()
    for name, value in changes.items():
        setattr(pool, name, value)
    return pool


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (mha({"model_name": None}), "model name is None"),
        (mha({"model_name": ""}), "set --served-model-name"),
        (mha({"model_name": "\ud800"}), "not valid Unicode"),
        (mha({"dcp_size": 2}), "decode context parallel size 2"),
        (mha({"should_split_heads": True, "tp_lcm_size": 8}), "remove tp_lcm_size"),
        (mha({"tp_rank": 2, "tp_size": 2}), "tp_rank 2 is outside tp_size 2"),
        (mha({"pp_rank": -1}), "pp_rank -1 is outside"),
        (mha({"tp_rank": None}), "tp_rank is None: an integer is needed"),
        (mha({"is_mla_model": True}), "is_mla_model=True but its KV pool is mha"),
        (lambda: namespace(pools.make_mla_pool()), "is_mla_model=False but its KV pool is mla"),
        (mla({"attn_cp_size": 2}), "MLA with context parallel size 2"),
        (mha(dtype=torch.uint8), "kv_dtype is None: name the format"),
        (fp8("auto"), "kv_dtype is 'auto': name the format"),
        (fp8("nvfp4"), "kv_dtype is 'nvfp4'"),
        (mha(dtype=torch.int16), "unknown KV dtype 'int16'"),
        (setting(pool_name=""), "pool name is ''"),
        (setting(model_revision=3), "model_revision is 3"),
        (setting(salt=3), "salt is a int"),
        (lambda: namespace(pool_with(start_layer=None)), "start_layer is None"),
        (lambda: namespace(pool_with(storage_format_tag=7)), "storage_format_tag is 7"),
        (
            lambda: namespace(pool_without("_buffer_infos")),
            "has no attribute '_buffer_infos'",
        ),
        (
            lambda: namespace(config=SimpleNamespace(tp_rank=0)),
            "SimpleNamespace has no attribute 'is_mla_model'",
        ),
    ],
)
def test_what_is_not_known_is_refused(make: Callable[[], Namespace], message: str) -> None:
    """A fact that is missing or not supported is one line at registration, not a guess."""
    with pytest.raises(RegistrationError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_salt_is_not_in_its_error() -> None:
    """A salt of the wrong type is refused without being shown."""
    with pytest.raises(RegistrationError) as caught:
        namespace(salt=b"pepper")  # type: ignore[arg-type]
    assert "pepper" not in str(caught.value)


def test_device_pools_of_two_row_layouts_are_refused() -> None:
    """A draft layer whose device rows are laid out otherwise can't share the page."""
    pool = pools.make_mha_pool(draft_layers=1)
    other = pools.make_mha_pool(row_layout="hnd")
    pool._buffer_infos = (pool._buffer_infos[0], other._buffer_infos[0])
    with pytest.raises(RegistrationError, match=r"layouts \['hnd', 'nhd'\]"):
        namespace(pool)


def test_geometry_of_another_pool_is_refused() -> None:
    """A geometry with other pages than the pool's is a mistake of the caller."""
    with pytest.raises(RegistrationError, match="geometry of 8-token pages"):
        identify(
            pool=pools.make_mha_pool(page_size=4),
            geometry=describe_pool(pools.make_mha_pool(page_size=8)),
            storage_config=StorageConfig(),
            settings=SimpleNamespace(model_revision=None, salt=None),
        )


def test_hex_keys_are_taken_as_they_are() -> None:
    """The engine's own key, 64 lowercase hex digits, is its 32 bytes."""
    assert key_bytes(HEX_KEY) == bytes.fromhex(HEX_KEY)


def test_other_keys_never_meet() -> None:
    """Upper case, cut, padded, non-ASCII and plain keys all are different 32 bytes."""
    keys = [
        HEX_KEY,
        HEX_KEY.upper(),
        HEX_KEY[:-1],
        HEX_KEY + "0",
        HEX_KEY + "\n",
        f" {HEX_KEY}",
        f"{HEX_KEY[:-1]} ",
        "\N{FULLWIDTH DIGIT ONE}" * 64,
        "1" * 64,
        f"{HEX_KEY}_swa",
        "key",
    ]
    stored = [key_bytes(key) for key in keys]
    assert {len(key) for key in stored} == {32}
    assert len(set(stored)) == len(keys)


@settings(max_examples=200, deadline=None)
@given(keys=st.lists(st.text(min_size=1), min_size=2, max_size=2, unique=True))
def test_text_keys_never_meet(keys: list[str]) -> None:
    """Two different texts are two different keys."""
    assert key_bytes(keys[0]) != key_bytes(keys[1])


@pytest.mark.parametrize("key", [None, 7, b"00" * 32, ["k"]])
def test_keys_are_strings(key: Any) -> None:
    """Anything but a string is a TypeError."""
    with pytest.raises(TypeError, match="page key is a"):
        key_bytes(key)


@pytest.mark.parametrize("key", ["", "\ud800"])
def test_unusable_keys(key: str) -> None:
    """An empty key and one that is not Unicode are refused."""
    with pytest.raises(RegistrationError, match="page key"):
        key_bytes(key)
