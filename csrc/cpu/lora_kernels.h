// What lora.cpp needs of each instruction set: three products with a small rank on a block of rows, and their packing.
//
// A factor W [rank, columns] is A itself or B transposed. With rank padded to R (a multiple of 16) by zeros:
//     shrink:  h [rows, R] = x [rows, columns] Wᵀ
//     expand:  y [rows, columns] (+)= h W, where `keep` says so
//     outer:   sums [R, columns] (+)= hᵀ x
// h and sums are fp32; x and y are fp32 or bf16. Every product accumulates in fp32.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/lora.h"
#include "cpu/tiles.h"

namespace rlhf::cpu::lora {

constexpr int64_t kRankTile = kLoraRank;  // R is a multiple of it
constexpr int64_t kColumnTile = 32;   // rows of sums are padded to a multiple of it
constexpr int64_t kRowTile = 32;      // h has memory for whole tiles of rows
constexpr int64_t kMaskColumns = 64;  // columns per word of a dropout mask
constexpr int64_t kMaxRows = 128;     // rows of a block

constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// A factor as it lies in memory: rows of `matrix` are ranks (A) or columns (B).
struct Factor {
    Matrix matrix;
    int64_t rank, columns;
    bool ranks_are_rows;
    bool multiply_add = false;  // never by tiles: a forward pass has the bits of a decoding step, which has none
};

struct Kernels {
    // Packing for x or y of type `other`. Sizes are in bytes; packed memory is aligned to 64 bytes.
    int64_t (*shrink_bytes)(const Factor& factor, Type other);
    void (*pack_shrink)(const Factor& factor, Type other, void* packed);
    int64_t (*expand_bytes)(const Factor& factor, Type other);
    void (*pack_expand)(const Factor& factor, Type other, void* packed);

    // h [round_up(rows, kRowTile), R] = scale x Wᵀ; rows beyond `rows` are left undefined.
    void (*shrink)(Matrix x, int64_t rows, const Factor& factor, const void* packed, float scale, float* h);
    // keep [rows, columns / 64 rounded up], or null.
    void (*expand)(const float* h, int64_t rows, const Factor& factor, const void* packed, Matrix y, bool add,
                   const uint64_t* keep, void* scratch);
    // sums has R round_up(columns, kColumnTile) elements, in an order that `unpack` knows. scratch: scratch_bytes of
    // memory that nobody else uses meanwhile.
    void (*outer)(const float* h, Matrix x, int64_t rows, const Factor& factor, bool add, float* sums, void* scratch);
    int64_t (*scratch_bytes)(int64_t rank);

    // keep [rows, columns / 64 rounded up]: bit c % 64 of word c / 64 says whether column c stays.
    void (*keep_mask)(int64_t seed, const int64_t* row_ids, uint32_t stream, uint32_t threshold, int64_t rows,
                      int64_t columns, uint64_t* keep);
    // kept [rows, columns] = keep ? x : 0, of x's type.
    void (*drop)(Matrix x, int64_t rows, int64_t columns, const uint64_t* keep, void* kept);
    // total += part, `count` elements, a multiple of 16.
    void (*accumulate)(const float* part, int64_t count, float* total);
    // gradient.matrix = sums that `outer` left of an x of type `other`.
    void (*unpack)(const float* sums, const Factor& gradient, Type other);
};

RLHF_IN_EVERY_SET(const Kernels& kernels();)

}  // namespace rlhf::cpu::lora
