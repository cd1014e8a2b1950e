"""Tiny models written to disk, one of each kind of KV cache, with a tokenizer.

`mha` is a Llama, `mla` a DeepSeek-V2 shape, `swa` a Mellum whose layers attend in turn to a window
and to everything, `mamba` a Falcon-H1 whose layers have attention and a Mamba2 mixer side by side.

Owns their configurations, weights and tokenizer; downloads nothing. The weights are random but
scaled so that the logits spread, hence the tokens a model generates depend on every KV byte. The
same kind and seed give the same bytes.

Command: ``python -m engine_cpu.models mla DIRECTORY``.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

Kind = Literal["mha", "mla", "swa", "mamba"]

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

WINDOW = 64
"""Tokens a sliding layer sees."""

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

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

MELLUM: dict[str, Any] = SHARED | {
    "architectures": ["MellumForCausalLM"],
    "model_type": "mellum",
    "num_hidden_layers": 2 * LAYERS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_WIDTH,
    "rms_norm_eps": 1e-6,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * LAYERS,
    "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    # SGLang reads the expert settings of every Mellum; dense layers build no expert.
    "mlp_layer_types": ["dense"] * (2 * LAYERS),
    "moe_intermediate_size": HEAD_WIDTH,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}

MIXER_HEADS = 4
STATE = 16
CONVOLUTION = 4

FALCON: dict[str, Any] = SHARED | {
    # Triton's interpreter, which runs the mixer, computes wrongly in bfloat16.
    "torch_dtype": "float16",
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_WIDTH,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": HIDDEN,
    "mamba_n_heads": MIXER_HEADS,
    "mamba_d_head": HIDDEN // MIXER_HEADS,
    "mamba_n_groups": 1,
    "mamba_d_state": STATE,
    "mamba_d_conv": CONVOLUTION,
    "mamba_chunk_size": 16,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
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


def _llama_mixers(draw: Draw) -> State:
    # A gain of 2 on queries and keys makes attention pick tokens instead of averaging them.
    return {
        "self_attn.q_proj.weight": draw(HEADS * HEAD_WIDTH, HIDDEN, 2.0),
        "self_attn.k_proj.weight": draw(KV_HEADS * HEAD_WIDTH, HIDDEN, 2.0),
        "self_attn.v_proj.weight": draw(KV_HEADS * HEAD_WIDTH, HIDDEN, 2.0),
        "self_attn.o_proj.weight": draw(HIDDEN, HEADS * HEAD_WIDTH, 2.0),
    }


def _deepseek_mixers(draw: Draw) -> State:
    return {
        "self_attn.q_proj.weight": draw(HEADS * (NOPE_WIDTH + ROPE_WIDTH), HIDDEN, 2.0),
        "self_attn.kv_a_proj_with_mqa.weight": draw(LATENT + ROPE_WIDTH, HIDDEN, 2.0),
        "self_attn.kv_a_layernorm.weight": _norm(LATENT),
        "self_attn.kv_b_proj.weight": draw(HEADS * (NOPE_WIDTH + VALUE_WIDTH), LATENT, 2.0),
        "self_attn.o_proj.weight": draw(HIDDEN, HEADS * VALUE_WIDTH, 2.0),
    }


def _mellum_mixers(draw: Draw) -> State:
    # Queries and keys are normalized, so their gain is here.
    return _llama_mixers(draw) | {
        "self_attn.q_norm.weight": 2 * _norm(HEAD_WIDTH),
        "self_attn.k_norm.weight": 2 * _norm(HEAD_WIDTH),
    }


def _falcon_mixers(draw: Draw) -> State:
    channels = HIDDEN + 2 * STATE
    return _llama_mixers(draw) | {
        "mamba.in_proj.weight": draw(HIDDEN + channels + MIXER_HEADS, HIDDEN, 2.0),
        "mamba.conv1d.weight": draw(channels, CONVOLUTION, 2.0).unsqueeze(1),
        "mamba.conv1d.bias": draw(channels, 1).flatten(),
        "mamba.A_log": draw(MIXER_HEADS, 1).flatten(),
        "mamba.D": draw(MIXER_HEADS, 1).flatten(),
        "mamba.dt_bias": draw(MIXER_HEADS, 1).flatten(),
        "mamba.norm.weight": _norm(HIDDEN),
        "mamba.out_proj.weight": draw(HIDDEN, HIDDEN, 2.0),
    }


@dataclass(frozen=True)
class Architecture:
    """A configuration, the weights a layer's mixers have, and what its other parts are called."""

    config: dict[str, Any]
    mixers: Callable[[Draw], State]
    feed_forward: str = "mlp"
    second_norm: str = "post_attention_layernorm"
    final_norm: str = "norm"


ARCHITECTURES: dict[Kind, Architecture] = {
    "mha": Architecture(LLAMA, _llama_mixers),
    "mla": Architecture(DEEPSEEK, _deepseek_mixers),
    "swa": Architecture(MELLUM, _mellum_mixers),
    "mamba": Architecture(
        FALCON,
        _falcon_mixers,
        feed_forward="feed_forward",
        second_norm="pre_ff_layernorm",
        final_norm="final_layernorm",
    ),
}


def _weights(architecture: Architecture, seed: int) -> State:
    draw = _drawing(seed)
    dtype = getattr(torch, architecture.config["torch_dtype"])
    state = {
        "model.embed_tokens.weight": draw(VOCABULARY, HIDDEN, HIDDEN**0.5),
        f"model.{architecture.final_norm}.weight": _norm(HIDDEN),
        "lm_head.weight": draw(VOCABULARY, HIDDEN, 4.0),
    }
    for layer in range(architecture.config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        mlp = prefix + architecture.feed_forward
        state |= {prefix + name: tensor for name, tensor in architecture.mixers(draw).items()}
        state |= {
            f"{mlp}.gate_proj.weight": draw(FEED_FORWARD, HIDDEN),
            f"{mlp}.up_proj.weight": draw(FEED_FORWARD, HIDDEN),
            f"{mlp}.down_proj.weight": draw(HIDDEN, FEED_FORWARD),
            f"{prefix}input_layernorm.weight": _norm(HIDDEN),
            f"{prefix}{architecture.second_norm}.weight": _norm(HIDDEN),
        }
    return {name: tensor.to(dtype) for name, tensor in state.items()}


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

    architecture = ARCHITECTURES[kind]
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", architecture.config)
    _write_tokenizer(directory)
    save_file(
        _weights(architecture, seed),
        str(directory / "model.safetensors"),
        metadata={"format": "pt"},
    )
    return directory


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="engine-cpu-model", description="Write a tiny model.")
    parser.add_argument("kind", choices=get_args(Kind), help="the kind of its KV cache")
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
