"""What a constraint on the text, such as a grammar, is to the sampler chain."""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = ["Constraint", "Mask"]

#: uint32 [ceil(n_vocab / 32)], C-contiguous: bit ``t % 32`` of word ``t // 32`` is set where token ``t`` is allowed.
Mask: TypeAlias = npt.NDArray[np.uint32]


@runtime_checkable
class Constraint(Protocol):
    """Says which tokens may come next. One for each request; it hears emitted tokens only, never drafted ones.

    A verification calls ``mask`` once for each row it looks at, before anything else is done to the row, and ``accept``
    with the token that was emitted there. So there is nothing to take back after a rejection.
    """

    def mask(self) -> Mask | None:
        """The tokens allowed next; None: all. Borrowed until the next ``accept``; the state does not change."""
        ...

    def accept(self, token: int) -> None:
        """``token`` was emitted. It was allowed, or the caller ignores the mask at its own risk."""
        ...

    def forced(self) -> list[int]:
        """Tokens that must come next, whatever the model says; empty: there is a choice. The state does not change."""
        ...

    def rewind(self, n: int) -> None:
        """Be again as after ``n`` accepted tokens: a sequence that was interrupted starts over."""
        ...

    @property
    def stopped(self) -> bool:
        """The text is complete: nothing may follow."""
        ...
