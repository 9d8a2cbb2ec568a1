"""How much room for output rows is asked for, and what happens where it is not given."""

from __future__ import annotations

from typing import Any

import pytest

from pyspec import assemble
from pyspec.errors import ContextFullError, NativeError


class Context:
    """A context of which only sizes matter, and its own handle."""

    def __init__(self, n_outputs_max: int, n_vocab: int, n_ctx_seq: int = 4096, error: Exception | None = None) -> None:
        self.n_outputs_max, self.n_vocab, self.n_ctx_seq = n_outputs_max, n_vocab, n_ctx_seq
        self.error = error
        self.handle = self
        self.asked: list[int] = []

    def reserve_outputs(self, n: int) -> None:
        self.asked.append(n)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("n_outputs_max", "n_vocab", "n_ctx_seq", "n_seq", "asked"),
    [
        (9, 32_000, 4096, 1, [9]),
        (4 * 65, 32_000, 4096, 4, [260]),
        # 64 MiB of logits
        (4 * 65, 262_144, 4096, 4, [64]),
        # cells there are
        (260, 32_000, 8, 4, [32]),
        # libllama has made room for one row a sequence
        (1, 32_000, 4096, 1, []),
        (4, 32_000, 4096, 4, []),
    ],
)
def test_room_for_outputs(n_outputs_max: int, n_vocab: int, n_ctx_seq: int, n_seq: int, asked: list[int]) -> None:
    context: Any = Context(n_outputs_max, n_vocab, n_ctx_seq)
    assemble._reserve_outputs(context, n_seq)
    assert context.asked == asked


def test_room_that_is_refused_is_made_later() -> None:
    context: Any = Context(9, 512, error=ContextFullError("full", func="llama_decode", state="unchanged"))
    assemble._reserve_outputs(context, 1)
    assert context.asked == [9]


def test_a_lost_context_is_reported() -> None:
    context: Any = Context(9, 512, error=NativeError("gone", func="llama_decode", state="lost"))
    with pytest.raises(NativeError, match="gone"):
        assemble._reserve_outputs(context, 1)
