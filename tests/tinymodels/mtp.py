"""Multi-token prediction: blocks inside a target, and the assistant that reads the target's cache."""

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
    pad,
    pattern,
    stack_heads,
    write_gguf,
)
from .llama import gemma_layer
from .rule import A_VALUE, BIAS, FAR, HIDDEN_RMS, NEAR, NORM, ONE, A, D, Rule, disagree, place, rng_for, rule_for


def mtp_input(rule: Rule) -> dict[str, np.ndarray]:
    """Input of a next-token block: the token from the embedding, the near code from the hidden state."""
    token = np.diag(keep(BIAS + A))
    return {
        "nextn.enorm.weight": np.ones(D),
        "nextn.hnorm.weight": np.full(D, HIDDEN_RMS),
        "nextn.eh_proj.weight": np.concatenate([token, place((D, D), NEAR, A, rule.code)], 1),
    }


def qwen35_attention(parts: tuple, sharp: float) -> dict:
    """Attention with normed queries and keys and an output gate, which is held half open."""
    q, k, v, o = parts
    return {
        "attn_q.weight": np.concatenate([q, np.zeros_like(q)]),
        "attn_k.weight": k,
        "attn_v.weight": v,
        "attn_output.weight": 2 * o,
        "attn_q_norm.weight": np.full(HEAD, sharp),
        "attn_k_norm.weight": np.full(HEAD, sharp),
    }


def qwen35_linear(rng, size: float, state: int = 16, heads: int = 2) -> dict:
    """Gated delta net over random projections; writes to FAR."""
    inner, conv = state * heads, 3 * state * heads

    def from_token(n):
        return place((n, D), range(n), A, rng.standard_normal((n, len(A))) / (A_VALUE * NORM))

    return {
        "attn_qkv.weight": from_token(conv),
        "attn_gate.weight": np.repeat(pattern(1.28, BIAS, ONE), inner, 0),
        "ssm_conv1d.weight": rng.standard_normal((conv, 4)) / 2,
        "ssm_dt.bias": np.zeros(heads),
        "ssm_a": np.linspace(-0.1, -0.6, heads),
        "ssm_beta.weight": from_token(heads),
        "ssm_alpha.weight": from_token(heads),
        "ssm_norm.weight": np.ones(state),
        "ssm_out.weight": place(
            (D, inner),
            FAR,
            range(inner),
            rng.standard_normal((len(FAR), inner)) * size * NORM / (inner * len(FAR)) ** 0.5,
        ),
    }


@model("target-mtp")
@model("target-mtp-half", agreement=0.82)
@model("target-mtp-zero", agreement=0.0)
@model("target-hybrid", nextn=0)
@model("draft-mtp-only", trunk=False)
def qwen35(path, seed, agreement=1.0, layers=4, nextn=1, trunk=True):
    """qwen35: attention and recurrent layers, and one next-token block.

    ``trunk=False`` leaves only that block (a draft file of its own, for
    target-hybrid), ``nextn=0`` leaves it out.  ``agreement`` is the block's.
    """
    vocab, rule = rule_for(seed)
    far = qwen35_attention(far_head(rng_for(seed, "qwen35", "far")), 2.0)
    norms = {"attn_norm.weight": np.ones(D), "post_attention_norm.weight": np.ones(D)}
    tensors = outer(rule)
    for il in range(layers if trunk else 0):
        rng = rng_for(seed, "qwen35", il)
        if il == 0:
            parts = qwen35_attention(near_head(rule, neox=True), 5.2)
        elif il == 2:
            parts = far
        else:
            parts = qwen35_linear(rng, 0.15 if il == 1 else REST)
        tensors |= layer(il, parts | ffn(rng) | norms)
    if nextn:
        parts = far | ffn(rng_for(seed, "qwen35", "mtp")) | norms | mtp_input(rule)
        if agreement != 1.0:
            parts["nextn.shared_head_head.weight"] = disagree(rule.head(), rule, agreement, seed)
        tensors |= layer(layers, parts)
    keys = base_keys(layers + nextn, n_head=1) | {
        "rope.dimension_sections": [6, 5, 5, 0],
        "attention.recurrent_layers": [il < layers and il not in (0, 2) for il in range(layers + nextn)],
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 32,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 2,
        "ssm.group_count": 2,
    }
    if nextn:
        keys["nextn_predict_layers"] = nextn
    write_gguf(path, "qwen35", keys, tensors, vocab)


@model("target-mtp-chain")
@model("target-mtp-chain-half", agreement=0.74)
@model("target-mtp-chain-fade", fade=0.4)
@model("target-mtp-dense", nextn=1)
def step35(path, seed, agreement=1.0, fade=0.0, layers=3, nextn=3, window=32):
    """step35 without experts: sliding-window attention and a chain of next-token blocks.

    The agreement of each block is ``fade`` less than that of the one before,
    which shows whether the blocks are used in turn.
    """
    vocab, rule = rule_for(seed)
    far = stack_heads(far_head(rng_for(seed, "step35", "far")))
    # full layers rotate the first half of a head only
    near = stack_heads(near_head(rule, neox=True, n_rot=HEAD // 2, freqs=range(4)))
    rest = stack_heads(far_head(rng_for(seed, "step35", "rest"), size=REST))
    norms = {"attn_norm.weight": np.ones(D), "ffn_norm.weight": np.ones(D)}
    tensors = outer(rule)
    for il in range(layers):
        tensors |= layer(il, {0: near, 1: far}.get(il, rest) | ffn(rng_for(seed, "step35", il)) | norms)
    for i in range(nextn):
        parts = far | ffn(rng_for(seed, "step35", "mtp", i)) | norms | mtp_input(rule)
        if (share := agreement - i * fade) != 1.0:
            parts["nextn.shared_head_head.weight"] = disagree(rule.head(), rule, share, seed + i)
        tensors |= layer(layers + i, parts)
    keys = base_keys(layers + nextn, n_head=1) | {
        "expert_feed_forward_length": 0,
        "nextn_predict_layers": nextn,
        "attention.sliding_window": window,
        "rope.freq_base_swa": ROPE_BASE,
        "attention.sliding_window_pattern": [il != 0 for il in range(layers + nextn)],
    }
    write_gguf(path, "step35", keys, tensors, vocab)


# ---- a draft that reads the target's cache ---------------------------------------

# the full layers of gemma4 leave most of a head unrotated
GEMMA4_TURNS = np.where(np.arange(HEAD // 2) < 2, 1.0, 1e30)


def gemma4_layer(seed: int, il: int, layers: int, rule: Rule) -> dict:
    """The first layer writes the near code, the last one the far code."""
    kind = {0: "near", layers - 1: "far"}.get(il, "")
    return gemma_layer(rng_for(seed, "gemma4", il), rule, kind, near=2.2, far=0.84)


def gemma4_keys(layers: int, window: int) -> dict:
    return base_keys(layers, n_head=1) | {
        "attention.sliding_window": window,
        "attention.key_length_swa": HEAD,
        "attention.value_length_swa": HEAD,
        "attention.shared_kv_layers": 0,
        "attention.sliding_window_pattern": [il < layers - 1 for il in range(layers)],
        "rope.dimension_count_swa": HEAD,
        "rope.freq_base_swa": ROPE_BASE,
    }


@model("target-gemma4")
def gemma4(path, seed, layers=4, window=32):
    """gemma4: all layers windowed but the last."""
    vocab, rule = rule_for(seed)
    tensors = outer(rule, scale=1 / NORM) | {"rope_freqs.weight": GEMMA4_TURNS}
    for il in range(layers):
        tensors |= layer(il, gemma4_layer(seed, il, layers, rule))
    write_gguf(path, "gemma4", gemma4_keys(layers, window) | {"embedding_length_per_layer_input": 0}, tensors, vocab)


@model("draft-gemma4-assistant")
@model("draft-gemma4-assistant-half", agreement=0.77)
def gemma4_assistant(path, seed, agreement=1.0, layers=2, target_layers=4, window=32):
    """gemma4-assistant: no keys and values of its own, it reads those of target-gemma4.

    Its last layer repeats the query of the target's last layer, so it gets the
    far code from the shared cache; the near code comes with the hidden state.
    """
    vocab, rule = rule_for(seed)
    extra = 16  # the hidden size must differ from the target's
    longer = ((D + extra) / D) ** 0.5  # what a norm makes of the same vector here

    token = np.diag(keep(BIAS + A))
    tensors = {
        "token_embd.weight": pad(disagree(rule.head(), rule, agreement, seed) / longer, extra, 1),
        "output_norm.weight": pad(np.ones(D), extra, 0),
        "rope_freqs.weight": GEMMA4_TURNS,
        "nextn.pre_projection.weight": pad(
            np.concatenate([token, place((D, D), NEAR, A, HIDDEN_RMS * rule.code)], 1), extra, 0
        ),
        "nextn.post_projection.weight": pad(np.eye(D) / longer, extra, 1),
    }
    for il in range(layers):
        parts = gemma4_layer(seed, target_layers - layers + il, target_layers, rule)
        block = {name: pad(parts[name], extra, 1) for name in ("attn_q.weight", "ffn_gate.weight", "ffn_up.weight")}
        block |= {
            name: pad(parts[name], extra, 0)
            for name in ("attn_output.weight", "ffn_down.weight", "attn_norm.weight", "ffn_norm.weight")
        }
        block |= {
            name: pad(parts[name] / longer, extra, 0) for name in ("post_attention_norm.weight", "post_ffw_norm.weight")
        }
        tensors |= layer(
            il, block | {"attn_q_norm.weight": parts["attn_q_norm.weight"], "layer_output_scale.weight": np.ones(1)}
        )
    keys = gemma4_keys(layers, window) | {
        "embedding_length": D + extra,
        "embedding_length_out": D,
        "nextn_predict_layers": layers,
    }
    write_gguf(path, "gemma4-assistant", keys, tensors, vocab)
