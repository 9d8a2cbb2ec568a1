"""What the engine asks and tells whoever decides about drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..drafters.base import Drafter
    from ..drafters.chain import DrafterChain
    from ..types import DraftRequest

__all__ = ["Controller"]


class Controller(Protocol):
    """Decides at each step who drafts and how much of it is verified. Called by one engine, under its lock.

    Order of calls in a step: ``prefilled``, if there is a prompt to read; ``draft``; ``accept`` for each sequence of
    the pass; ``passed``.
    """

    def begin(self, seq: int) -> None:
        """A sequence starts, or starts over."""

    def prefilled(self, n_rows: int, ns: int) -> None:
        """A pass over ``n_rows`` tokens of a prompt, without outputs, took so long."""

    def draft(self, chain: DrafterChain, requests: Sequence[DraftRequest], n_seq: int) -> dict[int, Drafter]:
        """Ask drafters through ``chain.ask``, and leave in each request's ``draft`` what is to be verified.

        Args:
            requests: of the sequences that may draft; maybe none.
            n_seq: sequences of the pass, also those that may not.

        Returns:
            For each sequence with a draft, whose it is.
        """

    def accept(self, seq: int, n_draft: int, n_accepted: int, emitted: Sequence[int]) -> None:
        """``n_accepted`` of ``n_draft`` tokens hold; ``emitted``: these and the target's own. Borrowed."""

    def passed(self, n_rows: int, ns: int) -> None:
        """The pass had so many rows, of all sequences and padding, and took so long, evaluating again included."""
