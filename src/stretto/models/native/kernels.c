/* What a decoder's pass does between its matrix products, for float32 on a CPU; kernels.py declares and explains it.

   Every row is computed by itself, and every sum has one order, so a row has equal bits in every batch. Widths (of rows,
   heads and key blocks) are multiples of LANES. */

#include "lanes.h"

void rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t dim, float eps, int threads) {
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * dim;
        float inverse = inverse_rms(from, dim, eps);
        for (int64_t i = 0; i < dim; i += LANES)
            store(out + row * dim + i, load(from + i) * inverse * load(weight + i));
    }
}

void silu_product(const float *gate_up, float *out, int64_t rows, int64_t dim, int threads) {
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + 2 * row * dim, *up = gate + dim;
        for (int64_t i = 0; i < dim; i += LANES) {
            lanes x = load(gate + i);
            store(out + row * dim + i, x / (1.0f + exponential(-x)) * load(up + i));
        }
    }
}

typedef struct {
    int64_t rows, heads, kv_heads, head_dim, block_size, num_blocks, table_width, threads;
    const int64_t *owners, *positions, *tables, *turns;
    const float *cos, *sin;
    float eps, scale;
} Pass;

/* One head: x / rms(x) * norm if there is one, rotated by its position, times scale. */
INLINE void turn(float *x, const float *norm, const float *cos, const float *sin, int64_t dim, float eps, float scale) {
    if (norm) {
        float inverse = inverse_rms(x, dim, eps);
        for (int64_t i = 0; i < dim; i++) x[i] = x[i] * inverse * norm[i];
    }
    for (int64_t i = 0, half = dim / 2; i < half; i++) {
        float low = x[i], high = x[i + half];
        /* fmaf: which of two products is fused with the sum is else the compiler's choice. */
        x[i] = fmaf(high, sin[i], low * cos[i]) * scale;
        x[i + half] = fmaf(low, sin[i + half], high * cos[i + half]) * scale;
    }
}

/* Turn a row's queries and keys, and write its keys and values into its block. */
INLINE void prepare(const Pass *p, int64_t row, float *qkv, const float *q_norm, const float *k_norm, float *cache, int64_t dim) {
    int64_t position = p->positions[row], bs = p->block_size, plane = p->num_blocks * bs * dim;
    int64_t at_angle = (p->turns ? p->turns[row] : position) * dim;
    const float *cos = p->cos + at_angle, *sin = p->sin + at_angle;
    for (int64_t h = 0; h < p->heads; h++) turn(qkv + h * dim, q_norm, cos, sin, dim, p->eps, p->scale);
    float *k = qkv + p->heads * dim, *v = k + p->kv_heads * dim;
    int64_t block = p->tables[p->owners[row] * p->table_width + position / bs], at = position % bs;
    float *keys = cache + block * bs * dim + at, *values = cache + p->kv_heads * plane + block * bs * dim + at * dim;
    for (int64_t h = 0; h < p->kv_heads; h++, keys += plane, values += plane) {
        turn(k + h * dim, k_norm, cos, sin, dim, p->eps, 1.0f);
        for (int64_t d = 0; d < dim; d++) keys[d * bs] = k[h * dim + d];
        memcpy(values, v + h * dim, dim * sizeof(float));
    }
}

/* Scores of a group of heads with all keys in the blocks of the first `count` tokens; `stride` floats per head. */
INLINE void score(const float *q, int64_t group, const float *keys, const int64_t *table, int64_t count, float *scores, int64_t stride, int64_t dim, int64_t bs) {
    for (int64_t start = 0; start < count; start += bs) {
        const float *block = keys + table[start / bs] * bs * dim;
        for (int64_t g = 0; g < group; g++) {
            const float *of = q + g * dim;
            float *to = scores + g * stride + start;
            int64_t t = 0;
            for (; t + LANES <= bs; t += LANES) {
                lanes total = {};
                for (int64_t d = 0; d < dim; d++) total += of[d] * load(block + d * bs + t);
                store(to + t, total);
            }
            for (; t < bs; t++) {
                float total = 0.0f;
                for (int64_t d = 0; d < dim; d++) total = fmaf(of[d], block[d * bs + t], total);
                to[t] = total;
            }
        }
    }
}

/* 16 dims of the output: sum of weights[t] * values[t] * factor; token t is added to sum t % 4 of four. */
INLINE void mix_narrow(const float *weights, const float *values, const int64_t *table, int64_t count, float factor, float *out, int64_t dim, int64_t bs) {
    lanes sums[4] = {};
    for (int64_t start = 0; start < count; start += bs) {
        const float *of = weights + start, *block = values + table[start / bs] * bs * dim;
        int64_t t = 0, stop = count - start < bs ? count - start : bs;
        for (; t + 4 <= stop; t += 4)
            for (int i = 0; i < 4; i++) sums[i] += of[t + i] * load(block + (t + i) * dim);
        for (int i = 0; t + i < stop; i++) sums[i] += of[t + i] * load(block + (t + i) * dim);
    }
    store(out, ((sums[0] + sums[1]) + (sums[2] + sums[3])) * factor);
}

/* 64 dims of the output, one sum each. */
INLINE void mix_wide(const float *weights, const float *values, const int64_t *table, int64_t count, float factor, float *out, int64_t dim, int64_t bs) {
    lanes sums[4] = {};
    for (int64_t start = 0; start < count; start += bs) {
        const float *of = weights + start, *block = values + table[start / bs] * bs * dim;
        int64_t stop = count - start < bs ? count - start : bs;
        for (int64_t t = 0; t < stop; t++)
            for (int i = 0; i < 4; i++) sums[i] += of[t] * load(block + t * dim + i * LANES);
    }
    for (int i = 0; i < 4; i++) store(out + i * LANES, sums[i] * factor);
}

INLINE void read(const Pass *p, int64_t row, const float *q, const float *cache, float *scores, int64_t stride, float *out, int64_t dim, int64_t bs) {
    int64_t count = p->positions[row] + 1, padded = (count + LANES - 1) / LANES * LANES, plane = p->num_blocks * bs * dim;
    int64_t group = p->heads / p->kv_heads;
    const int64_t *table = p->tables + p->owners[row] * p->table_width;
    for (int64_t h = 0; h < p->kv_heads; h++, cache += plane) {
        const float *values = cache + p->kv_heads * plane;
        score(q + h * group * dim, group, cache, table, count, scores, stride, dim, bs);
        for (int64_t g = 0; g < group; g++) {
            float *weights = scores + g * stride, *to = out + (h * group + g) * dim;
            float most, factor = 1.0f / exponentials(weights, count, padded, &most);
            if (dim % (4 * LANES) == 0)
                for (int64_t d = 0; d < dim; d += 4 * LANES) mix_wide(weights, values + d, table, count, factor, to + d, dim, bs);
            else
                for (int64_t d = 0; d < dim; d += LANES) mix_narrow(weights, values + d, table, count, factor, to + d, dim, bs);
        }
    }
}

INLINE void attend_with(const Pass *p, float *qkv, const float *q_norm, const float *k_norm, float *cache, float *out, int64_t dim, int64_t bs) {
    int64_t width = (p->heads + 2 * p->kv_heads) * dim, stride = p->table_width * bs + LANES;
#pragma omp parallel if (p->threads > 1) num_threads(p->threads)
    {
        float *scores = malloc(p->heads / p->kv_heads * stride * sizeof(float));
#pragma omp for
        for (int64_t row = 0; row < p->rows; row++)
            if (p->owners[row] >= 0) prepare(p, row, qkv + row * width, q_norm, k_norm, cache, dim);
#pragma omp for schedule(dynamic, 8)
        for (int64_t row = 0; row < p->rows; row++) {
            float *to = out + row * p->heads * dim;
            if (p->owners[row] >= 0)
                read(p, row, qkv + row * width, cache, scores, stride, to, dim, bs);
            else
                memset(to, 0, p->heads * dim * sizeof(float));
        }
        free(scores);
    }
}

void attend(const Pass *p, float *qkv, const float *q_norm, const float *k_norm, float *cache, float *out) {
    /* Constant sizes let the compiler keep sums in registers. */
    if (p->block_size == 16 && p->head_dim == 16)
        attend_with(p, qkv, q_norm, k_norm, cache, out, 16, 16);
    else if (p->block_size == 16 && p->head_dim == 64)
        attend_with(p, qkv, q_norm, k_norm, cache, out, 64, 16);
    else if (p->block_size == 16 && p->head_dim == 128)
        attend_with(p, qkv, q_norm, k_norm, cache, out, 128, 16);
    else
        attend_with(p, qkv, q_norm, k_norm, cache, out, p->head_dim, p->block_size);
}

/* The token at which the running sum of `weights` passes u * total; the last of positive weight if none does. */
INLINE int64_t draw(const float *weights, int64_t vocab, double u, double total) {
    double target = u * total, sum_before = 0.0;
    int64_t last = vocab - 1;
    for (int64_t start = 0; start < vocab; start += LANES) {
        float of_these = sum(load(weights + start));
        if (!(of_these > 0)) continue;
        double reached = sum_before;
        for (int64_t i = start; sum_before + of_these > target && i < start + LANES; i++)
            if ((reached += weights[i]) > target) return i;
        for (int64_t i = start; i < start + LANES; i++) last = weights[i] > 0 ? i : last;
        sum_before += of_these;
    }
    return last;
}

void sample(const float *logits, const double *u, const uint8_t *is_greedy, int64_t *tokens, float *logprobs, int64_t rows, int64_t vocab, int threads) {
    int64_t padded = (vocab + LANES - 1) / LANES * LANES;
#pragma omp parallel if (threads > 1) num_threads(threads)
    {
        float *weights = malloc(padded * sizeof(float));
#pragma omp for
        for (int64_t row = 0; row < rows; row++) {
            const float *x = logits + row * vocab;
            memcpy(weights, x, vocab * sizeof(float));
            int64_t best = 0;
            int is_nan = x[0] != x[0];
            for (int64_t i = 1; i < vocab; i++) {
                best = x[i] > x[best] ? i : best;
                is_nan |= x[i] != x[i];
            }
            float most;
            exponentials(weights, vocab, padded, &most);
            double total = 0.0;
            for (int64_t i = 0; i < padded; i += LANES) total += sum(load(weights + i));
            tokens[row] = is_greedy && is_greedy[row] ? best : draw(weights, vocab, u[row], total);
            /* One logit that is no number makes the whole distribution none: the engine refuses such a token. */
            logprobs[row] = is_nan ? NAN : (float)(x[tokens[row]] - x[best] - log(total));
        }
        free(weights);
    }
}
