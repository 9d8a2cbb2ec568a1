/* Row kernels of pyspec._core that gain from wide vector instructions.
 *
 * Plain C, no dependency but libc. Each loop keeps a fixed number of lanes (PS_LANES) in a small local array, so every
 * compiler can map it to its vector registers without -ffast-math, and the result is the same bits whatever the
 * register width is. Fused multiply-adds are off below for the same reason.
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
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif

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

/* ---- rows of hidden states ---- */

#define PS_STREAM_BYTES (2 << 20) /* more than this does not stay in the second-level cache anyway */

/* dst[i][j] = src[j][i] for rows of `bytes` bytes, i < n, j < k. dst overlaps no source.
 *
 * A big result is written past the caches where the processor can: otherwise each line of dst is first read from memory,
 * half as much traffic again, and the rows of a batch evict what the model needs next. */
static void ps_interleave(char *dst, const char *const *src, ptrdiff_t k, ptrdiff_t n, ptrdiff_t bytes) {
#if defined(__SSE2__)
    if (n * k * bytes > PS_STREAM_BYTES && bytes % 64 == 0 && (uintptr_t)dst % 16 == 0) {
        for (ptrdiff_t i = 0; i < n; i++)
            for (ptrdiff_t j = 0; j < k; j++, dst += bytes) {
                const char *from = src[j] + i * bytes;
                for (ptrdiff_t b = 0; b < bytes; b += 64) {
                    const __m128i r0 = _mm_loadu_si128((const __m128i *)(from + b));
                    const __m128i r1 = _mm_loadu_si128((const __m128i *)(from + b + 16));
                    const __m128i r2 = _mm_loadu_si128((const __m128i *)(from + b + 32));
                    const __m128i r3 = _mm_loadu_si128((const __m128i *)(from + b + 48));
                    _mm_stream_si128((__m128i *)(dst + b), r0);
                    _mm_stream_si128((__m128i *)(dst + b + 16), r1);
                    _mm_stream_si128((__m128i *)(dst + b + 32), r2);
                    _mm_stream_si128((__m128i *)(dst + b + 48), r3);
                }
            }
        _mm_sfence();
        return;
    }
#endif
    for (ptrdiff_t i = 0; i < n; i++)
        for (ptrdiff_t j = 0; j < k; j++, dst += bytes) memcpy(dst, src[j] + i * bytes, (size_t)bytes);
}

/* ---- rows of logits ---- */

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

/* What one logit weighs. A scale of 0 makes every logit weigh 1, but NaN and -inf, which weigh 0. */
PS_INLINE float ps_weight(float x, float max, float scale) { return ps_exp((x - max) * scale); }

/* Sum of exp((x[i] - max) * scale) over x[0..n). max must be finite and >= every x[i]; scale finite and >= 0. */
PS_CLONES static double ps_sum_exp(const float *x, ptrdiff_t n, float max, float scale) {
    double lane[PS_LANES];
    float e[PS_LANES];
    double sum = 0.0;
    ptrdiff_t i = 0;
    if (n >= PS_LANES) {
        for (int j = 0; j < PS_LANES; j++) lane[j] = 0.0;
        for (; i + PS_LANES <= n; i += PS_LANES) {
            for (int j = 0; j < PS_LANES; j++) e[j] = ps_clamp((x[i + j] - max) * scale);
            for (int j = 0; j < PS_LANES; j++) e[j] = ps_exp_clamped(e[j]);
            for (int j = 0; j < PS_LANES; j++) lane[j] += (double)e[j];
        }
        for (int w = PS_LANES / 2; w > 0; w /= 2)
            for (int j = 0; j < w; j++) lane[j] += lane[j + w];
        sum = lane[0];
    }
    for (; i < n; i++) sum += (double)ps_weight(x[i], max, scale);
    return sum;
}

/* log(sum(exp(x))): -inf if every x is -inf or NaN, +inf if any is +inf. */
static double ps_logsumexp(const float *x, ptrdiff_t n) {
    const float max = ps_max(x, n);
    if (max == INFINITY || max == -INFINITY) return (double)max;
    return (double)max + log(ps_sum_exp(x, n, max, 1.0f));
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

/* A heap of ps_sift, least first, becomes a list, largest first. */
PS_INLINE void ps_sort_heap(float *val, int32_t *ids, ptrdiff_t m) {
    for (ptrdiff_t end = m - 1; end > 0; end--) {
        const float v = val[end];
        const int32_t id = ids[end];
        val[end] = val[0];
        ids[end] = ids[0];
        ps_sift(val, ids, end, 0, v, id);
    }
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
    ps_sort_heap(val, ids, m);
    return m;
}

/* All x[i] >= low in order of i. val, ids: OUT [n]. Returns how many. */
PS_CLONES static ptrdiff_t ps_collect(const float *x, ptrdiff_t n, float low, float *val, int32_t *ids) {
    ptrdiff_t m = 0;
    for (ptrdiff_t i = 0; i < n;) {
        const ptrdiff_t len = n - i < 4 * PS_LANES ? n - i : 4 * PS_LANES;
        if (ps_max_inline(x + i, len) >= low)
            for (ptrdiff_t j = i; j < i + len; j++) { /* no branch: hits may be many and in no pattern */
                val[m] = x[j];
                ids[m] = (int32_t)j;
                m += x[j] >= low;
            }
        i += len;
    }
    return m;
}

/* ---- sampling: candidates are (val, ids) pairs, kept in order of id unless said otherwise ---- */

#define PS_HEAP_MAX_K 1024 /* above this a top-k cut is done by radix selection instead of a heap */
#define PS_BINS 2048

/* Unsigned integers in the order of the floats; both zeros give one key. */
PS_INLINE uint32_t ps_key(float v) {
    uint32_t bits;
    v += 0.0f;
    memcpy(&bits, &v, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* Where the running weight, taken in descending order of val, reaches target (beyond: exceeds it); an index, n >= 1.
 *
 * Radix selection from the high bits of the key down: three passes for any input, nothing is sorted. The weights are
 * those of ps_weight, so a scale of 0 counts candidates. If rounding keeps the sum below target the last candidate that
 * has weight is returned. Ties: in order of index. */
PS_CLONES static ptrdiff_t ps_select(const float *val, ptrdiff_t n, float top, float scale, double target, int beyond) {
    static const int shifts[3] = {21, 10, 0};
    static const uint32_t widths[3] = {0x7ff, 0x7ff, 0x3ff};
    double mass[PS_BINS];
    float weight[PS_LANES];
    uint32_t key[PS_LANES];
    double base = 0.0;
    uint32_t prefix = 0, mask = 0;
    for (int level = 0; level < 3; level++) {
        const int shift = shifts[level];
        const uint32_t width = widths[level];
        memset(mass, 0, sizeof mass);
        for (ptrdiff_t i = 0; i < n; i += PS_LANES) {
            const int len = n - i < PS_LANES ? (int)(n - i) : PS_LANES;
            const float *x = val + i;
            for (int j = 0; j < len; j++) weight[j] = ps_clamp((x[j] - top) * scale);
            for (int j = 0; j < len; j++) weight[j] = ps_exp_clamped(weight[j]);
            for (int j = 0; j < len; j++) key[j] = ps_key(x[j]);
            for (int j = 0; j < len; j++)
                if ((key[j] & mask) == prefix) mass[(key[j] >> shift) & width] += (double)weight[j];
        }
        uint32_t pick = width;
        double base_of_pick = base;
        for (int b = (int)width; b >= 0; b--) {
            if (mass[b] <= 0.0) continue;
            pick = (uint32_t)b;
            base_of_pick = base;
            base += mass[b];
            if (beyond ? base > target : base >= target) break;
        }
        base = base_of_pick;
        prefix |= pick << shift;
        mask |= width << shift;
    }
    ptrdiff_t last = 0;
    for (ptrdiff_t i = 0; i < n; i++) {
        if (ps_key(val[i]) != prefix) continue;
        last = i;
        base += (double)ps_weight(val[i], top, scale);
        if (beyond ? base > target : base >= target) break;
    }
    return last;
}

/* Drops the candidates after the one at `last` in descending order. Returns how many are left. */
static ptrdiff_t ps_keep_until(float *val, int32_t *ids, ptrdiff_t n, ptrdiff_t last) {
    const float low = val[last];
    ptrdiff_t m = 0;
    for (ptrdiff_t i = 0; i < n; i++) {
        const int keep = (val[i] > low) | ((val[i] == low) & (i <= last));
        val[m] = val[i];
        ids[m] = ids[i];
        m += keep;
    }
    return m;
}

/* Drops the candidates below low. Returns how many are left. */
static ptrdiff_t ps_keep_above(float *val, int32_t *ids, ptrdiff_t n, float low) {
    ptrdiff_t m = 0;
    for (ptrdiff_t i = 0; i < n; i++) {
        const int keep = val[i] >= low;
        val[m] = val[i];
        ids[m] = ids[i];
        m += keep;
    }
    return m;
}

/* A logit below which v candidates together weigh less than rest: they may be left out where the running weight is
 * followed only up to the total minus rest. Lowered a little for rounding. */
static float ps_needed(float top, float scale, double rest, ptrdiff_t v) {
    double cut = (double)top + (log(rest / (double)v) - 1e-3) / (double)scale;
    cut -= 1e-6 * fabs(cut);
    return cut > (double)top ? top : cut > -(double)FLT_MAX ? (float)cut : -FLT_MAX;
}

/* Drops candidates that cannot be among the first ones in descending order whose weights sum up to target. */
static ptrdiff_t ps_narrow(float *val, int32_t *ids, ptrdiff_t n, float top, float scale, double target) {
    while (n > 512) {
        const double rest = ps_sum_exp(val, n, top, scale) - target;
        if (rest <= 0.0) break;
        const ptrdiff_t m = ps_keep_above(val, ids, n, ps_needed(top, scale, rest, n));
        const int stop = m > n - n / 8;
        n = m;
        if (stop) break;
    }
    return n;
}

/* top_p, min_p (all below low), temperature and draw over candidates in descending order. */
static int32_t ps_draw_sorted(const float *val, const int32_t *ids, ptrdiff_t n, float scale, double top_p, float low,
                              double u) {
    const float top = val[0];
    int32_t token = ids[0];
    double run = 0.0;
    if (top_p < 1.0) {
        const double target = top_p * ps_sum_exp(val, n, top, 1.0f);
        for (ptrdiff_t i = 0; i < n; i++) {
            run += (double)ps_weight(val[i], top, 1.0f);
            if (run >= target) n = i + 1;
        }
    }
    while (n > 1 && val[n - 1] < low) n--;
    const double target = u * ps_sum_exp(val, n, top, scale);
    run = 0.0;
    for (ptrdiff_t i = 0; i < n && run <= target; i++) {
        const float w = ps_weight(val[i], top, scale);
        if (w > 0.0f) token = ids[i];
        run += (double)w;
    }
    return token;
}

/* Draws from candidates by their weight. */
static int32_t ps_draw(float *val, int32_t *ids, ptrdiff_t n, float top, float scale, double u) {
    const double target = u * ps_sum_exp(val, n, top, scale);
    n = ps_narrow(val, ids, n, top, scale, target);
    return ids[ps_select(val, n, top, scale, target, 1)];
}

/* One token from the row x[0..v), see sample_row in _core.pyx. scale: 1 / temperature, INFINITY for greedy.
 * ids, val: scratch [v]. */
static int32_t ps_sample(const float *x, ptrdiff_t v, float scale, ptrdiff_t top_k, double top_p, float min_p, double u,
                         int32_t *ids, float *val) {
    const float top = ps_max(x, v);
    float low = -FLT_MAX;
    double total = 0.0;
    ptrdiff_t n;
    if (scale == INFINITY || top == INFINITY || top == -INFINITY) return (int32_t)ps_argmax(x, v);
    if (min_p > 0.0f) {
        low = top + (float)log((double)min_p);
        if (low > top) low = top;
    }
    if (0 < top_k && top_k < v && top_k <= PS_HEAP_MAX_K) {
        n = ps_top_k(x, v, top_k, val, ids);
        return ps_draw_sorted(val, ids, n, scale, top_p, low, u);
    }
    if (0 < top_k && top_k < v) {
        n = ps_collect(x, v, -FLT_MAX, val, ids);
        if (n > top_k) n = ps_keep_until(val, ids, n, ps_select(val, n, top, 0.0f, (double)top_k, 0));
        if (top_p < 1.0) total = ps_sum_exp(val, n, top, 1.0f);
    } else if (top_p < 1.0) {
        total = ps_sum_exp(x, v, top, 1.0f);
        const float cut = ps_needed(top, 1.0f, (top_p > 0.0 ? 1.0 - top_p : 1.0) * total, v);
        n = ps_collect(x, v, cut > low ? cut : low, val, ids);
    } else if (min_p > 0.0f) {
        n = ps_collect(x, v, low, val, ids);
    } else {
        total = ps_sum_exp(x, v, top, scale);
        n = ps_collect(x, v, ps_needed(top, scale, (1.0 - u) * total, v), val, ids);
        n = ps_narrow(val, ids, n, top, scale, u * total);
        return ids[ps_select(val, n, top, scale, u * total, 1)];
    }
    if (top_p < 1.0) {
        n = ps_narrow(val, ids, n, top, 1.0f, top_p * total);
        n = ps_keep_until(val, ids, n, ps_select(val, n, top, 1.0f, top_p * total, 0));
    }
    if (min_p > 0.0f) n = ps_keep_above(val, ids, n, low);
    return ps_draw(val, ids, n, top, scale, u);
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

#endif /* PYSPEC_KERNELS_H */
