/* What a decoder's pass does between its matrix products, on a CPU; kernels.py declares and explains it.

   Values are float32 or, if is_half, bfloat16: then they are computed in float32, and rounded where the modules' operations
   round. Every row is computed by itself, and every sum has one order, so a row has equal bits in every batch. Widths (of
   rows, heads and key blocks) are multiples of LANES. */

#include "lanes.h"

INLINE void norm_row(const void *x, const void *weight, void *out, int64_t first, int64_t dim, float eps, const int is_half) {
    float inverse = inverse_rms_of((const char *)x + first * (is_half ? 2 : 4), dim, eps, is_half);
    for (int64_t i = 0; i < dim; i += LANES)
        put(out, first + i, rounded(widen(x, first + i, is_half) * inverse, is_half) * widen(weight, i, is_half), is_half);
}

void rms_norm(const void *x, const void *weight, void *out, int64_t rows, int64_t dim, float eps, int is_half, int threads) {
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t row = 0; row < rows; row++)
        if (is_half)
            norm_row(x, weight, out, row * dim, dim, eps, 1);
        else
            norm_row(x, weight, out, row * dim, dim, eps, 0);
}

INLINE void gate_row(const void *gate_up, void *out, int64_t row, int64_t dim, const int is_half) {
    for (int64_t i = 0; i < dim; i += LANES) {
        lanes x = widen(gate_up, 2 * row * dim + i, is_half), up = widen(gate_up, (2 * row + 1) * dim + i, is_half);
        put(out, row * dim + i, rounded(x / (1.0f + exponential(-x)), is_half) * up, is_half);
    }
}

void silu_product(const void *gate_up, void *out, int64_t rows, int64_t dim, int is_half, int threads) {
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t row = 0; row < rows; row++)
        if (is_half)
            gate_row(gate_up, out, row, dim, 1);
        else
            gate_row(gate_up, out, row, dim, 0);
}

typedef struct {
    int64_t rows, heads, kv_heads, head_dim, block_size, num_blocks, table_width, threads, is_half;
    const int64_t *owners, *positions, *tables, *turns;
    const float *cos, *sin;
    float eps, scale;
} Pass;

INLINE float round_one(float x, const int is_half) {
    if (!is_half || x != x) return x;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    memcpy(&x, &bits, sizeof bits);
    return x;
}

INLINE float get_one(const void *from, int64_t at, const int is_half) {
    if (!is_half) return ((const float *)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Write a float that is rounded already. */
INLINE void put_one(void *to, int64_t at, float x, const int is_half) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (is_half)
        ((uint16_t *)to)[at] = bits >> 16;
    else
        ((float *)to)[at] = x;
}

/* One head: x / rms(x) * norm if there is one, rotated by its position, times scale. */
INLINE void turn(float *x, const void *norm, const float *cos, const float *sin, int64_t dim, float eps, float scale, const int is_half) {
    if (norm) {
        float inverse = inverse_rms(x, dim, eps);
        for (int64_t i = 0; i < dim; i++)
            x[i] = round_one(round_one(x[i] * inverse, is_half) * get_one(norm, i, is_half), is_half);
    }
    for (int64_t i = 0, half = dim / 2; i < half; i++) {
        float low = x[i], high = x[i + half];
        /* fmaf: which of two products is fused with the sum is else the compiler's choice. */
        x[i] = round_one(fmaf(high, sin[i], round_one(low * cos[i], is_half)), is_half) * scale;
        x[i + half] = round_one(fmaf(low, sin[i + half], round_one(high * cos[i + half], is_half)), is_half) * scale;
    }
}

/* Turn a row's queries and keys, and write its keys and values into its block; `head` has space for one head. */
INLINE void prepare(const Pass *p, int64_t row, void *qkv, const void *q_norm, const void *k_norm, void *cache, float *head, int64_t dim, const int is_half) {
    int64_t position = p->positions[row], bs = p->block_size, plane = p->num_blocks * bs * dim;
    int64_t at_angle = (p->turns ? p->turns[row] : position) * dim, first = row * (p->heads + 2 * p->kv_heads) * dim;
    const float *cos = p->cos + at_angle, *sin = p->sin + at_angle;
    for (int64_t h = 0; h < p->heads; h++, first += dim) {
        for (int64_t d = 0; d < dim; d++) head[d] = get_one(qkv, first + d, is_half);
        /* A scaled query may not be a bfloat16 value: there `read` scales it. */
        turn(head, q_norm, cos, sin, dim, p->eps, is_half ? 1.0f : p->scale, is_half);
        for (int64_t d = 0; d < dim; d++) put_one(qkv, first + d, head[d], is_half);
    }
    int64_t block = p->tables[p->owners[row] * p->table_width + position / bs], at = position % bs;
    int64_t keys = block * bs * dim + at, values = p->kv_heads * plane + block * bs * dim + at * dim;
    for (int64_t h = 0; h < p->kv_heads; h++, first += dim, keys += plane, values += plane) {
        for (int64_t d = 0; d < dim; d++) head[d] = get_one(qkv, first + d, is_half);
        turn(head, k_norm, cos, sin, dim, p->eps, 1.0f, is_half);
        for (int64_t d = 0; d < dim; d++) put_one(cache, keys + d * bs, head[d], is_half);
        for (int64_t d = 0; d < dim; d += LANES)
            put(cache, values + d, widen(qkv, first + p->kv_heads * dim + d, is_half), is_half);
    }
}

/* Scores of a group of heads with all keys in the blocks of the first `count` tokens; `stride` floats per head. */
INLINE void score(const float *q, int64_t group, const void *cache, int64_t keys, const int64_t *table, int64_t count, float *scores, int64_t stride, int64_t dim, int64_t bs, const int is_half) {
    for (int64_t start = 0; start < count; start += bs) {
        int64_t block = keys + table[start / bs] * bs * dim;
        for (int64_t g = 0; g < group; g++) {
            const float *of = q + g * dim;
            float *to = scores + g * stride + start;
            int64_t t = 0;
            for (; t + LANES <= bs; t += LANES) {
                lanes total = {};
                for (int64_t d = 0; d < dim; d++) total += of[d] * widen(cache, block + d * bs + t, is_half);
                store(to + t, total);
            }
            for (; t < bs; t++) {
                float total = 0.0f;
                for (int64_t d = 0; d < dim; d++) total = fmaf(of[d], get_one(cache, block + d * bs + t, is_half), total);
                to[t] = total;
            }
        }
    }
}

/* 16 dims of the output: sum of weights[t] * values[t] * factor; token t is added to sum t % 4 of four. */
INLINE void mix_narrow(const float *weights, const void *cache, int64_t values, const int64_t *table, int64_t count, float factor, float *out, int64_t dim, int64_t bs, const int is_half) {
    lanes sums[4] = {};
    for (int64_t start = 0; start < count; start += bs) {
        const float *of = weights + start;
        int64_t block = values + table[start / bs] * bs * dim, t = 0, stop = count - start < bs ? count - start : bs;
        for (; t + 4 <= stop; t += 4)
            for (int i = 0; i < 4; i++) sums[i] += of[t + i] * widen(cache, block + (t + i) * dim, is_half);
        for (int i = 0; t + i < stop; i++) sums[i] += of[t + i] * widen(cache, block + (t + i) * dim, is_half);
    }
    store(out, ((sums[0] + sums[1]) + (sums[2] + sums[3])) * factor);
}

/* 64 dims of the output, one sum each. */
INLINE void mix_wide(const float *weights, const void *cache, int64_t values, const int64_t *table, int64_t count, float factor, float *out, int64_t dim, int64_t bs, const int is_half) {
    lanes sums[4] = {};
    for (int64_t start = 0; start < count; start += bs) {
        const float *of = weights + start;
        int64_t block = values + table[start / bs] * bs * dim, stop = count - start < bs ? count - start : bs;
        for (int64_t t = 0; t < stop; t++)
            for (int i = 0; i < 4; i++) sums[i] += of[t] * widen(cache, block + t * dim + i * LANES, is_half);
    }
    for (int i = 0; i < 4; i++) store(out + i * LANES, sums[i] * factor);
}

/* The attended values of a row. scores: space for the scores of a group, then for the row's queries and results. */
INLINE void read(const Pass *p, int64_t row, const void *qkv, const void *cache, float *scores, int64_t stride, void *out, int64_t dim, int64_t bs, const int is_half) {
    int64_t count = p->positions[row] + 1, padded = (count + LANES - 1) / LANES * LANES, plane = p->num_blocks * bs * dim;
    int64_t group = p->heads / p->kv_heads, width = p->heads * dim, first = row * (width + 2 * p->kv_heads * dim);
    const int64_t *table = p->tables + p->owners[row] * p->table_width;
    float *space = scores + group * stride, *result = is_half ? space + width : (float *)out + row * width;
    const float *q = is_half ? space : (const float *)qkv + first;
    if (is_half)
        for (int64_t i = 0; i < width; i += LANES) store(space + i, widen(qkv, first + i, 1) * p->scale);
    for (int64_t h = 0, keys = 0; h < p->kv_heads; h++, keys += plane) {
        int64_t values = keys + p->kv_heads * plane;
        score(q + h * group * dim, group, cache, keys, table, count, scores, stride, dim, bs, is_half);
        for (int64_t g = 0; g < group; g++) {
            float *weights = scores + g * stride, *to = result + (h * group + g) * dim;
            float most, factor = 1.0f / exponentials_of(weights, count, padded, &most, is_half);
            if (dim % (4 * LANES) == 0)
                for (int64_t d = 0; d < dim; d += 4 * LANES) mix_wide(weights, cache, values + d, table, count, factor, to + d, dim, bs, is_half);
            else
                for (int64_t d = 0; d < dim; d += LANES) mix_narrow(weights, cache, values + d, table, count, factor, to + d, dim, bs, is_half);
        }
    }
    if (is_half)
        for (int64_t i = 0; i < width; i += LANES) put(out, row * width + i, load(result + i), 1);
}

INLINE void attend_with(const Pass *p, void *qkv, const void *q_norm, const void *k_norm, void *cache, void *out, int64_t dim, int64_t bs, const int is_half) {
    int64_t stride = p->table_width * bs + LANES, width = p->heads * dim;
#pragma omp parallel if (p->threads > 1) num_threads(p->threads)
    {
        float *scores = malloc((p->heads / p->kv_heads * stride + 2 * width) * sizeof(float));
#pragma omp for
        for (int64_t row = 0; row < p->rows; row++)
            if (p->owners[row] >= 0) prepare(p, row, qkv, q_norm, k_norm, cache, scores, dim, is_half);
#pragma omp for schedule(dynamic, 8)
        for (int64_t row = 0; row < p->rows; row++)
            if (p->owners[row] >= 0)
                read(p, row, qkv, cache, scores, stride, out, dim, bs, is_half);
            else
                memset((char *)out + row * width * (is_half ? 2 : 4), 0, width * (is_half ? 2 : 4));
        free(scores);
    }
}

void attend(const Pass *p, void *qkv, const void *q_norm, const void *k_norm, void *cache, void *out) {
#define ATTEND(dim, bs, is_half) attend_with(p, qkv, q_norm, k_norm, cache, out, dim, bs, is_half)
    /* Constant sizes let the compiler keep sums in registers. */
    int64_t dim = p->block_size == 16 ? p->head_dim : 0;
    if (p->is_half) {
        if (dim == 64) ATTEND(64, 16, 1);
        else if (dim == 128) ATTEND(128, 16, 1);
        else ATTEND(p->head_dim, p->block_size, 1);
    } else {
        if (dim == 16) ATTEND(16, 16, 0);
        else if (dim == 64) ATTEND(64, 16, 0);
        else if (dim == 128) ATTEND(128, 16, 0);
        else ATTEND(p->head_dim, p->block_size, 0);
    }
}

/* The token at which the running sum of `weights` passes u * total; the last of positive weight if none does. */
INLINE int64_t draw(const float *weights, int64_t vocab, double u, double total) {
    double target = u * total, sum_before = 0.0;
    int64_t last = -1;
    for (int64_t start = 0; start < vocab; start += LANES) {
        float of_these = sum(load(weights + start));
        if (!(of_these > 0)) continue;
        double reached = sum_before;
        for (int64_t i = start; sum_before + of_these > target && i < start + LANES; i++)
            if ((reached += weights[i]) > target) return i;
        last = start;
        sum_before += of_these;
    }
    if (last < 0) return vocab - 1;
    for (int64_t i = last + LANES; i-- > last;)
        if (weights[i] > 0) return i;
    return last;
}

INLINE int has_nan(const float *x, int64_t count) {
    int_lanes found = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) found |= load(x + i) != load(x + i);
    int is_nan = largest((lanes)(found & 0x3f800000)) != 0.0f;
    for (; i < count; i++) is_nan |= x[i] != x[i];
    return is_nan;
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
            float most;
            exponentials(weights, vocab, padded, &most);
            double total = 0.0;
            for (int64_t i = 0; i < padded; i += LANES) total += sum(load(weights + i));
            if (is_greedy && is_greedy[row]) {
                int64_t best = 0;
                while (best < vocab && !(x[best] == most)) best++;
                tokens[row] = best < vocab ? best : 0;
            } else {
                tokens[row] = draw(weights, vocab, u[row], total);
            }
            /* One logit that is no number makes the whole distribution none: the engine refuses such a token. */
            logprobs[row] = has_nan(x, vocab) ? NAN : (float)(x[tokens[row]] - most - log(total));
        }
        free(weights);
    }
}
