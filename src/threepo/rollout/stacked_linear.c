/* Products of rows with the weights of several policies: y[r] = W[n] x[r] + b[n], n the policy of row r.
 *
 * Each row of a policy meets only that policy's weights, so a product has few rows and many weights, and what a general
 * library does at each product, bringing the weights into the order its kernels read, costs as much as the product.
 * Here weights lie in that order from the time they are loaded: panels of 16 outputs, [out / 16, K, 16] words of 32
 * bits, where a word is one float32 or two consecutive bfloat16 inputs of one output, and K is the words of a row.
 *
 * A sum runs over the inputs in their order: the result of a row, to the last bit, does not depend on how many rows or
 * policies there are, on its position among them, or on the number of threads.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KERNELS 1 /* for several levels of processors, chosen at run time; elsewhere torch does the products */
/* All levels use what follows, so it must be for the lowest one, with any -march. */
#pragma GCC push_options
#pragma GCC target("arch=x86-64")
#include <cpuid.h>
#include <immintrin.h>
#endif

#define LANES 16
#define WORD 4
#define CHUNK (LANES * WORD) /* bytes */
#define MOST_ROWS 192        /* of one policy that are worked on together */
#define MOST_BYTES (1 << 18) /* that they may take, to stay in a core's cache */
#define INLINE static inline __attribute__((always_inline))

/* Same fields, in the same order, as in stacked_linear.py. */
typedef struct {
    int64_t draws, in, out; /* a row of `in` numbers is whole chunks, one at least; `out` is at least 1 */
    const int64_t *starts;  /* [draws + 1]: rows starts[n] to starts[n + 1] are those of draw n */
    const char *x;          /* [rows, in] */
    const char *weights;    /* draws times panels [ceil(out / 16), K, 16] */
    const char *bias;       /* [draws, out] or NULL */
    char *y;                /* [rows, out] */
    int64_t next;           /* item of work to be taken */
    int32_t bfloat16;
    int32_t level;   /* of the processor, from threepo_stacked_linear_level */
    int32_t threads; /* that will share the work */
    int32_t failed;  /* no memory */
} Product;

INLINE float from_bfloat16(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint16_t to_bfloat16(float value) /* the nearest, of two the even one */
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value == value ? (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) : 0x7FC0;
}

/* Up to 16 outputs, from element `at` on. */
INLINE void load_outputs(const char *from, int64_t at, int64_t count, float *values, const int half)
{
    for (int i = 0; i < LANES; i++)
        values[i] = i >= count ? 0.0f
                    : half     ? from_bfloat16(((const uint16_t *)from)[at + i])
                               : ((const float *)from)[at + i];
}

INLINE void store_outputs(char *to, int64_t at, int64_t count, const float *values, const int half)
{
    if (half)
        for (int i = 0; i < count; i++)
            ((uint16_t *)to)[at + i] = to_bfloat16(values[i]);
    else
        memcpy((float *)to + at, values, (size_t)count * sizeof(float));
}

/* An item of work: some rows of one draw, and some of its panels. */
typedef struct {
    int64_t draw, first_row, rows, first_panel, panels;
} Item;

/* How much of the rows and panels an item has: rows stay in the cache, and every thread finds items. */
typedef struct {
    int64_t rows, panels, panel_pieces;
} Cut;

INLINE int64_t up(int64_t n, int64_t unit)
{
    return (n + unit - 1) / unit;
}

static Cut cut_of(const Product *p, int64_t tile, int64_t words)
{
    int64_t most = MOST_BYTES / (words * WORD) / tile * tile, longest = 0, pieces = 0;
    most = most < tile ? tile : most > MOST_ROWS ? MOST_ROWS / tile * tile : most;
    for (int64_t n = 0; n < p->draws; n++) {
        int64_t rows = p->starts[n + 1] - p->starts[n];
        longest = rows > longest ? rows : longest;
        pieces += up(rows, most);
    }
    int64_t rows = longest > most ? up(up(longest, up(longest, most)), tile) * tile : most; /* no small last piece */
    int64_t panels = up(p->out, LANES), wanted = p->threads > 1 ? 4 * p->threads : 1;
    int64_t least = 4; /* panels: below, copying rows costs too much */
    int64_t each = up(panels, up(wanted, pieces > 0 ? pieces : 1));
    each = up(each < least ? least : each, 2) * 2; /* they are worked on in pairs */
    return (Cut){rows, each, up(panels, each)};
}

static int item_of(Product *p, Cut c, Item *item)
{
    int64_t i = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED), panels = up(p->out, LANES);
    int64_t panel = i % c.panel_pieces * c.panels, piece = i / c.panel_pieces;
    for (int64_t n = 0; n < p->draws; n++) {
        int64_t rows = p->starts[n + 1] - p->starts[n], pieces = up(rows, c.rows), first = piece * c.rows;
        if (piece < pieces) {
            *item = (Item){n, p->starts[n] + first, rows - first < c.rows ? rows - first : c.rows,
                           panel, panels - panel < c.panels ? panels - panel : c.panels};
            return 1;
        }
        piece -= pieces;
    }
    return 0;
}

static pthread_key_t of_each_thread;
static int at_its_end; /* whether a thread's memory can be freed when it ends */

static void have_it_freed(void)
{
    at_its_end = pthread_key_create(&of_each_thread, free) == 0;
}

/* Memory for the rows of an item or for a panel, kept by each thread as long as it lives: asking anew costs more than
 * small products. */
static char *scratch(int64_t bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    static __thread char *memory;
    static __thread int64_t size;
    if (size < bytes) {
        free(memory);
        size = bytes;
        if (posix_memalign((void **)&memory, CHUNK, (size_t)bytes)) {
            memory = NULL;
            size = 0;
        }
        pthread_once(&once, have_it_freed);
        if (at_its_end)
            pthread_setspecific(of_each_thread, memory);
    }
    return memory;
}

/* Rows into the order that kernels read: [K / 16, tile, 16] words; rows that do not exist are zero. */
INLINE void gather_rows(const char *x, int64_t stride, int64_t rows, int64_t tile, char *to)
{
    for (int64_t m = 0; m < tile; m++)
        for (int64_t k = 0; k < stride / CHUNK; k++) {
            char *at = to + (k * tile + m) * CHUNK;
            if (m < rows)
                memcpy(at, x + m * stride + k * CHUNK, CHUNK);
            else
                memset(at, 0, CHUNK);
        }
}

/* Weights [panels * 16, K] words, to be brought into the order that kernels read, where they are.
 * Same fields, in the same order, as in stacked_linear.py. */
typedef struct {
    uint32_t *weights;
    int64_t words, panels;
    int64_t next; /* panel to be taken */
    int32_t failed;
} Packing;

#if KERNELS
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define KERNEL(name) v3_##name
#define REGISTER 8
#define TILE 6
#define PANELS 1
#include "stacked_linear_kernel.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#define KERNEL(name) v4_##name
#define REGISTER 16
#define TILE 12
#define PANELS 2
#include "stacked_linear_kernel.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512bf16,prefer-vector-width=512")
#define KERNEL(name) v4_pairs_##name
#define REGISTER 16
#define TILE 12
#define PANELS 2
#define PAIRS 1
#include "stacked_linear_kernel.h"
#pragma GCC pop_options
#endif

enum { NONE, V3, V4, V4_PAIRS };

__attribute__((visibility("default"))) int threepo_stacked_linear_version(void)
{
    return 2;
}

/* The kernels for this processor; NONE where torch is faster, or nothing is known. */
__attribute__((visibility("default"))) int threepo_stacked_linear_level(int bfloat16)
{
#if KERNELS
    unsigned a, b, c, d;
    int matrix_units = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1); /* AMX, for bfloat16 */
    int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
             __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt") &&
             __builtin_cpu_supports("movbe");
    int v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    if (bfloat16 && matrix_units)
        return NONE;
    if (v4)
        return bfloat16 && __builtin_cpu_supports("avx512bf16") ? V4_PAIRS : V4;
    if (v3)
        return V3;
#else
    (void)bfloat16;
#endif
    return NONE;
}

/* Take items of work until none is left; any number of threads may call it with the same product. */
__attribute__((visibility("default"))) void threepo_stacked_linear_work(Product *p)
{
#if KERNELS
    if (p->level == V4_PAIRS)
        v4_pairs_work(p);
    else if (p->level == V4)
        v4_work(p);
    else if (p->level == V3)
        v3_work(p);
#else
    (void)p;
#endif
}

/* Pack panels until none is left; any number of threads may call it with the same weights. */
__attribute__((visibility("default"))) void threepo_stacked_linear_pack(Packing *p)
{
    int64_t stride = p->words + LANES; /* at a distance of a power of two, outputs would share sets of the cache */
    uint32_t *copy = (uint32_t *)scratch(stride * LANES * WORD);
    if (!copy) {
        __atomic_store_n(&p->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t i; (i = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < p->panels;) {
        uint32_t *panel = p->weights + i * p->words * LANES;
        for (int lane = 0; lane < LANES; lane++)
            memcpy(copy + lane * stride, panel + lane * p->words, (size_t)p->words * WORD);
        for (int64_t k = 0; k < p->words; k++)
            for (int lane = 0; lane < LANES; lane++)
                panel[k * LANES + lane] = copy[lane * stride + k];
    }
}
