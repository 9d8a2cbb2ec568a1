"""Pairs of tiny models: what each method accepts on them, and how to run it.

``page`` is the share of drafted tokens that llama.cpp accepts on the pair: llama-server of the pinned release, greedy,
drafts of 3, six prompts of 128 tokens (other prompts than here, so a few hundredths of difference are expected).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

#: Six prompts: words, code, digits, bytes beyond ASCII; of 8 to 70 tokens.
PROMPTS = [
    "The quick brown fox jumps over the lazy dog while",
    "def add(a, b): return a + b\nfor i in range(10):",
    "A computer program is a list of instructions.",
    "Numbers such as 1, 2, 3",
    "It is said that in the beginning",
    "Café, naïve, façade, the river carries the light of the sun through the valley, and the people of the village",
]

#: For all tiny models: one thread; kernels whose result does not depend on the number of rows.
SMALL: dict[str, Any] = {"n_threads": 1, "n_ctx": 512, "flash_attn": False}

# Devices to run on, by name; "CPU": none. ``make test-vulkan`` sets them.
if _name := os.environ.get("PYSPEC_TEST_TARGET"):
    SMALL["devices"] = () if _name == "CPU" else (_name,)
if _name := os.environ.get("PYSPEC_TEST_DRAFT"):
    SMALL["draft_devices"] = () if _name == "CPU" else (_name,)
_DRAFT_DEVICES: tuple[str, ...] = SMALL.get("draft_devices", SMALL.get("devices", ()))


def method_of(tiny: Any, draft: str | None) -> str:
    """The method that a tiny draft is made for; without one, that of the target's own heads."""
    from pyspec.drafters.choose import kind_of_file

    return kind_of_file(tiny(draft)) if draft else "draft-mtp"


def method_for(model: Any, draft: Any = None) -> dict[str, str]:
    """The option ``speculation`` for the one method that files are made for; nothing where they say none."""
    from pyspec.drafters.choose import kind_of_file
    from pyspec.drafters.gguf import read_header
    from pyspec.errors import PyspecError

    try:
        if draft is not None:
            return {"speculation": kind_of_file(draft)}
        return {"speculation": "draft-mtp"} if read_header(model).get("nextn_predict_layers") else {}
    except (PyspecError, TypeError):
        return {}


@dataclass(frozen=True)
class Pair:
    """A target, a draft (None: the target itself) and what to expect.

    Attributes:
        kind: memory of the target. low, high: bounds for accepted / drafted.
    """

    method: str
    kind: str
    target: str
    draft: str | None
    page: float
    draft_params: dict[str, Any] = field(default_factory=dict)
    target_params: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    slack: float = 0.06

    @property
    def id(self) -> str:
        params = "".join(f":{k}={v}" for k, v in (self.target_params | self.draft_params).items())
        return f"{self.method}-{self.target}-{self.draft or 'itself'}{params}"

    def make(self, tiny: Any, make_llm: Any, **options: Any) -> Any:
        """An LLM on this pair with its method alone, as far as ``options`` say nothing else."""
        draft = tiny(self.draft, **self.draft_params) if self.draft else None
        options = {"speculation": self.method} | self.options | options
        return make_llm(tiny(self.target, **self.target_params), draft, **options)

    def is_apart(self, tiny: Any) -> bool:
        """Whether the draft uses its target's output matrix or cache, and has not the target's devices."""
        if self.draft is None or self.method == "draft-simple" or set(SMALL.get("devices", ())) <= set(_DRAFT_DEVICES):
            return False
        from gguf import GGUFReader

        names = {t.name for t in GGUFReader(str(tiny(self.draft, **self.draft_params))).tensors}
        return "output.weight" not in names or self.draft.startswith("draft-gemma4-assistant")


def _pair(method: str, kind: str, target: str, draft: str | None, page: float, **rest: Any) -> Pair:
    return Pair(method, kind, target, draft, page, **rest)


USELESS: dict[str, Any] = {"agreement": 0.0}

#: The matrix of methods and memories: a perfect, a middling and a useless draft each.
MATRIX = [
    _pair("draft-simple", "full", "target-llama", "draft-llama", 0.990),
    _pair("draft-simple", "full", "target-llama", "draft-llama-half", 0.502),
    _pair("draft-simple", "full", "target-llama", "draft-llama-zero", 0.0),
    _pair("draft-simple", "swa", "target-swa", "draft-swa", 0.973),
    _pair("draft-simple", "swa", "target-swa", "draft-swa-half", 0.498),
    _pair("draft-simple", "swa", "target-swa", "draft-swa", 0.0, draft_params=USELESS),
    _pair("draft-simple", "recurrent", "target-recurrent", "draft-recurrent", 0.993),
    _pair("draft-simple", "recurrent", "target-recurrent", "draft-recurrent-half", 0.508),
    _pair("draft-simple", "recurrent", "target-recurrent", "draft-recurrent", 0.0, draft_params=USELESS),
    _pair("draft-simple", "hybrid", "target-hybrid", "target-hybrid", 1.0),
    _pair("draft-eagle3", "full", "target-llama", "eagle3", 0.943),
    _pair("draft-eagle3", "full", "target-llama", "eagle3-half", 0.498),
    _pair("draft-eagle3", "full", "target-llama", "eagle3-zero", 0.0),
    _pair("draft-eagle3", "hybrid", "target-hybrid", "eagle3-hybrid", 0.844),
    _pair("draft-eagle3", "hybrid", "target-hybrid", "eagle3-hybrid", 0.0, draft_params=USELESS),
    _pair("draft-mtp", "hybrid", "target-mtp", None, 0.876),
    _pair("draft-mtp", "hybrid", "target-mtp-half", None, 0.478),
    _pair("draft-mtp", "hybrid", "target-mtp-zero", None, 0.0),
    _pair("draft-mtp", "hybrid", "target-hybrid", "draft-mtp-only", 0.876),
    _pair("draft-mtp", "swa", "target-mtp-dense", None, 0.971),
    _pair("draft-mtp", "swa", "target-mtp-chain", None, 0.967),
    _pair("draft-mtp", "swa", "target-mtp-chain-half", None, 0.528),
    _pair("draft-mtp", "swa", "target-mtp-chain", None, 0.0, target_params=USELESS),
    _pair("draft-mtp", "swa", "target-gemma4", "draft-gemma4-assistant", 0.850),
    _pair("draft-mtp", "swa", "target-gemma4", "draft-gemma4-assistant-half", 0.563),
    _pair("draft-mtp", "swa", "target-gemma4", "draft-gemma4-assistant", 0.0, draft_params=USELESS),
    _pair("draft-dflash", "full", "target-llama-calm", "dflash-calm", 0.857),
    _pair("draft-dflash", "full", "target-llama", "dflash", 0.521),
    _pair("draft-dflash", "full", "target-llama", "dflash-zero", 0.0),
    _pair("draft-dspark", "full", "target-llama-calm", "dspark-calm", 0.889),
    _pair("draft-dspark", "full", "target-llama", "dspark-half", 0.516),
    _pair("draft-dspark", "full", "target-llama", "dspark", 0.0, draft_params=USELESS),
]

#: Other forms of the same methods: own embeddings, reduced draft vocabulary, another width, other vocabularies.
FORMS = [
    _pair("draft-simple", "full", "target-llama", "draft-okvocab-size", 0.990),
    _pair("draft-simple", "full", "target-llama", "draft-okvocab-text", 0.990),
    _pair("draft-simple", "full", "target-llama-spm", "draft-llama-spm", 0.993),
    _pair("draft-simple", "full", "target-llama-eos", "draft-llama-eos", 0.957),
    _pair("draft-eagle3", "full", "target-llama", "eagle3-own", 0.943),
    _pair("draft-eagle3", "full", "target-llama", "eagle3-wide", 0.943),
    _pair("draft-eagle3", "full", "target-llama", "eagle3-options", 0.958),
    _pair("draft-eagle3", "full", "target-llama", "eagle3-d2t", 0.842),
    _pair("draft-mtp", "swa", "target-mtp-chain-fade", None, 0.566),
    _pair("draft-dflash", "full", "target-llama", "dflash-own", 0.521),
    _pair("draft-dflash", "full", "target-llama", "dflash-d2t", 0.477),
    _pair("draft-dflash", "full", "target-llama-calm", "dflash-calm-half", 0.483),
    _pair("draft-dflash", "full", "target-llama", "dflash2", 0.590, slack=0.09),
    _pair("draft-dspark", "full", "target-llama", "dspark", 0.742),
    _pair("draft-dspark", "full", "target-llama", "dspark-own", 0.742),
    _pair("draft-dspark", "full", "target-llama", "dspark-noconf", 0.742),
    _pair("draft-dspark", "full", "target-llama", "dspark-bonus", 0.746),
]

#: One target of every kind of memory, for methods that need no model.
TARGETS = {
    "full": "target-llama",
    "swa": "target-swa",
    "recurrent": "target-recurrent",
    "hybrid": "target-hybrid",
    "swa-shared": "target-gemma4",
    "swa-chain": "target-mtp-chain",
}

#: Methods that need no model, with options small enough for short texts.
LOOKUPS: dict[str, dict[str, Any]] = {
    "ngram-simple": {"size_n": 1, "size_m": 6},
    "ngram-map-k": {"size_n": 2, "size_m": 6},
    "ngram-map-k4v": {"size_n": 2, "size_m": 6},
    "ngram-mod": {"n_match": 2, "mod_n_max": 8, "mod_n_min": 0},
    "suffix": {"suffix_n_max": 6, "suffix_min_match": 1},
}
