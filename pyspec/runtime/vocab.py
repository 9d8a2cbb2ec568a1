"""Text to tokens and back."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..backends import ModelHandle

__all__ = ["Vocab"]

_SPM = 1  # llama.h: LLAMA_VOCAB_TYPE_SPM


class Vocab:
    """A model's vocabulary and tokenizer. Borrowed from the model: unusable once that is closed. Thread-safe.

    Attributes:
        n_tokens: size. type: llama.h's ``enum llama_vocab_type``.
        bos, eos, eot, nl, pad, mask: token ids, -1 where the model has none.
        add_bos, add_eos: whether ``encode(add_special=True)`` adds them.
    """

    def __init__(self, handle: ModelHandle, metadata: dict[str, str]) -> None:
        self._handle = handle
        self.n_tokens = handle.n_vocab
        self.type = handle.vocab_type
        self.add_bos = handle.add_bos
        self.add_eos = handle.add_eos
        special = handle.special_tokens()
        self.special: dict[str, int] = dict(special)
        self.bos = special.get("bos", -1)
        self.eos = special.get("eos", -1)
        self.eot = special.get("eot", -1)
        self.nl = special.get("nl", -1)
        self.pad = special.get("pad", -1)
        self.mask = special.get("mask", -1)
        self._space_prefix = self.type == _SPM and metadata.get("tokenizer.ggml.add_space_prefix", "true") == "true"
        self._pieces: dict[int, bytes] = {}
        self._pieces_special: dict[int, bytes] = {}
        self._eog: frozenset[int] | None = None

    @property
    def eog_tokens(self) -> frozenset[int]:
        """Every token that ends a generation (EOS, EOT and their kin)."""
        if self._eog is None:
            self._eog = self._handle.eog_tokens()
        return self._eog

    def is_eog(self, token: int) -> bool:
        """True if this token ends a generation."""
        return token in self.eog_tokens

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Text to token ids.

        Args:
            text: any text; unpaired surrogates are replaced.
            add_special: add BOS and EOS as the model's metadata says.
            parse_special: read the text of control tokens as these tokens.

        Raises:
            ConfigError: ``text`` is not a str.
        """
        if not isinstance(text, str):
            raise ConfigError(f"text must be str, got {type(text).__name__}")
        ids: list[int] = self._handle.tokenize(text.encode("utf-8", "replace"), add_special, parse_special).tolist()
        return ids

    def decode(self, tokens: Iterable[int], skip_special: bool = True) -> str:
        """Token ids to text; bytes that are not UTF-8 become U+FFFD. ``decode(encode(text)) == text``.

        Raises:
            ConfigError: a token id is out of range.
        """
        if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Iterable):
            raise ConfigError(f"tokens must be token ids, got {type(tokens).__name__}")
        ids = list(tokens)
        for token in ids:
            self.check(token)
        data = b"".join(self.token_bytes(t, not skip_special) for t in ids)
        if self._space_prefix and data.startswith(b" "):
            first = next((t for t in ids if self.token_bytes(t, not skip_special)), -1)
            # SPM tokenizers put a space in front of the text; it is not part of it
            if first >= 0 and not self._handle.is_control(first):
                data = data[1:]
        return codecs.decode(data, "utf-8", "replace")

    def token_bytes(self, token: int, special: bool = False) -> bytes:
        """The bytes a token stands for, maybe half a character; control tokens are empty unless ``special``."""
        cache = self._pieces_special if special else self._pieces
        piece = cache.get(token)
        if piece is None:
            self.check(token)
            piece = cache[token] = self._handle.token_piece(token, special)
        return piece

    def token_text(self, token: int) -> bytes:
        """The vocabulary's own spelling of a token, e.g. with a visible space mark."""
        self.check(token)
        return self._handle.token_text(token)

    def is_control(self, token: int) -> bool:
        """True for control tokens, which are not part of the text."""
        self.check(token)
        return self._handle.is_control(token)

    def check(self, token: int) -> None:
        """Raise ConfigError if ``token`` is not an id of this vocabulary."""
        if not isinstance(token, (int, np.integer)) or isinstance(token, bool):
            raise ConfigError(f"a token id must be an integer, got {token!r}")
        if not 0 <= token < self.n_tokens:
            raise ConfigError(f"token id {token} is out of range: the vocabulary has {self.n_tokens} tokens")
