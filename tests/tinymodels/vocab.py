"""The vocabulary of all tiny models: byte-level BPE (lossless), or SentencePiece with byte fallback."""

from __future__ import annotations

import re
from collections import Counter

import gguf

UNK, BOS, EOS, MASK, PAD, IM_START, IM_END, EXTRA = range(8)
SPECIALS = ["<|unk|>", "<|bos|>", "<|endoftext|>", "<|mask|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<|extra|>"]
N_VOCAB = 512

CORPUS = """\
The quick brown fox jumps over the lazy dog while the other animals of the
forest are watching from the shadow of the old trees. When the morning comes,
the river carries the light of the sun through the valley, and the people of
the village start their work: they bake bread, repair the roof of the mill,
bring water from the well and talk about the weather. It is said that in the
beginning there was nothing but the sound of the wind in the grass. Later the
first travellers came along the road with their horses, their stories and
their songs, and some of them stayed. They built houses of stone and wood,
planted apple trees and learned to read the signs of the sky.

A computer program is a list of instructions. It reads an input, computes a
result and prints it; a good program also checks what it has been given. The
model predicts the next token from the tokens before it, the draft proposes a
few tokens at once, and the target accepts the longest correct prefix.
def add(a, b): return a + b
for i in range(10): print(i, add(i, 1))
Speculation works when the proposal is cheap and often right, otherwise it is
wasted. Numbers such as 1, 2, 3, 10, 100 and 2024 should be split into digits.
Café, naïve, façade, größer, über, señor, året, être, там, нет, 日本, 東京.
"""

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content']"
    " + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The printable stand-in of each byte value in a byte-level BPE vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


ALPHABET = byte_alphabet()
BYTE_OF = {c: b for b, c in enumerate(ALPHABET)}


def train_bpe(text: str, n_merges: int) -> list[tuple[str, str]]:
    words = Counter(re.findall(r" ?[^\W\d_]+|\d| ?[^\s\w]+|\s+", text))
    split = {w: [ALPHABET[b] for b in w.encode()] for w in words}
    merges = []
    while len(merges) < n_merges:
        pairs = Counter()
        for word, count in words.items():
            for pair in zip(split[word], split[word][1:], strict=False):
                pairs[pair] += count
        best = max(pairs, key=lambda p: (pairs[p], p))
        merges.append(best)
        for word, parts in split.items():
            out = []
            for part in parts:
                if out and (out[-1], part) == best:
                    out[-1] += part
                else:
                    out.append(part)
            split[word] = out
    return merges


class Vocab:
    """Token texts, types and tokenizer keys; ``kind`` is 'bpe' or 'spm'."""

    def __init__(self, kind: str = "bpe", size: int = N_VOCAB):
        self.kind = kind
        self.add_bos, self.add_eos = True, False
        self.bos, self.eos = BOS, EOS
        merges = train_bpe(CORPUS, N_VOCAB - len(SPECIALS) - 256)
        self.merges = [" ".join(m) for m in merges]
        self.raw: list[bytes | None] = [None] * len(SPECIALS)  # what a token decodes to
        self.raw += [bytes([b]) for b in range(256)]
        self.raw += [bytes(BYTE_OF[c] for c in a + b) for a, b in merges]
        normal, control, byte = 1, 3, 6
        self.types = [control] * len(SPECIALS) + [normal] * (N_VOCAB - len(SPECIALS))
        if kind == "bpe":
            self.tokens = SPECIALS + ALPHABET + [a + b for a, b in merges]
        else:
            self.tokens = SPECIALS + [f"<0x{b:02X}>" for b in range(256)]
            self.types[UNK] = 2
            self.types[len(SPECIALS) : len(SPECIALS) + 256] = [byte] * 256
            self.raw[len(self.tokens) :] = [b" ", *self.raw[len(self.tokens) : -1]]
            for i, piece in enumerate(self.raw[len(self.tokens) :]):
                try:
                    self.tokens.append(piece.decode().replace(" ", "\u2581"))
                except UnicodeDecodeError:
                    self.tokens.append(f"<part{i}>")
        for i in range(N_VOCAB, size):  # padding of a larger vocabulary
            self.tokens.append(f"<|pad{i}|>")
            self.types.append(control)
            self.raw.append(None)

    def __len__(self) -> int:
        return len(self.tokens)

    def clean(self) -> list[int]:
        """Tokens whose bytes are printable text on their own."""

        def ok(raw):
            try:
                return raw is not None and raw.decode().isprintable()
            except UnicodeDecodeError:
                return False

        return [i for i, raw in enumerate(self.raw) if ok(raw)]

    def write(self, w: gguf.GGUFWriter) -> None:
        w.add_tokenizer_model("gpt2" if self.kind == "bpe" else "llama")
        # "qwen2" is the pre-tokenizer that does not ask for space clean-up when detokenizing
        w.add_tokenizer_pre("qwen2" if self.kind == "bpe" else "default")
        w.add_token_list(self.tokens)
        w.add_token_types(self.types)
        if self.kind == "bpe":
            w.add_token_merges(self.merges)
        else:
            w.add_token_scores([-float(max(0, i - 263)) for i in range(len(self))])
            w.add_add_space_prefix(False)
        w.add_bos_token_id(self.bos)
        w.add_eos_token_id(self.eos)
        w.add_eot_token_id(IM_END)
        w.add_pad_token_id(PAD)
        w.add_mask_token_id(MASK)
        w.add_add_bos_token(self.add_bos)
        w.add_add_eos_token(self.add_eos)
        w.add_chat_template(CHAT_TEMPLATE)
