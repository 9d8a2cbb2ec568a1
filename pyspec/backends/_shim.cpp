// The C API between Python and libllama (contract: _shim.h).
//
// Barrier: ggml reports a failed assertion through one process-wide callback and then calls abort(). On a thread that
// is inside guarded() our callback throws instead, so the failure unwinds to the wrapper. The thrown class derives
// from std::exception on purpose: upstream's own handlers then clean up (close files, drop half-read state) on the
// way, and call_state::aborted still tells the wrapper afterwards. Threads that are not ours (ggml's workers) abort as
// before; what could fail there is checked by the caller first.

#include "_shim.h"

#include "_shim_guard.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "gguf.h"
#include "llama-ext.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#ifdef _WIN32
#    define WIN32_LEAN_AND_MEAN
#    include <windows.h>
#    include <intrin.h>
#else
#    include <dlfcn.h>
#    if defined(__x86_64__)
#        include <cpuid.h>
#    endif
#endif

#ifndef PYSPEC_VERSION
#    error "PYSPEC_VERSION must be defined by the build"
#endif
#ifndef PYSPEC_LLAMA_VERSION
#    define PYSPEC_LLAMA_VERSION ""
#endif
#ifndef PYSPEC_GGML_VERSION
#    define PYSPEC_GGML_VERSION ""
#endif
#ifndef PYSPEC_GGML_COMMIT
#    define PYSPEC_GGML_COMMIT ""
#endif

volatile int pyspec_log_pending = 0;

namespace {

struct native_abort : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct call_state {
    int depth = 0;
    int uncaught = 0;      // exceptions in flight when the outermost wrapper was entered
    bool aborted = false;  // an assertion failed inside the current wrapper
    bool quiet = false;    // what is logged is of interest only if the wrapper fails
    std::string error;
    std::string abort_message;
    std::vector<std::string> lines;  // warnings and errors of the current wrapper
    std::string partial;             // log text without its newline yet
    int level = GGML_LOG_LEVEL_INFO; // of `partial`
};

call_state & state() {
    static thread_local call_state s;
    return s;
}

constexpr size_t MAX_LINES = 16;
constexpr size_t MAX_RING = 4096;

struct log_ring {
    std::mutex mutex;
    std::deque<std::pair<int, std::string>> lines;
    int dropped = 0;
    std::atomic<int> level{GGML_LOG_LEVEL_WARN};
};

// never destroyed: ggml's static destructors may still log
log_ring & ring() {
    static log_ring * r = new log_ring;
    return *r;
}

ggml_abort_callback_t g_previous_abort = nullptr;

void log_line(call_state & s, int level, std::string line) {
    if (line.empty()) {
        return;
    }
    if (level >= GGML_LOG_LEVEL_WARN && s.depth > 0) {
        if (s.lines.size() >= MAX_LINES) {
            s.lines.erase(s.lines.begin());
        }
        s.lines.push_back(line);
    }
    log_ring & r = ring();
    if (s.quiet || level < r.level.load(std::memory_order_relaxed)) {
        return;
    }
    std::lock_guard<std::mutex> lock(r.mutex);
    if (r.lines.size() >= MAX_RING) {
        r.lines.pop_front();
        r.dropped++;
    }
    r.lines.emplace_back(level, std::move(line));
    pyspec_log_pending = (int) r.lines.size();
}

void on_log(enum ggml_log_level level_in, const char * text, void *) {
    try {
        call_state & s = state();
        const int level = level_in == GGML_LOG_LEVEL_CONT || level_in == GGML_LOG_LEVEL_NONE ? s.level : (int) level_in;
        if (level_in != GGML_LOG_LEVEL_CONT && !s.partial.empty()) {
            log_line(s, s.level, std::move(s.partial));
            s.partial.clear();
        }
        s.level = level;
        if (level < std::min<int>(ring().level.load(std::memory_order_relaxed), GGML_LOG_LEVEL_WARN)) {
            return;
        }
        s.partial += text;
        size_t end;
        while ((end = s.partial.find('\n')) != std::string::npos) {
            log_line(s, level, s.partial.substr(0, end));
            s.partial.erase(0, end + 1);
        }
    } catch (...) { // out of memory: the line is lost
    }
}

void on_abort(const char * message) {
    call_state & s = state();
    // throwing while another exception unwinds would call std::terminate
    if (s.depth > 0 && std::uncaught_exceptions() == s.uncaught) {
        s.aborted = true;
        s.abort_message = message;
        throw native_abort(message);
    }
    if (g_previous_abort) {
        g_previous_abort(message);
    } else {
        fprintf(stderr, "%s\n", message);
    }
}

int fail(int code, std::string message) {
    state().error = std::move(message);
    return code;
}

// Runs f, which returns an int; nothing thrown or asserted inside gets out. Nests (a progress callback may load).
template <class F> int guarded(F && f) {
    call_state & s = state();
    const bool outer_aborted = s.aborted;
    const int outer_uncaught = s.uncaught;
    if (s.depth++ == 0) {
        s.lines.clear();
        s.error.clear();
    }
    s.aborted = false;
    s.uncaught = std::uncaught_exceptions();
    int rc;
    try {
        rc = f();
    } catch (const std::bad_alloc &) {
        rc = fail(PYSPEC_ERR_MEMORY, "out of memory");
    } catch (const std::exception & e) {
        rc = fail(PYSPEC_ERR_EXCEPTION, e.what());
    } catch (...) {
        rc = fail(PYSPEC_ERR_EXCEPTION, "unknown C++ exception");
    }
    if (s.aborted) {
        rc = fail(PYSPEC_ERR_ABORT, s.abort_message);
    }
    s.aborted = outer_aborted;
    s.uncaught = outer_uncaught;
    s.depth--;
    return rc;
}

int put(char * buf, int size, const std::string & text) {
    if (size <= 0) {
        return 0;
    }
    const int n = std::min<int>((int) text.size(), size - 1);
    memcpy(buf, text.data(), n);
    buf[n] = 0;
    return n;
}

// Modules and their dependencies look their symbols up in themselves first, so a libggml that another package opened
// with RTLD_GLOBAL is never bound.
void * open_library(const char * path, std::string & error) {
#ifdef _WIN32
    const int n = MultiByteToWideChar(CP_UTF8, 0, path, -1, nullptr, 0);
    std::wstring wide(n > 0 ? n : 1, L'\0');
    MultiByteToWideChar(CP_UTF8, 0, path, -1, &wide[0], n);
    void * handle = (void *) LoadLibraryW(wide.c_str());
    if (!handle) {
        error = "LoadLibrary failed with error " + std::to_string(GetLastError());
    }
    return handle;
#else
    int flags = RTLD_NOW | RTLD_LOCAL;
#    ifdef RTLD_DEEPBIND
    const char * off = getenv("PYSPEC_NO_DEEPBIND");
    if (!off || !*off || strcmp(off, "0") == 0) {
        flags |= RTLD_DEEPBIND;
    }
#    endif
    void * handle = dlopen(path, flags);
    if (!handle) {
        const char * text = dlerror();
        error = text ? text : "dlopen failed";
    }
    return handle;
#endif
}

void * find_symbol(void * handle, const char * name) {
#ifdef _WIN32
    return (void *) GetProcAddress((HMODULE) handle, name);
#else
    return dlsym(handle, name);
#endif
}

// A CPU variant's score is 1 plus one power of two for each instruction set it needs, of those that the CPU has. ggml
// does not ask whether the operating system saves the wider registers; without that their instructions are illegal.
bool os_saves_registers_for(int score) {
#if defined(__x86_64__) || defined(_M_X64)
    const int needs = std::max(0, score - 1);
    const bool wide = needs & (1 << 4);     // AVX; F16C, FMA and AVX2 come with it
    const bool very_wide = needs & (1 << 7); // AVX-512
    if (!wide && !very_wide) {
        return true;
    }
    uint64_t saved = 0;
#    ifdef _MSC_VER
    int regs[4];
    __cpuid(regs, 1);
    if (regs[2] & (1 << 27)) {
        saved = _xgetbv(0);
    }
#    else
    unsigned a, b, c = 0, d;
    if (__get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 27))) {
        __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
        saved = (uint64_t(d) << 32) | a;
    }
#    endif
    const uint64_t wanted = very_wide ? 0xe6 : 0x6;
    return (saved & wanted) == wanted;
#else
    return score >= 0;
#endif
}

bool layout_ok() {
    const llama_model_params m = llama_model_default_params();
    const llama_context_params c = llama_context_default_params();
    const llama_model_quantize_params q = llama_model_quantize_default_params();
    return m.devices == nullptr && m.n_gpu_layers == -1 && m.split_mode == LLAMA_SPLIT_MODE_LAYER && m.main_gpu == 0 &&
           m.progress_callback == nullptr && m.kv_overrides == nullptr && !m.vocab_only && m.use_extra_bufts &&
           !m.no_alloc && !m.load_mtp && c.n_ctx == 512 && c.n_batch == 2048 && c.n_ubatch == 512 &&
           c.n_seq_max == 1 && c.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_AUTO && c.yarn_ext_factor == -1.0f &&
           c.type_k == GGML_TYPE_F16 && c.type_v == GGML_TYPE_F16 && c.abort_callback == nullptr && !c.embeddings &&
           c.offload_kqv && c.op_offload && !c.kv_unified && c.samplers == nullptr && c.n_samplers == 0 &&
           c.ctx_other == nullptr && q.nthread == 0 && !q.allow_requantize && q.quantize_output_tensor &&
           q.imatrix == nullptr && q.prune_layers == nullptr;
}

} // namespace

int pyspec_guarded(int (*body)(void *), void * data) {
    return guarded([&]() -> int { return body(data); });
}

int pyspec_fail(int code, std::string message) {
    return fail(code, std::move(message));
}

struct pyspec_threadpool {
    std::shared_ptr<ggml_threadpool> pool;
};

struct pyspec_context {
    llama_context * ctx = nullptr;
    llama_memory_t memory = nullptr;
    const llama_vocab * vocab = nullptr;
    const volatile int * abort_flag = nullptr;
    pyspec_context_info info = {};
    pyspec_output out = {0, 0, 0, -1, 0};
    int32_t n_vocab = 0;
    int32_t n_pos_per_embd = 1;
    int32_t n_swa = 0;
    bool embeddings = false;
    bool causal = true;
    bool has_snapshots = false;            // rollback by recurrent snapshots
    bool has_encoder = false;
    bool needs_both = false;               // rows carry a token and an embedding; otherwise exactly one of them
    bool all_or_none = false;              // output flags: on every row or on none
    bool no_logits = false;                // this pass ends before the output matrix
    bool reserving = false;                // this pass ends at once
    std::vector<int32_t> last_rows;        // [n_seq_max] rows of each sequence in the last decode
    std::vector<int32_t> n_seq_id;         // [n_batch] ones
    std::vector<llama_seq_id *> seq_rows;  // [n_batch] pointers into the caller's seq array
    const int32_t * seq_base = nullptr;    // the array seq_rows was made for
    std::vector<int32_t> pos_sections;     // [4 * n_batch] positions of embedding rows under M-RoPE
    std::map<int32_t, llama_sampler *> samplers;
    std::shared_ptr<ggml_threadpool> pool;  // attached
    // Detached, but the CPU backend keeps the pool of its last pass and pauses it at the start of the next one.
    std::vector<std::shared_ptr<ggml_threadpool>> old_pools;
};

namespace {

bool should_abort(void * data) {
    const auto * c = (const pyspec_context *) data;
    return c->reserving || *c->abort_flag != 0;
}

/* ggml asks for each node in turn whether it is to stop behind it ("ask"), and there whether it is to go on. Without
 * logits a pass ends with the norm before the output matrix: the cache and the hidden rows come before it. */
bool eval_node(ggml_tensor * node, bool ask, void * data) {
    auto * c = (pyspec_context *) data;
    if (ask) {
        return c->no_logits && std::strcmp(ggml_get_name(node), "result_norm") == 0;
    }
    c->out.n_cut++;
    return false;
}

int bad_row(pyspec_context * c, int32_t row, const char * what, int64_t value, int64_t limit) {
    c->out.bad_row = row;
    return fail(PYSPEC_ERR_ARG, "row " + std::to_string(row) + ": " + what + " " + std::to_string(value) +
                                    " is not in [0, " + std::to_string(limit) + ")");
}

void result_reset(pyspec_context * c) {
    c->out = {0, 0, 0, -1, 0};
}

void copy_info(const llama_model * model, pyspec_model_info & o) {
    const llama_vocab * v = llama_model_get_vocab(model);
    o.n_vocab = llama_vocab_n_tokens(v);
    o.n_ctx_train = llama_model_n_ctx_train(model);
    o.n_embd = llama_model_n_embd(model);
    o.n_embd_inp = llama_model_n_embd_inp(model);
    o.n_embd_out = llama_model_n_embd_out(model);
    o.n_layer = llama_model_n_layer(model);
    o.n_layer_nextn = llama_model_n_layer_nextn(model);
    // the per-layer tables are only filled when there are layers
    if (o.n_layer + o.n_layer_nextn > 0) {
        o.n_head = llama_model_n_head(model);
        o.n_head_kv = llama_model_n_head_kv(model);
    }
    o.n_swa = llama_model_n_swa(model);
    o.vocab_type = llama_vocab_type(v);
    const llama_rope_type rope = llama_model_rope_type(model);
    o.n_pos_per_embd = rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE ? 4 : 1;
    o.dflash_selector_top_k = llama_model_dflash_selector_top_k(model);
    o.n_target_layers = (int32_t) llama_model_target_layer_ids_n(model);
    o.n_params = llama_model_n_params(model);
    o.size_bytes = llama_model_size(model);
    o.is_recurrent = llama_model_is_recurrent(model);
    o.is_hybrid = llama_model_is_hybrid(model);
    o.is_diffusion = llama_model_is_diffusion(model);
    o.has_encoder = llama_model_has_encoder(model);
    o.has_decoder = llama_model_has_decoder(model);
    o.add_bos = llama_vocab_get_add_bos(v);
    o.add_eos = llama_vocab_get_add_eos(v);
    o.bos = llama_vocab_bos(v);
    o.eos = llama_vocab_eos(v);
    o.eot = llama_vocab_eot(v);
    o.sep = llama_vocab_sep(v);
    o.nl = llama_vocab_nl(v);
    o.pad = llama_vocab_pad(v);
    o.mask = llama_vocab_mask(v);
    o.fim_pre = llama_vocab_fim_pre(v);
    o.fim_suf = llama_vocab_fim_suf(v);
    o.fim_mid = llama_vocab_fim_mid(v);
    o.fim_pad = llama_vocab_fim_pad(v);
    o.fim_rep = llama_vocab_fim_rep(v);
    o.fim_sep = llama_vocab_fim_sep(v);
}

std::string architecture(const llama_model * model) {
    char buf[128] = {0};
    llama_model_meta_val_str(model, "general.architecture", buf, sizeof(buf));
    return buf;
}

} // namespace

extern "C" {

// ---- process ----

void pyspec_abi_info(struct pyspec_abi * out) {
    *out = {PYSPEC_VERSION, PYSPEC_LLAMA_VERSION, PYSPEC_GGML_VERSION, PYSPEC_GGML_COMMIT, layout_ok()};
}

void pyspec_init(void) {
    static std::once_flag once;
    std::call_once(once, [] {
        ggml_log_set(on_log, nullptr);
        llama_log_set(on_log, nullptr);
        g_previous_abort = ggml_set_abort_callback(on_abort);
        ggml_time_init();
        // fills ggml's half-precision tables before several threads need them
        ggml_init_params params = {0, nullptr, false};
        ggml_free(ggml_init(params));
    });
}

const char * pyspec_last_error(void) {
    return state().error.c_str();
}

int pyspec_last_log(char * buf, int size) {
    call_state & s = state();
    std::string text;
    for (const std::string & line : s.lines) {
        text += line;
        text += '\n';
    }
    s.lines.clear();
    return put(buf, size, text);
}

int pyspec_library_path(int which, char * buf, int size) {
    const void * address = which == 0 ? (const void *) llama_decode
                         : which == 1 ? (const void *) ggml_abort
                                      : (const void *) ggml_backend_load;
#ifdef _WIN32
    HMODULE module = nullptr;
    char path[4096] = {0};
    if (GetModuleHandleExA(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                           (LPCSTR) address, &module)) {
        GetModuleFileNameA(module, path, sizeof(path) - 1);
    }
    return put(buf, size, path);
#else
    Dl_info info;
    return put(buf, size, dladdr(address, &info) && info.dli_fname ? info.dli_fname : "");
#endif
}

// ---- log ----

void pyspec_log_set_level(int level) {
    ring().level.store(level, std::memory_order_relaxed);
}

int pyspec_log_pop(int * level, char * buf, int size) {
    log_ring & r = ring();
    std::pair<int, std::string> line;
    {
        std::lock_guard<std::mutex> lock(r.mutex);
        if (r.lines.empty()) {
            pyspec_log_pending = 0;
            return -1;
        }
        line = std::move(r.lines.front());
        r.lines.pop_front();
        pyspec_log_pending = (int) r.lines.size();
    }
    *level = line.first;
    return put(buf, size, line.second);
}

int pyspec_log_dropped(void) {
    log_ring & r = ring();
    std::lock_guard<std::mutex> lock(r.mutex);
    const int n = r.dropped;
    r.dropped = 0;
    return n;
}

// ---- backends and devices ----

int pyspec_library_open(const char * path) {
    return guarded([&]() -> int {
        std::string error;
        return open_library(path, error) ? PYSPEC_OK : fail(PYSPEC_ERR_NULL, error);
    });
}

int pyspec_backend_score(const char * path) {
    return guarded([&]() -> int {
        std::string error;
        void * handle = open_library(path, error);
        if (!handle) {
            return fail(PYSPEC_ERR_NULL, error);
        }
        // the module stays open: modules must not be unloaded once their static objects exist
        auto function = (int (*)(void)) find_symbol(handle, "ggml_backend_score");
        const int score = function ? std::max(0, function()) : 1;
        const char * separator = std::max(strrchr(path, '/'), strrchr(path, '\\'));
        const bool cpu_variant = strstr(separator ? separator : path, "ggml-cpu-") != nullptr;
        return cpu_variant && !os_saves_registers_for(score) ? 0 : score;
    });
}

int pyspec_backend_load(const char * path) {
    return guarded([&]() -> int {
        std::string error;
        if (!open_library(path, error)) {
            return fail(PYSPEC_ERR_NULL, error);
        }
        // ggml opens the path again and gets the library bound above
        if (!ggml_backend_load(path)) {
            std::string text = "ggml refused the module";
            for (const std::string & line : state().lines) {
                text += "; " + line;
            }
            return fail(PYSPEC_ERR_NULL, text);
        }
        return PYSPEC_OK;
    });
}

int pyspec_backend_count(void) {
    return (int) ggml_backend_reg_count();
}

const char * pyspec_backend_name(int i) {
    return i >= 0 && (size_t) i < ggml_backend_reg_count() ? ggml_backend_reg_name(ggml_backend_reg_get(i)) : nullptr;
}

// ---- model ----

int pyspec_model_load(const char * path, const struct llama_model_params * params, struct llama_model ** out) {
    *out = nullptr;
    const int rc = guarded([&]() -> int {
        *out = llama_model_load_from_file(path, *params);
        return *out ? PYSPEC_OK : fail(PYSPEC_ERR_NULL, "llama_model_load_from_file returned NULL");
    });
    if (rc != PYSPEC_OK && *out) {
        pyspec_model_free(*out);
        *out = nullptr;
    }
    return rc;
}

void pyspec_model_free(struct llama_model * model) {
    guarded([&]() -> int {
        llama_model_free(model);
        return PYSPEC_OK;
    });
}

int pyspec_get_model_info(const struct llama_model * model, struct pyspec_model_info * out) {
    return guarded([&]() -> int {
        *out = {};
        copy_info(model, *out);
        return PYSPEC_OK;
    });
}

int pyspec_model_target_layer(const struct llama_model * model, int i) {
    const bool ok = i >= 0 && (uint32_t) i < llama_model_target_layer_ids_n(model);
    return ok ? llama_model_target_layer_ids(model)[i] : -1;
}

int pyspec_model_meta_count(const struct llama_model * model) {
    return llama_model_meta_count(model);
}

int pyspec_model_meta(const struct llama_model * model, int i, int what, char * buf, int size, int32_t * len) {
    return guarded([&]() -> int {
        *len = what == 0 ? llama_model_meta_key_by_index(model, i, buf, size)
                         : llama_model_meta_val_str_by_index(model, i, buf, size);
        return *len >= 0 ? PYSPEC_OK : fail(PYSPEC_ERR_ARG, "no such metadata entry");
    });
}

const char * pyspec_model_chat_template(const struct llama_model * model, const char * name) {
    const char * text = nullptr;
    guarded([&]() -> int {
        text = llama_model_chat_template(model, name);
        return PYSPEC_OK;
    });
    return text;
}

int pyspec_model_text(const struct llama_model * model, int what, char * buf, int size) {
    buf[0] = 0;
    return guarded([&]() -> int {
        if (what == 0) {
            llama_model_desc(model, buf, size);
        } else {
            const char * text = llama_ftype_name(llama_model_ftype(model));
            put(buf, size, text ? text : "");
        }
        return PYSPEC_OK;
    });
}

int pyspec_gguf_has_tensor(const char * path, const char * name, bool * found) {
    return guarded([&]() -> int {
        gguf_init_params params = {/*.no_alloc =*/true, /*.ctx =*/nullptr};
        gguf_context * gguf = gguf_init_from_file(path, params);
        if (!gguf) {
            return fail(PYSPEC_ERR_NULL, "not a readable GGUF file");
        }
        *found = gguf_find_tensor(gguf, name) >= 0;
        gguf_free(gguf);
        return PYSPEC_OK;
    });
}

// ---- context ----

int pyspec_context_new(struct llama_model * model, const struct llama_context_params * params_in, pyspec_context * other,
                       bool skip_logits, const volatile int * abort_flag, pyspec_context ** out) {
    *out = nullptr;
    return guarded([&]() -> int {
        auto c = std::make_unique<pyspec_context>();
        pyspec_model_info m = {};
        copy_info(model, m);
        llama_context_params params = *params_in;
        params.ctx_other = other ? other->ctx : nullptr;
        c->abort_flag = abort_flag;
        params.abort_callback = should_abort;
        params.abort_callback_data = c.get();
        if (skip_logits) {
            params.cb_eval = eval_node;
            params.cb_eval_user_data = c.get();
        }

        llama_context * ctx = llama_init_from_model(model, params);
        if (!ctx) {
            return fail(PYSPEC_ERR_NULL, "llama_init_from_model returned NULL");
        }
        c->ctx = ctx;
        c->memory = llama_get_memory(ctx);
        c->vocab = llama_model_get_vocab(model);
        c->n_vocab = m.n_vocab;
        c->n_pos_per_embd = m.n_pos_per_embd;
        c->n_swa = m.n_swa;
        c->embeddings = params.embeddings;
        c->causal = llama_get_causal_attn(ctx);
        c->has_encoder = m.has_encoder;
        c->needs_both = params_in->ctx_type == LLAMA_CONTEXT_TYPE_MTP || architecture(model) == "eagle3";
        c->all_or_none = m.n_target_layers > 0;

        pyspec_context_info & i = c->info;
        i.n_ctx = llama_n_ctx(ctx);
        i.n_ctx_seq = llama_n_ctx_seq(ctx);
        i.n_batch = llama_n_batch(ctx);
        i.n_ubatch = llama_n_ubatch(ctx);
        i.n_seq_max = llama_n_seq_max(ctx);
        i.n_rs_seq = llama_n_rs_seq(ctx);
        i.n_outputs_max = params.n_outputs_max == 0 || m.has_encoder ? i.n_batch : params.n_outputs_max;
        i.has_memory = c->memory != nullptr;

        // the MTP blocks of recurrent models are plain attention
        c->has_snapshots = i.n_rs_seq > 0 && (m.is_recurrent || m.is_hybrid) &&
                           params_in->ctx_type != LLAMA_CONTEXT_TYPE_MTP;
        c->last_rows.assign(i.n_seq_max, 0);
        c->n_seq_id.assign(i.n_batch, 1);
        c->seq_rows.assign(i.n_batch + 1, nullptr);
        if (c->n_pos_per_embd > 1) {
            c->pos_sections.assign((size_t) c->n_pos_per_embd * i.n_batch, 0);
        }
        *out = c.release();
        return PYSPEC_OK;
    });
}

void pyspec_context_free(pyspec_context * c) {
    if (!c) {
        return;
    }
    guarded([&]() -> int {
        llama_free(c->ctx);
        return PYSPEC_OK;
    });
    guarded([&]() -> int {
        for (auto & entry : c->samplers) {
            llama_sampler_free(entry.second);
        }
        return PYSPEC_OK;
    });
    delete c;
}

void pyspec_get_context_info(const pyspec_context * c, struct pyspec_context_info * out) {
    *out = c->info;
}

const struct pyspec_output * pyspec_context_output(const pyspec_context * c) {
    return &c->out;
}

int pyspec_decode(pyspec_context * c, const int32_t * tokens, const int32_t * pos, const int32_t * seq,
                  const int8_t * output, const float * embd, int32_t n) {
    result_reset(c);
    return guarded([&]() -> int {
        const pyspec_context_info & info = c->info;
        if (n < 1 || (uint32_t) n > info.n_batch) {
            return fail(PYSPEC_ERR_ARG, "a batch has 1 to n_batch (" + std::to_string(info.n_batch) + ") rows, got " +
                                            std::to_string(n));
        }
        if ((!c->causal || !info.has_memory) && (uint32_t) n > info.n_ubatch) {
            return fail(PYSPEC_ERR_ARG, "without causal attention a batch has at most n_ubatch (" +
                                            std::to_string(info.n_ubatch) + ") rows, got " + std::to_string(n));
        }
        // libllama reads what is missing from elsewhere, or from nowhere
        if (c->needs_both ? !tokens || !embd : !tokens == !embd) {
            return fail(PYSPEC_ERR_ARG, c->needs_both ? "the rows of this context need a token and an embedding each"
                                                      : "the rows of this context are tokens or embeddings, one of them");
        }
        int32_t n_outputs = 0, n_unsampled = 0;
        for (int32_t i = 0; i < n; ++i) {
            if (tokens && (uint32_t) tokens[i] >= (uint32_t) c->n_vocab) {
                return bad_row(c, i, "token", tokens[i], c->n_vocab);
            }
            if ((uint32_t) seq[i] >= info.n_seq_max) {
                return bad_row(c, i, "sequence", seq[i], info.n_seq_max);
            }
            if (pos[i] < 0 || pos[i] > INT32_MAX - 65536) {
                return bad_row(c, i, "position", pos[i], (int64_t) INT32_MAX - 65536);
            }
            if (output[i] || c->embeddings) {
                ++n_outputs;
                n_unsampled += c->samplers.empty() || c->samplers.count(seq[i]) == 0;
            }
        }
        if ((uint32_t) n_outputs > info.n_outputs_max) {
            return fail(PYSPEC_ERR_ARG, "the batch wants " + std::to_string(n_outputs) + " outputs, n_outputs_max is " +
                                            std::to_string(info.n_outputs_max));
        }
        if (c->all_or_none && n_outputs != 0 && n_outputs != n) {
            return fail(PYSPEC_ERR_ARG, "this draft model gives outputs for every row of a batch or for none; " +
                                            std::to_string(n_outputs) + " of " + std::to_string(n) + " rows are flagged");
        }

        if (c->seq_base != seq) {
            for (size_t i = 0; i < c->seq_rows.size() - 1; ++i) {
                c->seq_rows[i] = const_cast<llama_seq_id *>(seq + i);
            }
            c->seq_base = seq;
        }
        const int32_t * positions = pos;
        if (!tokens && c->n_pos_per_embd > 1) {
            // section-major; text uses the same position in the first three sections
            for (int32_t s = 0; s < c->n_pos_per_embd; ++s) {
                for (int32_t i = 0; i < n; ++i) {
                    c->pos_sections[(size_t) s * n + i] = s < 3 ? pos[i] : 0;
                }
            }
            positions = c->pos_sections.data();
        }
        llama_batch batch = {};
        batch.n_tokens = n;
        batch.token = const_cast<llama_token *>(tokens);
        batch.embd = const_cast<float *>(embd);
        batch.pos = const_cast<llama_pos *>(positions);
        batch.n_seq_id = c->n_seq_id.data();
        batch.seq_id = c->seq_rows.data();
        batch.logits = const_cast<int8_t *>(output);

        std::fill(c->last_rows.begin(), c->last_rows.end(), 0);
        c->no_logits = n_outputs == 0;
        const int rc = llama_decode(c->ctx, batch);
        if (rc == 0) {
            c->out = {n, n_outputs, n_unsampled, -1, c->out.n_cut};
            c->old_pools.clear();
            for (int32_t i = 0; i < n; ++i) {
                c->last_rows[seq[i]]++;
            }
        }
        return rc;
    });
}

int pyspec_encode(pyspec_context * c, const float * embd, int32_t n) {
    result_reset(c);
    return guarded([&]() -> int {
        if (n < 1 || (uint32_t) n > c->info.n_ubatch) {
            return fail(PYSPEC_ERR_ARG, "an encoder batch has 1 to n_ubatch (" + std::to_string(c->info.n_ubatch) +
                                            ") rows, got " + std::to_string(n));
        }
        if (!c->has_encoder || !embd) {
            return fail(PYSPEC_ERR_ARG, "the model has no encoder, or there are no rows");
        }
        llama_batch batch = {};
        batch.n_tokens = n;
        batch.embd = const_cast<float *>(embd);
        c->no_logits = false;
        const int rc = llama_encode(c->ctx, batch);
        if (rc == 0) {
            c->out = {n, n, n, -1, 0};
            c->old_pools.clear();
        }
        return rc;
    });
}

int pyspec_reserve_outputs(pyspec_context * c, int32_t n) {
    result_reset(c);
    return guarded([&]() -> int {
        const int32_t n_seq = (int32_t) c->info.n_seq_max;
        const int32_t each = (n + n_seq - 1) / n_seq;
        if (n < 1 || (uint32_t) n > c->info.n_batch || (uint32_t) n > c->info.n_outputs_max ||
            (uint32_t) each > c->info.n_ctx_seq || c->needs_both || !c->memory) {
            return fail(PYSPEC_ERR_ARG, "no such pass: " + std::to_string(n) + " rows with outputs");
        }
        std::vector<int8_t> output(n, 1);
        std::vector<int32_t> tokens(n, 0), pos(n), seq(n);
        std::vector<llama_seq_id *> seq_rows(n + 1, nullptr);
        for (int32_t i = 0; i < n; ++i) {
            pos[i] = i % each;
            seq[i] = i / each;
            seq_rows[i] = &seq[i];
        }
        llama_batch batch = {};
        batch.n_tokens = n;
        batch.token = tokens.data();
        batch.pos = pos.data();
        batch.n_seq_id = c->n_seq_id.data();
        batch.seq_id = seq_rows.data();
        batch.logits = output.data();
        struct scope {
            pyspec_context * c;
            explicit scope(pyspec_context * c) : c(c) { c->reserving = state().quiet = true; }
            ~scope() { c->reserving = state().quiet = false; }
        } ends_at_once(c);
        llama_synchronize(c->ctx);
        llama_memory_clear(c->memory, false);
        const int rc = llama_decode(c->ctx, batch);
        // only the CPU backend looks at the flag; it has the first node of most graphs, of others a GPU makes the pass
        llama_synchronize(c->ctx);
        llama_memory_clear(c->memory, false);
        std::fill(c->last_rows.begin(), c->last_rows.end(), 0);
        return rc == 0 || rc == 2 ? PYSPEC_OK : rc;
    });
}

int pyspec_logits(pyspec_context * c, float ** out) {
    return guarded([&]() -> int {
        *out = llama_get_logits(c->ctx);
        return *out ? PYSPEC_OK : fail(PYSPEC_ERR_NULL, "llama_get_logits returned NULL");
    });
}

int pyspec_nextn(pyspec_context * c, float ** out) {
    return guarded([&]() -> int {
        *out = llama_get_embeddings_nextn(c->ctx);
        return *out ? PYSPEC_OK : fail(PYSPEC_ERR_NULL, "no nextn embeddings; enable them before the decode");
    });
}

int pyspec_layer_input(pyspec_context * c, int32_t layer, float ** out) {
    return guarded([&]() -> int {
        *out = llama_get_embeddings_layer_inp(c->ctx, layer);
        return *out ? PYSPEC_OK : fail(PYSPEC_ERR_NULL, "no input rows of this layer");
    });
}

int pyspec_set_nextn(pyspec_context * c, bool value, bool masked) {
    return guarded([&]() -> int {
        llama_set_embeddings_nextn(c->ctx, value, masked);
        return PYSPEC_OK;
    });
}

int pyspec_set_layer_input(pyspec_context * c, int32_t layer, bool value) {
    const int rc = guarded([&]() -> int {
        if (layer < 0 || layer > llama_model_n_layer(llama_get_model(c->ctx))) {
            return fail(PYSPEC_ERR_ARG, "no such layer");
        }
        llama_set_embeddings_layer_inp(c->ctx, layer, value);
        return PYSPEC_OK;
    });
    if (rc != PYSPEC_OK || !value) {
        return rc;
    }
    // An architecture without this output fails an assertion while the graph is built, before any thread computes.
    const int probe = guarded([&]() -> int {
        // A GPU may still compute the last pass, and this takes its graph and memory away: libllama does not wait here.
        llama_synchronize(c->ctx);
        // one row for every sequence: a split cache wants the same number of rows from each
        const uint32_t n = llama_n_seq_max(c->ctx);
        return llama_graph_reserve(c->ctx, n, n, n) ? PYSPEC_OK : fail(PYSPEC_ERR_MEMORY, "no memory for the graph");
    });
    // either way this call makes the next decode reserve its worst-case graph again
    const std::string reason = state().error;
    const int undo = guarded([&]() -> int {
        llama_set_embeddings_layer_inp(c->ctx, layer, probe == PYSPEC_OK);
        return PYSPEC_OK;
    });
    if (probe == PYSPEC_OK || undo != PYSPEC_OK) {
        return undo;
    }
    return fail(probe == PYSPEC_ERR_ABORT ? PYSPEC_ERR_NULL : probe, reason);
}

int pyspec_set_nextn_layer_offset(pyspec_context * c, int32_t offset) {
    return guarded([&]() -> int {
        if (offset < 0 || offset >= std::max(1, llama_model_n_layer_nextn(llama_get_model(c->ctx)))) {
            return fail(PYSPEC_ERR_ARG, "no such MTP block");
        }
        llama_set_nextn_layer_offset(c->ctx, offset);
        return PYSPEC_OK;
    });
}

int pyspec_set_causal_attn(pyspec_context * c, bool value) {
    return guarded([&]() -> int {
        llama_set_causal_attn(c->ctx, value);
        c->causal = value;
        return PYSPEC_OK;
    });
}

int pyspec_seq_rm(pyspec_context * c, int32_t seq, int32_t p0, int32_t p1, bool * removed) {
    return guarded([&]() -> int {
        const int32_t pos_max = llama_memory_seq_pos_max(c->memory, seq);
        if (p0 > 0 && p0 <= pos_max && (p1 < 0 || p1 > pos_max)) {
            // libllama answers true here, but the state it would go on with is wrong
            const bool no_snapshot = c->has_snapshots && pos_max + 1 - p0 >= c->last_rows[seq];
            const bool window_gone = c->n_swa > 0 && llama_memory_seq_pos_min(c->memory, seq) > std::max(0, p0 - c->n_swa + 1);
            if (no_snapshot || window_gone) {
                *removed = false;
                return PYSPEC_OK;
            }
        }
        *removed = llama_memory_seq_rm(c->memory, seq, p0, p1);
        return PYSPEC_OK;
    });
}

int pyspec_seq_cp(pyspec_context * c, int32_t src, int32_t dst, int32_t p0, int32_t p1) {
    return guarded([&]() -> int {
        llama_memory_seq_cp(c->memory, src, dst, p0, p1);
        return PYSPEC_OK;
    });
}

int pyspec_seq_keep(pyspec_context * c, int32_t seq) {
    return guarded([&]() -> int {
        llama_memory_seq_keep(c->memory, seq);
        return PYSPEC_OK;
    });
}

int pyspec_memory_clear(pyspec_context * c) {
    return guarded([&]() -> int {
        llama_synchronize(c->ctx); // a GPU may still write the cells of the last pass
        llama_memory_clear(c->memory, true);
        return PYSPEC_OK;
    });
}

int pyspec_seq_pos(pyspec_context * c, int32_t seq, int32_t * pos_min, int32_t * pos_max) {
    return guarded([&]() -> int {
        *pos_min = llama_memory_seq_pos_min(c->memory, seq);
        *pos_max = llama_memory_seq_pos_max(c->memory, seq);
        return PYSPEC_OK;
    });
}

int pyspec_state_seq_size(pyspec_context * c, int32_t seq, uint32_t flags, uint64_t * size) {
    return guarded([&]() -> int {
        *size = llama_state_seq_get_size_ext(c->ctx, seq, flags);
        return *size ? PYSPEC_OK : fail(PYSPEC_ERR_NULL, "llama_state_seq_get_size_ext returned 0");
    });
}

int pyspec_state_seq_get(pyspec_context * c, int32_t seq, uint32_t flags, uint8_t * dst, uint64_t size, uint64_t * n) {
    return guarded([&]() -> int {
        *n = llama_state_seq_get_data_ext(c->ctx, dst, size, seq, flags);
        return *n ? PYSPEC_OK : fail(PYSPEC_ERR_NULL, "llama_state_seq_get_data_ext returned 0");
    });
}

int pyspec_state_seq_set(pyspec_context * c, int32_t seq, uint32_t flags, const uint8_t * src, uint64_t size, uint64_t * n) {
    return guarded([&]() -> int {
        *n = llama_state_seq_set_data_ext(c->ctx, src, size, seq, flags);
        return *n ? PYSPEC_OK : fail(PYSPEC_ERR_NULL, "llama_state_seq_set_data_ext returned 0");
    });
}

int pyspec_set_top_k(pyspec_context * c, int32_t seq, int32_t top_k, bool * offloaded) {
    *offloaded = false;
    return guarded([&]() -> int {
        llama_sampler * chain = nullptr;
        if (top_k > 0) {
            chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
            llama_sampler_chain_add(chain, llama_sampler_init_top_k(top_k));
        }
        const bool ok = llama_set_sampler(c->ctx, seq, chain);
        auto old = c->samplers.find(seq);
        if (old != c->samplers.end()) {
            llama_sampler_free(old->second);
            c->samplers.erase(old);
        }
        if (chain && ok) {
            c->samplers[seq] = chain;
        } else if (chain) {
            llama_sampler_free(chain);
        }
        *offloaded = chain && ok;
        return PYSPEC_OK;
    });
}

int pyspec_sampled(pyspec_context * c, int32_t i, const int32_t ** ids, const float ** logits, const float ** probs, int32_t * n) {
    *ids = nullptr;
    *logits = nullptr;
    *probs = nullptr;
    *n = 0;
    return guarded([&]() -> int {
        const uint32_t count = llama_get_sampled_candidates_count_ith(c->ctx, i);
        if (count == 0) {
            return PYSPEC_OK;
        }
        *ids = llama_get_sampled_candidates_ith(c->ctx, i);
        if (llama_get_sampled_logits_count_ith(c->ctx, i) == count) {
            *logits = llama_get_sampled_logits_ith(c->ctx, i);
        }
        if (llama_get_sampled_probs_count_ith(c->ctx, i) == count) {
            *probs = llama_get_sampled_probs_ith(c->ctx, i);
        }
        *n = (int32_t) count;
        return PYSPEC_OK;
    });
}

int pyspec_lora_load(struct llama_model * model, const char * path, struct llama_adapter_lora ** out) {
    *out = nullptr;
    return guarded([&]() -> int {
        *out = llama_adapter_lora_init(model, path);
        return *out ? PYSPEC_OK : fail(PYSPEC_ERR_NULL, "llama_adapter_lora_init returned NULL");
    });
}

void pyspec_lora_free(struct llama_adapter_lora * adapter) {
    guarded([&]() -> int {
        llama_adapter_lora_free(adapter);
        return PYSPEC_OK;
    });
}

int pyspec_set_loras(pyspec_context * c, struct llama_adapter_lora ** adapters, float * scales, int32_t n) {
    return guarded([&]() -> int {
        return llama_set_adapters_lora(c->ctx, adapters, n, scales);
    });
}

int pyspec_set_n_threads(pyspec_context * c, int32_t n_threads, int32_t n_threads_batch) {
    return guarded([&]() -> int {
        llama_set_n_threads(c->ctx, n_threads, n_threads_batch);
        return PYSPEC_OK;
    });
}

int pyspec_attach_threadpool(pyspec_context * c, const pyspec_threadpool * pool) {
    return guarded([&]() -> int {
        if (c->pool) {
            c->old_pools.push_back(c->pool);
        }
        c->pool = pool ? pool->pool : nullptr;
        if (pool) {
            llama_attach_threadpool(c->ctx, c->pool.get(), c->pool.get());
        } else {
            llama_detach_threadpool(c->ctx);
        }
        return PYSPEC_OK;
    });
}

int pyspec_memory_breakdown(const pyspec_context * c, struct pyspec_memory * out) {
    *out = {0, 0, 0, 0};
    return guarded([&]() -> int {
        pyspec_sum_memory(c->ctx, out);
        return PYSPEC_OK;
    });
}

// ---- thread pool, tools ----

int pyspec_threadpool_new(int32_t n_threads, int32_t poll, pyspec_threadpool ** out) {
    *out = nullptr;
    return guarded([&]() -> int {
        ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        ggml_backend_reg_t reg = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;
        using new_fn = ggml_threadpool * (*) (ggml_threadpool_params *);
        using free_fn = void (*)(ggml_threadpool *);
        auto make = reg ? (new_fn) ggml_backend_reg_get_proc_address(reg, "ggml_threadpool_new") : nullptr;
        auto release = reg ? (free_fn) ggml_backend_reg_get_proc_address(reg, "ggml_threadpool_free") : nullptr;
        if (!make || !release) {
            return fail(PYSPEC_ERR_NULL, "the CPU backend has no thread pools");
        }
        ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
        params.poll = poll;
        auto handle = std::make_unique<pyspec_threadpool>();
        handle->pool.reset(make(&params), release);
        if (!handle->pool) {
            return fail(PYSPEC_ERR_NULL, "ggml_threadpool_new returned NULL");
        }
        *out = handle.release();
        return PYSPEC_OK;
    });
}

void pyspec_threadpool_free(pyspec_threadpool * pool) {
    guarded([&]() -> int {
        delete pool;
        return PYSPEC_OK;
    });
}

int pyspec_quantize(const char * src, const char * dst, int32_t ftype, int32_t n_threads, bool allow_requantize) {
    return guarded([&]() -> int {
        llama_model_quantize_params params = llama_model_quantize_default_params();
        params.ftype = (llama_ftype) ftype;
        params.nthread = n_threads;
        params.allow_requantize = allow_requantize;
        const uint32_t rc = llama_model_quantize(src, dst, &params);
        return rc == 0 ? PYSPEC_OK : fail(PYSPEC_ERR_NULL, "llama_model_quantize returned " + std::to_string(rc));
    });
}

int pyspec_test_abort(bool other_thread) {
    return guarded([&]() -> int {
        if (other_thread) {
            std::thread([] { GGML_ABORT("asked for by a test"); }).join();
        }
        GGML_ABORT("asked for by a test");
    });
}

} // extern "C"
