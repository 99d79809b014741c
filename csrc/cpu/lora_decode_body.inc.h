// lora_decode.h for one instruction set. A lane is a row of x: its sixteen neighbours go through a strip of W together,
// and what the adapters add is a sum over the rank of broadcast elements of B times h = scale x Aᵀ, laid out the same way.

#include "cpu/tile_mm.inc.h"
#include "cpu/strip_mm.inc.h"

constexpr int64_t kSerialProducts = 1 << 22;  // N K M, N in whole vectors, of about a tenth of a millisecond

RLHF_INLINE float element(const Matrix& m, int64_t row, int64_t column) {
    if (m.type == Type::float32) return static_cast<const float*>(m.data)[row * m.stride + column];
    const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(m.data)[row * m.stride + column]) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
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

// h of one slot and sixteen rows; `skip` ranks belong to slots before it.
static void shrink_rows(const DecodeCall& call, int64_t slot, int64_t skip, int64_t half) {
    const Slot& s = call.slots[slot];
    const float* panel = call.panels + half * call.K * 16;
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
    float* h = call.h + (half * call.ranks + skip) * 16;
    const f32x16 scale = load16(scales);
    for (int64_t r = 0; r < s.rank; ++r) {
        f32x16 sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
        for (int64_t k = 0; any && k < call.K; k += 4) {
            for (int64_t i = 0; i < 4; ++i) {
                sums[i] = muladd(splat(element(s.A, r, k + i)), load16(panel + (k + i) * 16), sums[i]);
            }
        }
        const f32x16 sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * scale;
        store16(h + r * 16, sum);
    }
    store16(h + s.rank * 16, load16(carries));
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
    const Matrix bias{const_cast<void*>(call.bias), 0, call.weight.type};
    alignas(64) float sums[2 * kStrip * 16];
    for (int64_t half = 0; half < call.halves; half += 2) {
        const Element* b = call.columns + half * (call.K / KT) * kTileElements;
        const int64_t sides = half + 1 < call.halves ? 2 : 1;
        (sides == 2 ? strip_products<2> : strip_products<1>)(w, stride, b, call.K / KT, sums);
        for (int64_t side = 0; side < sides; ++side) {
            float* mine = sums + side * kStrip * 16;
            for (int64_t v = 0; v < count; ++v) {
                f32x16 sum = load16(mine + v * 16);
                if (call.bias) sum += element(bias, 0, first + v);
#if RLHF_TILE_BF16
                sum = (f32x16)(__builtin_convertvector(to_bf16(sum), u32x16) << 16);
#endif
                const float* h = call.h + (half + side) * call.ranks * 16;
                for (int64_t slot = 0; slot < call.n_slots; ++slot) {
                    const Slot& s = call.slots[slot];
                    f32x16 delta = splat(0.0f);
                    for (int64_t r = 0; r < s.rank; ++r) {
                        delta = muladd(splat(element(s.B, first + v, r)), load16(h + r * 16), delta);
                    }
                    // rows without the slot stay clean of its infinities
                    sum = load16(h + s.rank * 16) != 0.0f ? sum + delta : sum;
                    h += (s.rank + 1) * 16;
                }
                store16(mine + v * 16, sum);
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
    [[maybe_unused]] const int threads = short_call ? 1 : call.threads;
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
        for (int64_t half = 0; half < call.halves; ++half) {
            int64_t skip = 0;
            for (int64_t slot = 0; slot < call.n_slots; skip += call.slots[slot++].rank + 1) {
                shrink_rows(call, slot, skip, half);
            }
        }
#pragma omp for schedule(static)
        for (int64_t strip = 0; strip < strips; ++strip) decode_strip(call, strip, mine);
    }
}
