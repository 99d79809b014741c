// Sixteen rows of x side by side, a lane for each: how they become tiles and come back, strips of W that are ragged, and
// adapters; for the instruction set this file is compiled for, after tile_mm.inc.h and strip_mm.inc.h. What holds
// sixteen rows of n numbers is a panel, [n][16] floats, or a column of tiles, n rounded up to whole tiles.

RLHF_INLINE float wide(float x) { return x; }
RLHF_INLINE float wide(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

// x as a tensor of Stored would hold it.
RLHF_INLINE f32x16 rounded(f32x16 x) {
#if RLHF_STORED_BF16
    return round_bf16(x);
#else
    return x;
#endif
}

// Rows of `count` elements as a column of tiles; zeros beyond both. from(i) is row i.
template <typename From>
RLHF_INLINE void pack_column(const From& from, int64_t rows, int64_t count, Element* column) {
    for (int64_t k = 0; k < count; k += KT) {
        const int64_t left = count - k < KT ? count - k : KT;
        u32x16 words[16] = {};
        for (int64_t i = 0; i < rows; ++i) {
            if constexpr (sizeof(Stored) == sizeof(Element)) {
                if (left == KT) words[i] = load_words16(from(i) + k);
                else std::memcpy(&words[i], from(i) + k, sizeof(Element) * left);
            } else if (left == KT) {
                words[i] = as_words(load16_bf16(reinterpret_cast<const uint16_t*>(from(i) + k)));
            } else {
                u16x16 narrow = {};
                std::memcpy(&narrow, from(i) + k, sizeof(Stored) * left);
                words[i] = widen(narrow) << 16;
            }
        }
        transpose16(words, reinterpret_cast<uint32_t*>(column + k * 16), 16);
    }
}

// Numbers k and k + 1 of a column of tiles, k even.
struct Two {
    f32x16 even, odd;
};
RLHF_INLINE Two load_two(const Element* column, int64_t k) {
#if RLHF_TILE_BF16
    const u32x16 pairs = load_words16(column + k * 16);
    return {as_float(pairs << 16), as_float(pairs & 0xffff0000u)};
#else
    return {load16(column + k * 16), load16(column + k * 16 + 16)};
#endif
}
RLHF_INLINE void store_two(Element* column, int64_t k, Two x) {
#if RLHF_TILE_BF16
    store_words16(column + k * 16, pair_bf16(x.even, x.odd));
#else
    store16(column + k * 16, rounded(x.even));
    store16(column + k * 16 + 16, rounded(x.odd));
#endif
}

// Lanes [begin, end) of a panel, rounded, as rows of `count` elements. to(i) is row i.
template <typename To>
RLHF_INLINE void store_rows(const float* panel, int64_t count, int64_t begin, int64_t end, const To& to) {
    for (int64_t c = 0; c < count; c += 16) {
        const int64_t left = count - c < 16 ? count - c : 16;
        u32x16 columns[16] = {};
        float rows[16 * 16];
        for (int64_t i = 0; i < left; ++i) columns[i] = load_words16(panel + (c + i) * 16);
        transpose16(columns, reinterpret_cast<uint32_t*>(rows), 16);
        for (int64_t i = begin; i < end; ++i) {
#if RLHF_STORED_BF16
            const u16x16 narrow = to_bf16(load16(rows + i * 16));
            if (left == 16) std::memcpy(to(i) + c, &narrow, sizeof narrow);
            else std::memcpy(to(i) + c, &narrow, sizeof(Stored) * left);
#else
            if (left == 16) store16(to(i) + c, load16(rows + i * 16));
            else std::memcpy(to(i) + c, rows + i * 16, sizeof(Stored) * left);
#endif
        }
    }
}

// kStrip rows of W from `first` on, `count` of which exist.
struct Strip {
    const Stored* w;
    int64_t stride, first, count;
};

// Strip `strip` of W [M, K], where it lies or, if it is ragged, with zeros around it in scratch [kStrip][K in whole tiles].
RLHF_INLINE Strip strip_of(const void* weight, int64_t stride, int64_t M, int64_t K, int64_t strip, Stored* scratch) {
    const int64_t first = strip * kStrip, count = M - first < kStrip ? M - first : kStrip, padded = round_up(K, KT);
    const Stored* w = static_cast<const Stored*>(weight) + first * stride;
    if (count == kStrip && padded == K) return {w, stride, first, count};
    for (int64_t v = 0; v < count; ++v) {
        std::memcpy(scratch + v * padded, w + v * stride, sizeof(Stored) * K);
        for (int64_t k = K; k < padded; ++k) scratch[v * padded + k] = 0;
    }
    std::memset(scratch + count * padded, 0, sizeof(Stored) * (kStrip - count) * padded);
    return {scratch, padded, first, count};
}

// sums [count][16] of a strip plus their bias, rounded: what a linear without adapters gives.
RLHF_INLINE void round_strip(const Strip& strip, const void* bias, float* sums) {
    const Stored* add = static_cast<const Stored*>(bias);
    if (!add && !RLHF_STORED_BF16) return;
    for (int64_t v = 0; v < strip.count; ++v) {
        f32x16 sum = load16(sums + v * 16);
        if (add) sum += wide(add[strip.first + v]);
        store16(sums + v * 16, rounded(sum));
    }
}

// What adapters are multiplied with in registers: rows of A, as many as hide the latency of an addition, and rows of B.
constexpr int kShrinkRanks = power_below(kSums16) < 8 ? power_below(kSums16) : 8;
constexpr int kDeltaRows = power_below(kSums16) < 8 ? power_below(kSums16) : 8;

// h [COUNT][16] = scale times COUNT rows of A times sixteen rows of x [K], in the order of `shrink_muladd` in
// lora_kernels.inc.h: pieces of kLoraColumns have a sum each, and the sums are added up in order.
template <int COUNT, typename T>
RLHF_INLINE void shrink(const T* A, int64_t stride, int64_t K, const Element* column, f32x16 scale, float* h) {
    f32x16 sums[COUNT];
    for (int64_t from = 0; from == 0 || from < K; from += kLoraColumns) {  // without depth the sums are zeros
        const int64_t end = K - from < kLoraColumns ? K : from + kLoraColumns;
        for (int r = 0; r < COUNT; ++r) sums[r] = splat(0.0f);
        int64_t k = from;
        for (; k + 2 <= end; k += 2) {
            const Two x = load_two(column, k);
#pragma GCC unroll 8
            for (int r = 0; r < COUNT; ++r) {
                const T* at = A + r * stride + k;
                sums[r] = muladd(splat(wide(at[1])), x.odd, muladd(splat(wide(at[0])), x.even, sums[r]));
            }
        }
        if (k < end) {
            const f32x16 x = load_two(column, k).even;
            for (int r = 0; r < COUNT; ++r) sums[r] = muladd(splat(wide(A[r * stride + k])), x, sums[r]);
        }
        for (int r = 0; r < COUNT; ++r) store16(h + r * 16, from > 0 ? load16(h + r * 16) + sums[r] : sums[r]);
    }
    for (int r = 0; r < COUNT; ++r) store16(h + r * 16, load16(h + r * 16) * scale);
}

// Rows [from, to) of h.
template <typename T>
RLHF_INLINE void shrink_ranks(const lora::Matrix& A, int64_t from, int64_t to, int64_t K, const Element* column,
                              f32x16 scale, float* h) {
    const T* rows = static_cast<const T*>(A.data);
    int64_t r = from;
    for (; r + kShrinkRanks <= to; r += kShrinkRanks) {
        shrink<kShrinkRanks>(rows + r * A.stride, A.stride, K, column, scale, h + r * 16);
    }
    for (; r < to; ++r) shrink<1>(rows + r * A.stride, A.stride, K, column, scale, h + r * 16);
}

// deltas [COUNT][16] = COUNT rows of B times h [rank][16].
template <int COUNT, typename T>
RLHF_INLINE void expand(const T* B, int64_t stride, int64_t rank, const float* h, f32x16* deltas) {
    for (int v = 0; v < COUNT; ++v) deltas[v] = splat(0.0f);
    for (int64_t r = 0; r < rank; ++r) {
        const f32x16 x = load16(h + r * 16);
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; ++v) deltas[v] = muladd(splat(wide(B[v * stride + r])), x, deltas[v]);
    }
}

// What `add_deltas` reads of B into the first-level cache: with a slot per sixteen rows it comes from main memory, and
// no neighbour of it was read before that the processor could foresee it by.
RLHF_INLINE void prefetch_deltas(const lora::Matrix& B, const Strip& strip, int64_t rank) {
    const int64_t size = B.type == lora::Type::float32 ? 4 : 2, row = B.stride * size, used = rank * size;
    const char* at = static_cast<const char*>(B.data) + strip.first * row;
    const bool dense = row == used;
    for (int64_t v = 0; v < (dense ? 1 : strip.count); ++v, at += row) {
        for (int64_t i = 0; i < (dense ? used * strip.count : used); i += 64) __builtin_prefetch(at + i);
    }
}

// sums [count][16] += B h for rows [first, first + count) of B, in lanes that carry the slot (1, others 0).
template <typename T>
RLHF_INLINE void add_deltas(const lora::Matrix& B, const Strip& strip, int64_t rank, const float* h, f32x16 carries,
                            float* sums) {
    const T* rows = static_cast<const T*>(B.data) + strip.first * B.stride;
    const auto add = [&](int64_t v, int64_t some, const f32x16* deltas) __attribute__((always_inline)) {
        for (int64_t i = 0; i < some; ++i) {
            const f32x16 sum = load16(sums + (v + i) * 16);
            store16(sums + (v + i) * 16, select(carries != 0.0f, sum + deltas[i], sum));  // others stay clean of infinities
        }
    };
    f32x16 deltas[kDeltaRows];
    int64_t v = 0;
    for (; v + kDeltaRows <= strip.count; v += kDeltaRows) {
        expand<kDeltaRows>(rows + v * B.stride, B.stride, rank, h, deltas);
        add(v, kDeltaRows, deltas);
    }
    for (; v < strip.count; ++v) {
        expand<1>(rows + v * B.stride, B.stride, rank, h, deltas);
        add(v, 1, deltas);
    }
}
