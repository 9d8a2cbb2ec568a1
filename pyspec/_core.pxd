# C side of pyspec._core: what the .pyx uses of _kernels.h. Documented there.
from libc.stdint cimport int32_t


cdef extern from "_kernels.h" nogil:
    void ps_interleave(char *dst, const char **src, Py_ssize_t k, Py_ssize_t n, Py_ssize_t bytes)
    float ps_exp(float d)
    Py_ssize_t ps_argmax(const float *x, Py_ssize_t n)
    double ps_sum_exp(const float *x, Py_ssize_t n, float top, float scale)
    double ps_logsumexp(const float *x, Py_ssize_t n)
    Py_ssize_t ps_top_k(const float *x, Py_ssize_t n, Py_ssize_t k, float *val, int32_t *ids)
    int32_t ps_sample(const float *x, Py_ssize_t v, float scale, Py_ssize_t top_k, double top_p, float min_p, double u,
                      int32_t *ids, float *val)
