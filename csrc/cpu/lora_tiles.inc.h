// bf16 products of lora_kernels.h on tile registers (16 rows of 64 bytes; tdpbf16ps adds a product of depth 32 to sixteen
// by sixteen fp32 sums). Included by lora_kernels.inc.h.
//
// The rows of x and y are operands as they lie in memory. Adapters are packed once per call. What is fp32 (h, fp32
// adapters) enters as a sum of bf16 parts, each the rounding of what the ones before leave over: one part keeps 8 bits, two
// 16, three all 24. A bf16 adapter is one part, an fp32 one three. h enters `expand` as two parts, since the sum is rounded to
// bf16 afterwards, and `outer` as two (three where the gradient is fp32).
// The depth of 32 is used up by parts: with rank 16 the two parts of h fill it.

constexpr int64_t kTile = 512;  // elements of a tile

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Other code (oneDNN) brings its own configuration, and context switches are cheaper without live tiles.
struct TileScope {
    TileScope() {
        const TileConfig config;
        _tile_loadconfig(&config);
    }
    ~TileScope() { _tile_release(); }
};

// GCC's tile loads do not say that they read memory.
RLHF_INLINE void memory_is_read() { __asm__ volatile("" ::: "memory"); }

RLHF_INLINE u16x16 rounded_part(f32x16& x) {
    const u16x16 part = to_bf16(x);
    const f32x16 value = (f32x16)(__builtin_convertvector(part, u32x16) << 16);
    const i32x16 exponent = (i32x16)value & 0x7f800000;
    x = exponent == 0x7f800000 ? splat(0) : x - value;  // nothing is left over of an infinity or a NaN
    return part;
}

static int64_t adapter_parts(const Factor& factor) { return factor.matrix.type == Type::bfloat16 ? 1 : 3; }

// ---- packing ---------------------------------------------------------------------------------------------------------

// Part `part` of up to 16 by 16 elements of the matrix, zeros elsewhere.
static void load_patch(const Matrix& m, int64_t row0, int64_t rows, int64_t column0, int64_t columns, int64_t part,
                       uint16_t patch[16][16]) {
    for (int64_t n = 0; n < 16; ++n) {
        u16x16 lanes = {};
        if (n < rows && columns > 0) {
            f32x16 x = m.type == Type::bfloat16 ? load_some(row<uint16_t>(m, row0 + n) + column0, columns)
                                                : load_some(row<float>(m, row0 + n) + column0, columns);
            for (int64_t i = 0; i <= part; ++i) lanes = rounded_part(x);
        }
        std::memcpy(patch[n], &lanes, sizeof lanes);
    }
}

// Half of a right operand: depth 16 (eight rows of pairs) by 16 lanes.
static void pack_half(const Matrix& m, bool depth_is_rows, int64_t depth0, int64_t depth, int64_t lane0, int64_t lanes,
                      int64_t part, uint16_t* half) {
    alignas(64) uint16_t patch[16][16];
    if (depth_is_rows) {
        load_patch(m, depth0, smaller(16, depth - depth0), lane0, smaller(16, lanes - lane0), part, patch);
        for (int64_t pair = 0; pair < 8; ++pair) {
            for (int64_t lane = 0; lane < 16; ++lane) {
                half[pair * 32 + 2 * lane] = patch[2 * pair][lane];
                half[pair * 32 + 2 * lane + 1] = patch[2 * pair + 1][lane];
            }
        }
    } else {
        load_patch(m, lane0, smaller(16, lanes - lane0), depth0, smaller(16, depth - depth0), part, patch);
        uint32_t pairs[16][8], turned[8][16];
        std::memcpy(pairs, patch, sizeof pairs);
        for (int64_t pair = 0; pair < 8; ++pair) {
            for (int64_t lane = 0; lane < 16; ++lane) turned[pair][lane] = pairs[lane][pair];
        }
        std::memcpy(half, turned, sizeof turned);
    }
}

// [part, R / 16, columns / 32] tiles: depth = columns, lanes = ranks.
static int64_t shrink_bytes_tiles(const Factor& factor) {
    return adapter_parts(factor) * padded_rank(factor) * padded_columns(factor) * 2;
}

static void pack_shrink_tiles(const Factor& factor, uint16_t* packed) {
    for (int64_t part = 0; part < adapter_parts(factor); ++part) {
        for (int64_t r = 0; r < padded_rank(factor); r += 16) {
            for (int64_t c = 0; c < padded_columns(factor); c += 16, packed += kTile / 2) {
                pack_half(factor.matrix, !factor.ranks_are_rows, c, factor.columns, r, factor.rank, part, packed);
            }
        }
    }
}

// What `expand` multiplies: h's parts 0, 1 with the adapter's part 0, and h's part 0 with the adapter's part 1.
constexpr int64_t kExpandLeft[3] = {0, 1, 0}, kExpandRight[3] = {0, 0, 1};
static int64_t expand_terms(const Factor& factor) { return factor.matrix.type == Type::bfloat16 ? 2 : 3; }
static int64_t expand_depth(const Factor& factor) { return round_up(expand_terms(factor) * padded_rank(factor), 32); }

// [columns / 16, depth / 32] tiles: depth = the ranks of one term after the other, lanes = columns.
static int64_t expand_bytes_tiles(const Factor& factor) { return expand_depth(factor) * padded_columns(factor) * 2; }

static void pack_expand_tiles(const Factor& factor, uint16_t* packed) {
    const int64_t R = padded_rank(factor), terms = expand_terms(factor);
    for (int64_t c = 0; c < padded_columns(factor); c += 16) {
        for (int64_t d = 0; d < expand_depth(factor); d += 16, packed += kTile / 2) {
            const int64_t term = d / R;
            pack_half(factor.matrix, factor.ranks_are_rows, d % R, term < terms ? factor.rank : 0, c, factor.columns,
                      term < terms ? kExpandRight[term] : 0, packed);
        }
    }
}

// Three parts of as many rows as a block has, or three terms of 32.
static int64_t scratch_bytes_tiles(int64_t rank) { return 3 * round_up(rank, kRankTile) * kMaxRows * 2; }

// ---- products --------------------------------------------------------------------------------------------------------

// 16 by 32 elements of x from (n, c) on, zeros where x has none.
static const uint16_t* edge_tile(const Matrix& x, int64_t n, int64_t rows, int64_t c, int64_t columns, uint16_t* edge) {
    const __mmask32 some = columns - c >= 32 ? ~__mmask32(0) : (__mmask32(1) << (columns - c)) - 1;
    for (int64_t i = 0; i < 16; ++i) {
        const __m512i lanes =
            n + i < rows ? _mm512_maskz_loadu_epi16(some, row<uint16_t>(x, n + i) + c) : _mm512_setzero_si512();
        _mm512_store_si512(edge + i * 32, lanes);
    }
    memory_is_read();
    return edge;
}

static void shrink_tiles(const Matrix& x, int64_t rows, const Factor& factor, const uint16_t* packed, float* h) {
    const int64_t R = padded_rank(factor), steps = padded_columns(factor) / 32, parts = adapter_parts(factor);
    const int64_t part_size = R / 16 * steps * kTile;
    alignas(64) uint16_t edge[2][kTile];
    TileScope tiles;
    for (int64_t n = 0; n < rows; n += 32) {
        const bool two_rows = rows - n > 16;
        for (int64_t r = 0; r < R; r += 32) {
            const bool two_ranks = R - r > 16;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t step = 0; step < steps; ++step) {
                const int64_t c = step * 32;
                const bool whole = c + 32 <= factor.columns;
                if (whole && n + 16 <= rows) {
                    _tile_loadd(4, row<uint16_t>(x, n) + c, x.stride * 2);
                } else {
                    _tile_loadd(4, edge_tile(x, n, rows, c, factor.columns, edge[0]), 64);
                }
                if (two_rows) {
                    if (whole && n + 32 <= rows) {
                        _tile_loadd(5, row<uint16_t>(x, n + 16) + c, x.stride * 2);
                    } else {
                        _tile_loadd(5, edge_tile(x, n + 16, rows, c, factor.columns, edge[1]), 64);
                    }
                }
                for (int64_t part = 0; part < parts; ++part) {
                    const uint16_t* w = packed + part * part_size + (r / 16 * steps + step) * kTile;
                    _tile_loadd(6, w, 64);
                    _tile_dpbf16ps(0, 4, 6);
                    if (two_rows) _tile_dpbf16ps(1, 5, 6);
                    if (two_ranks) {
                        _tile_loadd(7, w + steps * kTile, 64);
                        _tile_dpbf16ps(2, 4, 7);
                        if (two_rows) _tile_dpbf16ps(3, 5, 7);
                    }
                }
            }
            float* out = h + n * R + r;
            _tile_stored(0, out, R * 4);
            if (two_rows) _tile_stored(1, out + 16 * R, R * 4);
            if (two_ranks) {
                _tile_stored(2, out + 16, R * 4);
                if (two_rows) _tile_stored(3, out + 16 * R + 16, R * 4);
            }
        }
    }
}

// y's 32 columns from c on, plus sums [32, 32], where keep's bits are set.
RLHF_INLINE void add_to_row(uint16_t* y, const float* sums, bool add, __mmask32 some, __mmask32 keep) {
    __m512 s0 = _mm512_maskz_loadu_ps(__mmask16(keep), sums);
    __m512 s1 = _mm512_maskz_loadu_ps(__mmask16(keep >> 16), sums + 16);
    if (add) {
        const __m512i old = _mm512_maskz_loadu_epi16(some, y);
        s0 += (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(old)), 16);
        s1 += (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(old, 1)), 16);
    }
    _mm512_mask_storeu_epi16(y, some, (__m512i)_mm512_cvtne2ps_pbh(s1, s0));
}

static void expand_tiles(const float* h, int64_t rows, const Factor& factor, const uint16_t* packed, const Matrix& y,
                         bool add, const uint64_t* keep, uint16_t* left) {
    const int64_t R = padded_rank(factor), terms = expand_terms(factor), depth = expand_depth(factor);
    const int64_t steps = depth / 32, words = round_up(factor.columns, kMaskColumns) / kMaskColumns;
    alignas(64) float sums[32][32];
    TileScope tiles;
    for (int64_t n0 = 0; n0 < rows; n0 += 32) {
        const int64_t count = smaller(32, rows - n0);
        for (int64_t n = 0; n < 32; ++n) {  // left [32, depth]: h's parts side by side
            for (int64_t d = terms * R; d < depth; d += 16) std::memset(left + n * depth + d, 0, 32);
            for (int64_t r = 0; r < R; r += 16) {
                f32x16 x = n < count ? load16(h + (n0 + n) * R + r) : splat(0);
                u16x16 parts[2];
                for (u16x16& part : parts) part = rounded_part(x);
                for (int64_t term = 0; term < terms; ++term) {
                    std::memcpy(left + n * depth + term * R + r, &parts[kExpandLeft[term]], 32);
                }
            }
        }
        memory_is_read();
        for (int64_t c = 0; c < factor.columns; c += 32) {
            const uint16_t* w = packed + c / 16 * steps * kTile;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t step = 0; step < steps; ++step) {
                _tile_loadd(4, left + step * 32, depth * 2);
                _tile_loadd(5, left + 16 * depth + step * 32, depth * 2);
                _tile_loadd(6, w + step * kTile, 64);
                _tile_loadd(7, w + (steps + step) * kTile, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, sums[0], 128);
            _tile_stored(1, sums[0] + 16, 128);
            _tile_stored(2, sums[16], 128);
            _tile_stored(3, sums[16] + 16, 128);
            const int64_t columns = factor.columns - c;
            const __mmask32 some = columns >= 32 ? ~__mmask32(0) : (__mmask32(1) << columns) - 1;
            for (int64_t n = 0; n < count; ++n) {
                const uint64_t bits = keep ? keep[(n0 + n) * words + c / kMaskColumns] >> (c % kMaskColumns) : ~0ull;
                add_to_row(row<uint16_t>(y, n0 + n) + c, sums[n], add, some, __mmask32(bits));
            }
        }
    }
}

// left [part, R / 16, rows / 32] tiles: h's parts transposed, zeros for rows that are not there.
static void transpose_parts(const float* h, int64_t rows, int64_t R, int64_t parts, uint16_t* left) {
    const int64_t steps = round_up(rows, 32) / 32;
    for (int64_t r = 0; r < R; r += 16) {
        for (int64_t step = 0; step < steps; ++step) {
            alignas(64) uint32_t pairs[3][16][16];  // [part, pair of rows, rank]
            for (int64_t pair = 0; pair < 16; ++pair) {
                const int64_t n = step * 32 + 2 * pair;
                f32x16 even = n < rows ? load16(h + n * R + r) : splat(0);
                f32x16 odd = n + 1 < rows ? load16(h + (n + 1) * R + r) : splat(0);
                for (int64_t part = 0; part < parts; ++part) {
                    const u32x16 low = __builtin_convertvector(rounded_part(even), u32x16);
                    const u32x16 high = __builtin_convertvector(rounded_part(odd), u32x16);
                    const u32x16 both = low | (high << 16);
                    std::memcpy(pairs[part][pair], &both, sizeof both);
                }
            }
            for (int64_t part = 0; part < parts; ++part) {
                uint16_t* tile = left + ((part * (R / 16) + r / 16) * steps + step) * kTile;
                for (int64_t i = 0; i < 16; ++i) {
                    uint32_t turned[16];
                    for (int64_t pair = 0; pair < 16; ++pair) turned[pair] = pairs[part][pair][i];
                    std::memcpy(tile + i * 32, turned, sizeof turned);
                }
            }
        }
    }
}

// right [rows / 32, 2] tiles: pairs of rows of x interleaved, 32 columns from c on.
static void interleave_rows(const Matrix& x, int64_t rows, int64_t c, int64_t columns, uint16_t* right) {
    const __mmask32 some = columns - c >= 32 ? ~__mmask32(0) : (__mmask32(1) << (columns - c)) - 1;
    alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const int64_t padded = round_up(rows, 32);
    for (int64_t n = 0; n < padded; n += 2) {
        const __m512i even =
            n < rows ? _mm512_maskz_loadu_epi16(some, row<uint16_t>(x, n) + c) : _mm512_setzero_si512();
        const __m512i odd =
            n + 1 < rows ? _mm512_maskz_loadu_epi16(some, row<uint16_t>(x, n + 1) + c) : _mm512_setzero_si512();
        uint16_t* to = right + n / 32 * 2 * kTile + n % 32 / 2 * 32;
        _mm512_store_si512(to, _mm512_permutex2var_epi16(even, low, odd));
        _mm512_store_si512(to + kTile, _mm512_permutex2var_epi16(even, high, odd));
    }
}

static void outer_tiles(const float* h, const Matrix& x, int64_t rows, const Factor& factor, bool add, float* sums,
                        uint16_t* left) {
    const int64_t R = padded_rank(factor), padded = padded_columns(factor), steps = round_up(rows, 32) / 32;
    const int64_t parts = factor.matrix.type == Type::bfloat16 ? 2 : 3, part_size = R / 16 * steps * kTile;
    alignas(64) uint16_t right[kMaxRows / 32 * 2 * kTile];
    transpose_parts(h, rows, R, parts, left);
    TileScope tiles;
    for (int64_t c = 0; c < factor.columns; c += 32) {
        interleave_rows(x, rows, c, factor.columns, right);
        memory_is_read();
        for (int64_t r = 0; r < R; r += 32) {
            const bool two_ranks = R - r > 16;
            float* out = sums + r * padded + c;
            if (add) {
                _tile_loadd(0, out, padded * 4);
                _tile_loadd(1, out + 16, padded * 4);
                if (two_ranks) {
                    _tile_loadd(2, out + 16 * padded, padded * 4);
                    _tile_loadd(3, out + 16 * padded + 16, padded * 4);
                }
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t step = 0; step < steps; ++step) {
                _tile_loadd(6, right + step * 2 * kTile, 64);
                _tile_loadd(7, right + (step * 2 + 1) * kTile, 64);
                for (int64_t part = 0; part < parts; ++part) {
                    const uint16_t* l = left + part * part_size + (r / 16 * steps + step) * kTile;
                    _tile_loadd(4, l, 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 4, 7);
                    if (two_ranks) {
                        _tile_loadd(5, l + steps * kTile, 64);
                        _tile_dpbf16ps(2, 5, 6);
                        _tile_dpbf16ps(3, 5, 7);
                    }
                }
            }
            _tile_stored(0, out, padded * 4);
            _tile_stored(1, out + 16, padded * 4);
            if (two_ranks) {
                _tile_stored(2, out + 16 * padded, padded * 4);
                _tile_stored(3, out + 16 * padded + 16, padded * 4);
            }
        }
    }
}
