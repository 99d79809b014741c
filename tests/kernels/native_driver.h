// What the drivers of csrc/cpu share: how they fail, random numbers, memory of exact size, bfloat16, refusals.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "cpu/isa.h"

namespace driver {

[[noreturn]] inline void fail(const std::string& what) {
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
    std::exit(1);
}

inline void require(bool condition, const std::string& what) {
    if (!condition) fail(what);
}

// A linear congruential generator, in [-1, 1), in steps of 2^(1 - bits): with 8 bits exact in bfloat16.
inline double random_number(int bits = 53) {
    static uint64_t state = 1;
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return double(int64_t(state) >> (64 - bits)) / double(int64_t(1) << (bits - 1));
}

// A block of its own, so that one element too far ends the process.
template <typename T>
std::unique_ptr<T[]> heap(int64_t count) {
    return std::unique_ptr<T[]>(new T[count]);
}

// bfloat16: the upper half of a float, cut off.
inline uint16_t upper_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return uint16_t(bits >> 16);
}

inline float from_upper_half(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// The call must be refused with a message that begins with `beginning`.
template <typename Call>
void refuses_as(const std::string& beginning, Call call) {
    try {
        call();
    } catch (const std::invalid_argument& error) {
        require(std::string(error.what()).rfind(beginning, 0) == 0, beginning + ": " + error.what());
        return;
    }
    fail(beginning + ": not refused");
}

// The call must be refused.
template <typename Call>
void refuses(Call call, const std::string& what) {
    try {
        call();
    } catch (const std::invalid_argument&) {
        return;
    }
    fail(what + ": not refused");
}

// The last line of a driver, which its test reads.
inline int is_clean() {
    std::puts("native code is clean");
    return 0;
}

}  // namespace driver
