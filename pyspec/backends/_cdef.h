/* The C declarations pyspec uses, for cffi in API mode: the compiler checks each against the vendored headers.
 * Only calls that can neither throw nor fail an assertion stand here; all others go through _shim.h.
 * `...` means "as the header says". */

struct llama_model;
struct llama_vocab;
struct llama_adapter_lora;
struct ggml_backend_device;
typedef struct ggml_backend_device * ggml_backend_dev_t;

enum llama_split_mode { LLAMA_SPLIT_MODE_NONE, LLAMA_SPLIT_MODE_LAYER, LLAMA_SPLIT_MODE_ROW, LLAMA_SPLIT_MODE_TENSOR, ... };
enum llama_load_mode {
    LLAMA_LOAD_MODE_AUTO, LLAMA_LOAD_MODE_NONE, LLAMA_LOAD_MODE_MMAP, LLAMA_LOAD_MODE_MLOCK,
    LLAMA_LOAD_MODE_MMAP_MLOCK, ...
};
enum llama_context_type { LLAMA_CONTEXT_TYPE_DEFAULT, LLAMA_CONTEXT_TYPE_MTP, ... };
enum llama_flash_attn_type { LLAMA_FLASH_ATTN_TYPE_AUTO, LLAMA_FLASH_ATTN_TYPE_DISABLED, LLAMA_FLASH_ATTN_TYPE_ENABLED, ... };
enum llama_token_attr { LLAMA_TOKEN_ATTR_UNDEFINED, LLAMA_TOKEN_ATTR_CONTROL, ... };
enum ggml_type { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_COUNT, ... };
enum llama_ftype { LLAMA_FTYPE_ALL_F32, ... };

typedef bool (*llama_progress_callback)(float progress, void * user_data);

struct llama_model_params {
    ggml_backend_dev_t * devices;
    int32_t n_gpu_layers;
    enum llama_split_mode split_mode;
    enum llama_load_mode load_mode;
    int32_t main_gpu;
    const float * tensor_split;
    llama_progress_callback progress_callback;
    void * progress_callback_user_data;
    bool vocab_only;
    bool check_tensors;
    bool use_extra_bufts;
    bool load_mtp;
    ...;
};

struct llama_context_params {
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    uint32_t n_rs_seq;
    uint32_t n_outputs_max;
    uint32_t n_outputs_max_per_seq;
    int32_t n_threads;
    int32_t n_threads_batch;
    enum llama_context_type ctx_type;
    enum llama_flash_attn_type flash_attn_type;
    float rope_freq_base;
    float rope_freq_scale;
    float yarn_ext_factor;
    float yarn_attn_factor;
    float yarn_beta_fast;
    float yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    enum ggml_type type_k;
    enum ggml_type type_v;
    bool embeddings;
    bool offload_kqv;
    bool no_perf;
    bool op_offload;
    bool swa_full;
    bool kv_unified;
    ...;
};

struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);

const char * llama_version(void);
const char * llama_print_system_info(void);
const char * ggml_version(void);
const char * ggml_commit(void);
size_t llama_max_devices(void);
bool llama_supports_mmap(void);
bool llama_supports_mlock(void);

const struct llama_vocab * llama_model_get_vocab(const struct llama_model * model);

/* Runs on the loading thread. Keeps a Python exception aside and answers false, which stops the load. */
extern "Python" bool pyspec_py_progress(float progress, void * user_data);
