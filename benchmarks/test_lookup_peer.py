"""Look-ups of pyspec against llama-cpp-python's prompt look-up, on the same histories, in turns.

    pip install --no-deps llama-cpp-python==0.3.36
    pytest benchmarks/test_lookup_peer.py --benchmark-enable --benchmark-only

``LlamaPromptLookupDecoding`` searches the whole text at every step; pyspec keeps an index. It is taken from the file of
the installed package, without the package's native library, which it does not use. Skipped where llama-cpp-python is
not installed; ``PYSPEC_LLAMA_CPP_PYTHON`` names a folder that holds the package ``llama_cpp`` (an unpacked sdist).

Limit: at 128k tokens ours takes at most a fiftieth of the time.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from texts import zipf

from pyspec.config import SpeculationParams
from pyspec.drafters import registry
from pyspec.testing import FakeEvaluator, Rule
from pyspec.types import DraftRequest

Compare = Callable[[Callable[[], object], Callable[[], object], str], "float | None"]

SIZES = (1_024, 8_192, 32_768, 131_072)
N_VOCAB = 20_001
METHODS = ("suffix", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")


def prompt_lookup() -> Any:
    """llama-cpp-python's drafter with its defaults."""
    folder = os.environ.get("PYSPEC_LLAMA_CPP_PYTHON")
    if folder:
        package = Path(folder) / "llama_cpp"
    else:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            pytest.skip("llama-cpp-python is not installed")
        package = Path(spec.origin).parent
    spec = importlib.util.spec_from_file_location("llama_speculative", package / "llama_speculative.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LlamaPromptLookupDecoding()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.benchmark(group="draft")
def test_against_prompt_lookup(compare: Compare, method: str, n: int) -> None:
    """One call of a drafter, everything included, where there is something to propose: the end came three times before,
    and the same followed each time."""
    peer = prompt_lookup()
    # as long as what ngram-map-k4v compares: 12 tokens before, 48 after
    phrase = np.random.default_rng(1).integers(0, N_VOCAB, 80).tolist()
    text = zipf(n)
    for at in (n // 4, n // 2, 3 * n // 4):
        text[at : at + len(phrase)] = phrase
    text += phrase[:30]
    array = np.array(text, np.intc)
    options: dict[str, Any] = {"mod_n_min": 0, "suffix_corpus_max": 0}
    d = registry.get(method)(FakeEvaluator(Rule(), n_batch=8), None, SpeculationParams(**options), 1)
    d.begin(0, text)
    request = DraftRequest(0, len(text) - 1, text[-1], text, 10)

    def draft() -> list[int]:
        request.draft.clear()
        request.probs.clear()
        d.draft([request])
        return request.draft

    assert draft()
    assert len(peer(array))
    ratio = compare(draft, lambda: peer(array), "llama-cpp-python")
    if ratio is not None and n == SIZES[-1]:
        assert ratio >= 50
