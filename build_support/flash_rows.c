/* Flash attention on x86 CPUs, for passes of few rows (generation, verification) and of many (prompts).
 *
 * ggml's own kernel takes one cell of the cache at a time where there are fewer than 64 rows, with an exponential for
 * each and sums in half precision. At a depth of 2,000 cells that was most of a pass of four rows. Here blocks of cells
 * are weighed together: the scores of a block, its softmax, its values, all in single precision, for pairs of the query
 * heads that share a key head.
 *
 * A row's result depends on its query and the cells that it sees alone: only these are put into blocks, in the order in
 * which they lie, and sums have the same order, whatever the number of rows and of threads and whatever lies between. So
 * rows agree bit by bit between passes of any size, and beside other sequences while cells keep their order.
 *
 * The linker sends ggml-cpu's calls here (--wrap), so the vendored sources stay untouched. What is not covered goes on
 * to ggml: caches of other types than F16, bias by position, soft caps, CPUs without AVX2, FMA and F16C.
 *
 * Method: softmax by blocks, as in FlashAttention (Dao et al. 2022, arXiv:2205.14135).
 */
#include "ggml-cpu-impl.h"
#include "ggml.h"
#include "vec.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

void __real_ggml_compute_forward_flash_attn_ext(const struct ggml_compute_params * params, struct ggml_tensor * dst);
void __wrap_ggml_compute_forward_flash_attn_ext(const struct ggml_compute_params * params, struct ggml_tensor * dst);

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

/* Cells that are weighed together. */
#define N_BLOCK 256
/* Longest heads (the latent ones of DeepSeek). */
#define N_HEAD_MAX 576
/* Cells whose scores are summed side by side; query heads that share what is loaded. */
#define N_CELLS 4
#define N_PAIR 2
/* Units of a row's heads that go through the cache together, so that its blocks are read from the nearest cache. */
#define N_UNITS 8

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define N_LANES 16
typedef __m512 vec;
#define load(p) _mm512_loadu_ps(p)
#define load_f16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) (p)))
#define store(p, x) _mm512_storeu_ps(p, x)
#define fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define mul(a, b) _mm512_mul_ps(a, b)
#define all(x) _mm512_set1_ps(x)
#define zero() _mm512_setzero_ps()
#define most_of(a, b) _mm512_max_ps(a, b)
INLINE __m256 halve(vec x) {
    return _mm256_add_ps(_mm512_castps512_ps256(x),
                         _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
}
#else
#define N_LANES 8
typedef __m256 vec;
#define load(p) _mm256_loadu_ps(p)
#define load_f16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (p)))
#define store(p, x) _mm256_storeu_ps(p, x)
#define fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define mul(a, b) _mm256_mul_ps(a, b)
#define all(x) _mm256_set1_ps(x)
#define zero() _mm256_setzero_ps()
#define most_of(a, b) _mm256_max_ps(a, b)
#define halve(x) (x)
#endif

/* The sums of four vectors, each in the same order. */
INLINE __m128 sums(const vec * x) {
    const __m256 a = _mm256_hadd_ps(halve(x[0]), halve(x[1]));
    const __m256 b = _mm256_hadd_ps(halve(x[2]), halve(x[3]));
    const __m256 c = _mm256_hadd_ps(a, b);
    return _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1));
}

/* Places of the cells that a row sees, and what its mask adds to their scores. */
struct block {
    int n;
    int32_t cell[N_BLOCK];
    float bias[N_BLOCK];
};

/* The next cells that are seen, from `at` on; gives the cell to go on from. Others, which belong to other sequences,
 * are too old, or were never written, are not looked at: it does not matter what they hold, nor where among them a text
 * lies. */
static int64_t fill(struct block * block, const ggml_fp16_t * mask, int64_t at, int64_t n_all) {
    const uint64_t none = 0xfc00fc00fc00fc00u; /* four times -infinity */
    int n = 0;
    while (n < N_BLOCK && at < n_all) {
        uint64_t four = 1;
        if (at + 4 <= n_all && n + 4 <= N_BLOCK) {
            if (mask == NULL) {
                four = 0;
            } else {
                memcpy(&four, mask + at, sizeof(four));
            }
        }
        if (four == none) {
            at += 4;
        } else if (four == 0) {
            for (int c = 0; c < 4; c++) {
                block->cell[n] = (int32_t) at++;
                block->bias[n++] = 0.0f;
            }
        } else {
            const float bias = mask == NULL ? 0.0f : _cvtsh_ss(mask[at]);
            if (bias != -INFINITY) {
                block->cell[n] = (int32_t) at;
                block->bias[n++] = bias;
            }
            at++;
        }
    }
    block->n = n;
    return at;
}

/* scores[j][i] = query j . key i, for all cells of a block, and a few behind it that nobody reads. */
INLINE void weigh(int n_pair, const float * const * query, const char * keys, size_t stride, const struct block * block,
                  int n_dims, float (*scores)[N_BLOCK + N_CELLS]) {
    const int n = block->n;
    for (int i = 0; i < n; i += N_CELLS) {
        const ggml_fp16_t * key[N_CELLS];
        vec acc[N_PAIR][N_CELLS];
        for (int c = 0; c < N_CELLS; c++) {
            key[c] = (const ggml_fp16_t *) (keys + stride * (size_t) block->cell[i + c < n ? i + c : n - 1]);
            for (int j = 0; j < n_pair; j++) {
                acc[j][c] = zero();
            }
        }
        for (int d = 0; d < n_dims; d += N_LANES) {
            for (int c = 0; c < N_CELLS; c++) {
                const vec x = load_f16(key[c] + d);
                for (int j = 0; j < n_pair; j++) {
                    acc[j][c] = fma(x, load(query[j] + d), acc[j][c]);
                }
            }
        }
        for (int j = 0; j < n_pair; j++) {
            _mm_storeu_ps(&scores[j][i], sums(acc[j]));
        }
    }
}

/* scores = scores * scale + bias; gives the highest of them and of `high`. */
static float adjust(float * scores, const struct block * block, float scale, float high) {
    int i = 0;
    vec highs = all(high);
    for (; i + N_LANES <= block->n; i += N_LANES) {
        const vec s = fma(load(scores + i), all(scale), load(block->bias + i));
        store(scores + i, s);
        highs = most_of(highs, s);
    }
    float lanes[N_LANES];
    store(lanes, highs);
    for (int c = 0; c < N_LANES; c++) {
        high = lanes[c] > high ? lanes[c] : high;
    }
    for (; i < block->n; i++) {
        scores[i] = fmaf(scores[i], scale, block->bias[i]);
        high = scores[i] > high ? scores[i] : high;
    }
    return high;
}

/* out[j] += sum over a block's cells of weights[j][i] * value i, for n_vecs vectors from dimension d on. */
INLINE void gather(int n_pair, int n_vecs, const char * values, size_t stride, const struct block * block, int d,
                   float (*weights)[N_BLOCK + N_CELLS], float (*out)[N_HEAD_MAX]) {
    vec acc[N_PAIR][4];
    for (int j = 0; j < n_pair; j++) {
        for (int v = 0; v < n_vecs; v++) {
            acc[j][v] = load(&out[j][d + v * N_LANES]);
        }
    }
    for (int i = 0; i < block->n; i++) {
        const ggml_fp16_t * value = (const ggml_fp16_t *) (values + stride * (size_t) block->cell[i]) + d;
        for (int v = 0; v < n_vecs; v++) {
            const vec x = load_f16(value + v * N_LANES);
            for (int j = 0; j < n_pair; j++) {
                acc[j][v] = fma(x, all(weights[j][i]), acc[j][v]);
            }
        }
    }
    for (int j = 0; j < n_pair; j++) {
        for (int v = 0; v < n_vecs; v++) {
            store(&out[j][d + v * N_LANES], acc[j][v]);
        }
    }
}

/* One row's query heads from `head` on, one or two, which share a key head and a mask; and what is known of them. */
struct unit {
    const float * query[N_PAIR];
    const ggml_fp16_t * mask;
    float * to[N_PAIR];
    int n_pair;
    int64_t head, at;
    float most[N_PAIR], total[N_PAIR];
    float out[N_PAIR][N_HEAD_MAX];
};

static void begin(struct unit * u, struct ggml_tensor * dst, int64_t row, int64_t seq) {
    const struct ggml_tensor *q = dst->src[0], *v = dst->src[2], *mask = dst->src[3];
    const size_t r = (size_t) row, s = (size_t) seq;
    u->mask = mask == NULL ? NULL
                           : (const ggml_fp16_t *) ((const char *) mask->data + r * mask->nb[1] +
                                                    (size_t) (u->head % mask->ne[2]) * mask->nb[2] +
                                                    (size_t) (seq % mask->ne[3]) * mask->nb[3]);
    u->at = 0;
    for (int j = 0; j < u->n_pair; j++) {
        const size_t h = (size_t) (u->head + j);
        u->query[j] = (const float *) ((const char *) q->data + r * q->nb[1] + h * q->nb[2] + s * q->nb[3]);
        u->to[j] = (float *) ((char *) dst->data + h * dst->nb[1] + r * dst->nb[2] + s * dst->nb[3]);
        u->most[j] = -INFINITY;
        u->total[j] = 0.0f;
        memset(u->out[j], 0, (size_t) v->ne[0] * sizeof(float));
    }
}

/* Take in the next block of cells. */
INLINE void take(struct unit * u, int n_pair, const struct ggml_tensor * k, const struct ggml_tensor * v,
                 const char * keys, const char * values, float scale) {
    const int n_values = (int) v->ne[0];
    struct block block;
    float scores[N_PAIR][N_BLOCK + N_CELLS];
    u->at = fill(&block, u->mask, u->at, k->ne[1]);
    if (block.n == 0) {
        return;
    }
    weigh(n_pair, u->query, keys, k->nb[1], &block, (int) k->ne[0], scores);
    for (int j = 0; j < n_pair; j++) {
        const float high = adjust(scores[j], &block, scale, u->most[j]);
        if (high > u->most[j]) {
            /* before the first cell nothing is summed, and exp(-infinity) is 0 */
            const float less = expf(u->most[j] - high);
            u->total[j] *= less;
            for (int d = 0; d < n_values; d += N_LANES) {
                store(&u->out[j][d], mul(load(&u->out[j][d]), all(less)));
            }
            u->most[j] = high;
        }
        u->total[j] += (float) ggml_vec_soft_max_f32(block.n, scores[j], scores[j], high);
    }
    int d = 0;
    for (; d + 4 * N_LANES <= n_values; d += 4 * N_LANES) {
        gather(n_pair, 4, values, v->nb[1], &block, d, scores, u->out);
    }
    for (; d < n_values; d += N_LANES) {
        gather(n_pair, 1, values, v->nb[1], &block, d, scores, u->out);
    }
}

static void finish(struct unit * u, int n_values, const float * sinks) {
    for (int j = 0; j < u->n_pair; j++) {
        float less = 1.0f;
        if (sinks != NULL) {
            /* a score without a value */
            const float s = sinks[u->head + j], high = s > u->most[j] ? s : u->most[j];
            less = expf(u->most[j] - high);
            u->total[j] = u->total[j] * less + expf(s - high);
        }
        less = u->total[j] == 0.0f ? 0.0f : less / u->total[j];
        for (int d = 0; d < n_values; d += N_LANES) {
            store(u->to[j] + d, mul(load(&u->out[j][d]), all(less)));
        }
    }
}

static bool covered(const struct ggml_compute_params * params, const struct ggml_tensor * dst) {
    const struct ggml_tensor *q = dst->src[0], *k = dst->src[1], *v = dst->src[2];
    float max_bias, softcap;
    memcpy(&max_bias, (const float *) dst->op_params + 1, sizeof(max_bias));
    memcpy(&softcap, (const float *) dst->op_params + 2, sizeof(softcap));
    return !params->use_ref && max_bias == 0.0f && softcap == 0.0f &&
           q->type == GGML_TYPE_F32 && k->type == GGML_TYPE_F16 && v->type == GGML_TYPE_F16 &&
           q->nb[0] == sizeof(float) && k->nb[0] == sizeof(ggml_fp16_t) && v->nb[0] == sizeof(ggml_fp16_t) &&
           dst->nb[0] == sizeof(float) && k->ne[2] == v->ne[2] && k->ne[3] == v->ne[3] &&
           k->ne[0] % N_LANES == 0 && v->ne[0] % N_LANES == 0 && k->ne[0] <= N_HEAD_MAX && v->ne[0] <= N_HEAD_MAX;
}

void __wrap_ggml_compute_forward_flash_attn_ext(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    if (!covered(params, dst)) {
        __real_ggml_compute_forward_flash_attn_ext(params, dst);
        return;
    }
    const struct ggml_tensor *q = dst->src[0], *k = dst->src[1], *v = dst->src[2];
    const struct ggml_tensor *mask = dst->src[3], *sinks = dst->src[4];
    float scale;
    memcpy(&scale, dst->op_params, sizeof(scale));
    /* query heads that share keys and values, in pairs where these share the mask and threads have enough to do */
    const int64_t n_shared = q->ne[2] / k->ne[2], n_groups = k->ne[2] * q->ne[3];
    const bool alone = (mask != NULL && mask->ne[2] > 1) || q->ne[1] * n_groups * n_shared < 2 * params->nth;
    const int n_pair = alone ? 1 : N_PAIR;
    const int64_t n_parts = (n_shared + n_pair - 1) / n_pair, n_units = q->ne[1] * n_parts;
    /* as many units together as can be while all threads have work */
    int64_t n_together = n_units * n_groups / (4 * params->nth);
    n_together = n_together < 1 ? 1 : n_together > N_UNITS ? N_UNITS : n_together;
    const int64_t n_works = (n_units + n_together - 1) / n_together;
    struct unit units[N_UNITS];
    for (int64_t round = 0; round * params->nth < n_works * n_groups; round++) {
        /* to and fro, because works that follow each other may be a pair and a single head in turns */
        const int64_t work = round * params->nth + (round % 2 ? params->nth - 1 - params->ith : params->ith);
        if (work >= n_works * n_groups) {
            continue;
        }
        const int64_t group = work / n_works % k->ne[2], seq = work / n_works / k->ne[2];
        const int64_t first = work % n_works * n_together;
        const int n = (int) (n_units - first < n_together ? n_units - first : n_together);
        const size_t shared_seq = (size_t) (seq / (q->ne[3] / k->ne[3]));
        const char * keys = (const char *) k->data + (size_t) group * k->nb[2] + shared_seq * k->nb[3];
        const char * values = (const char *) v->data + (size_t) group * v->nb[2] + shared_seq * v->nb[3];
        for (int i = 0; i < n; i++) {
            const int64_t row = (first + i) / n_parts, part = (first + i) % n_parts * n_pair;
            units[i].n_pair = n_shared - part < n_pair ? 1 : n_pair;
            units[i].head = group * n_shared + part;
            begin(&units[i], dst, row, seq);
        }
        for (bool more = true; more;) {
            more = false;
            for (int i = 0; i < n; i++) {
                if (units[i].at < k->ne[1]) {
                    if (units[i].n_pair == 2) {
                        take(&units[i], 2, k, v, keys, values, scale);
                    } else {
                        take(&units[i], 1, k, v, keys, values, scale);
                    }
                    more = true;
                }
            }
        }
        for (int i = 0; i < n; i++) {
            finish(&units[i], (int) v->ne[0], sinks == NULL ? NULL : (const float *) sinks->data);
        }
    }
}

#else

void __wrap_ggml_compute_forward_flash_attn_ext(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    __real_ggml_compute_forward_flash_attn_ext(params, dst);
}

#endif
