"""Recurrent models (mamba)."""

from __future__ import annotations

import numpy as np

from .blocks import REST, layer, model, outer, pattern, write_gguf
from .rule import A_VALUE, BIAS, FAR, NEAR, NORM, ONE, A, D, place, rng_for, rule_for


@model("target-recurrent")
@model("draft-recurrent", layers=1)
@model("draft-recurrent-half", layers=1, agreement=0.68)
def mamba(path, seed, agreement=1.0, layers=2, inner=2 * D, state=8, conv=4, rank=4):
    """mamba; the draft is its first layer."""
    vocab, rule = rule_for(seed)
    tensors = outer(rule, agreement, seed)
    code = NEAR + FAR
    for il in range(layers):
        rng = rng_for(seed, "mamba", il)
        size = 0.7 if il == 0 else REST
        tensors |= layer(
            il,
            {
                "attn_norm.weight": np.ones(D),
                "ssm_in.weight": np.concatenate(
                    [
                        place((inner, D), range(inner), A, rng.standard_normal((inner, len(A))) / (A_VALUE * NORM)),
                        np.repeat(pattern(1.28, BIAS, ONE), inner, 0),
                    ]
                ),
                "ssm_conv1d.weight": rng.standard_normal((inner, conv)) / 2,
                "ssm_conv1d.bias": np.zeros(inner),
                "ssm_x.weight": rng.standard_normal((rank + 2 * state, inner)) / inner**0.5,
                "ssm_dt.weight": rng.standard_normal((inner, rank)) / 3,
                "ssm_dt.bias": np.full(inner, -0.5),
                "ssm_a": -np.exp(rng.uniform(-3, 0.5, (inner, state))),
                "ssm_d": np.full(inner, 0.5),
                "ssm_out.weight": place(
                    (D, inner), code, range(inner), rng.standard_normal((len(code), inner)) * size * NORM / 26
                ),
            },
        )
    keys = {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": D,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "ssm.conv_kernel": conv,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
    }
    write_gguf(path, "mamba", keys, tensors, vocab)
