"""The tiny models are the ones their published figures were measured with."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from tinymodels import MODELS, build, parse  # noqa: E402

#: The files as first made, seed 1: sha256; sha256 of all before the tensor data; weighted sum of the tensor data.
ORIGINAL = {
    "target-llama": (
        "1d288b41825965eff49a4ba39cb1938809b9e70bd70a72f3a8fb3038bb1a223c",
        "08df26927c7ed2c78d1603fef1e282f84818dc4f16f9f7daa27b82efdb31a1f7",
        -238.686734,
    ),
    "draft-llama-half": (
        "f0f8adaca5148511991f0b4288f58efc7642766cb30de1352d459565008cb8e2",
        "ea0b5df34e74e6f2722c1ae85f1178a6e74579d96394d666687eea33d970455b",
        -248.725233,
    ),
    "draft-badvocab-text": (
        "45fa8c507b15053cc2bdb26379e8e06d41bc0978bfb9ff9433b1bec726a057da",
        "4cd5ddd0711719b44c8e74c6fcf389bac32f3207caa7c73b43e3373a39449292",
        -244.311016,
    ),
    "target-swa": (
        "e696ccb68bf3a2840751161433fdb337721be55f9b1921b4f057f0d08aea4142",
        "d709d34898886f0fe97eb989fb81aaefc02026b462b20f8b137df18b5f0a5e5a",
        -73.994325,
    ),
    "eagle3-d2t": (
        "c8b215a52df54cd552869642c0a5f2f807ae292d089460b7dac9e5abb853630a",
        "2d61f9dd1c00d3056a46e95145c5745eade2062a2abb8718aad5f64018294e26",
        -445.699389,
    ),
    "dflash2": (
        "d66007c0729437e13201671b870e02779ecd557cfaa499d5104caa4f0f3e2d17",
        "93cafb9ed394145d4648b4698a0fc17d805d5b826bf7602d28e61b2a6836cace",
        -39.103479,
    ),
    "dspark-half": (
        "9a7b9fdbfff282979b53f24269317030eafb26267cbdb174624079f0a4de4330",
        "2033ee13116284812f38d75ea3119d6dab5ca5314ba60177d5feb8fe1101a3a1",
        -260.048366,
    ),
    "target-mtp-chain": (
        "f88e993cee867895b8419abb745ebbfe3e0d838db5ce5125327966433b81a058",
        "9fbe1cd4de2f25b1ba28cf7822d162c424bd92aaeb0cde8b52fa4e269ec8a1f4",
        -289.472156,
    ),
    "target-hybrid": (
        "409231adc86bb6762574f411e8ceaccb9500b31bdc9b7c78ed45f6de307738cf",
        "4cc1629234f36b44bc03f721e0d0b99c9bcd207888e774287396318c6356be75",
        -219.759282,
    ),
    "target-recurrent": (
        "4b01cf31b2d65cad0aabae9ba5233ae327bdf894ccfa9dba3a2118045c97f2c8",
        "0829a248c8efd59ea5a345a6552aa3b8d13ac015478088908ef203a32216a74c",
        -283.312558,
    ),
    "target-llama-spm": (
        "f3ad96eb396eb9032daaffe432a6a140eb95549a6ad06bcc3e4596266bba66ae",
        "eee08682cf3ba5106547ce28d82a0418a1caf0b131f559d12652fa33552e244e",
        -245.031808,
    ),
}


@pytest.mark.parametrize("name", ORIGINAL)
def test_same_file_as_the_original_tool(name: str, tmp_path: Path) -> None:
    """Same bytes. Another CPU may round a sine differently; then all but the last digits of the weights is the same."""
    whole, head, weighted = ORIGINAL[name]
    data = build(name, tmp_path / f"{name}.gguf").read_bytes()
    if hashlib.sha256(data).hexdigest() == whole:
        return
    reader = gguf.GGUFReader(tmp_path / f"{name}.gguf")
    assert hashlib.sha256(data[: reader.data_offset]).hexdigest() == head
    found = 0.0
    for tensor in reader.tensors:
        flat = np.asarray(tensor.data).astype(np.float64).ravel()
        found += float((flat * np.cos(np.arange(flat.size))).sum())
    assert found == pytest.approx(weighted, abs=1e-4)


def test_seed_and_parameters_change_the_file(tmp_path: Path) -> None:
    files = [
        build("draft-llama", tmp_path / f"{i}" / "m.gguf", **params).read_bytes()
        for i, params in enumerate([{}, {"seed": 2}, {"agreement": 0.5}, {"layers": 1}])
        if not (tmp_path / f"{i}").mkdir()
    ]
    assert len(set(files)) == len(files)


def test_every_model_can_be_named() -> None:
    assert len(MODELS) == 61
    for name in MODELS:
        assert parse(name)[0] == name
    assert parse("draft-llama:agreement=0.5,layers=1") == (
        "draft-llama",
        {"agreement": 0.5, "layers": 1},
        "draft-llama_agreement=0.5_layers=1",
    )
    with pytest.raises(SystemExit, match="unknown model"):
        parse("target-none")


def test_fixture_makes_a_file_once(tiny) -> None:
    path = Path(tiny("draft-llama", agreement=0.5))
    before = path.stat().st_mtime_ns
    assert tiny("draft-llama", agreement=0.5) == str(path)
    assert path.stat().st_mtime_ns == before
    assert tiny("draft-llama") != str(path)
