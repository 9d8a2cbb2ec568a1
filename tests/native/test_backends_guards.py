"""Each way known to end the process inside libllama, or to go wrong there in silence, has a typed error in front of it.

Every case runs in a child process, which must live, print nothing to stderr, and end with code 0. This file: batches
and their rows. Contexts, caches, and the barrier behind the guards: ``test_backends_guards_context``.
"""

from __future__ import annotations

import pytest
from backends_kit import guard_runner


@pytest.fixture
def guard(tiny, run_child):
    return guard_runner(tiny, run_child)


REFUSED = "InvalidBatchError:unchanged"


def test_token_position_and_sequence_ranges(guard):
    out = guard(
        """
        c = context(M("target-llama"), n_seq_max=2, n_ctx=512)
        for tokens in ([1, 512], [-1, 1], [2**31 - 1, 1]):
            show(lambda: decode(c, tokens))
        for seq in (-1, 2, 255, 2**31 - 1):
            show(lambda: decode(c, 2, seq=seq))
        for pos in (-1, -5, 2**31 - 2):
            show(lambda: decode(c, 1, pos0=pos))
        print(c.n_outputs, c.seq_pos_max(0))
        decode(c, 3)
        print(c.logits().shape, c.seq_pos_max(0))
        """,
        "target-llama",
    )
    assert out == [REFUSED] * 10 + ["0 -1", "(3, 512) 2"]


def test_positions_that_do_not_follow_on(guard):
    out = guard(
        """
        c = context(M("target-llama"))
        decode(c, 3)
        show(lambda: decode(c, 3, pos0=10))
        show(lambda: decode(c, 3, pos0=2))
        t, p, s, o = rows(3, 3); p[:] = [5, 4, 3]
        show(lambda: c.decode(t, p, s, o, None, 3))
        show(lambda: decode(c, 3, pos0=3))
        print(c.seq_pos_max(0), c.lost)
        """,
        "target-llama",
    )
    assert out == [REFUSED] * 3 + ["none", "5 False"]


def test_number_of_rows(guard):
    """More rows than n_batch, than the arrays hold, none at all, negative, and more outputs than n_outputs_max."""
    out = guard(
        """
        c = context(M("target-llama"), n_outputs_max=2)
        t, p, s, o = rows(65, output=0)
        for n in (65, 66, 0, -1, -2**31, 2**31 - 1):
            show(lambda: c.decode(t, p, s, o, None, n))
        show(lambda: decode(c, 3))
        show(lambda: decode(c, 3, output=[1, 0, 1]))
        print(c.logits().shape, c.n_outputs_max)
        """,
        "target-llama",
    )
    assert out == [REFUSED] * 7 + ["none", "(2, 512) 2"]


def test_arrays_of_the_wrong_kind(guard):
    out = guard(
        """
        c = context(M("target-llama"))
        t, p, s, o = rows(4)
        cases = [
            (t.astype(np.int64), p, s, o), (t, p.astype(np.float32), s, o), (t, p, s, o.astype(np.int32)),
            (t[::2], p, s, o), (t.reshape(2, 2), p, s, o), (list(t), p, s, o), (t, None, s, o), (t, p, s[:1], o),
            (np.int32(4), p, s, o),
        ]
        for case in cases:
            show(lambda: c.decode(*case, None, 2))
        show(lambda: c.decode(t, p, s, o, None, 4))
        show(lambda: c.decode(t, p, s, o, np.zeros((4, 5), np.float32), 4))
        """,
        "target-llama",
    )
    assert out == [REFUSED] * 9 + ["none", REFUSED]


def test_full_cache(guard):
    out = guard(
        """
        c = context(M("target-llama"))
        for i in range(4):
            decode(c, 64, pos0=64 * i)
        show(lambda: decode(c, 1, pos0=256))
        print(c.seq_pos_max(0), c.seq_rm(0, 200))
        show(lambda: decode(c, 1, pos0=200))
        """,
        "target-llama",
    )
    assert out == ["ContextFullError:unchanged", "255 True", "none"]


def test_row_kinds(guard):
    """Which rows carry tokens, embeddings or both: libllama crashes or reads stale memory when it gets the others."""
    out = guard(
        """
        def kinds(c):
            for with_tokens, with_embd in ((True, True), (True, False), (False, True)):
                if c.model.architecture == "dflash":
                    c.causal_attn(False)
                pos = c.seq_pos_max(0) + 1
                show(lambda: decode(c, 4, pos, embd=zeros(c, 4) if with_embd else None, with_tokens=with_tokens))
        for name in ("target-llama", "target-hybrid", "target-recurrent", "dflash-own", "eagle3-own"):
            print(name)
            kinds(context(M(name)))
        print("mtp")
        kinds(context(M("target-mtp", load_mtp=True), ctx_type="mtp"))
        """,
        "target-llama", "target-hybrid", "target-recurrent", "dflash-own", "eagle3-own", "target-mtp",
    )  # fmt: skip
    one, both = [REFUSED, "none", "none"], ["none", REFUSED, REFUSED]
    assert out == [
        "target-llama", *one, "target-hybrid", *one, "target-recurrent", *one, "dflash-own", *one,
        "eagle3-own", *both, "mtp", *both,
    ]  # fmt: skip


def test_widths_of_embedding_rows(guard):
    out = guard(
        """
        for name, options in (("eagle3-own", {}), ("dflash-own", {}), ("target-mtp", {"ctx_type": "mtp"})):
            c = context(M(name, load_mtp=name == "target-mtp"), **options)
            for width in (1, 63, 65, 1000):
                embd = np.zeros((4, width), np.float32)
                show(lambda: decode(c, 4, embd=embd, with_tokens=name != "dflash-own"))
            if c.model.has_encoder:
                show(lambda: c.encode(np.zeros((4, 7), np.float32), 4))
                show(lambda: c.encode(zeros(c, 4, encode=True).astype(np.float64), 4))
        """,
        "eagle3-own", "dflash-own", "target-mtp",
    )  # fmt: skip
    assert out == [REFUSED] * 16


def test_encode(guard):
    out = guard(
        """
        c = context(M("eagle3-own"))
        rows_in = zeros(c, 64, encode=True)
        for n in (33, 0, -1, 65, 32):
            show(lambda: c.encode(rows_in, n))
        plain = context(M("target-llama"))
        show(lambda: plain.encode(zeros(plain, 4, encode=True), 4))
        """,
        "eagle3-own", "target-llama",
    )  # fmt: skip
    assert out == [REFUSED] * 4 + ["none", "UnsupportedError"]


def test_more_than_a_micro_batch_without_causal_attention(guard):
    out = guard(
        """
        c = context(M("dflash-own"))
        c.causal_attn(False)
        show(lambda: decode(c, 33))
        show(lambda: decode(c, 33, embd=zeros(c, 33), with_tokens=False))
        show(lambda: decode(c, 32, embd=zeros(c, 32), with_tokens=False))
        """,
        "dflash-own",
    )
    assert out == [REFUSED, REFUSED, "none"]


def test_output_flags_of_draft_models(guard):
    """eagle3 and dflash ignore the flags within a batch; an MTP block gives wrong nextn rows."""
    out = guard(
        """
        c = context(M("eagle3-own"))
        show(lambda: decode(c, 3, embd=zeros(c, 3), output=[0, 1, 1]))
        show(lambda: decode(c, 3, embd=zeros(c, 3), output=0))
        c = context(M("target-mtp", load_mtp=True), ctx_type="mtp")
        c.embeddings_nextn(True, True)
        decode(c, 3, embd=zeros(c, 3), output=[0, 1, 1])
        print(c.logits().shape)
        show(lambda: c.nextn(2))
        decode(c, 3, 3, embd=zeros(c, 3))
        show(lambda: c.nextn(3))
        """,
        "eagle3-own", "target-mtp",
    )  # fmt: skip
    assert out == [REFUSED, "none", "(2, 512)", "NativeError:unchanged", "none"]


@pytest.mark.parametrize(
    ("name", "n_layer", "first", "last"),
    [
        ("target-llama", 4, "none", "UnsupportedError"),
        ("target-hybrid", 4, "none", "UnsupportedError"),
        ("target-gemma4", 4, "none", "UnsupportedError"),
        ("target-swa", 4, "UnsupportedError", "UnsupportedError"),
        ("target-recurrent", 2, "UnsupportedError", "UnsupportedError"),
        ("target-mtp-chain", 3, "UnsupportedError", "UnsupportedError"),
    ],
)
def test_layer_inputs(guard, name, n_layer, first, last):
    """Enabling is a probe: an architecture without them says so, and the context still decodes."""
    out = guard(
        f"""
        c = context(M("{name}"))
        n_layer = c.model.n_layer
        print(n_layer)
        for layer in (-1, n_layer + 1, 10**6):
            show(lambda: c.layer_inputs_enable(layer, True))
        show(lambda: c.layer_inputs_enable(0, True))
        show(lambda: c.layer_inputs_enable(n_layer, True))
        show(lambda: c.layer_input(0, 1))
        decode(c, 4)
        show(lambda: c.layer_input(0, 4))
        show(lambda: c.layer_input(1, 1))
        print(c.logits().shape, c.lost)
        """,
        name,
    )
    assert out[:4] == [str(n_layer), "ConfigError", "ConfigError", "ConfigError"]
    assert out[4:6] == [first, last]
    assert out[6] == "NativeError:unchanged", "not before a decode"
    assert out[7] == ("none" if first == "none" else "NativeError:unchanged")
    assert out[8:] == ["NativeError:unchanged", "(4, 512) False"]


def test_rows_are_only_read_when_they_are_there(guard):
    out = guard(
        """
        c = context(M("target-mtp"))
        show(lambda: c.nextn(1))
        c.embeddings_nextn(True, False)
        show(lambda: c.nextn(1))
        decode(c, 4, output=[0, 0, 0, 1])
        for n in (4, 5, -1):
            show(lambda: c.nextn(n))
        c.layer_inputs_enable(1, True)
        show(lambda: c.layer_input(1, 1))
        decode(c, 3, 4)
        for n in (3, 4):
            show(lambda: c.layer_input(1, n))
        show(lambda: decode(c, 3, 100, seq=7))
        show(lambda: c.layer_input(1, 1))
        show(lambda: c.nextn(1))
        print(c.n_outputs)
        """,
        "target-mtp",
    )
    gone = "NativeError:unchanged"
    assert out == [
        gone,
        gone,
        "none",
        "ConfigError",
        "ConfigError",
        gone,
        "none",
        "ConfigError",
        REFUSED,
        gone,
        gone,
        "0",
    ]


def test_nextn_of_architectures_without_it(guard):
    """libllama gives rows of zeros there."""
    out = guard(
        """
        for name in ("target-llama", "target-swa", "target-recurrent"):
            c = context(M(name))
            show(lambda: c.embeddings_nextn(True, False))
            show(lambda: c.embeddings_nextn(False, False))
        """,
        "target-llama", "target-swa", "target-recurrent",
    )  # fmt: skip
    assert out == ["UnsupportedError", "none"] * 3
