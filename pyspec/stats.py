"""Counters of a generation. ``acceptance rate`` = accepted / proposed (no bonus token);
``mean accepted length`` = tokens per target pass (with the bonus token)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["ControlStats", "DrafterStats", "PhaseTimes", "SpecStats"]


def _count_positions(per_pos: list[int], n: int) -> None:
    """Add one to each of the first ``n`` positions; ``n`` is at least 1."""
    if len(per_pos) < n:
        per_pos.extend([0] * (n - len(per_pos)))
    for i in range(n):
        per_pos[i] += 1


@dataclass(slots=True)
class DrafterStats:
    """Counters of one drafter, named as in llama.cpp's ``common_speculative_impl``. Times in microseconds."""

    name: str
    n_call_begin: int = 0
    n_call_draft: int = 0
    n_call_accept: int = 0
    n_gen_drafts: int = 0
    n_acc_drafts: int = 0
    n_gen_tokens: int = 0
    n_acc_tokens: int = 0
    n_failed: int = 0
    n_acc_tokens_per_pos: list[int] = field(default_factory=list)
    n_gen_tokens_per_pos: list[int] = field(default_factory=list)
    t_begin_us: int = 0
    t_draft_us: int = 0
    t_process_us: int = 0
    t_accept_us: int = 0

    def count(self, n_draft: int, n_accepted: int) -> None:
        """Record one draft of this drafter and how much of it was accepted."""
        self.n_gen_drafts += 1
        self.n_acc_drafts += n_accepted > 0
        self.n_gen_tokens += n_draft
        self.n_acc_tokens += n_accepted
        if n_draft:
            _count_positions(self.n_gen_tokens_per_pos, n_draft)
            if n_accepted:
                _count_positions(self.n_acc_tokens_per_pos, n_accepted)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / proposed tokens; None when nothing was proposed."""
        return self.n_acc_tokens / self.n_gen_tokens if self.n_gen_tokens else None


@dataclass(slots=True)
class ControlStats:
    """What ``speculation="auto"`` chose, and what it believes at present. Times in microseconds.

    Attributes:
        n_steps: decisions, one a step for all sequences.
        chosen: for each drafter, how many of its proposals were verified, in full or in part.
        n_nothing: steps in which nothing was proposed. n_not_worth: in which no proposal was worth a row.
        n_measuring: in which nothing was asked, to learn what a pass costs.
        n_tried: times a parked drafter was asked again.
        row_us: a pass of one row at present; pass_us: passes by rows, as far as they were measured.
        drafters: for each by name: "asked" (times, if asking costs something), "value" (gain of asking, in passes of
            one row), "draft_us" by tokens, "right_by_confidence" (lower edge of the drafter's own probability, and how
            often a first token of it was right), "parked" (sequences in which it is).
    """

    n_steps: int = 0
    chosen: dict[str, int] = field(default_factory=dict)
    n_nothing: int = 0
    n_not_worth: int = 0
    n_measuring: int = 0
    n_tried: int = 0
    row_us: float = 0.0
    pass_us: dict[int, float] = field(default_factory=dict)
    drafters: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class PhaseTimes:
    """Wall time by phase, in microseconds."""

    prefill_us: int = 0
    draft_us: int = 0
    decode_us: int = 0
    process_us: int = 0
    verify_us: int = 0
    rollback_us: int = 0

    def add(self, draft_us: int, decode_us: int, process_us: int, verify_us: int, rollback_us: int) -> None:
        """Add the phases of one step."""
        self.draft_us += draft_us
        self.decode_us += decode_us
        self.process_us += process_us
        self.verify_us += verify_us
        self.rollback_us += rollback_us

    @property
    def step_us(self) -> int:
        """All phases but the prompt's."""
        return self.draft_us + self.decode_us + self.process_us + self.verify_us + self.rollback_us


@dataclass(slots=True)
class SpecStats:
    """What happened, for one sequence or summed over an engine.

    Attributes:
        n_prompt: prompt tokens evaluated. n_output: tokens generated. n_first: those of them that came with a prompt.
        n_pass: target passes that generated tokens (of a sequence, or of the engine's batches), without those that read
            prompts.
        n_draft: tokens proposed. n_accepted: proposed tokens that became output.
        synthetic: drafts were accepted by lot (``synth_len``, ``synth_rates``): the output is not valid.
        control: what ``speculation="auto"`` chose and why, for an engine; None with other settings, and for a sequence.
        accepted_per_pos: how often the proposal at each draft position was accepted; drafted_per_pos: was made.
    """

    n_prompt: int = 0
    n_output: int = 0
    n_first: int = 0
    n_pass: int = 0
    n_draft: int = 0
    n_accepted: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    drafted_per_pos: list[int] = field(default_factory=list)
    synthetic: bool = False
    times: PhaseTimes = field(default_factory=PhaseTimes)
    drafters: list[DrafterStats] = field(default_factory=list)
    control: ControlStats | None = None

    def count(self, n_draft: int, n_accepted: int) -> None:
        """Record one verification."""
        self.n_pass += 1
        self.n_draft += n_draft
        self.n_accepted += n_accepted
        if n_draft:
            _count_positions(self.drafted_per_pos, n_draft)
            if n_accepted:
                _count_positions(self.accepted_per_pos, n_accepted)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / proposed tokens, without bonus tokens; None when nothing was proposed."""
        return self.n_accepted / self.n_draft if self.n_draft else None

    @property
    def n_later(self) -> int:
        """Tokens generated after the prompt's passes: what ``n_pass`` and the times of steps are about."""
        return self.n_output - self.n_first

    @property
    def mean_accepted_length(self) -> float | None:
        """Output tokens per target pass, bonus tokens included, those that came with a prompt not; None: no pass."""
        return self.n_later / self.n_pass if self.n_pass else None

    @property
    def prompt_tokens_per_s(self) -> float | None:
        return self.n_prompt / self.times.prefill_us * 1e6 if self.times.prefill_us and self.n_prompt else None

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens per second, without the prompt's time and the token that came with it."""
        return self.n_later / self.times.step_us * 1e6 if self.times.step_us else None

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON-ready values."""
        from dataclasses import asdict

        out = asdict(self)
        for name in ("acceptance_rate", "mean_accepted_length", "prompt_tokens_per_s", "tokens_per_s"):
            out[name] = getattr(self, name)
        return out
