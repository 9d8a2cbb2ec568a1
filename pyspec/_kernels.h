/* Row kernels of pyspec._core that gain from wide vector instructions.
 *
 * Plain C, no dependency but libc. Each loop keeps a fixed number of lanes (PS_LANES) in a small local array, so every
 * compiler can map it to its vector registers without -ffast-math, and the result is the same bits whatever the
 * register width is. Compile with -ffp-contract=off: a fused multiply-add would make results differ between machines.
 *
 * Conventions: rows are C-contiguous float32; x is IN, never written; n >= 0; a NaN counts as -inf.
 */
#ifndef PYSPEC_KERNELS_H
#define PYSPEC_KERNELS_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* One copy of the function per instruction set, chosen when the module is loaded. It needs ifunc (glibc) and is off
 * under AddressSanitizer, whose runtime is not ready when ifuncs are resolved. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(PYSPEC_NO_CLONES)
#define PS_CLONES __attribute__((target_clones("default", "avx2", "avx512f"), noinline))
#else
#define PS_CLONES
#endif

#if defined(__GNUC__)
#define PS_INLINE static inline __attribute__((always_inline))
#else
#define PS_INLINE static inline
#endif

#define PS_LANES 64
#define PS_BLOCK 1024

/* Largest of x[0..n), -inf if there is none. */
PS_INLINE float ps_max_inline(const float *x, ptrdiff_t n) {
    float lane[PS_LANES];
    float best = -INFINITY;
    ptrdiff_t i = 0;
    if (n >= PS_LANES) {
        for (int j = 0; j < PS_LANES; j++) lane[j] = -INFINITY;
        for (; i + PS_LANES <= n; i += PS_LANES)
            for (int j = 0; j < PS_LANES; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
        for (int w = PS_LANES / 2; w > 0; w /= 2)
            for (int j = 0; j < w; j++) lane[j] = lane[j + w] > lane[j] ? lane[j + w] : lane[j];
        best = lane[0];
    }
    for (; i < n; i++) best = x[i] > best ? x[i] : best;
    return best;
}

PS_CLONES static float ps_max(const float *x, ptrdiff_t n) { return ps_max_inline(x, n); }

/* First index of the maximum of x[0..n); 0 if all are NaN or n == 0. One pass, then a search in one block. */
PS_CLONES static ptrdiff_t ps_argmax(const float *x, ptrdiff_t n) {
    float best = -INFINITY;
    ptrdiff_t begin = 0, end = n;
    for (ptrdiff_t i = 0; i < n; i += PS_BLOCK) {
        const ptrdiff_t len = n - i < PS_BLOCK ? n - i : PS_BLOCK;
        const float m = ps_max_inline(x + i, len);
        if (m > best) {
            best = m;
            begin = i;
            end = i + len;
        }
    }
    for (ptrdiff_t i = begin; i < end; i++)
        if (x[i] == best) return i;
    return 0;
}

/* exp(d) for d <= 0, relative error below 2e-7; 0 for d < -87.7 (where floats end) and for NaN.
 * exp(d) = 2^k exp(r), |r| <= ln(2)/2; exp(r) is a polynomial fitted at Chebyshev points. The clamp leads to k = -127,
 * for which the bits of 2^k come out as 0.0. It is a step of its own, to be done in a loop of its own: together, GCC
 * makes a branch of it and then uses no vectors. */
PS_INLINE float ps_clamp(float d) { return d > -88.0f ? d : -88.0f; }

PS_INLINE float ps_exp_clamped(float t) {
    const float shifted = t * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the low bits now hold round(t / ln 2) */
    const float k = shifted - 12582912.0f;
    const float r = (t - k * 0.693359375f) - k * -2.12194440e-4f; /* ln 2 in two parts, the first times k is exact */
    float p = 0.00139337336f;
    p = p * r + 0.00836323574f;
    p = p * r + 0.041666463f;
    p = p * r + 0.166665763f;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + 0x3f800000u;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

PS_INLINE float ps_exp(float d) { return ps_exp_clamped(ps_clamp(d)); }

/* Sum of exp(x[i] - max) over x[0..n). max must be finite and >= every x[i]. */
PS_CLONES static double ps_sum_exp(const float *x, ptrdiff_t n, float max) {
    double lane[PS_LANES];
    float e[PS_LANES];
    double sum = 0.0;
    ptrdiff_t i = 0;
    if (n >= PS_LANES) {
        for (int j = 0; j < PS_LANES; j++) lane[j] = 0.0;
        for (; i + PS_LANES <= n; i += PS_LANES) {
            for (int j = 0; j < PS_LANES; j++) e[j] = ps_clamp(x[i + j] - max);
            for (int j = 0; j < PS_LANES; j++) e[j] = ps_exp_clamped(e[j]);
            for (int j = 0; j < PS_LANES; j++) lane[j] += (double)e[j];
        }
        for (int w = PS_LANES / 2; w > 0; w /= 2)
            for (int j = 0; j < w; j++) lane[j] += lane[j + w];
        sum = lane[0];
    }
    for (; i < n; i++) sum += (double)ps_exp(x[i] - max);
    return sum;
}

/* log(sum(exp(x))): -inf if every x is -inf or NaN, +inf if any is +inf. */
static double ps_logsumexp(const float *x, ptrdiff_t n) {
    const float max = ps_max(x, n);
    if (max == INFINITY || max == -INFINITY) return (double)max;
    return (double)max + log(ps_sum_exp(x, n, max));
}

/* Is (va, ia) after (vb, ib) in the order "larger value first, then lower id"? */
PS_INLINE int ps_after(float va, int32_t ia, float vb, int32_t ib) { return va < vb || (va == vb && ia > ib); }

/* Puts (v, id) into the hole at `hole` of a heap of n whose root is the last one in order. */
PS_INLINE void ps_sift(float *val, int32_t *ids, ptrdiff_t n, ptrdiff_t hole, float v, int32_t id) {
    for (;;) {
        ptrdiff_t child = 2 * hole + 1;
        if (child >= n) break;
        if (child + 1 < n && ps_after(val[child + 1], ids[child + 1], val[child], ids[child])) child++;
        if (!ps_after(val[child], ids[child], v, id)) break;
        val[hole] = val[child];
        ids[hole] = ids[child];
        hole = child;
    }
    val[hole] = v;
    ids[hole] = id;
}

/* The k largest of x[0..n) in descending order, ties: lower id first. NaN and -inf are left out.
 * val, ids: OUT [k]. Returns how many were found, <= k. */
PS_CLONES static ptrdiff_t ps_top_k(const float *x, ptrdiff_t n, ptrdiff_t k, float *val, int32_t *ids) {
    ptrdiff_t m = 0, i = 0;
    if (k <= 0) return 0;
    for (; i < n && m < k; i++) {
        if (!(x[i] > -INFINITY)) continue;
        val[m] = x[i];
        ids[m++] = (int32_t)i;
    }
    for (ptrdiff_t h = m / 2 - 1; h >= 0; h--) ps_sift(val, ids, m, h, val[h], ids[h]);
    if (m == k) {
        while (i < n) {
            const ptrdiff_t len = n - i < 4 * PS_LANES ? n - i : 4 * PS_LANES;
            if (ps_max_inline(x + i, len) > val[0])
                for (ptrdiff_t j = i; j < i + len; j++)
                    if (x[j] > val[0]) ps_sift(val, ids, k, 0, x[j], (int32_t)j);
            i += len;
        }
    }
    for (ptrdiff_t end = m - 1; end > 0; end--) {
        const float v = val[end];
        const int32_t id = ids[end];
        val[end] = val[0];
        ids[end] = ids[0];
        ps_sift(val, ids, end, 0, v, id);
    }
    return m;
}

/* All x[i] >= low in order of i. val, ids: OUT [n]. Returns how many. */
PS_CLONES static ptrdiff_t ps_collect(const float *x, ptrdiff_t n, float low, float *val, int32_t *ids) {
    ptrdiff_t m = 0;
    for (ptrdiff_t i = 0; i < n;) {
        const ptrdiff_t len = n - i < 4 * PS_LANES ? n - i : 4 * PS_LANES;
        if (ps_max_inline(x + i, len) >= low)
            for (ptrdiff_t j = i; j < i + len; j++)
                if (x[j] >= low) {
                    val[m] = x[j];
                    ids[m++] = (int32_t)j;
                }
        i += len;
    }
    return m;
}

#endif /* PYSPEC_KERNELS_H */
