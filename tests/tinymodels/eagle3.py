"""EAGLE-3 drafts."""

from __future__ import annotations

import numpy as np

from .blocks import (
    HEAD,
    POINT,
    base_keys,
    far_head,
    ffn,
    keep,
    layer,
    model,
    pad,
    pattern,
    rope_kernel,
    write_gguf,
)
from .rule import A_VALUE, B_VALUE, BIAS, HIDDEN_RMS, NEAR, NEAR_RMS, ONE, A, D, disagree, place, rng_for, rule_for


@model("eagle3")
@model("eagle3-half", agreement=0.76)
@model("eagle3-zero", agreement=0.0)
@model("eagle3-own", own=True)
@model("eagle3-d2t", own=True, draft_vocab=300)
@model("eagle3-options", own=True, norm_before_residual=True, norm_before_fc=True)
@model("eagle3-wide", own=True, extra=32)
@model("eagle3-hybrid", hybrid=True, target_layers="1-2-4")
def eagle3(
    path,
    seed,
    agreement=1.0,
    wander=1.0,
    own=False,
    draft_vocab=0,
    norm_before_residual=False,
    norm_before_fc=False,
    extra=0,
    hybrid=False,
    target_layers="1-2-3",
):
    """EAGLE-3 draft for target-llama, or for target-hybrid or target-mtp (``hybrid``).

    It takes the token from the embedding, the near code from the target's
    features (through ``fc``) and the far code from its own cache.  ``own`` adds
    embeddings and head, otherwise those of the target are used (the head is
    added anyway if ``agreement`` or ``draft_vocab`` ask for it).
    ``draft_vocab`` limits the head to that many tokens through ``d2t``.
    ``extra`` makes the draft's hidden size differ from the target's.  A target
    layer equal to the number of layers means the final hidden state.
    """
    vocab, rule = rule_for(seed, wander=wander)
    taps = [int(i) for i in target_layers.split("-")]
    tensors = {"output_norm.weight": np.ones(D)}
    if own:
        tensors["token_embd.weight"] = rule.E
    if own or agreement != 1.0 or draft_vocab:
        tensors["output.weight"] = disagree(rule.head(), rule, agreement, seed)
    if draft_vocab:
        ids = np.sort(rng_for(seed, "d2t").choice(rule.members, draft_vocab, replace=False))
        tensors["output.weight"] = tensors["output.weight"][ids]
        tensors["d2t"] = ids

    # the mean of the features' token identity, and as much bias as makes the
    # input of the first step as long as that of the later ones
    fill = (HIDDEN_RMS**2 - A_VALUE**2) ** 0.5 / B_VALUE
    fc = np.diag(keep(A) + keep(BIAS, fill))
    tensors["fc.weight"] = np.concatenate([fc] * len(taps), 1) / len(taps)
    if hybrid:  # the final hidden state is normed
        tensors["fc.weight"] *= np.repeat([1.0 if i < 4 else HIDDEN_RMS for i in taps], D)
    if norm_before_fc:
        tensors["enc.output_norm.weight"] = np.full(D * len(taps), HIDDEN_RMS)

    # one head makes the far code from embeddings alone; two attend to their own
    # position to replace all that is in the residual by token and near code
    *qkv, o = far_head(rng_for(seed, *(("qwen35", "far") if hybrid else ("llama", 1))))
    if hybrid:  # the target's RoPE pairs dimensions otherwise
        for m in qkv[:2]:
            m[:] = m[np.arange(HEAD).reshape(2, -1).T.ravel()]
    q, k, v = (
        np.concatenate([keep(A) * m, place(m.shape, range(HEAD), A, m[:, NEAR] @ rule.code)], 1) / NEAR_RMS for m in qkv
    )
    here = np.tile(rope_kernel(HEAD, range(8), 0, neox=False), 2)[:, None]
    here = here * pattern((POINT * HEAD**0.5) ** 0.5, BIAS, ONE)
    token = np.diag(keep(BIAS + A))
    state = -np.eye(D) + place((D, D), NEAR, A, rule.code)
    tensors |= layer(
        0,
        ffn(rng_for(seed, "eagle3"))
        | {
            "attn_norm.weight": np.ones(D),
            "attn_norm_2.weight": np.full(D, HIDDEN_RMS),
            "ffn_norm.weight": np.ones(D),
            "attn_q.weight": np.concatenate([q, np.pad(here, ((0, 0), (0, D)))]),
            "attn_k.weight": np.concatenate([k, np.pad(here, ((0, 0), (0, D)))]),
            "attn_v.weight": np.concatenate([v, np.concatenate([token, state], 1)]),
            "attn_output.weight": np.concatenate([o, np.eye(D)], 1),
        },
    )
    for name, m in tensors.items() if extra else ():
        part = name.removesuffix(".weight").rpartition(".")[2]
        if part in ("token_embd", "output", "ffn_gate", "ffn_up"):
            tensors[name] = pad(m, extra, 1)
        elif part in ("fc", "attn_output", "ffn_down"):
            tensors[name] = pad(m, extra, 0)
        elif part in ("attn_q", "attn_k", "attn_v"):
            tensors[name] = pad(m.reshape(len(m), 2, D), extra, 2).reshape(len(m), -1)
        elif m.shape == (D,):  # a norm makes the same vector longer here
            tensors[name] = pad(m * (D / (D + extra)) ** 0.5, extra, 0)
    keys = base_keys(1, n_head=3) | {
        "embedding_length": D + extra,
        "target_layers": taps,
        "target_hidden_size": D,
        "norm_before_residual": norm_before_residual,
        "norm_before_fc": norm_before_fc,
    }
    write_gguf(path, "eagle3", keys, tensors, vocab)
