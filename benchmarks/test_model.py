"""Real models: passes by rows, prompts, plain decoding, and each drafter on the same text.

    pytest benchmarks/test_model.py --benchmark-enable

Needs ``python examples/get_models.py smollm2`` (and ``gemma3``); what is missing is skipped with the reason. Threads:
``PYSPEC_BENCH_THREADS``, else the CPUs of the process when timing, and one when everything runs once as a test.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspec.backends._llama", reason="the native extension is not built")

import pyspec
from pyspec.config import usable_n_threads
from pyspec.measure import file_sha256
from pyspec.runtime import ALL, Batch, Context, Model

ROOT = Path(__file__).resolve().parents[1]
EAGLE3 = ROOT / "examples" / "data" / "smollm2-135m-eagle3.gguf"
MODELS = {
    "smollm2": ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3": ROOT / "models" / "gemma-3-270m.Q4_K_M.gguf",
}
PROMPT = (
    "<|im_start|>user\nRepeat this list three times, word for word: red, green, blue, yellow, black, white, orange, "
    "purple.<|im_end|>\n<|im_start|>assistant\n"
)
N_OUTPUT = 48

#: name -> (speculation, draft, options)
DRAFTERS: dict[str, tuple[str, Path | None, dict[str, Any]]] = {
    "plain": ("off", None, {}),
    "draft-eagle3": ("draft-eagle3", EAGLE3, {"n_max": 3}),
    "draft-eagle3-p0.6": ("draft-eagle3", EAGLE3, {"n_max": 3, "p_min": 0.6}),
    "ngram-simple": ("ngram-simple", None, {"size_n": 4, "size_m": 8}),
    "ngram-map-k": ("ngram-map-k", None, {"size_n": 4, "size_m": 8}),
    "ngram-map-k4v": ("ngram-map-k4v", None, {"size_n": 4, "size_m": 8}),
    "ngram-mod": ("ngram-mod", None, {"n_match": 16, "mod_n_max": 8, "mod_n_min": 1}),
    "ngram-cache": ("ngram-cache", None, {"n_max": 8}),
    "suffix": ("suffix", None, {"suffix_n_max": 8}),
}


@pytest.fixture(scope="module")
def timing(request: pytest.FixtureRequest) -> bool:
    """Whether times are measured; else everything runs once, as small as it can be."""
    return bool(request.config.getoption("benchmark_enable"))


@pytest.fixture(scope="module")
def n_threads(timing: bool) -> int:
    asked = os.environ.get("PYSPEC_BENCH_THREADS")
    return int(asked) if asked else usable_n_threads(None) if timing else 1


@pytest.fixture(scope="module")
def models() -> Iterator[Callable[[str], Model]]:
    """Models by name, loaded once."""
    loaded: dict[str, Model] = {}

    def get(name: str) -> Model:
        path = MODELS[name]
        if not path.is_file():
            pytest.skip(f"{path.name} is missing: python examples/get_models.py {name}")
        if name not in loaded:
            loaded[name] = Model(path)
        return loaded[name]

    yield get
    for model in loaded.values():
        model.close()


_hashes: dict[Path, str] = {}


def sha256(path: Path) -> str:
    if path not in _hashes:
        _hashes[path] = file_sha256(path)
    return _hashes[path]


def describe(key: dict[str, Any], model: Model, n_threads: int) -> None:
    """Complete a benchmark's key."""
    device = next((d.name for d in pyspec.devices()), None)
    key.update(
        device=device, model=model.path.name, model_sha256=sha256(model.path), quantisation=model.file_type,
        threads=n_threads,
    )  # fmt: skip


@pytest.mark.parametrize("n_rows", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_pass(
    benchmark: Any, key: dict[str, Any], models: Callable[[str], Model], n_threads: int, timing: bool, name: str,
    n_rows: int,
) -> None:  # fmt: skip
    """One pass of the target with so many rows, all of them outputs, after 64 tokens of text."""
    model = models(name)
    describe(key, model, n_threads)
    benchmark.group = f"pass, {name}"
    with Context(model, pyspec.ContextParams(n_ctx=512, n_threads=n_threads)) as context:
        batch = Batch(context.n_batch)
        batch.extend([max(model.vocab.bos, 0)] * 64, 0, 0)
        context.decode(batch)

        def one_pass() -> None:
            batch.clear()
            batch.extend([max(model.vocab.bos, 0)] * n_rows, 64, 0, ALL)
            context.decode(batch)
            assert context.logits().shape == (n_rows, model.n_vocab)
            context.memory.rollback(0, 64, 64 + n_rows)

        benchmark.pedantic(one_pass, rounds=30 if timing else 1, warmup_rounds=2 if timing else 0)


@pytest.mark.parametrize("name", MODELS)
def test_prompt(
    benchmark: Any, key: dict[str, Any], models: Callable[[str], Model], n_threads: int, timing: bool, name: str
) -> None:
    """A prompt of 256 tokens (16 as a test)."""
    model = models(name)
    describe(key, model, n_threads)
    benchmark.group = f"prompt, {name}"
    n = 256 if timing else 16
    with Context(model, pyspec.ContextParams(n_ctx=512, n_threads=n_threads)) as context:
        batch = Batch(context.n_batch)

        def prompt() -> None:
            context.memory.clear(0)
            batch.clear()
            batch.extend([max(model.vocab.bos, 0)] * n, 0, 0)
            context.decode(batch)

        benchmark.pedantic(prompt, rounds=5 if timing else 1, warmup_rounds=int(timing))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_generate(
    benchmark: Any, key: dict[str, Any], models: Callable[[str], Model], n_threads: int, timing: bool, drafter: str
) -> None:
    """The same text by plain decoding and by every drafter.

    What a drafter remembers of earlier outputs would be the answer itself, so each round has contexts of its own.
    """
    model = models("smollm2")
    speculation, draft, options = DRAFTERS[drafter]
    describe(key, model, n_threads)
    limit = next((v for n, v in options.items() if n in ("n_max", "size_m", "mod_n_max", "suffix_n_max")), None)
    key.update(drafter=drafter, draft_sha256=sha256(draft) if draft else None, k=limit)
    benchmark.group = "generate, smollm2"
    n = N_OUTPUT if timing else 8
    llms: list[pyspec.LLM] = []

    def setup() -> tuple[tuple[pyspec.LLM], dict[str, Any]]:
        while llms:
            llms.pop().close()
        llms.append(pyspec.LLM(model, draft, speculation=speculation, n_ctx=512, n_threads=n_threads, **options))
        llms[0].generate("Hello", max_tokens=2)
        return (llms[0],), {}

    results: list[Any] = []

    def generate(llm: pyspec.LLM) -> None:
        results.append(llm.generate(PROMPT, max_tokens=n, ignore_eos=True))

    try:
        benchmark.pedantic(generate, setup=setup, rounds=5 if timing else 1)
    finally:
        while llms:
            llms.pop().close()
    stats = results[-1].stats
    assert len(results[-1].tokens) == n
    assert all(r.tokens == results[0].tokens for r in results)
    times = stats.times
    outside = times.step_us - times.draft_us - times.decode_us - times.process_us
    benchmark.extra_info.update(
        tokens_per_s=stats.tokens_per_s, acceptance_rate=stats.acceptance_rate,
        mean_accepted_length=stats.mean_accepted_length, us_per_step_outside_models=outside / stats.n_pass,
    )  # fmt: skip
    if timing:
        # what pyspec itself adds to a step; known from elsewhere: 20 ms a round that nobody could explain
        assert outside < 0.05 * times.step_us, f"{outside} of {times.step_us} us are neither target nor draft"


@pytest.mark.parametrize("n_seq", [1, 2, 4])
def test_sequences(
    benchmark: Any, key: dict[str, Any], models: Callable[[str], Model], n_threads: int, timing: bool, n_seq: int
) -> None:
    """Several sequences in each pass."""
    model = models("smollm2")
    describe(key, model, n_threads)
    benchmark.group = "sequences, smollm2"
    n = N_OUTPUT if timing else 4
    with pyspec.LLM(model, speculation="off", n_ctx=512, n_seq_max=n_seq, n_threads=n_threads) as llm:
        prompts = [f"{PROMPT}{i}" for i in range(n_seq)]

        def generate() -> None:
            results = llm.generate(prompts, max_tokens=n, ignore_eos=True)
            assert all(len(r.tokens) == n for r in results)

        benchmark.pedantic(generate, rounds=5 if timing else 1, warmup_rounds=int(timing))
