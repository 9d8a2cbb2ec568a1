"""Room for output rows, made at once: nothing else of a context changes, and libllama does not make it anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends_kit import context, decode, load

from pyspec.backends._status import drain_log
from pyspec.errors import DecodeAborted, InvalidBatchError, UnsupportedError

PROMPT = [1, 80, 109, 296, 119, 330]
KINDS = {
    "target-llama": {},
    "target-swa": {},
    "target-recurrent": {"n_rs_seq": 4},
    "target-hybrid": {"n_rs_seq": 4},
    "target-mtp": {},
}


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_everything_else_is_as_without(name: str, n_seq: int, tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    """In a new context, and in one that holds something; nothing is logged."""
    options: dict[str, Any] = {"n_seq_max": n_seq, "n_ctx": 256 * n_seq, **KINDS[name]}
    with load(tiny(name)) as m, context(m, **options) as plain, context(m, **options) as c:
        for _ in range(2):
            caplog.clear()
            c.reserve_outputs(33)
            drain_log()
            assert not caplog.records
            assert c.n_outputs == 0
            plain.memory_clear()
            for seq in range(n_seq):
                assert c.seq_pos_max(seq) == -1
                for tokens, at, output in ((PROMPT, 0, 0), ([17], 6, 1), ([5, 401, 33], 7, 1)):
                    decode(c, tokens, at, seq, output)
                    decode(plain, tokens, at, seq, output)
                    assert np.array_equal(c.logits(), plain.logits())
                assert c.seq_rm(seq, 8, -1) == plain.seq_rm(seq, 8, -1)


def test_the_buffer_is_not_made_anew(tiny: Any) -> None:
    """A vocabulary of 512 times 64 rows: the buffer stays where it is."""
    with load(tiny("target-llama")) as m, context(m) as c:
        c.reserve_outputs(64)
        where = set()
        for n in (1, 2, 3, 9, 33, 64):
            c.memory_clear()
            decode(c, n)
            where.add(c.logits().ctypes.data)
        assert len(where) == 1
        c.reserve_outputs(64)
        decode(c, 2)
        assert where == {c.logits().ctypes.data}


def test_what_cannot_be_reserved_is_refused(tiny: Any) -> None:
    with load(tiny("target-llama")) as m, context(m, n_outputs_max=8) as c:
        decode(c, PROMPT)
        for n in (0, -1, 9, 2**31 - 1):
            with pytest.raises(InvalidBatchError):
                c.reserve_outputs(n)
        # a refusal changes nothing
        assert c.seq_pos_max(0) == 5
        c.reserve_outputs(8)
        decode(c, PROMPT)
    with (
        load(tiny("target-llama")) as t,
        load(tiny("eagle3")) as m,
        context(t) as target,
        context(m, target) as c,
        pytest.raises(InvalidBatchError),
    ):
        c.reserve_outputs(4)
    with (
        load(tiny("target-gemma4")) as t,
        load(tiny("draft-gemma4-assistant")) as m,
        context(t) as target,
        context(m, target, ctx_type="mtp") as c,
        pytest.raises(UnsupportedError),
    ):
        c.reserve_outputs(4)


def test_a_request_to_abort_stays(tiny: Any) -> None:
    with load(tiny("target-llama")) as m, context(m) as c:
        c.abort()
        c.reserve_outputs(16)
        with pytest.raises(DecodeAborted):
            decode(c, PROMPT)
        c.abort_clear()
        decode(c, PROMPT)
