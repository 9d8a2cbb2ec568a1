#ifndef PYSPEC_SHIM_H
#define PYSPEC_SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The C API of pyspec's own. Rules:
 * - A wrapper that returns int answers PYSPEC_OK (0) or, where it says so, the code of the wrapped call; codes
 *   below -1000 are its own. pyspec_last_error() then holds the reason (per thread, until the next wrapper call).
 * - No C++ exception and no failed ggml assertion of the calling thread leaves a wrapper.
 * - Not thread-safe per context or model unless stated; callers lock.
 */
enum pyspec_status {
    PYSPEC_OK = 0,
    PYSPEC_ERR_ABORT = -1001,     /* a native assertion failed */
    PYSPEC_ERR_EXCEPTION = -1002, /* a C++ exception */
    PYSPEC_ERR_MEMORY = -1003,    /* out of memory */
    PYSPEC_ERR_ARG = -1004,       /* refused before anything was done */
    PYSPEC_ERR_NULL = -1005       /* the wrapped call answered NULL or false */
};

/* ---- process ---- */

struct pyspec_abi {
    const char * pyspec_version; /* of the package this was compiled from */
    const char * llama_version;  /* of the source tree this was compiled against; "" if unknown */
    const char * ggml_version;
    const char * ggml_commit;
    int32_t layout_ok; /* the parameter structs of the opened library have the compiled layout */
};

void pyspec_abi_info(struct pyspec_abi * out);
void pyspec_init(void);               /* log sink and abort handler; call once, before anything else */
const char * pyspec_last_error(void); /* thread-local */
int pyspec_last_log(char * buf, int size); /* warnings and errors logged by this thread's last wrapper call; bytes written */
/* File that holds the symbol used for: 0 llama_decode, 1 ggml_abort, 2 ggml_backend_load. Bytes written. */
int pyspec_library_path(int which, char * buf, int size);

/* ---- log ring: any thread ---- */

extern volatile int pyspec_log_pending; /* lines waiting; a hint, read without the lock */
void pyspec_log_set_level(int level);   /* lowest ggml_log_level kept */
int pyspec_log_pop(int * level, char * buf, int size); /* length of the line (cut to size), or -1: empty */
int pyspec_log_dropped(void);           /* lines lost since the last call because nobody drained */

/* ---- backends; devices: _shim_devices.h ---- */

int pyspec_library_open(const char * path); /* opens it for good; pyspec_last_error() says why not */
int pyspec_backend_score(const char * path);   /* >= 0: score (1 if the module has none); else error */
int pyspec_backend_load(const char * path);
int pyspec_backend_count(void);
const char * pyspec_backend_name(int i);

/* ---- model ---- */

struct pyspec_model_info {
    int32_t n_vocab, n_ctx_train, n_embd, n_embd_inp, n_embd_out, n_layer, n_layer_nextn;
    int32_t n_head, n_head_kv, n_swa, vocab_type, n_pos_per_embd, dflash_selector_top_k, n_target_layers;
    uint64_t n_params, size_bytes;
    bool is_recurrent, is_hybrid, is_diffusion, has_encoder, has_decoder, add_bos, add_eos;
    int32_t bos, eos, eot, sep, nl, pad, mask, fim_pre, fim_suf, fim_mid, fim_pad, fim_rep, fim_sep;
};

int pyspec_model_load(const char * path, const struct llama_model_params * params, struct llama_model ** out);
void pyspec_model_free(struct llama_model * model);
int pyspec_get_model_info(const struct llama_model * model, struct pyspec_model_info * out);
int pyspec_model_target_layer(const struct llama_model * model, int i);
int pyspec_model_meta_count(const struct llama_model * model);
/* Key (what 0) or value (1) number i as text; *len gets the full length. */
int pyspec_model_meta(const struct llama_model * model, int i, int what, char * buf, int size, int32_t * len);
const char * pyspec_model_chat_template(const struct llama_model * model, const char * name); /* NULL: none */
/* Description (what 0) or name of the file type (1). */
int pyspec_model_text(const struct llama_model * model, int what, char * buf, int size);
int pyspec_gguf_has_tensor(const char * path, const char * name, bool * found);

/* ---- vocabulary: any thread ---- */

/* *n: tokens written, or, when larger than cap, tokens needed (nothing written). */
int pyspec_tokenize(const struct llama_vocab * vocab, const char * text, int32_t len, int32_t * out, int32_t cap,
                    bool add_special, bool parse_special, int32_t * n);
int pyspec_token_piece(const struct llama_vocab * vocab, int32_t token, bool special, char * buf, int32_t size, int32_t * n);
const char * pyspec_token_text(const struct llama_vocab * vocab, int32_t token); /* NULL: no such token */
int pyspec_token_attr(const struct llama_vocab * vocab, int32_t token);          /* < 0: no such token */
int pyspec_token_is_eog(const struct llama_vocab * vocab, int32_t token);
int pyspec_token_is_control(const struct llama_vocab * vocab, int32_t token);
int pyspec_eog_tokens(const struct llama_vocab * vocab, int32_t * out, int32_t cap, int32_t * n);

/* ---- thread pool ---- */

typedef struct pyspec_threadpool pyspec_threadpool;

int pyspec_threadpool_new(int32_t n_threads, int32_t poll, pyspec_threadpool ** out);
/* The threads end once no context can touch them: after its next pass without this pool, or its end. */
void pyspec_threadpool_free(pyspec_threadpool * pool);

/* ---- context ---- */

typedef struct pyspec_context pyspec_context;

struct pyspec_context_info {
    uint32_t n_ctx, n_ctx_seq, n_batch, n_ubatch, n_seq_max, n_rs_seq, n_outputs_max;
    bool has_memory;
};

/* What the last decode or encode left, read by the caller in place. */
struct pyspec_output {
    int32_t n_rows;       /* rows of the batch; 0 after a failure */
    int32_t n_outputs;    /* rows of logits */
    int32_t n_unsampled;  /* output rows whose sequence has no device sampler */
    int32_t bad_row;      /* the row PYSPEC_ERR_ARG is about, or -1 */
    int32_t n_cut;        /* micro-batches that ended before their logits (skip_logits) */
};

/* abort_flag: checked between graph nodes; owned by the caller, must outlive the context.
 * skip_logits: a decode without outputs ends before the output matrix, which some architectures multiply with all rows
 * whatever is flagged. For contexts whose graph is one piece on the CPU: only the piece that holds the norm before that
 * matrix ends, and a GPU is asked to wait after every piece. */
int pyspec_context_new(struct llama_model * model, const struct llama_context_params * params, pyspec_context * other,
                       bool skip_logits, const volatile int * abort_flag, pyspec_context ** out);
void pyspec_context_free(pyspec_context * ctx);
void pyspec_get_context_info(const pyspec_context * ctx, struct pyspec_context_info * out);
const struct pyspec_output * pyspec_context_output(const pyspec_context * ctx);

/* One llama_decode of n rows. tokens or embd may be NULL, not both; embd is float[n][width of this context].
 * Checks every row first. Returns llama_decode's code, or one below -1000. */
int pyspec_decode(pyspec_context * ctx, const int32_t * tokens, const int32_t * pos, const int32_t * seq,
                  const int8_t * output, const float * embd, int32_t n);
int pyspec_encode(pyspec_context * ctx, const float * embd, int32_t n);
/* Room for n output rows. libllama makes it anew, with zeroes, whenever a decode wants more rows than any before; there
 * is no call for it but a decode, so this is one that ends at its first node. Clears the cache; only for token rows. */
int pyspec_reserve_outputs(pyspec_context * ctx, int32_t n);

int pyspec_logits(pyspec_context * ctx, float ** out);
int pyspec_nextn(pyspec_context * ctx, float ** out);
int pyspec_layer_input(pyspec_context * ctx, int32_t layer, float ** out);
int pyspec_set_nextn(pyspec_context * ctx, bool value, bool masked);
/* Builds a one-row graph to see whether the architecture hands this layer out; PYSPEC_ERR_NULL if it does not. */
int pyspec_set_layer_input(pyspec_context * ctx, int32_t layer, bool value);
int pyspec_set_nextn_layer_offset(pyspec_context * ctx, int32_t offset);
int pyspec_set_causal_attn(pyspec_context * ctx, bool value);

/* *removed is also false where libllama would answer true and go on wrongly: fewer snapshots than rows to forget, or
 * a sliding window whose cells were overwritten. */
int pyspec_seq_rm(pyspec_context * ctx, int32_t seq, int32_t p0, int32_t p1, bool * removed);
int pyspec_seq_cp(pyspec_context * ctx, int32_t src, int32_t dst, int32_t p0, int32_t p1);
int pyspec_seq_keep(pyspec_context * ctx, int32_t seq);
int pyspec_memory_clear(pyspec_context * ctx);
int pyspec_seq_pos(pyspec_context * ctx, int32_t seq, int32_t * pos_min, int32_t * pos_max);

int pyspec_state_seq_size(pyspec_context * ctx, int32_t seq, uint32_t flags, uint64_t * size);
int pyspec_state_seq_get(pyspec_context * ctx, int32_t seq, uint32_t flags, uint8_t * dst, uint64_t size, uint64_t * n);
int pyspec_state_seq_set(pyspec_context * ctx, int32_t seq, uint32_t flags, const uint8_t * src, uint64_t size, uint64_t * n);

/* Top-k on the device for one sequence; top_k <= 0 removes it. *offloaded: the backend took it. */
int pyspec_set_top_k(pyspec_context * ctx, int32_t seq, int32_t top_k, bool * offloaded);
/* Candidates of output row i; *n is 0 when that row was not sampled on the device. */
int pyspec_sampled(pyspec_context * ctx, int32_t i, const int32_t ** ids, const float ** logits, const float ** probs, int32_t * n);

/* LoRA adapters belong to their model and are freed with it at the latest. The caller keeps contexts of the model from
 * decoding during both calls: their graphs are sized by the model's adapters. */
int pyspec_lora_load(struct llama_model * model, const char * path, struct llama_adapter_lora ** out);
void pyspec_lora_free(struct llama_adapter_lora * adapter);
int pyspec_set_loras(pyspec_context * ctx, struct llama_adapter_lora ** adapters, float * scales, int32_t n);

int pyspec_set_n_threads(pyspec_context * ctx, int32_t n_threads, int32_t n_threads_batch);
int pyspec_attach_threadpool(pyspec_context * ctx, const pyspec_threadpool * pool); /* NULL: detach */

struct pyspec_memory {
    uint64_t model, context, compute; /* bytes on all devices */
    uint64_t host_new;                /* context + compute in host memory */
};

int pyspec_memory_breakdown(const pyspec_context * ctx, struct pyspec_memory * out);
/* What a device computes itself of attention on a cache of these types: one row of queries against 256 cells. */
struct pyspec_attention {
    const char * device; /* the registry's, for good */
    bool is_gpu;
    bool writes;         /* rows into both caches */
    bool flash;          /* flash attention */
    bool matmul;         /* attention as two matrix products */
};

int pyspec_model_n_devices(const struct llama_model * model); /* those that layers are offloaded to */
/* i: device of the model, or -1: the CPU. Rows of heads must be whole blocks of their type. */
int pyspec_attention_support(const struct llama_model * model, int i, int type_k, int type_v, int head_k, int head_v,
                             int n_head, int n_head_kv, struct pyspec_attention * out);
/* What a context would take, without taking it: reads the file's metadata again. */
int pyspec_context_memory(const char * path, const struct llama_model_params * model_params,
                          const struct llama_context_params * params, struct pyspec_memory * out);

/* ---- tools ---- */

int pyspec_quantize(const char * src, const char * dst, int32_t ftype, int32_t n_threads, bool allow_requantize);
/* Fails an assertion on purpose, for tests of the barrier: on this thread, or on another one (which ends the process). */
int pyspec_test_abort(bool other_thread);

#ifdef __cplusplus
} // extern "C"
#endif

#endif
