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
import side_pools
from hicache_nixl.errors import RegistrationError
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


def beside(
    make: Callable[..., Any],
    *arguments: Any,
    config: dict[str, Any] | None = None,
    pool_name: str = "side",
    kv_dtype: str | None = None,
    **pool: Any,
) -> Callable[[], Namespace]:
    """Namespace of a pool beside the KV pool, by default on a single rank of an MLA model."""
    fields = {"is_mla_model": True} | (config or {})
    return lambda: namespace(
        make(*arguments, **pool), StorageConfig(**fields), pool_name=pool_name, kv_dtype=kv_dtype
    )


def compressed(kv_dtype: str = "fp8_e4m3", **more: Any) -> Callable[[], Namespace]:
    """Namespace of a pool of compressed rows."""
    return beside(side_pools.make_compressed_pool, kv_dtype=kv_dtype, **more)


def dcp(rank: int, size: int = 2, **config: Any) -> Callable[[], Namespace]:
    """Namespace of an MLA pool of one rank of a decode context parallel group."""
    config = {"tp_rank": rank, "tp_size": size, "dcp_rank": rank, "dcp_size": size} | config
    return mla(config, dcp_rank=rank, dcp_size=size)


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
    "MLA packed fp8": lambda: namespace(
        pools.make_mla_pool(dtype=torch.uint8, packed_fp8=True),
        StorageConfig(is_mla_model=True),
        kv_dtype="fp8_e4m3",
    ),
    "MLA page_first, half the tokens": mla(page_size=2),
    "DCP 0 of 2": dcp(0),
    "DCP 1 of 2": dcp(1),
    "DCP 1 of 4": dcp(1, 4),
    "MLA KV of an engine with writers on all ranks": lambda: namespace(pools.make_mla_pool()),
    "page_unified": mha(layout="page_unified"),
    "mamba": beside(side_pools.make_mamba_pool),
    "mamba fp16": beside(side_pools.make_mamba_pool, conv_dtype=torch.float16),
    "mamba bf16 state": beside(side_pools.make_mamba_pool, temporal_dtype=torch.bfloat16),
    "mamba of other axes": beside(side_pools.make_mamba_pool, temporal=(4, 2, 8)),
    "mamba convolutions the other way": beside(side_pools.make_mamba_pool, conv=((6, 3), (12, 3))),
    "mamba 3 layers": beside(side_pools.make_mamba_pool, layers=3),
    "mamba 2 layers and a draft layer": beside(side_pools.make_mamba_pool, draft_layers=1),
    "mamba with a side state": beside(side_pools.make_mamba_pool, side=(7,)),
    "mamba TP 0 of 2": beside(side_pools.make_mamba_pool, config={"tp_size": 2}),
    "mamba TP 1 of 2": beside(side_pools.make_mamba_pool, config={"tp_rank": 1, "tp_size": 2}),
    "mamba PP 1 of 2": beside(side_pools.make_mamba_pool, config={"pp_rank": 1, "pp_size": 2}),
    "indexer": beside(side_pools.make_dsa_indexer_pool),
    "indexer named draft": beside(side_pools.make_dsa_indexer_pool, pool_name="draft_indexer"),
    "indexer without layer 1": beside(side_pools.make_dsa_indexer_pool, skip=(1,)),
    "indexer without layer 2": beside(side_pools.make_dsa_indexer_pool, skip=(2,)),
    "indexer of layers 3-5": beside(side_pools.make_dsa_indexer_pool, start_layer=3),
    "indexer with small scale blocks": beside(
        side_pools.make_dsa_indexer_pool, index_head_dim=120, quant_block_size=40
    ),
    "indexer beside MHA, TP 1 of 2": beside(
        side_pools.make_dsa_indexer_pool,
        config={"is_mla_model": False, "tp_rank": 1, "tp_size": 2},
    ),
    "compressed": compressed(),
    "compressed e5m2": compressed("fp8_e5m2"),
    "compressed named otherwise": compressed(pool_name="deepseek_v4_c128"),
    "compressed bf16 rows": compressed(device_dtype=torch.bfloat16),
    "compressed half the rows": compressed(layers=1, row_bytes=2600),
    "compress state": beside(side_pools.make_state_pool),
    "compress state of another ring": beside(side_pools.make_state_pool, ring=2, width=48),
    "compress state bf16": beside(side_pools.make_state_pool, width=48, dtype=torch.bfloat16),
    "qsa": beside(side_pools.make_qsa_indexer_pool),
    "qsa fp16": beside(side_pools.make_qsa_indexer_pool, dtype=torch.float16),
    "qsa of twice the ratio": beside(side_pools.make_qsa_indexer_pool, ratio=4, width=32),
    "qsa TP 1 of 2": beside(side_pools.make_qsa_indexer_pool, config={"tp_rank": 1, "tp_size": 2}),
    "k only": beside(side_pools.make_k_only_pool),
    "k only by layer": beside(side_pools.make_k_only_pool, "page_first_direct"),
    "k only of two heads": beside(side_pools.make_k_only_pool, heads=2, head_dim=8),
    "nvfp4": beside(side_pools.make_nvfp4_pool),
    "nvfp4 index": beside(side_pools.make_nvfp4_pool, index=True),
    "nvfp4 one layer": beside(side_pools.make_nvfp4_pool, layers=1, row_bytes=288),
    "mxfp8": beside(side_pools.make_mxfp8_pool),
    "mxfp8 scales the other way": beside(side_pools.make_mxfp8_pool, scale_bytes=(64, 32)),
    "envelope": lambda: namespace(side_pools.make_envelope_pools()[0], pool_name="side"),
    "envelope swa": lambda: namespace(side_pools.make_envelope_pools()[1], pool_name="side"),
    "envelope fp16": lambda: namespace(
        side_pools.make_envelope_pools(dtype=torch.float16)[0], pool_name="side"
    ),
    "envelope of one head": lambda: namespace(
        side_pools.make_envelope_pools(heads=1, head_dim=16)[0], pool_name="side"
    ),
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
    assert len(digests) >= 100
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
        pytest.param(
            mla(layout="page_first_direct"), mla(layout="page_unified"), id="mla-page-unified"
        ),
        pytest.param(dcp(1), dcp(1, tp_rank=3, tp_size=4), id="dcp-groups"),
        *(
            pytest.param(
                beside(make, config={"tp_size": 2}),
                beside(make, config={"tp_rank": 1, "tp_size": 2}),
                id=f"replicated-{make.__name__}",
            )
            for make in (side_pools.make_dsa_indexer_pool, side_pools.make_state_pool)
        ),
        pytest.param(
            compressed(config={"tp_size": 2}),
            compressed(config={"tp_rank": 1, "tp_size": 2}),
            id="replicated-compressed",
        ),
        *(
            pytest.param(beside(make, "layer_first"), beside(make, "page_first"), id=make.__name__)
            for make in (
                side_pools.make_dsa_indexer_pool,
                side_pools.make_state_pool,
                side_pools.make_qsa_indexer_pool,
                side_pools.make_nvfp4_pool,
            )
        ),
        pytest.param(
            beside(side_pools.make_mamba_pool, "page_first", states=4),
            beside(side_pools.make_mamba_pool, "page_first_direct", states=9),
            id="mamba-layouts",
        ),
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
            "dcp_rank": 0,
            "dcp_size": 1,
            "format": 2,
            "kv_dtype": "bfloat16",
            "model_name": "org/model",
            "model_revision": "main",
            "page": {
                "head_groups": 1,
                "heads": 2,
                "k_width": 8,
                "layer_end": 2,
                "layer_start": 0,
                "layers": 2,
                "row_layout": "nhd",
                "target_layers": 2,
                "v_width": 8,
            },
            "page_tokens": 4,
            "payload_bytes": 512,
            "pool": "kv",
            "pool_class": "MHATokenToKVPoolHost",
            "pp_rank": 0,
            "pp_size": 1,
            "salt": hashlib.blake2b(
                b"pepper", digest_size=32, person=b"hicache-nixl slt"
            ).hexdigest(),
            "storage_format_tag": None,
            "tp_rank": 0,
            "tp_size": 1,
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
    for damaged in (
        {**manifest, field: changed},
        {**manifest, field: [value]},
        {key: value for key, value in manifest.items() if key != field},
    ):
        with pytest.raises(RegistrationError):
            namespace_from_manifest(damaged)
    if isinstance(value, int) and field != "format":
        with pytest.raises(RegistrationError, match=field):
            namespace_from_manifest({**manifest, field: bool(value)})
        with pytest.raises(RegistrationError, match=field):
            namespace_from_manifest({**manifest, field: float(value)})


def test_manifest_of_another_format() -> None:
    """What another version of this library stored can still be listed and cleared."""
    facts = {"format": 1, "model_name": "m", "pool": "kv", "payload_bytes": 8, "tp_rank": 0, "x": 1}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=32, person=b"hicache-nixl ns1").digest()
    name = namespace_from_manifest({**facts, "digest": digest.hex()})
    assert (name.digest, name.payload_bytes) == (digest, 8)
    assert "m kv" in str(name)
    with pytest.raises(RegistrationError, match="it says digest"):
        namespace_from_manifest({**facts, "digest": digest.hex(), "x": 2})
    with pytest.raises(RegistrationError, match="'pool' is missing"):
        namespace_from_manifest({k: v for k, v in facts.items() if k != "pool"})


@pytest.mark.parametrize("page", [{"heads": None}, {"heads": 1.0}, {"heads": True}, {"heads": [1]}])
def test_manifest_with_a_damaged_page(page: dict[str, Any]) -> None:
    """A fact of the pages is a string or an integer."""
    with pytest.raises(RegistrationError, match="fact 'heads' of its pages"):
        namespace_from_manifest({**namespace().manifest, "page": page})


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
        (mha({"dcp_size": 2}), "mha pages with decode context parallel size 2"),
        (mla({"dcp_size": 2}), "pool of decode context parallel size 1 in an engine of 2"),
        (mla(dcp_size=2), "pool of decode context parallel size 2 in an engine of 1"),
        (compressed(kv_dtype=""), "name it by --kv-cache-dtype"),
        (
            compressed(config={"attn_cp_size": 2}),
            "compressed pages with context parallel size 2 are not supported",
        ),
        (mha({"should_split_heads": True, "tp_lcm_size": 8}), "remove tp_lcm_size"),
        (mha({"tp_rank": 2, "tp_size": 2}), "tp_rank 2 is outside tp_size 2"),
        (mha({"pp_rank": -1}), "pp_rank -1 is outside"),
        (mha({"tp_rank": None}), "tp_rank is None: an integer is needed"),
        (mha({"is_mla_model": True}), "is_mla_model=True but its KV pool is mha"),
        (mla({"attn_cp_size": 2}), "mla pages with context parallel size 2"),
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
