// Argument checks of the native code, all in one place. A failed check throws std::invalid_argument, which pybind11
// turns into ValueError; the message names the argument, what was expected and what came.
#pragma once

#include <sstream>
#include <stdexcept>

namespace rlhf {

template <typename Got>
[[noreturn]] void refuse(const char* argument, const char* expected, const Got& got) {
    std::ostringstream message;
    message << argument << ": expected " << expected << ", got " << got;
    throw std::invalid_argument(message.str());
}

}  // namespace rlhf

#define RLHF_CHECK(condition, argument, expected, got)             \
    do {                                                           \
        if (!(condition)) ::rlhf::refuse(argument, expected, got); \
    } while (0)

// A size or a count.
#define RLHF_CHECK_SIZE(size) RLHF_CHECK((size) >= 0, #size, "a size of at least 0", size)

// An array of `count` elements; an empty array may have no address.
#define RLHF_CHECK_POINTER(pointer, count) \
    RLHF_CHECK((count) == 0 || (pointer) != nullptr, #pointer, "an address", "a null pointer")
