"""Tiny models written to disk: a Llama (MHA) and a DeepSeek-V2 shape (MLA), with a tokenizer.

Owns their configurations, weights and tokenizer; downloads nothing. The weights are random but
scaled so that the logits spread, hence the tokens a model generates depend on every KV byte. The
same kind and seed give the same bytes.

Command: ``python -m engine_cpu.models mla DIRECTORY``.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch

Kind = Literal["mha", "mla"]

VOCABULARY = 512
LAYERS = 2
HIDDEN = 128
FEED_FORWARD = 256
HEADS = 4

KV_HEADS = 2
HEAD_WIDTH = 32

LATENT = 64
ROPE_WIDTH = 16
NOPE_WIDTH = 32
VALUE_WIDTH = 32

CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "a page of the cache is written once and read many times",
)

State = dict[str, torch.Tensor]
Draw = Callable[..., torch.Tensor]

SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": FEED_FORWARD,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}

LLAMA: dict[str, Any] = SHARED | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_WIDTH,
    "rms_norm_eps": 1e-5,
}

DEEPSEEK: dict[str, Any] = SHARED | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": HEADS,
    "head_dim": NOPE_WIDTH + ROPE_WIDTH,
    "kv_lora_rank": LATENT,
    "q_lora_rank": None,
    "qk_rope_head_dim": ROPE_WIDTH,
    "qk_nope_head_dim": NOPE_WIDTH,
    "v_head_dim": VALUE_WIDTH,
    "rms_norm_eps": 1e-6,
    # SGLang reads the expert settings of every DeepSeek model; with as many dense layers as there
    # are layers no expert is built.
    "first_k_dense_replace": LAYERS,
    "moe_layer_freq": 1,
    "moe_intermediate_size": HEAD_WIDTH,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}


def _drawing(seed: int) -> Draw:
    generator = torch.Generator().manual_seed(seed)

    def draw(outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        """A weight matrix whose outputs have a standard deviation of `gain` for unit inputs."""
        matrix = torch.randn(outputs, inputs, generator=generator) * (gain * inputs**-0.5)
        return matrix.to(torch.bfloat16)

    return draw


def _norm(width: int) -> torch.Tensor:
    return torch.ones(width, dtype=torch.bfloat16)


def _mha_attention(draw: Draw) -> State:
    # A gain of 2 on queries and keys makes attention pick tokens instead of averaging them.
    return {
        "q_proj.weight": draw(HEADS * HEAD_WIDTH, HIDDEN, 2.0),
        "k_proj.weight": draw(KV_HEADS * HEAD_WIDTH, HIDDEN, 2.0),
        "v_proj.weight": draw(KV_HEADS * HEAD_WIDTH, HIDDEN, 2.0),
        "o_proj.weight": draw(HIDDEN, HEADS * HEAD_WIDTH, 2.0),
    }


def _mla_attention(draw: Draw) -> State:
    return {
        "q_proj.weight": draw(HEADS * (NOPE_WIDTH + ROPE_WIDTH), HIDDEN, 2.0),
        "kv_a_proj_with_mqa.weight": draw(LATENT + ROPE_WIDTH, HIDDEN, 2.0),
        "kv_a_layernorm.weight": _norm(LATENT),
        "kv_b_proj.weight": draw(HEADS * (NOPE_WIDTH + VALUE_WIDTH), LATENT, 2.0),
        "o_proj.weight": draw(HIDDEN, HEADS * VALUE_WIDTH, 2.0),
    }


def _weights(attention: Callable[[Draw], State], seed: int) -> State:
    draw = _drawing(seed)
    state = {
        "model.embed_tokens.weight": draw(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "model.norm.weight": _norm(HIDDEN),
        "lm_head.weight": draw(VOCABULARY, HIDDEN, 4.0),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        state |= {f"{prefix}self_attn.{name}": tensor for name, tensor in attention(draw).items()}
        state |= {
            f"{prefix}mlp.gate_proj.weight": draw(FEED_FORWARD, HIDDEN),
            f"{prefix}mlp.up_proj.weight": draw(FEED_FORWARD, HIDDEN),
            f"{prefix}mlp.down_proj.weight": draw(HIDDEN, FEED_FORWARD),
            f"{prefix}input_layernorm.weight": _norm(HIDDEN),
            f"{prefix}post_attention_layernorm.weight": _norm(HIDDEN),
        }
    return state


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        # Every byte is in the alphabet, so any text has tokens.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": 4096,
            "clean_up_tokenization_spaces": False,
        },
    )
    _write_json(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def write_model(kind: Kind, directory: Path, *, seed: int = 7) -> Path:
    """Write a model SGLang can serve into `directory`, which is created; returns it.

    A complete model that is already there is written again with the same bytes. Raises ValueError
    for an unknown `kind` and OSError where the directory cannot be written.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"model kind {kind!r} is unknown; take one of {', '.join(get_args(Kind))}")
    from safetensors.torch import save_file

    config, attention = (LLAMA, _mha_attention) if kind == "mha" else (DEEPSEEK, _mla_attention)
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    _write_tokenizer(directory)
    save_file(
        _weights(attention, seed),
        str(directory / "model.safetensors"),
        metadata={"format": "pt"},
    )
    return directory


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="engine-cpu-model", description="Write a tiny model.")
    parser.add_argument("kind", choices=get_args(Kind), help="mha: Llama; mla: DeepSeek-V2 shape")
    parser.add_argument("directory", type=Path, help="where to write it; created if missing")
    parser.add_argument("--seed", type=int, default=7, help="another seed is another model")
    options = parser.parse_args(arguments)
    try:
        written = write_model(options.kind, options.directory, seed=options.seed)
    except OSError as error:
        sys.stderr.write(f"cannot write the model: {error}\n")
        return 1
    sys.stdout.write(f"{options.kind} model in {written}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
