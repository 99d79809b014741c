// Argument checks of the native code, all in one place. A failed check throws std::invalid_argument, which pybind11
// turns into ValueError; the message names the argument, what was expected and what came.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>

namespace rlhf {

template <typename Got>
[[noreturn]] void refuse(const char* argument, const char* expected, const Got& got) {
    std::ostringstream message;
    message << argument << ": expected " << expected << ", got " << got;
    throw std::invalid_argument(message.str());
}

// The most elements for which an array of them, and scratch memory of a few times as much, can have a size in bytes.
constexpr int64_t kMost = int64_t(1) << 56;

// The product of sizes of at least 0.
template <typename... Sizes>
int64_t checked_product(const char* names, Sizes... sizes) {
    int64_t product = 1;
    bool fits = true;
    for (const int64_t size : {int64_t(sizes)...}) {
        if (size == 0) return 0;
        fits = fits && product <= kMost / size;
        if (fits) product *= size;
    }
    if (!fits) {
        std::ostringstream got;
        const char* between = "";
        for (const int64_t size : {int64_t(sizes)...}) {
            got << between << size;
            between = " * ";
        }
        refuse(names, "sizes with a product of at most 2^56", got.str());
    }
    return product;
}

}  // namespace rlhf

#define RLHF_CHECK(condition, argument, expected, got)             \
    do {                                                           \
        if (!(condition)) ::rlhf::refuse(argument, expected, got); \
    } while (0)

// A size or a count.
#define RLHF_CHECK_SIZE(size)                                                      \
    do {                                                                           \
        RLHF_CHECK((size) >= 0, #size, "a size of at least 0", size);              \
        RLHF_CHECK((size) <= ::rlhf::kMost, #size, "a size of at most 2^56", size); \
    } while (0)

// A number of elements that is a product of sizes, which are of at least 0.
#define RLHF_PRODUCT(...) ::rlhf::checked_product(#__VA_ARGS__, __VA_ARGS__)

// More threads than a machine has cores make an error of the operating system that ends the process.
#define RLHF_CHECK_THREADS(threads) \
    RLHF_CHECK((threads) >= 1 && (threads) <= 4096, "threads", "1 to 4096", threads)

// An array of `count` elements; an empty array may have no address.
#define RLHF_CHECK_POINTER(pointer, count) \
    RLHF_CHECK((count) == 0 || (pointer) != nullptr, #pointer, "an address", "a null pointer")
