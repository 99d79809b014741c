// How the members of a team share loops (team.h), for the instruction set this file is compiled for.

template <typename Work>
RLHF_INLINE void run_together(int threads, const Work& work) {
    run_team(threads, [](const void* context, Member& member) { (*static_cast<const Work*>(context))(member); }, &work);
}

// body(i) for i in [0, count), each by one member; all is done when it returns. A member begins with its share and goes on
// with what others have left of theirs, so that a slow core or one that is taken away holds up one piece, not a share.
template <typename Body>
RLHF_INLINE void steal(Member& me, int64_t count, const Body& body) {
    if (me.threads == 1) {
        for (int64_t i = 0; i < count; ++i) body(i);
        return;
    }
    int64_t *taken = me.team.taken[me.loop], *next_loop = me.team.taken[me.loop ^= 1];
    next_loop[me.thread * Team::kLine] = 0;  // nobody is in that loop: all of its last one has been waited for
    for (int32_t offset = 0; offset < me.threads; ++offset) {
        const int64_t whose = (me.thread + offset) % me.threads;
        const int64_t begin = count * whose / me.threads, size = count * (whose + 1) / me.threads - begin;
        int64_t* counter = taken + whose * Team::kLine;
        for (int64_t i; (i = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED)) < size;) body(begin + i);
    }
    wait_for_team(me.team, me.threads);
}
