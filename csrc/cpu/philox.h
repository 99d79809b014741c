// Philox4x32-10, sixteen counters at once: the words of kernels/rlhf_kernels/runtime/philox.py. Include it after simd.h, inside
// a file that has chosen its target.
#pragma once

#include "cpu/simd.h"

struct PhiloxWords {
    u32x16 word[4];
};

// The high and the low halves of m b.
RLHF_INLINE void philox_multiply(uint32_t m, u32x16 b, u32x16& high, u32x16& low) {
#if defined(RLHF_AVX512)
    const __m512i factor = _mm512_set1_epi32(int32_t(m));
    const __m512i even = _mm512_mul_epu32((__m512i)b, factor);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)b, 32), factor);
    low = (u32x16)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    high = (u32x16)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
#elif defined(RLHF_AVX2)
    const __m256i factor = _mm256_set1_epi32(int32_t(m));
    for (int i = 0; i < kVectors; ++i) {
        const __m256i even = _mm256_mul_epu32((__m256i)b.part[i], factor);
        const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)b.part[i], 32), factor);
        low.part[i] = (u32v)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
        high.part[i] = (u32v)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    }
#else
    typedef uint64_t u64v __attribute__((vector_size(4 * kLanes)));
    for (int i = 0; i < kVectors; ++i) {
        const u64v words = (u64v)b.part[i];
        const u64v even = (words & 0xffffffffu) * uint64_t(m), odd = (words >> 32) * uint64_t(m);
        low.part[i] = (u32v)((even & 0xffffffffu) | (odd << 32));
        high.part[i] = (u32v)((even >> 32) | (odd & 0xffffffff00000000u));
    }
#endif
}

// Ten rounds on counters c with the same key in every lane, or (Key = u32x16) a key per lane.
template <typename Key>
RLHF_INLINE PhiloxWords philox_rounds(u32x16 c0, u32x16 c1, u32x16 c2, u32x16 c3, Key k0, Key k1) {
    for (int round = 0; round < 10; ++round) {
        u32x16 high0, low0, high1, low1;
        philox_multiply(0xD2511F53u, c0, high0, low0);
        philox_multiply(0xCD9E8D57u, c2, high1, low1);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

RLHF_INLINE u32x16 splat_words(uint32_t x) { return u32x16{} + x; }

// 0 .. 15.
RLHF_INLINE u32x16 lane_numbers() {
    constexpr uint32_t kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load_words16(kNumbers);
}

// Draws of columns 4 group .. 4 group + 3 for sixteen groups from `first_group` on: word[w][i] is the draw of column
// 4 (first_group + i) + w.
RLHF_INLINE PhiloxWords philox16(int64_t seed, int64_t row_id, uint32_t stream, uint32_t first_group) {
    return philox_rounds(lane_numbers() + first_group, splat_words(stream), splat_words(uint32_t(row_id)),
                         splat_words(uint32_t(uint64_t(row_id) >> 32)), uint32_t(seed),
                         uint32_t(uint64_t(seed) >> 32));
}

// Sixteen rows with a seed and a row id each.
struct PhiloxRows {
    u32x16 id_low, id_high, key_low, key_high;
};

RLHF_INLINE void set_row(PhiloxRows& rows, int64_t lane, int64_t seed, int64_t row_id) {
    rows.id_low[lane] = uint32_t(row_id);
    rows.id_high[lane] = uint32_t(uint64_t(row_id) >> 32);
    rows.key_low[lane] = uint32_t(seed);
    rows.key_high[lane] = uint32_t(uint64_t(seed) >> 32);
}

// Draws of columns 4 group .. 4 group + 3 for sixteen rows: word[w][i] is the draw of row i in column 4 group + w.
RLHF_INLINE PhiloxWords philox_of_rows(const PhiloxRows& rows, uint32_t stream, uint32_t group) {
    return philox_rounds(splat_words(group), splat_words(stream), rows.id_low, rows.id_high, rows.key_low,
                         rows.key_high);
}
