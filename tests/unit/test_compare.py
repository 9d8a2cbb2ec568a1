"""benchmarks/compare.py: medians, keys, threshold, exit code."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"pyspec_benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


compare = load("compare")

KEY = {"commit": "abc", "cpu": "X", "pin": "0c1e57098", "model_sha256": "77", "threads": 2, "drafter": None, "k": None}


def write(path: Path, medians: dict[str, float], **key: Any) -> Path:
    items = [
        {"fullname": name, "stats": {"median": m}, "extra_info": {"key": {**KEY, **key}}} for name, m in medians.items()
    ]
    path.write_text(json.dumps({"benchmarks": items}))
    return path


def run(*arguments: object) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "compare.py"), *map(str, arguments)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_equal_files_pass(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", {"x": 1e-3, "y": 2.0})
    b = write(tmp_path / "b.json", {"x": 1e-3, "y": 2.0}, commit="def")
    code, text = run(a, b)
    assert code == 0, text
    assert "base abc; change def" in text
    assert "geometric mean of 2 ratios change / base: 1.000" in text


def test_a_slower_median_fails(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", {"x": 1e-3, "y": 2.0})
    b = write(tmp_path / "b.json", {"x": 1.2e-3, "y": 2.0})
    code, text = run(a, b)
    assert code == 1
    line = next(line for line in text.splitlines() if line.startswith("x"))
    assert "1.200" in line
    assert "SLOWER" in line
    assert run(a, b, "--threshold", "1.25")[0] == 0


@pytest.mark.parametrize("field", ["cpu", "pin", "model_sha256", "threads", "drafter", "k"])
def test_another_key_is_refused(tmp_path: Path, field: str) -> None:
    a = write(tmp_path / "a.json", {"x": 1.0})
    b = write(tmp_path / "b.json", {"x": 1.0}, **{field: "other"})
    code, text = run(a, b)
    assert code == 2
    assert f"{field}: {KEY[field]!r} and 'other'" in text


def test_a_missing_key_field_is_refused(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.json", {"x": 1.0}), write(tmp_path / "b.json", {"x": 1.0}, device="CUDA0")
    code, text = run(a, b)
    assert code == 2
    assert "device: None and 'CUDA0'" in text


def test_only_common_benchmarks_count(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", {"x": 1.0, "gone": 1.0})
    b = write(tmp_path / "b.json", {"x": 1.0, "new": 9.0})
    code, text = run(a, b)
    assert code == 0
    assert "not in all files: gone" in text
    assert "not in all files: new" in text
    c = write(tmp_path / "c.json", {"z": 1.0})
    assert run(a, c)[0] == 2


def test_pairs_give_the_median_ratio(tmp_path: Path) -> None:
    """A machine that halves its speed after the first pair changes nothing."""
    files = []
    for i, (speed, ratio) in enumerate([(1.0, 1.02), (0.5, 1.04), (0.5, 3.0)]):
        files.append(write(tmp_path / f"a{i}.json", {"x": 1.0 / speed}))
        files.append(write(tmp_path / f"b{i}.json", {"x": ratio / speed}))
    code, text = run(*files)
    assert code == 0, text
    assert "1.040  1.020 to 3.000" in text
    assert run(*files[:3])[0] == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ("[]", "not a file of pytest-benchmark"),
        ('{"benchmarks": []}', "holds no benchmark"),
        ('{"benchmarks": [{"fullname": "x", "stats": {"median": 1}}]}', "has no key"),
        ('{"benchmarks": [{"fullname": "x", "stats": {"median": 0}, "extra_info": {"key": {}}}]}', "no usable median"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: str | None, words: str) -> None:
    a, b = write(tmp_path / "a.json", {"x": 1.0}), tmp_path / "b.json"
    if content is not None:
        b.write_text(content)
    code, text = run(a, b)
    assert code == 2
    assert words in text


@pytest.mark.parametrize("threshold", ["0.9", "nan", "inf", "x"])
def test_a_threshold_that_is_none(tmp_path: Path, threshold: str) -> None:
    a = write(tmp_path / "a.json", {"x": 1.0})
    assert run(a, a, "--threshold", threshold)[0] == 2


def test_the_key_of_the_benchmarks_has_what_comparisons_need() -> None:
    """The fields that the design names, in every benchmark's key."""
    conftest = load("conftest")
    wanted = {"commit", "pin", "backend", "device", "cpu", "model_sha256", "quantisation", "threads", "drafter", "k"}
    assert wanted <= set(conftest.machine_key())


def test_options_of_bench_compare() -> None:
    parse = load("bench_compare").parse
    options = parse(["main", "--rounds", "5", "--", "-k", "argmax", "--", "x"])
    assert (options.base, options.rounds, options.pytest) == ("main", 5, ["-k", "argmax", "--", "x"])
    assert parse(["main"]).pytest == []
    with pytest.raises(SystemExit):
        parse(["main", "-k", "argmax"])
    with pytest.raises(SystemExit):
        parse(["main", "--rounds", "0"])
