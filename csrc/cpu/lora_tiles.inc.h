// bf16 products of lora_kernels.h on tile registers (16 rows of 64 bytes; tdpbf16ps adds a product of depth 32 to
// sixteen by sixteen fp32 sums). Included by lora_kernels.inc.h.
//
// The rows of x and y are operands as they lie in memory. Adapters are packed once per call. What is fp32 (h, fp32
// adapters) enters as a sum of bf16 parts, each the rounding of what the ones before leave over: one part keeps 8 bits,
// two 16, three all 24. A bf16 adapter is one part, an fp32 one three. h enters `expand` as two parts, since the sum is
// rounded to bf16 afterwards, and `outer` as two (three where the gradient is fp32). The depth of 32 is used up by
// parts: with rank 16 the two parts of h fill it.
//
// Where columns are lanes, `expand` and `outer` take each 32 of them as 16 even and 16 odd ones: these are the low and
// the high halves of 16 words in memory, so a shift and a mask take them apart.

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

RLHF_INLINE u16x16 rounded_part(f32x16& x) {
    const u16x16 part = to_bf16(x);
    const f32x16 value = as_float(widen(part) << 16);
    const i32x16 exponent = as_ints(value) & 0x7f800000;
    x = select(exponent == 0x7f800000, splat(0), x - value);  // nothing is left over of an infinity or a NaN
    return part;
}

static int64_t adapter_parts(const Factor& factor) { return factor.matrix.type == Type::bfloat16 ? 1 : 3; }

// ---- packing --------------------------------------------------------------------------------------------------------

// Part `part` of 16 by 16 elements of the matrix from (row0, column0) on, zeros where it has none.
static void load_patch(const Matrix& m, int64_t row0, int64_t rows, int64_t column0, int64_t columns, int64_t part,
                       uint16_t patch[16][16]) {
    for (int64_t n = 0; n < 16; ++n) {
        u16x16 lanes = {};
        if (row0 + n < rows && column0 < columns) {
            const int64_t count = columns - column0;
            f32x16 x = m.type == Type::bfloat16 ? load_some(row<uint16_t>(m, row0 + n) + column0, count)
                                                : load_some(row<float>(m, row0 + n) + column0, count);
            for (int64_t i = 0; i <= part; ++i) lanes = rounded_part(x);
        }
        std::memcpy(patch[n], &lanes, sizeof lanes);
    }
}

// Half of a right operand, eight rows of pairs. depth_by_lane [16, 16]: pairs are columns below each other.
static void pair_columns(const uint16_t depth_by_lane[16][16], uint16_t* half) {
    for (int64_t pair = 0; pair < 8; ++pair) {
        for (int64_t lane = 0; lane < 16; ++lane) {
            half[pair * 32 + 2 * lane] = depth_by_lane[2 * pair][lane];
            half[pair * 32 + 2 * lane + 1] = depth_by_lane[2 * pair + 1][lane];
        }
    }
}

// The same of lane_by_depth [16, 16]: pairs are neighbours.
static void pair_rows(const uint16_t lane_by_depth[16][16], uint16_t* half) {
    uint32_t pairs[16][8], turned[8][16];
    std::memcpy(pairs, lane_by_depth, sizeof pairs);
    for (int64_t pair = 0; pair < 8; ++pair) {
        for (int64_t lane = 0; lane < 16; ++lane) turned[pair][lane] = pairs[lane][pair];
    }
    std::memcpy(half, turned, sizeof turned);
}

// [part, R / 16, columns / 32] tiles: depth = columns, lanes = ranks.
static int64_t shrink_bytes_tiles(const Factor& factor) {
    return adapter_parts(factor) * padded_rank(factor) * padded_columns(factor) * 2;
}

static void pack_shrink_tiles(const Factor& factor, uint16_t* packed) {
    for (int64_t part = 0; part < adapter_parts(factor); ++part) {
        for (int64_t r = 0; r < padded_rank(factor); r += 16) {
            for (int64_t c = 0; c < padded_columns(factor); c += 16, packed += kTile / 2) {
                alignas(64) uint16_t patch[16][16];
                if (factor.ranks_are_rows) {
                    load_patch(factor.matrix, r, factor.rank, c, factor.columns, part, patch);
                    pair_rows(patch, packed);
                } else {
                    load_patch(factor.matrix, c, factor.columns, r, factor.rank, part, patch);
                    pair_columns(patch, packed);
                }
            }
        }
    }
}

// What `expand` multiplies, in terms: h's parts 0 and 1 with the adapter's part 0, h's part 0 with the adapter's part
// 1.
constexpr int64_t kExpandLeft[3] = {0, 1, 0}, kExpandRight[3] = {0, 0, 1};
static int64_t expand_terms(const Factor& factor) { return factor.matrix.type == Type::bfloat16 ? 2 : 3; }
static int64_t expand_depth(const Factor& factor) { return round_up(expand_terms(factor) * padded_rank(factor), 32); }

// [columns / 32, 2, depth / 32] tiles: even columns and odd columns; depth = the ranks of one term after the other.
static int64_t expand_bytes_tiles(const Factor& factor) { return expand_depth(factor) * padded_columns(factor) * 2; }

static void pack_expand_tiles(const Factor& factor, uint16_t* packed) {
    const Matrix& m = factor.matrix;
    const int64_t R = padded_rank(factor), depth = expand_depth(factor);
    for (int64_t c = 0; c < padded_columns(factor); c += 32) {
        uint16_t* even = packed + c / 16 * (depth * 16);
        uint16_t* odd = even + depth * 16;
        for (int64_t d = 0; d < depth; d += 16, even += kTile / 2, odd += kTile / 2) {
            const int64_t term = d / R, r = d % R;
            if (term >= expand_terms(factor)) {
                std::memset(even, 0, kTile);
                std::memset(odd, 0, kTile);
                continue;
            }
            if (term == 1) {  // what term 0 has
                std::memcpy(even, even - R * 16, kTile);
                std::memcpy(odd, odd - R * 16, kTile);
                continue;
            }
            alignas(64) uint16_t patch[2][16][16], sorted[2][16][16];
            if (factor.ranks_are_rows) {
                load_patch(m, r, factor.rank, c, factor.columns, kExpandRight[term], patch[0]);
                load_patch(m, r, factor.rank, c + 16, factor.columns, kExpandRight[term], patch[1]);
                for (int64_t i = 0; i < 16; ++i) {
                    for (int64_t lane = 0; lane < 16; ++lane) {
                        sorted[0][i][lane] = patch[lane / 8][i][lane % 8 * 2];
                        sorted[1][i][lane] = patch[lane / 8][i][lane % 8 * 2 + 1];
                    }
                }
                pair_columns(sorted[0], even);
                pair_columns(sorted[1], odd);
            } else {
                load_patch(m, c, factor.columns, r, factor.rank, kExpandRight[term], patch[0]);
                load_patch(m, c + 16, factor.columns, r, factor.rank, kExpandRight[term], patch[1]);
                for (int64_t lane = 0; lane < 16; ++lane) {
                    std::memcpy(sorted[0][lane], patch[lane / 8][lane % 8 * 2], 32);
                    std::memcpy(sorted[1][lane], patch[lane / 8][lane % 8 * 2 + 1], 32);
                }
                pair_rows(sorted[0], even);
                pair_rows(sorted[1], odd);
            }
        }
    }
}

// Three parts or terms of as many rows as a block has.
static int64_t scratch_bytes_tiles(int64_t rank) { return round_up(3 * round_up(rank, kRankTile), 32) * kMaxRows * 2; }

// ---- products -------------------------------------------------------------------------------------------------------

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

alignas(64) static constexpr uint16_t kAlternate[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// 32 elements of y, plus sums [2, 16] of the even and the odd ones.
RLHF_INLINE __m512i added(__m512i y, __m512 even, __m512 odd, bool add) {
    if (add) {
        even += (__m512)_mm512_slli_epi32(y, 16);
        odd += (__m512)_mm512_and_si512(y, _mm512_set1_epi32(int32_t(0xffff0000)));
    }
    return _mm512_permutexvar_epi16(_mm512_load_si512(kAlternate), (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

RLHF_INLINE void add_to_row(uint16_t* y, const float* sums, bool add) {
    const __m512i old = add ? _mm512_loadu_si512(y) : _mm512_setzero_si512();
    _mm512_storeu_si512(y, added(old, _mm512_load_ps(sums), _mm512_load_ps(sums + 16), add));
}

// Only the columns of `some` are there, and only those of `keep` get their sum.
RLHF_INLINE void add_to_some(uint16_t* y, const float* sums, bool add, uint32_t some, uint32_t keep) {
    const __m512 even = _mm512_maskz_load_ps(__mmask16(_pext_u32(keep, 0x55555555)), sums);
    const __m512 odd = _mm512_maskz_load_ps(__mmask16(_pext_u32(keep, 0xaaaaaaaa)), sums + 16);
    _mm512_mask_storeu_epi16(y, some, added(_mm512_maskz_loadu_epi16(some, y), even, odd, add));
}

// left [rows, depth]: h's parts side by side, zeros for rows that are not there.
static void place_parts(const float* h, int64_t rows, int64_t R, int64_t terms, int64_t depth, uint16_t* left) {
    for (int64_t n = 0; n < round_up(rows, 16); ++n) {
        for (int64_t d = terms * R; d < depth; d += 16) std::memset(left + n * depth + d, 0, 32);
        for (int64_t r = 0; r < R; r += 16) {
            f32x16 x = n < rows ? load16(h + n * R + r) : splat(0);
            u16x16 parts[2];
            for (u16x16& part : parts) part = rounded_part(x);
            for (int64_t term = 0; term < terms; ++term) {
                std::memcpy(left + n * depth + term * R + r, &parts[kExpandLeft[term]], 32);
            }
        }
    }
}

constexpr int64_t kPanel = 128;  // columns whose share of the adapter stays in the first-level cache for all rows

// Tiles `even` and `odd` = left [16, depth] times a tile column of even and one of odd columns. Their numbers have to
// be literals.
#define RLHF_EXPAND(even, odd, left, right)                    \
    _tile_zero(even);                                          \
    _tile_zero(odd);                                           \
    for (int64_t step = 0; step < steps; ++step) {             \
        _tile_loadd(4, (left) + step * 32, depth * 2);         \
        _tile_loadd(6, (right) + step * kTile, 64);            \
        _tile_loadd(7, (right) + (steps + step) * kTile, 64);  \
        _tile_dpbf16ps(even, 4, 6);                            \
        _tile_dpbf16ps(odd, 4, 7);                             \
    }

static void expand_tiles(const float* h, int64_t rows, const Factor& factor, const uint16_t* packed, const Matrix& y,
                         bool add, const uint64_t* keep, uint16_t* left) {
    const int64_t R = padded_rank(factor), depth = expand_depth(factor), steps = depth / 32, columns = factor.columns;
    const int64_t words = round_up(columns, kMaskColumns) / kMaskColumns;
    place_parts(h, rows, R, expand_terms(factor), depth, left);
    TileScope tiles;
    memory_is_read();
    for (int64_t c0 = 0; c0 < columns; c0 += kPanel) {
        for (int64_t n0 = 0; n0 < rows; n0 += 16) {
            alignas(64) float sums[16][kPanel];
            // Each product is stored after the next one has begun: it takes a while until it is there.
            const int64_t quarters = smaller(kPanel, round_up(columns - c0, 32)) / 32;
            for (int64_t j = 0; j <= quarters; ++j) {
                const uint16_t* l = left + n0 * depth;
                const uint16_t* w = packed + (c0 + j * 32) * depth;
                if (j < quarters && j % 2 == 0) {
                    RLHF_EXPAND(0, 1, l, w)
                } else if (j < quarters) {
                    RLHF_EXPAND(2, 3, l, w)
                }
                float* to = sums[0] + (j - 1) * 32;
                if (j % 2 == 1) {
                    _tile_stored(0, to, kPanel * 4);
                    _tile_stored(1, to + 16, kPanel * 4);
                } else if (j > 0) {
                    _tile_stored(2, to, kPanel * 4);
                    _tile_stored(3, to + 16, kPanel * 4);
                }
            }
            for (int64_t n = 0; n < smaller(16, rows - n0); ++n) {
                uint16_t* out = row<uint16_t>(y, n0 + n) + c0;
                if (c0 + kPanel <= columns && !keep) {
                    for (int64_t j = 0; j < kPanel; j += 32) add_to_row(out + j, sums[n] + j, add);
                    continue;
                }
                for (int64_t j = 0; j < kPanel && c0 + j < columns; j += 32) {
                    const int64_t count = columns - c0 - j, c = c0 + j;
                    const uint32_t some = count >= 32 ? ~0u : (1u << count) - 1;
                    const uint64_t bits =
                        keep ? keep[(n0 + n) * words + c / kMaskColumns] >> (c % kMaskColumns) : ~0ull;
                    add_to_some(out + j, sums[n] + j, add, some, uint32_t(bits));
                }
            }
        }
    }
}

#undef RLHF_EXPAND

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
                    const u32x16 low = widen(rounded_part(even));
                    const u32x16 high = widen(rounded_part(odd));
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

// right [2] tiles: the even and the odd ones of 32 columns from c on, as pairs of the rows from n0 on.
RLHF_INLINE void interleave_rows(const Matrix& x, int64_t n0, int64_t rows, int64_t c, int64_t columns,
                                 uint16_t* right) {
    const __mmask32 some = columns - c >= 32 ? ~__mmask32(0) : (__mmask32(1) << (columns - c)) - 1;
    const __m512i low = _mm512_set1_epi32(0xffff);
    for (int64_t i = 0; i < 32; i += 2, right += 32) {
        const int64_t n = n0 + i;
        const __m512i first =
            n < rows ? _mm512_maskz_loadu_epi16(some, row<uint16_t>(x, n) + c) : _mm512_setzero_si512();
        const __m512i second =
            n + 1 < rows ? _mm512_maskz_loadu_epi16(some, row<uint16_t>(x, n + 1) + c) : _mm512_setzero_si512();
        constexpr int kSelect = 0xCA;  // where the first has bits set the second, elsewhere the third
        _mm512_store_si512(right, _mm512_ternarylogic_epi32(low, first, _mm512_slli_epi32(second, 16), kSelect));
        _mm512_store_si512(right + kTile,
                           _mm512_ternarylogic_epi32(low, _mm512_srli_epi32(first, 16), second, kSelect));
    }
}

// sums [columns / 32, R / 16, 2] tiles: of 16 ranks, the even and the odd columns.
static void outer_tiles(const float* h, const Matrix& x, int64_t rows, const Factor& factor, bool add, float* sums,
                        uint16_t* left) {
    const int64_t R = padded_rank(factor), steps = round_up(rows, 32) / 32;
    const int64_t parts = factor.matrix.type == Type::bfloat16 ? 2 : 3, part_size = R / 16 * steps * kTile;
    alignas(64) uint16_t buffer[2][kMaxRows / 32 * 2 * kTile];  // 32 columns are multiplied, the next 32 prepared
    transpose_parts(h, rows, R, parts, left);
    TileScope tiles;
    for (int64_t step = 0; step < steps && factor.columns > 0; ++step) {
        interleave_rows(x, step * 32, rows, 0, factor.columns, buffer[0] + step * 2 * kTile);
    }
    for (int64_t c = 0; c < factor.columns; c += 32) {
        const uint16_t* right = buffer[c / 32 % 2];
        uint16_t* next = buffer[(c / 32 + 1) % 2];
        memory_is_read();
        for (int64_t r = 0; r < R; r += 32) {
            const bool two_ranks = R - r > 16;
            float* out = sums + c * R + r * 32;
            _tile_zero(2);
            _tile_zero(3);
            if (add) {
                _tile_loadd(0, out, 64);
                _tile_loadd(1, out + 256, 64);
                if (two_ranks) {
                    _tile_loadd(2, out + 512, 64);
                    _tile_loadd(3, out + 768, 64);
                }
            } else {
                _tile_zero(0);
                _tile_zero(1);
            }
            // Four products in a row have different sums, for each waits for the one before it with the same sum.
            for (int64_t step = 0; step < steps; ++step) {
                if (r == 0 && c + 32 < factor.columns) {
                    interleave_rows(x, step * 32, rows, c + 32, factor.columns, next + step * 2 * kTile);
                }
                const uint16_t* l = left + (r / 16 * steps + step) * kTile;
                _tile_loadd(6, right + step * 2 * kTile, 64);
                _tile_loadd(7, right + (step * 2 + 1) * kTile, 64);
                if (two_ranks) {
                    for (int64_t part = 0; part < parts; ++part) {
                        _tile_loadd(4, l + part * part_size, 64);
                        _tile_loadd(5, l + part * part_size + steps * kTile, 64);
                        _tile_dpbf16ps(0, 4, 6);
                        _tile_dpbf16ps(1, 4, 7);
                        _tile_dpbf16ps(2, 5, 6);
                        _tile_dpbf16ps(3, 5, 7);
                    }
                    continue;
                }
                _tile_loadd(4, l, 64);
                _tile_loadd(5, l + part_size, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
                if (parts == 3) {
                    _tile_loadd(4, l + 2 * part_size, 64);
                    _tile_dpbf16ps(2, 4, 6);
                    _tile_dpbf16ps(3, 4, 7);
                }
            }
            _tile_stored(0, out, 64);
            _tile_stored(1, out + 256, 64);
            if (two_ranks) {
                _tile_stored(2, out + 512, 64);
                _tile_stored(3, out + 768, 64);
            } else {
                alignas(64) float of_parts[512];
                _tile_stored(2, of_parts, 64);
                _tile_stored(3, of_parts + 256, 64);
                accumulate(of_parts, 512, out);
            }
        }
    }
}

// gradient.matrix = the sums of outer_tiles.
template <typename T>
static void unpack_tiles(const float* sums, const Factor& gradient) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int64_t c = 0; c < gradient.columns; c += 32) {
        const int64_t columns = smaller(32, gradient.columns - c);
        for (int64_t r = 0; r < padded_rank(gradient); r += 16, sums += 512) {
            const int64_t ranks = smaller(16, gradient.rank - r);
            alignas(64) float patch[16][32];
            for (int64_t i = 0; i < 16; ++i) {
                const __m512 even = _mm512_load_ps(sums + i * 16), odd = _mm512_load_ps(sums + 256 + i * 16);
                _mm512_store_ps(patch[i], _mm512_permutex2var_ps(even, low, odd));
                _mm512_store_ps(patch[i] + 16, _mm512_permutex2var_ps(even, high, odd));
            }
            if (gradient.ranks_are_rows) {
                for (int64_t i = 0; i < ranks; ++i) {
                    T* to = row<T>(gradient.matrix, r + i) + c;
                    store_some(to, load16(patch[i]), columns);
                    if (columns > 16) store_some(to + 16, load16(patch[i] + 16), columns - 16);
                }
            } else {
                for (int64_t j = 0; j < columns; ++j) {
                    f32x16 lanes;
                    for (int i = 0; i < 16; ++i) lanes[i] = patch[i][j];
                    store_some(row<T>(gradient.matrix, c + j) + r, lanes, ranks);
                }
            }
        }
    }
}
