// head_sample of head.h for one instruction set, after head_body.inc.h. The vocabulary is cut into chunks of kChunk rows
// of W, whatever the number of rows and threads; a thread takes all rows of the batch through a chunk, kStrip rows of W
// at a time, so W comes from memory once. Each chunk leaves a state per row, and the states are joined in order.
//
// W is read where it lies if its rows fill whole tiles of the depth, else through a copy of a strip. Logits of sixteen
// rows of the batch lie as [kStrip v][16 n]. Where these are of several runs, all of them meet W together, and then each
// run goes on with its own columns from the sums that W left.
//
// A Gumbel number costs two logarithms, but hardly any of them matters. -log u is above it, and a bound on that comes
// from the bits of u as a float: with u = 2^e (1 + f), -log2 u <= -(e + f). Only a column whose logit plus this bound
// exceeds the best so far has its number computed, in double: a handful per row of the batch and chunk at first, then
// hardly ever.

constexpr int64_t kChunk = kBlock;  // sums begin where those of `head_forward` do
constexpr int64_t kSerialProducts = 1 << 22;  // n K V of about a tenth of a millisecond

// --- what a row draws ------------------------------------------------------------------------------------------------

// What sixteen rows of the batch know of a chunk.
struct alignas(64) DrawState {
    Reference reference;
    f32x16 sum, weighted;  // exp-sum and sum e (z - reference) relative to the reference
    f32x16 score, drawn;   // largest z + g, and its z
    f32x16 top, top_z;     // largest c, and its z
    i32x16 drawn_at, top_at;
};

// What they know of themselves.
struct alignas(64) HalfOptions {
    PhiloxRows noise;
    f32x16 inverse;             // 1 / T, as `transform` multiplies by it
    f32x16 nothing_yet;         // -inf where a number is to be drawn, inf elsewhere: nothing exceeds that
    i32x16 forbids;             // all bits of rows that never draw what is forbidden
    bool cools, greedy, draws;  // any temperature but 1; any greedy row; any row that is not
};

// Rows of one run among sixteen.
struct Segment {
    int64_t run, start;   // the run, and its first row
    int64_t begin, end;   // lanes
    int64_t columns;      // where its hidden states are that meet the tail of W, in tiles
};

struct SampleCall {
    const Head& head;
    const Batch& batch;
    const Draws& draws;
    const Sizes& sizes;
    int64_t halves;              // of panels: sixteen rows each
    const Segment* segments;
    const int64_t* first;        // [halves + 1] segments
    const Element* columns;      // [halves][shared] tiles
    const Element* tails;        // as segments say
    const HalfOptions* options;  // [halves]
    DrawState* states;           // [chunks][halves]
};

static bool is_greedy(const SampleCall& call, int64_t n) {
    return n >= call.batch.n || (call.draws.greedy && call.draws.greedy[n]);  // past the end: nothing to draw
}

static float gumbel(uint32_t word) {
    const float rounded = static_cast<float>((static_cast<double>(word) + 0.5) * 0x1p-32);
    const double u = rounded > 0x1.fffffep-1f ? 0x1.fffffep-1f : rounded;
    return static_cast<float>(-std::log(-std::log1p(-u)));
}

// At least gumbel(word): ln 2 (159 - the bits of the word as a float, in units of its exponent), and a little.
RLHF_INLINE f32x16 gumbel_bound(u32x16 word) {
    f32x16 bits;
    for (int i = 0; i < kVectors; ++i) {
#if defined(RLHF_AVX512)
        const __m512 wide = _mm512_cvtepu32_ps((__m512i)part(word, i));
        part(bits, i) = (f32v)_mm512_cvtepi32_ps(_mm512_castps_si512(wide));
#else
        // Halves of 16 bits are floats exactly; their sum rounds once, as the conversion of all 32 does.
        const f32v high = __builtin_convertvector((i32v)(part(word, i) >> 16), f32v);
        const f32v low = __builtin_convertvector((i32v)(part(word, i) & 0xffff), f32v);
        const f32v wide = high * 65536.0f + low;
        part(bits, i) = __builtin_convertvector((i32v)wide, f32v);
#endif
    }
    const float ln2 = 0.693147181f;
    return muladd(bits, splat(-ln2 / 8388608.0f), splat(159 * ln2 + 1e-3f));
}

// Which lanes of bound are not below best, as bits; a NaN is not below anything.
RLHF_INLINE uint32_t not_below(f32x16 bound, f32x16 best) {
    return ~lane_bits(bound <= best) & 0xffff;
}

RLHF_INLINE bool is_nan(float x) { return x != x; }

// Is x a new maximum, as torch.argmax sees it?
RLHF_INLINE bool beats(float x, float best) { return x > best || (is_nan(x) && !is_nan(best)); }

// The draws of four columns, v a multiple of 4. `best`: the rows' scores, infinite where nothing is to be drawn.
RLHF_INLINE void draw_four(const SampleCall& call, const HalfOptions& o, int64_t v, int64_t count, const float* logits,
                           f32x16& best, DrawState& s) {
    const PhiloxWords draws = philox_of_rows(o.noise, call.draws.stream, static_cast<uint32_t>(v / 4));
    uint32_t lanes[4], any = 0;
    for (int64_t i = 0; i < 4; ++i) {
        lanes[i] = i < count ? not_below(load16(logits + i * 16) + gumbel_bound(draws.word[i]), best) : 0;
        any |= lanes[i];
    }
    if (any == 0) return;
    for (int64_t i = 0; i < 4; ++i) {
        for (uint32_t left = lanes[i]; left != 0; left &= left - 1) {
            const int n = __builtin_ctz(left);
            if (o.nothing_yet[n] > 0) continue;
            const float z = logits[i * 16 + n], score = z + gumbel(draws.word[i][n]);
            if (!beats(score, s.score[n])) continue;
            s.score[n] = score;
            best[n] = is_nan(score) ? __builtin_inff() : score;
            s.drawn[n] = z;
            s.drawn_at[n] = static_cast<int32_t>(v + i);
        }
    }
}

static HalfOptions half_options(const SampleCall& call, int64_t half) {
    HalfOptions o{{}, splat(1.0f), splat(__builtin_inff()), {}, false, false, false};
    for (int64_t i = 0; i < 16 && half * 16 + i < call.batch.n; ++i) {
        const int64_t n = half * 16 + i;
        set_row(o.noise, i, call.draws.seed[n], call.draws.position[n]);
        o.inverse[i] = 1.0f / call.batch.temperature[n];
        o.cools |= call.batch.temperature[n] != 1.0f;
        o.forbids[i] = call.draws.n_forbidden > 0 && call.draws.forbids[n] ? -1 : 0;
        if (is_greedy(call, n)) {
            o.greedy = true;
        } else {
            o.draws = true;
            o.nothing_yet[i] = -__builtin_inff();
        }
    }
    return o;
}

// Is word v one that rows may forbid?
static bool is_forbidden(const Draws& draws, int64_t v) {
    for (int64_t i = 0; i < draws.n_forbidden; ++i) {
        if (draws.forbidden[i] == v) return true;
    }
    return false;
}

// logits [count][16] of sixteen rows of the batch, for rows of W from v0 on, go into their state.
static void draw_half(const SampleCall& call, const HalfOptions& o, int64_t v0, int64_t count, float* logits,
                      DrawState& s) {
    const Head& head = call.head;
    const f32x16 per_cap = splat(head.softcap != 0.0f ? head.scale / head.softcap : 0.0f);
    const f32x16 cap = o.inverse * head.softcap;
    f32x16 top = s.top, top_z = s.top_z, largest = splat(kLowest);
    i32x16 top_at = s.top_at;
    for (int64_t v = 0; v < count; ++v) {
        f32x16 c = load16(logits + v * 16), z;
        if (head.bias) c = c + head.bias[v0 + v];
        if (head.softcap != 0.0f) {
            const f32x16 bent = tanh16(c * per_cap);
            c = bent * head.softcap;
            z = bent * cap;
        } else {
            if (head.scale != 1.0f) c = c * head.scale;
            z = o.cools ? c * o.inverse : c;
        }
        if (call.draws.n_forbidden > 0 && is_forbidden(call.draws, v0 + v)) {
            c = select(o.forbids, splat(-__builtin_inff()), c);
            z = select(o.forbids, splat(-__builtin_inff()), z);
        }
        if (o.greedy) {  // before the temperature: it could round two different logits onto each other
            const i32x16 better = (top == top) & ~(c <= top);
            top = select(better, c, top);
            top_z = select(better, z, top_z);
            top_at = select(better, i32x16{} + static_cast<int32_t>(v0 + v), top_at);
        }
        largest = max16(z, largest);
        store16(logits + v * 16, z);
    }
    s.top = top;
    s.top_z = top_z;
    s.top_at = top_at;
    const f32x16 before = s.reference.value, factor = s.reference.meet(largest);
    if (any_lane(factor != 1.0f)) {
        s.weighted = select(s.sum == 0.0f, splat(0.0f), factor * (s.weighted + (before - s.reference.value) * s.sum));
        s.sum *= factor;
    }
    const Exponential exponential(s.reference);
    const f32x16 reference = s.reference.value;
    f32x16 sum = splat(0.0f), weighted = sum;
    for (int64_t v = 0; v < count; ++v) {
        const f32x16 z = load16(logits + v * 16), e = exponential(z);
        sum += e;
        if (call.draws.entropy) {
            const f32x16 d = z - reference;
            weighted = muladd(e, select(d < kVeryLow, splat(kVeryLow), d), weighted);
        }
    }
    s.sum += sum;
    s.weighted += weighted;
    if (!o.draws) return;
    f32x16 best = max16(s.score, o.nothing_yet);
    best = select(s.score == s.score, best, splat(__builtin_inff()));  // nothing but another NaN, which comes too late
    for (int64_t v = 0; v < count; v += 4) draw_four(call, o, v0 + v, count - v, logits + v * 16, best, s);
}

// Sixteen rows of the batch as B operands: what meets W alone, and each segment's lanes with what it meets besides.
static void pack_half(const SampleCall& call, int64_t half, Element* scratch, Element* columns, Element* tails) {
    const Sizes& sizes = call.sizes;
    for (int64_t j = call.first[half]; j < call.first[half + 1]; ++j) {
        const Segment& segment = call.segments[j];
        const HeadRun& run = call.batch.runs[segment.run];
        for (int64_t i = segment.begin; i < segment.end; ++i) {
            const int64_t n = half * 16 + i;
            fetch_wide(call.batch.hidden, call.batch.rows[n], sizes.H, run.hidden, n - segment.start, run.extra,
                       sizes.padded(run), scratch + i * sizes.widest);
        }
    }
    const int64_t last = call.segments[call.first[half + 1] - 1].end;
    for (int64_t i = last; i < 16; ++i) std::memset(scratch + i * sizes.widest, 0, sizes.widest * sizeof(Element));
    pack_columns(scratch, sizes.widest, sizes.shared, columns + half * (sizes.shared / KT) * kTileElements);
    for (int64_t j = call.first[half]; j < call.first[half + 1]; ++j) {
        const Segment& segment = call.segments[j];
        const int64_t tail = sizes.tail(call.batch.runs[segment.run]);
        Element* own = scratch + 16 * sizes.widest;
        for (int64_t i = 0; i < 16; ++i) {
            if (i >= segment.begin && i < segment.end) {
                std::memcpy(own + i * tail, scratch + i * sizes.widest + sizes.shared, tail * sizeof(Element));
            } else {
                std::memset(own + i * tail, 0, tail * sizeof(Element));
            }
        }
        pack_columns(own, tail, tail, tails + segment.columns * kTileElements);
    }
}

// The logits that all rows of a half, or of two, have from W alone go on to those that each run's own columns make.
// tail(run): a strip of the rest of W's rows as the run meets them.
template <typename Tail>
RLHF_INLINE void add_tails(const SampleCall& call, int64_t half, bool two, float* logits, const Tail& tail) {
    const Sizes& sizes = call.sizes;
    const bool more = sizes.shared > 0;
    const auto tiles = [&](const Segment& s) { return sizes.tail(call.batch.runs[s.run]) / KT; };
    const Segment* s = call.segments + call.first[half];
    if (two && call.first[half + 2] - call.first[half] == 2 && s[0].run == s[1].run) {
        if (tiles(*s) == 0 && more) return;
        strip_products<2, Stored>(tail(s->run), sizes.tail(call.batch.runs[s->run]), kStrip,
                                  call.tails + s->columns * kTileElements, (s[1].columns - s->columns) * kTileElements,
                                  tiles(*s), logits, more);
        return;
    }
    for (int64_t side = 0; side < (two ? 2 : 1); ++side, logits += kStrip * 16) {
        const Segment* end = call.segments + call.first[half + side + 1];
        s = call.segments + call.first[half + side];
        const bool alone = end - s == 1;
        alignas(64) float own[kStrip * 16];
        for (; s < end; ++s) {
            if (tiles(*s) == 0 && more) continue;
            float* to = alone ? logits : own;
            if (!alone) std::memcpy(own, logits, sizeof own);  // lanes that have gone on already are not taken again
            strip_products<1, Stored>(tail(s->run), sizes.tail(call.batch.runs[s->run]), kStrip,
                                      call.tails + s->columns * kTileElements, 0, tiles(*s), to, more);
            if (alone) continue;
            i32x16 mine = {};  // other lanes have met zeros, which a NaN or an infinity makes a NaN of
            for (int64_t i = s->begin; i < s->end; ++i) mine[i] = -1;
            for (int64_t v = 0; v < kStrip * 16; v += 16) {
                store16(logits + v, select(mine, load16(own + v), load16(logits + v)));
            }
        }
    }
}

// All rows of the batch through chunk `chunk` of W. scratch: kStrip rows of the columns that W is met by alone, and as many
// of a tail.
static void sample_chunk(const SampleCall& call, int64_t chunk, Stored* scratch) {
    const Head& head = call.head;
    const Sizes& sizes = call.sizes;
    const int64_t first = chunk * kChunk, end = head.V - first < kChunk ? head.V : first + kChunk;
    const bool as_stored = (head.weight.type == Type::bfloat16) == (RLHF_STORED_BF16 != 0);
    const bool in_place = as_stored && sizes.shared <= sizes.H;
    DrawState* states = call.states + chunk * call.halves;
    alignas(64) float logits[2 * kStrip * 16];
    for (int64_t half = 0; half < call.halves; ++half) {
        DrawState& s = states[half];
        s.reference = no_reference();
        s.sum = s.weighted = splat(0.0f);
        s.score = s.drawn = s.top = s.top_z = splat(-__builtin_inff());
        s.drawn_at = s.top_at = i32x16{};
    }
    for (int64_t v0 = first; v0 < end; v0 += kStrip) {
        const int64_t count = end - v0 < kStrip ? end - v0 : kStrip;
        const auto copy = [&](int64_t padded, Stored* to, const auto& fetch_row) __attribute__((always_inline)) {
            for (int64_t v = 0; v < kStrip; ++v, to += padded) {
                if (v < count) {
                    fetch_row(v0 + v, to);
                } else {
                    std::memset(to, 0, padded * sizeof(Stored));
                }
            }
        };
        const Stored* w = static_cast<const Stored*>(head.weight.data) + v0 * head.weight.stride;
        int64_t stride = head.weight.stride;
        if (!in_place || count < kStrip) {
            const int64_t columns = sizes.H < sizes.shared ? sizes.H : sizes.shared;
            copy(sizes.shared, scratch, [&](int64_t v, Stored* row) {
                fetch_wide(head.weight, v, columns, head.weight, 0, 0, sizes.shared, row);
            });
            w = scratch;
            stride = sizes.shared;
        }
        Stored* const tails = scratch + kStrip * sizes.shared;
        int64_t there = -1;  // the run whose tail is there: halves ask for runs in ascending order
        const auto tail = [&](int64_t i) __attribute__((always_inline)) {
            const HeadRun& run = call.batch.runs[i];
            if (i != there && sizes.tail(run) > 0) {
                copy(sizes.tail(run), tails, [&](int64_t v, Stored* row) {
                    fetch_tail(head, sizes, run, v, sizes.tail(run), row);
                });
            }
            there = i;
            return tails;
        };
        for (int64_t half = 0; half < call.halves; half += 2) {
            const int64_t depth = sizes.shared / KT;
            const Element* b = call.columns + half * depth * kTileElements;
            const bool two = half + 1 < call.halves;
            if (depth > 0) {
                (two ? strip_products<2, Stored> : strip_products<1, Stored>)(w, stride, kStrip, b, depth * kTileElements, depth,
                                                                              logits, false);
            }
            add_tails(call, half, two, logits, tail);
            for (int64_t side = 0; side < (two ? 2 : 1); ++side) {
                draw_half(call, call.options[half + side], v0, count, logits + side * kStrip * 16, states[half + side]);
            }
        }
    }
}

// The higher of two references, and the factors of what was summed relative to either.
struct Joined {
    float base, power, value, first, second;
};

static Joined join(const Reference& a, const Reference& b, int64_t lane) {
    const bool a_is_higher = a.value[lane] > b.value[lane];
    const Reference& high = a_is_higher ? a : b;
    const Reference& low = a_is_higher ? b : a;
    const float change = low.power[lane] - high.power[lane];
    const bool gone = low.base[lane] != high.base[lane] || change < kGone || change > 0;
    const float factor = gone ? 0.0f : std::ldexp(1.0f, static_cast<int>(change));
    return {high.base[lane], high.power[lane], high.value[lane], a_is_higher ? 1.0f : factor, a_is_higher ? factor : 1.0f};
}

static void finish_draw(const SampleCall& call, int64_t chunks, int64_t n) {
    const int64_t half = n / 16, lane = n % 16;
    const bool greedy = is_greedy(call, n);
    float best = -__builtin_inff(), z = 0.0f;
    int64_t token = -1;
    for (int64_t i = 0; i < chunks; ++i) {
        const DrawState& s = call.states[i * call.halves + half];
        const float score = greedy ? s.top[lane] : s.score[lane];
        if (token >= 0 && !beats(score, best)) continue;
        best = score;
        z = greedy ? s.top_z[lane] : s.drawn[lane];
        token = greedy ? s.top_at[lane] : s.drawn_at[lane];
    }
    // The chunks' sums in their order, in float: what `head_forward` adds up, but for powers of two.
    Reference reference = no_reference();
    float sum = 0.0f;
    double weighted = 0;
    for (int64_t i = 0; i < chunks; ++i) {
        const DrawState& s = call.states[i * call.halves + half];
        if (s.sum[lane] == 0.0f) continue;
        const Joined joined = join(reference, s.reference, lane);
        const double before = joined.value - static_cast<double>(reference.value[lane]);
        const double shift = joined.value - static_cast<double>(s.reference.value[lane]);
        weighted = (sum == 0.0f ? 0 : joined.first * (weighted - before * sum)) +
                   joined.second * (s.weighted[lane] - shift * s.sum[lane]);
        sum = sum * joined.first + s.sum[lane] * joined.second;
        reference.base[lane] = joined.base;
        reference.power[lane] = joined.power;
        reference.value[lane] = joined.value;
        reference.top[lane] = s.reference.top[lane] > reference.top[lane] ? s.reference.top[lane] : reference.top[lane];
    }
    const double lse = log_sum_exp(reference, sum, lane);
    call.draws.token[n] = token;
    call.draws.logprob[n] = static_cast<float>(z - lse);
    if (call.draws.entropy) {
        call.draws.entropy[n] = static_cast<float>((lse - reference.value[lane]) - weighted / sum);
    }
}

static void run_sample(const Head& head, const Batch& batch, const Draws& draws, int threads) {
    Memory memory;
    const Sizes sizes(head, batch);
    SampleCall call{head, batch, draws, sizes, ceil_div(batch.n, 16), nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
    const int64_t chunks = ceil_div(head.V, kChunk);
    if (batch.n * sizes.widest * head.V < kSerialProducts) threads = 1;
    int64_t most_segments = call.halves;
    most_segments += batch.n_runs;
    Segment* segments = memory.take<Segment>(most_segments);
    int64_t* first = memory.take<int64_t>(call.halves + 1);
    int64_t n_segments = 0, tail_tiles = 0, widest_tail = 0;
    for (int64_t i = 0, n = 0; i < batch.n_runs; ++i) {
        const HeadRun& run = batch.runs[i];
        for (const int64_t start = n; n < run.end;) {
            const int64_t half = n / 16, end = run.end < half * 16 + 16 ? run.end : half * 16 + 16;
            if (n % 16 == 0) first[half] = n_segments;
            segments[n_segments++] = {i, start, n % 16, end - half * 16, tail_tiles};
            tail_tiles += sizes.tail(run) / KT;
            n = end;
        }
        if (sizes.tail(run) > widest_tail) widest_tail = sizes.tail(run);
    }
    first[call.halves] = n_segments;
    Element* columns = memory.take<Element>(call.halves * (sizes.shared / KT) * kTileElements);
    Element* tails = memory.take<Element>(tail_tiles * kTileElements);
    // Of a thread: strips of W, and before these sixteen rows of hidden twice. Or Stored, which is not larger
    const int64_t strips = kStrip * (sizes.widest + widest_tail);
    Element* scratch = memory.take<Element>(threads * strips);
    HalfOptions* options = memory.take<HalfOptions>(call.halves);
    call.states = memory.take<DrawState>(chunks * call.halves);
    call.segments = segments;
    call.first = first;
    call.columns = columns;
    call.tails = tails;
    call.options = options;
    const auto work = [&](Member& me) {
        const TileScope scope;
        Element* mine = scratch + me.thread * strips;
        steal(me, call.halves, [&](int64_t half) {
            pack_half(call, half, mine, columns, tails);
            options[half] = half_options(call, half);
        });
        steal(me, chunks, [&](int64_t i) { sample_chunk(call, i, reinterpret_cast<Stored*>(mine)); });
        steal(me, batch.n, [&](int64_t n) { finish_draw(call, chunks, n); });
    };
    run_together(threads, work);
}
