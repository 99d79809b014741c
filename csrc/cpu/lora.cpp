// Multi-slot LoRA on x [.., K] and y [.., M]: the low-rank part of forward and backward, on the rows of the runs alone.
//
// Contract. For a row n under a slot with A [r, K], B [M, r], scale s and dropout factors m_n (0 or 1 / (1 - p)):
//     h_n = s A (m_n x_n)      y_n (+)= B h_n
//     g_n = s B' dy_n          dx_n += m_n (A' g_n)     dA = sum g_n (m_n x_n)'     dB = sum dy_n h_n'
// x, y, dy and dx are fp32 or bf16, rows of any stride; so are A and B. Everything accumulates in fp32 and is rounded
// once where it is stored; how h and g enter their second product, see lora_tiles.inc.h. A dropped x may hold anything.
// dA and dB are written, not added to. Rows outside the runs are neither read nor written. h is computed again in
// backward.
//
// Determinism. A gradient of an adapter is the sum over fixed groups of rows, in order: blocks whose size depends on K
// and M alone are added up within a group of kGroupRows rows of one run, groups are added up in the order of the runs.
// So neither the number of threads nor what other slots do changes a bit.
//
// Memory. Each block's rows of x, dy and dx are read from main memory once and stay in the second-level cache for the
// products that follow.

#include "cpu/lora.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>

#include "common/check.h"
#include "cpu/lora_kernels.h"
#include "cpu/team.h"

namespace rlhf::cpu::lora {
namespace {

constexpr int64_t kForwardRows = 64;
constexpr int64_t kGroupRows = 128;
constexpr int64_t kBlockBytes = 1 << 20;  // of x, dx and dy in bf16; second-level caches have 1 to 2 MiB
constexpr int64_t kSerialWork = 1 << 20;        // rows r (K + M) of about a tenth of a millisecond
constexpr int64_t kAlignment = 64;

const Kernels& current_kernels() {
    const Kernels& (*table)();
    RLHF_PICK(table, kernels);
    return table();
}

struct Free {
    void operator()(char* memory) const { ::operator delete[](memory, std::align_val_t(kAlignment)); }
};

// Memory for several arrays: sizes are added up first, then one allocation serves them all.
class Arena {
  public:
    int64_t reserve(int64_t bytes) {
        const int64_t at = size_;
        size_ += round_up(bytes, kAlignment);
        return at;
    }
    void allocate() {
        memory_.reset(static_cast<char*>(::operator new[](std::max<int64_t>(size_, 1), std::align_val_t(kAlignment))));
    }
    template <typename T>
    T* at(int64_t offset) const {
        return reinterpret_cast<T*>(memory_.get() + offset);
    }

  private:
    int64_t size_ = 0;
    std::unique_ptr<char[], Free> memory_;
};

int64_t element_bytes(Type type) { return type == Type::bfloat16 ? 2 : 4; }

Matrix from_row(Matrix matrix, int64_t row) {
    matrix.data = static_cast<char*>(matrix.data) + row * matrix.stride * element_bytes(matrix.type);
    return matrix;
}

// Rows [x_row, x_row + rows) of one run.
struct Part {
    int64_t x_row, y_row, rows, slot;
    bool first;  // of its slot
};

std::vector<Part> split(const std::vector<Run>& runs, int64_t rows, size_t n_slots) {
    std::vector<Part> parts;
    std::vector<bool> seen(n_slots);
    for (const Run& run : runs) {
        for (int64_t n = 0; n < run.rows; n += rows) {
            parts.push_back({run.x_row + n, run.y_row + n, std::min(rows, run.rows - n), run.slot, !seen[run.slot]});
            seen[run.slot] = true;
        }
    }
    return parts;
}

struct PackJob {
    bool shrink;
    Factor factor;
    Type other;
    int64_t at;
};

void pack_all(const Kernels& k, const std::vector<PackJob>& jobs, const Arena& arena, [[maybe_unused]] int threads) {
    const int64_t count = jobs.size();
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; ++i) {
        const PackJob& job = jobs[i];
        (job.shrink ? k.pack_shrink : k.pack_expand)(job.factor, job.other, arena.at<void>(job.at));
    }
}

class Packer {
  public:
    Packer(const Kernels& k, Arena& arena) : k_(k), arena_(arena) {}
    int64_t shrink(const Factor& factor, Type other) {
        return add(true, factor, other, k_.shrink_bytes(factor, other));
    }
    int64_t expand(const Factor& factor, Type other) {
        return add(false, factor, other, k_.expand_bytes(factor, other));
    }
    const std::vector<PackJob>& jobs() const { return jobs_; }

  private:
    int64_t add(bool shrink, const Factor& factor, Type other, int64_t bytes) {
        jobs_.push_back({shrink, factor, other, arena_.reserve(bytes)});
        return jobs_.back().at;
    }
    const Kernels& k_;
    Arena& arena_;
    std::vector<PackJob> jobs_;
};

// What a thread needs for one block, and the dropped x of it.
struct Scratch {
    int64_t h, g, keep, kept, kernel;

    Scratch(const Kernels& k, Arena& arena, int64_t rows, int64_t rank, int64_t K, Type x, bool dropout)
        : h(arena.reserve(round_up(rows, kRowTile) * round_up(rank, kRankTile) * 4)),
          g(arena.reserve(round_up(rows, kRowTile) * round_up(rank, kRankTile) * 4)),
          keep(arena.reserve(dropout ? rows * round_up(K, kMaskColumns) / 8 : 0)),
          kept(arena.reserve(dropout ? rows * K * element_bytes(x) : 0)),
          kernel(arena.reserve(k.scratch_bytes(rank))) {}
};

// x of the rows from x_row on as A sees it, up to the factor 1 / (1 - p); fills the mask.
Matrix dropped(const Kernels& k, Matrix x, int64_t x_row, int64_t rows, int64_t K, double p, const Dropout& dropout,
               uint64_t* keep, void* kept) {
    const uint32_t threshold = static_cast<uint32_t>(p * 4294967296.0);
    k.keep_mask(dropout.seed, dropout.row_ids + x_row, dropout.stream, threshold, rows, K, keep);
    k.drop(x, rows, K, keep, kept);
    return {kept, K, x.type};
}

int64_t largest_rank(const std::vector<Slot>& slots) {
    int64_t rank = 1;
    for (const Slot& slot : slots) rank = std::max(rank, slot.rank);
    return rank;
}

bool worth_threads(const std::vector<Run>& runs, int64_t rank, int64_t K, int64_t M, int threads) {
    int64_t rows = 0;
    for (const Run& run : runs) rows += run.rows;
    return threads > 1 && rows * rank * (K + M) >= kSerialWork;
}

void check_call(const Matrix& x, const Matrix& y, int64_t K, int64_t M, const std::vector<Slot>& slots,
                const std::vector<Run>& runs, const Dropout& dropout, int threads) {
    RLHF_CHECK_SIZE(K);
    RLHF_CHECK_SIZE(M);
    RLHF_CHECK_THREADS(threads);
    int64_t rows = 0;
    for (const Run& run : runs) {
        RLHF_CHECK(run.x_row >= 0 && run.y_row >= 0 && run.rows >= 0, "runs", "rows of at least 0", run.rows);
        RLHF_CHECK(run.slot >= 0 && run.slot < int64_t(slots.size()), "runs", "a slot that exists", run.slot);
        RLHF_CHECK(run.rows <= (int64_t(1) << 56) - rows, "runs", "at most 2^56 rows", run.rows);
        rows += run.rows;
    }
    for (const Slot& slot : slots) {
        RLHF_CHECK(slot.rank >= 0, "rank", "at least 0", slot.rank);
        RLHF_CHECK_POINTER(slot.A.data, RLHF_PRODUCT(slot.rank, K));
        RLHF_CHECK_POINTER(slot.B.data, RLHF_PRODUCT(slot.rank, M));
        RLHF_CHECK(slot.p >= 0 && slot.p < 1, "p", "0 <= p < 1", slot.p);
        RLHF_CHECK(slot.p == 0 || rows == 0 || dropout.row_ids != nullptr, "row_ids", "an address", "a null pointer");
    }
    RLHF_CHECK_POINTER(x.data, RLHF_PRODUCT(rows, K));
    RLHF_CHECK_POINTER(y.data, RLHF_PRODUCT(rows, M));
}

}  // namespace

void forward(Matrix x, Matrix y, bool add, int64_t K, int64_t M, const std::vector<Slot>& slots,
             const std::vector<Run>& runs, Dropout dropout, int threads) {
    check_call(x, y, K, M, slots, runs, dropout, threads);
    const Kernels& k = current_kernels();
    const int64_t rank = largest_rank(slots);
    if (!worth_threads(runs, rank, K, M, threads)) threads = 1;
    const bool any_dropout = std::any_of(slots.begin(), slots.end(), [](const Slot& slot) { return slot.p > 0; });
    Arena arena;
    Packer packer(k, arena);
    std::vector<Factor> A, B;
    std::vector<int64_t> packed_A, packed_B;
    for (const Slot& slot : slots) {
        A.push_back({slot.A, slot.rank, K, true, true});
        B.push_back({slot.B, slot.rank, M, false, true});
        packed_A.push_back(packer.shrink(A.back(), x.type));
        packed_B.push_back(packer.expand(B.back(), y.type));
    }
    std::vector<Scratch> scratch;
    for (int t = 0; t < threads; ++t) scratch.emplace_back(k, arena, kForwardRows, rank, K, x.type, any_dropout);
    arena.allocate();
    pack_all(k, packer.jobs(), arena, threads);

    const std::vector<Part> blocks = split(runs, kForwardRows, slots.size());
    const auto block_at = [&](const Part& block, const Scratch& mine) {
        const Slot& slot = slots[block.slot];
        Matrix rows = from_row(x, block.x_row);
        float scale = float(slot.scale);
        if (slot.p > 0) {
            rows = dropped(k, rows, block.x_row, block.rows, K, slot.p, dropout, arena.at<uint64_t>(mine.keep),
                           arena.at<void>(mine.kept));
            scale = float(slot.scale / (1 - slot.p));
        }
        float* h = arena.at<float>(mine.h);
        k.shrink(rows, block.rows, A[block.slot], arena.at<void>(packed_A[block.slot]), scale, h);
        k.expand(h, block.rows, B[block.slot], arena.at<void>(packed_B[block.slot]), from_row(y, block.y_row), add,
                 nullptr, arena.at<void>(mine.kernel));
    };
    const int64_t count = blocks.size();
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; ++i) block_at(blocks[i], scratch[thread_number()]);
}

void backward(Matrix dy, Matrix x, Matrix dx, int64_t K, int64_t M, const std::vector<Slot>& slots,
              const std::vector<Run>& runs, Dropout dropout, int threads) {
    check_call(x, dy, K, M, slots, runs, dropout, threads);
    const Kernels& k = current_kernels();
    const int64_t rank = largest_rank(slots);
    if (!worth_threads(runs, rank, K, M, threads)) threads = 1;
    const bool any_dropout = std::any_of(slots.begin(), slots.end(), [](const Slot& slot) { return slot.p > 0; });
    const bool need_x = dx.data != nullptr;
    const int64_t fitting = kBlockBytes / (2 * std::max<int64_t>(2 * K + M, 1)) / kRowTile * kRowTile;
    const int64_t block_rows = std::clamp(fitting, kRowTile, kMaxRows);
    const int64_t size_A = round_up(rank, kRankTile) * round_up(K, kColumnTile);
    const int64_t size_B = round_up(rank, kRankTile) * round_up(M, kColumnTile);

    struct SlotPlan {
        Factor A, B, dA, dB;
        int64_t shrink_A, expand_A, shrink_B;  // packed; where needed
        int64_t total_A, total_B;
        bool need_A, need_B, need_g;
    };
    Arena arena;
    Packer packer(k, arena);
    std::vector<SlotPlan> plans;
    for (const Slot& slot : slots) {
        SlotPlan plan{};
        plan.A = {slot.A, slot.rank, K, true};
        plan.B = {slot.B, slot.rank, M, false};
        plan.dA = {slot.dA, slot.rank, K, true};
        plan.dB = {slot.dB, slot.rank, M, false};
        plan.need_A = slot.dA.data != nullptr;
        plan.need_B = slot.dB.data != nullptr;
        plan.need_g = plan.need_A || need_x;
        if (plan.need_B) plan.shrink_A = packer.shrink(plan.A, x.type);
        if (need_x) plan.expand_A = packer.expand(plan.A, dx.type);
        if (plan.need_g) plan.shrink_B = packer.shrink(plan.B, dy.type);
        if (plan.need_A) plan.total_A = arena.reserve(size_A * 4);
        if (plan.need_B) plan.total_B = arena.reserve(size_B * 4);
        plans.push_back(plan);
    }
    std::vector<Scratch> scratch;
    std::vector<int64_t> sums_A, sums_B;  // per thread
    for (int t = 0; t < threads; ++t) {
        scratch.emplace_back(k, arena, block_rows, rank, K, x.type, any_dropout);
        sums_A.push_back(arena.reserve(size_A * 4));
        sums_B.push_back(arena.reserve(size_B * 4));
    }
    arena.allocate();
    pack_all(k, packer.jobs(), arena, threads);

    // One group of rows: dx, and its share of dA and dB in `to_A` and `to_B`.
    const auto group_at = [&](const Part& group, const Scratch& mine, float* to_A, float* to_B) {
        const Slot& slot = slots[group.slot];
        const SlotPlan& plan = plans[group.slot];
        float *h = arena.at<float>(mine.h), *g = arena.at<float>(mine.g);
        void* scratch_memory = arena.at<void>(mine.kernel);
        for (int64_t n = 0; n < group.rows; n += block_rows) {
            const int64_t rows = std::min(block_rows, group.rows - n), x_row = group.x_row + n;
            const Matrix dy_rows = from_row(dy, group.y_row + n);
            Matrix x_rows = from_row(x, x_row);
            uint64_t* keep = nullptr;
            float scale = float(slot.scale);
            if (slot.p > 0) {
                keep = arena.at<uint64_t>(mine.keep);
                x_rows = dropped(k, x_rows, x_row, rows, K, slot.p, dropout, keep, arena.at<void>(mine.kept));
                scale = float(slot.scale / (1 - slot.p));  // of g, too: it meets the x and the dx with this factor
            }
            if (plan.need_B) k.shrink(x_rows, rows, plan.A, arena.at<void>(plan.shrink_A), scale, h);
            if (plan.need_g) k.shrink(dy_rows, rows, plan.B, arena.at<void>(plan.shrink_B), scale, g);
            if (plan.need_B) k.outer(h, dy_rows, rows, plan.B, n > 0, to_B, scratch_memory);
            if (plan.need_A) k.outer(g, x_rows, rows, plan.A, n > 0, to_A, scratch_memory);
            if (need_x) {
                k.expand(g, rows, plan.A, arena.at<void>(plan.expand_A), from_row(dx, x_row), true, keep,
                         scratch_memory);
            }
        }
    };
    // As many groups at a time as there are threads, then their sums in order; a slot's first group is its total so
    // far.
    const std::vector<Part> groups = split(runs, kGroupRows, slots.size());
    const int64_t count = groups.size();
    std::vector<bool> has_rows(slots.size());
    for (const Part& group : groups) has_rows[group.slot] = true;
    for (size_t i = 0; i < plans.size(); ++i) {
        if (!has_rows[i] && plans[i].need_A) std::fill_n(arena.at<float>(plans[i].total_A), size_A, 0.0f);
        if (!has_rows[i] && plans[i].need_B) std::fill_n(arena.at<float>(plans[i].total_B), size_B, 0.0f);
    }
    for (int64_t begin = 0; begin < count; begin += threads) {
        const int64_t end = std::min<int64_t>(begin + threads, count);
        const auto sums_of = [&](int64_t i, bool of_A) {
            const SlotPlan& plan = plans[groups[i].slot];
            if (groups[i].first) return arena.at<float>(of_A ? plan.total_A : plan.total_B);
            return arena.at<float>((of_A ? sums_A : sums_B)[i - begin]);
        };
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int64_t i = begin; i < end; ++i) {
            group_at(groups[i], scratch[i - begin], sums_of(i, true), sums_of(i, false));
        }
        for (int64_t i = begin; i < end; ++i) {
            const SlotPlan& plan = plans[groups[i].slot];
            if (groups[i].first) continue;
            const int64_t R = round_up(plan.A.rank, kRankTile);
            if (plan.need_A) {
                k.accumulate(sums_of(i, true), R * round_up(K, kColumnTile), arena.at<float>(plan.total_A));
            }
            if (plan.need_B) {
                k.accumulate(sums_of(i, false), R * round_up(M, kColumnTile), arena.at<float>(plan.total_B));
            }
        }
    }
    for (const SlotPlan& plan : plans) {
        if (plan.need_A) k.unpack(arena.at<float>(plan.total_A), plan.dA, x.type);
        if (plan.need_B) k.unpack(arena.at<float>(plan.total_B), plan.dB, dy.type);
    }
}

}  // namespace rlhf::cpu::lora
