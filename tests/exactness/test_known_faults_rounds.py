"""Known fault B25 of other engines: a fixed cost a round that no counter shows.

Times are of single rounds, and their medians: other work on the machine shows in single rounds only.
"""

from __future__ import annotations

import statistics
from time import perf_counter_ns
from typing import Any

import pytest

import pyspec
from pyspec.drafters.draft_simple import DraftSimple
from pyspec.types import DraftRequest

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]

LENGTHS = (4, 16)
PROMPT = "Rainbows form when"


class Bad(DraftSimple):
    """A draft model at its full cost, whose proposals are nearly always wrong."""

    name = "bad-draft"

    def draft(self, requests: list[DraftRequest]) -> None:
        super().draft(requests)
        for request in requests:
            request.draft[:] = [(token + 1) % self._n_vocab for token in request.draft]


@pytest.fixture(scope="module")
def f16(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("b25") / "f16.gguf"
    pyspec.quantize(smollm2, path, "F16")
    return str(path)


def rounds(llm: pyspec.LLM, n: int) -> tuple[float, float, Any]:
    """Median microseconds of a round, and of what is in none of the calls of the native library; the result."""
    spent = 0

    def timed(call: Any) -> Any:
        def run(*args: Any) -> Any:
            nonlocal spent
            t = perf_counter_ns()
            try:
                return call(*args)
            finally:
                spent += perf_counter_ns() - t

        return run

    assembly = llm._assembly
    assert assembly is not None
    for context in (assembly.target, *assembly.drafts):
        context.handle.decode = timed(context.handle.decode)  # type: ignore[method-assign]
    engine = assembly.engine
    seq = engine.submit(llm.tokenize(PROMPT), pyspec.SamplingParams(max_tokens=n, ignore_eos=True))
    whole, outside = [], []
    while not seq.done:
        spent, t = 0, perf_counter_ns()
        engine.step()
        us = (perf_counter_ns() - t) / 1000
        whole.append(us)
        outside.append(us - spent / 1000)
    # the first rounds evaluate the prompt and reserve graphs, the last drafts are short
    return statistics.median(whole[2:-1]), statistics.median(outside[2:-1]), seq


@pytest.mark.parametrize("draft", ["itself", "bad"])
def test_b25_cost_of_a_round_outside_the_decode_calls(draft: str, f16: str) -> None:
    """Below 5 % of the round, and no larger a share with longer drafts."""
    shares = []
    for k in LENGTHS:
        method: Any = Bad if draft == "bad" else "draft-simple"
        with pyspec.LLM(f16, f16, speculation=method, n_max=k, n_ctx=512, n_threads=1) as llm:
            whole, outside, seq = rounds(llm, 60 if draft == "itself" else 12)
        print(f"{draft}, k={k}: round {whole:.0f} us, outside decode {outside:.0f} us, {outside / whole:.2%}")
        shares.append(outside / whole)
        rate = seq.stats.acceptance_rate
        assert rate > 0.9 if draft == "itself" else rate < 0.1
    assert max(shares) < 0.05
    assert shares[1] < shares[0] + 0.02


def test_b25_the_cut_off_makes_drafts_shorter(f16: str) -> None:
    lengths = []
    for p_min in (0.0, 0.5, 0.95):
        with pyspec.LLM(f16, f16, speculation="draft-simple", n_max=16, n_ctx=512, n_threads=1, p_min=p_min) as llm:
            stats = llm.generate(PROMPT, max_tokens=24, ignore_eos=True).stats
        lengths.append(stats.n_draft / stats.n_pass)
    assert lengths[0] > lengths[1] > lengths[2]


def test_b25_the_stats_show_the_loss(f16: str) -> None:
    """A bad draft costs more than it gives, and the counters say so without a stop-watch."""
    with pyspec.LLM(f16, speculation="off", n_ctx=512, n_threads=1) as llm:
        plain = llm.generate(PROMPT, max_tokens=12, ignore_eos=True).stats
    with pyspec.LLM(f16, f16, speculation=Bad, n_max=4, n_ctx=512, n_threads=1) as llm:
        bad = llm.generate(PROMPT, max_tokens=12, ignore_eos=True).stats
    assert bad.acceptance_rate is not None
    assert bad.acceptance_rate < 0.1
    assert bad.mean_accepted_length is not None
    assert bad.mean_accepted_length < 1.3
    assert bad.times.draft_us > bad.times.decode_us
    assert bad.tokens_per_s is not None
    assert plain.tokens_per_s is not None
    assert bad.tokens_per_s < plain.tokens_per_s
