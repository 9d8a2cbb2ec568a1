"""Building blocks of the models. Matrices are (outputs, inputs), as numpy prints GGUF's."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from .rule import BIAS, FAR, FAR_SIZE, NEAR, NORM, ONE, A, D, Rule, disagree, place
from .vocab import Vocab

HEAD = 32  # head size of the targets
ROPE_BASE = 10000.0
POINT = 150.0  # peak score of a head that attends to a single position


def keep(dims, scale: float = 1.0) -> np.ndarray:
    """A norm weight: ``scale`` on ``dims`` and 0 elsewhere."""
    out = np.zeros(D)
    out[dims] = scale
    return out


def pad(m: np.ndarray, extra: int, *axes: int) -> np.ndarray:
    return np.pad(m, [(0, extra * (i in axes)) for i in range(m.ndim)])


def pattern(scale: float, where: list[int], value: float) -> np.ndarray:
    """A row that turns dimension ``where``, which holds ``value``, into ``scale``."""
    out = np.zeros((1, D))
    out[0, where] = scale / value
    return out


def rope_kernel(head: int, freqs, shift: int, neox: bool, n_rot: int = 0) -> np.ndarray:
    """A unit key that matches ``rope_kernel(..., 0, ...)`` best at distance ``shift``."""
    n_rot = n_rot or head
    out = np.zeros(head)
    for i in freqs:
        angle = shift * ROPE_BASE ** (-2 * i / n_rot)
        x, y = (i, i + n_rot // 2) if neox else (2 * i, 2 * i + 1)
        out[x], out[y] = np.cos(angle), np.sin(angle)
    return out / len(freqs) ** 0.5


def near_head(rule: Rule, neox: bool, n_rot: int = 0, freqs=range(8)):
    """Attend to the previous position; value goes to NEAR."""
    bias = pattern((POINT * HEAD**0.5) ** 0.5, BIAS, ONE)
    q = rope_kernel(HEAD, freqs, 0, neox, n_rot)[:, None] * bias
    k = rope_kernel(HEAD, freqs, 1, neox, n_rot)[:, None] * bias
    v = place((HEAD, D), range(len(NEAR)), A, rule.code)
    o = place((D, HEAD), NEAR, range(len(NEAR)), np.eye(len(NEAR)))
    return q, k, v, o


def far_head(rng, sharp: float = 4.0, size: float = FAR_SIZE):
    """Attend by random content, of token and near code; value goes to FAR.

    ``sharp`` is the deviation of the scores.  Expects a normed input.
    """
    inputs = A + NEAR
    scale = sharp**0.5 / NORM

    def random(rows, scale):
        return place((HEAD, D), range(rows), inputs, rng.standard_normal((rows, len(inputs))) * scale)

    o = place((D, HEAD), FAR, range(len(FAR)), np.eye(len(FAR)))
    return random(HEAD, scale), random(HEAD, scale), random(len(FAR), size / len(FAR) ** 0.5), o


def stack_heads(*heads, scale: float = 1.0) -> dict[str, np.ndarray]:
    q, k, v, o = zip(*heads, strict=False)
    return {
        "attn_q.weight": np.concatenate(q),
        "attn_k.weight": np.concatenate(k),
        "attn_v.weight": np.concatenate(v),
        "attn_output.weight": np.concatenate(o, 1) * scale,
    }


N_FF = 96
REST = 0.01  # what FFNs and the layers that matter little add


def ffn(rng) -> dict[str, np.ndarray]:
    """A gated FFN that adds little."""
    return {
        "ffn_gate.weight": rng.standard_normal((N_FF, D)) / NORM,
        "ffn_up.weight": rng.standard_normal((N_FF, D)) / NORM,
        "ffn_down.weight": rng.standard_normal((D, N_FF)) * REST / 4,
    }


def layer(il: int, parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"blk.{il}.{name}": value for name, value in parts.items()}


def write_gguf(path, arch: str, keys: dict, tensors: dict, vocab: Vocab) -> None:
    w = gguf.GGUFWriter(str(path), arch)
    w.add_name(Path(path).stem)
    w.add_file_type(0)
    for key, value in keys.items():
        key = f"{arch}.{key}"
        if isinstance(value, bool):
            w.add_bool(key, value)
        elif isinstance(value, int):
            w.add_uint32(key, value)
        elif isinstance(value, float):
            w.add_float32(key, value)
        elif isinstance(value, str):
            w.add_string(key, value)
        else:
            w.add_array(key, list(value))
    vocab.write(w)
    for name, value in tensors.items():
        integer = np.issubdtype(value.dtype, np.integer)
        w.add_tensor(name, np.ascontiguousarray(value, np.int64 if integer else np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def base_keys(n_layer: int, n_head: int = 2, head: int = HEAD) -> dict:
    return {
        "block_count": n_layer,
        "context_length": 4096,
        "embedding_length": D,
        "feed_forward_length": N_FF,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": head,
        "rope.freq_base": ROPE_BASE,
    }


def outer(rule: Rule, agreement: float = 1.0, seed: int = 0, scale: float = 1.0) -> dict:
    return {
        "token_embd.weight": rule.E * scale,
        "output_norm.weight": np.ones(D),
        "output.weight": disagree(rule.head(), rule, agreement, seed),
    }


MODELS: dict[str, tuple] = {}


def model(name: str, **fixed):
    """Register a builder under ``name``, with other defaults for some parameters."""

    def register(fn):
        MODELS[name] = (fn, fixed)
        return fn

    return register
