// Tile sizes that decide how much memory a call takes. Python reads them for its plans of memory (`_native.tiles`).
#pragma once

#include <cstdint>

namespace rlhf::cpu {

constexpr int64_t kHeadPanel = 32;           // rows of hidden states that a thread takes through a block of W
constexpr int64_t kHeadBlock = 512;          // rows of W
constexpr int64_t kStripRows = 32;           // rows of W that meet the columns of a linear or of a decoding step
constexpr int64_t kLinearColumns = 16;       // columns of tiles that a strip of a linear meets, at most
constexpr int64_t kLinearTiles = 1 << 11;    // tiles that a linear packs at a time, 2 MiB; never fewer than its columns
constexpr int64_t kLoraRank = 16;            // ranks are padded to a multiple of it
constexpr int64_t kLoraColumns = 256;        // of x: summed on their own before they are added to A x

}  // namespace rlhf::cpu
