/* Attention of one new token per row over that row's own cached keys and values; several query heads may share a key
 * head. It is bound by reading the cache, so each row reads no further than its own length, and heads that share keys
 * are served by one reading. Arithmetic is float32. A row's result does not depend on other rows.
 *
 * Keys lie in blocks of 16 tokens, [T / 16, D, 16], so that the scores of 16 tokens are made side by side without sums
 * across a vector; values lie as they come, [T, D]. Compiled with GCC's vectors, which the compiler splits into
 * the processor's own.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define MOST_TILE 4 /* query heads served by one reading */
#define MOST_WIDTH 256
#define CHUNKS 4 /* vectors of a value that are summed at a time */
#define ROWS 8   /* that a thread takes at a time */
#define INLINE static inline __attribute__((always_inline))

/* One version for each level of x86-64, chosen when the library is loaded (GCC has that since 12); else the basic one. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__)
#define EXPORT __attribute__((visibility("default"), target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define EXPORT __attribute__((visibility("default")))
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

/* Same fields, in the same order, as in decode_attention.py. */
typedef struct {
    int64_t rows, heads, key_heads, key_width, value_width, capacity, window;
    const void *query, *key, *value;
    char *key_cache, *value_cache, *out;
    const int64_t *lengths; /* [rows] tokens of each in the cache before this one */
    const int64_t *slots;   /* [rows] the slot of each row in the cache */
    int64_t next;           /* row to be taken */
    float scale;
    int32_t bfloat16;
    int32_t failed; /* no memory */
} Attention;

INLINE Vector load(const void *from, int64_t at, const int half)
{
    if (half) {
        Halves bits;
        memcpy(&bits, (const uint16_t *)from + at, sizeof bits);
        return (Vector)(__builtin_convertvector(bits, Bits) << 16);
    }
    Vector v;
    memcpy(&v, (const float *)from + at, sizeof v);
    return v;
}

INLINE float load_one(const void *from, int64_t at, const int half)
{
    if (!half)
        return ((const float *)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE void store_one(void *to, int64_t at, float value, const int half)
{
    if (!half) {
        ((float *)to)[at] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    ((uint16_t *)to)[at] = value == value ? (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) : (uint16_t)0x7FC0;
}

/* exp(x) for x <= 0, to 2e-7 of its value; 0 below -87. NaN stays NaN. */
INLINE float exp_negative(float x)
{
    float y = x * 1.44269504f;
    y = y < -126.0f ? -126.0f : y;
    float whole = rintf(y), f = y - whole; /* 2^f by its Taylor series, |f| <= 1/2 */
    float p = 1.5403530e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    int32_t bits = ((int32_t)(whole == whole ? whole : 0.0f) + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

/* Scores of the tokens begin..length of one key head for `tile` query heads; 0 <= begin <= length. */
INLINE void score(const void *query, const void *keys, float *scores, int64_t begin, int64_t length, const Attention *s,
                  const int tile, const int64_t width, const int half)
{
    float q[MOST_TILE][MOST_WIDTH];
    for (int g = 0; g < tile; g++)
        for (int64_t d = 0; d < width; d++)
            q[g][d] = load_one(query, g * width + d, half) * s->scale;
    for (int64_t block = begin / LANES; block <= length / LANES; block++) {
        Vector even[MOST_TILE], odd[MOST_TILE]; /* two sums, or each addition would wait for the one before */
        for (int g = 0; g < tile; g++)
            even[g] = odd[g] = (Vector){0};
        for (int64_t d = 0; d < width; d += 2) {
            Vector first = load(keys, (block * width + d) * LANES, half);
            Vector second = load(keys, (block * width + d + 1) * LANES, half);
            for (int g = 0; g < tile; g++) {
                even[g] += q[g][d] * first;
                odd[g] += q[g][d + 1] * second;
            }
        }
        for (int g = 0; g < tile; g++) {
            Vector sum = even[g] + odd[g];
            memcpy(scores + g * s->capacity + block * LANES, &sum, sizeof sum);
        }
    }
}

/* Scores to weights that sum to 1. */
INLINE void softmax(float *scores, int64_t begin, int64_t length)
{
    float most = -INFINITY, sum = 0.0f;
    for (int64_t t = begin; t <= length; t++)
        most = scores[t] > most ? scores[t] : most;
    _Pragma("omp simd reduction(+ : sum)") for (int64_t t = begin; t <= length; t++)
    {
        scores[t] = exp_negative(scores[t] - most);
        sum += scores[t];
    }
    float share = 1.0f / sum;
    for (int64_t t = begin; t <= length; t++)
        scores[t] *= share;
}

/* Sums of `chunks` vectors of the values, from element d on, weighed by the scores of each query head. */
INLINE void weigh(const void *values, void *out, const float *scores, int64_t begin, int64_t length, const Attention *s,
                  int64_t d, const int chunks, const int tile, const int64_t width, const int half)
{
    Vector sum[MOST_TILE][CHUNKS];
    for (int g = 0; g < tile; g++)
        for (int c = 0; c < chunks; c++)
            sum[g][c] = (Vector){0};
    for (int64_t t = begin; t <= length; t++)
        for (int c = 0; c < chunks; c++) {
            Vector value = load(values, t * width + d + c * LANES, half);
            for (int g = 0; g < tile; g++)
                sum[g][c] += scores[g * s->capacity + t] * value;
        }
    for (int g = 0; g < tile; g++)
        for (int c = 0; c < chunks; c++)
            for (int l = 0; l < LANES; l++)
                store_one(out, g * width + d + c * LANES + l, sum[g][c][l], half);
}

INLINE void heads(const void *query, const void *keys, const void *values, void *out, float *scores, int64_t begin,
                  int64_t length, const Attention *s, const int tile, const int64_t kw, const int64_t vw, const int half)
{
    score(query, keys, scores, begin, length, s, tile, kw, half);
    for (int g = 0; g < tile; g++)
        softmax(scores + g * s->capacity, begin, length);
    int64_t d = 0;
    for (; d + CHUNKS * LANES <= vw; d += CHUNKS * LANES)
        weigh(values, out, scores, begin, length, s, d, CHUNKS, tile, vw, half);
    for (; d < vw; d += LANES)
        weigh(values, out, scores, begin, length, s, d, 1, tile, vw, half);
}

/* One key head of one row, and where its memory is. */
typedef struct {
    int64_t row, head, begin, length;
    char *keys, *values;
} Region;

INLINE Region region_of(int64_t row, int64_t head, const Attention *s, int64_t kw, int64_t vw, int64_t size)
{
    int64_t length = s->lengths[row], at = (s->slots[row] * s->key_heads + head) * s->capacity * size;
    int64_t begin = s->window > 0 && length + 1 > s->window ? length + 1 - s->window : 0;
    return (Region){row, head, begin, length, s->key_cache + at * kw, s->value_cache + at * vw};
}

/* Regions are apart in memory, where the processor's own prefetching starts again each time: load the next one while
 * this one is in use. */
INLINE void fetch(Region p, int64_t kw, int64_t vw, int64_t size)
{
    int64_t first = p.begin / LANES * LANES, last = p.length / LANES * LANES + LANES;
    for (int64_t at = first * kw * size; at < last * kw * size; at += 64)
        __builtin_prefetch(p.keys + at, 0, 2);
    for (int64_t at = p.begin * vw * size; at < (p.length + 1) * vw * size; at += 64)
        __builtin_prefetch(p.values + at, 0, 2);
}

INLINE void keep(Region p, const Attention *s, int64_t kw, int64_t vw, int64_t size)
{
    const char *key = (const char *)s->key + (p.row * s->key_heads + p.head) * kw * size;
    const char *value = (const char *)s->value + (p.row * s->key_heads + p.head) * vw * size;
    char *block = p.keys + (p.length / LANES * kw * LANES + p.length % LANES) * size;
    for (int64_t d = 0; d < kw; d++)
        memcpy(block + d * LANES * size, key + d * size, (size_t)size);
    memcpy(p.values + p.length * vw * size, value, (size_t)(vw * size));
}

INLINE void rows(int64_t first, int64_t count, float *scores, const Attention *s, const int64_t kw, const int64_t vw,
                 const int half)
{
    int64_t group = s->heads / s->key_heads, size = half ? 2 : 4;
    Region next = region_of(first, 0, s, kw, vw, size);
    for (int64_t unit = 0; unit < count * s->key_heads; unit++) {
        Region p = next;
        if (unit + 1 < count * s->key_heads) {
            next = region_of(first + (unit + 1) / s->key_heads, (unit + 1) % s->key_heads, s, kw, vw, size);
            fetch(next, kw, vw, size);
        }
        keep(p, s, kw, vw, size);
        for (int64_t g = 0; g < group;) {
            int64_t head = p.row * s->heads + p.head * group + g;
            const char *query = (const char *)s->query + head * kw * size;
            char *out = s->out + head * vw * size;
            if (group - g >= 4) {
                heads(query, p.keys, p.values, out, scores, p.begin, p.length, s, 4, kw, vw, half);
                g += 4;
            } else if (group - g >= 2) {
                heads(query, p.keys, p.values, out, scores, p.begin, p.length, s, 2, kw, vw, half);
                g += 2;
            } else {
                heads(query, p.keys, p.values, out, scores, p.begin, p.length, s, 1, kw, vw, half);
                g += 1;
            }
        }
    }
}

__attribute__((visibility("default"))) int threepo_decode_attention_version(void)
{
    return 2;
}

/* Take rows until none is left: put their new keys and values into the cache, then attend. Any number of threads may
 * call it with the same work. */
EXPORT void threepo_decode_attention_work(Attention *s)
{
    float *scores = malloc((size_t)(MOST_TILE * s->capacity) * sizeof(float)); /* [MOST_TILE, capacity] */
    if (!scores) {
        __atomic_store_n(&s->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    int common = s->key_width == 64 && s->value_width == 64; /* as a constant, so that loops are unrolled */
    for (int64_t first; (first = __atomic_fetch_add(&s->next, ROWS, __ATOMIC_RELAXED)) < s->rows;) {
        int64_t count = s->rows - first < ROWS ? s->rows - first : ROWS;
        if (s->bfloat16 && common)
            rows(first, count, scores, s, 64, 64, 1);
        else if (s->bfloat16)
            rows(first, count, scores, s, s->key_width, s->value_width, 1);
        else if (common)
            rows(first, count, scores, s, 64, 64, 0);
        else
            rows(first, count, scores, s, s->key_width, s->value_width, 0);
    }
    free(scores);
}
