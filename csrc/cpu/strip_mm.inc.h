// Products of a few rows x with a strip of W that is read where it lies, for the instruction set this file is compiled
// for; after tile_mm.inc.h. The rows of x are packed once as columns of B tiles, sixteen to a column of tiles, so that a
// lane of every result is a row of x.

constexpr int64_t kStrip = 32;  // rows of W

// The next rows of W into the second-level cache, as products take these: many short rows side by side are more streams
// than the processor foresees.
RLHF_INLINE void prefetch_rows([[maybe_unused]] const Element* w, [[maybe_unused]] int64_t stride, int64_t rows) {
#if defined(RLHF_AVX512)
    for (int64_t r = 0; r < rows; ++r) _mm_prefetch(reinterpret_cast<const char*>(w + r * stride), _MM_HINT_T1);
#else
    (void)rows;
#endif
}

#if RLHF_TILE_AMX
// logits [COLUMNS][kStrip][16] of a strip whose rows lie `stride` elements apart; b: [COLUMNS][depth] tiles.
template <int COLUMNS>
static void strip_products(const Element* w, int64_t stride, const Element* b, int64_t depth, float* logits) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t t = 0; t < depth; ++t) {
        prefetch_rows(w + kStrip * stride + t * KT, stride, kStrip);
        _tile_loadd(4, w + t * KT, stride * 2);
        _tile_loadd(5, w + 16 * stride + t * KT, stride * 2);
        _tile_loadd(6, b + t * kTileElements, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (COLUMNS == 2) {
            _tile_loadd(7, b + (depth + t) * kTileElements, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, logits, 64);
    _tile_stored(1, logits + kTileFloats, 64);
    if (COLUMNS == 2) {
        _tile_stored(2, logits + 2 * kTileFloats, 64);
        _tile_stored(3, logits + 3 * kTileFloats, 64);
    }
}
#else
#if defined(RLHF_AVX512)
#define RLHF_EIGHT(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define RLHF_SIXTEEN(DO) RLHF_EIGHT(DO) DO(8) DO(9) DO(10) DO(11) DO(12) DO(13) DO(14) DO(15)
#else
#define RLHF_EIGHT(DO) DO(0)
#define RLHF_SIXTEEN(DO) DO(0)
#endif

#if RLHF_TILE_BF16
typedef __m512bh Operand;
// Two neighbouring elements of W in every lane.
RLHF_INLINE Operand broadcast(const Element* at) {
    int32_t pair;
    std::memcpy(&pair, at, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
}
RLHF_INLINE f32x16 add_product(f32x16 sum, Operand w, Operand x) {
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, w, x);
}
#else
typedef f32x16 Operand;
RLHF_INLINE Operand broadcast(const Element* at) { return splat(*at); }
RLHF_INLINE f32x16 add_product(f32x16 sum, Operand w, Operand x) { return muladd(w, x, sum); }
#endif
constexpr int64_t kLaneDepth = KT / 16;  // elements of the depth per lane

RLHF_INLINE Operand load_operand(const Element* tile, int64_t k) {
    Operand x;
    std::memcpy(&x, tile + k * 16 * kLaneDepth, 64);
    return x;
}

// Where products are rounded before they are added, the sum of each tile by itself makes up for that.
#if defined(RLHF_AVX512)
#define RLHF_TILE_BEGIN(c, r)
#define RLHF_TILE_STEP(c, r) c##r = add_product(c##r, broadcast(at + (r) * stride), x##c);
#define RLHF_TILE_END(c, r)
#else
#define RLHF_TILE_BEGIN(c, r) f32x16 c##part##r = splat(0.0f);
#define RLHF_TILE_STEP(c, r) c##part##r = add_product(c##part##r, broadcast(at + (r) * stride), x##c);
#define RLHF_TILE_END(c, r) c##r += c##part##r;
#endif

// Some rows of W times one column of tiles.
RLHF_INLINE int64_t rows_by_one(const Element* w, int64_t stride, const Element* b, int64_t depth, float* logits) {
#define RLHF_DO(r) f32x16 a##r = splat(0.0f);
    RLHF_SIXTEEN(RLHF_DO)
#undef RLHF_DO
    for (int64_t t = 0; t < depth; ++t) {
        prefetch_rows(w + 16 * stride + t * KT, stride, 16);
#define RLHF_DO(r) RLHF_TILE_BEGIN(a, r)
        RLHF_SIXTEEN(RLHF_DO)
#undef RLHF_DO
        for (int64_t k = 0; k < 16; ++k) {
            const Element* at = w + t * KT + k * kLaneDepth;
            const Operand xa = load_operand(b + t * kTileElements, k);
#define RLHF_DO(r) RLHF_TILE_STEP(a, r)
            RLHF_SIXTEEN(RLHF_DO)
#undef RLHF_DO
        }
#define RLHF_DO(r) RLHF_TILE_END(a, r)
        RLHF_SIXTEEN(RLHF_DO)
#undef RLHF_DO
    }
    int64_t rows = 0;
#define RLHF_DO(r) store16(logits + 16 * rows++, a##r);
    RLHF_SIXTEEN(RLHF_DO)
#undef RLHF_DO
    return rows;
}

// Some rows of W times two columns of tiles.
RLHF_INLINE int64_t rows_by_two(const Element* w, int64_t stride, const Element* b, int64_t depth, float* logits) {
#define RLHF_DO(r) f32x16 a##r = splat(0.0f), c##r = splat(0.0f);
    RLHF_EIGHT(RLHF_DO)
#undef RLHF_DO
    for (int64_t t = 0; t < depth; ++t) {
        prefetch_rows(w + 8 * stride + t * KT, stride, 8);
#define RLHF_DO(r) RLHF_TILE_BEGIN(a, r) RLHF_TILE_BEGIN(c, r)
        RLHF_EIGHT(RLHF_DO)
#undef RLHF_DO
        for (int64_t k = 0; k < 16; ++k) {
            const Element* at = w + t * KT + k * kLaneDepth;
            const Operand xa = load_operand(b + t * kTileElements, k);
            const Operand xc = load_operand(b + (depth + t) * kTileElements, k);
#define RLHF_DO(r) RLHF_TILE_STEP(a, r) RLHF_TILE_STEP(c, r)
            RLHF_EIGHT(RLHF_DO)
#undef RLHF_DO
        }
#define RLHF_DO(r) RLHF_TILE_END(a, r) RLHF_TILE_END(c, r)
        RLHF_EIGHT(RLHF_DO)
#undef RLHF_DO
    }
    int64_t rows = 0;
#define RLHF_DO(r)                                          \
    store16(logits + 16 * rows, a##r);                      \
    store16(logits + kStrip * 16 + 16 * rows++, c##r);
    RLHF_EIGHT(RLHF_DO)
#undef RLHF_DO
    return rows;
}
#undef RLHF_EIGHT
#undef RLHF_SIXTEEN
#undef RLHF_TILE_BEGIN
#undef RLHF_TILE_STEP
#undef RLHF_TILE_END

// logits [COLUMNS][kStrip][16] of a strip whose rows lie `stride` elements apart; b: [COLUMNS][depth] tiles.
template <int COLUMNS>
static void strip_products(const Element* w, int64_t stride, const Element* b, int64_t depth, float* logits) {
    for (int64_t v = 0; v < kStrip;) {
        v += (COLUMNS == 2 ? rows_by_two : rows_by_one)(w + v * stride, stride, b, depth, logits + v * 16);
    }
}
#endif
