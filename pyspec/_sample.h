/* Filters over the candidates of one row of logits, in the order a sampler chain asks for them.
 *
 * Semantics are those of llama_sampler_* (llama.h); the way is another: a row stays what it is, an array of floats,
 * until a filter has found the threshold that cuts it down, so nothing of the vocabulary's size is ever sorted.
 * Temperature is kept as a factor and never multiplied into the row. Conventions of _kernels.h hold; rows have no NaN
 * and no +inf here.
 */
#ifndef PYSPEC_SAMPLE_H
#define PYSPEC_SAMPLE_H

#include "_kernels.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif

/* Candidates in val and ids are in descending order of val if sorted, else in ascending order of id. */
typedef struct {
    const float *x; /* the row, [v] */
    ptrdiff_t v;
    float *val, *aux, *aux2; /* scratch [v] each; val: logits of the candidates, or probabilities once there */
    int32_t *ids;            /* scratch [v] */
    ptrdiff_t n;             /* candidates */
    ptrdiff_t size;          /* what libllama would count: tokens with -inf are in its lists */
    float top;               /* largest logit of the candidates */
    float scale;             /* 1 / temperature so far */
    double total;            /* sum of exp((logit - top) * scale) */
    int full;                /* all x above -inf are candidates; val and ids are not filled in */
    int sorted;
    int probs; /* val holds probabilities */
} ps_cand;

/* Largest of x[0..n); *bad is set where a NaN is among them. */
PS_INLINE float ps_scan_inline(const float *x, ptrdiff_t n, int *bad) {
    float lane[PS_LANES];
    int32_t nan[PS_LANES];
    float best = -INFINITY;
    int any = 0;
    ptrdiff_t i = 0;
    if (n >= PS_LANES) {
        for (int j = 0; j < PS_LANES; j++) lane[j] = -INFINITY;
        for (int j = 0; j < PS_LANES; j++) nan[j] = 0;
        for (; i + PS_LANES <= n; i += PS_LANES) {
            for (int j = 0; j < PS_LANES; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
            for (int j = 0; j < PS_LANES; j++) nan[j] |= x[i + j] != x[i + j];
        }
        for (int w = PS_LANES / 2; w > 0; w /= 2) {
            for (int j = 0; j < w; j++) lane[j] = lane[j + w] > lane[j] ? lane[j + w] : lane[j];
            for (int j = 0; j < w; j++) nan[j] |= nan[j + w];
        }
        best = lane[0];
        any = nan[0];
    }
    for (; i < n; i++) {
        best = x[i] > best ? x[i] : best;
        any |= x[i] != x[i];
    }
    *bad = any;
    return best;
}

PS_CLONES static float ps_scan(const float *x, ptrdiff_t n, int *bad) { return ps_scan_inline(x, n, bad); }

/* ps_top_k, and *bad is set where a NaN is in the row, in one pass over it. */
PS_CLONES static ptrdiff_t ps_top_k_checked(const float *x, ptrdiff_t n, ptrdiff_t k, float *val, int32_t *ids,
                                            int *bad) {
    ptrdiff_t m = 0, i = 0;
    *bad = 0;
    for (; i < n && m < k; i++) {
        *bad |= x[i] != x[i];
        if (!(x[i] > -INFINITY)) continue;
        val[m] = x[i];
        ids[m++] = (int32_t)i;
    }
    for (ptrdiff_t h = m / 2 - 1; h >= 0; h--) ps_sift(val, ids, m, h, val[h], ids[h]);
    while (i < n) {
        const ptrdiff_t len = n - i < PS_BLOCK ? n - i : PS_BLOCK;
        int nan;
        const float best = ps_scan_inline(x + i, len, &nan);
        *bad |= nan;
        if (best > val[0])
            for (ptrdiff_t j = i; j < i + len; j += PS_LANES) {
                const ptrdiff_t part = i + len - j < PS_LANES ? i + len - j : PS_LANES;
                int some = 0;
                for (ptrdiff_t t = 0; t < part; t++) some |= x[j + t] > val[0];
                if (some)
                    for (ptrdiff_t t = j; t < j + part; t++)
                        if (x[t] > val[0]) ps_sift(val, ids, k, 0, x[t], (int32_t)t);
            }
        i += len;
    }
    ps_sort_heap(val, ids, m);
    return m;
}

/* First index of the maximum; -1 if the row holds NaN or +inf, or nothing above -inf. */
static ptrdiff_t ps_argmax_checked(const float *x, ptrdiff_t n) {
    float best = -INFINITY;
    ptrdiff_t begin = 0, end = 0;
    for (ptrdiff_t i = 0; i < n; i += 4 * PS_BLOCK) {
        const ptrdiff_t len = n - i < 4 * PS_BLOCK ? n - i : 4 * PS_BLOCK;
        int bad;
        const float m = ps_scan(x + i, len, &bad);
        if (bad) return -1;
        if (m > best) {
            best = m;
            begin = i;
            end = i + len;
        }
    }
    if (best == INFINITY) return -1;
    for (ptrdiff_t i = begin; i < end; i++)
        if (x[i] == best) return i;
    return -1;
}

/* y[i] = x[i] where bit i of mask is set, else -inf. */
PS_CLONES static void ps_mask(float *y, ptrdiff_t n, const uint32_t *mask) {
    for (ptrdiff_t i = 0; i < n; i += 32) {
        const uint32_t word = mask[i / 32];
        const int len = n - i < 32 ? (int)(n - i) : 32;
        if (word == 0xffffffffu) continue;
        if (word == 0) {
            for (int j = 0; j < len; j++) y[i + j] = -INFINITY;
            continue;
        }
        for (int j = 0; j < len; j++) y[i + j] = (word >> j) & 1 ? y[i + j] : -INFINITY;
    }
}

static void ps_cand_begin(ps_cand *c, const float *x, ptrdiff_t v, float top) {
    c->x = x;
    c->v = v;
    c->n = v;
    c->size = v;
    c->top = top;
    c->scale = 1.0f;
    c->full = 1;
    c->sorted = 0;
    c->probs = 0;
    c->total = 0.0;
}

/* Begins with the k most likely of a row that nothing has looked at, 0 < k < v, k <= PS_HEAP_MAX_K. *bad: NaN in it. */
static void ps_cand_begin_top_k(ps_cand *c, const float *x, ptrdiff_t v, ptrdiff_t k, int *bad) {
    ps_cand_begin(c, x, v, -INFINITY);
    c->n = ps_top_k_checked(x, v, k, c->val, c->ids, bad);
    c->full = 0;
    c->sorted = 1;
    c->size = k;
    if (c->n > 0) c->top = c->val[0];
}

/* Writes the candidates out. */
static void ps_cand_list(ps_cand *c) {
    if (!c->full) return;
    c->n = ps_collect(c->x, c->v, -FLT_MAX, c->val, c->ids);
    c->full = 0;
    c->sorted = 0;
}

static double ps_cand_sum(const ps_cand *c) {
    return c->full ? ps_sum_exp(c->x, c->v, c->top, c->scale) : ps_sum_exp(c->val, c->n, c->top, c->scale);
}

/* The k most likely of a list. */
static void ps_cand_first(ps_cand *c, ptrdiff_t k) {
    if (k >= c->n) return;
    if (c->sorted)
        c->n = k;
    else
        c->n = ps_keep_until(c->val, c->ids, c->n, ps_select(c->val, c->n, c->top, 0.0f, (double)k, 0));
}

static void ps_cand_top_k(ps_cand *c, ptrdiff_t k) {
    if (k <= 0) return;
    if (c->full && k < c->v && k <= PS_HEAP_MAX_K) {
        c->n = ps_top_k(c->x, c->v, k, c->val, c->ids);
        c->full = 0;
        c->sorted = 1;
    } else {
        if (c->full && k >= c->v) return;
        ps_cand_list(c);
        ps_cand_first(c, k);
    }
    if (k < c->size) c->size = k;
}

/* How many are at or before `last` in descending order of key, ties in order of index. */
static ptrdiff_t ps_rank(const float *key, ptrdiff_t n, ptrdiff_t last) {
    const float low = key[last];
    ptrdiff_t m = 0;
    for (ptrdiff_t i = 0; i < n; i++) m += (key[i] > low) | ((key[i] == low) & (i <= last));
    return m;
}

static void ps_cand_top_p(ps_cand *c, double p, ptrdiff_t min_keep) {
    if (p >= 1.0) return;
    if (!c->full && c->sorted) {
        const double target = p * ps_cand_sum(c);
        double run = 0.0;
        for (ptrdiff_t i = 0; i < c->n; i++) {
            run += (double)ps_weight(c->val[i], c->top, c->scale);
            if (run >= target && i + 1 >= min_keep) c->n = i + 1;
        }
    } else {
        const double total = ps_cand_sum(c);
        ptrdiff_t last;
        if (c->full && min_keep <= 1) {
            c->n = ps_collect(c->x, c->v, ps_needed(c->top, c->scale, (1.0 - p) * total, c->v), c->val, c->ids);
            c->full = 0;
        }
        ps_cand_list(c);
        if (min_keep <= 1) c->n = ps_narrow(c->val, c->ids, c->n, c->top, c->scale, p * total);
        last = ps_select(c->val, c->n, c->top, c->scale, p * total, 0);
        if (min_keep > 1 && ps_rank(c->val, c->n, last) < min_keep)
            ps_cand_first(c, min_keep);
        else
            c->n = ps_keep_until(c->val, c->ids, c->n, last);
    }
    c->size = c->n;
}

static void ps_cand_min_p(ps_cand *c, float p, ptrdiff_t min_keep) {
    float low;
    ptrdiff_t m = 0;
    if (p <= 0.0f) return;
    low = c->top + (float)log((double)p) / c->scale;
    low = low > c->top ? c->top : low > -FLT_MAX ? low : -FLT_MAX;
    if (c->full && min_keep <= 1) {
        c->n = ps_collect(c->x, c->v, low, c->val, c->ids);
        c->full = 0;
    } else {
        ps_cand_list(c);
        for (ptrdiff_t i = 0; i < c->n; i++) m += c->val[i] >= low;
        if (m < min_keep)
            ps_cand_first(c, min_keep);
        else
            c->n = ps_keep_above(c->val, c->ids, c->n, low);
    }
    c->size = c->n;
}

static void ps_cand_refresh_top(ps_cand *c) { c->top = c->full ? ps_max(c->x, c->v) : ps_max(c->val, c->n); }

/* Like ps_select, with weights of their own, for keys in any order. */
static ptrdiff_t ps_select_by(const float *key, const float *weight, ptrdiff_t n, double target, int beyond) {
    static const int shifts[3] = {21, 10, 0};
    static const uint32_t widths[3] = {0x7ff, 0x7ff, 0x3ff};
    double mass[PS_BINS];
    double base = 0.0;
    uint32_t prefix = 0, mask = 0;
    ptrdiff_t last = 0;
    for (int level = 0; level < 3; level++) {
        uint32_t pick = widths[level];
        double before = base;
        memset(mass, 0, sizeof mass);
        for (ptrdiff_t i = 0; i < n; i++) {
            const uint32_t k = ps_key(key[i]);
            if ((k & mask) == prefix) mass[(k >> shifts[level]) & widths[level]] += (double)weight[i];
        }
        for (int b = (int)widths[level]; b >= 0; b--) {
            if (mass[b] <= 0.0) continue;
            pick = (uint32_t)b;
            before = base;
            base += mass[b];
            if (beyond ? base > target : base >= target) break;
        }
        base = before;
        prefix |= pick << shifts[level];
        mask |= widths[level] << shifts[level];
    }
    for (ptrdiff_t i = 0; i < n; i++) {
        if (ps_key(key[i]) != prefix) continue;
        last = i;
        base += (double)weight[i];
        if (beyond ? base > target : base >= target) break;
    }
    return last;
}

/* Keeps the candidates at or before `last` in descending order of key (a scratch array). */
static void ps_cand_keep_by(ps_cand *c, const float *key, ptrdiff_t last) {
    const float low = key[last];
    ptrdiff_t m = 0;
    for (ptrdiff_t i = 0; i < c->n; i++) {
        const int keep = (key[i] > low) | ((key[i] == low) & (i <= last));
        c->val[m] = c->val[i];
        c->ids[m] = c->ids[i];
        m += keep;
    }
    c->n = m;
}

static void ps_cand_typical(ps_cand *c, double p, ptrdiff_t min_keep) {
    double total, log_total, entropy = 0.0;
    ptrdiff_t last;
    if (p >= 1.0) return;
    ps_cand_list(c);
    total = ps_cand_sum(c);
    log_total = log(total);
    for (ptrdiff_t i = 0; i < c->n; i++) {
        const double logp = (double)((c->val[i] - c->top) * c->scale) - log_total;
        c->aux2[i] = (float)exp(logp);
        c->aux[i] = (float)logp;
        entropy -= exp(logp) * (logp > -745.0 ? logp : 0.0);
    }
    for (ptrdiff_t i = 0; i < c->n; i++) c->aux[i] = -(float)fabs(-(double)c->aux[i] - entropy);
    last = ps_select_by(c->aux, c->aux2, c->n, p, 1);
    if (min_keep > 1 && ps_rank(c->aux, c->n, last) < min_keep) {
        for (ptrdiff_t i = 0; i < c->n; i++) c->aux2[i] = 1.0f;
        last = ps_select_by(c->aux, c->aux2, c->n, (double)(min_keep < c->n ? min_keep : c->n), 0);
    }
    ps_cand_keep_by(c, c->aux, last);
    c->size = c->n;
    ps_cand_refresh_top(c);
}

/* Mean and variance of the values above -inf; returns how many there are. */
PS_CLONES static ptrdiff_t ps_moments(const float *x, ptrdiff_t n, double *mean, double *variance) {
    double sum[8] = {0}, count[8] = {0}, acc[8] = {0};
    ptrdiff_t i;
    double total = 0.0, many = 0.0, squares = 0.0;
    for (i = 0; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) {
            const int in = x[i + j] > -INFINITY;
            sum[j] += in ? (double)x[i + j] : 0.0;
            count[j] += in ? 1.0 : 0.0;
        }
    for (; i < n; i++)
        if (x[i] > -INFINITY) {
            sum[0] += (double)x[i];
            count[0] += 1.0;
        }
    for (int j = 0; j < 8; j++) {
        total += sum[j];
        many += count[j];
    }
    *mean = many > 0.0 ? total / many : 0.0;
    for (i = 0; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) {
            const double d = x[i + j] > -INFINITY ? (double)x[i + j] - *mean : 0.0;
            acc[j] += d * d;
        }
    for (; i < n; i++)
        if (x[i] > -INFINITY) acc[0] += ((double)x[i] - *mean) * ((double)x[i] - *mean);
    for (int j = 0; j < 8; j++) squares += acc[j];
    *variance = many > 0.0 ? squares / many : 0.0;
    return (ptrdiff_t)many;
}

static void ps_cand_sigma(ps_cand *c, float n_sigma) {
    double mean, variance, low;
    if (n_sigma <= 0.0f || c->size <= 1) return;
    if (c->full)
        ps_moments(c->x, c->v, &mean, &variance);
    else
        ps_moments(c->val, c->n, &mean, &variance);
    low = (double)c->top - (double)n_sigma * sqrt(variance);
    if (low < -(double)FLT_MAX) low = -(double)FLT_MAX;
    if (c->full) {
        c->n = ps_collect(c->x, c->v, (float)low, c->val, c->ids);
        c->full = 0;
    } else {
        c->n = ps_keep_above(c->val, c->ids, c->n, (float)low);
    }
}

/* All candidates of at least this probability but the least of them go. */
static void ps_cand_xtc(ps_cand *c, float threshold, ptrdiff_t min_keep) {
    double total;
    ptrdiff_t above = 0, least = -1, m = 0;
    if (c->size < 2) return;
    ps_cand_list(c);
    total = ps_cand_sum(c);
    for (ptrdiff_t i = 0; i < c->n; i++) {
        c->aux[i] = (float)((double)ps_weight(c->val[i], c->top, c->scale) / total);
        if (!(c->aux[i] >= threshold)) continue;
        above++;
        if (least < 0 || c->val[i] <= c->val[least]) least = i;
    }
    if (above < 2 || c->size - (above - 1) < min_keep) return;
    c->top = c->val[least];
    for (ptrdiff_t i = 0; i < c->n; i++) {
        const int keep = !(c->aux[i] >= threshold) | (i == least);
        c->val[m] = c->val[i];
        c->ids[m] = c->ids[i];
        m += keep;
    }
    c->n = m;
    c->size -= above - 1;
}

static void ps_cand_greedy(ps_cand *c) {
    if (c->full) {
        const ptrdiff_t best = ps_argmax(c->x, c->v);
        c->ids[0] = (int32_t)best;
        c->val[0] = c->x[best];
        c->full = 0;
    } else {
        const ptrdiff_t best = ps_argmax(c->val, c->n);
        c->ids[0] = c->ids[best];
        c->val[0] = c->val[best];
    }
    c->top = c->val[0];
    c->n = 1;
    c->sorted = 1;
}

static void ps_cand_temperature(ps_cand *c, double temperature) {
    const float scale = temperature > 0.0 ? c->scale / (float)temperature : INFINITY;
    if (scale < INFINITY)
        c->scale = scale;
    else
        ps_cand_greedy(c);
}

/* Sum of w * log w over the weights w = exp((x - max) * scale). */
PS_CLONES static double ps_sum_exp_log(const float *x, ptrdiff_t n, float max, float scale) {
    float d[PS_LANES], e[PS_LANES];
    double sum = 0.0;
    for (ptrdiff_t i = 0; i < n; i += PS_LANES) {
        const int len = n - i < PS_LANES ? (int)(n - i) : PS_LANES;
        for (int j = 0; j < len; j++) d[j] = ps_clamp((x[i + j] - max) * scale);
        for (int j = 0; j < len; j++) e[j] = ps_exp_clamped(d[j]) * d[j];
        for (int j = 0; j < len; j++) sum += (double)e[j];
    }
    return sum;
}

static void ps_cand_dynatemp(ps_cand *c, double temperature, double range, double exponent) {
    const double low = temperature > range ? temperature - range : 0.0, high = temperature + range;
    double total, entropy, share;
    if (c->size <= 1) return;
    total = ps_cand_sum(c);
    entropy = log(total) - (c->full ? ps_sum_exp_log(c->x, c->v, c->top, c->scale)
                                    : ps_sum_exp_log(c->val, c->n, c->top, c->scale)) / total;
    share = entropy > 0.0 ? entropy / log((double)c->size) : 0.0;
    ps_cand_temperature(c, low + (high - low) * pow(share, exponent));
}

/* mirostat 1: k from an estimate of the Zipf exponent of the most likely m tokens. */
static void ps_cand_mirostat(ps_cand *c, double n_vocab, double mu, int m) {
    float best[128];
    int32_t at[128];
    ptrdiff_t n;
    double sum_tb = 0.0, sum_tt = 0.0, s, eps, k;
    if (m > 128) m = 128;
    n = c->full ? ps_top_k(c->x, c->v, m, best, at) : ps_top_k(c->val, c->n, m, best, at);
    for (ptrdiff_t i = 0; i + 1 < n; i++) {
        const double t = log((double)(i + 2) / (double)(i + 1));
        sum_tb += t * (double)((best[i] - best[i + 1]) * c->scale);
        sum_tt += t * t;
    }
    if (n > 1) {
        s = sum_tb / sum_tt;
        eps = s - 1.0;
        k = pow(eps * pow(2.0, mu) / (1.0 - pow(n_vocab, -eps)), 1.0 / s);
        ps_cand_top_k(c, !(k < (double)c->v) ? (k == k ? c->v : 1) : k > 1.0 ? (ptrdiff_t)k : 1);
    }
}

/* mirostat 2: what surprises more than mu bits goes. */
static void ps_cand_mirostat2(ps_cand *c, double mu) {
    const double total = ps_cand_sum(c);
    double low = (double)c->top + (log(total) - mu * 0.69314718055994530942) / (double)c->scale;
    low = low > (double)c->top ? (double)c->top : low > -(double)FLT_MAX ? low : -(double)FLT_MAX;
    if (c->full) {
        c->n = ps_collect(c->x, c->v, (float)low, c->val, c->ids);
        c->full = 0;
    } else {
        c->n = ps_keep_above(c->val, c->ids, c->n, (float)low);
    }
    c->size = c->n;
}

/* After the last filter. */
static void ps_cand_end(ps_cand *c) { c->total = ps_cand_sum(c); }

/* Where token is among the candidates of a list, or -1. */
static ptrdiff_t ps_cand_find(const ps_cand *c, int32_t token) {
    ptrdiff_t lo = 0, hi = c->n;
    if (c->sorted) {
        for (ptrdiff_t i = 0; i < c->n; i++)
            if (c->ids[i] == token) return i;
        return -1;
    }
    while (lo < hi) {
        const ptrdiff_t mid = lo + (hi - lo) / 2;
        if (c->ids[mid] < token)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < c->n && c->ids[lo] == token ? lo : -1;
}

static double ps_cand_prob(const ps_cand *c, int32_t token) {
    if (token < 0 || token >= c->v || !(c->x[token] > -INFINITY)) return 0.0;
    if (!c->full && ps_cand_find(c, token) < 0) return 0.0;
    return (double)ps_weight(c->x[token], c->top, c->scale) / c->total;
}

PS_CLONES static void ps_softmax(float *val, ptrdiff_t n, float top, float scale, double total) {
    const float inverse = (float)(1.0 / total);
    for (ptrdiff_t i = 0; i < n; i++) val[i] = ps_clamp((val[i] - top) * scale);
    for (ptrdiff_t i = 0; i < n; i++) val[i] = ps_exp_clamped(val[i]) * inverse;
}

/* Turns val into probabilities. */
static void ps_cand_probs(ps_cand *c) {
    if (c->probs) return;
    ps_cand_list(c);
    ps_softmax(c->val, c->n, c->top, c->scale, c->total);
    c->probs = 1;
}

PS_CLONES static double ps_sum(const float *x, ptrdiff_t n) {
    double lane[8] = {0}, sum = 0.0;
    ptrdiff_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) lane[j] += (double)x[i + j];
    for (; i < n; i++) sum += (double)x[i];
    for (int j = 0; j < 8; j++) sum += lane[j];
    return sum;
}

/* Index drawn from weights p[0..n) with sum total > 0. */
static ptrdiff_t ps_draw_from(const float *p, ptrdiff_t n, double total, double u) {
    const double target = u * total;
    double run = 0.0;
    ptrdiff_t last = -1;
    for (ptrdiff_t i = 0; i < n; i += PS_BLOCK) {
        const ptrdiff_t end = n - i < PS_BLOCK ? n : i + PS_BLOCK;
        const double block = ps_sum(p + i, end - i);
        if (block <= 0.0) continue;
        if (run + block > target || last < 0) {
            double at = run;
            for (ptrdiff_t j = i; j < end; j++) {
                if (p[j] <= 0.0f) continue;
                last = j;
                at += (double)p[j];
                if (at > target) return j;
            }
        }
        run += block;
    }
    /* rounding has kept the sum below the target: the last one with weight */
    for (ptrdiff_t j = n - 1; j >= 0; j--)
        if (p[j] > 0.0f) return j;
    return last < 0 ? 0 : last;
}

/* Draws by probability; in descending order of it, so that close distributions with one u give the same token. */
static int32_t ps_cand_draw(ps_cand *c, double u) {
    const double target = u * c->total;
    if (c->probs) {
        const double sum = ps_sum(c->val, c->n);
        return c->ids[c->sorted ? ps_draw_from(c->val, c->n, sum, u) : ps_select_by(c->val, c->val, c->n, u * sum, 1)];
    }
    if (!c->full && c->sorted) {
        double run = 0.0;
        int32_t token = c->ids[0];
        for (ptrdiff_t i = 0; i < c->n && run <= target; i++) {
            const float w = ps_weight(c->val[i], c->top, c->scale);
            if (w > 0.0f) token = c->ids[i];
            run += (double)w;
        }
        return token;
    }
    if (c->full) {
        /* what is left out weighs less than (1 - u) * total: the target is among the rest */
        c->n = ps_collect(c->x, c->v, ps_needed(c->top, c->scale, (1.0 - u) * c->total, c->v), c->val, c->ids);
        c->n = ps_narrow(c->val, c->ids, c->n, c->top, c->scale, target);
        return c->ids[ps_select(c->val, c->n, c->top, c->scale, target, 1)];
    }
    /* the list is still wanted: work on a copy */
    memcpy(c->aux, c->val, (size_t)c->n * sizeof(float));
    memcpy(c->aux2, c->ids, (size_t)c->n * sizeof(int32_t));
    {
        int32_t *ids = (int32_t *)(void *)c->aux2;
        const ptrdiff_t n = ps_narrow(c->aux, ids, c->n, c->top, c->scale, target);
        return ids[ps_select(c->aux, n, c->top, c->scale, target, 1)];
    }
}

/* Sum of min(a * p, q) over the tokens of q. */
static double ps_cand_overlap(const ps_cand *c, double a, const int32_t *ids, const float *q, ptrdiff_t n) {
    double sum = 0.0;
    for (ptrdiff_t i = 0; i < n; i++) {
        const double p = a * ps_cand_prob(c, ids[i]);
        sum += p < (double)q[i] ? p : (double)q[i];
    }
    return sum;
}

/* Draws from max(0, a * p - q), a > 0. Where rounding leaves nothing: from p. Overwrites the probabilities. */
static int32_t ps_cand_residual(ps_cand *c, double a, const int32_t *ids, const float *q, ptrdiff_t n, double u) {
    double total;
    ps_cand_probs(c);
    for (ptrdiff_t i = 0; i < n; i++) {
        const ptrdiff_t at = ps_cand_find(c, ids[i]);
        double r;
        if (at < 0) continue;
        r = (double)c->val[at] - (double)q[i] / a;
        c->val[at] = r > 0.0 ? (float)r : 0.0f;
    }
    total = ps_sum(c->val, c->n);
    if (!(total > 0.0)) {
        for (ptrdiff_t i = 0; i < c->n; i++) c->val[i] = ps_weight(c->x[c->ids[i]], c->top, c->scale);
        total = ps_sum(c->val, c->n);
    }
    return c->ids[ps_draw_from(c->val, c->n, total, u)];
}

/* Candidates back into order of id, with logits read from the row again (after penalties). */
static void ps_cand_reread(ps_cand *c) {
    if (!c->full) {
        if (c->sorted) { /* at most PS_HEAP_MAX_K */
            for (ptrdiff_t i = 1; i < c->n; i++) {
                const int32_t id = c->ids[i];
                ptrdiff_t j = i;
                for (; j > 0 && c->ids[j - 1] > id; j--) c->ids[j] = c->ids[j - 1];
                c->ids[j] = id;
            }
            c->sorted = 0;
        }
        for (ptrdiff_t i = 0; i < c->n; i++) c->val[i] = c->x[c->ids[i]];
    }
    ps_cand_refresh_top(c);
}

/* ---- penalties: h is the history [n], counts [v] how often each token is in its last w ---- */

/* counts of tokens already done are negative meanwhile */
static void ps_penalize(float *y, const int32_t *h, ptrdiff_t n, ptrdiff_t w, int32_t *counts, float repeat, float freq,
                        float present, float scale) {
    for (ptrdiff_t i = n - w; i < n; i++) {
        const int32_t t = h[i], k = counts[t];
        if (k <= 0) continue;
        y[t] = y[t] <= 0.0f ? y[t] * repeat : y[t] / repeat;
        y[t] -= ((float)k * freq + present) / scale;
        counts[t] = -k;
    }
    for (ptrdiff_t i = n - w; i < n; i++)
        if (counts[h[i]] < 0) counts[h[i]] = -counts[h[i]];
}

/* ---- DRY. Breakers: head t has the tails first[t] to first[t + 1] - 1; tail i is tails[start[i]..start[i + 1]) ---- */

typedef struct {
    float multiplier, base;
    ptrdiff_t allowed;
    const int32_t *first, *start, *tails; /* NULL: no breakers */
} ps_dry_options;

/* How many of the last tokens may be part of a repetition: up to the last breaker. */
static ptrdiff_t ps_dry_limit(const int32_t *h, ptrdiff_t n, ptrdiff_t w, const ps_dry_options *o) {
    if (o->first == NULL) return w;
    for (ptrdiff_t i = 0; i < w; i++) {
        const int32_t head = h[n - 1 - i];
        ptrdiff_t longest = -1;
        for (int32_t b = o->first[head]; b < o->first[head + 1]; b++) {
            const ptrdiff_t len = o->start[b + 1] - o->start[b];
            if (len <= longest || len > i) continue;
            if (memcmp(h + n - i, o->tails + o->start[b], (size_t)len * sizeof(int32_t)) == 0) longest = len;
        }
        if (longest >= 0) return i - longest;
    }
    return w;
}

static int ps_dry_is_breaker(const ps_dry_options *o, int32_t t) {
    if (o->first == NULL) return 0;
    for (int32_t b = o->first[t]; b < o->first[t + 1]; b++)
        if (o->start[b + 1] == o->start[b]) return 1;
    return 0;
}

/* y -= multiplier * base ** (length - allowed) for each token that would make a repetition longer.
 * z: scratch [w]; longest: scratch [v], all 0 before and after. w: tokens looked at, <= n. */
static void ps_dry(float *y, const int32_t *h, ptrdiff_t n, ptrdiff_t w, const ps_dry_options *o, int32_t *z,
                   int32_t *longest, float scale) {
    ptrdiff_t limit, left = 0, right = 0;
    int max_exponent = 0;
    if (w <= o->allowed) return;
    limit = ps_dry_limit(h, n, w, o);
    if (limit < o->allowed) return;
    if (o->base > 1.000001f) max_exponent = (int)(88.7228391f / logf(o->base));
    /* z[k]: how many tokens before the last k equal the last tokens of all, by the Z algorithm on the reversed text;
     * [left, right) is the match that reaches farthest */
    z[0] = 0;
    for (ptrdiff_t k = 1; k < w; k++) {
        ptrdiff_t m = 0;
        if (k < right) m = z[k - left] < right - k ? z[k - left] : right - k;
        while (k + m < w && h[n - 1 - m] == h[n - 1 - k - m]) m++;
        z[k] = (int32_t)m;
        if (k + m > right) {
            left = k;
            right = k + m;
        }
    }
    for (ptrdiff_t k = 1; k < w; k++) {
        const ptrdiff_t m = z[k] < limit ? z[k] : limit;
        const int32_t t = h[n - k];
        if (m >= o->allowed && longest[t] < m + 1) longest[t] = (int32_t)m + 1;
    }
    for (ptrdiff_t k = 1; k < w; k++) {
        const int32_t t = h[n - k];
        ptrdiff_t exponent = longest[t] - 1 - o->allowed;
        if (longest[t] == 0) continue;
        longest[t] = 0;
        if (ps_dry_is_breaker(o, t)) continue;
        if (max_exponent > 0 && exponent > max_exponent) exponent = max_exponent;
        y[t] -= (float)((double)o->multiplier * pow((double)o->base, (double)exponent)) / scale;
    }
}

/* ---- drafts ---- */

/* Draws a proposal from a draft's row: the k most likely, top_p, min_p, temperature. ids, p: OUT [k], what is drawn
 * from. Returns the token, or -1 if the row has nothing finite; *n: how many candidates; *confidence: softmax of the
 * best among the ten best. */
static int32_t ps_draft(const float *x, ptrdiff_t v, float scale, ptrdiff_t k, double top_p, float min_p, double u,
                        int32_t *ids, float *p, ptrdiff_t *n, double *confidence) {
    ptrdiff_t m = ps_top_k(x, v, k, p, ids), at;
    const float top = m > 0 ? p[0] : -INFINITY;
    double total;
    *n = 0;
    *confidence = 0.0;
    if (m == 0 || top == INFINITY) return -1;
    *confidence = 1.0 / ps_sum_exp(p, m < 10 ? m : 10, top, 1.0f);
    if (scale == INFINITY) m = 1, scale = 1.0f;
    if (top_p < 1.0) {
        const double target = top_p * ps_sum_exp(p, m, top, 1.0f);
        double run = 0.0;
        for (ptrdiff_t i = 0; i < m; i++) {
            run += (double)ps_weight(p[i], top, 1.0f);
            if (run >= target) m = i + 1;
        }
    }
    if (min_p > 0.0f) {
        const float low = top + (float)log((double)min_p);
        while (m > 1 && p[m - 1] < low) m--;
    }
    total = ps_sum_exp(p, m, top, scale);
    ps_softmax(p, m, top, scale, total);
    at = ps_draw_from(p, m, ps_sum(p, m), u);
    *n = m;
    return ids[at];
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

#endif /* PYSPEC_SAMPLE_H */
