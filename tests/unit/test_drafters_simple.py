"""draft-simple: what its cache holds, what it proposes, what it refuses. The draft is a fake that notices mistakes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fakes import N_VOCAB, FakeEvaluator, Rule

from pyspec.config import SamplingParams, SpeculationParams
from pyspec.drafters.draft_simple import DraftSimple
from pyspec.engine import Engine
from pyspec.errors import ConfigError, DecodeFailed
from pyspec.runtime.batch import ALL, LAST, NONE, Batch
from pyspec.types import DraftRequest, RollbackKind

RULE = Rule()
PROMPT = [20, 30, 40, 50, 60]

KINDS: dict[str, dict[str, Any]] = {
    "partial": {"kind": RollbackKind.PARTIAL},
    "full": {"kind": RollbackKind.FULL},
    "full-hybrid": {"kind": RollbackKind.FULL, "hybrid": True},
    "window": {"kind": RollbackKind.PARTIAL, "n_swa": 6, "n_ubatch": 8},
    "none-that-fits": {"kind": RollbackKind.PARTIAL, "n_swa": 2, "n_ubatch": 1},
}


def setup(n_seq: int = 1, target: FakeEvaluator | None = None, **draft: Any) -> tuple[DraftSimple, FakeEvaluator]:
    spec = {k: draft.pop(k) for k in list(draft) if k in SpeculationParams.names()}
    evaluator = FakeEvaluator(draft.pop("rule", RULE), n_seq=n_seq, n_outputs_max=n_seq, **draft)
    target = target or FakeEvaluator(RULE, n_seq=n_seq)
    return DraftSimple(target, evaluator, SpeculationParams(**spec), n_seq), evaluator


def propose(d: DraftSimple, *texts: list[int], n_max: int = 100) -> list[list[int]]:
    requests = [DraftRequest(i, len(t) - 1, t[-1], t, n_max) for i, t in enumerate(texts)]
    d.run_draft(requests)
    for r in requests:
        assert len(r.probs) == len(r.draft)
        assert all(0 < p <= 1 for p in r.probs)
    return [r.draft for r in requests]


@pytest.mark.parametrize("kind", KINDS)
def test_proposals_are_the_drafts_own_greedy_text_whatever_was_accepted(kind: str) -> None:
    """Texts grow by a random part of the draft and something else; the draft's cache has to follow exactly."""
    rng = random.Random(3)
    d, evaluator = setup(n_seq=3, n_max=5, n_batch=16, **KINDS[kind])
    texts = [[*PROMPT], [70], [*range(30, 60)]]
    for i, text in enumerate(texts):
        d.run_begin(i, text)
    for _ in range(40):
        drafts = propose(d, *texts)
        for text, draft in zip(texts, drafts, strict=True):
            assert draft == RULE.generate(text, 5)
            text += draft[: rng.randint(0, 5)]
            text.append(rng.randrange(20, 100))
    assert not evaluator.violations


def test_no_row_is_evaluated_twice_or_for_nothing() -> None:
    d, evaluator = setup(n_max=3, n_batch=64)
    text = [*PROMPT]
    d.run_begin(0, text)
    draft = propose(d, text)[0]
    # the prompt, then the first two proposals; the third is not needed
    assert evaluator.passes == [{0: (0, PROMPT, 1)}, {0: (5, draft[:1], 1)}, {0: (6, draft[1:2], 1)}]
    # all accepted: the third proposal and the token after it are new
    evaluator.passes.clear()
    text += [*draft, 99]
    second = propose(d, text)[0]
    assert evaluator.passes[0] == {0: (7, [draft[2], 99], 1)}
    # the first accepted, the others not
    evaluator.passes.clear()
    text += [second[0], 98]
    third = propose(d, text)[0]
    assert evaluator.passes[0] == {0: (10, [98], 1)}
    # nothing accepted, and the draft's first proposal happens to be what came instead: nothing to evaluate again
    evaluator.passes.clear()
    text += [third[0]]
    propose(d, text)
    assert evaluator.passes[0] == {0: (11, [third[0]], 1)}


def test_asked_twice_without_progress() -> None:
    for kind in KINDS.values():
        d, evaluator = setup(n_max=4, **kind)
        d.run_begin(0, PROMPT)
        assert propose(d, PROMPT) == propose(d, PROMPT) == [RULE.generate(PROMPT, 4)]
        assert not evaluator.violations


def test_rests_while_others_draft() -> None:
    """In a chain: tokens come that this drafter never proposed, several at once."""
    d, evaluator = setup(n_max=2)
    text = [*PROMPT]
    d.run_begin(0, text)
    propose(d, text)
    text += [90, 91, 92, 93, 94, 95]
    evaluator.passes.clear()
    assert propose(d, text) == [RULE.generate(text, 2)]
    assert evaluator.passes[0] == {0: (5, [90, 91, 92, 93, 94, 95], 1)}


def test_long_prompts_are_evaluated_in_batches_shared_by_sequences() -> None:
    d, evaluator = setup(n_seq=3, n_max=2, n_batch=16, n_ubatch=8)
    texts = [[*range(20, 25)], [*range(20, 60)], [*range(40, 49)]]
    for i, text in enumerate(texts):
        d.run_begin(i, text)
    assert propose(d, *texts) == [RULE.generate(t, 2) for t in texts]
    rows = [{seq: len(tokens) for seq, (_, tokens, _) in p.items()} for p in evaluator.passes]
    assert rows[:4] == [{0: 5, 1: 11}, {1: 16}, {1: 13, 2: 3}, {2: 6}]
    assert rows[4] == {0: 1, 1: 1, 2: 1}
    assert len(rows) == 5


def read(d: DraftSimple, tokens: list[int], pos: int, output: int = NONE) -> None:
    """The target has evaluated a chunk of a prompt."""
    batch = Batch(64)
    batch.extend(tokens, pos, 0, output)
    d.run_process(batch)


def test_a_prompt_is_read_with_the_target_chunk_by_chunk() -> None:
    d, evaluator = setup(n_max=2, n_batch=8)
    text = [*range(20, 45)]
    d.run_begin(0, text)
    read(d, text[:10], 0)
    assert evaluator.passes == [{0: (0, text[:8], 0)}, {0: (8, text[8:10], 0)}]
    read(d, text[10:24], 10, LAST)
    evaluator.passes.clear()
    assert propose(d, text) == [RULE.generate(text, 2)]
    assert evaluator.passes[0] == {0: (24, text[24:], 1)}, "the token that came with the prompt, alone"
    assert not evaluator.violations


def test_what_cannot_be_read_in_time_is_read_later() -> None:
    text = [*range(20, 45)]
    for case in ("rests", "verified", "gap", "context", "unknown token"):
        options: dict[str, Any] = {"n_ctx_seq": 20} if case == "context" else {}
        if case == "unknown token":
            options["rule"] = Rule(n_vocab=40)
        d, evaluator = setup(n_max=2, **options)
        d.run_begin(0, text)
        d.rest(0, case == "rests")
        batch = Batch(64)
        batch.extend(text[:24], 3 if case == "gap" else 0, 0, ALL if case == "verified" else NONE)
        d.run_process(batch)
        assert evaluator.passes == [], case
        expected = [] if case in ("context", "unknown token") else RULE.generate(text, 2)
        assert propose(d, text) == [expected], case
        assert not evaluator.violations


def test_a_prompt_that_cannot_be_read_leaves_nothing_behind() -> None:
    calls = []

    def fail(evaluator: FakeEvaluator, batch: Any) -> None:
        calls.append(batch.n)
        if len(calls) == 2:
            raise DecodeFailed("broken", func="decode", state="partial")

    d, evaluator = setup(n_max=3, n_batch=4, before_decode=fail)
    text = [*range(20, 30)]
    d.run_begin(0, text)
    with pytest.raises(DecodeFailed):
        read(d, text[:9], 0)
    assert propose(d, text) == [RULE.generate(text, 3)]
    assert not evaluator.violations


def test_n_max_of_request_drafter_and_context() -> None:
    d, _ = setup(n_max=3)
    d.run_begin(0, PROMPT)
    assert len(propose(d, PROMPT)[0]) == 3
    assert len(propose(d, PROMPT, n_max=1)[0]) == 1


def test_draft_context_smaller_than_the_text() -> None:
    """B05: drafting stops cleanly; the last drafts are as long as fits."""
    d, evaluator = setup(n_max=4, n_ctx_seq=9)
    text = [*PROMPT]
    d.run_begin(0, text)
    lengths = []
    for _ in range(8):
        draft = propose(d, text)[0]
        assert draft == RULE.generate(text, len(draft))
        lengths.append(len(draft))
        text.append(99)
    # positions 0 to 8: a text of n tokens leaves room for 9 - n rows, and one more proposal
    assert lengths == [4, 4, 3, 2, 1, 0, 0, 0]
    assert not evaluator.violations
    # a new generation fits again
    d.end(0)
    d.run_begin(0, PROMPT)
    assert len(propose(d, PROMPT)[0]) == 4


def test_prompt_longer_than_the_draft_context() -> None:
    d, evaluator = setup(n_max=4, n_ctx_seq=3)
    d.run_begin(0, PROMPT)
    assert propose(d, PROMPT) == [[]]
    assert evaluator.n_decode == 0


def test_p_min_stops_at_the_first_unlikely_token() -> None:
    d, _ = setup(n_max=8)
    d.run_begin(0, PROMPT)
    request = DraftRequest(0, 4, PROMPT[-1], PROMPT, 8)
    d.run_draft([request])
    probs = request.probs
    p_min = sorted(probs)[3]
    n = next((i for i, p in enumerate(probs) if p < p_min), 8)
    assert 0 <= n < 8
    d, _ = setup(n_max=8, p_min=p_min)
    d.run_begin(0, PROMPT)
    assert propose(d, PROMPT) == [request.draft[:n]]
    d, _ = setup(n_max=8, p_min=1.0)
    d.run_begin(0, PROMPT)
    assert propose(d, PROMPT) == [[]]


def test_n_min_drops_short_drafts() -> None:
    d, evaluator = setup(n_max=4, n_min=3)
    text = [*PROMPT]
    d.run_begin(0, text)
    assert len(propose(d, text)[0]) == 4
    assert propose(d, text, n_max=2) == [[]]
    # what was evaluated for the dropped draft does not harm the next
    text += [99]
    assert propose(d, text) == [RULE.generate(text, 4)]
    assert not evaluator.violations


def test_ids_that_the_target_lacks_end_the_draft() -> None:
    rule = Rule(n_vocab=N_VOCAB + 8)
    rule.script(PROMPT, [33, N_VOCAB + 3, 35])
    d, _ = setup(rule=rule, n_max=4)
    d.run_begin(0, PROMPT)
    assert propose(d, PROMPT) == [[33]]
    rule.script(PROMPT, [N_VOCAB, 33])
    assert propose(d, PROMPT) == [[]]


def test_tokens_that_the_draft_lacks_end_drafting_for_the_sequence() -> None:
    target = FakeEvaluator(Rule(n_vocab=N_VOCAB + 8), n_seq=2)
    d, evaluator = setup(n_seq=2, n_max=2, target=target)
    texts = [[*PROMPT], [*PROMPT]]
    for i in range(2):
        d.run_begin(i, texts[i])
    texts[0] += [N_VOCAB + 5, 60]
    assert propose(d, *texts) == [[], RULE.generate(PROMPT, 2)]
    assert not evaluator.violations
    d.run_begin(0, PROMPT)
    assert propose(d, PROMPT) == [RULE.generate(PROMPT, 2)]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_failure_goes_through_and_leaves_nothing_behind(at: int) -> None:
    calls = [0]

    def fail(evaluator: FakeEvaluator, batch: Any) -> None:
        calls[0] += 1
        if calls[0] == at + 1:
            raise DecodeFailed("broken", func="decode", state="partial")

    d, evaluator = setup(n_seq=2, n_max=3, before_decode=fail)
    texts = [[*PROMPT], [70, 71]]
    for i, text in enumerate(texts):
        d.run_begin(i, text)
    with pytest.raises(DecodeFailed):
        propose(d, *texts)
    assert propose(d, *texts) == [RULE.generate(t, 3) for t in texts]
    assert not evaluator.violations


def test_wrong_setup() -> None:
    target = FakeEvaluator(RULE, n_seq=2)
    with pytest.raises(ConfigError, match="needs a draft model"):
        DraftSimple(target, None, SpeculationParams(), 2)
    with pytest.raises(ConfigError, match=r"n_seq_max=3 .* 2"):
        DraftSimple(target, FakeEvaluator(RULE, n_seq=3), SpeculationParams(), 2)
    with pytest.raises(ConfigError, match="needs a draft model"):
        DraftSimple.plan(None, None, SpeculationParams(), 1)  # type: ignore[arg-type]


def test_setup_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="pyspec"):
        setup(n_max=5, n_min=2, p_min=0.25)
    assert "n_max=5, n_min=2, p_min=0.25" in caplog.text
    for word in ("gpu_layers=", "cache_k=", "cache_v=", "devices=[default]"):
        assert word in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target_kind", ["partial", "full"])
@pytest.mark.parametrize("draft_rule", ["same", "other"])
def test_with_the_engine(kind: str, target_kind: str, draft_rule: str) -> None:
    """Output is the target's; a draft of the same rule is accepted always."""
    target = FakeEvaluator(RULE, n_seq=3, **KINDS[target_kind])
    d, evaluator = setup(
        3, target, n_max=4, n_batch=32, rule=RULE if draft_rule == "same" else Rule(seed=5), **KINDS[kind]
    )
    engine = Engine(target, [d])
    prompts = [PROMPT, [33], [*range(30, 77)], [44, 45], [80] * 9]
    seqs = [engine.submit(p, SamplingParams(max_tokens=30 + i)) for i, p in enumerate(prompts)]
    while engine.step():
        pass
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert seq.output == RULE.generate(prompt, seq.params.max_tokens or 0)
    assert not evaluator.violations
    assert not target.violations
    assert d.stats.n_failed == 0
    rate = d.stats.acceptance_rate
    assert rate is not None
    assert rate == 1.0 if draft_rule == "same" else rate < 0.2
    engine.close()
