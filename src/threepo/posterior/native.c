/* IVON's operations on CPUs, in one pass over memory each. The arithmetic is that of noise.py and torch_kernels.py, step
 * for step: the same bits come out, so a machine without this library computes the same run, only slower.
 *
 * Plain C99. Compile with -ffp-contract=off and without -ffast-math: a fused or reordered operation would change the
 * bits. Work goes block by block (1024 elements) through buffers that stay in the first-level cache.
 *
 * Every function takes an array of operations, each on the elements of one tensor. Any number of threads may call it with
 * the same work: they take pieces of all operations in a row until none is left. So they share the work evenly, and small
 * tensors need no call of their own.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 1024
#define PAIRS (BLOCK / 2)
#define PIECE (32 * BLOCK) /* of the work, that a thread takes at a time */
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

/* Same fields, in the same order, as in native.py; Scalars of operations.py explains them. */
typedef struct {
    float weight_decay, ess, fixed_root, noise_scale;
    float beta1, grad_weight, beta2, estimate_weight, retraction_weight, estimate_factor;
    float momentum_factor, clip_radius, step_size, estimate_bound, hessian_low, hessian_high;
    int32_t estimator;
} Scalars;

/* Same fields, in the same order, as in native.py. Element i of the `count` that the pointers point to is element
 * start + i / row * stride + i % row of the whole flattened tensor, because noise belongs to that index. */
typedef struct {
    Key key;
    int64_t start, row, stride, count;
    void *mean, *out; /* `out` may be `mean`; in an update it receives the new mean too, or is NULL */
    const void *grad;
    float *hessian, *momentum;
    float *second; /* in an update the observed sum, or NULL: it is made from `grad` (and the noise) */
    const Scalars *scalars;
    int32_t mean_dtype, out_dtype, grad_dtype, sign; /* the sign of the noise: 1 or -1 */
} Operation;

/* Same fields, in the same order, as in native.py. */
typedef struct {
    const Operation *operations;
    int64_t count;    /* elements of all operations */
    int64_t next;     /* the first that nobody has taken yet */
    int64_t *clipped; /* by each operation, in an update */
} Work;

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

/* All 1024 normals of a block times the sign; noise.py explains and defines them. */
INLINE void block_normals(Key key, float sign, uint64_t block, float *restrict z)
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
        wide[j] = (float)bits[j] * sign;
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

/* Elements [*first, *first + *count) for the thread that asks, or 0 if none are left. */
INLINE int take(Work *work, int64_t *first, int64_t *count)
{
    *first = __atomic_fetch_add(&work->next, PIECE, __ATOMIC_RELAXED);
    *count = work->count - *first < PIECE ? work->count - *first : PIECE;
    return *count > 0;
}

/* The operation that the next elements belong to: *first is counted from `operation` on, then from the one returned on.
 * Its share of the *count ends at *end, and is taken off. */
INLINE const Operation *next_operation(const Operation *op, int64_t *first, int64_t *count, int64_t *end)
{
    for (; *first >= op->count; op++)
        *first -= op->count;
    *end = *first + *count < op->count ? *first + *count : op->count;
    *count -= *end - *first;
    return op;
}

/* How many of an operation's elements [i, end) follow each other in the whole tensor within one block. Its noise is put into
 * z, unless it is there already, as it is for the next row if rows are short; that of element i is at *inside. */
INLINE int next_part(const Operation *op, int64_t i, int64_t end, float *z, int64_t *in_z, int *inside)
{
    int64_t column = i % op->row, index = op->start + i / op->row * op->stride + column;
    *inside = (int)(index % BLOCK);
    int64_t left = end - i, width = op->row - column, room = BLOCK - *inside;
    if (z && *in_z != index / BLOCK) {
        *in_z = index / BLOCK;
        block_normals(op->key, (float)op->sign, (uint64_t)*in_z, z);
    }
    left = left < width ? left : width;
    return (int)(left < room ? left : room);
}

INLINE float sigma_inverse(float hessian, const Scalars *n)
{
    return n->fixed_root > 0 ? n->fixed_root : sqrtf((hessian + n->weight_decay) * n->ess);
}

/* Hessian, momentum and mean `m` of the elements [first, first + part), from their gradient x. How many were clipped. */
INLINE int32_t update_part(const Operation *op, const Scalars *n, int64_t first, int part, float *restrict m,
                           float *restrict x, const float *restrict z)
{
    float *restrict h = op->hessian + first, *restrict g = op->momentum + first;
    for (int i = 0; i < part; i++)
        g[i] = g[i] * n->beta1 + x[i] * n->grad_weight;
    if (n->estimator != NONE) {
        float *moment = x;
        if (op->second)
            memcpy(moment, op->second + first, (size_t)part * sizeof(float));
        else if (n->estimator == PRICE)
            for (int i = 0; i < part; i++)
                moment[i] = x[i] * z[i];
        else
            for (int i = 0; i < part; i++)
                moment[i] = x[i] * x[i];
        for (int i = 0; i < part; i++) {
            float f = n->estimator == PRICE ? moment[i] * sigma_inverse(h[i], n) * n->estimate_factor
                                            : moment[i] * n->estimate_factor;
            f = f < -n->estimate_bound ? -n->estimate_bound : f;
            f = f > n->estimate_bound ? n->estimate_bound : f;
            float gap = h[i] - f;
            float retraction = gap * gap / (h[i] + n->weight_decay) * n->retraction_weight;
            float updated = h[i] * n->beta2 + f * n->estimate_weight + retraction;
            updated = updated < n->hessian_low ? n->hessian_low : updated;
            h[i] = updated > n->hessian_high ? n->hessian_high : updated;
        }
    }
    int32_t clipped = 0;
    for (int i = 0; i < part; i++) {
        float move = (m[i] * n->weight_decay + g[i] * n->momentum_factor) / (h[i] + n->weight_decay);
        clipped += fabsf(move) > n->clip_radius;
        move = move < -n->clip_radius ? -n->clip_radius : move;
        move = move > n->clip_radius ? n->clip_radius : move;
        m[i] = m[i] - move * n->step_size;
    }
    return clipped;
}

/* Of this interface; native.py asks for the same. */
__attribute__((visibility("default"))) int threepo_native_version(void)
{
    return 6;
}

/* out = mean + sigma z. */
EXPORT void threepo_perturb(Work *work)
{
    float z[BLOCK], m[BLOCK];
    for (int64_t first, count, end; take(work, &first, &count);)
        for (const Operation *op = work->operations; count > 0; op++, first = 0) {
            op = next_operation(op, &first, &count, &end);
            const Scalars n = *op->scalars;
            int64_t in_z = -1;
            for (int inside, part; first < end; first += part) {
                part = next_part(op, first, end, z, &in_z, &inside);
                load(m, op->mean, op->mean_dtype, first, part);
                const float *restrict h = op->hessian + first;
                for (int i = 0; i < part; i++)
                    m[i] = m[i] + n.noise_scale / sigma_inverse(h[i], &n) * z[inside + i];
                store(op->out, op->out_dtype, first, m, part);
            }
        }
}

/* second += z * grad. */
EXPORT void threepo_add_noise_times(Work *work)
{
    float z[BLOCK], x[BLOCK];
    for (int64_t first, count, end; take(work, &first, &count);)
        for (const Operation *op = work->operations; count > 0; op++, first = 0) {
            op = next_operation(op, &first, &count, &end);
            int64_t in_z = -1;
            for (int inside, part; first < end; first += part) {
                part = next_part(op, first, end, z, &in_z, &inside);
                load(x, op->grad, op->grad_dtype, first, part);
                float *restrict total = op->second + first;
                for (int i = 0; i < part; i++)
                    total[i] = total[i] + x[i] * z[inside + i];
            }
        }
}

/* One IVON step. Adds to clipped[j] how many coordinates operation j clipped. */
EXPORT void threepo_update(Work *work)
{
    float z[BLOCK], m[BLOCK], x[BLOCK];
    for (int64_t first, count, end; take(work, &first, &count);)
        for (const Operation *op = work->operations; count > 0; op++, first = 0) {
            op = next_operation(op, &first, &count, &end);
            const Scalars n = *op->scalars;
            float *noise = n.estimator == PRICE && !op->second ? z : NULL;
            int64_t in_z = -1, clipped = 0;
            for (int inside, part; first < end; first += part) {
                part = next_part(op, first, end, noise, &in_z, &inside);
                load(m, op->mean, op->mean_dtype, first, part);
                load(x, op->grad, op->grad_dtype, first, part);
                clipped += update_part(op, &n, first, part, m, x, z + inside);
                store(op->mean, op->mean_dtype, first, m, part);
                if (op->out)
                    store(op->out, op->out_dtype, first, m, part);
            }
            if (clipped)
                __atomic_fetch_add(&work->clipped[op - work->operations], clipped, __ATOMIC_RELAXED);
        }
}

/* Same fields, in the same order, as in native.py. */
typedef struct {
    const void *data;
    int64_t count, next, sum;
    int32_t dtype;
} Bits;

INLINE int32_t scattered(uint32_t bits, uint32_t negative_zero)
{
    bits = bits == negative_zero ? 0 : bits;
    bits ^= (uint32_t)((int32_t)bits >> 16);
    bits *= 0x7FEB352Du;
    bits ^= (uint32_t)((int32_t)bits >> 15);
    bits *= 0x846CA68Bu;
    return (int32_t)(bits ^ (uint32_t)((int32_t)bits >> 16));
}

/* The sum over the bits of all numbers that rollout/bit_sums.py defines. */
EXPORT void threepo_bit_sum(Bits *work)
{
    int64_t first;
    while ((first = __atomic_fetch_add(&work->next, PIECE, __ATOMIC_RELAXED)) < work->count) {
        int64_t end = work->count - first < PIECE ? work->count : first + PIECE, sum = 0;
        if (work->dtype == FLOAT32)
            for (int64_t i = first; i < end; i++)
                sum += scattered(((const uint32_t *)work->data)[i], 0x80000000u);
        else
            for (int64_t i = first; i < end; i++)
                sum += scattered((uint32_t)((const int16_t *)work->data)[i], 0xFFFF8000u);
        __atomic_fetch_add(&work->sum, sum, __ATOMIC_RELAXED);
    }
}
