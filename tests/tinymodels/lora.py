"""LoRA adapters for the tiny models; random weights, so the adapted target wanders elsewhere."""

from __future__ import annotations

import gguf
import numpy as np

from .blocks import HEAD, N_FF, model
from .rule import D, rng_for
from .vocab import N_VOCAB

#: (inputs, outputs) of the weights an adapter may change.
SHAPES = {
    "attn_q": (D, 2 * HEAD),
    "attn_v": (D, 2 * HEAD),
    "attn_output": (2 * HEAD, D),
    "ffn_up": (D, N_FF),
    "ffn_down": (N_FF, D),
}


@model("lora-llama")
@model("lora-swa", arch="gemma3")
def lora_llama(
    path,
    seed,
    rank=4,
    layers=4,
    alpha=8.0,
    size=0.3,
    head=True,
    arch="llama",
    width=0,
    fault="",
):
    """An adapter for target-llama.

    ``head`` changes the output matrix too; ``width`` adds as many inputs, for an adapter of another model; ``fault``
    makes a file that must be refused: 'type', 'kind', 'lone' (A without B), 'name', 'integer', 'alora', 'rank',
    'embd', 'empty'.
    """
    rng = rng_for(seed, "lora", layers, rank)
    w = gguf.GGUFWriter(str(path), arch)
    w.add_type("model" if fault == "type" else "adapter")
    w.add_string("adapter.type", "other" if fault == "kind" else "lora")
    w.add_float32("adapter.lora.alpha", alpha)
    if fault == "alora":
        w.add_array("adapter.alora.invocation_tokens", [1, 2, 3])
    names = {f"blk.{il}.{name}.weight": shape for il in range(layers) for name, shape in SHAPES.items()}
    if head:
        names["output.weight"] = (D, N_VOCAB)
    if fault == "name":
        names = {"blk.99.attn_q.weight": SHAPES["attn_q"]}
    elif fault == "embd":
        names = {"token_embd.weight": (D, N_VOCAB)}
    elif fault == "empty":
        names = {}
    for name, (n_in, n_out) in names.items():
        a = rng.standard_normal((rank, n_in + width)) * size / (n_in * rank) ** 0.5
        b = rng.standard_normal((n_out, rank + 1 if fault == "rank" else rank)) * size
        kind = np.int32 if fault == "integer" else np.float32
        w.add_tensor(f"{name}.lora_a", (a * 1000 if fault == "integer" else a).astype(kind))
        if fault != "lone":
            w.add_tensor(f"{name}.lora_b", b.astype(kind))
    if fault == "empty":
        w.add_tensor("blk.0.attn_norm.weight", np.ones(D, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
