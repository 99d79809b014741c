// The sweeps of head.h for one instruction set. The vocabulary is cut into blocks of kBlock rows of W, the active rows into
// panels of kPanel. A thread takes a panel through a block: logits from rows of W where they lie, row statistics, and,
// where wanted, the product of the block's probabilities (or gradients) with the same rows, packed once for all threads.
//
// Logits of a panel lie as [v][16 rows n]: a lane is a row of the batch, so every reduction over the vocabulary is a
// vertical one. Exponentials are taken relative to a running power of two of the row, which moves only when a maximum
// exceeds it by more than e^kSlack; then what was summed so far is rescaled. Sums over a block are made first and then
// added, which keeps the rounding of a sum over 10^5 terms near that of 10^3. Rescaling by a power of two is exact: a row's
// log-prob has the same bits wherever its maxima were met, here or in `head_sample`.

constexpr int64_t kPanel = kHeadPanel;
constexpr int64_t kBlock = kHeadBlock;
constexpr int64_t kMaxGroup = 8;  // panels that a thread takes through a block together
constexpr int64_t kDepthTiles = 16;  // a strip of them, 32 KiB, stays in the nearest caches for all panels
constexpr float kSlack = 8.0f;
constexpr float kLowest = -3.402823466e38f;
constexpr float kLn2 = 0.693147180559945f;
constexpr float kFar = 1 << 20;  // logits beyond it, from `base`, leave too few bits to take whole powers of two off
constexpr float kGone = -160.0f;  // a power of two that is 0
constexpr float kVeryLow = -1e30f;  // stands in for log 0 where it is multiplied by 0

struct Sizes {
    int64_t H, padded_H, depth_H, V;
    int64_t shared;  // columns that meet W alone: a run's sum over the depth goes on from them as it would over all at once
    int64_t widest;  // columns of the widest row, padded
    explicit Sizes(const Head& head, const Batch& batch)
        : H(head.H), padded_H(round_up(H, 32)), depth_H(padded_H / KT), V(head.V), shared(padded_H), widest(padded_H) {
        for (int64_t i = 0; i < batch.n_runs; ++i) {
            if (batch.runs[i].extra == 0) continue;
            shared = H - H % (kSumTiles * KT);
            if (padded(batch.runs[i]) > widest) widest = padded(batch.runs[i]);
        }
    }
    int64_t padded(const HeadRun& run) const { return round_up(H + run.extra, 32); }
    int64_t tail(const HeadRun& run) const { return padded(run) - shared; }  // columns that rows of the run meet besides
    // From one row of W's tail to the next: the run's columns may be read as whole tiles, too.
    int64_t tail_stride(const HeadRun& run) const { return H - shared + round_up(run.extra, 32) + 32; }
};

// Rows of a run that go through the vocabulary together; no two runs share a panel.
struct Panel {
    int64_t first, end;  // rows of the batch
    int64_t run, start;  // the run, and its first row
    int64_t columns;     // where its hidden states are, in tiles: two halves of the depth of its run
    int64_t sums;        // where its sums are, in tiles: four for each 32 columns of W and then of its run
};

struct Panels {
    const Panel* all;
    int64_t count, column_tiles, sum_tiles;
    Panels(const Batch& batch, const Sizes& sizes, Memory& memory) : count(0), column_tiles(0), sum_tiles(0) {
        int64_t most = batch.n_runs;
        most += ceil_div(batch.n, kPanel);
        Panel* to = memory.take<Panel>(most);
        for (int64_t i = 0, start = 0; i < batch.n_runs; start = batch.runs[i++].end) {
            const HeadRun& run = batch.runs[i];
            for (int64_t first = start; first < run.end; first += kPanel) {
                to[count++] = {first, first + kPanel < run.end ? first + kPanel : run.end, i, start, column_tiles, sum_tiles};
                column_tiles += 2 * sizes.padded(run) / KT;
                sum_tiles += 4 * (sizes.padded_H / 32 + ceil_div(run.extra, 32));
            }
        }
        all = to;
    }
};

// --- packing ---------------------------------------------------------------------------------------------------------

[[maybe_unused]] static void fetch(const Matrix& m, int64_t row, int64_t count, uint16_t* out) {  // m is bf16
    if (count > 0) std::memcpy(out, static_cast<const uint16_t*>(m.data) + row * m.stride, count * 2);  // else null
}

[[maybe_unused]] static void fetch(const Matrix& m, int64_t row, int64_t count, float* out) {
    if (m.type == Type::float32) {
        if (count > 0) std::memcpy(out, static_cast<const float*>(m.data) + row * m.stride, count * 4);
        return;
    }
    const uint16_t* from = static_cast<const uint16_t*>(m.data) + row * m.stride;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) store16(out + i, load16_bf16(from + i));
    for (; i < count; ++i) {
        const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
        std::memcpy(out + i, &bits, 4);
    }
}

// The columns of m from `column` on.
RLHF_INLINE Matrix from_column(const Matrix& m, int64_t column) {
    return {static_cast<const char*>(m.data) + column * (m.type == Type::float32 ? 4 : 2), m.stride, m.type};
}

// Row `row` of m widened by row `extra_row` of `extra`, then zeros up to `padded`.
template <typename Out>
static void fetch_wide(const Matrix& m, int64_t row, int64_t H, const Matrix& extra, int64_t extra_row, int64_t count,
                       int64_t padded, Out* out) {
    fetch(m, row, H, out);
    if (count > 0) fetch(extra, extra_row, count, out + H);
    std::memset(out + H + count, 0, (padded - H - count) * sizeof(Out));
}

// Sixteen numbers rounded to bf16, the first `count` of them to `to`; what they are then.
template <typename Out>
RLHF_INLINE f32x16 put_rounded(f32x16 x, int64_t count, Out* to) {
    const u16x16 rounded = to_bf16(x);
    const f32x16 wide = load16_bf16(rounded.lane);
    alignas(64) Out out[16];
    if constexpr (sizeof(Out) == 2) std::memcpy(out, rounded.lane, sizeof out);
    else store16(out, wide);
    if (count >= 16) std::memcpy(to, out, sizeof out);  // no call
    else std::memcpy(to, out, count * sizeof(Out));
    return wide;
}

// Row v of a run's own columns beside W.
template <typename Out>
static void fetch_own(const HeadRun& run, int64_t v, Out* out) {
    const int64_t r = run.rank;
    if (run.extra == r) return fetch(run.weight, v, r, out);
    for (int64_t i = 0; i < r; i += 16, out += 16) {
        const int64_t count = r - i;
        f32x16 x;
        if (count >= 16 && run.weight.type == Type::float32) {
            x = load16(static_cast<const float*>(run.weight.data) + v * run.weight.stride + i);
        } else {
            alignas(64) float some[16] = {};
            fetch(from_column(run.weight, i), v, count < 16 ? count : 16, some);
            x = load16(some);
        }
        const f32x16 high = put_rounded(x, count, out);
        put_rounded(high, count, out + r);
        if (run.extra > 2 * r) put_rounded(x - high, count, out + 2 * r);
    }
}

// Row v of W as a run meets it after the columns that all meet: the rest of it, the run's own, and zeros up to `padded`.
template <typename Out>
static void fetch_tail(const Head& head, const Sizes& sizes, const HeadRun& run, int64_t v, int64_t padded, Out* out) {
    const int64_t rest = sizes.H - sizes.shared, done = rest + run.extra;
    if (rest > 0) fetch(from_column(head.weight, sizes.shared), v, rest, out);
    if (run.extra > 0) fetch_own(run, v, out + rest);
    if (padded > done) std::memset(out + done, 0, (padded - done) * sizeof(Out));
}

// Two rows `k`, `k + 1` (k even) of a B operand whose columns are `width`; tiles along k are `depth` for each 16 columns.
RLHF_INLINE void put_b(const Element* even, const Element* odd, int64_t k, int64_t width, int64_t depth,
                       Element* tiles) {
    for (int64_t c = 0; c < width; c += 16) {
        Element* tile = tiles + ((c / 16) * depth + k / KT) * kTileElements;
#if RLHF_TILE_BF16
        u16x16 low, high;
        std::memcpy(&low, even + c, 32);
        std::memcpy(&high, odd + c, 32);
        store_words16(tile + (k % KT / 2) * 32, widen(low) | (widen(high) << 16));
#else
        std::memcpy(tile + (k % KT) * 16, even + c, 64);
        std::memcpy(tile + (k % KT + 1) * 16, odd + c, 64);
#endif
    }
}

// Rows of W for the products with hidden: where they lie if they are whole tiles of operands, else a copy with zeros around
// it. Two blocks have copies at a time; where W is read in place only its last strip may be ragged and have one.
struct Rows {
    const Matrix& weight;
    bool in_place;
    int64_t V, stride;  // of a copy: rows a whole page apart would share a cache line
    Element* copies;

    Rows(const Head& head, const Sizes& sizes, Memory& memory)
        : weight(head.weight), in_place(as_operands(head) && sizes.H == sizes.padded_H), V(head.V),
          stride(sizes.padded_H + KT) {
        copies = memory.take<Element>((in_place ? kStrip : 2 * kBlock) * stride);
    }
    static bool as_operands(const Head& head) { return (head.weight.type == Type::bfloat16) == (sizeof(Element) == 2); }
    bool copied(int64_t strip) const { return !in_place || strip + kStrip > V; }
    Element* copy(int64_t v) const {  // v: row of W
        return copies + (in_place ? v % kStrip : v / kBlock % 2 * kBlock + v % kBlock) * stride;
    }
    struct Some {
        const Element* w;
        int64_t stride;
    };
    Some strip(int64_t v) const {
        if (copied(v)) return {copy(v), stride};
        return {static_cast<const Element*>(weight.data) + v * weight.stride, weight.stride};
    }
};

// The rest of the rows of W as each run meets them: columns from `shared` on, then the run's own. Two blocks at a time.
struct Tails {
    const Head& head;
    const Batch& batch;
    const Sizes& sizes;
    Element* memory;
    Element* blocks;  // the runs' own columns as B operands; null: not wanted
    int64_t *at, *blocks_at;  // [n_runs] where a run's begin

    Tails(const Head& head, const Batch& batch, const Sizes& sizes, bool across, Memory& all)
        : head(head), batch(batch), sizes(sizes), blocks(nullptr) {
        at = all.take<int64_t>(2 * batch.n_runs);
        blocks_at = at + batch.n_runs;
        int64_t elements = 0, across_elements = 0;
        for (int64_t i = 0; i < batch.n_runs; ++i) {
            at[i] = elements;
            blocks_at[i] = across_elements;
            if (batch.runs[i].extra == 0) continue;
            elements += 2 * kBlock * sizes.tail_stride(batch.runs[i]);
            across_elements += 2 * kBlock * round_up(batch.runs[i].extra, 32);
        }
        memory = all.take<Element>(elements);
        if (across) blocks = all.take<Element>(across_elements);
    }
    Element* row(int64_t run, int64_t v) const {
        return memory + at[run] + (v / kBlock % 2 * kBlock + v % kBlock) * sizes.tail_stride(batch.runs[run]);
    }
    Rows::Some strip(int64_t run, const Rows& rows, int64_t v) const {
        if (batch.runs[run].extra > 0) return {row(run, v), sizes.tail_stride(batch.runs[run])};
        const Rows::Some base = rows.strip(v);
        return {base.w + sizes.shared, base.stride};
    }
    Element* block(int64_t run, int64_t v0) const {
        return blocks + blocks_at[run] + v0 / kBlock % 2 * kBlock * round_up(batch.runs[run].extra, 32);
    }
    // Rows [first, first + 32) of the block that starts at v0; rows from `count` on are zeros.
    void pack(int64_t v0, int64_t count, int64_t first) const {
        const int64_t depth_v = round_up(count, 32) / KT;
        for (int64_t i = 0; i < batch.n_runs; ++i) {
            const HeadRun& run = batch.runs[i];
            if (run.extra == 0) continue;
            const int64_t stride = sizes.tail_stride(run);
            for (int64_t v = first; v < first + kStrip; ++v) {
                if (v < count) {
                    fetch_tail(head, sizes, run, v0 + v, stride, row(i, v0 + v));
                } else {
                    std::memset(row(i, v0 + v), 0, stride * sizeof(Element));
                }
            }
            for (int64_t v = first; v < first + kStrip && blocks; v += 2) {
                const Element* even = row(i, v0 + v) + sizes.H - sizes.shared;
                put_b(even, even + stride, v, round_up(run.extra, 32), depth_v, block(i, v0));
            }
        }
    }
};

// Rows [first, first + 32) of the block that starts at v0; rows from `count` on are zeros.
static void pack_weight_strip(const Head& head, const Sizes& sizes, const Rows& rows, const Tails& tails, int64_t v0,
                              int64_t count, int64_t first, Element* as_b) {
    const int64_t depth_v = round_up(count, 32) / KT;
    tails.pack(v0, count, first);
    if (rows.copied(v0 + first)) {
        for (int64_t v = first; v < first + kStrip; ++v) {
            Element* row = rows.copy(v0 + first) + (v - first) * rows.stride;
            if (v < count) {
                fetch_wide(head.weight, v0 + v, head.H, head.weight, 0, 0, sizes.padded_H, row);
            } else {
                std::memset(row, 0, sizes.padded_H * sizeof(Element));
            }
        }
    }
    if (!as_b) return;
    const Rows::Some strip = rows.strip(v0 + first);
    for (int64_t v = 0; v < kStrip; v += 2) {
        const Element* even = strip.w + v * strip.stride;
        put_b(even, even + strip.stride, first + v, sizes.padded_H, depth_v, as_b);
    }
}

// `columns` columns of sixteen rows, `step` apart, as a B operand with the rows as columns.
static void pack_columns(const Element* rows, int64_t step, int64_t columns, Element* tiles) {
    for (int64_t t = 0; t < columns / KT; ++t) {
        u32x16 x[16];
        for (int i = 0; i < 16; ++i) x[i] = load_words16(rows + i * step + t * KT);
        transpose16(x, reinterpret_cast<uint32_t*>(tiles + t * kTileElements), 16);
    }
}

// Half of a panel of hidden as a B operand with the rows as columns: as many tiles as the panel's depth. scratch: sixteen
// rows of the widest.
static void pack_hidden_columns(const Batch& batch, const Matrix& hidden, bool widened, const Sizes& sizes,
                                const Panel& panel, int64_t half, Element* scratch, Element* columns) {
    const HeadRun& run = batch.runs[panel.run];
    const int64_t padded = sizes.padded(run);
    for (int64_t i = 0; i < 16; ++i) {
        const int64_t n = panel.first + half * 16 + i;
        Element* row = scratch + i * padded;
        if (n < panel.end) {
            fetch_wide(hidden, batch.rows[n], sizes.H, run.hidden, n - panel.start, widened ? run.extra : 0, padded, row);
        } else {
            std::memset(row, 0, padded * sizeof(Element));
        }
    }
    pack_columns(scratch, padded, padded, columns + (panel.columns + half * padded / KT) * kTileElements);
}

// Hidden states, and what their runs widen them by, as B operands [n][H] and [n of the run][extra]: sixteen columns of H
// are as many tiles as all panels have, columns of a run as many as its panels. Null where not wanted.
struct HiddenRows {
    const Batch& batch;
    const Sizes& sizes;
    const Panels& panels;
    Element *base, *extra;
    int64_t *at, *first, *depth;  // [n_runs] where a run's tiles begin, its first panel, and its tiles along n

    HiddenRows(const Batch& batch, const Sizes& sizes, const Panels& panels, bool wanted, Memory& memory)
        : batch(batch), sizes(sizes), panels(panels), base(nullptr), extra(nullptr) {
        at = memory.take<int64_t>(3 * batch.n_runs);
        first = at + batch.n_runs;
        depth = first + batch.n_runs;
        int64_t elements = 0;
        for (int64_t i = 0; i < batch.n_runs; ++i) at[i] = first[i] = depth[i] = 0;
        for (int64_t j = 0; j < panels.count; ++j) {
            const int64_t run = panels.all[j].run;
            if (depth[run] == 0) first[run] = j;
            depth[run] += kPanel / KT;
        }
        for (int64_t i = 0; i < batch.n_runs; ++i) {
            at[i] = elements;
            if (batch.runs[i].d_weight) elements += depth[i] * (round_up(batch.runs[i].extra, 32) / 16) * kTileElements;
        }
        if (wanted) base = memory.take<Element>(panels.count * kPanel * sizes.padded_H);
        if (elements > 0) extra = memory.take<Element>(elements);
    }
    bool any() const { return base || extra; }
    // Rows of half a panel, two at a time.
    void pack(int64_t j, int64_t half, Element* scratch) const {
        const Panel& panel = panels.all[j];
        const HeadRun& run = batch.runs[panel.run];
        const int64_t padded = sizes.padded_H + round_up(run.extra, 32), place = j - first[panel.run];
        for (int64_t i = half * 16; i < half * 16 + 16; i += 2) {
            for (int64_t k = 0; k < 2; ++k) {
                const int64_t n = panel.first + i + k;
                Element* row = scratch + k * padded;
                std::memset(row, 0, padded * sizeof(Element));
                if (n >= panel.end) continue;
                fetch(batch.hidden, batch.rows[n], sizes.H, row);
                if (run.extra > 0) fetch(run.hidden, n - panel.start, run.extra, row + sizes.padded_H);
            }
            const Element *even = scratch, *odd = scratch + padded;
            if (base) put_b(even, odd, j * kPanel + i, sizes.padded_H, panels.count * kPanel / KT, base);
            if (run.d_weight && extra) {
                put_b(even + sizes.padded_H, odd + sizes.padded_H, place * kPanel + i, round_up(run.extra, 32),
                      depth[panel.run], extra + at[panel.run]);
            }
        }
    }
};

// --- logits of a panel -----------------------------------------------------------------------------------------------

// Logits lie as [v / 32][2 halves of the panel][32 v][16 n].
RLHF_INLINE float* logit_row(float* logits, int64_t v, int64_t half) {
    return logits + ((v / kStrip) * 2 + half) * kStrip * 16 + (v % kStrip) * 16;
}

static_assert(kDepthTiles % kSumTiles == 0, "pieces end where sums do");

// Logits of `count` panels, `logits_step` apart, for rows [v0, v0 + padded_v) of W. The depth is taken in pieces, so
// that a strip of W stays in the nearest caches for all panels; the order of additions is that of one piece.
static void panel_products(const Rows& rows, const Tails& tails, int64_t v0, const Element* hidden, const Panel* panels,
                           int64_t count, int64_t padded_v, float* logits, int64_t logits_step) {
    const Sizes& sizes = tails.sizes;
    const int64_t shared = sizes.shared / KT;
    for (int64_t v = 0; v < padded_v; v += kStrip) {
        const Rows::Some strip = rows.strip(v0 + v);
        const auto products = [&](int64_t i, const Element* w, int64_t stride, int64_t k, int64_t depth)
                                  __attribute__((always_inline)) {
            const int64_t all = sizes.padded(tails.batch.runs[panels[i].run]) / KT;
            strip_products<2, Element>(w, stride, kStrip, hidden + (panels[i].columns + k) * kTileElements,
                                       all * kTileElements, depth, logit_row(logits + i * logits_step, v, 0), k > 0);
        };
        for (int64_t k = 0; k < shared; k += kDepthTiles) {
            const int64_t depth = shared - k < kDepthTiles ? shared - k : kDepthTiles;
            for (int64_t i = 0; i < count; ++i) products(i, strip.w + k * KT, strip.stride, k, depth);
        }
        for (int64_t i = 0; i < count; ++i) {
            const int64_t depth = sizes.tail(tails.batch.runs[panels[i].run]) / KT;
            if (depth == 0 && shared > 0) continue;  // without any depth the sums are zeros
            const Rows::Some tail = tails.strip(panels[i].run, rows, v0 + v);
            products(i, tail.w, tail.stride, shared, depth);
        }
    }
}

struct Lanes {
    f32x16 x[2];
    void load(const float* from, const Panel& panel, float otherwise) {
        for (int64_t i = 0; i < kPanel; ++i) {
            x[i / 16][i % 16] = from && panel.first + i < panel.end ? from[panel.first + i] : otherwise;
        }
    }
};

// y -> z in place, for `count` rows of W from v0 on.
static void transform(const Head& head, int64_t v0, int64_t count, const Lanes& inverse_temperature, float* logits) {
    const f32x16 per_cap = splat(head.softcap != 0.0f ? head.scale / head.softcap : 0.0f);
    for (int64_t half = 0; half < 2; ++half) {
        const f32x16 by = inverse_temperature.x[half], cap = by * head.softcap;
        for (int64_t v = 0; v < count; ++v) {
            float* at = logit_row(logits, v, half);
            f32x16 y = load16(at);
            if (head.bias) y = y + head.bias[v0 + v];
            if (head.softcap != 0.0f) {
                y = tanh16(y * per_cap) * cap;
            } else {
                y = y * head.scale * by;
            }
            store16(at, y);
        }
    }
}

RLHF_INLINE bool transforms(const Head& head, const Batch& batch) {
    if (head.bias || head.softcap != 0.0f || head.scale != 1.0f) return true;
    for (int64_t i = 0; i < batch.n; ++i) {
        if (batch.temperature[i] != 1.0f) return true;
    }
    return false;
}

// du of dz/dy beyond scale / T: 1 - tanh^2. `cap`: the very factor that made z of tanh, which a division takes back to its
// last digit; near a saturated cap nothing else is left of the slope.
RLHF_INLINE f32x16 cap_slope(f32x16 z, f32x16 cap) {
    const f32x16 c = z / cap;
    return splat(1.0f) - c * c;
}

// Collects KT values per lane and writes them as a tile of an A operand with the lanes as rows.
struct TileOut {
    u32x16 rows[16];
    __attribute__((always_inline)) void put(int64_t i, f32x16 even, f32x16 odd) {
#if RLHF_TILE_BF16
        rows[i / 2] = pair_bf16(even, odd);
#else
        rows[i] = as_words(even);
        rows[i + 1] = as_words(odd);
#endif
    }
    __attribute__((always_inline)) void write(Element* tile) const {
        transpose16(rows, reinterpret_cast<uint32_t*>(tile), 16);
    }
};

// Rows of W as a B operand: column c of tiles is at tiles + c * stride. From the head's packed copy of the whole of W, or
// packed per block; two blocks have memory at a time.
struct Columns {
    const Element* tiles;
    int64_t stride;
};

struct ColumnMemory {
    Element* blocks;
    const Element* packed;
    int64_t block_elements, depth_V;

    ColumnMemory(const Head& head, const Sizes& sizes, const Rows& rows, bool wanted, Memory& memory)
        : blocks(nullptr), packed(nullptr), block_elements(kBlock * sizes.padded_H), depth_V(ceil_div(head.V, KT)) {
        if (wanted && rows.in_place && head.V % kStrip == 0) packed = static_cast<const Element*>(head.packed);
        if (wanted && !packed) blocks = memory.take<Element>(2 * block_elements);
    }
    Element* to_pack(int64_t v0) const { return blocks ? blocks + v0 / kBlock % 2 * block_elements : nullptr; }
    Columns block(int64_t v0, int64_t depth_v) const {
        if (packed) return {packed + v0 / KT * kTileElements, depth_V * kTileElements};
        return {to_pack(v0), depth_v * kTileElements};
    }
};

// sums [columns / 32][4 tiles] (+)= p [2 halves][depth_v tiles] times rows of W as a B operand. fp32 operands are summed
// within the block first: in one running sum of 10^5 terms the many small ones would be lost against the few large ones.
// For bf16 operands that loss is far below their own rounding.
RLHF_INLINE void add_product_32(const Element* p, const Element* b, int64_t b_stride, int64_t depth_v, bool first,
                                float* to) {
    alignas(64) float block[4 * kTileFloats];
    const bool direct = first || RLHF_TILE_BF16;
    multiply_2x2(p, p + depth_v * kTileElements, b, b + b_stride, depth_v, direct ? to : block, direct && !first);
    if (direct) return;
    for (int64_t j = 0; j < 4 * kTileFloats; j += 16) store16(to + j, load16(to + j) + load16(block + j));
}

// The same for each panel, and with the columns of its run, too.
static void add_products(const Element* p, int64_t p_step, const Columns& columns, const Tails& tails, int64_t v0,
                         const Panel* panels, int64_t count, int64_t depth_v, float* sums) {
    const int64_t wide = tails.sizes.padded_H / 32;
    for (int64_t k = 0; k < wide; ++k) {
        const Element* b = columns.tiles + k * 2 * columns.stride;
        for (int64_t i = 0; i < count; ++i) {
            add_product_32(p + i * p_step, b, columns.stride, depth_v, v0 == 0,
                           sums + (panels[i].sums + k * 4) * kTileFloats);
        }
    }
    for (int64_t i = 0; i < count; ++i) {
        const int64_t own = ceil_div(tails.batch.runs[panels[i].run].extra, 32), stride = depth_v * kTileElements;
        for (int64_t k = 0; k < own; ++k) {
            add_product_32(p + i * p_step, tails.block(panels[i].run, v0) + k * 2 * stride, stride, depth_v, v0 == 0,
                           sums + (panels[i].sums + (wide + k) * 4) * kTileFloats);
        }
    }
}

// --- forward ---------------------------------------------------------------------------------------------------------

// What exponentials of sixteen rows are relative to: e(z) = e^(z - base) 2^-power. The base is 0, except where logits are
// beyond kFar.
struct alignas(64) Reference {
    f32x16 base, power;
    f32x16 value;  // a logit near base + power ln 2; lower than all where nothing was met
    f32x16 top;    // largest logit

    // Takes maxima in; where one is above by more than kSlack, moves there. The factor of what was summed, 1 where nothing
    // has moved.
    __attribute__((always_inline)) f32x16 meet(f32x16 maximum) {
        top = max16(maximum, top);
        const i32x16 moved = maximum > value + kSlack;
        if (!any_lane(moved)) return splat(1.0f);
        const float magic = 12582912.0f;
        const f32x16 above = maximum - base;
        const i32x16 far = moved & ((above > kFar) | (above < -kFar));
        base = select(far, maximum, base);
        const f32x16 near = muladd(above, splat(1.44269504088896341f), splat(magic)) - magic;
        const f32x16 next = select(far, splat(0.0f), select(moved, near, power));
        f32x16 change = max16(power - next, splat(kGone));
        change = select(change > 0.0f, splat(0.0f), change);  // up, from a start where nothing was summed
        power = next;
        value = select(moved, maximum, value);
        return select(far, splat(0.0f), times_power(splat(1.0f), change));
    }
};

RLHF_INLINE Reference no_reference() { return {splat(0.0f), splat(0.0f), splat(kLowest), splat(kLowest)}; }

struct Exponential {
    f32x16 base, power, least;
    __attribute__((always_inline)) explicit Exponential(const Reference& reference)
        : base(reference.base), power(reference.power), least((reference.power + kGone) * kLn2) {}
    __attribute__((always_inline)) f32x16 operator()(f32x16 z) const {
        return exp_by_parts(max16(least, z - base), power);  // NaN stays
    }
};

// log sum exp of a lane, from a sum relative to a reference. The largest logit's own exponential is taken out, so that its
// rounding cancels; in double, so that powers of two leave no trace.
static double log_sum_exp(const Reference& reference, float sum, int64_t lane) {
    const float largest = Exponential(reference)(reference.top)[lane];
    return reference.top[lane] + std::log(static_cast<double>(sum) / largest);
}

// What a panel carries from block to block.
struct alignas(64) PanelState {
    Reference reference[2], pair_reference[2];
    f32x16 sum[2], sum_z[2], sum_square[2], weighted[2], logit[2], best[2];
    i32x16 best_at[2];
    f32x16 pair_sum[2], pair_logit[2], difference[2];
    f32x16 centre[2];  // taken off every difference of a pair
};

static void reset(PanelState& s) {
    for (int h = 0; h < 2; ++h) {
        s.reference[h] = s.pair_reference[h] = no_reference();
        s.sum[h] = s.sum_z[h] = s.sum_square[h] = s.weighted[h] = s.logit[h] = splat(0.0f);
        s.best[h] = splat(-__builtin_inff());
        s.best_at[h] = i32x16{};
        s.pair_sum[h] = s.pair_logit[h] = s.difference[h] = s.centre[h] = splat(0.0f);
    }
}

static f32x16 block_maximum(float* logits, int64_t count, int64_t half) {
    f32x16 m0 = splat(kLowest), m1 = m0;
    int64_t v = 0;
    for (; v + 2 <= count; v += 2) {
        m0 = max16(load16(logit_row(logits, v, half)), m0);
        m1 = max16(load16(logit_row(logits, v + 1, half)), m1);
    }
    if (v < count) m0 = max16(load16(logit_row(logits, v, half)), m0);
    return max16(m0, m1);
}

// Where two sides lie far apart, sums of their differences would be large and cancel; from the maxima of the first block.
// 0 where they are near, as a policy and its reference are.
RLHF_INLINE f32x16 centre_of(f32x16 top, f32x16 pair_top) {
    const f32x16 apart = top - pair_top;
    const i32x16 far = (apart > kSlack) | (apart < -kSlack);
    return select(far & (top > kVeryLow) & (pair_top > kVeryLow), apart, splat(0.0f));
}

static void note_best(PanelState& s, float* logits, int64_t v0, int64_t count, int64_t half) {
    f32x16 best = s.best[half];
    i32x16 at = s.best_at[half];
    for (int64_t v = 0; v < count; ++v) {
        const f32x16 z = load16(logit_row(logits, v, half));
        const i32x16 better = z > best;
        best = select(better, z, best);
        at = select(better, i32x16{} + static_cast<int32_t>(v0 + v), at);
    }
    s.best[half] = best;
    s.best_at[half] = at;
}

struct Wanted {
    bool entropy, best, mean, square;
};

// Where in a block the target of each lane is; -1: not in it.
struct Targets {
    i32x16 at[2];
    bool any[2];
    Targets(const Batch& batch, const Panel& panel, int64_t v0, int64_t count) {
        for (int64_t half = 0; half < 2; ++half) {
            any[half] = false;
            for (int64_t i = 0; i < 16; ++i) {
                const int64_t n = panel.first + half * 16 + i, t = n < panel.end ? batch.target[n] - v0 : -1;
                const bool here = t >= 0 && t < count;
                at[half][i] = here ? static_cast<int32_t>(t) : -1;
                any[half] |= here;
            }
        }
    }
};

// exp-sums and moments of one half of a panel over a block; P (and Q = P times the difference of a pair) as A operands.
// The target's own place in them is 0: what it adds is known exactly and would be lost in the rounding of a large P.
template <bool kAhead, bool kPair, bool kCap>
static void block_sums(PanelState& s, float* logits, float* pair_logits, int64_t count, int64_t half,
                       const Wanted& wanted, const Targets& targets, f32x16 cap, Element* p,
                       Element* q) {
    const i32x16 target = targets.at[half];
    const bool any_target = targets.any[half];
    const Exponential exponential(s.reference[half]), pair_exponential(s.pair_reference[half]);
    const f32x16 reference = s.reference[half].value, centre = s.centre[half];
    f32x16 sum, weighted, sum_z, square, pair_sum, difference;
    const auto one = [&](int64_t v, f32x16& out, f32x16& pair_out) __attribute__((always_inline)) {
        if (v >= count) {
            out = pair_out = splat(0.0f);
            return;
        }
        const f32x16 z = load16(logit_row(logits, v, half));
        f32x16 e = exponential(z);
        sum += e;
        if (wanted.entropy) {
            const f32x16 d = z - reference;
            weighted = muladd(e, select(d < kVeryLow, splat(kVeryLow), d), weighted);
        }
        if (wanted.mean) sum_z += z;
        if (wanted.square) square = muladd(e, e, square);
        f32x16 gap = splat(0.0f);
        if (kPair) {
            const f32x16 zr = load16(logit_row(pair_logits, v, half));
            pair_sum += pair_exponential(zr);
            gap = select(e == 0.0f, splat(0.0f), (z - zr) - centre);
            difference = muladd(e, gap, difference);
        }
        if (kAhead) {
            if (kCap) e = e * cap_slope(z, cap);
            if (any_target) e = select(target == static_cast<int32_t>(v), splat(0.0f), e);
            out = e;
            if (kPair) pair_out = e * gap;
        }
    };
    f32x16 block[6];  // a block is the sum of its strips, which are sums of kStrip terms
    for (f32x16& x : block) x = splat(0.0f);
    for (int64_t strip = 0; strip < count; strip += kStrip) {
        sum = weighted = sum_z = square = pair_sum = difference = splat(0.0f);
        for (int64_t v0 = strip; v0 < strip + kStrip && v0 < count; v0 += KT) {
            TileOut p_tile, q_tile;
#pragma GCC unroll 4
            for (int64_t i = 0; i < KT; i += 2) {
                f32x16 even = splat(0.0f), odd = even, pair_even = even, pair_odd = even;
                one(v0 + i, even, pair_even);
                one(v0 + i + 1, odd, pair_odd);
                if (kAhead) p_tile.put(i, even, odd);
                if (kAhead && kPair) q_tile.put(i, pair_even, pair_odd);
            }
            if (kAhead) p_tile.write(p + (v0 / KT) * kTileElements);
            if (kAhead && kPair && q) q_tile.write(q + (v0 / KT) * kTileElements);
        }
        const f32x16 strips[6] = {sum, weighted, sum_z, square, pair_sum, difference};
        for (int i = 0; i < 6; ++i) block[i] += strips[i];
    }
    f32x16* const sums[6] = {s.sum, s.weighted, s.sum_z, s.sum_square, s.pair_sum, s.difference};
    for (int i = 0; i < 6; ++i) sums[i][half] += block[i];
}

// Rows of an accumulator panel [tiles / 4][half][2][16 n][16 k] times a factor per row.
static void rescale(float* sums, int64_t tiles, int64_t half, f32x16 factor) {
    for (int64_t k = 0; k < tiles / 4; ++k) {
        for (int64_t side = 0; side < 2; ++side) {
            float* tile = sums + (k * 4 + half * 2 + side) * kTileFloats;
            for (int n = 0; n < 16; ++n) store16(tile + n * 16, load16(tile + n * 16) * factor[n]);
        }
    }
}

RLHF_INLINE float sum_at(const float* sums, int64_t n, int64_t k) {
    return sums[((k / 32) * 4 + (n / 16) * 2 + (k % 32) / 16) * kTileFloats + (n % 16) * 16 + k % 16];
}

// Row n of a panel's sums goes to its place: `scale` times the sum less `less` times what stands at the same place of
// `others`. H columns of `hidden`, then those of the run.
struct SumPlaces {
    float *hidden, *own;
};

RLHF_INLINE void write_sums(const Batch& batch, const Sizes& sizes, const Panel& panel, const float* sums, int64_t n,
                            float scale, const SumPlaces& to, float less, const SumPlaces& others) {
    const int64_t extra = batch.runs[panel.run].extra, row = n - panel.first, own = (n - panel.start) * extra;
    const float* at = sums + panel.sums * kTileFloats;
    const auto one = [&](const float* from, int64_t k, float* out, const float* other) __attribute__((always_inline)) {
        const float x = scale * sum_at(from, row, k);
        out[k] = other ? x - less * other[k] : x;
    };
    for (int64_t k = 0; k < sizes.H; ++k) {
        one(at, k, to.hidden + n * sizes.H, others.hidden ? others.hidden + n * sizes.H : nullptr);
    }
    at += sizes.padded_H / 32 * 4 * kTileFloats;
    for (int64_t k = 0; k < extra; ++k) one(at, k, to.own + own, others.own ? others.own + own : nullptr);
}

struct ForwardCall {
    const Head& head;
    const Batch& batch;
    const Statistics& out;
    const Pair* pair;
    const Expected& expected;
    const Sizes& sizes;
    const Panels& panels;
    Wanted wanted;
    bool transformed;
    PanelState* states;
    float *sums, *sums_kl;  // where panels say
};

// Row statistics of one panel's logits, which become probabilities in p (and q for a pair).
static void forward_panel(const ForwardCall& call, int64_t panel, int64_t v0, int64_t count, float* logits,
                          float* pair_logits, Element* p, Element* q) {
    const Head& head = call.head;
    const Batch& batch = call.batch;
    const Panel& at = call.panels.all[panel];
    PanelState& s = call.states[panel];
    const int64_t padded_v = round_up(count, 32), depth_v = padded_v / KT;
    const int64_t sum_tiles = 4 * (call.sizes.padded_H / 32 + ceil_div(batch.runs[at.run].extra, 32));
    const bool ahead = call.expected.expected != nullptr, ahead_kl = call.expected.expected_kl != nullptr;
    Lanes temperature, inverse;
    temperature.load(batch.temperature, at, 1.0f);
    for (int h = 0; h < 2; ++h) inverse.x[h] = splat(1.0f) / temperature.x[h];
    if (call.transformed) {
        transform(head, v0, count, inverse, logits);
        if (call.pair) transform(head, v0, count, inverse, pair_logits);
    }
    const Targets targets(batch, at, v0, count);
    for (int64_t i = 0; i < kPanel; ++i) {
        const int32_t t = targets.at[i / 16][i % 16];
        if (t < 0) continue;
        s.logit[i / 16][i % 16] = logit_row(logits, t, i / 16)[i % 16];
        if (call.pair) s.pair_logit[i / 16][i % 16] = logit_row(pair_logits, t, i / 16)[i % 16];
    }
    float* sums = ahead ? call.sums + at.sums * kTileFloats : nullptr;
    float* sums_kl = ahead_kl ? call.sums_kl + at.sums * kTileFloats : nullptr;
    for (int64_t half = 0; half < 2; ++half) {
        const f32x16 top = block_maximum(logits, count, half);
        const f32x16 before = s.reference[half].value, factor = s.reference[half].meet(top);
        if (any_lane(factor != 1.0f)) {
            const f32x16 shift = before - s.reference[half].value;
            // sum e (z - m) for the new m, from the sums for the old one
            s.weighted[half] =
                select(s.sum[half] == 0.0f, splat(0.0f), factor * (s.weighted[half] + shift * s.sum[half]));
            s.sum[half] *= factor;
            s.sum_square[half] *= factor * factor;
            s.difference[half] *= factor;
            if (ahead && v0 > 0) rescale(sums, sum_tiles, half, factor);
            if (ahead_kl && v0 > 0) rescale(sums_kl, sum_tiles, half, factor);
        }
        if (call.pair) {
            const f32x16 pair_top = block_maximum(pair_logits, count, half);
            s.pair_sum[half] *= s.pair_reference[half].meet(pair_top);
            if (v0 == 0) s.centre[half] = centre_of(top, pair_top);
        }
        if (call.wanted.best) note_best(s, logits, v0, count, half);
        const f32x16 cap = inverse.x[half] * head.softcap;
        const auto sums_of = ahead ? (call.pair ? (head.softcap != 0.0f ? block_sums<true, true, true>
                                                                        : block_sums<true, true, false>)
                                                : (head.softcap != 0.0f ? block_sums<true, false, true>
                                                                        : block_sums<true, false, false>))
                                   : (call.pair ? block_sums<false, true, false> : block_sums<false, false, false>);
        sums_of(s, logits, pair_logits, count, half, call.wanted, targets, cap,
                p + half * depth_v * kTileElements, ahead_kl ? q + half * depth_v * kTileElements : nullptr);
    }
    if (!ahead) return;
    if (count % 32 != 0 && KT == 16) {  // the last tile of the padding is not touched above
        for (int64_t half = 0; half < 2; ++half) {
            for (int64_t t = ceil_div(count, KT); t < depth_v; ++t) {
                std::memset(p + (half * depth_v + t) * kTileElements, 0, 1024);
                if (ahead_kl) std::memset(q + (half * depth_v + t) * kTileElements, 0, 1024);
            }
        }
    }
}

// Where a thread keeps the logits and probabilities of a group of panels: kMaxGroup of each, and again for a pair.
struct Workspace {
    float *logits, *pair_logits;
    Element *p, *q;
    static constexpr int64_t kLogits = kBlock * kPanel, kP = 2 * (kBlock / KT) * kTileElements;
    Workspace(float* all_logits, Element* all_p, int thread)
        : logits(all_logits + thread * 2 * kMaxGroup * kLogits), pair_logits(logits + kMaxGroup * kLogits),
          p(all_p ? all_p + thread * 2 * kMaxGroup * kP : nullptr), q(p + kMaxGroup * kP) {}
};

static void forward_group(const ForwardCall& call, int64_t first, int64_t panels, int64_t v0, int64_t count,
                          const Rows& rows, const Tails& tails, const ColumnMemory& weight, const Element* columns,
                          const Element* pair_columns, const Workspace& at) {
    const Panel* of = call.panels.all + first;
    const int64_t padded_v = round_up(count, 32), depth_v = padded_v / KT;
    panel_products(rows, tails, v0, columns, of, panels, padded_v, at.logits, at.kLogits);
    if (call.pair) panel_products(rows, tails, v0, pair_columns, of, panels, padded_v, at.pair_logits, at.kLogits);
    for (int64_t i = 0; i < panels; ++i) {
        forward_panel(call, first + i, v0, count, at.logits + i * at.kLogits, at.pair_logits + i * at.kLogits,
                      at.p + i * at.kP, at.q + i * at.kP);
    }
    if (call.sums) {
        add_products(at.p, at.kP, weight.block(v0, depth_v), tails, v0, of, panels, depth_v, call.sums);
    }
    if (call.sums_kl) {
        add_products(at.q, at.kP, weight.block(v0, depth_v), tails, v0, of, panels, depth_v, call.sums_kl);
    }
}

static void finish_row(const ForwardCall& call, int64_t panel, int64_t n) {
    const Head& head = call.head;
    const Panel& in = call.panels.all[panel];
    const PanelState& s = call.states[panel];
    const int64_t half = (n - in.first) / 16, lane = (n - in.first) % 16;
    const float sum = s.sum[half][lane];
    const double lse = log_sum_exp(s.reference[half], sum, lane);
    const Statistics& out = call.out;
    if (out.logprob) out.logprob[n] = static_cast<float>(s.logit[half][lane] - lse);
    if (out.lse) out.lse[n] = static_cast<float>(lse);
    const double expected = s.weighted[half][lane] / static_cast<double>(sum);  // of z less the reference
    if (out.entropy) out.entropy[n] = static_cast<float>((lse - s.reference[half].value[lane]) - expected);
    if (out.is_top1) out.is_top1[n] = s.best_at[half][lane] == call.batch.target[n] ? 1.0f : 0.0f;
    if (out.mean_logit) out.mean_logit[n] = s.sum_z[half][lane] / static_cast<float>(head.V);
    if (out.log_sum_sq_prob) {
        out.log_sum_sq_prob[n] = static_cast<float>(std::log(static_cast<double>(s.sum_square[half][lane])) -
                                                    2 * std::log(static_cast<double>(sum)));
    }
    float gap = 0.0f;
    if (call.pair) {
        const double pair_lse = log_sum_exp(s.pair_reference[half], s.pair_sum[half][lane], lane);
        const double centre = s.centre[half][lane];
        const double kl = ((s.difference[half][lane] / static_cast<double>(sum) + centre) - lse) + pair_lse;
        call.pair->logprob[n] = static_cast<float>(s.pair_logit[half][lane] - pair_lse);
        call.pair->lse[n] = static_cast<float>(pair_lse);
        call.pair->kl[n] = static_cast<float>(kl);
        gap = static_cast<float>(((lse - pair_lse) + kl) - centre);  // log p - log p2 - kl = (z - z2 - centre) - gap
    }
    if (!call.expected.expected) return;
    const float by = head.scale / (call.batch.temperature[n] * sum);
    const HeadRun& run = call.batch.runs[in.run];
    const SumPlaces made{call.expected.expected, run.sums};
    write_sums(call.batch, call.sizes, in, call.sums, n, by, made, 0.0f, {nullptr, nullptr});
    if (!call.sums_kl) return;
    write_sums(call.batch, call.sizes, in, call.sums_kl, n, by, {call.expected.expected_kl, run.sums_kl}, gap, made);
}

// As many panels together as leaves every thread two groups, for its sake and that of the last one's.
static int64_t group_size(int64_t panels, int threads) {
    const int64_t share = panels / (2 * threads);
    return share < 1 ? 1 : share > kMaxGroup ? kMaxGroup : share;
}

// The blocks of the vocabulary go through three phases: their rows of W are packed, groups of panels go through them, and
// what needs all panels follows. Threads take pieces of them in one order, block after block, with the packing of the next
// block before the last phase of this one. A piece waits for the pieces that it builds on and for nothing else, so that a
// thread without a core holds up its own piece and what needs it: two blocks have memory at a time.
enum Phase { kPack, kPanels, kAfter, kPhases };

struct Schedule {
    int64_t V, groups;
    bool has_after;
    int64_t next;          // piece to be taken, in the order above
    int64_t* done;         // [blocks][kPhases] pieces
    int64_t* group_blocks; // [groups]: blocks that a group of panels has been through

    int64_t blocks() const { return ceil_div(V, kBlock); }
    int64_t rows(int64_t block) const { return V - block * kBlock < kBlock ? V - block * kBlock : kBlock; }
    int64_t pieces(int64_t block, Phase phase) const {
        if (block < 0 || block >= blocks() || (phase == kAfter && !has_after)) return 0;
        return phase == kPanels ? groups : ceil_div(rows(block), 32);
    }
    Schedule(Memory& memory, int64_t V, int64_t groups, bool has_after)
        : V(V), groups(groups), has_after(has_after), next(0) {
        done = memory.take<int64_t>(blocks() * kPhases);
        group_blocks = memory.take<int64_t>(groups);
        std::memset(done, 0, blocks() * kPhases * sizeof(int64_t));
        std::memset(group_blocks, 0, groups * sizeof(int64_t));
    }
    void wait(int64_t block, Phase phase) const {
        if (block >= 0) wait_for_count(done + block * kPhases + phase, pieces(block, phase));
    }
};

// run(phase, block, piece) for every piece, taken by whoever calls this.
template <typename Run>
RLHF_INLINE void take_pieces(Schedule& schedule, const Run& run) {
    int64_t block = 0, begin = 0, mine = __atomic_fetch_add(&schedule.next, 1, __ATOMIC_RELAXED);
    const auto take = [&](int64_t of, Phase phase) __attribute__((always_inline)) {
        const int64_t end = begin + schedule.pieces(of, phase);
        for (; mine < end; mine = __atomic_fetch_add(&schedule.next, 1, __ATOMIC_RELAXED)) {
            const int64_t piece = mine - begin;
            if (phase == kPack) schedule.wait(of - 2, schedule.has_after ? kAfter : kPanels);
            if (phase == kPanels) {
                schedule.wait(of, kPack);
                wait_for_count(schedule.group_blocks + piece, of);
            }
            if (phase == kAfter) schedule.wait(of, kPanels);
            run(phase, of, piece);
            if (phase == kPanels) __atomic_store_n(schedule.group_blocks + piece, of + 1, __ATOMIC_RELEASE);
            __atomic_fetch_add(schedule.done + of * kPhases + phase, 1, __ATOMIC_RELEASE);
        }
        begin = end;
    };
    take(0, kPack);
    for (; block < schedule.blocks(); ++block) {
        take(block, kPanels);
        take(block + 1, kPack);
        take(block, kAfter);
    }
}

static void run_forward(const Head& head, const Batch& batch, const Statistics& statistics, const Pair* pair,
                        const Expected& expected, int threads) {
    Memory memory;
    const Sizes sizes(head, batch);
    const Panels panels(batch, sizes, memory);
    ForwardCall call{head, batch, statistics, pair, expected, sizes, panels, {}, transforms(head, batch),
                     nullptr, nullptr, nullptr};
    call.wanted = {statistics.entropy != nullptr, statistics.is_top1 != nullptr, statistics.mean_logit != nullptr,
                   statistics.log_sum_sq_prob != nullptr};
    const bool ahead = expected.expected != nullptr;
    const int64_t group = group_size(panels.count, threads);
    Element* columns = memory.take<Element>(panels.column_tiles * kTileElements);
    Element* pair_columns = pair ? memory.take<Element>(panels.column_tiles * kTileElements) : nullptr;
    const Rows rows(head, sizes, memory);
    const Tails tails(head, batch, sizes, ahead, memory);
    const ColumnMemory weight(head, sizes, rows, ahead, memory);
    Schedule schedule(memory, head.V, ceil_div(panels.count, group), false);
    float* logits = memory.take<float>(threads * 2 * kMaxGroup * Workspace::kLogits);
    Element* p = ahead ? memory.take<Element>(threads * 2 * kMaxGroup * Workspace::kP) : nullptr;
    Element* scratch = memory.take<Element>(threads * 16 * sizes.widest);
    call.states = memory.take<PanelState>(panels.count);
    call.sums = ahead ? memory.take<float>(panels.sum_tiles * kTileFloats) : nullptr;
    call.sums_kl = expected.expected_kl ? memory.take<float>(panels.sum_tiles * kTileFloats) : nullptr;
    const auto work = [&](Member& me) {
        const TileScope scope;
        Element* my_scratch = scratch + me.thread * 16 * sizes.widest;
        const Workspace mine(logits, p, me.thread);
        steal(me, 2 * panels.count, [&](int64_t i) {
            const Panel& panel = panels.all[i / 2];
            pack_hidden_columns(batch, batch.hidden, true, sizes, panel, i % 2, my_scratch, columns);
            if (pair) pack_hidden_columns(batch, pair->hidden, false, sizes, panel, i % 2, my_scratch, pair_columns);
            if (i % 2 == 0) reset(call.states[i / 2]);
        });
        take_pieces(schedule, [&](Phase phase, int64_t block, int64_t piece) {
            const int64_t v0 = block * kBlock, count = schedule.rows(block);
            if (phase == kPack) {
                pack_weight_strip(head, sizes, rows, tails, v0, count, piece * 32, weight.to_pack(v0));
            } else {
                const int64_t first = piece * group, n = panels.count - first < group ? panels.count - first : group;
                forward_group(call, first, n, v0, count, rows, tails, weight, columns, pair_columns, mine);
            }
        });
        wait_for_team(me.team, me.threads);
        steal(me, panels.count, [&](int64_t i) {
            for (int64_t n = panels.all[i].first; n < panels.all[i].end; ++n) finish_row(call, i, n);
        });
    };
    run_together(threads, work);
}

// --- backward --------------------------------------------------------------------------------------------------------

struct BackwardCall {
    const Head& head;
    const Batch& batch;
    const LogitGradients& rows;
    const HeadGradients& out;
    const Sizes& sizes;
    const Panels& panels;
    bool transformed;
    int64_t depth_n;   // tiles along n of the transposed gradient
    float* sums;       // where panels say
    Element* across;   // transposed gradient of a block: [kBlock / 16][depth_n] A tiles
    float* bias_part;  // [panels][kBlock]
};

// The rows' coefficients, 0 and lse = inf in lanes past the end, where they make the gradient 0.
struct RowLanes {
    Lanes lse, on_p, on_target, entropy, entropy_value, mean, square, square_scale, kl, kl_shift, temperature, slope;
};

static void load_rows(const BackwardCall& call, const Panel& panel, RowLanes& lanes) {
    const LogitGradients& g = call.rows;
    Lanes on_lse, square_value, pair_lse, kl_value;
    lanes.lse.load(g.lse, panel, __builtin_inff());
    lanes.on_target.load(g.logprob, panel, 0.0f);
    on_lse.load(g.on_lse, panel, 0.0f);
    lanes.entropy.load(g.entropy, panel, 0.0f);
    lanes.entropy_value.load(g.entropy_value, panel, 0.0f);
    lanes.mean.load(g.mean_logit, panel, 0.0f);
    lanes.square.load(g.log_sum_sq_prob, panel, 0.0f);
    square_value.load(g.log_sum_sq_prob_value, panel, 0.0f);
    lanes.kl.load(g.kl, panel, 0.0f);
    kl_value.load(g.kl_value, panel, 0.0f);
    pair_lse.load(g.pair_lse, panel, 0.0f);
    lanes.temperature.load(call.batch.temperature, panel, 1.0f);
    for (int h = 0; h < 2; ++h) {
        lanes.on_p.x[h] = (on_lse.x[h] - lanes.on_target.x[h]) - 2.0f * lanes.square.x[h];
        lanes.square_scale.x[h] = 2.0f * lanes.square.x[h] * exp16(-square_value.x[h]);
        lanes.mean.x[h] = lanes.mean.x[h] * (1.0f / static_cast<float>(call.head.V));
        lanes.slope.x[h] = splat(call.head.scale) / lanes.temperature.x[h];
        for (int64_t i = 0; i < 16; ++i) {
            lanes.kl_shift.x[h][i] =
                panel.first + h * 16 + i < panel.end ? (lanes.lse.x[h][i] - pair_lse.x[h][i]) + kl_value.x[h][i] : 0.0f;
        }
    }
}

// dL/dy of one panel replaces its logits, and goes to p, to the transposed gradient and to the bias where wanted.
static void backward_panel(const BackwardCall& call, int64_t panel, int64_t v0, int64_t count, float* logits,
                           float* pair_logits, Element* p) {
    const Head& head = call.head;
    const Batch& batch = call.batch;
    const LogitGradients& g = call.rows;
    const Panel& at = call.panels.all[panel];
    const int64_t padded_v = round_up(count, 32), depth_v = padded_v / KT;
    RowLanes lanes;
    load_rows(call, at, lanes);
    Lanes inverse;
    for (int h = 0; h < 2; ++h) inverse.x[h] = splat(1.0f) / lanes.temperature.x[h];
    if (call.transformed) {
        transform(head, v0, count, inverse, logits);
        if (g.kl) transform(head, v0, count, inverse, pair_logits);
    }
    const Targets targets(batch, at, v0, count);
    for (int64_t half = 0; half < 2; ++half) {
        const f32x16 cap = inverse.x[half] * head.softcap;
        // dL/dy replaces the logits, rows past the end become 0
        for (int64_t v = 0; v < padded_v; ++v) {
            float* at = logit_row(logits, v, half);
            if (v >= count) {
                store16(at, splat(0.0f));
                continue;
            }
            const f32x16 z = load16(at), log_p = z - lanes.lse.x[half], prob = exp16(log_p);
            f32x16 factor = lanes.on_p.x[half];
            if (g.entropy) {
                const f32x16 finite = select(log_p < kVeryLow, splat(kVeryLow), log_p);
                factor -= lanes.entropy.x[half] * (finite + lanes.entropy_value.x[half]);
            }
            if (g.log_sum_sq_prob) factor = muladd(lanes.square_scale.x[half], prob, factor);
            if (g.kl) {
                const f32x16 gap = (z - load16(logit_row(pair_logits, v, half))) - lanes.kl_shift.x[half];
                factor = select(prob == 0.0f, factor, muladd(lanes.kl.x[half], gap, factor));
            }
            f32x16 d = prob * factor + lanes.mean.x[half];
            d = select(targets.at[half] == static_cast<int32_t>(v), d + lanes.on_target.x[half], d);
            d = d * lanes.slope.x[half];
            if (head.softcap != 0.0f) d = d * cap_slope(z, cap);
            store16(at, d);
        }
        if (call.out.hidden) {
            for (int64_t t = 0; t < depth_v; ++t) {
                TileOut tile;
                for (int64_t i = 0; i < KT; i += 2) {
                    tile.put(i, load16(logit_row(logits, t * KT + i, half)),
                             load16(logit_row(logits, t * KT + i + 1, half)));
                }
                tile.write(p + (half * depth_v + t) * kTileElements);
            }
        }
    }
    if (call.across) {
        for (int64_t v = 0; v < padded_v; ++v) {
            Element* row = call.across + (v / 16) * call.depth_n * kTileElements + (v % 16) * KT;
            const f32x16 left = load16(logit_row(logits, v, 0)), right = load16(logit_row(logits, v, 1));
#if RLHF_TILE_BF16
            const u16x16 low = to_bf16(left), high = to_bf16(right);
            std::memcpy(row + panel * kTileElements, &low, 32);
            std::memcpy(row + panel * kTileElements + 16, &high, 32);
#else
            store16(row + 2 * panel * kTileElements, left);
            store16(row + (2 * panel + 1) * kTileElements, right);
#endif
        }
    }
    if (call.bias_part) {
        for (int64_t v = 0; v < count; ++v) {
            const f32x16 both = load16(logit_row(logits, v, 0)) + load16(logit_row(logits, v, 1));
            float total = 0.0f;
            for (int i = 0; i < 16; ++i) total += both[i];
            call.bias_part[panel * kBlock + v] = total;
        }
    }
}

static void backward_group(const BackwardCall& call, int64_t first, int64_t panels, int64_t v0, int64_t count,
                           const Rows& rows, const Tails& tails, const ColumnMemory& weight, const Element* columns,
                           const Element* pair_columns, const Workspace& at) {
    const Panel* of = call.panels.all + first;
    const int64_t padded_v = round_up(count, 32), depth_v = padded_v / KT;
    panel_products(rows, tails, v0, columns, of, panels, padded_v, at.logits, at.kLogits);
    if (call.rows.kl) panel_products(rows, tails, v0, pair_columns, of, panels, padded_v, at.pair_logits, at.kLogits);
    for (int64_t i = 0; i < panels; ++i) {
        backward_panel(call, first + i, v0, count, at.logits + i * at.kLogits, at.pair_logits + i * at.kLogits,
                       at.p + i * at.kP);
    }
    if (call.sums) {
        add_products(at.p, at.kP, weight.block(v0, depth_v), tails, v0, of, panels, depth_v, call.sums);
    }
}

// One row of dL/dW', out of the tiles of its strip.
static void write_weight_row(const float* sums, int64_t row, int64_t columns, Type type, void* out) {
    const auto at = [&](int64_t k) {
        return sums + (k / 32) * 4 * kTileFloats + ((row / 16) * 2 + k / 16 % 2) * kTileFloats + (row % 16) * 16 + k % 16;
    };
    int64_t k = 0;
    for (; k + 16 <= columns; k += 16) {
        const f32x16 x = load16(at(k));
        if (type == Type::float32) {
            store16(static_cast<float*>(out) + k, x);
        } else {
            const u16x16 rounded = to_bf16(x);
            std::memcpy(static_cast<uint16_t*>(out) + k, &rounded, sizeof rounded);
        }
    }
    for (; k < columns; ++k) {
        if (type == Type::float32) {
            static_cast<float*>(out)[k] = *at(k);
        } else {
            static_cast<uint16_t*>(out)[k] = to_bf16(splat(*at(k))).lane[0];
        }
    }
}

// Rows [v, v + 32) of the block: the transposed gradient, from tile `from` of its depth on, times `columns` columns of rows
// that are packed in as many tiles, `depth`. The depth is taken in pieces as in `panel_products`; sums: [columns / 32][4 tiles].
static void weight_strip(const BackwardCall& call, int64_t count, int64_t v, int64_t from, const Element* packed,
                         int64_t depth, int64_t columns, Type type, char* out, float* sums) {
    for (int64_t n = 0; n == 0 || n < depth; n += kDepthTiles) {  // without a row the sums are zeros
        const int64_t piece = depth - n < kDepthTiles ? depth - n : kDepthTiles;
        const Element* a = call.across + ((v / 16) * call.depth_n + from + n) * kTileElements;
        for (int64_t k = 0; k < ceil_div(columns, 32); ++k) {
            const Element* b = packed + (2 * k * depth + n) * kTileElements;
            multiply_2x2(a, a + call.depth_n * kTileElements, b, b + depth * kTileElements, piece,
                         sums + k * 4 * kTileFloats, n > 0);
        }
    }
    const int64_t size = type == Type::float32 ? 4 : 2;
    for (int64_t i = 0; i < 32 && v + i < count; ++i) {
        write_weight_row(sums, i, columns, type, out + (v + i) * columns * size);
    }
}

// The same for dL/dW and for every run's own columns, from that run's rows alone; the block starts at v0.
static void weight_strips(const BackwardCall& call, int64_t v0, int64_t count, int64_t v, const HiddenRows& hidden,
                          float* sums) {
    const HeadGradients& out = call.out;
    if (out.weight) {
        const int64_t row = call.sizes.H * (out.weight_type == Type::float32 ? 4 : 2);
        weight_strip(call, count, v, 0, hidden.base, call.depth_n, call.sizes.H, out.weight_type,
                     static_cast<char*>(out.weight) + v0 * row, sums);
    }
    for (int64_t i = 0; i < call.batch.n_runs; ++i) {
        const HeadRun& run = call.batch.runs[i];
        if (!run.d_weight || run.extra == 0) continue;
        weight_strip(call, count, v, hidden.first[i] * (kPanel / KT), hidden.extra + hidden.at[i], hidden.depth[i], run.extra,
                     Type::float32, reinterpret_cast<char*>(run.d_weight + v0 * run.extra), sums);
    }
}

// Rows [v, v + 32) of the block: dL/dbias, panel after panel.
static void bias_strip(const BackwardCall& call, int64_t v0, int64_t count, int64_t v) {
    for (const int64_t end = v + 32 < count ? v + 32 : count; v < end; ++v) {
        float total = 0.0f;
        for (int64_t i = 0; i < call.panels.count; ++i) total += call.bias_part[i * kBlock + v];
        call.out.bias[v0 + v] = total;
    }
}

static void run_backward(const Head& head, const Batch& batch, const LogitGradients& gradients,
                         const HeadGradients& sums, int threads) {
    Memory memory;
    const Sizes sizes(head, batch);
    const Panels panels(batch, sizes, memory);
    BackwardCall call{head, batch, gradients, sums, sizes, panels, transforms(head, batch), 0, nullptr, nullptr, nullptr};
    const int64_t group = group_size(panels.count, threads);
    const Matrix pair_hidden{gradients.pair_hidden, gradients.pair_stride, batch.hidden.type};
    const bool pair = gradients.kl != nullptr;
    call.depth_n = panels.count * kPanel / KT;
    Element* columns = memory.take<Element>(panels.column_tiles * kTileElements);
    Element* pair_columns = pair ? memory.take<Element>(panels.column_tiles * kTileElements) : nullptr;
    const Rows rows(head, sizes, memory);
    const Tails tails(head, batch, sizes, sums.hidden != nullptr, memory);
    const ColumnMemory weight(head, sizes, rows, sums.hidden != nullptr, memory);
    bool turned = sums.weight != nullptr;
    for (int64_t i = 0; i < batch.n_runs; ++i) turned |= batch.runs[i].d_weight && batch.runs[i].extra > 0;
    const HiddenRows hidden(batch, sizes, panels, sums.weight != nullptr, memory);
    Schedule schedule(memory, head.V, ceil_div(panels.count, group), turned || sums.bias);
    float* logits = memory.take<float>(threads * 2 * kMaxGroup * Workspace::kLogits);
    Element* p = sums.hidden ? memory.take<Element>(threads * 2 * kMaxGroup * Workspace::kP) : nullptr;
    Element* scratch = memory.take<Element>(threads * 16 * sizes.widest);
    const int64_t across_elements = kBlock * panels.count * kPanel;
    call.across = turned ? memory.take<Element>(2 * across_elements) : nullptr;
    float* strips = turned ? memory.take<float>(threads * 32 * sizes.widest) : nullptr;
    call.bias_part = sums.bias ? memory.take<float>(2 * panels.count * kBlock) : nullptr;
    call.sums = sums.hidden ? memory.take<float>(panels.sum_tiles * kTileFloats) : nullptr;
    const auto work = [&](Member& me) {
        const TileScope scope;
        Element* my_scratch = scratch + me.thread * 16 * sizes.widest;
        const Workspace mine(logits, p, me.thread);
        steal(me, 2 * panels.count, [&](int64_t i) {
            const Panel& panel = panels.all[i / 2];
            pack_hidden_columns(batch, batch.hidden, true, sizes, panel, i % 2, my_scratch, columns);
            if (pair) pack_hidden_columns(batch, pair_hidden, false, sizes, panel, i % 2, my_scratch, pair_columns);
            if (turned) hidden.pack(i / 2, i % 2, my_scratch);
        });
        take_pieces(schedule, [&](Phase phase, int64_t block, int64_t piece) {
            const int64_t v0 = block * kBlock, count = schedule.rows(block);
            BackwardCall here = call;
            if (here.across) here.across += block % 2 * across_elements;
            if (here.bias_part) here.bias_part += block % 2 * panels.count * kBlock;
            if (phase == kPack) {
                pack_weight_strip(head, sizes, rows, tails, v0, count, piece * 32, weight.to_pack(v0));
            } else if (phase == kPanels) {
                const int64_t first = piece * group, n = panels.count - first < group ? panels.count - first : group;
                backward_group(here, first, n, v0, count, rows, tails, weight, columns, pair_columns, mine);
            } else {
                const int64_t v = piece * 32;
                if (turned) weight_strips(here, v0, count, v, hidden, strips + me.thread * 32 * sizes.widest);
                if (sums.bias) bias_strip(here, v0, count, v);
            }
        });
        wait_for_team(me.team, me.threads);
        if (!sums.hidden) return;
        steal(me, panels.count, [&](int64_t i) {
            const Panel& panel = panels.all[i];
            for (int64_t n = panel.first; n < panel.end; ++n) {
                write_sums(batch, sizes, panel, call.sums, n, 1.0f, {sums.hidden, batch.runs[panel.run].sums}, 0.0f,
                           {nullptr, nullptr});
            }
        });
    };
    run_together(threads, work);
}
