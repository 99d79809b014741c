// Products of packed tiles, for the instruction set this file is compiled for.
//
// A tile is 1 KiB. With E the operand type (bf16 or fp32) and KT = 64 bytes / sizeof(E) its depth in k:
//     A tile: [16 rows][KT k]               a row is 64 contiguous bytes
//     B tile: [16][16 columns][4 bytes]     fp32: [k][column]; bf16: [k / 2][column][k % 2]
//     C tile: [16 rows][16 columns] fp32
// Tiles of one row (A) or one column (B) of tiles follow each other along k.

// Macros chosen by the including file: RLHF_TILE_BF16 (operands are bf16), RLHF_TILE_AMX (tile registers), and
// RLHF_STORED_BF16 (weights and results are bf16, whatever the operands are).

#if RLHF_TILE_BF16
typedef uint16_t Element;
constexpr int64_t KT = 32;
#else
typedef float Element;
constexpr int64_t KT = 16;
#endif
#if RLHF_STORED_BF16
typedef uint16_t Stored;
#else
typedef float Stored;
#endif
constexpr int64_t kTileElements = 1024 / sizeof(Element);
constexpr int64_t kTileFloats = 256;

RLHF_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
RLHF_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Scratch memory of one call. Nothing of the standard library's containers: what of them is compiled here, for this
// instruction set, the linker may put elsewhere.
struct Memory {
    static constexpr int kMost = 32;
    void* blocks[kMost];
    int count = 0;
    template <typename T>
    T* take(int64_t elements) {
        if (count == kMost) throw std::bad_alloc();
        const size_t bytes = round_up(elements * static_cast<int64_t>(sizeof(T)) + 64, 64);
        blocks[count] = std::aligned_alloc(64, bytes);
        if (blocks[count] == nullptr) throw std::bad_alloc();
        return static_cast<T*>(blocks[count++]);
    }
    ~Memory() {
        for (int i = 0; i < count; ++i) std::free(blocks[i]);
    }
};

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
        memory_is_read();
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
    memory_is_read();
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
#if RLHF_TILE_BF16
// A vector of pairs along k.
typedef u32v Operand;
RLHF_INLINE Operand load_operand(const Element* at) {
    Operand x;
    std::memcpy(&x, at, sizeof x);
    return x;
}
RLHF_INLINE Operand broadcast(const Element* at) {
    uint32_t pair;
    std::memcpy(&pair, at, sizeof pair);
    return Operand{} + pair;
}
RLHF_INLINE f32v add_product(Operand w, Operand x, f32v sum) {
#if defined(RLHF_NEON_BF16)
    asm("bfdot %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(w), "w"(x));  // older clang has no vbfdotq_f32 here
    return sum;
#else
    return (f32v)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
#endif
}
#else
typedef f32v Operand;
RLHF_INLINE Operand load_operand(const Element* at) { return loadv(at); }
RLHF_INLINE Operand broadcast(const Element* at) { return splatv(*at); }
RLHF_INLINE f32v add_product(Operand w, Operand x, f32v sum) { return muladdv(w, x, sum); }
#endif
constexpr int64_t kStepElements = 4 / sizeof(Element);  // of the depth that one step takes
constexpr int64_t kVectorElements = kLanes * kStepElements;

// Register tiles: rows and vectors of 16 columns (or 32: two tiles side by side) that are summed together. Many
// sums hide the latency of an addition; with their operands they fill the registers but do not spill.
#if defined(RLHF_AVX512)
constexpr int kTileRows = 8, kTileSides = 2;  // 16 of 32 registers
#elif defined(RLHF_AVX2)
constexpr int kTileRows = 6, kTileSides = 1;  // 12 of 16
#elif defined(RLHF_NEON)
constexpr int kTileRows = 5, kTileSides = 1;  // 20 of 32
#else
constexpr int kTileRows = 2, kTileSides = 1;  // 8 of 16
#endif

// Where products are rounded before they are added, the sum of each tile by itself makes up for that.
#if defined(RLHF_AVX512) || defined(RLHF_AVX2) || defined(RLHF_NEON)
constexpr bool kSumsPerTile = false;
#else
constexpr bool kSumsPerTile = true;
#endif

// ROWS rows of a row of tiles times kTileSides columns of tiles. The loops over registers are unrolled, or the compiler
// makes rows the outer loop and nothing hides the latency of an addition.
template <int ROWS>
RLHF_INLINE void multiply_rows(const Element* a, const Element* b0, const Element* b1, int64_t depth, float* c,
                               bool accumulate) {
    constexpr int kAcross = kTileSides * kVectors;
    const auto at = [c](int r, int j) __attribute__((always_inline)) {
        return c + j / kVectors * kTileFloats + r * 16 + j % kVectors * kLanes;
    };
    f32v sums[ROWS][kAcross];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < kAcross; ++j) sums[r][j] = accumulate && !kSumsPerTile ? loadv(at(r, j)) : splatv(0.0f);
    }
    for (int64_t t = 0; t < depth; ++t) {
        const Element *left = a + t * kTileElements, *right[2] = {b0 + t * kTileElements, b1 + t * kTileElements};
#pragma GCC unroll 4
        for (int k = 0; k < 16; ++k) {
            Operand x[kAcross];
#pragma GCC unroll 8
            for (int j = 0; j < kAcross; ++j) {
                x[j] = load_operand(right[j / kVectors] + (k * kVectors + j % kVectors) * kVectorElements);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const Operand w = broadcast(left + r * KT + k * kStepElements);
#pragma GCC unroll 8
                for (int j = 0; j < kAcross; ++j) sums[r][j] = add_product(w, x[j], sums[r][j]);
            }
        }
        if (!kSumsPerTile) continue;
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
            for (int j = 0; j < kAcross; ++j) {
                storev(at(r, j), accumulate || t > 0 ? loadv(at(r, j)) + sums[r][j] : sums[r][j]);
                sums[r][j] = splatv(0.0f);
            }
        }
    }
    if (kSumsPerTile && depth > 0) return;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < kAcross; ++j) storev(at(r, j), sums[r][j]);
    }
}

[[maybe_unused]] static void multiply_2x2(const Element* a0, const Element* a1, const Element* b0, const Element* b1,
                                          int64_t depth, float* c, bool accumulate) {
    constexpr int kRest = 16 % kTileRows;
    for (int half = 0; half < 2; ++half, c += 2 * kTileFloats) {
        const Element* a = half ? a1 : a0;
        for (int side = 0; side < 2; side += kTileSides) {
            const Element* b = side ? b1 : b0;
            float* to = c + side * kTileFloats;
            int row = 0;
            for (; row + kTileRows <= 16; row += kTileRows) {
                multiply_rows<kTileRows>(a + row * KT, b, b1, depth, to + row * 16, accumulate);
            }
            if constexpr (kRest > 0) multiply_rows<kRest>(a + row * KT, b, b1, depth, to + row * 16, accumulate);
        }
    }
}
#endif

// Two vectors of fp32 as one of 32-bit pairs of bf16, `even` in the low half.
RLHF_INLINE u32x16 pair_bf16(f32x16 even, f32x16 odd) {
    return widen(bf16_operand(even)) | (widen(bf16_operand(odd)) << 16);
}
