# C side of pyspec._core: what the .pyx uses of _kernels.h. Documented there.
from libc.stdint cimport int32_t


cdef extern from "_kernels.h" nogil:
    float ps_exp(float d)
    float ps_max(const float *x, Py_ssize_t n)
    Py_ssize_t ps_argmax(const float *x, Py_ssize_t n)
    double ps_sum_exp(const float *x, Py_ssize_t n, float max)
    double ps_logsumexp(const float *x, Py_ssize_t n)
    Py_ssize_t ps_top_k(const float *x, Py_ssize_t n, Py_ssize_t k, float *val, int32_t *ids)
    Py_ssize_t ps_collect(const float *x, Py_ssize_t n, float low, float *val, int32_t *ids)
