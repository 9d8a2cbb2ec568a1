"""``draft-dspark``: DFlash with two more heads.

A Markov head corrects each row's logits by the proposal before it (inside the graph), and a confidence head says how
likely each proposal is to be accepted: with ``p_min`` the draft ends at the first one below it. Most files take the
last token's own row as the first proposal (*anchor*); others start behind it, like DFlash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ..config import SpeculationParams
from ..errors import ConfigError, UnsupportedError
from .draft_dflash import DraftDflash

if TYPE_CHECKING:
    from ..runtime.model import Model

__all__ = ["DraftDspark"]


class DraftDspark(DraftDflash):
    """See the module's text and :class:`DraftDflash`."""

    name: ClassVar[str] = "draft-dspark"

    @classmethod
    def first_row(cls, model: Model) -> int:
        """Row of a block that holds the first proposal."""
        return 0 if model.metadata.get("dflash.sample_from_anchor", "true") == "true" else 1

    def reads_nextn(self) -> bool:
        """The confidence of each row comes in its nextn row."""
        return self.params.p_min > 0

    @classmethod
    def check_file(cls, draft: Model, params: SpeculationParams) -> None:
        """See :meth:`DraftDflash.check_file`."""
        if "dflash.block_size" not in draft.metadata:
            raise UnsupportedError(f"draft {draft.path.name!r} does not say its block size (dflash.block_size)")
        if params.p_min > 0 and draft.metadata.get("dflash.has_confidence_head", "true") != "true":
            raise ConfigError(
                f"draft {draft.path.name!r} has no confidence head, so p_min={params.p_min:g} cannot be obeyed: "
                "set p_min=0"
            )

    def _read(self, begin: int, n: int, p_min: float) -> tuple[list[int], list[float]]:
        first = begin + self._first_row
        if not self.reads_nextn():
            return super()._read(begin, n, p_min)
        if p_min > 0:
            confidence = self._draft.nextn(self._noise.n)[first : first + n, 0]
            doubtful = (confidence < p_min).nonzero()[0]
            n = int(doubtful[0]) if len(doubtful) else n
        if not n:
            return [], []
        return self._sampler.rows(self._draft.logits()[first : first + n])
