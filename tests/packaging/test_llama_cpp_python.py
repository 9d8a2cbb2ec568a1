"""llama-cpp-python in the same process, imported first and after: both work, neither uses the other's libraries.

Its libraries have upstream's names, and its binding opens them by path. ``make test-foreign`` installs it, which
compiles llama.cpp; without it these tests are skipped, and ``test_foreign_libraries.py`` stands in.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.native, pytest.mark.packaging]

WHY = "llama-cpp-python is not installed (make test-foreign)"

THEIRS = """
def theirs(path):
    import llama_cpp
    llm = llama_cpp.Llama(path, n_ctx=128, n_threads=1, n_gpu_layers=0, verbose=False, flash_attn=False)
    tokens, out = llm.tokenize(b"a b c d e", add_bos=True, special=True), []
    for token in llm.generate(tokens, temp=0.0, top_k=1, repeat_penalty=1.0):
        out.append(int(token))
        if len(out) == 24:
            break
    llm.close()
    return out
"""

OURS = """
def ours(path):
    import pyspec
    with pyspec.LLM(path, speculation="off", n_ctx=128, n_threads=1, devices=(), flash_attn=False) as llm:
        tokens = llm.tokenize("a b c d e")
        plain = llm.generate(tokens, max_tokens=24, ignore_eos=True).tokens
    with pyspec.LLM(path, path, n_ctx=128, n_threads=1, devices=(), flash_attn=False) as llm:
        result = llm.generate(tokens, max_tokens=24, ignore_eos=True)
        assert result.tokens == plain, (result.tokens, plain)
        assert llm.stats.n_accepted > 0
    return plain
"""

MAPPED = """
def check_mapped():
    import os
    files = {os.path.basename(line.split()[-1]) for line in open("/proc/self/maps") if ".so" in line}
    for name in ("libllama", "libggml", "libggml-base", "libggml-cpu"):
        assert any(f.startswith(name + ".so") for f in files), (name, sorted(files))
        assert any(f.startswith(name.replace("lib", "libpyspec-")) for f in files), (name, sorted(files))
"""

ORDERS = {
    "llama-cpp-python first": "a = theirs(sys.argv[1]); b = ours(sys.argv[1])",
    "pyspec first": "b = ours(sys.argv[1]); a = theirs(sys.argv[1])",
    "in turns": "a = theirs(sys.argv[1]); b = ours(sys.argv[1])\n"
    "assert theirs(sys.argv[1]) == a; assert ours(sys.argv[1]) == b",
}


@pytest.fixture(scope="module")
def llama_cpp() -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip(WHY)


@pytest.mark.parametrize("order", ORDERS)
def test_side_by_side(order: str, llama_cpp: None, tiny: Callable[..., str], run_child: Callable[..., Any]) -> None:
    """The same weights and the same release of llama.cpp, so the same tokens."""
    linux = sys.platform == "linux"
    code = "\n".join(
        [THEIRS, OURS, MAPPED, "import sys", ORDERS[order], "check_mapped()" if linux else "", "assert a == b, (a, b)"]
    )
    out = run_child(code + "\nprint(len(a))", tiny("target-llama"), timeout=240, stderr=None)
    assert out.strip().splitlines()[-1] == "24"
