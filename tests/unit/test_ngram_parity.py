"""The n-gram drafters propose what llama.cpp proposes on the same histories.

Recorded by tests/record/record_ngram.py.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEvaluator, Rule

from pyspec.config import SpeculationParams
from pyspec.drafters import registry
from pyspec.drafters.base import Drafter
from pyspec.types import DraftRequest

DATA = json.loads((Path(__file__).resolve().parents[1] / "data" / "ngram" / "drafts.json").read_text(encoding="utf-8"))
Row = tuple[int, int, list[int]]


def case_id(case: dict[str, Any]) -> str:
    options = ",".join(f"{k}={v}" for k, v in case["options"].items())
    return "-".join(
        filter(None, [case["type"], case["mode"], "+".join(case["histories"]), options, case.get("levels")])
    )


def histories(case: dict[str, Any]) -> list[tuple[list[int], int]]:
    return [(DATA["histories"][name]["tokens"], DATA["histories"][name]["n_prompt"]) for name in case["histories"]]


def make(case: dict[str, Any], n_seq: int, **more: Any) -> tuple[Drafter, int]:
    """The drafter and the most tokens a request asks for."""
    options = dict(case["options"])
    n_max = options.pop("n_max", 1000)
    target = FakeEvaluator(Rule(n_vocab=65536, n_rows=1), n_seq=n_seq)
    return registry.get(case["type"])(target, None, SpeculationParams(**options, **more), n_seq), n_max


def decode(drafter: Drafter, sequences: list[tuple[list[int], int]], n_max: int) -> list[Row]:
    """Every draft, made while decoding the tokens behind the prompts."""
    rows: list[Row] = []
    position = [n_prompt for _, n_prompt in sequences]
    for i, (tokens, n_prompt) in enumerate(sequences):
        drafter.run_begin(i, tokens[:n_prompt])
    while True:
        requests = [
            DraftRequest(i, position[i], tokens[position[i]], tokens[: position[i] + 1], n_max)
            for i, (tokens, _) in enumerate(sequences)
            if position[i] < len(tokens)
        ]
        if not requests:
            return rows
        drafter.run_draft(requests)
        for r in requests:
            tokens = sequences[r.seq][0]
            after = tokens[position[r.seq] + 1 :]
            n = next((j for j, t in enumerate(r.draft) if after[j : j + 1] != [t]), len(r.draft))
            rows.append((r.seq, position[r.seq], r.draft))
            drafter.run_accept(r.seq, n, not r.draft, len(r.draft))
            position[r.seq] += 1 + n


def recorded(case: dict[str, Any]) -> list[Row]:
    return [(seq, pos, draft) for seq, pos, draft in case["drafts"]]


SPEC = [c for c in DATA["cases"] if c["mode"] == "spec"]


@pytest.mark.parametrize("case", SPEC, ids=case_id)
def test_same_drafts(case: dict[str, Any]) -> None:
    sequences = histories(case)
    drafter, n_max = make(case, len(sequences))
    rows = decode(drafter, sequences, n_max)
    assert [row for row in rows if row[2]] == recorded(case)
    assert len(rows) == case["n_calls"]


CACHES = [c for c in DATA["cases"] if c["type"] == "ngram-cache"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Lookup caches that llama.cpp has written."""
    folder = tmp_path_factory.mktemp("caches")
    for name, text in DATA["files"].items():
        (folder / name).write_bytes(base64.b64decode(text))
    return {"static": folder / "static.bin", "dynamic": folder / "dynamic.bin"}


@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "token-by-token"])
@pytest.mark.parametrize("case", CACHES, ids=case_id)
def test_same_drafts_from_caches(case: dict[str, Any], at_once: bool, files: dict[str, Path]) -> None:
    """A draft depends on the history alone: not on the steps in which it came."""
    levels = case.get("levels", "")
    more = {f"lookup_cache_{name}": path for name, path in files.items() if levels in (name, "both")}
    ((tokens, n_prompt),) = histories(case)
    drafter, n_max = make(case, 1, **more)
    rows: list[Row] = []
    drafter.run_begin(0, tokens[:n_prompt])
    for position in range(n_prompt, len(tokens)):
        if at_once:
            drafter.run_begin(0, tokens[:1])
        request = DraftRequest(0, position, tokens[position], tokens[: position + 1], n_max)
        drafter.run_draft([request])
        if position % case["every"] == 0 and request.draft:
            rows.append((0, position, request.draft))
    assert rows == recorded(case)


def test_the_record_says_something() -> None:
    """Every method drafts in many cases, and is silent in some."""
    for name in {c["type"] for c in DATA["cases"]}:
        cases = [c for c in DATA["cases"] if c["type"] == name]
        assert sum(len(c["drafts"]) for c in cases) > 100
        assert sum(c["n_calls"] for c in cases) > sum(len(c["drafts"]) for c in cases)
        assert len({str(c["drafts"]) for c in cases}) > len(cases) // 2


@pytest.mark.parametrize("change", ["size_n", "size_m"])
def test_the_check_notices(change: str) -> None:
    """Another option gives other drafts than those recorded."""
    case = next(c for c in SPEC if c["type"] == "ngram-map-k" and c["histories"] == ["phrases"] and not c["options"])
    sequences = histories(case)
    drafter, n_max = make({**case, "options": {change: 11}}, 1)
    check: Callable[[list[Row]], list[Row]] = lambda rows: [r for r in rows if r[2]]  # noqa: E731
    assert check(decode(drafter, sequences, n_max)) != recorded(case)
