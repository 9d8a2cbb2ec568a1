"""What an installed wheel must be able to do, on any CPU that can run numpy.

    python smoke.py TARGET.gguf DRAFT.gguf     tiny models
    python smoke.py                            makes them (needs the package gguf)

Loads the native libraries, generates with a draft model, without a draft model and plainly, compares the three, and
prints one line of JSON about the CPU variant in use. No test framework: this runs wherever the wheel is installed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pyspec
from pyspec import backends


def main(paths: list[str]) -> int:
    if not paths:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        import tinymodels

        folder = Path(tempfile.mkdtemp())
        paths = [str(tinymodels.build(name, folder / f"{name}.gguf")) for name in ("target-llama", "draft-llama")]
    target, draft = paths
    modules = backends.build_info()["modules"]
    loaded = [name for name, module in modules.items() if module["loaded"] and module["backend"] == "cpu"]
    assert len(loaded) == 1, modules
    best = max(module["score"] or 0 for module in modules.values() if module["backend"] == "cpu")
    assert modules[loaded[0]]["score"] == best, modules
    options = {"n_threads": 1, "n_ctx": 256}
    outputs = {}
    for name, more in {
        "plain": {"speculation": "off"},
        "draft-simple": {"draft": draft},
        "ngram-mod": {"speculation": "ngram-mod"},
    }.items():
        with pyspec.LLM(target, **options, **more) as llm:
            result = llm.generate("a b c a b c a b c", max_tokens=24)
        outputs[name] = list(result.tokens)
        if name == "draft-simple":
            assert result.stats.n_draft > 0, "nothing was drafted"
    assert outputs["plain"], "nothing was generated"
    assert len({tuple(tokens) for tokens in outputs.values()}) == 1, outputs
    report = {
        "version": pyspec.__version__,
        "file": pyspec.__file__,
        "cpu": loaded[0],
        "score": best,
        "not_loaded": backends.unavailable(),
        "n_tokens": len(outputs["plain"]),
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
