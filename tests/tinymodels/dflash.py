"""Block drafts: DFlash, DFlash2 and DSpark."""

from __future__ import annotations

import numpy as np

from .blocks import POINT, base_keys, ffn, keep, layer, model, pattern, rope_kernel, write_gguf
from .rule import (
    BIAS,
    FAR,
    HIDDEN_RMS,
    MASK_DIM,
    NEAR,
    NEAR_SIZE,
    NORM,
    ONE,
    A,
    D,
    disagree,
    place,
    rng_for,
    rule_for,
)

FLASH_HEAD = 64
CONST = FAR[1]  # dimension that marks injected features


def flash_head(distance: int, queries: list, keys: list, v: np.ndarray, o: np.ndarray):
    """Attend at exactly ``distance`` to what ``keys`` name, or else to oneself.

    ``queries`` and ``keys`` are (dimension, value) of the tokens meant.  Masks
    like their own key nearly as much as a key at the right distance.
    """
    here = rope_kernel(FLASH_HEAD, range(8), 0, neox=True)[:, None]
    there = rope_kernel(FLASH_HEAD, range(8), distance, neox=True)[:, None]
    idle = np.zeros((FLASH_HEAD, 1))
    idle[FLASH_HEAD // 2 - 1] = 1  # where no mask looks
    q = here * sum(pattern(1, [dim], value) for dim, value in queries)
    k = there * sum(pattern(1, [dim], value) for dim, value in keys) + (0.96 * here + 0.28 * idle) * pattern(
        1, [MASK_DIM], NORM
    )
    if BIAS[0] not in [dim for dim, _ in queries]:
        q = q + idle * pattern(1, BIAS, ONE)  # the anchor looks at the features, in vain
    if CONST not in [dim for dim, _ in keys]:
        k = k + idle * pattern(1, [CONST], 1)
    return q, k, v, o


@model("dflash")
@model("dflash-zero", agreement=0.0)
@model("dflash-calm", wander=0.7)
@model("dflash-calm-half", wander=0.7, agreement=0.75)
@model("dflash-own", own=True)
@model("dflash-d2t", own=True, draft_vocab=300)
@model("dflash2", selector=True)
@model("dspark", markov=True)
@model("dspark-half", markov=True, agreement=0.85)
@model("dspark-calm", markov=True, wander=0.7)
@model("dspark-own", markov=True, own=True)
@model("dspark-noconf", markov=True, confidence=False)
@model("dspark-bonus", markov=True, from_anchor=False)
def dflash(
    path,
    seed,
    agreement=1.0,
    wander=1.0,
    own=False,
    draft_vocab=0,
    block=8,
    selector=False,
    markov=False,
    confidence=True,
    from_anchor=True,
    target_layers="1-2-3",
):
    """DFlash draft for target-llama, or DSpark (``markov``).

    DFlash works out the whole block from the last token, so it misses behind a
    jump; DSpark's Markov head follows its own choices.  The near code of the
    first token comes from the injected features.  Both lack the far code.
    ``selector`` makes it DFlash2: plain convolutions and a selector that scores
    pairs of candidates, here by the rule itself.
    """
    vocab, rule = rule_for(seed, wander=wander)
    taps = [int(i) for i in target_layers.split("-")]
    rows = disagree(rule.head(), rule, agreement, seed)
    ids = slice(None)
    if draft_vocab:
        ids = np.sort(rng_for(seed, "d2t").choice(rule.members, draft_vocab, replace=False))
    rows = rows[ids]
    known, length = (NEAR + BIAS, HIDDEN_RMS) if markov else (NEAR + BIAS + A, (2 + NEAR_SIZE**2) ** 0.5)
    tensors = {"output_norm.weight": keep(known, length / HIDDEN_RMS), "enc.output_norm.weight": np.ones(D)}
    if own:
        tensors["token_embd.weight"] = rule.E
    if own or draft_vocab or agreement != 1.0:
        tensors["output.weight"] = rows
    if draft_vocab:
        tensors["d2t"] = ids
    if markov:
        tensors["markov_w1.weight"] = rule.E[:, A] / NORM
        tensors["markov_w2.weight"] = rows[:, A] * NORM / HIDDEN_RMS
        if confidence:
            rng = rng_for(seed, "confidence")
            tensors["conf_proj.weight"] = np.append(np.zeros(D), 4 * rng.standard_normal(len(A)) / len(A) ** 0.5)[None]
            tensors["conf_proj.bias"] = np.array([2.0])

    # injected features: the near code they stand for, and a mark
    mark = (HIDDEN_RMS**2 - NEAR_SIZE**2) ** 0.5 * NORM
    fc = place((D, D), NEAR, A, rule.code) + place((D, D), [CONST], BIAS, mark / ONE)
    tensors["fc.weight"] = np.concatenate([fc] * len(taps), 1) / len(taps)
    mark /= HIDDEN_RMS

    # draft token s (from 0) is read ``s + lead`` behind the last token; on its way
    # along the orbit that token has become number s
    lead = 0 if markov and from_anchor else 1
    mask, anchor, feature = (MASK_DIM, NORM), (BIAS[0], ONE), (CONST, mark)
    inject = place((FLASH_HEAD, D), range(len(NEAR)), NEAR, np.eye(len(NEAR)) * HIDDEN_RMS)
    near_out = place((D, FLASH_HEAD), NEAR, range(len(NEAR)), np.eye(len(NEAR)))
    heads = [flash_head(lead + 1, [mask] + [anchor] * (lead == 0), [feature], inject, near_out)]
    for s in range(1 - lead, block - lead):
        v = place((FLASH_HEAD, D), BIAS + A, BIAS + A, np.eye(len(BIAS + A)))
        o = np.zeros((D, FLASH_HEAD))
        if not markov:
            o += place((D, FLASH_HEAD), BIAS, BIAS, 1.0)
            o += place((D, FLASH_HEAD), A, A, np.linalg.matrix_power(rule.step, s))
        if s:
            o += place((D, FLASH_HEAD), NEAR, A, rule.code @ np.linalg.matrix_power(rule.step, s - 1))
        heads.append(flash_head(s + lead, [mask], [anchor], v, o))
    q, k, v, o = zip(*heads, strict=False)
    sharp = (2 * POINT / FLASH_HEAD**0.5) ** 0.5
    tensors |= layer(
        0,
        ffn(rng_for(seed, "dflash"))
        | {
            "attn_norm.weight": np.ones(D),
            "ffn_norm.weight": np.ones(D),
            "attn_q_norm.weight": np.full(FLASH_HEAD, sharp),
            "attn_k_norm.weight": np.full(FLASH_HEAD, sharp),
            "attn_q.weight": np.concatenate(q),
            "attn_k.weight": np.concatenate(k),
            "attn_v.weight": np.concatenate(v),
            "attn_output.weight": np.concatenate(o, 1),
        },
    )
    keys = base_keys(1, n_head=len(heads), head=FLASH_HEAD) | {"block_size": block, "target_layers": taps}
    if selector:
        kernel, group, top_k = 2, 16, 7  # top_k * (top_k + 1) must not exceed D
        still = np.zeros((2, kernel, D))
        still[:, 0] = 1
        for part in ("attn", "ffn"):
            tensors |= layer(
                0, {f"{part}_conv_base": still, f"{part}_conv_proj.weight": np.zeros((2 * kernel * D // group, D))}
            )
        tensors |= {
            "selector_hidden.weight": np.repeat(pattern(1, BIAS, ONE), len(A), 0),
            "selector_predecessor.weight": rule.E[:, A] / NORM,
            "selector_successor.weight": rows[:, A] * NORM / 4,
        }
        keys |= {"conv_kernel_size": kernel, "conv_group_size": group, "selector_rank": len(A), "selector_top_k": top_k}
    if markov:
        keys |= {"sample_from_anchor": from_anchor, "has_confidence_head": confidence}
    write_gguf(path, "dflash", keys, tensors, vocab)
