/* IVON's inner loops for CPUs, in one pass over memory each. The arithmetic is that of noise.py and kernels.py, operation
 * for operation: the same bits come out, so a machine without this library computes the same run, only slower.
 *
 * Plain C99. Compile with -ffp-contract=off and without -ffast-math: a fused or reordered operation would change the
 * bits. Work goes block by block (1024 elements) through buffers that stay in the first-level cache. `start` is the
 * index of the first element in the whole flattened tensor, because noise belongs to that index.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 1024
#define PAIRS (BLOCK / 2)
#define INLINE static inline __attribute__((always_inline))

/* One version for each level of x86-64, chosen when the library is loaded (GCC has that since 12); else the basic one. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__)
#define EXPORT __attribute__((visibility("default"), target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define EXPORT __attribute__((visibility("default")))
#endif

enum { FLOAT32 = 0, BFLOAT16 = 1 };
enum { NONE = 0, PRICE = 1, GRADSQ = 2 };

typedef struct {
    uint64_t first, second;
} Key;

/* Same fields, in the same order, as in native.py. */
typedef struct {
    float weight_decay, ess, root, noise_scale;
    float beta1, grad_weight, beta2, estimate_weight, retraction_weight, second_factor;
    float momentum_factor, clip_radius, step_size, estimate_bound, hessian_low, hessian_high;
    int32_t estimator;
} Numbers;

INLINE float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE void load(float *restrict to, const void *from, int dtype, int64_t at, int count)
{
    if (dtype == FLOAT32) {
        memcpy(to, (const float *)from + at, (size_t)count * sizeof(float));
    } else {
        const uint16_t *half = (const uint16_t *)from + at;
        for (int i = 0; i < count; i++)
            to[i] = from_bits((uint32_t)half[i] << 16);
    }
}

/* Rounds to nearest, ties to even, as torch does. */
INLINE void store(void *to, int dtype, int64_t at, const float *restrict from, int count)
{
    if (dtype == FLOAT32) {
        memcpy((float *)to + at, from, (size_t)count * sizeof(float));
    } else {
        uint16_t *half = (uint16_t *)to + at;
        for (int i = 0; i < count; i++) {
            uint32_t bits = to_bits(from[i]);
            uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
            half[i] = from[i] == from[i] ? (uint16_t)rounded : (uint16_t)0x7FC0;
        }
    }
}

/* All 1024 normals of a block; noise.py explains and defines them. */
INLINE void block_normals(Key key, uint64_t block, float *restrict z)
{
    int64_t bits[PAIRS];
    float wide[PAIRS];
    for (int j = 0; j < PAIRS; j++) {
        uint64_t b = (block * PAIRS + (uint64_t)j) * 0x9E3779B97F4A7C15u + key.first;
        b = (b ^ (b >> 30)) * 0xBF58476D1CE4E5B9u;
        b ^= key.second;
        b = (b ^ (b >> 27)) * 0x94D049BB133111EBu;
        bits[j] = (int64_t)(b ^ (b >> 31));
    }
    for (int j = 0; j < PAIRS; j++) /* alone, because AVX2 has no instruction for it */
        wide[j] = (float)bits[j];
    for (int j = 0; j < PAIRS; j++) {
        float x = (float)(int32_t)bits[j] * (float)(3.14159265358979323846 * 0x1p-32);
        float u = fabsf(wide[j]) * 0x1p-63f + 0x1p-64f;
        int32_t u_bits = (int32_t)to_bits(u);
        int32_t exponent = (u_bits - 0x3F3504F3) >> 23;
        float v = from_bits((uint32_t)(u_bits - exponent * (1 << 23))) - 1.0f;
        float log = -0.076345004f * v + 0.12761582f;
        log = log * v + -0.13160183f;
        log = log * v + 0.14201757f;
        log = log * v + -0.16623357f;
        log = log * v + 0.20001227f;
        log = log * v + -0.25000820f;
        log = log * v + 0.33333331f;
        float squared = v * v;
        log = log * v * squared - squared * 0.5f + v;
        float radius = copysignf(sqrtf(((float)exponent * 0.69314718f + log) * -2.0f), wide[j]);
        float q = x * x;
        float sine = 2.6089324e-06f * q + -0.00019811112f;
        sine = sine * q + 0.008333088f;
        sine = sine * q + -0.16666660f;
        sine = sine * q * x + x;
        float cosine = 2.3194384e-05f * q + -0.0013855927f;
        cosine = cosine * q + 0.041663989f;
        cosine = cosine * q + -0.49999932f;
        cosine = cosine * q + 1.0f;
        z[j] = radius * cosine;
        z[j + PAIRS] = radius * sine;
    }
}

/* The part of [done, count) that lies in one block: its noise starts at *inside of the block's. */
INLINE int next_part(int64_t start, int64_t count, int64_t done, int *inside)
{
    *inside = (int)((start + done) % BLOCK);
    int64_t left = count - done, room = BLOCK - *inside;
    return (int)(left < room ? left : room);
}

INLINE float sigma_inverse(float hessian, const Numbers *n)
{
    return n->root > 0 ? n->root : sqrtf((hessian + n->weight_decay) * n->ess);
}

/* Of this interface; native.py wants the same. */
__attribute__((visibility("default"))) int threepo_version(void)
{
    return 1;
}

EXPORT void threepo_normal(Key key, int64_t start, int64_t count, float *out)
{
    float z[BLOCK];
    int inside, part;
    for (int64_t done = 0; done < count; done += part) {
        part = next_part(start, count, done, &inside);
        block_normals(key, (uint64_t)((start + done) / BLOCK), z);
        memcpy(out + done, z + inside, (size_t)part * sizeof(float));
    }
}

/* out = mean + sigma z. `out` may be `mean`. */
EXPORT void threepo_perturb(Key key, int64_t start, int64_t count, const void *mean, int mean_dtype, void *out,
                            int out_dtype, const float *hessian, const Numbers *numbers)
{
    const Numbers n = *numbers;
    float z[BLOCK], m[BLOCK];
    int inside, part;
    for (int64_t done = 0; done < count; done += part) {
        part = next_part(start, count, done, &inside);
        block_normals(key, (uint64_t)((start + done) / BLOCK), z);
        load(m, mean, mean_dtype, done, part);
        const float *restrict h = hessian + done;
        for (int i = 0; i < part; i++)
            m[i] = m[i] + n.noise_scale / sigma_inverse(h[i], &n) * z[inside + i];
        store(out, out_dtype, done, m, part);
    }
}

/* total += z * grad. */
EXPORT void threepo_add_noise_times(Key key, int64_t start, int64_t count, const void *grad, int grad_dtype, float *total)
{
    float z[BLOCK], x[BLOCK];
    int inside, part;
    for (int64_t done = 0; done < count; done += part) {
        part = next_part(start, count, done, &inside);
        block_normals(key, (uint64_t)((start + done) / BLOCK), z);
        load(x, grad, grad_dtype, done, part);
        for (int i = 0; i < part; i++)
            total[done + i] = total[done + i] + x[i] * z[inside + i];
    }
}

/* One IVON step. `second` is the observed sum, or NULL: it is made here from `grad` (and the noise). `copy` is a second
 * home of the new mean, rounded to `copy_dtype`, or NULL. Returns how many coordinates were clipped. */
EXPORT int64_t threepo_update(Key key, int64_t start, int64_t count, void *mean, int mean_dtype, void *copy,
                              int copy_dtype, float *hessian, float *momentum, const void *grad, int grad_dtype,
                              const float *second, const Numbers *numbers)
{
    const Numbers n = *numbers;
    float z[BLOCK], m[BLOCK], x[BLOCK];
    int64_t clipped = 0;
    int inside, part;
    for (int64_t done = 0; done < count; done += part) {
        part = next_part(start, count, done, &inside);
        if (n.estimator == PRICE && !second)
            block_normals(key, (uint64_t)((start + done) / BLOCK), z);
        load(m, mean, mean_dtype, done, part);
        load(x, grad, grad_dtype, done, part);
        float *restrict h = hessian + done, *restrict g = momentum + done;
        for (int i = 0; i < part; i++)
            g[i] = g[i] * n.beta1 + x[i] * n.grad_weight;
        if (n.estimator != NONE) {
            float *moment = x;
            if (second)
                memcpy(moment, second + done, (size_t)part * sizeof(float));
            else if (n.estimator == PRICE)
                for (int i = 0; i < part; i++)
                    moment[i] = x[i] * z[inside + i];
            else
                for (int i = 0; i < part; i++)
                    moment[i] = x[i] * x[i];
            for (int i = 0; i < part; i++) {
                float f = n.estimator == PRICE ? moment[i] * sigma_inverse(h[i], &n) * n.second_factor
                                               : moment[i] * n.second_factor;
                f = f < -n.estimate_bound ? -n.estimate_bound : f;
                f = f > n.estimate_bound ? n.estimate_bound : f;
                float gap = h[i] - f;
                float retraction = gap * gap / (h[i] + n.weight_decay) * n.retraction_weight;
                float updated = h[i] * n.beta2 + f * n.estimate_weight + retraction;
                updated = updated < n.hessian_low ? n.hessian_low : updated;
                h[i] = updated > n.hessian_high ? n.hessian_high : updated;
            }
        }
        int32_t here = 0;
        for (int i = 0; i < part; i++) {
            float move = (m[i] * n.weight_decay + g[i] * n.momentum_factor) / (h[i] + n.weight_decay);
            here += fabsf(move) > n.clip_radius;
            move = move < -n.clip_radius ? -n.clip_radius : move;
            move = move > n.clip_radius ? n.clip_radius : move;
            m[i] = m[i] - move * n.step_size;
        }
        clipped += here;
        store(mean, mean_dtype, done, m, part);
        if (copy)
            store(copy, copy_dtype, done, m, part);
    }
    return clipped;
}
