// Devices (contract: _shim_devices.h).

#include "_shim_devices.h"

#include "_shim.h"
#include "_shim_guard.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "llama-ext.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using clock_type = std::chrono::steady_clock;

double seconds_since(clock_type::time_point start) {
    return std::chrono::duration<double>(clock_type::now() - start).count();
}

template <class T, void (*release)(T *)> struct deleter {
    void operator()(T * p) const { release(p); }
};

using context_ptr = std::unique_ptr<ggml_context, deleter<ggml_context, ggml_free>>;
using backend_ptr = std::unique_ptr<ggml_backend, deleter<ggml_backend, ggml_backend_free>>;
using buffer_ptr = std::unique_ptr<ggml_backend_buffer, deleter<ggml_backend_buffer, ggml_backend_buffer_free>>;
using model_ptr = std::unique_ptr<llama_model, deleter<llama_model, llama_model_free>>;
using llama_ptr = std::unique_ptr<llama_context, deleter<llama_context, llama_free>>;

// Numbers in [-1, 1), the same everywhere.
std::vector<float> noise(size_t n, uint32_t seed) {
    std::vector<float> out(n);
    uint32_t x = seed * 2654435761u + 1;
    for (float & value : out) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        value = (float) (x >> 8) / (1 << 23) - 1.0f;
    }
    return out;
}

// One product, weights [k, m] of some type times rows [k, n], on a device.
struct product {
    context_ptr ctx;
    buffer_ptr buffer;
    ggml_tensor * weights = nullptr;
    ggml_tensor * rows = nullptr;
    ggml_tensor * result = nullptr;
    ggml_cgraph * graph = nullptr;
    std::vector<uint8_t> packed;
    std::vector<float> input;

    // False: the device does not support it.
    bool make(ggml_backend_t backend, ggml_type type, int64_t k, int64_t m, int64_t n) {
        ggml_init_params params = {ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true};
        ctx.reset(ggml_init(params));
        if (!ctx) {
            return false;
        }
        weights = ggml_new_tensor_2d(ctx.get(), type, k, m);
        rows = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, k, n);
        result = ggml_mul_mat(ctx.get(), weights, rows);
        if (!ggml_backend_supports_op(backend, result)) {
            return false;
        }
        graph = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(graph, result);
        buffer.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
        if (!buffer) {
            throw std::bad_alloc();
        }
        const std::vector<float> values = noise((size_t) (k * m), 1);
        packed.resize(ggml_nbytes(weights));
        ggml_quantize_chunk(type, values.data(), packed.data(), 0, m, k, nullptr);
        input = noise((size_t) (k * n), 2);
        ggml_backend_tensor_set(weights, packed.data(), 0, packed.size());
        ggml_backend_tensor_set(rows, input.data(), 0, input.size() * sizeof(float));
        return true;
    }

    void compute(ggml_backend_t backend) const {
        const ggml_status status = ggml_backend_graph_compute(backend, graph);
        if (status != GGML_STATUS_SUCCESS) {
            throw std::runtime_error(std::string("the device failed to compute: ") + ggml_status_to_string(status));
        }
        ggml_backend_synchronize(backend);
    }

    // Normalized mean squared error against double precision on the same packed weights.
    double error() const {
        const int64_t k = weights->ne[0], m = weights->ne[1], n = rows->ne[1];
        std::vector<float> got((size_t) (m * n)), unpacked((size_t) (k * m));
        ggml_backend_tensor_get(result, got.data(), 0, got.size() * sizeof(float));
        if (weights->type == GGML_TYPE_F32) {
            memcpy(unpacked.data(), packed.data(), packed.size());
        } else {
            ggml_get_type_traits(weights->type)->to_float(packed.data(), unpacked.data(), k * m);
        }
        double wrong = 0, all = 0;
        for (int64_t row = 0; row < n; row++) {
            for (int64_t j = 0; j < m; j++) {
                double sum = 0;
                for (int64_t i = 0; i < k; i++) {
                    sum += (double) unpacked[j * k + i] * input[row * k + i];
                }
                const double difference = sum - got[row * m + j];
                wrong += difference * difference;
                all += sum * sum;
            }
        }
        const double result = wrong / all;
        return std::isfinite(result) ? result : INFINITY;
    }
};

// Seconds of one pass, the fastest of those that fit into the budget; the first one, which compiles kernels, only if
// it took all of it.
double time_pass(const product & p, ggml_backend_t backend, double budget) {
    const auto start = clock_type::now();
    p.compute(backend);
    double best = seconds_since(start);
    bool first = true;
    while (seconds_since(start) < budget) {
        const auto begin = clock_type::now();
        p.compute(backend);
        const double took = seconds_since(begin);
        best = first ? took : std::min(best, took);
        first = false;
    }
    return std::max(best, 1e-9);
}

// Answers body(context) for a context whose sizes are right and whose memory was never taken. Reads the file's metadata.
template <class F>
int with_probe(const char * path, const llama_model_params * model_params, const llama_context_params * params, F && body) {
    return pyspec_guard([&]() -> int {
        llama_model_params mp = *model_params;
        mp.no_alloc = true;
        mp.load_mode = LLAMA_LOAD_MODE_NONE;
        model_ptr model(llama_model_load_from_file(path, mp));
        if (!model) {
            return pyspec_fail(PYSPEC_ERR_NULL, "llama_model_load_from_file returned NULL");
        }
        llama_ptr ctx(llama_init_from_model(model.get(), *params));
        if (!ctx) {
            return pyspec_fail(PYSPEC_ERR_NULL, "llama_init_from_model returned NULL");
        }
        return body(ctx.get());
    });
}

} // namespace

void pyspec_sum_memory(const llama_context * ctx, pyspec_memory * out) {
    for (const auto & entry : llama_get_memory_breakdown(ctx)) {
        out->model += entry.second.model;
        out->context += entry.second.context;
        out->compute += entry.second.compute;
        if (ggml_backend_buft_is_host(entry.first)) {
            out->host_new += entry.second.context + entry.second.compute;
        }
    }
}

extern "C" {

int pyspec_device_count(void) {
    return (int) ggml_backend_dev_count();
}

ggml_backend_dev_t pyspec_device_handle(int i) {
    return i >= 0 && (size_t) i < ggml_backend_dev_count() ? ggml_backend_dev_get(i) : nullptr;
}

int pyspec_device_info(int i, struct pyspec_device * out) {
    return pyspec_guard([&]() -> int {
        ggml_backend_dev_t dev = pyspec_device_handle(i);
        if (!dev) {
            return pyspec_fail(PYSPEC_ERR_ARG, "no such device");
        }
        ggml_backend_dev_props props = {};
        ggml_backend_dev_get_props(dev, &props);
        *out = {};
        out->name = props.name;
        out->description = props.description;
        out->backend = ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev));
        out->id = props.device_id ? props.device_id : "";
        out->type = (int32_t) props.type;
        out->memory_free = props.memory_free;
        out->memory_total = props.memory_total;
        out->async = props.caps.async;
        out->host_buffer = props.caps.host_buffer;
        out->buffer_from_host_ptr = props.caps.buffer_from_host_ptr;
        out->events = props.caps.events;
        out->mmap_support = props.caps.mmap_support;
        return PYSPEC_OK;
    });
}

int pyspec_backend_features(int i, char * buf, int size) {
    return pyspec_guard([&]() -> int {
        std::string text;
        if (i >= 0 && (size_t) i < ggml_backend_reg_count()) {
            ggml_backend_reg_t reg = ggml_backend_reg_get(i);
            auto get = (ggml_backend_get_features_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features");
            for (const ggml_backend_feature * f = get ? get(reg) : nullptr; f && f->name; f++) {
                text += std::string(f->name) + "=" + f->value + "\n";
            }
        }
        if (size <= 0 || text.size() >= (size_t) size) {
            return pyspec_fail(PYSPEC_ERR_ARG, "the buffer is too small");
        }
        memcpy(buf, text.c_str(), text.size() + 1);
        return PYSPEC_OK;
    });
}

int pyspec_test_device(int i, int32_t n_threads, double seconds, struct pyspec_device_test * out) {
    *out = {};
    return pyspec_guard([&]() -> int {
        const auto start = clock_type::now();
        ggml_backend_dev_t dev = pyspec_device_handle(i);
        if (!dev) {
            return pyspec_fail(PYSPEC_ERR_ARG, "no such device");
        }
        backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
        if (!backend) {
            return pyspec_fail(PYSPEC_ERR_NULL, "the device could not be opened");
        }
        ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
        auto set_n_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
        if (set_n_threads) {
            set_n_threads(backend.get(), n_threads);
        }
        // one row, as plain decoding has, and a few, as a verification has: other kernels
        for (const ggml_type type : {GGML_TYPE_Q8_0, GGML_TYPE_F16, GGML_TYPE_Q4_K, GGML_TYPE_Q4_0, GGML_TYPE_F32}) {
            for (const int64_t n : {1, 5}) {
                product p;
                // a software device compiles each kernel for seconds
                const bool enough = out->n_checked >= 2 && seconds_since(start) > seconds;
                if (!enough && p.make(backend.get(), type, 512, 96, n)) {
                    p.compute(backend.get());
                    out->error = std::max(out->error, p.error());
                    out->n_checked++;
                }
            }
        }
        // Larger until a pass takes its time: a fast GPU needs work that leaves its caches, a software device must not
        // be kept busy for minutes.
        for (const int64_t size : {256, 1024, 4096}) {
            product p;
            if (seconds_since(start) > 0.6 * seconds || !p.make(backend.get(), GGML_TYPE_Q8_0, size, size, 1)) {
                break;
            }
            const double took = time_pass(p, backend.get(), 0.1 * seconds);
            out->bytes_per_s = (double) ggml_nbytes(p.weights) / took;
            if (took > 0.002) {
                break;
            }
        }
        for (const int64_t size : {128, 512, 2048}) {
            product p;
            if (seconds_since(start) > 0.8 * seconds || !p.make(backend.get(), GGML_TYPE_F16, size, size, size / 4)) {
                break;
            }
            const double took = time_pass(p, backend.get(), 0.1 * seconds);
            out->flop_per_s = 2.0 * size * size * (size / 4) / took;
            if (took > 0.002) {
                break;
            }
        }
        out->seconds = seconds_since(start);
        return PYSPEC_OK;
    });
}

int pyspec_context_memory(const char * path, const struct llama_model_params * model_params,
                          const struct llama_context_params * params, struct pyspec_memory * out) {
    *out = {0, 0, 0, 0};
    return with_probe(path, model_params, params, [&](const llama_context * ctx) -> int {
        pyspec_sum_memory(ctx, out);
        return PYSPEC_OK;
    });
}

int pyspec_estimate_memory(const char * path, const struct llama_model_params * model_params,
                           const struct llama_context_params * params, struct pyspec_device_memory * rows, int32_t cap,
                           int32_t * n) {
    *n = 0;
    return with_probe(path, model_params, params, [&](const llama_context * ctx) -> int {
        std::vector<pyspec_device_memory> found;
        for (const auto & entry : llama_get_memory_breakdown(ctx)) {
            ggml_backend_dev_t dev = ggml_backend_buft_get_device(entry.first);
            int32_t index = ggml_backend_buft_is_host(entry.first) ? -1 : -2;
            if (dev && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_META) {
                return pyspec_fail(PYSPEC_ERR_ARG, "tensors split over several devices are not counted");
            }
            if (dev && index == -2) {
                for (int32_t i = 0; i < pyspec_device_count(); i++) {
                    if (pyspec_device_handle(i) == dev && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU) {
                        index = i;
                    }
                }
            }
            auto same = std::find_if(found.begin(), found.end(), [&](const auto & row) { return row.device == index; });
            if (same == found.end()) {
                same = found.insert(found.end(), pyspec_device_memory{index, 0, 0, 0});
            }
            same->model += entry.second.model;
            same->context += entry.second.context;
            same->compute += entry.second.compute;
        }
        if ((int32_t) found.size() > cap) {
            return pyspec_fail(PYSPEC_ERR_ARG, "more devices than rows");
        }
        std::copy(found.begin(), found.end(), rows);
        *n = (int32_t) found.size();
        return PYSPEC_OK;
    });
}

int pyspec_model_n_devices(const struct llama_model * model) {
    return llama_model_n_devices(model);
}

int pyspec_attention_support(const struct llama_model * model, int i, int type_k, int type_v, int head_k, int head_v,
                             int n_head, int n_head_kv, struct pyspec_attention * out) {
    *out = {nullptr, false, false, false, false};
    return pyspec_guard([&]() -> int {
        ggml_backend_dev_t dev = i < 0 ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) : nullptr;
        if (i >= 0 && i < llama_model_n_devices(model)) {
            dev = llama_model_get_device(model, i);
        }
        const ggml_type tk = (ggml_type) type_k, tv = (ggml_type) type_v;
        if (!dev || n_head_kv < 1 || n_head % n_head_kv != 0 || head_k % ggml_blck_size(tk) != 0 || head_v % ggml_blck_size(tv) != 0) {
            return pyspec_fail(PYSPEC_ERR_ARG, "no such device, or heads that are no whole blocks");
        }
        const ggml_init_params params = {64 * ggml_tensor_overhead(), nullptr, true};
        context_ptr owner(ggml_init(params));
        ggml_context * c = owner.get();
        if (!c) {
            return pyspec_fail(PYSPEC_ERR_MEMORY, "out of memory");
        }
        const int64_t n_cells = 256;
        const auto writes = [&](ggml_type type, int head) {
            ggml_tensor * cache = ggml_new_tensor_2d(c, type, (int64_t) head * n_head_kv, n_cells);
            ggml_tensor * rows = ggml_new_tensor_2d(c, GGML_TYPE_F32, (int64_t) head * n_head_kv, 1);
            return ggml_backend_dev_supports_op(dev, ggml_set_rows(c, cache, rows, ggml_new_tensor_1d(c, GGML_TYPE_I64, 1)));
        };
        // heads of one cell lie side by side, as in the cache
        const auto heads = [&](ggml_type type, int head) {
            return ggml_permute(c, ggml_new_tensor_3d(c, type, head, n_head_kv, n_cells), 0, 2, 1, 3);
        };
        ggml_tensor * q = ggml_permute(c, ggml_new_tensor_3d(c, GGML_TYPE_F32, head_k, n_head, 1), 0, 2, 1, 3);
        ggml_tensor * mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, n_cells, 1);
        ggml_tensor * k = heads(tk, head_k);
        const auto props = ggml_backend_dev_type(dev);
        out->device = ggml_backend_dev_name(dev);
        out->is_gpu = props == GGML_BACKEND_DEVICE_TYPE_GPU || props == GGML_BACKEND_DEVICE_TYPE_IGPU;
        out->writes = writes(tk, head_k) && writes(tv, head_v);
        ggml_tensor * fa = ggml_flash_attn_ext(c, q, k, heads(tv, head_v), mask, 1.0f, 0.0f, 0.0f);
        out->flash = ggml_backend_dev_supports_op(dev, fa);
        if (!ggml_is_quantized(tv)) {
            // without flash attention V lies transposed
            ggml_tensor * scores = ggml_new_tensor_3d(c, GGML_TYPE_F32, n_cells, 1, n_head);
            ggml_tensor * v = ggml_new_tensor_3d(c, tv, n_cells, head_v, n_head_kv);
            out->matmul = ggml_backend_dev_supports_op(dev, ggml_mul_mat(c, k, q)) &&
                          ggml_backend_dev_supports_op(dev, ggml_mul_mat(c, v, scores));
        }
        return PYSPEC_OK;
    });
}

} // extern "C"
