// linear.h for one instruction set. Both operands become tiles of tile_mm.inc.h: all of A once per call, B block by block
// by whoever multiplies with it. A few rows meet B as in decoding, strip by strip where it lies.

constexpr int64_t kFewRows = 32;       // for which packing B costs more than it saves
constexpr int64_t kRowBlock = 768;     // rows of C at most that share a packed block of B
constexpr int64_t kColumnBlock = 64;   // columns of C
constexpr int64_t kPieceTiles = 8;     // of the depth at a time: two columns of them stay in the first-level cache
constexpr int64_t kSerialWork = 1 << 21;  // products of about 20 microseconds

// KT operands from element `from` of row `row` on, `count` of which exist, as 32-bit words; zeros behind.
RLHF_INLINE u32x16 load_words(const Matrix& m, int64_t row, int64_t from, int64_t count) {
    const int64_t at = row * m.stride + from;
    u32x16 words = {};
#if RLHF_TILE_BF16
    const uint16_t* p = static_cast<const uint16_t*>(m.data) + at;
    if (count >= KT) return load_words16(p);
    std::memcpy(&words, p, 2 * count);
    return words;
#else
    if (m.type == Type::float32) {
        const float* p = static_cast<const float*>(m.data) + at;
        if (count >= KT) return load_words16(p);
        std::memcpy(&words, p, 4 * count);
        return words;
    }
    uint16_t some[16] = {};
    const uint16_t* p = static_cast<const uint16_t*>(m.data) + at;
    if (count < 16) {
        std::memcpy(some, p, 2 * count);
        p = some;
    }
    return as_words(m.type == Type::bfloat16 ? load16_bf16(p) : load16_f16(p));
#endif
}

// A tile of sixteen items (rows of A, columns of B) from `item` on and KT of the depth from `k` on. Words of it are rows
// of an item in an A tile and rows of the depth in a B tile; in memory an item is a row of m, or a column if `turned`.
template <bool AS_A>
RLHF_INLINE void pack_tile(const Matrix& m, bool turned, int64_t item, int64_t items, int64_t k, int64_t depth,
                           Element* tile) {
    if (item >= items) {
        std::memset(tile, 0, 1024);
        return;
    }
    u32x16 words[16] = {};
    if (!turned) {
        for (int64_t i = 0; i < 16 && item + i < items; ++i) words[i] = load_words(m, item + i, k, depth - k);
    } else {
        for (int64_t j = 0; j < 16; ++j) {
#if RLHF_TILE_BF16
            u16x16 pair[2] = {};
            for (int64_t side = 0; side < 2 && k + 2 * j + side < depth; ++side) {
                const uint16_t* from = static_cast<const uint16_t*>(m.data) + (k + 2 * j + side) * m.stride + item;
                std::memcpy(&pair[side], from, 2 * (items - item < 16 ? items - item : 16));
            }
            words[j] = widen(pair[0]) | (widen(pair[1]) << 16);
#else
            if (k + j < depth) words[j] = load_words(m, k + j, item, items - item);
#endif
        }
    }
    uint32_t* out = reinterpret_cast<uint32_t*>(tile);
    if (AS_A == turned) {
        transpose16(words, out, 16);
    } else {
        for (int64_t i = 0; i < 16; ++i) store_words16(out + 16 * i, words[i]);
    }
}

// Sixteen sums, `count` of which exist, plus bias, rounded into C.
RLHF_INLINE void store_sums(const Product& p, int64_t row, int64_t column, int64_t count, f32x16 sums) {
    if (p.bias) {
        const Matrix bias{p.bias, 0, p.c.type};
#if RLHF_TILE_BF16
        u16x16 some = {};
        std::memcpy(&some, static_cast<const uint16_t*>(p.bias) + column, 2 * (count < 16 ? count : 16));
        (void)bias;
        sums += as_float(widen(some) << 16);
#else
        sums += as_float(load_words(bias, 0, column, count));
#endif
    }
    const int64_t size = p.c.type == Type::float32 ? 4 : 2;
    char* to = static_cast<char*>(const_cast<void*>(p.c.data)) + (row * p.c.stride + column) * size;
    if (p.c.type == Type::float32) {
        if (count >= 16) store16(reinterpret_cast<float*>(to), sums);
        else std::memcpy(to, &sums, 4 * count);
        return;
    }
    const u16x16 narrow = p.c.type == Type::bfloat16 ? to_bf16(sums) : to_f16(sums);
    if (count >= 16) std::memcpy(to, &narrow, sizeof narrow);
    else std::memcpy(to, &narrow, 2 * count);
}

// ---- many rows ------------------------------------------------------------------------------------------------------

// What one thread multiplies with: a block of B [kColumnBlock / 16][kPieceTiles] tiles, and sums [rows / 32][columns /
// 32][4 tiles].
struct BlockMemory {
    Element* b;
    float* sums;
};

// C of rows [row, row_end) and kColumnBlock columns from `column` on. tiles: A [rows / 16][depth tiles].
static void multiply_block(const Product& p, const Element* tiles, int64_t row, int64_t row_end, int64_t column,
                           const BlockMemory& mine) {
    const int64_t depth = ceil_div(p.depth, KT), column_end = column + kColumnBlock;
    const int64_t pairs = ceil_div((p.columns < column_end ? p.columns : column_end) - column, 32);
    for (int64_t t = 0; t == 0 || t < depth; t += kPieceTiles) {  // without depth the sums are zeros
        const int64_t some = depth - t < kPieceTiles ? depth - t : kPieceTiles;
        for (int64_t c = 0; c < 2 * pairs; ++c) {
            for (int64_t i = 0; i < some; ++i) {
                pack_tile<false>(p.b, !p.b_turned, column + 16 * c, p.columns, (t + i) * KT, p.depth,
                                 mine.b + (c * kPieceTiles + i) * kTileElements);
            }
        }
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const Element* b = mine.b + 2 * pair * kPieceTiles * kTileElements;
            for (int64_t r = row; r < row_end; r += 32) {
                const Element* a = tiles + (r / 16 * depth + t) * kTileElements;
                multiply_2x2(a, a + depth * kTileElements, b, b + kPieceTiles * kTileElements, some,
                             mine.sums + ((r - row) / 32 * pairs + pair) * 4 * kTileFloats, t > 0);
            }
        }
    }
    for (int64_t r = row; r < row_end && r < p.rows; ++r) {
        for (int64_t c = column; c < column + 32 * pairs && c < p.columns; c += 16) {
            const int64_t in_row = (r - row) % 32, in_column = (c - column) % 32;
            const float* tile = mine.sums + ((r - row) / 32 * pairs + (c - column) / 32) * 4 * kTileFloats +
                                (in_row / 16 * 2 + in_column / 16) * kTileFloats;
            store_sums(p, r, c, p.columns - c, load16(tile + in_row % 16 * 16));
        }
    }
}

static void multiply_many(const Product& p) {
    const int64_t depth = ceil_div(p.depth, KT), padded = round_up(p.rows, 32);
    const int64_t block = round_up(ceil_div(padded, ceil_div(padded, kRowBlock)), 32), row_blocks = ceil_div(padded, block);
    const int64_t items = row_blocks * ceil_div(p.columns, kColumnBlock);
    const int threads = p.rows * p.columns * p.depth < kSerialWork ? 1 : p.threads;
    Memory memory;
    Element* tiles = memory.take<Element>(padded / 16 * depth * kTileElements);
    Element* b = memory.take<Element>(threads * (kColumnBlock / 16) * kPieceTiles * kTileElements);
    float* sums = memory.take<float>(threads * block * kColumnBlock);
    const auto work = [&](Member& me) {
        const TileScope scope;
        const BlockMemory mine{b + me.thread * (kColumnBlock / 16) * kPieceTiles * kTileElements,
                               sums + me.thread * block * kColumnBlock};
        steal(me, padded / 16, [&](int64_t i) {
            for (int64_t t = 0; t < depth; ++t) {
                pack_tile<true>(p.a, p.a_turned, i * 16, p.rows, t * KT, p.depth, tiles + (i * depth + t) * kTileElements);
            }
        });
        steal(me, items, [&](int64_t i) {
            const int64_t row = i % row_blocks * block, end = row + block < padded ? row + block : padded;
            multiply_block(p, tiles, row, end, i / row_blocks * kColumnBlock, mine);
        });
    };
    run_together(threads, work);
}

// ---- a few rows -----------------------------------------------------------------------------------------------------

// Strip `number` of W times all rows. scratch: kStrip rows of W, the depth in whole tiles.
static void multiply_strip(const Product& p, const Element* columns, int64_t number, Stored* scratch) {
    const int64_t depth = ceil_div(p.depth, KT);
    const bool as_stored = (p.b.type == Type::bfloat16) == (RLHF_STORED_BF16 != 0) && p.b.type != Type::float16;
    Strip strip{scratch, depth * KT, number * kStrip, p.columns - number * kStrip};
    if (strip.count > kStrip) strip.count = kStrip;
    if (as_stored) {
        strip = strip_of(p.b.data, p.b.stride, p.columns, p.depth, number, scratch);
    } else {
        for (int64_t v = 0; v < kStrip; ++v) {
            for (int64_t t = 0; t < depth; ++t) {
                u32x16 words = {};
                if (v < strip.count) words = load_words(p.b, strip.first + v, t * KT, p.depth - t * KT);
                store_words16(scratch + v * depth * KT + t * KT, words);
            }
        }
    }
    alignas(64) float sums[2 * kStrip * 16], turned[16 * 16];
    const int64_t halves = ceil_div(p.rows, 16);
    for (int64_t half = 0; half < halves; half += 2) {
        const int64_t sides = half + 1 < halves ? 2 : 1;
        (sides == 2 ? strip_products<2> : strip_products<1>)(strip.w, strip.stride, columns + half * depth * kTileElements,
                                                             depth, sums);
        for (int64_t side = 0; side < sides; ++side) {
            for (int64_t c = 0; c < strip.count; c += 16) {
                u32x16 lanes[16];
                for (int64_t i = 0; i < 16; ++i) lanes[i] = load_words16(sums + (side * kStrip + c + i) * 16);
                transpose16(lanes, reinterpret_cast<uint32_t*>(turned), 16);
                for (int64_t i = 0; i < 16 && (half + side) * 16 + i < p.rows; ++i) {
                    store_sums(p, (half + side) * 16 + i, strip.first + c, strip.count - c, load16(turned + i * 16));
                }
            }
        }
    }
}

static void multiply_few(const Product& p) {
    const int64_t depth = ceil_div(p.depth, KT), halves = ceil_div(p.rows, 16), strips = ceil_div(p.columns, kStrip);
    const int threads = halves * 16 * p.columns * p.depth < kSerialWork ? 1 : p.threads;
    Memory memory;
    Element* columns = memory.take<Element>(halves * depth * kTileElements);
    Stored* scratch = memory.take<Stored>(threads * kStrip * depth * KT);
    const auto work = [&](Member& me) {
        const TileScope scope;
        steal(me, halves * depth, [&](int64_t i) {
            pack_tile<false>(p.a, p.a_turned, i / depth * 16, p.rows, i % depth * KT, p.depth, columns + i * kTileElements);
        });
        steal(me, strips, [&](int64_t i) { multiply_strip(p, columns, i, scratch + me.thread * kStrip * depth * KT); });
    };
    run_together(threads, work);
}

static void run_multiply(const Product& p) {
    if (p.rows <= kFewRows && p.b_turned) multiply_few(p);
    else multiply_many(p);
}
