/* Attention of queries to keys that an index has chosen, forward and backward, the choice itself, and the loss of the
   index, on a CPU; chosen.py declares and explains them. Widths are multiples of LANES; rows are contiguous. */

#include "lanes.h"

#define BLOCK 4 /* heads, and keys, that are computed together, so that a vector is loaded once for all of them */
#define PADDED(count) (((count) + LANES - 1) / LANES * LANES)

/* -- the choice -- */

/* What every query sees: spans [queries, ranges, 2] of keys, the last range first in the row. The keys of the index lie in
   tiles of LANES keys, [tiles, dim, LANES]. */
typedef struct {
    int64_t queries, heads, dim, ranges, chosen, longest, threads;
    const int64_t *spans;
} Choice;

/* Scores of the keys of two tiles: sum over heads of weight * relu(query . key), for `num` heads at a time. */
INLINE void tile_scores(const Choice *c, const float *queries, const float *weights, const float *const *tiles, lanes *scores, int64_t head, const int num) {
    lanes sums[BLOCK][2] = {};
    const float *x = queries + head * c->dim;
    for (int64_t d = 0; d < c->dim; d++) {
        lanes first = load(tiles[0] + d * LANES), second = load(tiles[1] + d * LANES);
        for (int h = 0; h < num; h++) {
            sums[h][0] += x[h * c->dim + d] * first;
            sums[h][1] += x[h * c->dim + d] * second;
        }
    }
    for (int h = 0; h < num; h++)
        for (int i = 0; i < 2; i++) scores[i] += choose(sums[h][i] < 0.0f, fill(0.0f), sums[h][i]) * weights[head + h];
}

/* Integers in the order of scores, and -0 equal to 0. */
INLINE int_lanes rank_code(lanes score) {
    int_lanes bits = (int_lanes)(score + 0.0f);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

/* The codes of all keys that a query sees, in their order; returns how many. */
static int64_t rank_codes(const Choice *c, int64_t query, const float *queries, const float *weights, const float *keys, int32_t *codes) {
    int64_t count = 0, size = c->dim * LANES;
    const float *own = queries + query * c->heads * c->dim, *factors = weights + query * c->heads;
    for (int64_t range = c->ranges - 1; range >= 0; range--) {
        int64_t start = c->spans[(query * c->ranges + range) * 2], end = c->spans[(query * c->ranges + range) * 2 + 1];
        if (start >= end) continue;
        int64_t last = (end - 1) / LANES;
        for (int64_t tile = start / LANES; tile <= last; tile += 2) {
            const float *tiles[2] = {keys + tile * size, keys + (tile < last ? tile + 1 : tile) * size};
            lanes scores[2] = {};
            int64_t head = 0;
            for (; head + BLOCK <= c->heads; head += BLOCK) tile_scores(c, own, factors, tiles, scores, head, BLOCK);
            if (head + 2 <= c->heads) tile_scores(c, own, factors, tiles, scores, head, 2), head += 2;
            if (head < c->heads) tile_scores(c, own, factors, tiles, scores, head, 1);
            int32_t found[2 * LANES];
            for (int i = 0; i < 2; i++) {
                int_lanes code = rank_code(scores[i]);
                memcpy(found + i * LANES, &code, sizeof code);
            }
            int64_t at = tile * LANES, low = start > at ? start - at : 0, high = end - at < 2 * LANES ? end - at : 2 * LANES;
            memcpy(codes + count, found + low, (high - low) * sizeof(int32_t));
            count += high - low;
        }
    }
    return count;
}

/* How many codes are at least `least`. */
static int64_t num_at_least(const int32_t *codes, int64_t padded, int32_t least) {
    int_lanes counts = {};
    for (int64_t i = 0; i < padded; i += LANES) {
        int_lanes code;
        memcpy(&code, codes + i, sizeof code);
        counts -= code >= least;
    }
    int64_t total = 0;
    for (int i = 0; i < LANES; i++) total += counts[i];
    return total;
}

/* The highest bound that at least `wanted` of `count` codes reach, by halving; codes have room for whole vectors. */
static int32_t bound_of(int32_t *codes, int64_t count, int64_t wanted) {
    int64_t low = codes[0], high = codes[0], padded = PADDED(count);
    for (int64_t i = 1; i < count; i++) {
        low = codes[i] < low ? codes[i] : low;
        high = codes[i] > high ? codes[i] : high;
    }
    for (int64_t i = count; i < padded; i++) codes[i] = INT32_MIN; /* no score has this code */
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2, found = num_at_least(codes, padded, (int32_t)middle);
        if (found >= wanted) low = middle;
        else high = middle - 1;
        if (found == wanted) break;
    }
    return (int32_t)low;
}

/* Writes the numbers of the best keys, in order; of equal ones the earliest. */
static void choose_of(const Choice *c, int64_t query, const int32_t *codes, int32_t bound, int64_t ties, int32_t *to) {
    for (int64_t range = c->ranges - 1; range >= 0; range--) {
        int64_t start = c->spans[(query * c->ranges + range) * 2], end = c->spans[(query * c->ranges + range) * 2 + 1];
        for (int64_t key = start; key < end; key++, codes++) {
            int is_tie = *codes == bound && ties > 0;
            if (*codes > bound || is_tie) *to++ = (int32_t)key;
            ties -= is_tie;
        }
    }
}

/* chosen [queries, chosen]: the best keys of each query by number, at the end of its row; -1 before them. */
void choose_keys(const Choice *c, const float *queries, const float *weights, const float *keys, int32_t *chosen) {
#pragma omp parallel if (c->threads > 1) num_threads(c->threads)
    {
        int32_t *codes = malloc(PADDED(c->longest) * sizeof(int32_t));
#pragma omp for schedule(dynamic, 8)
        for (int64_t query = 0; query < c->queries; query++) {
            int32_t *to = chosen + query * c->chosen;
            int64_t seen = 0;
            for (int64_t i = query * c->ranges; i < (query + 1) * c->ranges; i++) seen += c->spans[2 * i + 1] - c->spans[2 * i];
            for (int64_t i = 0; i < c->chosen - seen; i++) *to++ = -1;
            if (seen <= c->chosen) {
                for (int64_t range = c->ranges - 1; range >= 0; range--) {
                    const int64_t *span = c->spans + (query * c->ranges + range) * 2;
                    for (int64_t key = span[0]; key < span[1]; key++) *to++ = (int32_t)key;
                }
                continue;
            }
            rank_codes(c, query, queries, weights, keys, codes);
            int32_t bound = bound_of(codes, seen, c->chosen);
            int64_t above = 0;
            for (int64_t i = 0; i < seen; i++) above += codes[i] > bound;
            choose_of(c, query, codes, bound, c->chosen - above, to);
        }
        free(codes);
    }
}

/* -- the attention -- */

/* keys [queries, chosen]: numbers of the keys of every query, the last counts[query] of its row. */
typedef struct {
    int64_t queries, heads, dim, value_dim, num_keys, chosen, threads, is_half;
    const int32_t *keys;
    const int64_t *counts;
    float scale;
} Chosen;

/* to[i * BLOCK + j] = x[i] . y[j] for BLOCK rows of both. */
INLINE void dots(const float *const *x, const float *const *y, int64_t dim, float *to) {
    lanes sums[BLOCK][BLOCK] = {};
    for (int64_t d = 0; d < dim; d += LANES) {
        lanes of[BLOCK];
        for (int j = 0; j < BLOCK; j++) of[j] = load(y[j] + d);
        for (int i = 0; i < BLOCK; i++) {
            lanes own = load(x[i] + d);
            for (int j = 0; j < BLOCK; j++) sums[i][j] += own * of[j];
        }
    }
    for (int i = 0; i < BLOCK; i++) four_sums(sums[i], to + i * BLOCK);
}

/* to[h * stride + j] = x[h] . row keys[j] of `rows` for all heads and `count` keys; the first `dim` of `width` are read. */
static void products(const float *x, int64_t heads, int64_t x_width, const float *rows, int64_t width, const int32_t *keys, int64_t count, int64_t dim, float *to, int64_t stride) {
    for (int64_t j = 0; j < count; j += BLOCK) {
        const float *of[BLOCK];
        for (int n = 0; n < BLOCK; n++) of[n] = rows + keys[j + n < count ? j + n : count - 1] * width;
        for (int64_t head = 0; head < heads; head += BLOCK) {
            const float *own[BLOCK];
            float found[BLOCK * BLOCK];
            for (int n = 0; n < BLOCK; n++) own[n] = x + (head + n < heads ? head + n : heads - 1) * x_width;
            dots(own, of, dim, found);
            for (int n = 0; n < BLOCK && head + n < heads; n++) memcpy(to + (head + n) * stride + j, found + n * BLOCK, BLOCK * sizeof(float));
        }
    }
}

/* out[n][first:] = sum over keys of weights[n * stride + j] * row keys[j], for BLOCK heads and `num` vectors of the row. */
INLINE void mix_columns(const float *const *weights, const float *rows, int64_t width, const int32_t *keys, int64_t count, int64_t first, lanes (*sums)[BLOCK], const int num) {
    for (int n = 0; n < BLOCK; n++)
        for (int i = 0; i < num; i++) sums[n][i] = fill(0.0f);
    for (int64_t j = 0; j < count; j++) {
        const float *from = rows + keys[j] * width + first;
        lanes of[BLOCK];
        for (int i = 0; i < num; i++) of[i] = load(from + i * LANES);
        for (int n = 0; n < BLOCK; n++)
            for (int i = 0; i < num; i++) sums[n][i] += weights[n][j] * of[i];
    }
}

/* out[h, :dim] = sum over keys of weights[h * stride + j] * row keys[j]; out [heads, dim] from `at` on. */
static void mix(const float *weights, int64_t heads, int64_t stride, const float *rows, int64_t width, const int32_t *keys, int64_t count, int64_t dim, void *out, int64_t at, const int is_half) {
    for (int64_t head = 0; head < heads; head += BLOCK) {
        const float *own[BLOCK];
        for (int n = 0; n < BLOCK; n++) own[n] = weights + (head + n < heads ? head + n : heads - 1) * stride;
        for (int64_t first = 0; first < dim;) {
            lanes sums[BLOCK][BLOCK];
            int64_t num = dim - first >= 4 * LANES ? 4 : dim - first >= 3 * LANES ? 3 : dim - first >= 2 * LANES ? 2 : 1;
            if (num == 4) mix_columns(own, rows, width, keys, count, first, sums, 4);
            else if (num == 3) mix_columns(own, rows, width, keys, count, first, sums, 3);
            else if (num == 2) mix_columns(own, rows, width, keys, count, first, sums, 2);
            else mix_columns(own, rows, width, keys, count, first, sums, 1);
            for (int n = 0; n < BLOCK && head + n < heads; n++)
                for (int64_t i = 0; i < num; i++) put(out, at + (head + n) * dim + first + i * LANES, sums[n][i], is_half);
            first += num * LANES;
        }
    }
}

/* Row keys[j] of `to` += sum over heads of slopes[h * stride + j] * x[h], of one vector at column d. */
INLINE void spread(const float *slopes, int64_t heads, int64_t stride, const float *x, int64_t x_width, const int32_t *keys, int64_t count, float *to, int64_t width, int64_t d) {
    int64_t j = 0;
    for (; j + BLOCK <= count; j += BLOCK) {
        lanes sums[BLOCK] = {};
        for (int64_t head = 0; head < heads; head++) {
            lanes own = load(x + head * x_width + d);
            for (int n = 0; n < BLOCK; n++) sums[n] += slopes[head * stride + j + n] * own;
        }
        for (int n = 0; n < BLOCK; n++) {
            float *row = to + keys[j + n] * width + d;
            store(row, load(row) + sums[n]);
        }
    }
    for (; j < count; j++) {
        lanes total = {};
        for (int64_t head = 0; head < heads; head++) total += slopes[head * stride + j] * load(x + head * x_width + d);
        float *row = to + keys[j] * width + d;
        store(row, load(row) + total);
    }
}

/* The floats of `count` values, copied to `room` if they are bfloat16. */
INLINE const float *floats(const void *from, int64_t at, int64_t count, float *room, const int64_t is_half) {
    if (!is_half) return (const float *)from + at;
    for (int64_t i = 0; i < count; i += LANES) store(room + i, widen(from, at + i, 1));
    return room;
}

/* Replaces the products of one query and one head by their softmax, and those up to `padded` by 0. Forward and backward
   compute it from the products, so that weights have equal bits: a log of the sum of exponentials, kept between them, is
   off by much where scores are large. */
INLINE void softmax(const Chosen *c, float *weights, int64_t count, int64_t padded) {
    float most;
    for (int64_t i = 0; i < padded; i += LANES) store(weights + i, rounded(load(weights + i), c->is_half) * c->scale);
    float factor = 1.0f / exponentials(weights, count, padded, &most);
    for (int64_t i = 0; i < padded; i += LANES) store(weights + i, rounded(load(weights + i) * factor, c->is_half));
}

/* out [queries, heads, value_dim] of q [queries, heads, dim] and k [num_keys, dim], whose first value_dim are the values.
   means [queries, chosen], if not NULL: weights, averaged over heads, and 0 where no key is. is_half: q and out are
   bfloat16, and what torch rounds on the way is rounded. */
void chosen_forward(const Chosen *c, const void *q, const float *k, void *out, float *means) {
    int64_t stride = PADDED(c->chosen);
#pragma omp parallel if (c->threads > 1) num_threads(c->threads)
    {
        float *weights = malloc(c->heads * (stride + c->dim) * sizeof(float)), *room = weights + c->heads * stride;
#pragma omp for schedule(dynamic, 8)
        for (int64_t query = 0; query < c->queries; query++) {
            int64_t count = c->counts[query], padded = PADDED(count);
            const int32_t *keys = c->keys + (query + 1) * c->chosen - count;
            const float *own = floats(q, query * c->heads * c->dim, c->heads * c->dim, room, c->is_half);
            products(own, c->heads, c->dim, k, c->dim, keys, count, c->dim, weights, stride);
            for (int64_t head = 0; head < c->heads; head++) softmax(c, weights + head * stride, count, padded);
            if (means) {
                float *to = means + (query + 1) * c->chosen - count;
                memset(to + count - c->chosen, 0, (c->chosen - count) * sizeof(float));
                for (int64_t j = 0; j < count; j++) {
                    float total = 0.0f;
                    for (int64_t head = 0; head < c->heads; head++) total += weights[head * stride + j];
                    to[j] = total / (float)c->heads;
                }
            }
            int64_t at = query * c->heads * c->value_dim;
            if (c->is_half) mix(weights, c->heads, stride, k, c->dim, keys, count, c->value_dim, out, at, 1);
            else mix(weights, c->heads, stride, k, c->dim, keys, count, c->value_dim, out, at, 0);
        }
        free(weights);
    }
}

/* Weights and slopes (gradients of the products) of one query from those products and those with `grad`. */
static void slopes_of(const Chosen *c, int64_t count, float *weights, float *slopes, int64_t stride) {
    int64_t padded = PADDED(count);
    for (int64_t head = 0; head < c->heads; head++) {
        float *w = weights + head * stride, *s = slopes + head * stride;
        softmax(c, w, count, padded);
        for (int64_t i = count; i < padded; i++) s[i] = 0.0f;
        lanes products = {};
        for (int64_t i = 0; i < padded; i += LANES) {
            lanes slope = rounded(load(s + i), c->is_half);
            products += load(w + i) * slope;
            store(s + i, slope);
        }
        float shift = sum(products);
        for (int64_t i = 0; i < padded; i += LANES) store(s + i, rounded(load(w + i) * (load(s + i) - shift) * c->scale, c->is_half));
    }
}

/* Queries whose slopes are kept at once: they are few if each has many keys. A rank may have no queries, and they no keys. */
static int64_t queries_at_once(const Chosen *c, int64_t stride) {
    if (!c->queries) return 0;
    int64_t fitting = (1 << 18) / (c->heads * stride), least = 2 * c->threads;
    int64_t num = fitting > 64 ? 64 : fitting < least ? least : fitting;
    return num < c->queries ? num : c->queries;
}

/* grad_q as q, and grad_k [num_keys, dim], float32, which begins as 0. Its columns are divided among threads, each of which
   adds up the queries in their order. */
void chosen_backward(const Chosen *c, const void *q, const float *k, const void *grad, void *grad_q, float *grad_k) {
    int64_t stride = PADDED(c->chosen), num = queries_at_once(c, stride);
    int64_t q_size = c->heads * c->dim, out_size = c->heads * c->value_dim;
    float *weights = malloc(num * (2 * c->heads * stride + (c->is_half ? q_size + out_size : 0)) * sizeof(float));
    float *slopes = weights + num * c->heads * stride, *q_room = slopes + num * c->heads * stride, *out_room = q_room + num * q_size;
#pragma omp parallel if (c->threads > 1) num_threads(c->threads)
    for (int64_t start = 0; start < c->queries; start += num) {
        int64_t stop = start + num < c->queries ? start + num : c->queries;
#pragma omp for schedule(dynamic, 2)
        for (int64_t query = start; query < stop; query++) {
            int64_t count = c->counts[query], place = query - start;
            const int32_t *keys = c->keys + (query + 1) * c->chosen - count;
            const float *own = floats(q, query * q_size, q_size, q_room + place * q_size, c->is_half);
            const float *outer = floats(grad, query * out_size, out_size, out_room + place * out_size, c->is_half);
            float *w = weights + place * c->heads * stride, *s = slopes + place * c->heads * stride;
            products(own, c->heads, c->dim, k, c->dim, keys, count, c->dim, w, stride);
            products(outer, c->heads, c->value_dim, k, c->dim, keys, count, c->value_dim, s, stride);
            slopes_of(c, count, w, s, stride);
            if (c->is_half) mix(s, c->heads, stride, k, c->dim, keys, count, c->dim, grad_q, query * q_size, 1);
            else mix(s, c->heads, stride, k, c->dim, keys, count, c->dim, grad_q, query * q_size, 0);
        }
#pragma omp for schedule(static)
        for (int64_t d = 0; d < c->dim; d += LANES)
            for (int64_t query = start; query < stop; query++) {
                int64_t count = c->counts[query], place = query - start;
                const int32_t *keys = c->keys + (query + 1) * c->chosen - count;
                const float *own = c->is_half ? q_room + place * q_size : (const float *)q + query * q_size;
                const float *outer = c->is_half ? out_room + place * out_size : (const float *)grad + query * out_size;
                spread(slopes + place * c->heads * stride, c->heads, stride, own, c->dim, keys, count, grad_k, c->dim, d);
                if (d < c->value_dim) spread(weights + place * c->heads * stride, c->heads, stride, outer, c->value_dim, keys, count, grad_k, c->dim, d);
            }
    }
    free(weights);
}

/* -- the loss of the index: KL(attention, softmax of its scores), summed over queries -- */

/* The products of a query's heads with its keys, those below 0 as 0, and in `scores` their weighted sums, 0 after them. */
static void index_scores(const Chosen *c, const float *own, const float *factors, const float *k, const int32_t *keys, int64_t count, float *by_head, float *scores, int64_t stride) {
    int64_t padded = PADDED(count);
    products(own, c->heads, c->dim, k, c->dim, keys, count, c->dim, by_head, stride);
    memset(scores, 0, padded * sizeof(float));
    for (int64_t head = 0; head < c->heads; head++) {
        float *of = by_head + head * stride;
        for (int64_t i = count; i < padded; i++) of[i] = 0.0f;
        for (int64_t i = 0; i < padded; i += LANES) {
            lanes x = load(of + i);
            x = choose(x < 0.0f, fill(0.0f), x);
            store(of + i, x);
            store(scores + i, load(scores + i) + factors[head] * x);
        }
    }
}

/* losses [queries] of attention [queries, chosen], the `means` of chosen_forward; queries, weights and k are the index's. */
void index_loss_forward(const Chosen *c, const float *queries, const float *weights, const float *k, const float *attention, float *losses) {
    int64_t stride = PADDED(c->chosen);
#pragma omp parallel if (c->threads > 1) num_threads(c->threads)
    {
        float *by_head = malloc((c->heads + 2) * stride * sizeof(float)), *scores = by_head + c->heads * stride, *shares = scores + stride;
#pragma omp for schedule(dynamic, 8)
        for (int64_t query = 0; query < c->queries; query++) {
            int64_t count = c->counts[query], end = (query + 1) * c->chosen;
            index_scores(c, queries + query * c->heads * c->dim, weights + query * c->heads, k, c->keys + end - count, count, by_head, scores, stride);
            memcpy(shares, scores, stride * sizeof(float));
            float most, norm = logf(exponentials(shares, count, PADDED(count), &most)), loss = 0.0f;
            for (int64_t j = 0; j < count; j++) {
                float share = attention[end - count + j];
                if (share > 0.0f) loss += share * (logf(share) - (scores[j] - most - norm));
            }
            losses[query] = loss;
        }
        free(by_head);
    }
}

/* Gradients of the losses' sum times c->scale, float32; that of k begins as 0. */
void index_loss_backward(const Chosen *c, const float *queries, const float *weights, const float *k, const float *attention, float *grad_queries, float *grad_weights, float *grad_k) {
    int64_t stride = PADDED(c->chosen), num = queries_at_once(c, stride), size = c->heads * c->dim;
    float *all = malloc(num * c->heads * stride * sizeof(float));
#pragma omp parallel if (c->threads > 1) num_threads(c->threads)
    for (int64_t start = 0; start < c->queries; start += num) {
        int64_t stop = start + num < c->queries ? start + num : c->queries;
#pragma omp for schedule(dynamic, 2)
        for (int64_t query = start; query < stop; query++) {
            int64_t count = c->counts[query], padded = PADDED(count), end = (query + 1) * c->chosen;
            const int32_t *keys = c->keys + end - count;
            const float *factors = weights + query * c->heads;
            float *by_head = all + (query - start) * c->heads * stride, *slopes = malloc(stride * sizeof(float)), most;
            index_scores(c, queries + query * size, factors, k, keys, count, by_head, slopes, stride);
            float factor = 1.0f / exponentials(slopes, count, padded, &most);
            for (int64_t j = 0; j < count; j++) slopes[j] = (slopes[j] * factor - attention[end - count + j]) * c->scale;
            for (int64_t head = 0; head < c->heads; head++) {
                float *of = by_head + head * stride;
                lanes products = {};
                for (int64_t i = 0; i < padded; i += LANES) {
                    lanes x = load(of + i), slope = load(slopes + i);
                    products += x * slope;
                    store(of + i, choose(x > 0.0f, slope * factors[head], fill(0.0f)));
                }
                grad_weights[query * c->heads + head] = sum(products);
            }
            free(slopes);
            mix(by_head, c->heads, stride, k, c->dim, keys, count, c->dim, grad_queries, query * size, 0);
        }
#pragma omp for schedule(static)
        for (int64_t d = 0; d < c->dim; d += LANES)
            for (int64_t query = start; query < stop; query++) {
                int64_t count = c->counts[query];
                spread(all + (query - start) * c->heads * stride, c->heads, stride, queries + query * size, c->dim, c->keys + (query + 1) * c->chosen - count, count, grad_k, c->dim, d);
            }
    }
    free(all);
}
