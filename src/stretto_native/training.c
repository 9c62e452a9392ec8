/* Forward and backward passes of what a training step does between its matrix products, for float32 on a CPU;
   training.py declares and explains them. Widths are multiples of LANES; rows are contiguous. */

#include "lanes.h"

/* out = x / rms(x) * weight; inverse = 1 / rms(x) of every row, for the backward pass. */
void rms_norm_forward(const float *x, const float *weight, float *out, float *inverse, int64_t rows, int64_t dim, float eps, int threads) {
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * dim;
        float factor = inverse[row] = inverse_rms(from, dim, eps);
        for (int64_t i = 0; i < dim; i += LANES) {
            lanes y = load(from + i) * factor;
            store(out + row * dim + i, weight ? y * load(weight + i) : y);
        }
    }
}

/* Gradients of one range of rows; that of the weight is added to `grad_weight`, 64 rows at a time, so that it keeps its
   precision over many rows. */
static void rms_norm_range(const float *x, const float *weight, const float *inverse, const float *grad, float *grad_x, float *grad_weight, int64_t first, int64_t last, int64_t dim) {
    float *block = grad_weight ? malloc(dim * sizeof(float)) : NULL;
    for (int64_t start = first; start < last; start += 64) {
        int64_t stop = start + 64 < last ? start + 64 : last;
        if (block) memset(block, 0, dim * sizeof(float));
        for (int64_t row = start; row < stop; row++) {
            const float *from = x + row * dim, *of = grad + row * dim;
            float factor = inverse[row];
            if (block)
                for (int64_t i = 0; i < dim; i += LANES) store(block + i, load(block + i) + load(of + i) * load(from + i) * factor);
            if (!grad_x) continue;
            lanes products = {};
            for (int64_t i = 0; i < dim; i += LANES) {
                lanes g = load(of + i);
                products += (weight ? g * load(weight + i) : g) * load(from + i);
            }
            float shift = sum(products) / (float)dim * factor * factor;
            for (int64_t i = 0; i < dim; i += LANES) {
                lanes g = load(of + i);
                if (weight) g *= load(weight + i);
                store(grad_x + row * dim + i, (g - load(from + i) * shift) * factor);
            }
        }
        if (block)
            for (int64_t i = 0; i < dim; i += LANES) store(grad_weight + i, load(grad_weight + i) + load(block + i));
    }
    free(block);
}

/* grad_x and grad_weight [threads, dim] may be NULL; the latter has zeros and gets one part per thread. */
void rms_norm_backward(const float *x, const float *weight, const float *inverse, const float *grad, float *grad_x, float *grad_weight, int64_t rows, int64_t dim, int threads) {
    int64_t share = (rows + threads - 1) / threads;
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t part = 0; part < threads; part++) {
        int64_t first = part * share, last = first + share < rows ? first + share : rows;
        rms_norm_range(x, weight, inverse, grad, grad_x, grad_weight ? grad_weight + part * dim : NULL, first, last, dim);
    }
}

/* out = silu(gate) * up */
void gate_product_forward(const float *gate, const float *up, float *out, int64_t count, int threads) {
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t i = 0; i < count; i += LANES) {
        lanes x = load(gate + i);
        store(out + i, x / (1.0f + exponential(-x)) * load(up + i));
    }
}

void gate_product_backward(const float *gate, const float *up, const float *grad, float *grad_gate, float *grad_up, int64_t count, int threads) {
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t i = 0; i < count; i += LANES) {
        lanes x = load(gate + i), g = load(grad + i), sigmoid = 1.0f / (1.0f + exponential(-x));
        store(grad_up + i, g * x * sigmoid);
        store(grad_gate + i, g * load(up + i) * sigmoid * (1.0f + x * (1.0f - sigmoid)));
    }
}

/* Each pair (x[i], x[i + dim / 2]) of every head turned by its token's angle; sign -1 turns it back. */
void rotate(const float *x, const float *cos, const float *sin, float *restrict out, int64_t tokens, int64_t heads, int64_t dim, float sign, int threads) {
    int64_t half = dim / 2;
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t token = 0; token < tokens; token++) {
        const float *c = cos + token * dim, *s = sin + token * dim;
        for (int64_t head = 0; head < heads; head++) {
            const float *from = x + (token * heads + head) * dim;
            float *to = out + (token * heads + head) * dim;
            for (int64_t i = 0; i < half; i++) {
                /* fmaf: which of two products is fused with the sum is else the compiler's choice. */
                to[i] = fmaf(from[i + half], sign * s[i], from[i] * c[i]);
                to[i + half] = fmaf(from[i], sign * s[i + half], from[i + half] * c[i + half]);
            }
        }
    }
}

/* Attention within segments: those of `rows` tokens, each over the runs of tokens that its segment continues, `prefixes`
   tokens in all, and over its own run, the last of runs[segment]..runs[segment + 1], up to itself. */
typedef struct {
    int64_t rows, heads, kv_heads, head_dim, segments, longest, threads;
    const int64_t *starts, *ends, *prefixes, *runs, *run_starts, *run_ends;
    float scale;
} Segments;

#define BLOCK 4 /* queries that are computed together, so that a vector of keys is loaded once for all of them */

/* The buffers of one thread: keys and values of a segment by dim, weights and their gradients of BLOCK queries, and the
   gradients of keys and values. */
typedef struct {
    int64_t stride;
    float *keys, *values, *weights, *grads, *grad_k, *grad_v;
} Room;

static Room open_room(const Segments *s, int has_gradients) {
    int64_t stride = (s->longest + LANES - 1) / LANES * LANES, sides = has_gradients ? 4 : 1;
    float *all = malloc(((sides * s->head_dim + 2 * BLOCK) * stride) * sizeof(float));
    Room room = {stride, all, NULL, all + s->head_dim * stride, NULL, NULL, NULL};
    room.grads = room.weights + BLOCK * stride;
    if (has_gradients) {
        room.values = room.grads + BLOCK * stride;
        room.grad_k = room.values + s->head_dim * stride;
        room.grad_v = room.grad_k + s->head_dim * stride;
    }
    return room;
}

/* A kv head of all tokens that a segment sees, by dim: to[d * stride + k]; 0 after the last. */
INLINE void by_dim(const Segments *s, int64_t segment, int64_t head, const float *from, float *to, int64_t stride, int64_t dim) {
    int64_t count = 0;
    for (int64_t run = s->runs[segment]; run < s->runs[segment + 1]; run++)
        for (int64_t row = s->run_starts[run]; row < s->run_ends[run]; row++, count++) {
            const float *x = from + (row * s->kv_heads + head) * dim;
            for (int64_t d = 0; d < dim; d++) to[d * stride + count] = x[d];
        }
    for (int64_t k = count; k < (count + LANES - 1) / LANES * LANES; k++)
        for (int64_t d = 0; d < dim; d++) to[d * stride + k] = 0.0f;
}

/* to[j * stride + k] = x[j] . of[:, k] for BLOCK rows x and the first `count` k, rounded up to whole vectors. */
INLINE void products(const float *const *x, const float *of, int64_t count, float *to, int64_t stride, int64_t dim) {
    for (int64_t k = 0; k < count; k += LANES) {
        lanes sums[BLOCK] = {};
        for (int64_t d = 0; d < dim; d++) {
            lanes y = load(of + d * stride + k);
            for (int j = 0; j < BLOCK; j++) sums[j] += x[j][d] * y;
        }
        for (int j = 0; j < BLOCK; j++) store(to + j * stride + k, sums[j]);
    }
}

/* out[j] = factors[j] * sum of weights[j * stride + k] * rows k of a kv head, for BLOCK rows. */
INLINE void mix(const Segments *s, int64_t segment, int64_t head, const float *weights, int64_t stride, int64_t count, const float *rows, const float *factors, float *const *out, int64_t dim) {
    int64_t width = s->kv_heads * dim;
    for (int64_t d = 0; d < dim; d += LANES) {
        lanes sums[BLOCK] = {};
        for (int64_t k = 0, run = s->runs[segment]; k < count; run++) {
            int64_t end = k + s->run_ends[run] - s->run_starts[run], stop = end < count ? end : count;
            const float *x = rows + s->run_starts[run] * width + head * dim + d;
            for (; k < stop; k++, x += width)
                for (int j = 0; j < BLOCK; j++) sums[j] += weights[j * stride + k] * load(x);
        }
        for (int j = 0; j < BLOCK; j++) store(out[j] + d, sums[j] * factors[j]);
    }
}

/* The next BLOCK queries of a head; the last one of a segment stands for those that it lacks. */
INLINE int block_rows(const Segments *s, int64_t segment, int64_t first, int64_t head, int64_t *rows) {
    int64_t last = s->ends[segment] - 1;
    for (int j = 0; j < BLOCK; j++) rows[j] = (first + j < last ? first + j : last) * s->heads + head;
    return (int)(last + 1 - first < BLOCK ? last + 1 - first : BLOCK);
}

INLINE void forward_segment(const Segments *s, int64_t segment, int64_t head, const float *q, const float *k, const float *v, float *out, float *norms, Room room, int64_t dim) {
    int64_t start = s->starts[segment], end = s->ends[segment], prefix = s->prefixes[segment];
    int64_t group = s->heads / s->kv_heads, rows[BLOCK];
    float spare[BLOCK * dim];
    by_dim(s, segment, head, k, room.keys, room.stride, dim);
    for (int64_t g = head * group; g < (head + 1) * group; g++)
        for (int64_t first = start; first < end; first += BLOCK) {
            int num = block_rows(s, segment, first, g, rows);
            int64_t seen = prefix + first - start + num, padded = (seen + LANES - 1) / LANES * LANES;
            const float *queries[BLOCK];
            float factors[BLOCK], *to[BLOCK];
            for (int j = 0; j < BLOCK; j++) queries[j] = q + rows[j] * dim;
            products(queries, room.keys, seen, room.weights, room.stride, dim);
            for (int j = 0; j < BLOCK; j++) {
                float *weights = room.weights + j * room.stride;
                int64_t count = prefix + (j < num ? first + j : end - 1) - start + 1;
                for (int64_t i = 0; i < padded; i += LANES) store(weights + i, load(weights + i) * s->scale);
                float most, total = exponentials(weights, count, padded, &most);
                factors[j] = 1.0f / total;
                to[j] = j < num ? out + rows[j] * dim : spare + j * dim;
                if (j < num) norms[rows[j]] = most + logf(total);
            }
            mix(s, segment, head, room.weights, room.stride, seen, v, factors, to, dim);
        }
}

INLINE void backward_segment(const Segments *s, int64_t segment, int64_t head, const float *q, const float *k, const float *v, const float *norms, const float *grad, float *grad_q, float *grad_k, float *grad_v, Room room, int64_t dim) {
    int64_t start = s->starts[segment], end = s->ends[segment], prefix = s->prefixes[segment];
    int64_t group = s->heads / s->kv_heads, all = prefix + end - start, rows[BLOCK];
    float spare[BLOCK * dim];
    by_dim(s, segment, head, k, room.keys, room.stride, dim);
    by_dim(s, segment, head, v, room.values, room.stride, dim);
    memset(room.grad_k, 0, all * dim * sizeof(float));
    memset(room.grad_v, 0, all * dim * sizeof(float));
    for (int64_t g = head * group; g < (head + 1) * group; g++)
        for (int64_t first = start; first < end; first += BLOCK) {
            int num = block_rows(s, segment, first, g, rows);
            int64_t seen = prefix + first - start + num, padded = (seen + LANES - 1) / LANES * LANES;
            const float *queries[BLOCK], *outer[BLOCK];
            float ones[BLOCK], *to[BLOCK];
            for (int j = 0; j < BLOCK; j++) {
                queries[j] = q + rows[j] * dim;
                outer[j] = grad + rows[j] * dim;
                to[j] = j < num ? grad_q + rows[j] * dim : spare + j * dim;
                ones[j] = 1.0f;
            }
            products(queries, room.keys, seen, room.weights, room.stride, dim);
            products(outer, room.values, seen, room.grads, room.stride, dim);
            for (int j = 0; j < BLOCK; j++) {
                float *weights = room.weights + j * room.stride, *grads = room.grads + j * room.stride;
                /* A query that stands for one that is lacking has no weights. */
                int64_t count = j < num ? prefix + first + j - start + 1 : 0;
                for (int64_t i = count; i < padded; i++) weights[i] = -INFINITY;
                lanes products = {};
                for (int64_t i = 0; i < padded; i += LANES) {
                    lanes w = exponential(load(weights + i) * s->scale - norms[rows[j]]);
                    products += w * load(grads + i);
                    store(weights + i, w);
                }
                float shift = sum(products);
                for (int64_t i = 0; i < padded; i += LANES)
                    store(grads + i, load(weights + i) * (load(grads + i) - shift) * s->scale);
            }
            mix(s, segment, head, room.grads, room.stride, seen, k, ones, to, dim);
            for (int64_t i = 0; i < seen; i++)
                for (int64_t d = 0; d < dim; d += LANES) {
                    lanes to_k = load(room.grad_k + i * dim + d), to_v = load(room.grad_v + i * dim + d);
                    for (int j = 0; j < BLOCK; j++) {
                        to_k += room.grads[j * room.stride + i] * load(queries[j] + d);
                        to_v += room.weights[j * room.stride + i] * load(outer[j] + d);
                    }
                    store(room.grad_k + i * dim + d, to_k);
                    store(room.grad_v + i * dim + d, to_v);
                }
        }
    for (int64_t i = 0, run = s->runs[segment]; run < s->runs[segment + 1]; run++)
        for (int64_t row = s->run_starts[run]; row < s->run_ends[run]; row++, i++) {
            int64_t at = (row * s->kv_heads + head) * dim;
            for (int64_t d = 0; d < dim; d += LANES) {
                store(grad_k + at + d, load(grad_k + at + d) + load(room.grad_k + i * dim + d));
                store(grad_v + at + d, load(grad_v + at + d) + load(room.grad_v + i * dim + d));
            }
        }
}

/* Constant sizes let the compiler keep sums in registers. */
#define BY_SIZE(dim, call) \
    if ((dim) == 16) { enum { DIM = 16 }; call; } \
    else if ((dim) == 64) { enum { DIM = 64 }; call; } \
    else if ((dim) == 128) { enum { DIM = 128 }; call; } \
    else { const int64_t DIM = dim; call; }

/* out and norms (log of the sum of exponentials) of every query; out [rows, heads, dim], norms [rows, heads]. */
void attention_forward(const Segments *s, const float *q, const float *k, const float *v, float *out, float *norms) {
#pragma omp parallel if (s->threads > 1) num_threads(s->threads)
    {
        Room room = open_room(s, 0);
#pragma omp for schedule(dynamic, 8)
        for (int64_t i = 0; i < s->segments * s->kv_heads; i++)
            BY_SIZE(s->head_dim, forward_segment(s, i / s->kv_heads, i % s->kv_heads, q, k, v, out, norms, room, DIM))
        free(room.keys);
    }
}

/* Gradients; those of k and v begin as 0. A kv head belongs to one thread, which adds up the segments in their order. */
void attention_backward(const Segments *s, const float *q, const float *k, const float *v, const float *norms, const float *grad, float *grad_q, float *grad_k, float *grad_v) {
#pragma omp parallel if (s->threads > 1) num_threads(s->threads)
    {
        Room room = open_room(s, 1);
#pragma omp for
        for (int64_t head = 0; head < s->kv_heads; head++)
            for (int64_t i = 0; i < s->segments; i++)
                BY_SIZE(s->head_dim, backward_segment(s, i, head, q, k, v, norms, grad, grad_q, grad_k, grad_v, room, DIM))
        free(room.keys);
    }
}
