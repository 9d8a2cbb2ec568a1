"""Model files: bad ones give a typed error and leave nothing behind; facts and vocabulary of good ones."""

from __future__ import annotations

import os
import random
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from backends_kit import caught, load

from pyspec import backends
from pyspec.backends import ModelHandle
from pyspec.config import ModelParams
from pyspec.errors import ClosedError, ConfigError, ModelLoadError


def n_files() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


@pytest.fixture
def refused(tmp_path: Path):
    """Write a file, expect ModelLoadError, give its message; no file stays open."""

    def check(data: bytes | None, name: str = "bad.gguf", **options) -> str:
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        backends.load()
        before = n_files()
        with pytest.raises(ModelLoadError) as caught_error:
            load(str(path), **options)
        assert n_files() == before
        assert str(path.name) in str(caught_error.value)
        return str(caught_error.value)

    return check


@pytest.fixture(scope="module")
def good(tiny) -> bytes:
    return Path(tiny("target-llama")).read_bytes()


def test_missing_file(refused):
    assert "No such file" in refused(None)


def test_directory(tmp_path):
    with pytest.raises(ModelLoadError, match="is a directory"):
        load(str(tmp_path))


def test_empty_text_and_header_only(refused, good):
    assert "is empty" in refused(b"")
    assert "not a GGUF file (it starts with b'Once')" in refused(b"Once upon a time")
    assert "cut short: 8 bytes" in refused(good[:8])


@pytest.mark.parametrize("version", [0, 1, 4, 0x03000000])
def test_wrong_version(refused, good, version):
    text = refused(good[:4] + struct.pack("<I", version) + good[8:])
    assert ("other byte order" if version & 0xFFFF == 0 else f"has version {version}") in text


@pytest.mark.parametrize("share", [24, 1024, 0.5, -1])
def test_truncated(refused, good, share):
    """In the header, in the metadata, in the tensors, by one byte. The native log says where."""
    size = int(len(good) * share) if isinstance(share, float) else share if share > 0 else len(good) + share
    text = refused(good[:size])
    assert "native log" in text
    if size > len(good) // 3:
        assert "not within the file bounds" in text


def test_zero_length_key(refused):
    kv = struct.pack("<Q", 0) + struct.pack("<I", 8) + struct.pack("<Q", 1) + b"a"
    assert "key 0 is empty" in refused(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + kv)


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_after_the_magic(run_child, tmp_path, seed):
    """In a child: some of them once ended the process."""
    rng = random.Random(seed)
    for i in range(15):
        head = struct.pack("<IQQ", 3, rng.randrange(4), rng.randrange(4)) if i % 2 else struct.pack("<I", 3)
        (tmp_path / f"{i}.gguf").write_bytes(b"GGUF" + head + rng.randbytes(rng.choice((20, 300, 5000))))
    out = run_child(
        """
        import sys
        from backends_kit import load, caught
        for i in range(15):
            print(caught(lambda: load(f"{sys.argv[1]}/{i}.gguf")))
        """,
        str(tmp_path),
    )
    assert set(out.split()) == {"ModelLoadError"}


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes(run_child, tmp_path, good, seed):
    """A damaged header gives a model or a typed error, and what loads can be asked and closed."""
    rng = random.Random(seed)
    for i in range(25):
        data = bytearray(good)
        for _ in range(rng.choice((1, 3, 20))):
            data[rng.randrange(8, 30000)] = rng.randrange(256)
        (tmp_path / f"{i}.gguf").write_bytes(data)
    out = run_child(
        """
        import sys
        from backends_kit import load, context, decode, caught
        def use(path):
            with load(path) as model:
                model.tokenize(b"some text", True, True), model.eog_tokens(), model.metadata()
                with context(model) as c:
                    decode(c, [1, 2, 3])
                    c.logits()
        for i in range(25):
            print(caught(lambda: use(f"{sys.argv[1]}/{i}.gguf")))
        """,
        str(tmp_path),
        timeout=120,
    )
    assert set(out.replace(":", " ").split()) <= {"none", "ModelLoadError", "NativeError", "ConfigError", "unchanged"}


def test_no_permission(refused, good, tmp_path):
    path = tmp_path / "secret.gguf"
    path.write_bytes(good)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    assert "Permission denied" in refused(None, "secret.gguf")


def test_no_permission_as_any_user(refused, good, monkeypatch):
    def deny(path, mode="r"):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pyspec.backends._gguf.open", deny, raising=False)
    assert "Permission denied" in refused(good)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelLoadError, match="not a regular file"):
        load(str(tmp_path / "pipe.gguf"))


def test_odd_paths(good, tmp_path):
    names = ["modèle Ω 日本語 🦙.gguf", "with 'quotes' and \"more\".gguf", "x" * 200 + ".gguf"]
    for name in names:
        (tmp_path / name).write_bytes(good)
        with load(str(tmp_path / name)) as model:
            assert model.path.endswith(name)
    with load(tmp_path / names[0]) as model:  # os.PathLike
        assert model.n_vocab == 512


def test_paths_that_cannot_be(tmp_path):
    for path in ("/" + "a/" * 5000 + "x.gguf", str(tmp_path / ("y" * 300))):
        with pytest.raises(ModelLoadError, match="too long") as error:
            load(path)
        assert len(str(error.value)) < 500
    with pytest.raises(ModelLoadError, match="NUL"):
        load("a\0b.gguf")


def test_long_folder(good, tmp_path):
    folder = tmp_path
    while len(str(folder)) < 3500:
        folder = folder / ("d" * 200)
    try:
        folder.mkdir(parents=True)
        (folder / "m.gguf").write_bytes(good)
    except OSError as exc:
        pytest.skip(f"this file system: {exc}")
    with load(str(folder / "m.gguf")) as model:
        assert model.n_layer == 4


def test_broken_tensor_data_is_found_on_request(tiny, tmp_path):
    from gguf import GGUFReader

    source = Path(tiny("target-llama"))
    tensor = next(t for t in GGUFReader(str(source)).tensors if t.name == "blk.0.attn_q.weight")
    data = bytearray(source.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 4] = struct.pack("<f", float("nan"))
    path = tmp_path / "nan.gguf"
    path.write_bytes(data)
    load(str(path)).close()
    assert caught(lambda: load(str(path), check_tensors=True)) == "ModelLoadError"


def test_failed_loads_do_not_grow(run_child, good, tmp_path):
    pytest.importorskip("psutil")
    (tmp_path / "cut.gguf").write_bytes(good[: len(good) // 2])
    run_child(
        """
        import sys
        from backends_kit import load, caught, resident_growth
        def once():
            assert caught(lambda: load(sys.argv[1])) == "ModelLoadError"
        growth = resident_growth(once, 150)
        assert growth < 1.02, growth
        """,
        str(tmp_path / "cut.gguf"),
    )


# ---- progress ----


def test_progress(tiny):
    seen: list[float] = []
    load_with(tiny, seen.append).close()
    assert seen[0] == 0.0
    assert seen[-1] == 1.0
    assert seen == sorted(seen)


def load_with(tiny, progress) -> ModelHandle:
    return ModelHandle(tiny("target-llama"), ModelParams(), progress)


def test_progress_stops(tiny):
    calls = []
    with pytest.raises(ModelLoadError, match="stopped by the progress callback"):
        load_with(tiny, lambda value: calls.append(value) or len(calls) < 2)
    assert len(calls) == 2


@pytest.mark.parametrize("when", [0.0, 1.0])
def test_progress_raises(tiny, when):
    def progress(value: float) -> None:
        if value >= when:
            raise KeyboardInterrupt("stop")

    with pytest.raises(KeyboardInterrupt, match="stop"):
        load_with(tiny, progress)


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
@pytest.mark.parametrize("with_progress", [True, False])
def test_ctrl_c_stops_loading(tiny, run_child, with_progress):
    """Also without a progress callback; the signal arrives while the load runs in C."""
    out = run_child(
        f"""
        import os, signal, sys, threading, time
        from pyspec import backends
        from pyspec.backends import ModelHandle, _model
        backends.load()
        # the first progress call comes early in a load; the signal is sent right before it is handed to Python
        real = _model._Progress.__call__
        def late(self, value):
            os.kill(os.getpid(), signal.SIGINT)
            return real(self, value)
        _model._Progress.__call__ = late
        try:
            ModelHandle(sys.argv[1], progress={"lambda value: True" if with_progress else "None"})
        except KeyboardInterrupt:
            print("interrupted")
        _model._Progress.__call__ = real
        ModelHandle(sys.argv[1]).close()
        """,
        tiny("target-llama"),
        stderr=None,
    )
    assert out.strip() == "interrupted"


def test_progress_may_load_another_model(tiny):
    inner = []

    def progress(value: float) -> None:
        if not inner:
            inner.append(load(tiny("draft-llama")))
            assert caught(lambda: load("/nonexistent")) == "ModelLoadError"

    with load_with(tiny, progress) as model:
        assert model.n_layer == 4
    inner[0].close()


# ---- facts ----


def test_facts(tiny):
    with load(tiny("target-llama")) as m:
        assert (m.n_vocab, m.n_layer, m.n_layer_nextn, m.architecture) == (512, 4, 0, "llama")
        assert m.n_embd == m.n_embd_inp == m.n_embd_out == 64
        assert m.size_bytes > 0
        assert m.n_params > 0
        assert "llama" in m.desc
        assert m.ftype_name
        assert not m.is_recurrent
        assert not m.is_hybrid
        assert m.target_layer_ids == ()
        assert m.metadata()["general.architecture"] == "llama"
        m.metadata()["general.architecture"] = "changed"
        assert m.metadata()["general.architecture"] == "llama", "a copy"
    with load(tiny("target-recurrent")) as m:
        assert m.is_recurrent
    with load(tiny("target-hybrid")) as m:
        assert m.is_hybrid
        assert m.n_pos_per_embd == 4
    with load(tiny("target-swa")) as m:
        assert m.n_swa > 0
    with load(tiny("eagle3")) as m:
        assert m.has_encoder
        assert len(m.target_layer_ids) == 3
    with load(tiny("dflash2")) as m:
        assert m.dflash_selector_top_k > 0


def test_mtp_only_files_are_recognised(tiny):
    for name, only in (("draft-mtp-only", True), ("target-mtp", False), ("target-llama", False)):
        with load(tiny(name)) as m:
            assert m.is_mtp_only is only


def test_metadata_of_any_length(tiny):
    with load(tiny("target-llama")) as m:
        from gguf import GGUFReader

        for key, field in GGUFReader(m.path).fields.items():
            if len(field.types) == 1 and field.types[0].name == "STRING":
                assert m.metadata()[key] == bytes(field.parts[field.data[0]]).decode()


def test_chat_template(tiny):
    with load(tiny("target-llama")) as m:
        template = m.chat_template()
        assert template == m.metadata().get("tokenizer.chat_template")
        assert m.chat_template("no-such-template") is None


# ---- vocabulary ----


TEXTS = [b"", b" ", b"Hello, world", "é 歪 👩‍👩‍👧 \u2028".encode(), b"a\0b", b"\n\n\t ", b"x" * 3000]


@pytest.mark.parametrize("name", ["target-llama", "target-llama-spm"])
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tiny, name, text):
    with load(tiny(name)) as m:
        ids = m.tokenize(text, False, False)
        assert ids.dtype == np.int32
        assert ids.flags.owndata
        joined = b"".join(m.token_piece(int(i), False) for i in ids)
        assert joined.lstrip(b" ") == text.lstrip(b" ") if "spm" in name else joined == text


@pytest.mark.parametrize("text", [b"\xff\xfe", b"\xc3", b"ok \xe6\xad", b"\xf0\x9f\x91", b"\x80" * 50, b"\xed\xa0\x80"])
def test_invalid_utf8_does_not_end_the_process(tiny, run_child, text):
    for name in ("target-llama", "target-llama-spm"):
        out = run_child(
            """
            import sys
            from backends_kit import load, caught
            m = load(sys.argv[1])
            print(caught(lambda: m.tokenize(bytes.fromhex(sys.argv[2]), True, True)))
            print(len(m.tokenize(b"still usable", False, False)) > 0)
            m.close()
            """,
            tiny(name),
            text.hex(),
        )
        assert out.split()[0] in ("none", "NativeError:unchanged")
        assert out.split()[1] == "True"


def test_special_tokens(tiny):
    with load(tiny("target-llama")) as m:
        special = m.special_tokens()
        assert (special["bos"], special["eos"], special["mask"], special["fim_pre"]) == (1, 2, 3, -1)
        assert special["eos"] in m.eog_tokens()
        assert all(m.is_eog(t) for t in m.eog_tokens())
        assert not m.is_eog(300)
        assert m.is_control(special["bos"])
        assert not m.is_control(300)
        assert m.token_attr(special["bos"]) & 8  # LLAMA_TOKEN_ATTR_CONTROL
        assert list(m.tokenize(b"", True, True)) == ([special["bos"]] if m.add_bos else [])
        with_special = m.tokenize(m.token_text(special["eos"]), False, True)
        assert list(with_special) == [special["eos"]]
        assert len(m.tokenize(m.token_text(special["eos"]), False, False)) > 1
        assert m.token_piece(special["eos"], False) == b""
        assert m.token_piece(special["eos"], True) == m.token_text(special["eos"])


def test_token_ids_out_of_range(tiny):
    with load(tiny("target-llama")) as m:
        for token in (-1, 512, 2**31 - 1, -(2**40), 2**40):
            for call in (m.token_text, m.token_attr, m.is_eog, m.is_control, lambda t: m.token_piece(t, True)):
                with pytest.raises(ConfigError, match="is not in"):
                    call(token)


def test_vocab_only(tiny):
    with load(tiny("target-llama"), vocab_only=True) as m:
        assert len(m.tokenize(b"abc", False, False)) == 3


def test_use_after_close(tiny):
    m = load(tiny("target-llama"))
    m.close()
    m.close()
    assert m.closed
    assert m.n_vocab == 512, "facts stay"
    for call in (lambda: m.tokenize(b"a", True, True), lambda: m.token_text(5), lambda: m.chat_template(), m.__enter__):
        with pytest.raises(ClosedError, match="is closed"):
            call()


# ---- requantising ----


def test_quantize(tiny, tmp_path):
    from pyspec.backends import quantize

    source, target = tiny("target-llama"), tmp_path / "q.gguf"
    quantize(source, target, "Q8_0", 1)
    with load(source) as before, load(str(target)) as after:
        assert after.size_bytes < before.size_bytes
        assert after.n_params == before.n_params
        assert "Q8_0" in after.ftype_name
    quantize(target, tmp_path / "again.gguf", "q4_0")
    load(str(tmp_path / "again.gguf")).close()


def test_quantize_refuses(tiny, tmp_path, good):
    from pyspec.backends import quantize

    source = tiny("target-llama")
    with pytest.raises(ConfigError, match="ftype must be one of"):
        quantize(source, tmp_path / "x", "q9")
    copy = tmp_path / "same.gguf"
    copy.write_bytes(good)
    with pytest.raises(ConfigError, match="dst is src"):
        quantize(copy, copy, "q8_0")
    assert copy.read_bytes() == good
    with pytest.raises(ModelLoadError, match="cannot be written"):
        quantize(source, tmp_path / "no" / "folder", "q8_0")
    (tmp_path / "cut.gguf").write_bytes(good[: len(good) // 2])
    with pytest.raises(ModelLoadError, match="could not be requantised"):
        quantize(tmp_path / "cut.gguf", tmp_path / "out.gguf", "q8_0")
    assert not (tmp_path / "out.gguf").exists()
