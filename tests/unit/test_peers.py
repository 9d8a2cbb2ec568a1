"""benchmarks/peers.py without its peers: ratios, spread, bars, equality of texts, options for llama.cpp tools."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def peers() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("peers")
    finally:
        sys.path.remove(str(BENCHMARKS))


def pair(prompt: str, ours: float, peer: float, same: bool | None = True) -> dict[str, Any]:
    return {
        "prompt": prompt, "pyspec": ours, "peer": peer, "pyspec_whole": ours, "peer_whole": peer, "same": same,
        "drafted": [10, 10], "accepted": [5, 4],
    }  # fmt: skip


def test_a_case_is_the_median_over_pairs_and_the_worst_prompt(peers: Any) -> None:
    pairs = [
        pair("a", 110, 100),
        pair("a", 120, 100),
        pair("a", 500, 100),
        pair("b", 90, 100),
        pair("b", 90, 100, None),
    ]
    s = peers.summarise(pairs)
    assert s["ratio"] == pytest.approx(1.1)
    assert s["worst_prompt"] == pytest.approx(0.9)
    assert (s["p25"], s["p75"]) == (pytest.approx(0.9), pytest.approx(1.2))
    assert (s["n_pairs"], s["n_same"], s["n_compared"]) == (5, 4, 4)
    assert s["drafted"] == [50, 50]
    assert s["accepted"] == [25, 20]


def result(peers: Any, peer: str, case: str, ratio: float) -> dict[str, Any]:
    return {"peer": peer, "case": case, "summary": peers.summarise([pair("a", ratio * 100, 100)] * 2)}


def test_bars_are_about_the_mean_and_the_lowest_case(peers: Any) -> None:
    simple = "llama-speculative-simple"
    good = [result(peers, simple, "x", 1.2), result(peers, simple, "y", 1.0)]
    assert peers.check_bars(good)[0].startswith("met ")
    low = [result(peers, simple, "x", 1.5), result(peers, simple, "y", 0.98)]
    assert peers.check_bars(low)[0].startswith("MISSED")
    server = [result(peers, "llama-server", "plain n_seq=4", 1.05), result(peers, "llama-server", "plain n_seq=1", 9.0)]
    (line,) = peers.check_bars(server)
    assert line.startswith("MISSED")
    assert "geometric mean 1.050" in line


def test_the_table_has_every_result(peers: Any) -> None:
    rows = [result(peers, "llama-bench", "plain", 1.01), result(peers, "xllamacpp", "draft-eagle3", 1.2)]
    text = peers.table(rows)
    assert "| llama-bench | plain | 1.010 |" in text
    assert peers.table([rows[0] | {"flash_attn": False}]).endswith("| off |")
    assert "| xllamacpp | draft-eagle3 | 1.200 |" in text
    assert text.count("\n") == 3


def test_text_is_the_same_if_the_shorter_one_begins_the_longer(peers: Any) -> None:
    def r(*tokens: list[int]) -> Any:
        return peers.Result(1.0, 1.0, tokens=list(tokens))

    assert peers.same_text(r([1, 2, 3]), r([1, 2, 3, 4])) is True
    assert peers.same_text(r([1, 2, 3]), r([1, 9, 3, 4])) is False
    assert peers.same_text(r([1], [2]), r([1], [3])) is False
    assert peers.same_text(r([1]), peers.Result(1.0, 1.0)) is None

    pairs = [
        {**pair("a", 1, 1, None), "tokens": [[1, 2]], "peer_tokens": [], "peer_texts": ["ab and more"]},
        {**pair("a", 1, 1, None), "tokens": [[1, 2]], "peer_tokens": [], "peer_texts": ["ax"]},
        {**pair("a", 1, 1, None), "tokens": [[1, 2]], "peer_tokens": [], "peer_texts": []},
    ]
    peers.settle_texts(pairs, lambda tokens: ["ab"])
    assert [p["same"] for p in pairs] == [True, False, None]
    assert "tokens" not in pairs[0]


def test_options_reach_the_tools_under_their_names(peers: Any) -> None:
    run = sys.modules["peers_run"]
    for case in peers.make_cases(3, 0.6):
        job = run.Job(
            Path("t.gguf"), Path("d.gguf") if case.needs else None, case.drafter, case.options, [[1]], "x", 8, 2, 64
        )
        args = run.common_arguments(job)
        assert args[args.index("-t") + 1] == "2"
        if case.drafter is None:
            assert "--spec-type" not in args
            continue
        assert args[args.index("--spec-type") + 1] == case.drafter
        assert ("-md" in args) == bool(case.needs)
        for name in set(case.options) - {"backend_sampling", "n_max"}:
            assert str(case.options[name]) in args, f"{case.name}: {name} is not handed over"


def test_results_of_another_key_are_not_mixed(peers: Any, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"key": {"commit": "a", "threads": 1}, "results": [{"peer": "p", "case": "c"}]}))
    assert peers.read_report(path, {"commit": "a", "threads": 1}) == [{"peer": "p", "case": "c"}]
    assert peers.read_report(tmp_path / "none.json", {}) == []
    with pytest.raises(peers.setup.SetupError, match="another threads"):
        peers.read_report(path, {"commit": "a", "threads": 2})


def test_cases_can_be_listed_and_chosen(peers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["--list", "--cases", "llama-bench,n_seq=4"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == [
        "llama-bench: plain",
        "llama-server: plain n_seq=4",
        "llama-server: draft-eagle3 p_min=0.6 n_seq=4",
    ]
    assert peers.main(["--cases", "no such case"]) == 2
