// lora_decode.h for one instruction set. A lane is a row of x: its sixteen neighbours go through a strip of W together,
// and what the adapters add is a sum over the rank of broadcast elements of B times h = scale x Aᵀ, laid out the same way.

#include "cpu/tile_mm.inc.h"
#include "cpu/strip_mm.inc.h"

constexpr int64_t kSerialProducts = 1 << 22;  // N K M, N in whole vectors, of about a tenth of a millisecond

RLHF_INLINE float wide(float x) { return x; }
RLHF_INLINE float wide(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

struct DecodeCall : DecodeArguments {
    int64_t halves;    // of sixteen rows of x
    int64_t ranks;     // of all slots, and one more for each
    Element* columns;  // [halves][K / KT] tiles
    float* panels;     // [halves][K][16 rows]: x in float
    float* h;          // [halves][ranks][16 rows], one slot after another: its rank, then 1 for rows that carry it
};

// One block of memory, freed at the end. Nothing of the standard library: what of that is compiled here, for this
// instruction set, the linker may put elsewhere.
struct Block {
    void* data;
    explicit Block(size_t bytes) : data(std::aligned_alloc(64, bytes)) {
        if (data == nullptr) throw std::bad_alloc();
    }
    ~Block() { std::free(data); }
};

// Sixteen rows of x as tiles and in float; rows beyond N are zeros.
static void pack_rows(const DecodeCall& call, int64_t half) {
    const Element* x = static_cast<const Element*>(call.x.data);
    const int64_t first = half * 16, rows = call.N - first < 16 ? call.N - first : 16;
    float* panel = call.panels + half * call.K * 16;
    for (int64_t t = 0; t < call.K / KT; ++t) {
        u32x16 words[16] = {};
        for (int64_t i = 0; i < rows; ++i) std::memcpy(&words[i], x + (first + i) * call.x.stride + t * KT, 64);
        uint32_t* tile = reinterpret_cast<uint32_t*>(call.columns + (half * (call.K / KT) + t) * kTileElements);
        transpose16(words, tile, 16);
        for (int64_t k = 0; k < 16; ++k) {
#if RLHF_TILE_BF16
            u32x16 pair;
            std::memcpy(&pair, tile + k * 16, 64);
            store16(panel + (t * KT + 2 * k) * 16, (f32x16)(pair << 16));
            store16(panel + (t * KT + 2 * k + 1) * 16, (f32x16)(pair & 0xffff0000u));
#else
            std::memcpy(panel + (t * KT + k) * 16, tile + k * 16, 64);
#endif
        }
    }
}

// h [COUNT][16] = scale times COUNT rows of A times sixteen rows of x.
template <int COUNT, typename T>
RLHF_INLINE void shrink(const T* A, int64_t stride, int64_t K, const float* panel, f32x16 scale, float* h) {
    f32x16 sums[COUNT][4];
    for (int r = 0; r < COUNT; ++r) {
        for (int i = 0; i < 4; ++i) sums[r][i] = splat(0.0f);
    }
    for (int64_t k = 0; k < K; k += 4) {
        for (int i = 0; i < 4; ++i) {
            const f32x16 x = load16(panel + (k + i) * 16);
            for (int r = 0; r < COUNT; ++r) sums[r][i] = muladd(splat(wide(A[r * stride + k + i])), x, sums[r][i]);
        }
    }
    for (int r = 0; r < COUNT; ++r) {
        store16(h + r * 16, ((sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3])) * scale);
    }
}

template <typename T>
RLHF_INLINE void shrink_ranks(const Matrix& A, int64_t from, int64_t to, int64_t K, const float* panel, f32x16 scale,
                              float* h) {
    const T* rows = static_cast<const T*>(A.data);
    int64_t r = from;
    for (; r + 4 <= to; r += 4) shrink<4>(rows + r * A.stride, A.stride, K, panel, scale, h + r * 16);
    for (; r < to; ++r) shrink<1>(rows + r * A.stride, A.stride, K, panel, scale, h + r * 16);
}

// Rows [from, to) of h for sixteen rows of x.
static void shrink_rows(const DecodeCall& call, int64_t half, int64_t from, int64_t to) {
    const float* panel = call.panels + half * call.K * 16;
    float* h = call.h + half * call.ranks * 16;
    for (int64_t slot = 0, first = 0; slot < call.n_slots; first += call.slots[slot++].rank + 1) {
        const Slot& s = call.slots[slot];
        if (first + s.rank < from || first >= to) continue;
        float scales[16] = {}, carries[16] = {};
        bool any = false;
        for (int64_t j = 0; j < call.n_runs; ++j) {
            const Run& run = call.runs[j];
            if (run.slot != slot) continue;
            for (int64_t i = 0; i < 16; ++i) {
                const int64_t row = half * 16 + i;
                if (row < run.x_row || row >= run.x_row + run.rows) continue;
                scales[i] = static_cast<float>(s.scale);
                carries[i] = 1.0f;
                any = true;
            }
        }
        const int64_t begin = from > first ? from - first : 0, end = to - first < s.rank ? to - first : s.rank;
        const int64_t depth = any ? call.K : 0;
        if (s.A.type == Type::float32) {
            shrink_ranks<float>(s.A, begin, end, depth, panel, load16(scales), h + first * 16);
        } else {
            shrink_ranks<uint16_t>(s.A, begin, end, depth, panel, load16(scales), h + first * 16);
        }
        if (first + s.rank < to) store16(h + (first + s.rank) * 16, load16(carries));
    }
}

// deltas [COUNT][16] = COUNT rows of B times h [rank][16].
template <int COUNT, typename T>
RLHF_INLINE void expand(const T* B, int64_t stride, int64_t rank, const float* h, f32x16* deltas) {
    for (int v = 0; v < COUNT; ++v) deltas[v] = splat(0.0f);
    for (int64_t r = 0; r < rank; ++r) {
        const f32x16 x = load16(h + r * 16);
        for (int v = 0; v < COUNT; ++v) deltas[v] = muladd(splat(wide(B[v * stride + r])), x, deltas[v]);
    }
}

// sums [count][16] += B h for rows [first, first + count) of B, on rows of x that carry the slot.
template <typename T>
RLHF_INLINE void add_deltas(const Matrix& B, int64_t first, int64_t count, int64_t rank, const float* h, float* sums) {
    const f32x16 carries = load16(h + rank * 16);
    const T* rows = static_cast<const T*>(B.data) + first * B.stride;
    const auto add = [&](int64_t v, int64_t some, const f32x16* deltas) __attribute__((always_inline)) {
        for (int64_t i = 0; i < some; ++i) {
            const f32x16 sum = load16(sums + (v + i) * 16);
            store16(sums + (v + i) * 16, carries != 0.0f ? sum + deltas[i] : sum);  // others stay clean of infinities
        }
    };
    f32x16 deltas[8];
    int64_t v = 0;
    for (; v + 8 <= count; v += 8) {
        expand<8>(rows + v * B.stride, B.stride, rank, h, deltas);
        add(v, 8, deltas);
    }
    for (; v < count; ++v) {
        expand<1>(rows + v * B.stride, B.stride, rank, h, deltas);
        add(v, 1, deltas);
    }
}

// Columns [c, c + count) of y, at most sixteen, from sums [16 columns][16 rows].
static void store_columns(const DecodeCall& call, int64_t half, int64_t c, int64_t count, const float* sums) {
    u32x16 columns[16];
    float rows[16 * 16];
    std::memcpy(columns, sums, sizeof columns);
    transpose16(columns, reinterpret_cast<uint32_t*>(rows), 16);
    Element* y = static_cast<Element*>(call.y.data);
    for (int64_t i = 0; i < 16 && half * 16 + i < call.N; ++i) {
        Element* to = y + (half * 16 + i) * call.y.stride + c;
#if RLHF_TILE_BF16
        const u16x16 narrow = to_bf16(load16(rows + i * 16));
        std::memcpy(to, &narrow, sizeof(Element) * count);
#else
        std::memcpy(to, rows + i * 16, sizeof(Element) * count);
#endif
    }
}

// Strip `strip` of W for all rows. scratch: kStrip rows of K elements, for the last strip.
static void decode_strip(const DecodeCall& call, int64_t strip, Element* scratch) {
    const int64_t first = strip * kStrip, count = call.M - first < kStrip ? call.M - first : kStrip;
    const Element* w = static_cast<const Element*>(call.weight.data) + first * call.weight.stride;
    int64_t stride = call.weight.stride;
    if (count < kStrip) {
        for (int64_t v = 0; v < count; ++v) std::memcpy(scratch + v * call.K, w + v * stride, sizeof(Element) * call.K);
        std::memset(scratch + count * call.K, 0, sizeof(Element) * (kStrip - count) * call.K);
        w = scratch;
        stride = call.K;
    }
    const Element* bias = static_cast<const Element*>(call.bias);
    alignas(64) float sums[2 * kStrip * 16];
    for (int64_t half = 0; half < call.halves; half += 2) {
        const Element* b = call.columns + half * (call.K / KT) * kTileElements;
        const int64_t sides = half + 1 < call.halves ? 2 : 1;
        (sides == 2 ? strip_products<2> : strip_products<1>)(w, stride, b, call.K / KT, sums);
        for (int64_t side = 0; side < sides; ++side) {
            float* mine = sums + side * kStrip * 16;
            for (int64_t v = 0; v < count; ++v) {
                f32x16 sum = load16(mine + v * 16);
                if (bias) sum += wide(bias[first + v]);
#if RLHF_TILE_BF16
                sum = (f32x16)(__builtin_convertvector(to_bf16(sum), u32x16) << 16);
#endif
                store16(mine + v * 16, sum);
            }
            const float* h = call.h + (half + side) * call.ranks * 16;
            for (int64_t slot = 0; slot < call.n_slots; h += (call.slots[slot++].rank + 1) * 16) {
                const Slot& s = call.slots[slot];
                (s.B.type == Type::float32 ? add_deltas<float> : add_deltas<uint16_t>)(s.B, first, count, s.rank, h, mine);
            }
            for (int64_t c = 0; c < count; c += 16) {
                store_columns(call, half + side, first + c, count - c < 16 ? count - c : 16, mine + c * 16);
            }
        }
    }
}

static void run_decode(const DecodeArguments& arguments) {
    DecodeCall call{arguments, ceil_div(arguments.N, 16), 0, nullptr, nullptr, nullptr};
    for (int64_t slot = 0; slot < call.n_slots; ++slot) call.ranks += call.slots[slot].rank + 1;
    const bool short_call = call.halves * 16 * call.K * call.M < kSerialProducts;
    const int threads = short_call ? 1 : call.threads;
    const int64_t shares = ceil_div(threads, call.halves);  // of the ranks, so that all threads shrink
    const int64_t strips = ceil_div(call.M, kStrip), floats = call.halves * (call.K + call.ranks) * 16;
    const int64_t elements = call.halves * call.K * 16 + threads * kStrip * call.K;
    const Block block(round_up(floats * 4 + elements * static_cast<int64_t>(sizeof(Element)), 64));
    call.panels = static_cast<float*>(block.data);
    call.h = call.panels + call.halves * call.K * 16;
    call.columns = reinterpret_cast<Element*>(call.h + call.halves * call.ranks * 16);
    Element* scratch = call.columns + call.halves * call.K * 16;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const TileScope scope;
#if defined(_OPENMP)
        Element* mine = scratch + omp_get_thread_num() * kStrip * call.K;
#else
        Element* mine = scratch;
#endif
#pragma omp for schedule(static)
        for (int64_t half = 0; half < call.halves; ++half) pack_rows(call, half);
#pragma omp for schedule(static)
        for (int64_t item = 0; item < call.halves * shares; ++item) {
            const int64_t share = item % shares;
            shrink_rows(call, item / shares, call.ranks * share / shares, call.ranks * (share + 1) / shares);
        }
#pragma omp for schedule(static)
        for (int64_t strip = 0; strip < strips; ++strip) decode_strip(call, strip, mine);
    }
}
