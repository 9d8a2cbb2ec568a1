"""Vocabularies that fit, and the first difference of those that do not."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from pyspec.drafters import compat
from pyspec.drafters.compat import check_token_texts, check_vocab
from pyspec.errors import ConfigError, VocabMismatchError


@dataclass
class Vocab:
    type: int = 2
    add_bos: bool = True
    add_eos: bool = False
    bos: int = 1
    eos: int = 2
    texts: list[bytes] = field(default_factory=lambda: [b"t%d" % i for i in range(300)])

    @property
    def n_tokens(self) -> int:
        return len(self.texts)

    def token_text(self, token: int) -> bytes:
        return self.texts[token]


TARGET = Vocab()
EOS = Vocab(add_eos=True)


def with_text(i: int, text: bytes) -> Vocab:
    texts = list(TARGET.texts)
    texts[i] = text
    return replace(TARGET, texts=texts)


@pytest.mark.parametrize(
    "draft",
    [
        TARGET,
        replace(TARGET, eos=9),  # EOS is not added, so its id does not matter
        *[with_text(i, b"other") for i in range(5)],  # special tokens may be spelled differently
        replace(TARGET, texts=TARGET.texts[:172]),  # 128 fewer
        replace(TARGET, texts=TARGET.texts + [b"x%d" % i for i in range(128)]),  # 128 more
    ],
)
def test_fits(draft: Vocab) -> None:
    check_vocab(TARGET, draft)  # type: ignore[arg-type]
    check_vocab(draft, TARGET)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        (TARGET, replace(TARGET, type=1), "vocabulary types differ: target 2, draft 1"),
        (TARGET, replace(TARGET, add_bos=False), "add_bos differs: target True, draft False"),
        (TARGET, replace(TARGET, bos=7), "the bos token differs: target 1, draft 7"),
        (TARGET, replace(TARGET, add_eos=True), "add_eos differs: target False, draft True"),
        (
            replace(TARGET, add_eos=True),
            replace(TARGET, add_eos=True, eos=8),
            "the eos token differs: target 2, draft 8",
        ),
        (TARGET, replace(TARGET, texts=TARGET.texts[:171]), "sizes differ by 129: target 300, draft 171; at most 128"),
        (TARGET, with_text(5, b"\xffa"), r"token 5 differs: target 't5', draft '\\xffa'"),
        (TARGET, with_text(299, b""), "token 299 differs: target 't299', draft ''"),
        # two differences: the first is named
        (TARGET, replace(with_text(9, b"nine"), bos=7), "the bos token differs"),
    ],
)
def test_first_difference_is_named(target: Vocab, draft: Vocab, message: str) -> None:
    with pytest.raises(VocabMismatchError) as e:
        check_vocab(target, draft)  # type: ignore[arg-type]
    assert message in str(e.value)
    assert isinstance(e.value, ConfigError)


def test_texts_alone() -> None:
    check_token_texts(TARGET, replace(TARGET, bos=7, type=1, add_eos=True))  # type: ignore[arg-type]
    with pytest.raises(VocabMismatchError, match="token 6"):
        check_token_texts(TARGET, with_text(6, b"six"))  # type: ignore[arg-type]


def source_tree() -> Path | None:
    """The vendored upstream sources, if they are here."""
    root = Path(__file__).resolve().parents[2]
    candidates = [os.environ.get("PYSPEC_LLAMA_SRC"), *sorted((root / "vendor" / "ggml").glob("*/"))]
    for candidate in candidates:
        if candidate and (Path(candidate) / "src" / "llama-arch.cpp").is_file():
            return Path(candidate)
    return None


def architectures(tree: Path, marker: str, *, trunk: bool) -> set[str]:
    """Architectures whose graph code holds ``marker``, by reading the sources."""
    src = tree / "src"
    arch_text = (src / "llama-arch.cpp").read_text()
    names = dict(re.findall(r'\{ (LLM_ARCH_\w+),\s+"([^"]+)"', arch_text))
    classes = dict(
        re.findall(r"case (LLM_ARCH_\w+):\s+return new (llama_model_\w+)\(", (src / "llama-model.cpp").read_text())
    )
    header = (src / "models" / "models.h").read_text()
    parents: dict[str, str] = {}
    for body in re.split(r"\n(?=struct llama_model_)", header):
        head = re.match(r"struct (llama_model_\w+) : public (llama_model_\w+)", body)
        graph = re.search(r"using graph = (llama_model_\w+)::graph", body)
        if head and graph:
            parents[head[1]] = graph[1]
        elif head and head[2] != "llama_model_base" and not re.search(r"struct graph\b", body):
            parents[head[1]] = head[2]
    with_marker = set()
    for path in (src / "models").glob("*.cpp"):
        # a function's body belongs to the constructor named last before it
        owner = ""
        for line in path.read_text().splitlines():
            start = re.match(r"(llama_model_\w+)::(graph\w*)(?:<\w+>)?::graph", line)
            if start:
                owner = "" if trunk and start[2] != "graph" else start[1]
            if owner and marker in line:
                with_marker.add(owner)
    found = set()
    for arch, cls in classes.items():
        if cls in with_marker or parents.get(cls) in with_marker:
            found.add(names[arch])
    return found


@pytest.mark.parametrize(
    ("listed", "marker"),
    [
        (compat.LAYER_INPUT_ARCHITECTURES, "t_layer_inp[il] ="),
        (compat.HIDDEN_ROW_ARCHITECTURES, "t_h_nextn ="),
    ],
    ids=["layer inputs", "hidden rows"],
)
def test_lists_of_architectures_are_those_of_the_pinned_tree(listed: frozenset[str], marker: str) -> None:
    tree = source_tree()
    if tree is None:
        pytest.skip("the vendored sources are not here (python vendor/ggml/sync.py, or PYSPEC_LLAMA_SRC)")
    found = architectures(tree, marker, trunk=True) - {"eagle3", "dflash", "gemma4-assistant"}
    assert found == listed
