/* The kernels of stacked_linear.c for one level of processor; included once for each, with
 *   KERNEL(name)  the name of a function or type at this level,
 *   REGISTER      floats that a vector register holds,
 *   TILE, PANELS  rows and panels whose sums fill the vector registers,
 *   PAIRS         the processor multiplies pairs of bfloat16 numbers itself.
 */

typedef float KERNEL(Floats) __attribute__((vector_size(4 * REGISTER)));
typedef uint32_t KERNEL(Words) __attribute__((vector_size(4 * REGISTER)));

/* Sums with one word of a row times words of a panel added. */
INLINE KERNEL(Floats) KERNEL(multiply)(KERNEL(Floats) sum, const char *x, KERNEL(Words) w, const int half)
{
    uint32_t word;
    memcpy(&word, x, WORD);
#ifdef PAIRS
    if (half)
        return (KERNEL(Floats))_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)word), (__m512bh)w);
#else
    if (half) {
        sum += from_bfloat16((uint16_t)word) * (KERNEL(Floats))(w << 16);
        return sum + from_bfloat16((uint16_t)(word >> 16)) * (KERNEL(Floats))(w & 0xFFFF0000u);
    }
#endif
    float value;
    memcpy(&value, &word, sizeof value);
    return sum + value * (KERNEL(Floats))w;
}

/* `tile` rows, of which `rows` exist, with `panels` panels from number `panel` of this draw on. `ahead`: prefetch
 * the panels after them. */
INLINE void KERNEL(block)(const Product *p, const char *x, const char *weights, int64_t row, int64_t rows,
                          int64_t draw, int64_t panel, int64_t words, int ahead, const int tile, const int panels,
                          const int half)
{
    enum { PARTS = LANES / REGISTER };
    KERNEL(Floats) sum[TILE][PANELS * PARTS];
    float values[LANES];
    for (int c = 0; c < panels; c++) {
        int64_t first = (panel + c) * LANES;
        load_outputs(p->bias, draw * p->out + first, p->bias ? p->out - first : 0, values, half);
        for (int m = 0; m < tile; m++)
            for (int part = 0; part < PARTS; part++)
                memcpy(&sum[m][c * PARTS + part], values + part * REGISTER, sizeof **sum);
    }
    const char *w = weights + panel * words * CHUNK;
    for (int64_t k = 0; k < words; k += LANES, x += tile * CHUNK, w += LANES * CHUNK)
        for (int j = 0; j < LANES; j++) {
            KERNEL(Words) some[PANELS * PARTS];
            for (int c = 0; c < panels * PARTS; c++) {
                const char *from = w + (c / PARTS * words + j) * CHUNK;
                memcpy(&some[c], from + c % PARTS * sizeof *some, sizeof *some);
                if (ahead && c % PARTS == 0)
                    __builtin_prefetch(from + panels * words * CHUNK, 0, 2);
            }
            for (int m = 0; m < tile; m++)
                for (int c = 0; c < panels * PARTS; c++)
                    sum[m][c] = KERNEL(multiply)(sum[m][c], x + m * CHUNK + j * WORD, some[c], half);
        }
    for (int m = 0; m < tile && m < rows; m++)
        for (int c = 0; c < panels; c++) {
            int64_t first = (panel + c) * LANES, at = (row + m) * p->out + first;
            for (int part = 0; part < PARTS; part++)
                memcpy(values + part * REGISTER, &sum[m][c * PARTS + part], sizeof **sum);
            store_outputs(p->y, at, p->out - first < LANES ? p->out - first : LANES, values, half);
        }
}

INLINE int64_t KERNEL(tile_for)(int64_t rows)
{
    int64_t least = rows > 8 ? 12 : rows > 4 ? 8 : rows > 2 ? 4 : rows;
    return least < TILE ? least : TILE;
}

INLINE void KERNEL(item)(const Product *p, Item item, char *gathered, int64_t words, const int half)
{
    const char *rows = p->x + item.first_row * words * WORD;
    int64_t done = 0;
    for (char *to = gathered; done < item.rows;) {
        int64_t tile = KERNEL(tile_for)(item.rows - done);
        gather_rows(rows + done * words * WORD, words * WORD, item.rows - done, tile, to);
        done += tile;
        to += tile * words * WORD;
    }
    const char *weights = p->weights + item.draw * up(p->out, LANES) * words * CHUNK;
    int64_t end = item.first_panel + item.panels;
    for (int64_t panel = item.first_panel; panel < end; panel += PANELS) {
        const char *from = gathered;
        for (int64_t r = 0; r < item.rows;) {
            int64_t left = item.rows - r, row = item.first_row + r, tile = KERNEL(tile_for)(left);
#define BLOCK(tile, panels) \
    KERNEL(block)(p, from, weights, row, left, item.draw, panel, words, r == 0, tile, panels, half)
#define BLOCKS(tile)                    \
    do {                                \
        if (end - panel >= PANELS)      \
            BLOCK(tile, PANELS);        \
        else                            \
            BLOCK(tile, 1);             \
    } while (0)
            switch (tile) {
            case TILE:
                BLOCKS(TILE);
                break;
#if TILE > 8
            case 8:
                BLOCKS(8);
                break;
#endif
#if TILE > 4
            case 4:
                BLOCKS(4);
                break;
#endif
#if TILE > 2
            case 2:
                BLOCKS(2);
                break;
#endif
            default:
                BLOCKS(1);
            }
#undef BLOCKS
#undef BLOCK
            r += tile;
            from += tile * words * WORD;
        }
    }
}

static void KERNEL(work)(Product *p)
{
    int64_t words = p->in * (p->bfloat16 ? 2 : 4) / WORD;
    Cut cut = cut_of(p, TILE, words);
    char *gathered = scratch(cut.rows * words * WORD); /* whole tiles */
    if (!gathered) {
        __atomic_store_n(&p->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (Item item; item_of(p, cut, &item);) {
        if (p->bfloat16)
            KERNEL(item)(p, item, gathered, words, 1);
        else
            KERNEL(item)(p, item, gathered, words, 0);
    }
}

#undef KERNEL
#undef REGISTER
#undef TILE
#undef PANELS
#undef PAIRS
