"""Which drafter a file is made for (headers of the tiny models), and what a target can be used with."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pyspec.config import ModelParams
from pyspec.drafters import registry
from pyspec.drafters.choose import choose, is_mtp_only, kind_of_file, require_kind, usable
from pyspec.drafters.gguf import read_header
from pyspec.errors import ModelLoadError, UnsupportedError

KINDS = {
    "target-llama": "draft-simple",
    "draft-llama": "draft-simple",
    "target-mtp": "draft-simple",
    "target-mtp-chain": "draft-simple",
    "target-recurrent": "draft-simple",
    "eagle3": "draft-eagle3",
    "eagle3-d2t": "draft-eagle3",
    "draft-mtp-only": "draft-mtp",
    "draft-gemma4-assistant": "draft-mtp",
    "dflash": "draft-dflash",
    "dflash2": "draft-dflash",
    "dflash-own": "draft-dflash",
    "dspark": "draft-dspark",
    "dspark-noconf": "draft-dspark",
}


@dataclass
class Model:
    """What choice and checks look at."""

    path: Path = Path("x.gguf")
    architecture: str = "llama"
    n_layer_nextn: int = 0
    params: ModelParams = field(default_factory=ModelParams)


@pytest.mark.parametrize("name", KINDS)
def test_kind_of_file(tiny: Any, name: str) -> None:
    path = tiny(name)
    kind = KINDS[name]
    assert kind_of_file(path) == kind
    draft: Any = Model(Path(path), read_header(path).architecture)
    target: Any = Model()
    assert choose(target, draft) == kind
    require_kind(kind, draft)
    for other in set(KINDS.values()) - {kind}:
        with pytest.raises(UnsupportedError, match=f"is made for {kind}, not for {other}"):
            require_kind(other, draft)


def test_only_files_without_a_trunk_are_mtp_only(tiny: Any) -> None:
    assert [n for n in KINDS if is_mtp_only(read_header(tiny(n)))] == ["draft-mtp-only"]


def test_a_model_with_heads_may_serve_as_mtp_draft(tiny: Any) -> None:
    draft: Any = Model(Path(tiny("target-mtp")), "qwen35", n_layer_nextn=1)
    require_kind("draft-mtp", draft)
    require_kind("draft-simple", draft)


def test_choice_without_a_draft() -> None:
    loaded = ModelParams(load_mtp=True)
    for model, name in [
        (Model(), "suffix"),
        (Model(architecture="qwen35", n_layer_nextn=1), "suffix"),  # the blocks are not in memory
        (Model(architecture="qwen35", n_layer_nextn=1, params=loaded), "draft-mtp"),
        (Model(architecture="qwen35", params=loaded), "suffix"),
        (Model(architecture="step35", n_layer_nextn=3, params=loaded), "draft-mtp"),
        (Model(architecture="gemma4", params=loaded), "suffix"),
    ]:
        target: Any = model
        assert choose(target, None) == name


@pytest.mark.parametrize(
    ("architecture", "nextn", "without"),
    [
        ("llama", 0, {"draft-mtp"}),
        ("qwen35", 1, set()),
        ("qwen35", 0, {"draft-mtp"}),
        ("gemma3", 0, {"draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark"}),
        ("step35", 3, {"draft-eagle3", "draft-dflash", "draft-dspark"}),
        ("gemma4", 0, set()),
        ("mamba", 0, {"draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark"}),
    ],
)
def test_usable(architecture: str, nextn: int, without: set[str]) -> None:
    target: Any = Model(architecture=architecture, n_layer_nextn=nextn)
    found = usable(target)
    assert list(found) == registry.names()
    assert {name for name, reason in found.items() if reason} == without
    assert all(len(reason) > 20 for reason in found.values() if reason)


def test_header(tiny: Any) -> None:
    header = read_header(tiny("eagle3-d2t"))
    assert header.architecture == "eagle3"
    assert header.get("target_layers") is None
    assert header.keys["eagle3.target_layers[]"] == 3
    assert header.keys["tokenizer.ggml.tokens[]"] == 512
    assert header.get("no.such.key", 5) == 5
    assert header.tensors["d2t"] == (300,)
    assert header.tensors["fc.weight"][0] == 3 * header.get("target_hidden_size")


def test_split_files_are_read_as_one(tmp_path: Path, tiny: Any) -> None:
    def part(name: str, tensor: str) -> None:
        key = b"split.count"
        data = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<IH", 2, 2)
        text = tensor.encode()
        data += struct.pack("<Q", len(text)) + text + struct.pack("<IQIQ", 1, 32, 0, 0)
        (tmp_path / name).write_bytes(data)

    part("m-00001-of-00002.gguf", "a")
    part("m-00002-of-00002.gguf", "b")
    assert set(read_header(tmp_path / "m-00001-of-00002.gguf").tensors) == {"a", "b"}
    assert set(read_header(tmp_path / "m-00002-of-00002.gguf").tensors) == {"b"}


def test_files_that_are_no_models(tmp_path: Path, tiny: Any) -> None:
    good = Path(tiny("eagle3")).read_bytes()
    bad = {
        "empty": b"",
        "text": b"this is not a model, just some words in a file" * 10,
        "magic": b"GGUF",
        "version": b"GGUF" + struct.pack("<I", 99) + good[8:],
        "counts": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60),
        "huge-string": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 63) + b"x" * 50,
        "type": b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<Q", 1)
        + b"k"
        + struct.pack("<I", 77)
        + b"x" * 50,
        "array": b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<Q", 1)
        + b"k"
        + struct.pack("<IIQ", 9, 8, 1 << 40)
        + b"x" * 50,
        "dims": b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<I", 9) + b"x" * 90,
        **{f"cut at {n}": good[:n] for n in (5, 20, 100, 1000, 5000)},
    }
    for name, data in bad.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        with pytest.raises(ModelLoadError, match=path.name):
            kind_of_file(path)
    with pytest.raises(ModelLoadError, match="cannot read"):
        kind_of_file(tmp_path / "missing.gguf")
    with pytest.raises(ModelLoadError):
        kind_of_file(tmp_path)
    for no_path in (5, None, b"x.gguf"):
        with pytest.raises(ModelLoadError, match="str or Path"):
            kind_of_file(no_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_damaged_headers_never_do_worse_than_an_error(tmp_path: Path, tiny: Any, seed: int) -> None:
    import random

    rng = random.Random(seed)
    good = Path(tiny("eagle3")).read_bytes()[:30_000]
    path = tmp_path / "damaged.gguf"
    for _ in range(40):
        data = bytearray(good)
        for _ in range(rng.randint(1, 20)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            read_header(path)
        except ModelLoadError:
            continue
