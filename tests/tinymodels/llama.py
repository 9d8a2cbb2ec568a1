"""Dense llama and sliding-window gemma3, targets and drafts."""

from __future__ import annotations

import numpy as np

from .blocks import (
    HEAD,
    REST,
    ROPE_BASE,
    base_keys,
    far_head,
    ffn,
    keep,
    layer,
    model,
    near_head,
    outer,
    stack_heads,
    write_gguf,
)
from .rule import BIAS, FAR, FAR_SIZE, GAIN, NEAR, NEAR_SIZE, NORM, D, Rule, rng_for, rule_for
from .vocab import EXTRA, IM_END, N_VOCAB, PAD, UNK, Vocab


def llama_layer(seed: int, il: int, rule: Rule) -> dict:
    """Near code, far code, and then little."""
    rng = rng_for(seed, "llama", il)
    heads = near_head(rule, neox=False), far_head(rng, size=FAR_SIZE if il == 1 else REST)
    near, far = (head if on else [0 * m for m in head] for head, on in zip(heads, (il == 0, il > 0), strict=False))
    return stack_heads(near, far) | ffn(rng) | {"attn_norm.weight": np.ones(D), "ffn_norm.weight": np.ones(D)}


@model("target-llama")
@model("target-llama-calm", wander=0.7)
@model("target-llama-eos", eos=4)
@model("target-llama-spm", vocab="spm")
@model("target-llama-addeos", add_eos=True)
def target_llama(path, seed, layers=4, wander=1.0, eos=0, vocab="bpe", add_eos=False):
    """Dense llama."""
    vocab, rule = rule_for(seed, vocab, wander, eos)
    tensors = outer(rule)
    for il in range(layers):
        tensors |= layer(il, llama_layer(seed, il, rule))
    if add_eos:
        vocab = Vocab(vocab.kind)
        vocab.add_eos = True
    write_gguf(path, "llama", base_keys(layers), tensors, vocab)


@model("draft-llama")
@model("draft-llama-half", agreement=0.73)
@model("draft-llama-zero", agreement=0.0)
@model("draft-llama-eos", eos=4)
@model("draft-llama-spm", vocab="spm")
@model("draft-badvocab-type", vocab="spm")
@model("draft-badvocab-bos", change="bos")
@model("draft-badvocab-addbos", change="addbos")
@model("draft-badvocab-eos", change="eos")
@model("draft-badvocab-addeos", change="addeos")
@model("draft-badvocab-size", size=N_VOCAB + 129)
@model("draft-badvocab-text", change="text")
@model("draft-okvocab-size", size=N_VOCAB + 128)
@model("draft-okvocab-text", change="text4")
@model("draft-okvocab-stray", size=N_VOCAB + 128, change="stray")
def draft_llama(path, seed, agreement=1.0, layers=2, wander=1.0, eos=0, vocab="bpe", size=N_VOCAB, change=""):
    """The first layers of target-llama, with a head that misses now and then.

    ``change`` alters the vocabulary: 'bos', 'addbos', 'eos' (for
    target-llama-addeos), 'addeos' and 'text' make it incompatible; 'text4'
    alters a token below the first one compared; 'stray' makes the draft
    propose tokens that the target does not have (needs a larger ``size``).
    """
    _, rule = rule_for(seed, vocab, wander, eos)
    vocab = Vocab(vocab, size)
    tensors = outer(rule, agreement, seed)
    for il in range(layers):
        tensors |= layer(il, llama_layer(seed, il, rule))
    extra = size - N_VOCAB
    if extra:
        tensors["token_embd.weight"] = np.concatenate([rule.E, np.repeat(rule.E[PAD : PAD + 1], extra, 0)])
        never = np.zeros((extra, D))
        never[:, BIAS] = -2 * GAIN / NORM
        tensors["output.weight"] = np.concatenate([tensors["output.weight"], never])
    if change == "bos":
        vocab.bos = PAD
    elif change == "addbos":
        vocab.add_bos = False
    elif change == "eos":
        vocab.add_eos, vocab.eos = True, IM_END
    elif change == "addeos":
        vocab.add_eos = True
    elif change == "text":
        vocab.tokens[EXTRA] = "<|other|>"
    elif change == "text4":
        vocab.tokens[UNK] = "<|other|>"
    elif change == "stray":
        some = rule.members[::2][:extra]
        out = tensors["output.weight"]
        a, b = some, N_VOCAB + np.arange(len(some))
        out[a], out[b] = out[b].copy(), out[a].copy()
    elif change:
        raise ValueError(f"unknown change {change!r}")
    write_gguf(path, "llama", base_keys(layers), tensors, vocab)


def gemma_layer(rng, rule: Rule, kind: str, near: float, far: float, far_size: float = FAR_SIZE) -> dict:
    """A block with normed queries and keys, and norms behind attention and FFN.

    ``kind`` is the code it writes ('near', 'far' or '' for neither); ``near``
    and ``far`` are the norm weights that make those heads sharp enough.
    """
    head = near_head(rule, neox=True) if kind == "near" else far_head(rng)
    dims, size, sharp = {"near": (NEAR, NEAR_SIZE, near), "far": (FAR, far_size, far), "": (FAR, REST, far)}[kind]
    return (
        stack_heads(head)
        | ffn(rng)
        | {
            "attn_norm.weight": np.ones(D),
            "ffn_norm.weight": np.ones(D),
            "attn_q_norm.weight": np.full(HEAD, sharp),
            "attn_k_norm.weight": np.full(HEAD, sharp),
            "post_attention_norm.weight": keep(dims, size),
            "post_ffw_norm.weight": np.full(D, REST),
        }
    )


def write_swa(path, seed, layers, agreement, window):
    vocab, rule = rule_for(seed)
    tensors = outer(rule, agreement, seed, scale=1 / NORM)
    for il in range(layers):
        kind = {0: "near", 1: "far", 2: "far"}.get(il, "")
        tensors |= layer(
            il, gemma_layer(rng_for(seed, "gemma3", il), rule, kind, near=5.2, far=2.0, far_size=FAR_SIZE * 0.8)
        )
    keys = base_keys(layers, n_head=1) | {
        "attention.sliding_window": window,
        "rope.freq_base_swa": ROPE_BASE,
        "attention.sliding_window_pattern": [il % 2 == 1 for il in range(layers)],
    }
    write_gguf(path, "gemma3", keys, tensors, vocab)


@model("target-swa")
def target_swa(path, seed, layers=4, window=32):
    """gemma3: every other layer attends to a short window only."""
    write_swa(path, seed, layers, 1.0, window)


@model("draft-swa")
@model("draft-swa-half", agreement=0.72)
def draft_swa(path, seed, agreement=1.0, layers=3, window=32):
    """The first layers of target-swa."""
    write_swa(path, seed, layers, agreement, window)
