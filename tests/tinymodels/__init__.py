"""Tiny GGUF models for offline tests of speculative decoding.

    python -m tests.tinymodels OUTDIR [NAME[:key=value,...]...]
    python -m tests.tinymodels --list

``build(name, path, **parameters)`` writes one. Only numpy and gguf are needed. The same seed gives the same files.
Nothing is trained: every weight is computed.

How the models work: all models of one seed share one vocabulary and one next-token rule.

* Every token has an embedding that is almost orthogonal to the others. The "clean" tokens (those that are valid UTF-8
  on their own) are arranged in closed orbits; the head maps the embedding of a token to its successor on the orbit,
  and, a little more weakly, to a token of another orbit (a "jump").
* Attention (or a recurrent layer) writes a context code into dimensions of its own. The code takes part in the race
  between successor and jump, so the output depends on the context: a stale cache cell, a wrong position or a wrong
  hidden-state row changes what is generated.
* The code has two parts. The *near* part is a projection of the previous token; a draft takes it from the target's
  hidden states, and needs the right rows for that. The *far* part comes from content-based attention over the whole
  context; a draft must compute it from its own cache.
* ``agreement=p`` exchanges the head rows of a share 1-p of the tokens among each other, so the draft misses whenever
  the target picks one of these. With drafts of n tokens the accepted share is then about (p + p^2 + ... + p^n)/n.
* ``wander`` (default 1) says how much the context decides; with 0.7 jumps are rare, and drafts that know little of the
  context are nearly always right.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from . import dflash, eagle3, llama, lora, mtp, recurrent  # noqa: F401 (registers the models)
from .blocks import MODELS

__all__ = ["MODELS", "build", "parse"]


def build(name: str, path: str | Path, seed: int = 1, **parameters: Any) -> Path:
    """Write one model; ``parameters`` are those of its builder. The file's stem becomes ``general.name``."""
    fn, fixed = MODELS[name]
    fn(path, seed, **(fixed | parameters))
    return Path(path)


def parse(spec: str) -> tuple[str, dict[str, Any], str]:
    """'name:key=value,...' -> name, parameters, file stem."""
    name, _, rest = spec.partition(":")
    if name not in MODELS:
        raise SystemExit(f"unknown model {name!r}; see --list")
    known = inspect.signature(MODELS[name][0]).parameters
    parameters = {}
    for item in filter(None, rest.split(",")):
        key, _, text = item.partition("=")
        if key not in known or key in ("path", "seed"):
            raise SystemExit(f"{name} has no parameter {key!r}")
        kind = type(known[key].default)
        parameters[key] = text.lower() in ("1", "true") if kind is bool else kind(text)
    return name, parameters, spec.replace(":", "_").replace(",", "_")
