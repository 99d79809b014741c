// The kernels of lora_kernels.h, once per instruction set: a file that has chosen its target includes this inside a
// namespace of its own, after cpu/simd.h and cpu/philox.h. Multiply-add kernels serve fp32 everywhere and bf16 where
// there are no tiles; lora_tiles.inc.h has the others.

// ---- sixteen elements of either type --------------------------------------------------------------------------------

RLHF_INLINE f32x16 load(const float* p) { return load16(p); }
RLHF_INLINE f32x16 load(const uint16_t* p) { return load16_bf16(p); }
RLHF_INLINE void store(float* p, f32x16 x) { store16(p, x); }
RLHF_INLINE void store(uint16_t* p, f32x16 x) {
    const u16x16 rounded = to_bf16(x);
    std::memcpy(p, &rounded, sizeof rounded);
}

// 1 << lane.
RLHF_INLINE u32x16 lane_bit() {
    constexpr uint32_t kBits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    return load_words16(kBits);
}

// The first `count` of sixteen; the others load as 0 and are not stored.
template <typename T>
RLHF_INLINE f32x16 load_some(const T* p, int64_t count) {
    if (count >= 16) return load(p);
    T some[16] = {};
    for (int64_t i = 0; i < count; ++i) some[i] = p[i];
    return load(some);
}

template <typename T>
RLHF_INLINE void store_some(T* p, f32x16 x, int64_t count) {
    if (count >= 16) {
        store(p, x);
        return;
    }
    T some[16];
    store(some, x);
    for (int64_t i = 0; i < count; ++i) p[i] = some[i];
}

RLHF_INLINE float to_float(float x) { return x; }
RLHF_INLINE float to_float(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

RLHF_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <typename T>
RLHF_INLINE T* row(const Matrix& matrix, int64_t n) {
    return static_cast<T*>(matrix.data) + n * matrix.stride;
}

// ---- packing to fp32 ------------------------------------------------------------------------------------------------

static int64_t padded_rank(const Factor& factor) { return round_up(factor.rank, kRankTile); }
static int64_t padded_columns(const Factor& factor) { return round_up(factor.columns, kColumnTile); }

// packed [rows, padded] = source [rows, columns] in fp32, zeros behind.
template <typename T>
static void copy_fp32(const Matrix& source, int64_t rows, int64_t columns, int64_t padded, float* packed) {
    for (int64_t n = 0; n < rows; ++n) {
        const T* from = row<T>(source, n);
        for (int64_t c = 0; c < padded; c += 16) {
            store(packed + n * padded + c, c < columns ? load_some(from + c, columns - c) : splat(0));
        }
    }
}

// packed [columns, padded] = source [rows, columns] transposed, in fp32, zeros behind.
template <typename T>
static void transpose_fp32(const Matrix& source, int64_t rows, int64_t columns, int64_t padded, float* packed) {
    for (int64_t n0 = 0; n0 < padded; n0 += 16) {
        for (int64_t c0 = 0; c0 < columns; c0 += 16) {
            const int64_t count = smaller(16, columns - c0);
            u32x16 patch[16];
            for (int64_t n = 0; n < 16; ++n) {
                patch[n] = n0 + n < rows ? as_words(load_some(row<T>(source, n0 + n) + c0, count)) : u32x16{};
            }
            if (count == 16) {
                transpose16(patch, reinterpret_cast<uint32_t*>(packed + c0 * padded + n0), padded);
                continue;
            }
            for (int64_t c = 0; c < count; ++c) {
                f32x16 lanes;
                for (int n = 0; n < 16; ++n) lanes[n] = as_float(patch[n])[c];
                store(packed + (c0 + c) * padded + n0, lanes);
            }
        }
    }
}

// [columns, R]
static int64_t shrink_bytes_fp32(const Factor& factor) { return factor.columns * padded_rank(factor) * 4; }

static void pack_shrink_fp32(const Factor& factor, float* packed) {
    const Matrix& m = factor.matrix;
    const int64_t padded = padded_rank(factor);
    const bool half = m.type == Type::bfloat16;
    if (factor.ranks_are_rows) {
        (half ? transpose_fp32<uint16_t> : transpose_fp32<float>)(m, factor.rank, factor.columns, padded, packed);
    } else {
        (half ? copy_fp32<uint16_t> : copy_fp32<float>)(m, factor.columns, factor.rank, padded, packed);
    }
}

// [rank, padded columns]
static int64_t expand_bytes_fp32(const Factor& factor) { return factor.rank * padded_columns(factor) * 4; }

static void pack_expand_fp32(const Factor& factor, float* packed) {
    const Matrix& m = factor.matrix;
    const int64_t padded = padded_columns(factor);
    const bool half = m.type == Type::bfloat16;
    if (factor.ranks_are_rows) {
        (half ? copy_fp32<uint16_t> : copy_fp32<float>)(m, factor.rank, factor.columns, padded, packed);
    } else {
        (half ? transpose_fp32<uint16_t> : transpose_fp32<float>)(m, factor.columns, factor.rank, padded, packed);
    }
}

// ---- products by multiply-add ---------------------------------------------------------------------------------------

constexpr int64_t kShrinkRows = 8;  // whose part of x is staged together
constexpr int kShrinkTile = power_below(kSums16) < 8 ? power_below(kSums16) : 8;  // of them in registers
constexpr int kExpandTile = at_least_one(kSums16 / 2) < 4 ? at_least_one(kSums16 / 2) : 4;
constexpr int kOuterTile = power_below(kSums16 / 2) < 8 ? power_below(kSums16 / 2) : 8;
constexpr int64_t kShrinkColumns = kLoraColumns;  // summed on their own first, which keeps rounding errors small
constexpr int64_t kExpandColumns = 128;

template <int ROWS>
RLHF_INLINE void shrink_part(const float (*x)[kShrinkColumns], int64_t columns, const float* packed, int64_t R,
                             bool add, float* h) {
    for (int64_t r = 0; r < R; r += 16) {
        f32x16 sum[ROWS] = {};
        for (int64_t c = 0; c < columns; ++c) {
            const f32x16 w = load16(packed + c * R + r);
#pragma GCC unroll 8
            for (int n = 0; n < ROWS; ++n) sum[n] = muladd(splat(x[n][c]), w, sum[n]);
        }
        for (int n = 0; n < ROWS; ++n) {
            float* out = h + n * R + r;
            store16(out, add ? load16(out) + sum[n] : sum[n]);
        }
    }
}

template <typename T>
static void shrink_muladd(const Matrix& x, int64_t rows, const Factor& factor, const float* packed, float* h) {
    const int64_t R = padded_rank(factor);
    float part[kShrinkRows][kShrinkColumns];
    for (int64_t n0 = 0; n0 < rows; n0 += kShrinkRows) {
        const int64_t count = smaller(kShrinkRows, rows - n0);
        for (int64_t c0 = 0; c0 == 0 || c0 < factor.columns; c0 += kShrinkColumns) {  // without columns: zeros
            const int64_t columns = smaller(kShrinkColumns, factor.columns - c0);
            for (int64_t n = 0; n < count; ++n) {
                const T* from = row<T>(x, n0 + n) + c0;
                for (int64_t c = 0; c < columns; c += 16) store16(part[n] + c, load_some(from + c, columns - c));
            }
            const float* w = packed + c0 * R;
            int64_t n = 0;
            for (; n + kShrinkTile <= count; n += kShrinkTile) {
                shrink_part<kShrinkTile>(part + n, columns, w, R, c0 > 0, h + (n0 + n) * R);
            }
            for (; n < count; ++n) shrink_part<1>(part + n, columns, w, R, c0 > 0, h + (n0 + n) * R);
        }
    }
}

template <typename T, int ROWS>
RLHF_INLINE void expand_part(const float* h, int64_t R, const Factor& factor, const float* packed, const Matrix& y,
                             int64_t n0, int64_t begin, int64_t end, bool add, const uint64_t* keep) {
    const int64_t padded = padded_columns(factor), words = round_up(factor.columns, kMaskColumns) / kMaskColumns;
    for (int64_t c = begin; c < end; c += 32) {
        f32x16 sum[ROWS][2] = {};
        for (int64_t r = 0; r < factor.rank; ++r) {
            const f32x16 w0 = load16(packed + r * padded + c), w1 = load16(packed + r * padded + c + 16);
#pragma GCC unroll 4
            for (int n = 0; n < ROWS; ++n) {
                const f32x16 left = splat(h[(n0 + n) * R + r]);
                sum[n][0] = muladd(left, w0, sum[n][0]);
                sum[n][1] = muladd(left, w1, sum[n][1]);
            }
        }
        for (int n = 0; n < ROWS; ++n) {
            for (int half = 0; half < 2; ++half) {
                const int64_t column = c + 16 * half, count = end - column;
                if (count <= 0) break;
                if (keep) {
                    const uint64_t bits = keep[(n0 + n) * words + column / kMaskColumns] >> (column % kMaskColumns);
                    sum[n][half] = select((splat_words(uint32_t(bits & 0xffff)) & lane_bit()) != 0u, sum[n][half], splat(0));
                }
                T* out = row<T>(y, n0 + n) + column;
                store_some(out, add ? load_some(out, count) + sum[n][half] : sum[n][half], count);
            }
        }
    }
}

template <typename T>
static void expand_muladd(const float* h, int64_t rows, const Factor& factor, const float* packed, const Matrix& y,
                          bool add, const uint64_t* keep) {
    const int64_t R = padded_rank(factor);
    for (int64_t begin = 0; begin < factor.columns; begin += kExpandColumns) {
        const int64_t end = smaller(begin + kExpandColumns, factor.columns);
        int64_t n = 0;
        for (; n + kExpandTile <= rows; n += kExpandTile) {
            expand_part<T, kExpandTile>(h, R, factor, packed, y, n, begin, end, add, keep);
        }
        for (; n < rows; ++n) expand_part<T, 1>(h, R, factor, packed, y, n, begin, end, add, keep);
    }
}

template <typename T>
static void outer_muladd(const float* h, const Matrix& x, int64_t rows, const Factor& factor, bool add, float* sums) {
    const int64_t R = padded_rank(factor), padded = padded_columns(factor);
    float panel[kMaxRows][32];
    for (int64_t c = 0; c < factor.columns; c += 32) {
        const int64_t left = factor.columns - c;
        for (int64_t n = 0; n < rows; ++n) {
            const T* from = row<T>(x, n) + c;
            store16(panel[n], load_some(from, left));
            store16(panel[n] + 16, left > 16 ? load_some(from + 16, left - 16) : splat(0));
        }
        for (int64_t r = 0; r < R; r += kOuterTile) {
            f32x16 sum[kOuterTile][2] = {};
            for (int64_t n = 0; n < rows; ++n) {
                const f32x16 x0 = load16(panel[n]), x1 = load16(panel[n] + 16);
#pragma GCC unroll 8
                for (int i = 0; i < kOuterTile; ++i) {
                    const f32x16 factor_i = splat(h[n * R + r + i]);
                    sum[i][0] = muladd(factor_i, x0, sum[i][0]);
                    sum[i][1] = muladd(factor_i, x1, sum[i][1]);
                }
            }
            for (int i = 0; i < kOuterTile; ++i) {
                float* out = sums + (r + i) * padded + c;
                store16(out, add ? load16(out) + sum[i][0] : sum[i][0]);
                store16(out + 16, add ? load16(out + 16) + sum[i][1] : sum[i][1]);
            }
        }
    }
}

// ---- dropout --------------------------------------------------------------------------------------------------------

static void keep_mask(int64_t seed, const int64_t* row_ids, uint32_t stream, uint32_t threshold, int64_t rows,
                      int64_t columns, uint64_t* keep) {
    const int64_t words = round_up(columns, kMaskColumns) / kMaskColumns;
    for (int64_t n = 0; n < rows; ++n) {
        for (int64_t w = 0; w < words; ++w) {
            const PhiloxWords draws = philox16(seed, row_ids[n], stream, uint32_t(w * 16));
            uint64_t mask = 0;
            for (int j = 0; j < 4; ++j) {
#if defined(RLHF_AVX512)
                const uint64_t bits =
                    _mm512_cmpge_epu32_mask((__m512i)draws.word[j], _mm512_set1_epi32(int32_t(threshold)));
                mask |= _pdep_u64(bits, uint64_t(0x1111111111111111) << j);
#else
                for (int i = 0; i < 16; ++i) mask |= uint64_t(draws.word[j][i] >= threshold) << (4 * i + j);
#endif
            }
            keep[n * words + w] = mask;
        }
    }
}

template <typename T>
static void drop_rows(const Matrix& x, int64_t rows, int64_t columns, const uint64_t* keep, T* kept) {
    const int64_t words = round_up(columns, kMaskColumns) / kMaskColumns;
    for (int64_t n = 0; n < rows; ++n) {
        const T* from = row<T>(x, n);
        T* to = kept + n * columns;
        for (int64_t w = 0; w < words; ++w) {
            const uint64_t mask = keep[n * words + w];
            const int64_t begin = w * kMaskColumns, count = smaller(kMaskColumns, columns - begin);
            for (int64_t i = 0; i < count; ++i) to[begin + i] = (mask >> i) & 1 ? from[begin + i] : T(0);
        }
    }
}

static void drop(Matrix x, int64_t rows, int64_t columns, const uint64_t* keep, void* kept) {
    if (x.type == Type::bfloat16) {
        drop_rows(x, rows, columns, keep, static_cast<uint16_t*>(kept));
    } else {
        drop_rows(x, rows, columns, keep, static_cast<float*>(kept));
    }
}

static void accumulate(const float* part, int64_t count, float* total) {
    for (int64_t i = 0; i < count; i += 16) store16(total + i, load16(total + i) + load16(part + i));
}

template <typename T>
static void unpack_rows(const float* sums, const Factor& gradient) {
    const int64_t padded = padded_columns(gradient);
    if (gradient.ranks_are_rows) {
        for (int64_t r = 0; r < gradient.rank; ++r) {
            T* to = row<T>(gradient.matrix, r);
            for (int64_t c = 0; c < gradient.columns; c += 16) {
                store_some(to + c, load16(sums + r * padded + c), gradient.columns - c);
            }
        }
        return;
    }
    for (int64_t r = 0; r < gradient.rank; r += 16) {
        for (int64_t c0 = 0; c0 < gradient.columns; c0 += 16) {
            float patch[16][16];
            for (int64_t i = 0; i < 16; ++i) store16(patch[i], load16(sums + (r + i) * padded + c0));
            for (int64_t c = 0; c < smaller(16, gradient.columns - c0); ++c) {
                f32x16 lanes;
                for (int i = 0; i < 16; ++i) lanes[i] = patch[i][c];
                store_some(row<T>(gradient.matrix, c0 + c) + r, lanes, gradient.rank - r);
            }
        }
    }
}

static void scale_rows(float scale, int64_t count, float* h) {
    for (int64_t i = 0; i < count; i += 16) store16(h + i, load16(h + i) * scale);
}

// ---- the table ------------------------------------------------------------------------------------------------------

#if defined(RLHF_AMX)
#include "cpu/lora_tiles.inc.h"
static bool tiles_serve(const Factor& factor, Type other) { return other == Type::bfloat16 && !factor.multiply_add; }
#define RLHF_BY_TILES(factor, other, tiles, otherwise) (tiles_serve(factor, other) ? (tiles) : (otherwise))
#else
#define RLHF_BY_TILES(factor, other, tiles, otherwise) (otherwise)
#endif

static int64_t shrink_bytes(const Factor& factor, [[maybe_unused]] Type other) {
    return RLHF_BY_TILES(factor, other, shrink_bytes_tiles(factor), shrink_bytes_fp32(factor));
}

static int64_t expand_bytes(const Factor& factor, [[maybe_unused]] Type other) {
    return RLHF_BY_TILES(factor, other, expand_bytes_tiles(factor), expand_bytes_fp32(factor));
}

static void pack_shrink(const Factor& factor, [[maybe_unused]] Type other, void* packed) {
    RLHF_BY_TILES(factor, other, pack_shrink_tiles(factor, static_cast<uint16_t*>(packed)),
                  pack_shrink_fp32(factor, static_cast<float*>(packed)));
}

static void pack_expand(const Factor& factor, [[maybe_unused]] Type other, void* packed) {
    RLHF_BY_TILES(factor, other, pack_expand_tiles(factor, static_cast<uint16_t*>(packed)),
                  pack_expand_fp32(factor, static_cast<float*>(packed)));
}

static void shrink(Matrix x, int64_t rows, const Factor& factor, const void* packed, float scale, float* h) {
    const float* w = static_cast<const float*>(packed);
    if (x.type == Type::bfloat16) {
        RLHF_BY_TILES(factor, x.type, shrink_tiles(x, rows, factor, static_cast<const uint16_t*>(packed), h),
                      shrink_muladd<uint16_t>(x, rows, factor, w, h));
    } else {
        shrink_muladd<float>(x, rows, factor, w, h);
    }
    scale_rows(scale, rows * padded_rank(factor), h);
}

static void expand(const float* h, int64_t rows, const Factor& factor, const void* packed, Matrix y, bool add,
                   const uint64_t* keep, [[maybe_unused]] void* scratch) {
    const float* w = static_cast<const float*>(packed);
    if (y.type == Type::bfloat16) {
        RLHF_BY_TILES(factor, y.type,
                      expand_tiles(h, rows, factor, static_cast<const uint16_t*>(packed), y, add, keep,
                                   static_cast<uint16_t*>(scratch)),
                      expand_muladd<uint16_t>(h, rows, factor, w, y, add, keep));
    } else {
        expand_muladd<float>(h, rows, factor, w, y, add, keep);
    }
}

static void outer(const float* h, Matrix x, int64_t rows, const Factor& factor, bool add, float* sums,
                  [[maybe_unused]] void* scratch) {
    if (x.type == Type::bfloat16) {
        RLHF_BY_TILES(factor, x.type, outer_tiles(h, x, rows, factor, add, sums, static_cast<uint16_t*>(scratch)),
                      outer_muladd<uint16_t>(h, x, rows, factor, add, sums));
    } else {
        outer_muladd<float>(h, x, rows, factor, add, sums);
    }
}

static void unpack(const float* sums, const Factor& gradient, [[maybe_unused]] Type other) {
    if (gradient.matrix.type == Type::bfloat16) {
        RLHF_BY_TILES(gradient, other, unpack_tiles<uint16_t>(sums, gradient), unpack_rows<uint16_t>(sums, gradient));
    } else {
        RLHF_BY_TILES(gradient, other, unpack_tiles<float>(sums, gradient), unpack_rows<float>(sums, gradient));
    }
}

static int64_t scratch_bytes([[maybe_unused]] int64_t rank) {
#if defined(RLHF_AMX)
    return scratch_bytes_tiles(rank);
#else
    return 0;
#endif
}

static const Kernels kTable = {shrink_bytes, pack_shrink, expand_bytes, pack_expand, shrink,     expand, outer,
                               scratch_bytes, keep_mask,  drop,         accumulate,  unpack};

const Kernels& kernels() { return kTable; }
