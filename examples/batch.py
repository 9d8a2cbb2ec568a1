#!/usr/bin/env python3
"""Answer every line of stdin; the prompts share the passes of the model. One JSON object a line comes out.

python examples/batch.py TARGET.gguf [DRAFT.gguf] < prompts.txt
"""

from __future__ import annotations

import json
import sys

import pyspec


def main(model: str, draft: str | None = None) -> int:
    prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    with pyspec.LLM(model, draft=draft, n_seq_max=4) as llm:
        for prompt, result in zip(prompts, llm.generate(prompts, max_tokens=64), strict=True):
            accepted = result.stats.acceptance_rate
            print(json.dumps({"prompt": prompt, "text": result.text, "accepted": accepted}))
    return 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
