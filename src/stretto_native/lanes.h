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
typedef uint16_t half_lanes __attribute__((vector_size(2 * LANES)));

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

/* Sixteen values, from the one at `at`: floats or, if is_half, bfloat16. */
INLINE lanes widen(const void *from, int64_t at, const int is_half) {
    if (!is_half) return load((const float *)from + at);
    half_lanes bits;
    memcpy(&bits, (const uint16_t *)from + at, sizeof bits);
    return (lanes)(__builtin_convertvector(bits, int_lanes) << 16);
}

/* The nearest bfloat16 values, of two equally near ones the even one, as floats. */
INLINE lanes nearest(lanes x) {
    int_lanes bits = (int_lanes)x;
    bits += 0x7fff + ((bits >> 16) & 1);
    return choose(x != x, x, (lanes)(bits & -65536));
}

INLINE lanes rounded(lanes x, const int is_half) { return is_half ? nearest(x) : x; }

INLINE void put(void *to, int64_t at, lanes x, const int is_half) {
    if (!is_half) {
        store((float *)to + at, x);
        return;
    }
    half_lanes bits = __builtin_convertvector((int_lanes)nearest(x) >> 16, half_lanes);
    memcpy((uint16_t *)to + at, &bits, sizeof bits);
}

/* Four sums of every fourth value. */
INLINE quarter folded(lanes x) {
    half low, high;
    memcpy(&low, &x, sizeof low);
    memcpy(&high, (char *)&x + sizeof low, sizeof high);
    low += high;
    quarter first, second;
    memcpy(&first, &low, sizeof first);
    memcpy(&second, (char *)&low + sizeof first, sizeof second);
    return first + second;
}

INLINE float sum(lanes x) {
    quarter parts = folded(x);
    return (parts[0] + parts[2]) + (parts[1] + parts[3]);
}

/* to[i] = sum(x[i]), i < 4, with the same bits. */
INLINE void four_sums(const lanes *x, float *to) {
#if defined(__clang__) || __GNUC__ >= 12
    quarter parts[4], pairs[2];
    for (int i = 0; i < 4; i++) parts[i] = folded(x[i]);
    for (int i = 0; i < 2; i++)
        pairs[i] = __builtin_shufflevector(parts[2 * i], parts[2 * i + 1], 0, 1, 4, 5) + __builtin_shufflevector(parts[2 * i], parts[2 * i + 1], 2, 3, 6, 7);
    quarter sums = __builtin_shufflevector(pairs[0], pairs[1], 0, 2, 4, 6) + __builtin_shufflevector(pairs[0], pairs[1], 1, 3, 5, 7);
    memcpy(to, &sums, sizeof sums);
#else
    for (int i = 0; i < 4; i++) to[i] = sum(x[i]);
#endif
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

/* exp(x) to 20 bits for x <= 0; 0 below -87. torch's attention in bfloat16 computes it so, and weights of equal bits keep
   an engine at its trainer's logprobs. Source: Malossi et al. 2015, "Fast exponential computation on SIMD architectures". */
INLINE lanes rough_exponential(lanes x) {
    int_lanes is_tiny = x < -87.0f;
    lanes scaled = choose(is_tiny, fill(-87.0f), x) * 1.44269504f;
    lanes whole = __builtin_convertvector(__builtin_convertvector(scaled, int_lanes), lanes);
    whole -= choose(whole > scaled, fill(1.0f), fill(0.0f));
    lanes f = scaled - whole;
    lanes correction = ((f * -0.079204240219773236f + -0.22433836478672356f) * f + 0.30354260500649682f) * f + 0.00010703434948458272f;
    int_lanes bits = __builtin_convertvector((scaled - correction) * 8388608.0f + 1065353216.0f, int_lanes);
    return (lanes)(bits & ~is_tiny);
}

/* 1 / sqrt(mean(x^2) + eps) */
INLINE float inverse_rms_of(const void *x, int64_t dim, float eps, const int is_half) {
    lanes squares = {};
    for (int64_t i = 0; i < dim; i += LANES) squares += widen(x, i, is_half) * widen(x, i, is_half);
    return 1.0f / sqrtf(sum(squares) / (float)dim + eps);
}

INLINE float inverse_rms(const float *x, int64_t dim, float eps) { return inverse_rms_of(x, dim, eps, 0); }

/* Replaces the first `count` scores by exp(score - largest), and those up to `padded` by 0; returns their sum, and the
   largest score in `most`. is_half: the exponentials are those of torch's attention in bfloat16, rounded after the sum. */
INLINE float exponentials_of(float *scores, int64_t count, int64_t padded, float *most, const int is_half) {
    for (int64_t i = count; i < padded; i++) scores[i] = -INFINITY;
    lanes best = load(scores), total = {};
    for (int64_t i = LANES; i < padded; i += LANES) {
        lanes x = load(scores + i);
        best = choose(x > best, x, best);
    }
    *most = largest(best);
    for (int64_t i = 0; i < padded; i += LANES) {
        lanes x = load(scores + i) - *most;
        x = is_half ? rough_exponential(x) : exponential(x);
        total += x;
        store(scores + i, rounded(x, is_half));
    }
    return sum(total);
}

INLINE float exponentials(float *scores, int64_t count, int64_t padded, float *most) {
    return exponentials_of(scores, count, padded, most, 0);
}
