# C side of pyspec._sample: what the .pyx uses of _sample.h. Documented there.
from libc.stdint cimport int32_t, uint32_t


cdef extern from "_sample.h" nogil:
    ctypedef struct ps_cand:
        const float *x
        Py_ssize_t v
        float *val
        float *aux
        float *aux2
        int32_t *ids
        Py_ssize_t n
        Py_ssize_t size
        float top
        float scale
        double total
        int full
        int sorted
        int probs
    ctypedef struct ps_dry_options:
        float multiplier
        float base
        Py_ssize_t allowed
        const int32_t *first
        const int32_t *start
        const int32_t *tails

    float ps_scan(const float *x, Py_ssize_t n, int *bad)
    Py_ssize_t ps_argmax_checked(const float *x, Py_ssize_t n)
    void ps_mask(float *y, Py_ssize_t n, const uint32_t *mask)
    void ps_cand_begin(ps_cand *c, const float *x, Py_ssize_t v, float top)
    int PS_HEAP_MAX_K
    void ps_cand_begin_top_k(ps_cand *c, const float *x, Py_ssize_t v, Py_ssize_t k, int *bad)
    void ps_cand_top_k(ps_cand *c, Py_ssize_t k)
    void ps_cand_top_p(ps_cand *c, double p, Py_ssize_t min_keep)
    void ps_cand_min_p(ps_cand *c, float p, Py_ssize_t min_keep)
    void ps_cand_typical(ps_cand *c, double p, Py_ssize_t min_keep)
    void ps_cand_sigma(ps_cand *c, float n_sigma)
    void ps_cand_xtc(ps_cand *c, float threshold, Py_ssize_t min_keep)
    void ps_cand_temperature(ps_cand *c, double temperature)
    void ps_cand_dynatemp(ps_cand *c, double temperature, double range, double exponent)
    void ps_cand_mirostat(ps_cand *c, double n_vocab, double mu, int m)
    void ps_cand_mirostat2(ps_cand *c, double mu)
    void ps_cand_end(ps_cand *c)
    double ps_cand_prob(const ps_cand *c, int32_t token)
    void ps_cand_probs(ps_cand *c)
    int32_t ps_cand_draw(ps_cand *c, double u)
    double ps_cand_overlap(const ps_cand *c, double a, const int32_t *ids, const float *q, Py_ssize_t n)
    int32_t ps_cand_residual(ps_cand *c, double a, const int32_t *ids, const float *q, Py_ssize_t n, double u)
    void ps_cand_reread(ps_cand *c)
    void ps_penalize(float *y, const int32_t *h, Py_ssize_t n, Py_ssize_t w, int32_t *counts, float repeat, float freq,
                     float present, float scale)
    void ps_dry(float *y, const int32_t *h, Py_ssize_t n, Py_ssize_t w, const ps_dry_options *o, int32_t *z,
                int32_t *longest, float scale)
    int32_t ps_draft(const float *x, Py_ssize_t v, float scale, Py_ssize_t k, double top_p, float min_p, double u,
                     int32_t *ids, float *p, Py_ssize_t *n, double *confidence)
