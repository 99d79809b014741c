// Products of packed tiles, for the instruction set this file is compiled for.
//
// A tile is 1 KiB. With E the operand type (bf16 or fp32) and KT = 64 bytes / sizeof(E) its depth in k:
//     A tile: [16 rows][KT k]               a row is 64 contiguous bytes
//     B tile: [16][16 columns][4 bytes]     fp32: [k][column]; bf16: [k / 2][column][k % 2]
//     C tile: [16 rows][16 columns] fp32
// Tiles of one row (A) or one column (B) of tiles follow each other along k.

// Macros chosen by the including file: RLHF_TILE_BF16 (operands are bf16), RLHF_TILE_AMX (tile registers).

#if RLHF_TILE_BF16
typedef uint16_t Element;
constexpr int64_t KT = 32;
#else
typedef float Element;
constexpr int64_t KT = 16;
#endif
constexpr int64_t kTileElements = 1024 / sizeof(Element);
constexpr int64_t kTileFloats = 256;

RLHF_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
RLHF_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

#if RLHF_TILE_AMX
struct alignas(64) TileConfig {
    uint8_t palette, start_row;
    uint8_t reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
};

// All eight tile registers 16 rows of 64 bytes; what the thread had configured before comes back at the end.
struct TileScope {
    TileConfig before;
    TileScope() {
        _tile_storeconfig(&before);
        TileConfig config;
        std::memset(&config, 0, sizeof config);
        config.palette = 1;
        for (int i = 0; i < 8; ++i) {
            config.bytes_per_row[i] = 64;
            config.rows[i] = 16;
        }
        _tile_loadconfig(&config);
    }
    ~TileScope() {
        if (before.palette == 0) {
            _tile_release();
        } else {
            _tile_loadconfig(&before);
        }
    }
};
#else
struct TileScope {
    TileScope() {}
    ~TileScope() {}
};
#endif

// c [2][2] tiles (+)= a [2] rows of tiles times b [2] columns of tiles, over `depth` tiles of k.
#if RLHF_TILE_AMX
[[maybe_unused]] static void multiply_2x2(const Element* a0, const Element* a1, const Element* b0, const Element* b1, int64_t depth,
                                          float* c, bool accumulate) {
    if (accumulate) {
        _tile_loadd(0, c, 64);
        _tile_loadd(1, c + 1 * kTileFloats, 64);
        _tile_loadd(2, c + 2 * kTileFloats, 64);
        _tile_loadd(3, c + 3 * kTileFloats, 64);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t t = 0; t < depth; ++t) {
        _tile_loadd(4, a0 + t * kTileElements, 64);
        _tile_loadd(6, b0 + t * kTileElements, 64);
        _tile_loadd(7, b1 + t * kTileElements, 64);
        _tile_loadd(5, a1 + t * kTileElements, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, 64);
    _tile_stored(1, c + 1 * kTileFloats, 64);
    _tile_stored(2, c + 2 * kTileFloats, 64);
    _tile_stored(3, c + 3 * kTileFloats, 64);
}
#else
// Some rows of one row of tiles times two columns of tiles, one accumulator per row and column. The rows are written
// out: left to itself the compiler makes them the outer loop, and then nothing hides the latency of an addition.
#if defined(RLHF_AVX512)
#define RLHF_ROWS(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
constexpr int kRows = 8;
#else
#define RLHF_ROWS(DO) DO(0)
constexpr int kRows = 1;
#endif

RLHF_INLINE void multiply_rows(const Element* a, const Element* b0, const Element* b1, int64_t depth, float* c,
                               bool accumulate) {
#define RLHF_BEGIN(r)                                                   \
    f32x16 left##r = accumulate ? load16(c + (r)*16) : splat(0.0f);     \
    f32x16 right##r = accumulate ? load16(c + kTileFloats + (r)*16) : splat(0.0f);
    RLHF_ROWS(RLHF_BEGIN)
    for (int64_t t = 0; t < depth; ++t) {
        const Element* at = a + t * kTileElements;
#if RLHF_TILE_BF16
        for (int k = 0; k < 16; ++k) {
            __m512bh x, y;
            std::memcpy(&x, b0 + t * kTileElements + k * 32, 64);
            std::memcpy(&y, b1 + t * kTileElements + k * 32, 64);
#define RLHF_STEP(r)                                                               \
    {                                                                              \
        int32_t pair;                                                              \
        std::memcpy(&pair, at + (r)*KT + 2 * k, 4);                                \
        const __m512bh w = (__m512bh)_mm512_set1_epi32(pair);                      \
        left##r = (f32x16)_mm512_dpbf16_ps((__m512)left##r, w, x);                 \
        right##r = (f32x16)_mm512_dpbf16_ps((__m512)right##r, w, y);               \
    }
            RLHF_ROWS(RLHF_STEP)
        }
#else
#if defined(RLHF_AVX512)
        for (int k = 0; k < 16; ++k) {
            const f32x16 x = load16(b0 + t * kTileElements + k * 16);
            const f32x16 y = load16(b1 + t * kTileElements + k * 16);
#define RLHF_STEP(r)                                          \
    {                                                         \
        const f32x16 w = splat(at[(r)*KT + k]);               \
        left##r = muladd(w, x, left##r);                      \
        right##r = muladd(w, y, right##r);                    \
    }
            RLHF_ROWS(RLHF_STEP)
        }
#else
        // Products are rounded here before they are added; summing each tile by itself makes up for that
        f32x16 left = splat(0.0f), right = splat(0.0f);
        for (int k = 0; k < 16; ++k) {
            const f32x16 w = splat(at[k]);
            left += w * load16(b0 + t * kTileElements + k * 16);
            right += w * load16(b1 + t * kTileElements + k * 16);
        }
        left0 += left;
        right0 += right;
#endif
#endif
    }
#define RLHF_END(r)                 \
    store16(c + (r)*16, left##r);   \
    store16(c + kTileFloats + (r)*16, right##r);
    RLHF_ROWS(RLHF_END)
#undef RLHF_BEGIN
#undef RLHF_STEP
#undef RLHF_END
#undef RLHF_ROWS
}

[[maybe_unused]] static void multiply_2x2(const Element* a0, const Element* a1, const Element* b0, const Element* b1, int64_t depth,
                                          float* c, bool accumulate) {
    for (int row = 0; row < 16; row += kRows) {
        multiply_rows(a0 + row * KT, b0, b1, depth, c + row * 16, accumulate);
    }
    for (int row = 0; row < 16; row += kRows) {
        multiply_rows(a1 + row * KT, b0, b1, depth, c + 2 * kTileFloats + row * 16, accumulate);
    }
}
#endif

// Two vectors of fp32 as one of 32-bit pairs of bf16, `even` in the low half.
RLHF_INLINE u32x16 pair_bf16(f32x16 even, f32x16 odd) {
    return __builtin_convertvector(to_bf16(even), u32x16) | (__builtin_convertvector(to_bf16(odd), u32x16) << 16);
}
