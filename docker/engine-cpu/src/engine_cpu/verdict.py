"""What two answers to one prompt show, before and after a server lost its memory."""

from dataclasses import dataclass

from rich.table import Table

from engine_cpu.replies import Completion


@dataclass(frozen=True)
class Verdict:
    """The answers, and how far their log probabilities may differ: not at all on a CPU."""

    before: Completion
    after: Completion
    tolerance: float = 0.0

    @property
    def from_storage(self) -> bool:
        return self.before.cached_tokens == 0 and self.after.from_storage > 0

    @property
    def same_tokens(self) -> bool:
        return self.before.token_ids == self.after.token_ids

    @property
    def passed(self) -> bool:
        return self.from_storage and self.same_tokens and self.deviation <= self.tolerance

    @property
    def deviation(self) -> float:
        """The largest difference of two log probabilities; infinite for unequal lengths."""
        if len(self.before.logprobs) != len(self.after.logprobs):
            return float("inf")
        return self.after.deviation(self.before)

    def table(self) -> Table:
        """Both answers side by side."""
        table = Table("", "before", "after", box=None, pad_edge=False)
        answers = (self.before, self.after)
        table.add_row("prompt tokens", *(str(answer.prompt_tokens) for answer in answers))
        table.add_row("from storage", *(str(answer.from_storage) for answer in answers))
        table.add_row("from memory", *(str(a.from_device + a.from_host) for a in answers))
        table.add_row("token ids", *(_abbreviated(answer.token_ids) for answer in answers))
        return table

    def sentence(self, event: str) -> str:
        """PASS or FAIL and why, as console markup; `event` is what happened in between."""
        mark = "[bold green]PASS[/bold green]" if self.passed else "[bold red]FAIL[/bold red]"
        tokens = "the same tokens" if self.same_tokens else "other tokens"
        return (
            f"{mark}: after {event} {self.after.from_storage} of {self.after.prompt_tokens} "
            f"prompt tokens came from storage, {tokens}, max |Δlogprob| {self.deviation}"
        )


def _abbreviated(token_ids: tuple[int, ...]) -> str:
    return " ".join(str(token) for token in token_ids[:6]) + " …"
