#include "cache/cpu/kv_copy.h"

#include <cstring>
#include <string>
#include <unordered_set>

#include "core/check.h"
#include "core/threads.h"

namespace bequest {
namespace {

void check_block(int32_t block, int64_t num_blocks, const char* role) {
  if (block >= 0 && block < num_blocks) return;
  fail("copy_blocks: " + std::string(role) + " block " + std::to_string(block) + " is outside the cache of " +
       std::to_string(num_blocks) + " blocks");
}

void check_pairs(const BlockCopyParams& p) {
  std::unordered_set<int32_t> destinations;
  for (int64_t i = 0; i < p.num_pairs; ++i) {
    check_block(p.pairs[2 * i], p.source_blocks, "source");
    check_block(p.pairs[2 * i + 1], p.destination_blocks, "destination");
    if (!destinations.insert(p.pairs[2 * i + 1]).second)
      fail("copy_blocks: block " + std::to_string(p.pairs[2 * i + 1]) + " is written twice");
  }
  if (p.source != p.destination) return;
  for (int64_t i = 0; i < p.num_pairs; ++i)
    if (destinations.contains(p.pairs[2 * i]))
      fail("copy_blocks: block " + std::to_string(p.pairs[2 * i]) + " is both read and written");
}

}  // namespace

void copy_blocks(const BlockCopyParams& p) {
  check_pairs(p);
  parallel_for(p.num_pairs, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const char* from = static_cast<const char*>(p.source) + p.pairs[2 * i] * p.block_bytes;
      char* to = static_cast<char*>(p.destination) + p.pairs[2 * i + 1] * p.block_bytes;
      std::memcpy(to, from, p.block_bytes);
    }
  });
}

}  // namespace bequest
