// linear.h for one instruction set. Lanes are packed as columns of tiles of tile_mm.inc.h, sixteen to a column; strips of
// the other side meet them as in decoding, where they lie or from a copy in scratch. The depth is taken in pieces so short
// that a column of one stays in the first-level cache, and a strip meets so many columns at a time as stay in the second.

constexpr int64_t kPieceTiles = 16;       // of the depth: a column of them is 16 KiB
static_assert(kPieceTiles % kSumTiles == 0, "pieces end where sums do");
constexpr int64_t kColumns = kLinearColumns, kPackedTiles = kLinearTiles;
constexpr int64_t kPieceStride = kPieceTiles * KT + KT;  // of a strip in scratch: rows a whole page apart share a cache line
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
    const uint16_t* p = static_cast<const uint16_t*>(m.data) + at;
    const auto widened = [&](const uint16_t* from) __attribute__((always_inline)) {
        return as_words(m.type == Type::bfloat16 ? load16_bf16(from) : load16_f16(from));
    };
    if (count >= 16) return widened(p);
    uint16_t some[16] = {};
    std::memcpy(some, p, 2 * count);
    return widened(some);
#endif
}

// Sixteen items from `item` on and KT of the depth from `k` on, zeros where there are none: words [item][word of the depth]
// or, if `across`, [word of the depth][item], `stride` words apart.
RLHF_INLINE void pack_tile(const Matrix& m, bool turned, int64_t item, int64_t items, int64_t k, int64_t depth,
                           bool across, Element* tile, int64_t stride) {
    uint32_t* out = reinterpret_cast<uint32_t*>(tile);
    const auto word = [&](int64_t i) __attribute__((always_inline)) -> u32x16 {
        if (!turned) return item + i < items ? load_words(m, item + i, k, depth - k) : u32x16{};
        if (item >= items) return u32x16{};
#if RLHF_TILE_BF16
        u16x16 pair[2] = {};
        for (int64_t side = 0; side < 2 && k + 2 * i + side < depth; ++side) {
            const uint16_t* from = static_cast<const uint16_t*>(m.data) + (k + 2 * i + side) * m.stride + item;
            std::memcpy(&pair[side], from, 2 * (items - item < 16 ? items - item : 16));
        }
        return widen(pair[0]) | (widen(pair[1]) << 16);
#else
        return k + i < depth ? load_words(m, k + i, item, items - item) : u32x16{};
#endif
    };
    if (across == turned) {
        for (int64_t i = 0; i < 16; ++i) store_words16(out + stride * i, word(i));
        return;
    }
    u32x16 words[16];
    for (int64_t i = 0; i < 16; ++i) words[i] = word(i);
    transpose16(words, out, stride);
}

// Sixteen sums, `count` of which exist, plus bias, rounded into a row of what lies in memory as C.
RLHF_INLINE void store_sums(const Product& p, int64_t row, int64_t column, int64_t count, f32x16 sums) {
    if (p.bias) {
#if RLHF_TILE_BF16
        u16x16 some = {};
        std::memcpy(&some, static_cast<const uint16_t*>(p.bias) + column, 2 * (count < 16 ? count : 16));
        sums += as_float(widen(some) << 16);
#else
        sums += as_float(load_words({p.bias, 0, p.c.type}, 0, column, count));
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

// A piece of a strip as floats: `count` elements, a multiple of 16, of each of its rows. Whole rows are converted one after
// another, and the next strip comes into the second-level cache meanwhile.
#if RLHF_STORED_BF16 && !RLHF_TILE_BF16
static void widen_strip(const uint16_t* from, int64_t stride, int64_t count, float* to) {
    for (int64_t v = 0; v < kStrip; ++v) {
        for (int64_t k = 0; k < count; k += 16) {
            if (k % 32 == 0) prefetch_rows(from + kStrip * stride + k, stride, 1);
            store16(to + k, load16_bf16(from + k));
        }
        from += stride;
        to += kPieceStride;
    }
}
#endif

// Strip `number` times `columns` columns of tiles; the first of their lanes is `lane`. scratch: kStrip rows of a piece;
// sums [columns][kStrip][16].
static void multiply_strip(const Product& p, int64_t number, const Element* tiles, int64_t lane, int64_t columns,
                           Element* scratch, float* sums) {
    const int64_t depth = ceil_div(p.depth, KT), first = number * kStrip;
    const int64_t rows = p.n_strip_rows - first < kStrip ? p.n_strip_rows - first : kStrip;
    const bool as_stored = p.strips.type == (RLHF_STORED_BF16 ? Type::bfloat16 : Type::float32);
    const bool whole = as_stored && !p.strips_turned && rows == kStrip && p.depth % KT == 0;
    // A copy is worth its cost where numbers are converted for more than one column.
    const bool in_place = whole && (sizeof(Stored) == sizeof(Element) || columns == 1);
    for (int64_t t = 0; t == 0 || t < depth; t += kPieceTiles) {  // without depth the sums are zeros
        const int64_t some = depth - t < kPieceTiles ? depth - t : kPieceTiles;
        const auto multiply = [&](const auto* w, int64_t stride) __attribute__((always_inline)) {
            using Weight = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
            int64_t c = 0;
            for (; c + 2 <= columns; c += 2) {
                strip_products<2, Weight>(w, stride, rows, tiles + (c * depth + t) * kTileElements, depth * kTileElements,
                                          some, sums + c * kStrip * 16, t > 0);
            }
            if (c == columns) return;
            strip_products<1, Weight>(w, stride, rows, tiles + (c * depth + t) * kTileElements, depth * kTileElements,
                                      some, sums + c * kStrip * 16, t > 0);
        };
        const Stored* stored = static_cast<const Stored*>(p.strips.data) + first * p.strips.stride + t * KT;
        if (in_place) {
            multiply(stored, p.strips.stride);
            continue;
        }
#if RLHF_STORED_BF16 && !RLHF_TILE_BF16
        if (whole) {
            widen_strip(stored, p.strips.stride, some * KT, scratch);
            multiply(static_cast<const Element*>(scratch), kPieceStride);
            continue;
        }
#endif
        for (int64_t i = 0; i < some; ++i) {
            for (int64_t v = 0; v < kStrip; v += 16) {
                pack_tile(p.strips, p.strips_turned, first + v, p.n_strip_rows, (t + i) * KT, p.depth, false,
                          scratch + v * kPieceStride + i * KT, kPieceStride * sizeof(Element) / 4);
            }
        }
        multiply(static_cast<const Element*>(scratch), kPieceStride);
    }
    if (!p.c_turned) {
        for (int64_t v = 0; v < rows; ++v) {
            for (int64_t c = 0; c < columns; ++c) {
                store_sums(p, first + v, lane + c * 16, p.n_lanes - lane - c * 16, load16(sums + (c * kStrip + v) * 16));
            }
        }
        return;
    }
    alignas(64) float turned[16 * 16];
    for (int64_t c = 0; c < columns; ++c) {
        for (int64_t v = 0; v < rows; v += 16) {
            u32x16 lanes[16];
            for (int64_t i = 0; i < 16; ++i) lanes[i] = load_words16(sums + (c * kStrip + v + i) * 16);
            transpose16(lanes, reinterpret_cast<uint32_t*>(turned), 16);
            for (int64_t i = 0; i < 16 && lane + c * 16 + i < p.n_lanes; ++i) {
                store_sums(p, lane + c * 16 + i, first + v, p.n_strip_rows - first - v, load16(turned + i * 16));
            }
        }
    }
}

// Columns [from, from + count) of the lanes as tiles [count][depth tiles].
static void pack_columns(const Product& p, int64_t from, int64_t count, Element* tiles, Member& me) {
    const int64_t depth = ceil_div(p.depth, KT), pieces = ceil_div(depth, kPieceTiles);
    const int64_t across = p.lanes_turned ? kColumns : 1;  // a thread takes what lies side by side in memory
    steal(me, ceil_div(count, across) * pieces, [&](int64_t i) {
        const int64_t c = i / pieces * across, t = i % pieces * kPieceTiles;
        for (int64_t k = t; k < t + kPieceTiles && k < depth; ++k) {
            for (int64_t j = c; j < c + across && j < count; ++j) {
                pack_tile(p.lanes, p.lanes_turned, (from + j) * 16, p.n_lanes, k * KT, p.depth, true,
                          tiles + (j * depth + k) * kTileElements, 16);
            }
        }
    });
}

static void run_pack(const Product& p, void* packed) {
    const int threads = p.n_lanes * p.depth < kSerialWork / 16 ? 1 : p.threads;
    const auto work = [&](Member& me) {
        pack_columns(p, 0, ceil_div(p.n_lanes, 16), static_cast<Element*>(packed), me);
    };
    run_together(threads, work);
}

static void run_multiply(const Product& p) {
    const int64_t depth = ceil_div(p.depth, KT), columns = ceil_div(p.n_lanes, 16), strips = ceil_div(p.n_strip_rows, kStrip);
    const int64_t fitting = depth == 0 ? columns : round_up(ceil_div(kPackedTiles, depth), kColumns);
    const int64_t at_once = p.packed || fitting > columns ? columns : fitting;
    const int threads = p.n_strip_rows * columns * 16 * p.depth < kSerialWork ? 1 : p.threads;
    Memory memory;
    Element* packed = p.packed ? nullptr : memory.take<Element>(at_once * depth * kTileElements);
    Element* scratch = memory.take<Element>(threads * kStrip * kPieceStride);
    float* sums = memory.take<float>(threads * kColumns * kStrip * 16);
    const auto work = [&](Member& me) {
        const TileScope scope;
        for (int64_t from = 0; from < columns; from += at_once) {
            const int64_t some = columns - from < at_once ? columns - from : at_once;
            if (!p.packed) pack_columns(p, from, some, packed, me);
            const Element* tiles = p.packed ? static_cast<const Element*>(p.packed) : packed;
            steal(me, strips * ceil_div(some, kColumns), [&](int64_t i) {
                const int64_t c = i / strips * kColumns, count = some - c < kColumns ? some - c : kColumns;
                multiply_strip(p, i % strips, tiles + c * depth * kTileElements, (from + c) * 16, count,
                               scratch + me.thread * kStrip * kPieceStride, sums + me.thread * kColumns * kStrip * 16);
            });
        }
    };
    run_together(threads, work);
}
