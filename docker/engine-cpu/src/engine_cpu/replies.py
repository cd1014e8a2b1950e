"""What a server answers: completions, administrative replies, metrics. Knows no connection."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SAMPLE = re.compile(r"^sglang:(\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Completion:
    """One answer: the generated token ids with their log probabilities, and the tokens of the
    prompt that came out of each tier instead of being computed."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    from_device: int
    from_host: int
    from_storage: int
    seconds: float

    @classmethod
    def of(cls, meta: Mapping[str, Any], seconds: float) -> "Completion":
        """From the ``meta_info`` of a reply that took `seconds`."""
        tiers: dict[str, Any] = meta.get("cached_tokens_details") or {}
        generated = meta["output_token_logprobs"]
        return cls(
            token_ids=tuple(int(entry[1]) for entry in generated),
            logprobs=tuple(float(entry[0]) for entry in generated),
            prompt_tokens=int(meta["prompt_tokens"]),
            cached_tokens=int(meta["cached_tokens"]),
            from_device=int(tiers.get("device", 0)),
            from_host=int(tiers.get("host", 0)),
            from_storage=int(tiers.get("storage", 0)),
            seconds=seconds,
        )

    def deviation(self, other: "Completion") -> float:
        """The largest difference of two log probabilities at the same place."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(abs(mine - theirs) for mine, theirs in pairs)


@dataclass(frozen=True)
class Reply:
    """What SGLang answered to an administrator; `status` is HTTP's."""

    status: int
    text: str

    @property
    def ok(self) -> bool:
        return self.status == 200


def metric_sum(exposition: str, name: str, labels: Mapping[str, str]) -> float:
    """The sum of ``sglang:<name>`` over the samples with these labels; 0.0 where there is none.

    `exposition` is the text of ``/metrics``.
    """
    total = 0.0
    for found, text, value in _SAMPLE.findall(exposition):
        if found == name and all(f'{key}="{want}"' in text for key, want in labels.items()):
            total += float(value)
    return total
