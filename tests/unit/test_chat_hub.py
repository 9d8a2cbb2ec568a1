"""pyspec.hub against a cache folder made here; the network is never used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pyspec.errors import ConfigError, ModelLoadError, UnsupportedError
from pyspec.hub import download

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_cache(folder: Path, repo_id: str, files: dict[str, bytes]) -> None:
    base = folder / f"models--{repo_id.replace('/', '--')}"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text(COMMIT)
    for name, data in files.items():
        path = base / "snapshots" / COMMIT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    pytest.importorskip("huggingface_hub")
    write_cache(
        tmp_path,
        "someone/tiny-GGUF",
        {
            "tiny-f16.gguf": b"f16",
            "tiny-Q8_0.gguf": b"q8",
            "README.md": b"text",
            "big/big-Q4_0-00001-of-00002.gguf": b"part 1",
            "big/big-Q4_0-00002-of-00002.gguf": b"part 2",
            "torn-00001-of-00002.gguf": b"part 1 of a file whose part 2 was never fetched",
        },
    )
    return tmp_path


def get(cache: Path, filename: str, repo_id: str = "someone/tiny-GGUF") -> Path:
    return download(repo_id, filename, cache_dir=cache, local_files_only=True)


def test_exact_name(cache: Path) -> None:
    assert get(cache, "tiny-f16.gguf").read_bytes() == b"f16"


@pytest.mark.parametrize("pattern", ["*q8_0.gguf", "*Q8*", "tiny-[q]*"])
def test_pattern_ignores_case(cache: Path, pattern: str) -> None:
    assert get(cache, pattern).read_bytes() == b"q8"


@pytest.mark.parametrize("name", ["big/big-Q4_0-00001-of-00002.gguf", "big/big-Q4_0-00002-of-00002.gguf", "*q4_0*"])
def test_split_file_gives_the_first_part(cache: Path, name: str) -> None:
    assert get(cache, name).read_bytes() == b"part 1"


def test_split_file_with_a_missing_part(cache: Path) -> None:
    with pytest.raises(ModelLoadError, match="torn-00001-of-00002"):
        get(cache, "torn-00001-of-00002.gguf")


def test_pattern_that_fits_two(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"fits 2 files of 'someone/tiny-GGUF': tiny-Q8_0.gguf, tiny-f16.gguf"):
        get(cache, "tiny*")


def test_pattern_that_fits_none_names_what_there_is(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"fits no file .*tiny-f16\.gguf") as e:
        get(cache, "*q2_k*")
    assert "README" not in str(e.value)
    assert "00002-of" not in str(e.value)


@pytest.mark.parametrize("filename", ["absent.gguf", "*absent*"])
def test_repository_not_in_the_cache(cache: Path, filename: str) -> None:
    with pytest.raises(ModelLoadError, match="someone/other") as e:
        get(cache, filename, "someone/other")
    assert "\n" not in str(e.value)
    assert isinstance(e.value, OSError)


def test_file_not_in_the_cache(cache: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"absent\.gguf"):
        get(cache, "absent.gguf")


def test_malformed_repo_id(cache: Path) -> None:
    with pytest.raises(ModelLoadError, match="a/b/c"):
        get(cache, "x.gguf", "a/b/c")


def test_unreachable_hub_falls_back_to_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> list[str]:
        raise ConnectionError("no route")

    def from_cache(repo_id: str, filename: str, **options: object) -> str:
        return real(repo_id, filename, **{**options, "local_files_only": True})

    real = huggingface_hub.hf_hub_download
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", unreachable)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", from_cache)
    assert download("someone/tiny-GGUF", "*f16*", cache_dir=cache).read_bytes() == b"f16"
    with pytest.raises(ModelLoadError, match="no route"):
        download("someone/other", "*f16*", cache_dir=cache)


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'pyspec-llm\[hub\]'"):
        download("someone/tiny-GGUF", "tiny-f16.gguf")
