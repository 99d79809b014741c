// lora_decode.h for one instruction set. A lane is a row of x: its sixteen neighbours go through a strip of W together,
// and what the adapters add is a sum over the rank of broadcast elements of B times h = scale x Aᵀ, laid out the same way.

constexpr int64_t kSerialProducts = 1 << 22;  // N K M, N in whole vectors, of about a tenth of a millisecond

struct DecodeCall : DecodeArguments {
    int64_t halves;    // of sixteen rows of x
    int64_t ranks;     // of all slots, and one more for each
    Element* columns;  // [halves][K / KT] tiles
    float* h;          // [halves][ranks][16 rows], one slot after another: its rank, then 1 for rows that carry it
    int32_t* present;  // [halves][n_slots]: whether any row carries it; what stands in h of others is not read
};

static void begin_rows(const DecodeCall& call, int64_t half) {
    const int64_t rows = call.N - half * 16 < 16 ? call.N - half * 16 : 16;
    int32_t* present = call.present + half * call.n_slots;
    std::memset(present, 0, sizeof(int32_t) * call.n_slots);
    for (int64_t j = 0; j < call.n_runs; ++j) {
        const Run& run = call.runs[j];
        if (run.x_row < half * 16 + rows && run.x_row + run.rows > half * 16) present[run.slot] = 1;
    }
    const Stored* x = static_cast<const Stored*>(call.x.data) + half * 16 * call.x.stride;
    pack_column([&](int64_t i) { return x + i * call.x.stride; }, rows, call.K, call.columns + half * call.K * 16);
}

// Rows [from, to) of h for sixteen rows of x.
static void shrink_rows(const DecodeCall& call, int64_t half, int64_t from, int64_t to) {
    const Element* column = call.columns + half * call.K * 16;
    float* h = call.h + half * call.ranks * 16;
    for (int64_t slot = 0, first = 0; slot < call.n_slots; first += call.slots[slot++].rank + 1) {
        const Slot& s = call.slots[slot];
        if (first + s.rank < from || first >= to || !call.present[half * call.n_slots + slot]) continue;
        float scales[16] = {}, carries[16] = {};
        for (int64_t j = 0; j < call.n_runs; ++j) {
            const Run& run = call.runs[j];
            if (run.slot != slot) continue;
            for (int64_t i = 0; i < 16; ++i) {
                const int64_t row = half * 16 + i;
                if (row < run.x_row || row >= run.x_row + run.rows) continue;
                scales[i] = static_cast<float>(s.scale);
                carries[i] = 1.0f;
            }
        }
        const int64_t begin = from > first ? from - first : 0, end = to - first < s.rank ? to - first : s.rank;
        if (s.A.type == Type::float32) {
            shrink_ranks<float>(s.A, begin, end, call.K, column, load16(scales), h + first * 16);
        } else {
            shrink_ranks<uint16_t>(s.A, begin, end, call.K, column, load16(scales), h + first * 16);
        }
        if (first + s.rank < to) store16(h + (first + s.rank) * 16, load16(carries));
    }
}

// Strip `strip` of W for all rows. scratch: kStrip rows of K elements, for the last strip.
static void decode_strip(const DecodeCall& call, int64_t number, Stored* scratch) {
    const Strip strip = strip_of(call.weight.data, call.weight.stride, call.M, call.K, number, scratch);
    Stored* y = static_cast<Stored*>(call.y.data) + strip.first;
    alignas(64) float sums[2 * kStrip * 16];
    for (int64_t half = 0; half < call.halves; half += 2) {
        const Element* b = call.columns + half * call.K * 16;
        const int64_t sides = half + 1 < call.halves ? 2 : 1;
        (sides == 2 ? strip_products<2, Stored> : strip_products<1, Stored>)(strip.w, strip.stride, kStrip, b,
                                                                            call.K * 16, call.K / KT, sums, false);
        for (int64_t side = 0; side < sides; ++side) {
            float* mine = sums + side * kStrip * 16;
            round_strip(strip, call.bias, mine);
            const float* h = call.h + (half + side) * call.ranks * 16;
            for (int64_t slot = 0; slot < call.n_slots; h += (call.slots[slot++].rank + 1) * 16) {
                if (!call.present[(half + side) * call.n_slots + slot]) continue;
                const Slot& s = call.slots[slot];
                (s.B.type == Type::float32 ? add_deltas<float> : add_deltas<uint16_t>)(s.B, strip, s.rank, h,
                                                                                      load16(h + s.rank * 16), mine);
            }
            const int64_t row = (half + side) * 16, rows = call.N - row < 16 ? call.N - row : 16;
            store_rows(mine, strip.count, 0, rows, [&](int64_t i) { return y + (row + i) * call.y.stride; });
        }
    }
}

static void run_decode(const DecodeArguments& arguments) {
    DecodeCall call{arguments, ceil_div(arguments.N, 16), 0, nullptr, nullptr, nullptr};
    for (int64_t slot = 0; slot < call.n_slots; ++slot) call.ranks += call.slots[slot].rank + 1;
    const bool short_call = call.halves * 16 * call.K * call.M < kSerialProducts;
    const int threads = short_call ? 1 : call.threads;
    const int64_t shares = ceil_div(threads, call.halves);  // of the ranks, so that all threads shrink
    const int64_t strips = ceil_div(call.M, kStrip);
    Memory memory;
    call.h = memory.take<float>(call.halves * call.ranks * 16);
    call.columns = memory.take<Element>(call.halves * call.K * 16);
    call.present = memory.take<int32_t>(call.halves * call.n_slots);
    Stored* scratch = memory.take<Stored>(threads * kStrip * call.K);
    const auto work = [&](Member& me) {
        const TileScope scope;
        Stored* mine = scratch + me.thread * kStrip * call.K;
        steal(me, call.halves, [&](int64_t half) { begin_rows(call, half); });
        steal(me, call.halves * shares, [&](int64_t item) {
            const int64_t part = item % shares;
            shrink_rows(call, item / shares, call.ranks * part / shares, call.ranks * (part + 1) / shares);
        });
        steal(me, strips, [&](int64_t strip) { decode_strip(call, strip, mine); });
    };
    run_together(threads, work);
}
