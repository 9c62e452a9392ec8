/* Sixteen floats at a time, for the kernels of this folder.

   No fast-math: a compiler may not reorder sums, so every sum has one order. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef float half __attribute__((vector_size(2 * LANES)));
typedef float quarter __attribute__((vector_size(LANES)));
typedef int32_t int_lanes __attribute__((vector_size(4 * LANES)));

INLINE lanes load(const float *from) {
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float *to, lanes x) { memcpy(to, &x, sizeof x); }

INLINE lanes choose(int_lanes mask, lanes yes, lanes no) {
    return (lanes)((mask & (int_lanes)yes) | (~mask & (int_lanes)no));
}

INLINE lanes fill(float x) { return (lanes){} + x; }

INLINE float sum(lanes x) {
    half low, high;
    memcpy(&low, &x, sizeof low);
    memcpy(&high, (char *)&x + sizeof low, sizeof high);
    low += high;
    quarter first, second;
    memcpy(&first, &low, sizeof first);
    memcpy(&second, (char *)&low + sizeof first, sizeof second);
    first += second;
    return (first[0] + first[2]) + (first[1] + first[3]);
}

INLINE float largest(lanes x) {
    float parts[LANES];
    store(parts, x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) parts[i] = parts[i] > parts[i + width] ? parts[i] : parts[i + width];
    return parts[0];
}

/* exp(x) to 2 units in the last place; 0 below -87, NaN of NaN. Source: Cephes, expf. */
INLINE lanes exponential(lanes x) {
    int_lanes is_tiny = x < -87.0f;
    x = choose(is_tiny, fill(-87.0f), x);
    x = choose(x > 88.0f, fill(88.0f), x);
    lanes n = x * 1.44269504f + 12582912.0f; /* adding and subtracting 1.5 * 2^23 rounds */
    n -= 12582912.0f;
    lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    int_lanes power = (__builtin_convertvector(n, int_lanes) + 127) << 23;
    return (lanes)((int_lanes)(y * (lanes)power) & ~is_tiny);
}

/* 1 / sqrt(mean(x^2) + eps) */
INLINE float inverse_rms(const float *x, int64_t dim, float eps) {
    lanes squares = {};
    for (int64_t i = 0; i < dim; i += LANES) squares += load(x + i) * load(x + i);
    return 1.0f / sqrtf(sum(squares) / (float)dim + eps);
}

/* Replaces the first `count` scores by exp(score - largest), and those up to `padded` by 0; returns their sum, and the largest score in `most`. */
INLINE float exponentials(float *scores, int64_t count, int64_t padded, float *most) {
    for (int64_t i = count; i < padded; i++) scores[i] = -INFINITY;
    lanes best = load(scores), total = {};
    for (int64_t i = LANES; i < padded; i += LANES) {
        lanes x = load(scores + i);
        best = choose(x > best, x, best);
    }
    *most = largest(best);
    for (int64_t i = 0; i < padded; i += LANES) {
        lanes x = exponential(load(scores + i) - *most);
        total += x;
        store(scores + i, x);
    }
    return sum(total);
}
