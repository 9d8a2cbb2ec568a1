"""``suffix`` and predicted outputs on tiny models: the text of plain decoding, on every kind of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pairs import SMALL, TARGETS

import pyspec

#: Text that repeats, so that there is something to look up.
REPEATING = [
    "for i in range(10): print(i, add(i, 1))\n" * 3,
    "The model predicts the next token from the tokens before it. " * 3,
    "apple trees and stories, apple trees and songs, apple trees and",
]
N = 60


@pytest.fixture(scope="module")
def plain(tiny: Any) -> Any:
    made: dict[str, list[list[int]]] = {}

    def get(target: str) -> list[list[int]]:
        if target not in made:
            with pyspec.LLM(tiny(target), speculation="off", **SMALL) as llm:
                made[target] = [llm.generate(p, max_tokens=N, ignore_eos=True).tokens for p in REPEATING]
        return made[target]

    return get


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("kind", TARGETS)
def test_suffix(kind: str, n_seq: int, tiny: Any, make_llm: Any, plain: Any) -> None:
    target = TARGETS[kind]
    llm = make_llm(tiny(target), speculation="suffix", n_seq_max=n_seq, suffix_min_match=1, suffix_p_min=0.1)
    results = llm.generate(REPEATING, max_tokens=N, ignore_eos=True)
    assert [r.tokens for r in results] == plain(target)
    assert llm.stats.n_draft > 10
    # the same again: every answer is in the corpus, so it takes a few passes
    n_pass = llm.stats.n_pass
    again = llm.generate(REPEATING, max_tokens=N, ignore_eos=True)
    assert [r.tokens for r in again] == plain(target)
    assert llm.stats.n_pass - n_pass < n_pass
    assert llm.stats.drafters[0].n_failed == 0


def test_the_corpus_outlives_contexts(tiny: Any, make_llm: Any, plain: Any) -> None:
    """Contexts for more sequences, and for predictions: what was learned is still there."""
    llm = make_llm(tiny("target-llama"), speculation="suffix")
    for texts, prediction in ((REPEATING[:1], None), (REPEATING[:2], None), (REPEATING[:1], "a b c")):
        results = llm.generate(texts, max_tokens=N, ignore_eos=True, prediction=prediction)
        assert [r.tokens for r in results] == plain("target-llama")[: len(texts)]
        n_pass = results[0].stats.n_pass
        if len(texts) == 2 or prediction:
            assert n_pass <= 6
    assert llm.n_seq_max == 2
    assert llm.speculation == ("prediction", "suffix")


def test_suffix_corpus_file(tiny: Any, make_llm: Any, plain: Any, tmp_path: Path) -> None:
    file = tmp_path / "corpus.bin"
    options = {"speculation": "suffix", "suffix_corpus": str(file)}
    n_pass = []
    for _ in range(2):
        with pyspec.LLM(tiny("target-llama"), **(SMALL | options)) as llm:
            assert llm.generate(REPEATING[0], max_tokens=N, ignore_eos=True).tokens == plain("target-llama")[0]
            n_pass.append(llm.stats.n_pass)
        assert file.exists()
    assert n_pass[1] < n_pass[0] // 2
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(pyspec.DataFileError, match=r"corpus\.bin"):
        make_llm(tiny("target-llama"), **options)


# ---- predicted outputs -------------------------------------------------------------------------


@pytest.mark.parametrize("speculation", ["off", "suffix", ("prediction", "ngram-simple")])
@pytest.mark.parametrize("kind", TARGETS)
def test_prediction(kind: str, speculation: Any, tiny: Any, make_llm: Any, plain: Any) -> None:
    target = TARGETS[kind]
    llm = make_llm(tiny(target), speculation=speculation)
    wanted = plain(target)
    # the right answer with an edit, a wrong one, and none
    predictions = [[*wanted[0][:20], 70, 71, *wanted[0][25:]], "something else", None]
    results = llm.generate(REPEATING, max_tokens=N, ignore_eos=True, prediction=predictions)
    assert [r.tokens for r in results] == wanted
    assert llm.speculation[0] == "prediction"
    assert len([n for n in llm.speculation if n == "prediction"]) == 1
    stats = next(s for s in results[0].stats.drafters if s.name == "prediction")
    assert stats.n_acc_tokens > 15
    assert results[0].stats.n_pass < N * 2 // 3
    assert not [s for s in results[2].stats.drafters if s.name == "prediction"]
    # later requests go without
    assert llm.generate(REPEATING[1], max_tokens=N, ignore_eos=True).tokens == wanted[1]


def test_prediction_in_a_stream_and_beside_one(tiny: Any, make_llm: Any, plain: Any) -> None:
    wanted = plain("target-llama")
    llm = make_llm(tiny("target-llama"), speculation="off")
    running = llm.stream(REPEATING[0], max_tokens=N, ignore_eos=True)
    first = next(running)
    # contexts are made anew only after what runs has ended, which then can still be read
    pieces = list(llm.stream(REPEATING[1], max_tokens=N, ignore_eos=True, prediction=wanted[1]))
    assert [t for p in pieces for t in p.tokens] == wanted[1]
    assert len(pieces) < 12
    rest = list(running)
    assert [*first.tokens, *[t for p in rest for t in p.tokens]] == wanted[0]
    assert rest[-1].result is not None


def test_prediction_text_shared_by_all_prompts(tiny: Any, make_llm: Any, plain: Any) -> None:
    llm = make_llm(tiny("target-llama"), n_ctx=256)
    text = llm.detokenize(plain("target-llama")[1])
    results = llm.generate(REPEATING[1:2] * 2, max_tokens=N, ignore_eos=True, prediction=text * 20)
    assert [r.tokens for r in results] == [plain("target-llama")[1]] * 2
    assert results[0].stats.n_accepted > 15


@pytest.mark.parametrize("prediction", [5, b"text", 1.5, {}, {"a": 1}, [1.5], [True], ["a"], [10**6], [-1], object()])
def test_bad_predictions(prediction: Any, tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama"), speculation="off")
    with pytest.raises(pyspec.ConfigError, match="prediction"):
        llm.generate("a", max_tokens=2, prediction=prediction)
    with pytest.raises(pyspec.ConfigError, match="prediction"):
        llm.stream("a", max_tokens=2, prediction=prediction)
    with pytest.raises(pyspec.ConfigError, match="prediction"):
        llm.generate(["a", "b"], max_tokens=2, prediction=[prediction, None])
    assert llm.speculation == ()
    assert len(llm.generate("a", max_tokens=2, ignore_eos=True).tokens) == 2


@pytest.mark.parametrize("prediction", ["", [], (), None])
def test_empty_predictions_are_none(prediction: Any, tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama"), speculation="off")
    assert len(llm.generate("a", max_tokens=2, ignore_eos=True, prediction=prediction).tokens) == 2
    assert llm.speculation == ()


def test_options_without_room_for_drafts(tiny: Any, make_llm: Any) -> None:
    llm = make_llm(tiny("target-llama"), speculation="off", n_outputs_max=1)
    with pytest.raises(pyspec.ConfigError, match="n_outputs_max"):
        llm.generate("a", max_tokens=2, prediction="b c d")
    assert len(llm.generate("a", max_tokens=2, ignore_eos=True).tokens) == 2


def test_synthetic_acceptance_is_marked(tiny: Any, make_llm: Any, caplog: pytest.LogCaptureFixture) -> None:
    llm = make_llm(tiny("target-llama"), tiny("draft-llama-half"), speculation="draft-simple", n_max=3, synth_len=4.0)
    assert "NOT VALID" in caplog.text
    result = llm.generate(REPEATING[0], max_tokens=N, ignore_eos=True)
    assert not result.valid
    assert result.stats.synthetic
    assert result.stats.n_accepted == result.stats.n_draft
    assert result.stats.n_pass == N // 4
    with pytest.raises(pyspec.ConfigError, match="synth_len"):
        make_llm(tiny("target-llama"), speculation="off", synth_len=2.0)
    plain = make_llm(tiny("target-llama"), speculation="off")
    assert plain.generate("a", max_tokens=2).valid
