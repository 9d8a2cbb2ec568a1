"""Types of the compiled kernels; each is documented in ``_core.pyx``."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_F32 = npt.NDArray[np.float32]
_F64 = npt.NDArray[np.float64]
_I8 = npt.NDArray[np.int8]
_I32 = npt.NDArray[np.int32]

def fill_batch(
    tokens: _I32,
    pos: _I32,
    seq: _I32,
    output: _I8,
    start: int,
    new_tokens: _I32,
    pos0: int,
    seq_id: int,
    output_mode: int,
) -> int: ...
def fill_rows(
    tokens: _I32,
    pos: _I32,
    seq: _I32,
    output: _I8,
    last_tokens: _I32,
    drafts: _I32,
    n_draft: _I32,
    pos0: _I32,
    seq_ids: _I32,
) -> int: ...
def interleave_rows(dst: _F32, src: Sequence[_F32], n: int) -> None: ...
def shift_rows(dst: _F32, src: _F32, carry: _F32, n: int) -> None: ...
def gather_rows(dst: _F32, src: _F32, idx: _I32) -> None: ...
def argmax_rows(logits: _F32, out: _I32) -> None: ...
def topk_softmax_rows(logits: _F32, ids: _I32, probs: _F32) -> None: ...
def verify_greedy(logits: _F32, row0: int, draft: _I32, out: _I32) -> int: ...
def logsumexp_rows(logits: _F32, out: _F64) -> None: ...
def logprob_rows(logits: _F32, ids: _I32, out: _F64) -> None: ...
def top_logprob_rows(logits: _F32, ids: _I32, out: _F64, top_ids: _I32, top: _F64) -> None: ...
def sample_row(
    logits: _F32,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    u: float,
    scratch_ids: _I32,
    scratch_p: _F32,
) -> int: ...
def philox_uniform(seed: int, seq: int, pos: int) -> float: ...
