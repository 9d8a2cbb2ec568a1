// Vocabularies (contract: _shim.h).

#include "_shim.h"
#include "_shim_guard.h"

#include <cstdint>

namespace {

bool token_ok(const llama_vocab * vocab, int32_t token) {
    return llama_vocab_type(vocab) != LLAMA_VOCAB_TYPE_NONE && token >= 0 && token < llama_vocab_n_tokens(vocab);
}

int no_token() {
    return pyspec_fail(PYSPEC_ERR_ARG, "no such token");
}

} // namespace

extern "C" {

int pyspec_tokenize(const struct llama_vocab * vocab, const char * text, int32_t len, int32_t * out, int32_t cap,
                    bool add_special, bool parse_special, int32_t * n) {
    *n = 0;
    return pyspec_guard([&]() -> int {
        if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
            return pyspec_fail(PYSPEC_ERR_ARG, "the model has no vocabulary");
        }
        const int32_t got = llama_tokenize(vocab, text, len, out, cap, add_special, parse_special);
        if (got == INT32_MIN) {
            return pyspec_fail(PYSPEC_ERR_ARG, "the text gives more than 2^31 tokens");
        }
        *n = got < 0 ? -got : got;
        return PYSPEC_OK;
    });
}

int pyspec_token_piece(const struct llama_vocab * vocab, int32_t token, bool special, char * buf, int32_t size, int32_t * n) {
    *n = 0;
    return pyspec_guard([&]() -> int {
        if (!token_ok(vocab, token)) {
            return no_token();
        }
        const int32_t got = llama_token_to_piece(vocab, token, buf, size, 0, special);
        *n = got < 0 ? -got : got;
        return PYSPEC_OK;
    });
}

const char * pyspec_token_text(const struct llama_vocab * vocab, int32_t token) {
    const char * text = nullptr;
    pyspec_guard([&]() -> int {
        text = token_ok(vocab, token) ? llama_vocab_get_text(vocab, token) : nullptr;
        return PYSPEC_OK;
    });
    return text;
}

int pyspec_token_attr(const struct llama_vocab * vocab, int32_t token) {
    return pyspec_guard([&]() -> int {
        return token_ok(vocab, token) ? (int) llama_vocab_get_attr(vocab, token) : no_token();
    });
}

int pyspec_token_is_eog(const struct llama_vocab * vocab, int32_t token) {
    return pyspec_guard([&]() -> int {
        return token_ok(vocab, token) ? (int) llama_vocab_is_eog(vocab, token) : no_token();
    });
}

int pyspec_token_is_control(const struct llama_vocab * vocab, int32_t token) {
    return pyspec_guard([&]() -> int {
        return token_ok(vocab, token) ? (int) llama_vocab_is_control(vocab, token) : no_token();
    });
}

int pyspec_eog_tokens(const struct llama_vocab * vocab, int32_t * out, int32_t cap, int32_t * n) {
    *n = 0;
    return pyspec_guard([&]() -> int {
        if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
            return PYSPEC_OK;
        }
        const int32_t n_tokens = llama_vocab_n_tokens(vocab);
        for (int32_t i = 0; i < n_tokens; ++i) {
            if (llama_vocab_is_eog(vocab, i)) {
                if (*n < cap) {
                    out[*n] = i;
                }
                ++*n;
            }
        }
        return PYSPEC_OK;
    });
}

} // extern "C"
