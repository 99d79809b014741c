// Multi-slot LoRA on the CPU. The contract stands in lora.cpp.
#pragma once

#include <cstdint>
#include <vector>

namespace rlhf::cpu::lora {

enum class Type : int32_t { float32, bfloat16 };

// Row n starts at data + n stride, in elements of `type`; the inner stride is 1.
struct Matrix {
    void* data;
    int64_t stride;
    Type type;
};

struct Slot {
    Matrix A, B;  // [rank, K], [M, rank]
    int64_t rank;
    double scale;
    double p;       // dropout of what enters A; 0 = none
    Matrix dA, dB;  // like A and B; data is null where no gradient is needed
};

// Rows [x_row, x_row + rows) of x (and dx), and as many of y (or dy) from y_row on, carry `slot`.
struct Run {
    int64_t x_row, y_row, rows, slot;
};

struct Dropout {
    int64_t seed;
    const int64_t* row_ids;  // one per row of x; null where no slot has p > 0
    uint32_t stream;
};

// y = delta on the rows of all runs, or y += delta if `add`.
void forward(Matrix x, Matrix y, bool add, int64_t K, int64_t M, const std::vector<Slot>& slots,
             const std::vector<Run>& runs, Dropout dropout, int threads);

// dx += its low-rank part on the rows of all runs (unless dx.data is null); writes every needed dA and dB.
void backward(Matrix dy, Matrix x, Matrix dx, int64_t K, int64_t M, const std::vector<Slot>& slots,
              const std::vector<Run>& runs, Dropout dropout, int threads);

}  // namespace rlhf::cpu::lora
