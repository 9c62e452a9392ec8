/* out = x @ weight.T, where weights are read once and stay where they are: in float32 or bfloat16, for machines with
   AVX-512. products.py declares and explains it.

   The sum of an output has one order, whatever the number of rows: sixteen running sums over each block of inputs, added
   as `sum` adds them; then the blocks, in order. So a row has equal bits in every batch. bfloat16 is widened: its products
   are exact in float32, and many processors have more units for float32 than for bfloat16. */

#include "lanes.h"

#ifdef __AVX512F__
#define TILE_ROWS 3
#define TILE_OUTS 8
#define BLOCK 768         /* inputs whose weights, for a tile's outputs, stay in the first cache */
#define CHUNK_ROWS 96     /* rows of x that stay in the second cache */
#define FEW_ROWS 3        /* up to so many rows widen weights as they read them */

typedef float eighth __attribute__((vector_size(4 * TILE_OUTS)));
typedef uint32_t bit_eighth __attribute__((vector_size(4 * TILE_OUTS)));
typedef uint16_t half_eighth __attribute__((vector_size(2 * TILE_OUTS)));

typedef struct {
    const char *x, *weight, *bias, *residual;
    char *out;
    int64_t rows, outs, ins;
    int is_half, is_out_half; /* operands, and results, are bfloat16 */
} Product;

#define PICK(a, b, ...) __builtin_shuffle(a, b, (int_lanes){__VA_ARGS__})

/* `sum` of each of eight vectors. */
INLINE eighth sums_of_eight(const lanes *x) {
    lanes half[4], quarter[2];
    for (int i = 0; i < 4; i++)
        half[i] = PICK(x[2 * i], x[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                  PICK(x[2 * i], x[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        quarter[i] = PICK(half[2 * i], half[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                     PICK(half[2 * i], half[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    lanes pairs = PICK(quarter[0], quarter[1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
                  PICK(quarter[0], quarter[1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    lanes sums = PICK(pairs, pairs, 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14) +
                 PICK(pairs, pairs, 1, 3, 5, 7, 9, 11, 13, 15, 1, 3, 5, 7, 9, 11, 13, 15);
    eighth out;
    memcpy(&out, &sums, sizeof out);
    return out;
}

typedef struct {
    const float *x;
    const char *weight; /* of eight outputs */
    int64_t ins, stride, count; /* values per row of x, per row of weight, and to sum */
} Part;

/* The sums of a tile over one block: of `rows` rows and eight outputs. */
INLINE void tile(Part p, eighth *sums, int is_first_block, const int rows, const char *fetched, const int is_half) {
    lanes total[TILE_ROWS][TILE_OUTS] = {}, of_x[TILE_ROWS];
    int64_t size = is_half ? 2 : 4;
    for (int64_t at = 0; at < p.count; at += LANES) {
        for (int r = 0; r < rows; r++) of_x[r] = load(p.x + r * p.ins + at);
        for (int o = 0; o < TILE_OUTS; o++) {
            if (fetched) __builtin_prefetch(fetched + (o * p.stride + at) * size, 0, 2);
            lanes of_weight = widen(p.weight, o * p.stride + at, is_half);
            __asm__("" : "+v"(of_weight)); /* in a register: else each of its products reads it anew */
            for (int r = 0; r < rows; r++) total[r][o] += of_x[r] * of_weight;
        }
    }
    for (int r = 0; r < rows; r++) sums[r] = is_first_block ? sums_of_eight(total[r]) : sums[r] + sums_of_eight(total[r]);
}

INLINE eighth read(const char *from, int64_t at, int is_half) {
    eighth x;
    if (!is_half) return memcpy(&x, from + 4 * at, sizeof x), x;
    half_eighth bits;
    memcpy(&bits, from + 2 * at, sizeof bits);
    return (eighth)(__builtin_convertvector(bits, bit_eighth) << 16);
}

/* The nearest bfloat16 values, as `nearest` finds them. */
INLINE half_eighth half_of(eighth x) {
    bit_eighth bits = (bit_eighth)x, is_nan = (bit_eighth)(x != x);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & bits), half_eighth);
}

/* Add bias and residual; in bfloat16 the sum is rounded before the residual is added, as separate operations do. */
INLINE void write(const Product *p, int64_t row, int64_t out, eighth sums) {
    int64_t at = row * p->outs + out;
    if (p->bias) sums += read(p->bias, out, p->is_half);
    if (p->residual && p->is_out_half) sums = (eighth)(__builtin_convertvector(half_of(sums), bit_eighth) << 16);
    if (p->residual) sums += read(p->residual, at, p->is_out_half);
    if (!p->is_out_half) {
        memcpy(p->out + 4 * at, &sums, sizeof sums);
        return;
    }
    half_eighth bits = half_of(sums);
    memcpy(p->out + 2 * at, &bits, sizeof bits);
}

/* Eight outputs of rows [first, last); x: their inputs as floats. */
INLINE void columns(const Product *p, const float *x, int64_t first, int64_t last, int64_t out, const int is_half) {
    eighth sums[CHUNK_ROWS];
    float wide[TILE_OUTS * BLOCK];
    int64_t rows = last - first, size = is_half ? 2 : 4, row_bytes = p->ins * size;
    for (int64_t start = 0; start < p->ins; start += BLOCK) {
        const char *weight = p->weight + out * row_bytes + start * size;
        const char *next = out + 2 * TILE_OUTS <= p->outs ? weight + TILE_OUTS * row_bytes : NULL;
        Part part = {x + first * p->ins + start, weight, p->ins, p->ins, p->ins - start < BLOCK ? p->ins - start : BLOCK};
        int is_wide = is_half && rows > FEW_ROWS;
        if (is_wide) {
            for (int o = 0; o < TILE_OUTS; o++)
                for (int64_t i = 0; i < part.count; i += LANES) {
                    if (next) __builtin_prefetch(next + (o * p->ins + i) * size, 0, 2);
                    store(wide + o * BLOCK + i, widen(weight, o * p->ins + i, 1));
                }
            part.weight = (char *)wide, part.stride = BLOCK, next = NULL;
        }
        int64_t row = 0;
#define TILE(count, is_half) tile(part, sums + row, !start, count, row ? NULL : next, is_half)
        for (; row + TILE_ROWS <= rows; row += TILE_ROWS, part.x += TILE_ROWS * p->ins)
            if (is_half && !is_wide) TILE(TILE_ROWS, 1); else TILE(TILE_ROWS, 0);
        if (rows - row == 2) { if (is_half && !is_wide) TILE(2, 1); else TILE(2, 0); }
        if (rows - row == 1) { if (is_half && !is_wide) TILE(1, 1); else TILE(1, 0); }
    }
    for (int64_t row = 0; row < rows; row++) write(p, first + row, out, sums[row]);
}

int has_products(void) { return 1; }

void product(const Product *p, int threads) {
    const float *x = (const float *)p->x;
    float *widened = NULL;
    if (p->is_half) {
        x = widened = malloc(p->rows * p->ins * sizeof(float));
        for (int64_t i = 0; i < p->rows * p->ins; i += LANES) store(widened + i, widen(p->x, i, 1));
    }
    for (int64_t first = 0; first < p->rows; first += CHUNK_ROWS) {
        int64_t last = first + CHUNK_ROWS < p->rows ? first + CHUNK_ROWS : p->rows;
#pragma omp parallel for if (threads > 1) num_threads(threads)
        for (int64_t i = 0; i < p->outs; i += TILE_OUTS) {
            /* The last tile may begin before the end of the one before it: both compute equal bits. */
            int64_t out = i + TILE_OUTS <= p->outs ? i : p->outs - TILE_OUTS;
            if (p->is_half)
                columns(p, x, first, last, out, 1);
            else
                columns(p, x, first, last, out, 0);
        }
    }
    free(widened);
}
#else
int has_products(void) { return 0; }
void product(const void *p, int threads) {}
#endif
