// One decoding step of a decoder of the Llama kind on the CPU. The contract stands in decode_step.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/decode_attention_rows.h"
#include "cpu/isa.h"
#include "cpu/lora.h"

namespace rlhf::cpu::step {

using lora::Matrix;
using lora::Type;

enum Name { Q, K, V, O, GATE, UP, DOWN, kNames };

// One slot's part of one linear; rank 0 where there is none.
struct Pair {
    Matrix A, B;  // [rank, in], [out, rank]
    int64_t rank;
};

// Weights, biases and norms have the decoder's type; biases and the norms of q and k may be null.
struct Linear {
    const void* weight;
    int64_t stride;  // of rows; the inner stride is 1
    const void* bias;
    int64_t out, in;
};

struct Layer {
    const void *input_norm, *mlp_norm, *q_norm, *k_norm;
    Linear linears[kNames];
    int64_t window;  // 0: none
};

struct Decoder {
    Type type;
    const void *embedding, *final_norm;
    int64_t embedding_stride, vocabulary, hidden, query_heads, cache_heads, head_dim;
    float eps, scale;
};

struct Adapter {
    float scale;
    std::vector<Pair> pairs;  // [layers][kNames]
};

// One layer's keys or values [blocks, block, heads, head_dim], strides in elements, the last one 1.
struct LayerCache {
    void* data;
    int64_t block, position, head;
};

struct Rows {
    int64_t n;
    const int64_t *tokens, *positions, *slots;  // [n]; slot -1: none
    const int64_t* table;                       // [n, table_blocks] dense
    int64_t table_blocks;
    const void *cos, *sin;  // [angles, head_dim] dense, of the decoder's type
    int64_t angles;
};

// How one call goes through a layer: its linears take their input together in four groups, and what a slot adds to each of
// them has its place in the slot's h of the group. Made once, from addresses alone.
enum Group { QKV, ATTENDED, GATED, INNER, kGroups };

// A few rows of an A, for rows `h` and on of the slot's h.
struct ShrinkPart {
    Matrix A;
    int64_t count, h;
};

// Rank 0 where the slot leaves the linear alone.
struct ExpandPart {
    Matrix B;
    int64_t rank, h;
};

struct LayerPlan {
    const int64_t* shrinks[kGroups];     // [n_slots + 1], where the parts of each slot begin in `parts`
    int64_t most[kGroups];               // parts of a slot
    const ExpandPart* expands[kNames];   // [n_slots]
};

// The rows of one slot among sixteen.
struct alignas(64) SlotRows {
    float carries[16];  // 1 in lanes whose row has the slot, else 0
    int64_t half, slot;
};

// Everything that the code of one instruction set needs for a call. Rows go by halves of sixteen; panels and columns of
// tiles: see lane_rows.inc.h.
struct StepCall {
    const Decoder* decoder;
    const Layer* layers;  // this and the next three: [n_layers]
    const LayerPlan* plans;
    const LayerCache *keys, *values;
    const ShrinkPart* parts;
    const float* slot_scales;   // [n_slots]
    const SlotRows* slot_rows;  // [n_slot_rows], by halves
    const int64_t* firsts;      // [halves + 1], where those of each half begin
    Rows rows;
    int64_t n_layers, n_slot_rows, ranks, block, halves;
    int64_t shares;  // into which the attention of sixteen rows on a cache head is divided
    int threads;
    DecodeGroup attend;
    void* out;  // [n, hidden] dense

    // Memory, all of it aligned to 64 bytes.
    float *x, *qkv, *cos, *sin;  // panels of every half: residual stream, queries with keys and values, angles
    float* h;                    // [n_slot_rows][ranks][16]
    char* attended;              // [n, query_heads head_dim] elements
    char* inner;                 // [halves] columns: what enters `down`
    char* own;                   // [threads][own_bytes], in which stand, at these bytes:
    int64_t own_bytes, columns, staged, other_staged, turned, scores;
};

#define RLHF_DECLARE_STEP                        \
    void step_float32(const StepCall& call);     \
    void step_bfloat16(const StepCall& call);
RLHF_IN_EVERY_SET(RLHF_DECLARE_STEP)
#undef RLHF_DECLARE_STEP

class DecodeStep {
public:
    DecodeStep(const Decoder& decoder, std::vector<Layer> layers, const std::vector<Adapter>& adapters);

    // The caches of every layer, from now on.
    void bind(int64_t blocks, int64_t block, std::vector<LayerCache> keys, std::vector<LayerCache> values);

    void run(const Rows& rows, void* out, int threads);

private:
    void check(const Rows& rows) const;
    void make_plans(const std::vector<Adapter>& adapters);
    void find_slot_rows(StepCall& call);
    void lay_out(StepCall& call, int64_t longest);

    const Decoder decoder_;
    const std::vector<Layer> layers_;
    std::vector<ShrinkPart> parts_;
    std::vector<int64_t> shrinks_;
    std::vector<ExpandPart> expands_;
    std::vector<SlotRows> slot_rows_;
    std::vector<int64_t> firsts_;
    std::vector<LayerPlan> plans_;
    std::vector<float> slot_scales_;
    std::vector<LayerCache> keys_, values_;
    int64_t blocks_ = 0, block_ = 0, ranks_ = 0, weights_ = 0, window_ = 0;
    std::vector<char> memory_;
};

}  // namespace rlhf::cpu::step
