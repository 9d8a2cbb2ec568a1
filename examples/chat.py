#!/usr/bin/env python3
"""Talk to a model in the terminal. Ctrl-C stops an answer, Ctrl-D ends.

python examples/chat.py TARGET.gguf [DRAFT.gguf]
"""

from __future__ import annotations

import sys

import pyspec


def main(model: str, draft: str | None = None) -> int:
    messages: list[dict[str, str]] = []
    with pyspec.LLM(model, draft=draft) as llm:
        print(f"{llm!r}", file=sys.stderr)
        while True:
            try:
                messages.append({"role": "user", "content": input("> ")})
            except EOFError:
                return 0
            text = ""
            stream = llm.chat(messages, stream=True, temperature=0.7, max_tokens=200)
            try:
                for piece in stream:
                    text += piece.text
                    print(piece.text, end="", flush=True)
            except KeyboardInterrupt:
                stream.close()  # cancels; the conversation goes on with what there is
            print()
            messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
