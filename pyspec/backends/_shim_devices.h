#ifndef PYSPEC_SHIM_DEVICES_H
#define PYSPEC_SHIM_DEVICES_H

#include <stdbool.h>
#include <stdint.h>

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Devices: what they are, what a model takes on each, whether they compute. Rules as in _shim.h. */

struct pyspec_device {
    const char * name;
    const char * description;
    const char * backend;
    const char * id; /* PCI address or the like; "" if unknown */
    int32_t type;    /* enum ggml_backend_dev_type */
    uint64_t memory_free;
    uint64_t memory_total;
    bool async, host_buffer, buffer_from_host_ptr, events, mmap_support;
};

int pyspec_device_count(void);
int pyspec_device_info(int i, struct pyspec_device * out);
ggml_backend_dev_t pyspec_device_handle(int i);
/* Features of backend i, one "NAME=value" a line: instruction sets of a CPU build, architectures of a GPU build. */
int pyspec_backend_features(int i, char * buf, int size);

struct pyspec_device_test {
    double error;      /* worst normalized mean squared error of a product, against double precision */
    double bytes_per_s; /* weights read by a product with one row */
    double flop_per_s;  /* of a product with many rows */
    double seconds;    /* all of it */
    int32_t n_checked; /* products compared; 0: the device does not support any */
};

/* Computes products of matrices in several precisions on device i, compares them, and times them for about `seconds`. */
int pyspec_test_device(int i, int32_t n_threads, double seconds, struct pyspec_device_test * out);

struct pyspec_device_memory {
    int32_t device; /* as pyspec_device_info counts; -1: host memory; -2: the same in the CPU's own layout */
    uint64_t model, context, compute;
};

/* What a model and a context on it would take on each device, without taking it: reads the file's metadata. *n: rows. */
int pyspec_estimate_memory(const char * path, const struct llama_model_params * model_params,
                           const struct llama_context_params * params, struct pyspec_device_memory * rows, int32_t cap,
                           int32_t * n);

#ifdef __cplusplus
} // extern "C"
#endif

#endif
