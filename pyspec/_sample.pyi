"""Types of the compiled sampler; each is documented in ``_sample.pyx``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_F32 = npt.NDArray[np.float32]
_I32 = npt.NDArray[np.int32]
_U32 = npt.NDArray[np.uint32]

OK: int
NOT_FINITE: int
NOTHING_LEFT: int

PENALTIES: int
DRY: int
TOP_N_SIGMA: int
TOP_K: int
TYPICAL_P: int
TOP_P: int
MIN_P: int
XTC: int
TEMPERATURE: int
DYNATEMP: int
MIROSTAT: int
MIROSTAT2: int

class Scratch:
    def __init__(self, n_vocab: int) -> None: ...
    @property
    def n_vocab(self) -> int: ...

class Sampler:
    def __init__(
        self,
        scratch: Scratch,
        steps: Sequence[tuple[Any, ...]],
        prompt: _I32,
        bias_ids: _I32,
        bias: _F32,
        penalty_last_n: int = ...,
        dry_last_n: int = ...,
        breakers: tuple[_I32, _I32, _I32] | None = None,
    ) -> None: ...
    @property
    def scratch(self) -> Scratch: ...
    @property
    def n(self) -> int: ...
    @property
    def stateful(self) -> bool: ...
    @property
    def mirostat_mu(self) -> float: ...
    def accept(self, token: int) -> None: ...
    def rewind(self, n: int) -> None: ...
    def apply(self, logits: _F32, row: int, mask: _U32 | None = None, u: float = 1.0) -> int: ...
    def draw(self, u: float) -> int: ...
    def prob(self, token: int) -> float: ...
    def overlap(self, a: float, ids: _I32, q: _F32) -> float: ...
    def residual(self, a: float, ids: _I32, q: _F32, u: float) -> int: ...
    def candidates(self) -> tuple[_I32, _F32]: ...

def greedy_tokens(logits: _F32, row0: int, draft: list[int]) -> list[int] | int: ...
def draft_row(
    logits: _F32,
    row: int,
    n_vocab: int,
    temperature: float,
    top_p: float,
    min_p: float,
    u: float,
    ids: _I32,
    probs: _F32,
) -> tuple[int, int, float]: ...
