// decode_step.h for one instruction set. A lane is a row of the batch: its sixteen neighbours go through the whole
// decoder together, so that norms, rotary embedding and the gated product are arithmetic of whole vectors whatever the
// sizes of heads, and nothing is transposed but what attention reads and writes.
//
// Panels [n][16] hold the residual stream, queries, keys and values as floats that were rounded to Stored; what enters
// a product is a column of tiles. Every thread norms and packs all rows for itself: that is cheaper than to wait.

constexpr int64_t kStored = sizeof(Stored);

// What one thread has for itself.
struct Own {
    Member& member;
    Element* columns;   // [halves] columns of what enters the next product
    Stored* staged[2];  // kStrip rows of W
    float* turned;       // [group + 1][head_dim][16]
    float* scores;
};

static Own own_memory(const StepCall& call, Member& member) {
    char* own = call.own + member.thread * call.own_bytes;
    return {member,
            reinterpret_cast<Element*>(own + call.columns),
            {reinterpret_cast<Stored*>(own + call.staged), reinterpret_cast<Stored*>(own + call.other_staged)},
            reinterpret_cast<float*>(own + call.turned),
            reinterpret_cast<float*>(own + call.scores)};
}

RLHF_INLINE int64_t rows_of(const StepCall& call, int64_t half) {
    return call.rows.n - half * 16 < 16 ? call.rows.n - half * 16 : 16;
}

// ---- norms and rotary embedding -------------------------------------------------------------------------------------

// 1 / root mean square of every lane of panel [count][16], in the order of llama_ops_kernel.inc.h, where a row is dense:
// every kLanes-th square has a sum, and the sums are added up by halves.
RLHF_INLINE f32x16 rstd_of(const float* panel, int64_t count, float eps) {
    f32x16 sums[kLanes];
    for (int i = 0; i < kLanes; ++i) sums[i] = splat(0.0f);
    for (int64_t k = 0; k < count; k += kLanes) {
        const int64_t some = count - k < kLanes ? count - k : kLanes;
        for (int64_t i = 0; i < some; ++i) {
            const f32x16 x = load16(panel + (k + i) * 16);
            sums[i] = muladd(x, x, sums[i]);
        }
    }
    for (int step = kLanes / 2; step > 0; step /= 2) {
        for (int i = 0; i < step; ++i) sums[i] += sums[i + step];
    }
    return 1.0f / sqrt16(sums[0] / splat(static_cast<float>(count)) + eps);
}

RLHF_INLINE f32x16 normed(const float* panel, int64_t k, const Stored* weight, f32x16 rstd) {
    return splat(wide(weight[k])) * rounded(load16(panel + k * 16) * rstd);
}

// The norm of a panel as a column of tiles.
static void norm_column(const float* panel, int64_t count, const Stored* weight, float eps, Element* column) {
    const f32x16 rstd = rstd_of(panel, count, eps);
    int64_t k = 0;
    for (; k + 2 <= count; k += 2) {
        store_two(column, k, {normed(panel, k, weight, rstd), normed(panel, k + 1, weight, rstd)});
    }
    if (k < count) {
        store_two(column, k, {normed(panel, k, weight, rstd), splat(0.0f)});
        k += 2;
    }
    for (; k < round_up(count, KT); k += 2) store_two(column, k, {splat(0.0f), splat(0.0f)});
}

static void norm_rows(const StepCall& call, const void* weight, Element* columns) {
    const int64_t H = call.decoder->hidden;
    for (int64_t half = 0; half < call.halves; ++half) {
        norm_column(call.x + half * H * 16, H, static_cast<const Stored*>(weight), call.decoder->eps,
                    columns + half * round_up(H, KT) * 16);
    }
}

// A head [D][16], normed if there is a weight, and its halves (a, b) turned into (a cos - b sin, b cos + a sin).
static void turn_head(const StepCall& call, int64_t half, const float* head, const void* weight, float* turned) {
    const int64_t D = call.decoder->head_dim;
    if (weight) {
        const f32x16 rstd = rstd_of(head, D, call.decoder->eps);
        for (int64_t d = 0; d < D; ++d) {
            store16(turned + d * 16, rounded(normed(head, d, static_cast<const Stored*>(weight), rstd)));
        }
        head = turned;
    }
    const float *cos = call.cos + half * D * 16, *sin = call.sin + half * D * 16;
    for (int64_t d = 0; d < D / 2; ++d) {
        const int64_t low = d * 16, high = (D / 2 + d) * 16;
        const f32x16 a = load16(head + low), b = load16(head + high);
        store16(turned + low, rounded(rounded(a * load16(cos + low)) - rounded(b * load16(sin + low))));
        store16(turned + high, rounded(rounded(b * load16(cos + high)) + rounded(a * load16(sin + high))));
    }
}

// ---- the two ends of a step -----------------------------------------------------------------------------------------

// Rows of a table [.., count], one for each lane, as a panel.
static void gather_panel(const StepCall& call, int64_t half, const void* table, int64_t stride, const int64_t* index,
                         int64_t count, Element* column, float* panel) {
    const Stored* rows = static_cast<const Stored*>(table);
    pack_column([&](int64_t i) { return rows + index[half * 16 + i] * stride; }, rows_of(call, half), count, column);
    for (int64_t k = 0; k < count; k += 2) {
        const Two x = load_two(column, k);
        store16(panel + k * 16, x.even);
        if (k + 1 < count) store16(panel + k * 16 + 16, x.odd);
    }
}

// Embedding and angles of sixteen rows.
static void begin_rows(const StepCall& call, int64_t half, const Own& own) {
    const Decoder& decoder = *call.decoder;
    const int64_t H = decoder.hidden, D = decoder.head_dim;
    gather_panel(call, half, decoder.embedding, decoder.embedding_stride, call.rows.tokens, H, own.columns,
                 call.x + half * H * 16);
    gather_panel(call, half, call.rows.cos, D, call.rows.positions, D, own.columns, call.cos + half * D * 16);
    gather_panel(call, half, call.rows.sin, D, call.rows.positions, D, own.columns, call.sin + half * D * 16);
}

static void finish_rows(const StepCall& call, int64_t half) {
    const int64_t H = call.decoder->hidden;
    float* x = call.x + half * H * 16;
    const f32x16 rstd = rstd_of(x, H, call.decoder->eps);
    for (int64_t k = 0; k < H; ++k) {
        store16(x + k * 16, normed(x, k, static_cast<const Stored*>(call.decoder->final_norm), rstd));
    }
    Stored* out = static_cast<Stored*>(call.out) + half * 16 * H;
    store_rows(x, H, 0, rows_of(call, half), [&](int64_t i) { return out + i * H; });
}

// ---- linears --------------------------------------------------------------------------------------------------------

// h of a group of linears, whose input stands in `columns`.
static void shrink_group(const StepCall& call, int64_t layer, Group group, int64_t in, const Element* columns,
                         const Own& own) {
    const LayerPlan& plan = call.plans[layer];
    const int64_t most = plan.most[group];
    if (call.n_slot_rows == 0) return;  // whoever waits for nothing waits all the same
    steal(own.member, call.n_slot_rows * most, [&](int64_t item) __attribute__((always_inline)) {
        const int64_t i = item / most;
        const SlotRows& rows = call.slot_rows[i];
        const int64_t number = plan.shrinks[group][rows.slot] + item % most;
        if (number >= plan.shrinks[group][rows.slot + 1]) return;
        const ShrinkPart& part = call.parts[number];
        const Element* column = columns + rows.half * round_up(in, KT) * 16;
        float* h = call.h + (i * call.ranks + part.h) * 16;
        const f32x16 scale = splat(call.slot_scales[rows.slot]);
        if (part.A.type == Type::float32) {
            shrink_ranks<float>(part.A, 0, part.count, in, column, scale, h);
        } else {
            shrink_ranks<uint16_t>(part.A, 0, part.count, in, column, scale, h);
        }
    });
}

// What a linear gives for one strip of its outputs and one or two halves, in sums [2][kStrip][16].
RLHF_INLINE void strip_of_linear(const StepCall& call, const Linear& linear, const ExpandPart* parts,
                                 const Strip& strip, int64_t half, int64_t sides, const Element* columns, float* sums) {
    const int64_t next_half = half + sides, after = next_half + 2 < call.halves ? next_half + 2 : call.halves;
    for (int64_t i = half == 0 ? 0 : call.firsts[next_half]; i < call.firsts[after]; ++i) {
        const int64_t slot = call.slot_rows[i].slot;
        if (i == 0 || slot != call.slot_rows[i - 1].slot) prefetch_deltas(parts[slot].B, strip, parts[slot].rank);
    }
    const int64_t depth = ceil_div(linear.in, KT);
    const Element* b = columns + half * depth * kTileElements;
    (sides == 2 ? strip_products<2, Stored> : strip_products<1, Stored>)(strip.w, strip.stride, kStrip, b,
                                                                        depth * kTileElements, depth, sums, false);
    for (int64_t side = 0; side < sides; ++side) {
        float* mine = sums + side * kStrip * 16;
        round_strip(strip, linear.bias, mine);
        bool changed = false;
        for (int64_t i = call.firsts[half + side]; i < call.firsts[half + side + 1]; ++i) {
            const ExpandPart& part = parts[call.slot_rows[i].slot];
            if (part.rank == 0) continue;
            changed = kStored == 2;
            const float* h = call.h + (i * call.ranks + part.h) * 16;
            const f32x16 carries = load16(call.slot_rows[i].carries);
            (part.B.type == Type::float32 ? add_deltas<float> : add_deltas<uint16_t>)(part.B, strip, part.rank, h,
                                                                                     carries, mine);
        }
        if (changed) {
            for (int64_t v = 0; v < strip.count; ++v) store16(mine + v * 16, rounded(load16(mine + v * 16)));
        }
    }
}

// sink(half, strip, sums [kStrip][16]) for every half of one strip.
template <typename Sink>
RLHF_INLINE void for_halves(const StepCall& call, const Linear& linear, const ExpandPart* parts,
                            int64_t number, const Element* columns, const Own& own, const Sink& sink) {
    const Strip strip = strip_of(linear.weight, linear.stride, linear.out, linear.in, number, own.staged[0]);
    alignas(64) float sums[2 * kStrip * 16];
    for (int64_t half = 0; half < call.halves; half += 2) {
        const int64_t sides = half + 1 < call.halves ? 2 : 1;
        strip_of_linear(call, linear, parts, strip, half, sides, columns, sums);
        for (int64_t side = 0; side < sides; ++side) sink(half + side, strip, sums + side * kStrip * 16);
    }
}

// Strip `number` of q, k and v, one after the other.
static void qkv_strip(const StepCall& call, int64_t layer, int64_t number, const Own& own) {
    const Linear* linears = call.layers[layer].linears;
    const int64_t width = linears[Q].out + 2 * linears[K].out;
    int64_t first = 0;
    int name = Q;
    for (int64_t strips; number >= (strips = ceil_div(linears[name].out, kStrip)); ++name) {
        number -= strips;
        first += linears[name].out;
    }
    for_halves(call, linears[name], call.plans[layer].expands[name], number, own.columns, own,
               [&](int64_t half, const Strip& strip, const float* sums) __attribute__((always_inline)) {
                   std::memcpy(call.qkv + (half * width + first + strip.first) * 16, sums,
                               sizeof(float) * 16 * strip.count);
               });
}

// Strip `number` of o or down, added to the residual stream.
static void residual_strip(const StepCall& call, int64_t layer, Name name, int64_t number, const Element* columns,
                           const Own& own) {
    const int64_t H = call.decoder->hidden;
    for_halves(call, call.layers[layer].linears[name], call.plans[layer].expands[name], number, columns,
               own, [&](int64_t half, const Strip& strip, const float* sums) __attribute__((always_inline)) {
                   float* x = call.x + (half * H + strip.first) * 16;
                   for (int64_t v = 0; v < strip.count; ++v) {
                       store16(x + v * 16, rounded(load16(x + v * 16) + load16(sums + v * 16)));
                   }
               });
}

RLHF_INLINE f32x16 gated(const float* gate, const float* up) {
    const f32x16 x = load16(gate), silu = rounded(x / (1.0f + exp16(-x)));
    return silu * load16(up);
}

// Strip `number` of gate and up, and their product as the input of down.
static void gated_strip(const StepCall& call, int64_t layer, int64_t number, const Own& own) {
    const Linear* linears = call.layers[layer].linears;
    const ExpandPart* const* expands = call.plans[layer].expands;
    const Linear &gate = linears[GATE], &up = linears[UP];
    const Strip a = strip_of(gate.weight, gate.stride, gate.out, gate.in, number, own.staged[0]);
    const Strip b = strip_of(up.weight, up.stride, up.out, up.in, number, own.staged[1]);
    const int64_t padded = round_up(gate.out, KT), end = a.first + kStrip < padded ? kStrip : padded - a.first;
    alignas(64) float gates[2 * kStrip * 16], ups[2 * kStrip * 16];
    for (int64_t half = 0; half < call.halves; half += 2) {
        const int64_t sides = half + 1 < call.halves ? 2 : 1;
        strip_of_linear(call, gate, expands[GATE], a, half, sides, own.columns, gates);
        strip_of_linear(call, up, expands[UP], b, half, sides, own.columns, ups);
        for (int64_t side = 0; side < sides; ++side) {
            const float *left = gates + side * kStrip * 16, *right = ups + side * kStrip * 16;
            Element* column = reinterpret_cast<Element*>(call.inner) + ((half + side) * padded + a.first) * 16;
            for (int64_t v = 0; v < end; v += 2) {
                const Two x = {v < a.count ? gated(left + v * 16, right + v * 16) : splat(0.0f),
                               v + 1 < a.count ? gated(left + v * 16 + 16, right + v * 16 + 16) : splat(0.0f)};
                store_two(column, v, x);
            }
        }
    }
}

// ---- attention ------------------------------------------------------------------------------------------------------

// Some of sixteen rows on one cache head.
struct HeadRows {
    int64_t head, group, half, begin, end;  // rows [begin, end) of the half
};

RLHF_INLINE HeadRows head_rows(const StepCall& call, int64_t item) {
    const Decoder& decoder = *call.decoder;
    const int64_t share = item % call.shares, half = item / call.shares / decoder.cache_heads;
    const int64_t rows = rows_of(call, half);
    return {item / call.shares % decoder.cache_heads, decoder.query_heads / decoder.cache_heads, half,
            rows * share / call.shares, rows * (share + 1) / call.shares};
}

// Where row i of a half has its turned queries, which what it attends to overwrites.
RLHF_INLINE Stored* attended_of(const StepCall& call, const HeadRows& on, int64_t i) {
    const Decoder& decoder = *call.decoder;
    return reinterpret_cast<Stored*>(call.attended) +
           ((on.half * 16 + i) * decoder.query_heads + on.head * on.group) * decoder.head_dim;
}

// Turned queries, and the cache's new entries.
static void enter_rows(const StepCall& call, int64_t layer, int64_t item, const Own& own) {
    const Decoder& decoder = *call.decoder;
    const Layer& weights = call.layers[layer];
    const HeadRows on = head_rows(call, item);
    const int64_t D = decoder.head_dim, group = on.group, half = on.half, head = on.head;
    if (on.begin == on.end) return;

    const float* qkv = call.qkv + half * (decoder.query_heads + 2 * decoder.cache_heads) * D * 16;
    const float *k = qkv + (decoder.query_heads + head) * D * 16, *v = k + decoder.cache_heads * D * 16;
    for (int64_t j = 0; j < group; ++j) {
        turn_head(call, half, qkv + (head * group + j) * D * 16, weights.q_norm, own.turned + j * D * 16);
    }
    turn_head(call, half, k, weights.k_norm, own.turned + group * D * 16);
    const auto entry = [&](const LayerCache& cache, int64_t i) {
        const int64_t row = half * 16 + i, position = call.rows.positions[row];
        const int64_t page = call.rows.table[row * call.rows.table_blocks + position / call.block];
        return static_cast<Stored*>(cache.data) + page * cache.block + position % call.block * cache.position +
               head * cache.head;
    };
    store_rows(own.turned, group * D, on.begin, on.end, [&](int64_t i) { return attended_of(call, on, i); });
    store_rows(own.turned + group * D * 16, D, on.begin, on.end,
               [&](int64_t i) { return entry(call.keys[layer], i); });
    store_rows(v, D, on.begin, on.end, [&](int64_t i) { return entry(call.values[layer], i); });
}

// Attention of rows whose own and earlier entries are all in the cache.
static void attend_rows(const StepCall& call, int64_t layer, int64_t item, const Own& own) {
    const Decoder& decoder = *call.decoder;
    const LayerCache &keys = call.keys[layer], &values = call.values[layer];
    const HeadRows on = head_rows(call, item);
    const int64_t D = decoder.head_dim, window = call.layers[layer].window;
    const DecodeCall attention{kStored == 2 ? CacheType::bfloat16 : CacheType::float32,
                               on.group, D, round_up(D, kFeatureTile), call.block, keys.block, keys.position, 1,
                               values.block, values.position, 1, {decoder.scale, window, 0.0f}};
    for (int64_t i = on.begin; i < on.end; ++i) {
        const int64_t row = on.half * 16 + i, length = call.rows.positions[row] + 1;
        const int64_t first = window && length > window ? length - window : 0;
        Stored* queries = attended_of(call, on, i);
        call.attend(attention,
                    {queries, D, 1, static_cast<Stored*>(keys.data) + on.head * keys.head,
                     static_cast<Stored*>(values.data) + on.head * values.head,
                     call.rows.table + row * call.rows.table_blocks, first, length, queries},
                    own.scores);
    }
}

static void pack_attended(const StepCall& call, Element* columns) {
    const int64_t width = call.decoder->query_heads * call.decoder->head_dim;
    for (int64_t half = 0; half < call.halves; ++half) {
        const Stored* rows = reinterpret_cast<const Stored*>(call.attended) + half * 16 * width;
        pack_column([&](int64_t i) { return rows + i * width; }, rows_of(call, half), width,
                    columns + half * round_up(width, KT) * 16);
    }
}

// ---- the step -------------------------------------------------------------------------------------------------------

static void run_layer(const StepCall& call, int64_t layer, const Own& own) {
    const Layer& weights = call.layers[layer];
    const Linear* linears = weights.linears;
    const int64_t query_strips = ceil_div(linears[Q].out, kStrip), key_strips = ceil_div(linears[K].out, kStrip);
    const int64_t items = call.halves * call.decoder->cache_heads * call.shares;
    const int64_t residual_strips = ceil_div(call.decoder->hidden, kStrip);

    norm_rows(call, weights.input_norm, own.columns);
    shrink_group(call, layer, QKV, linears[Q].in, own.columns, own);
    steal(own.member, query_strips + 2 * key_strips, [&](int64_t i) { qkv_strip(call, layer, i, own); });
    steal(own.member, items, [&](int64_t i) { enter_rows(call, layer, i, own); });
    steal(own.member, items, [&](int64_t i) { attend_rows(call, layer, i, own); });
    pack_attended(call, own.columns);
    shrink_group(call, layer, ATTENDED, linears[O].in, own.columns, own);
    steal(own.member, residual_strips, [&](int64_t i) { residual_strip(call, layer, O, i, own.columns, own); });

    norm_rows(call, weights.mlp_norm, own.columns);
    shrink_group(call, layer, GATED, linears[GATE].in, own.columns, own);
    steal(own.member, ceil_div(linears[GATE].out, kStrip), [&](int64_t i) { gated_strip(call, layer, i, own); });
    const Element* inner = reinterpret_cast<const Element*>(call.inner);
    shrink_group(call, layer, INNER, linears[DOWN].in, inner, own);
    steal(own.member, residual_strips, [&](int64_t i) { residual_strip(call, layer, DOWN, i, inner, own); });
}

static void run_step(const StepCall& call) {
    const auto work = [&call](Member& member) {
        const TileScope scope;
        const Own own = own_memory(call, member);
        steal(member, call.halves, [&](int64_t half) { begin_rows(call, half, own); });
        for (int64_t layer = 0; layer < call.n_layers; ++layer) run_layer(call, layer, own);
        steal(member, call.halves, [&](int64_t half) { finish_rows(call, half); });
    };
    run_together(call.threads, work);
}
