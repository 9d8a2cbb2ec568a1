"""Do a draft and a target fit each other? Checks with numbers in the message, made before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import VocabMismatchError

if TYPE_CHECKING:
    from ..runtime.vocab import Vocab

__all__ = [
    "HIDDEN_ROW_ARCHITECTURES",
    "LAYER_INPUT_ARCHITECTURES",
    "MAX_SIZE_DIFFERENCE",
    "check_token_texts",
    "check_vocab",
]

#: llama.cpp's limits (common/speculative): the vocabularies' sizes may differ by this much ...
MAX_SIZE_DIFFERENCE = 128
#: ... and token texts are compared from this id on; the first ids hold special tokens that often differ in spelling.
FIRST_CHECKED_TOKEN = 5

#: Architectures whose graphs hand out the input rows of each layer (src/models of the pinned tree). On any other one
#: libllama aborts at the first decode after extraction is switched on.
LAYER_INPUT_ARCHITECTURES = frozenset(
    {
        "bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe", "llama",
        "llama-embed", "mimo2", "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h",
        "nemotron_h_moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen4exp",
    }
)  # fmt: skip

#: Architectures whose trunk hands out nextn rows (the final hidden rows). Others return rows of zeros, in silence.
HIDDEN_ROW_ARCHITECTURES = frozenset(
    {
        "bailingmoe3", "cohere2moe", "deepseek2", "deepseek2-ocr", "deepseek32", "deepseek4", "gemma4", "glm-dsa",
        "glm4moe", "glm5-next", "gpt-oss", "hy_v3", "mimo2", "mistral4", "nemotron_h", "nemotron_h_moe", "qwen35",
        "qwen35moe", "qwen3next", "step35",
    }
)  # fmt: skip


def check_vocab(target: Vocab, draft: Vocab) -> None:
    """Refuse vocabularies between which token ids cannot be exchanged, by llama.cpp's rules.

    Raises:
        VocabMismatchError: names the first difference, with both values.
    """
    if target.type != draft.type:
        raise VocabMismatchError(
            f"the vocabulary types differ: target {target.type}, draft {draft.type}; use a draft of the same family"
        )
    for what in ("bos", "eos"):
        adds = [bool(getattr(v, f"add_{what}")) for v in (target, draft)]
        if adds[0] != adds[1]:
            raise VocabMismatchError(f"add_{what} differs: target {adds[0]}, draft {adds[1]}")
        ids = [getattr(v, what) for v in (target, draft)]
        if adds[0] and ids[0] != ids[1]:
            raise VocabMismatchError(f"the {what} token differs: target {ids[0]}, draft {ids[1]}")
    check_token_texts(target, draft)


def check_token_texts(target: Vocab, draft: Vocab) -> None:
    """The part of :func:`check_vocab` about size and token texts.

    Raises:
        VocabMismatchError: names the first difference, with both values.
    """
    n_target, n_draft = target.n_tokens, draft.n_tokens
    if abs(n_target - n_draft) > MAX_SIZE_DIFFERENCE:
        raise VocabMismatchError(
            f"the vocabulary sizes differ by {abs(n_target - n_draft)}: target {n_target}, draft {n_draft}; "
            f"at most {MAX_SIZE_DIFFERENCE} is allowed"
        )
    text_t, text_d = target.token_text, draft.token_text
    for i in range(FIRST_CHECKED_TOKEN, min(n_target, n_draft)):
        if text_t(i) != text_d(i):
            raise VocabMismatchError(f"token {i} differs: target {_show(text_t(i))}, draft {_show(text_d(i))}")


def _show(text: bytes) -> str:
    return repr(text.decode("utf-8", "backslashreplace"))
