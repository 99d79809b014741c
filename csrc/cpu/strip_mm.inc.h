// Products of a few rows x with a strip of W that is read where it lies, for the instruction set this file is compiled
// for; after tile_mm.inc.h. The rows of x are packed once as columns of B tiles, sixteen to a column of tiles, so that a
// lane of every result is a row of x. (In dx and dW of linear_body.inc.h other matrices take the places of x and W.)

constexpr int64_t kStrip = kStripRows;

// Tiles of the depth that are summed by themselves before they are added to the others: one sum of thousands of products
// would lose more to rounding than a library's. Whoever takes the depth in pieces takes a multiple, for the same bits.
#if RLHF_TILE_AMX
constexpr int64_t kSumTiles = 1;  // tile registers go on with their sums, whatever the pieces
#else
constexpr int64_t kSumTiles = kSumsPerTile ? 1 : 16;
#endif

// The next rows of W into the second-level cache, as products take these: many short rows side by side are more streams
// than the processor foresees.
template <typename Weight>
RLHF_INLINE void prefetch_rows([[maybe_unused]] const Weight* w, [[maybe_unused]] int64_t stride,
                               [[maybe_unused]] int64_t rows) {
#if defined(RLHF_AVX512) || defined(RLHF_AVX2)
    for (int64_t r = 0; r < rows; ++r) _mm_prefetch(reinterpret_cast<const char*>(w + r * stride), _MM_HINT_T1);
#endif
}

// strip_products: logits [COLUMNS][kStrip][16] (+)= a strip of W whose rows lie `stride` elements apart, times COLUMNS
// columns of `depth` tiles, b_stride elements apart. Rows from `rows` on, which must be there, may be left out.

#if RLHF_TILE_AMX
template <int COLUMNS, typename Weight>
static void strip_products(const Weight* w, int64_t stride, int64_t rows, const Element* b, int64_t b_stride,
                           int64_t depth, float* logits, bool accumulate) {
    (void)rows;  // all of them cost what one does
    memory_is_read();
    if (accumulate) {
        _tile_loadd(0, logits, 64);
        _tile_loadd(1, logits + kTileFloats, 64);
        if (COLUMNS == 2) {
            _tile_loadd(2, logits + 2 * kTileFloats, 64);
            _tile_loadd(3, logits + 3 * kTileFloats, 64);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t t = 0; t < depth; ++t) {
        prefetch_rows(w + kStrip * stride + t * KT, stride, kStrip);
        _tile_loadd(4, w + t * KT, stride * 2);
        _tile_loadd(5, w + 16 * stride + t * KT, stride * 2);
        _tile_loadd(6, b + t * kTileElements, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (COLUMNS == 2) {
            _tile_loadd(7, b + b_stride + t * kTileElements, 64);
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
// Rows of W that are summed together, by the columns of tiles they meet; 0: one column at a time, where sums of two with
// their operands would not fit into the registers.
#if defined(RLHF_AVX512)
constexpr int kRowsAtOnce[3] = {0, 16, 8};
#elif defined(RLHF_AVX2)
constexpr int kRowsAtOnce[3] = {0, 6, 0};
#elif defined(RLHF_NEON)
constexpr int kRowsAtOnce[3] = {0, 5, 2};
#else
constexpr int kRowsAtOnce[3] = {0, 2, 1};
#endif

// The 32 bits at p in every lane, loaded where this stands. Left to itself gcc shifts and masks pairs of bf16 in general
// registers, moves each half to a vector, and keeps more of them than there are registers.
RLHF_INLINE u32v spread(const void* p) {
    u32v x;
#if defined(RLHF_AVX512) || defined(RLHF_AVX2)
    typedef uint32_t Word __attribute__((may_alias, aligned(2)));
    asm volatile("vpbroadcastd %1, %0" : "=v"(x) : "m"(*static_cast<const Word*>(p)));
#else
    uint32_t word;
    std::memcpy(&word, p, sizeof word);
    x = u32v{} + word;
#endif
    return x;
}

// In every lane: Operand number k of those at w, or bf16 number k as a float.
template <typename Weight>
RLHF_INLINE Operand weight_operand(const Weight* w, int k) {
    if constexpr (sizeof(Weight) == sizeof(Element)) {
        return broadcast(reinterpret_cast<const Element*>(w) + k * kStepElements);
    } else {
        return (Operand)(k % 2 ? spread(w + k - 1) & 0xffff0000u : spread(w + k) << 16);
    }
}

// ROWS rows of W times COLUMNS columns of tiles. Elements of W are broadcast where they lie; bf16 ones become floats on
// the way where the set has no product of bf16.
template <int ROWS, int COLUMNS, typename Weight>
RLHF_INLINE void strip_rows(const Weight* w, int64_t stride, const Element* b, int64_t b_stride, int64_t depth,
                            float* logits, bool accumulate) {
    constexpr int kAcross = COLUMNS * kVectors;
    const auto at = [logits](int r, int j) __attribute__((always_inline)) {
        return logits + j / kVectors * kStrip * 16 + r * 16 + j % kVectors * kLanes;
    };
    for (int64_t from = 0; from == 0 || from < depth; from += kSumTiles) {  // without depth the sums are zeros
        f32v sums[ROWS][kAcross] = {};
        for (int64_t t = from; t < depth && t < from + kSumTiles; ++t) {
            const Weight* row = w + t * KT;
            if (KT * sizeof(Weight) == 64 || t % 2 == 0) prefetch_rows(row + ROWS * stride, stride, ROWS);
#pragma GCC unroll 2
            for (int k = 0; k < 16; ++k) {
                Operand x[kAcross];
#pragma GCC unroll 8
                for (int j = 0; j < kAcross; ++j) {
                    const Element* tile = b + j / kVectors * b_stride + t * kTileElements;
                    x[j] = load_operand(tile + (k * kVectors + j % kVectors) * kVectorElements);
                }
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r) {
                    const Operand y = weight_operand(row + r * stride, k);
#pragma GCC unroll 8
                    for (int j = 0; j < kAcross; ++j) sums[r][j] = add_product(y, x[j], sums[r][j]);
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
            for (int j = 0; j < kAcross; ++j) {
                storev(at(r, j), accumulate || from > 0 ? loadv(at(r, j)) + sums[r][j] : sums[r][j]);
            }
        }
    }
}

template <int COLUMNS, typename Weight>
static void strip_products(const Weight* w, int64_t stride, int64_t rows, const Element* b, int64_t b_stride,
                           int64_t depth, float* logits, bool accumulate) {
    constexpr int kRows = kRowsAtOnce[COLUMNS], kRest = kRows == 0 ? 0 : kStrip % (kRows + !kRows);
    if constexpr (kRows == 0) {
        strip_products<1>(w, stride, rows, b, b_stride, depth, logits, accumulate);
        strip_products<1>(w, stride, rows, b + b_stride, b_stride, depth, logits + kStrip * 16, accumulate);
    } else {
        int64_t v = 0;
        for (; v < rows && v + kRows <= kStrip; v += kRows) {
            strip_rows<kRows, COLUMNS>(w + v * stride, stride, b, b_stride, depth, logits + v * 16, accumulate);
        }
        if constexpr (kRest > 0) {
            if (v >= rows) return;
            strip_rows<kRest, COLUMNS>(w + v * stride, stride, b, b_stride, depth, logits + v * 16, accumulate);
        }
    }
}
#endif
