// Where a token's key and value lie in the cache tensor [NB, L, 2, NKV, BS, D]. All address arithmetic of
// the cache is here, for every backend.
//
// Block-major: a block's keys and values of all layers are one span, so that copying or swapping a block is
// one memcpy. The BS rows [BS, D] of one (block, layer, head) are contiguous.
#pragma once

#include <cstdint>

namespace bequest {

struct KvLayout {
  int64_t num_blocks;
  int64_t num_layers;
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t head_dim;

  // Elements of one block, all layers: the distance between two blocks.
  constexpr int64_t block_stride() const { return num_layers * 2 * num_kv_heads * block_size * head_dim; }
  // From the start of a block to its keys [BS, D] of (layer, head).
  constexpr int64_t keys(int64_t layer, int64_t head) const {
    return (layer * 2 * num_kv_heads + head) * block_size * head_dim;
  }
  // From the keys of (layer, head) to its values [BS, D].
  constexpr int64_t values_after_keys() const { return num_kv_heads * block_size * head_dim; }
  // From the start of the cache to the key of `slot` = block * BS + offset.
  constexpr int64_t key_of_slot(int64_t slot, int64_t layer, int64_t head) const {
    return slot / block_size * block_stride() + keys(layer, head) + slot % block_size * head_dim;
  }
  // Which of all [BS, D] of the cache the keys of (block, layer, head) are; its values are num_kv_heads
  // further on.
  constexpr int64_t head_index(int64_t block, int64_t layer, int64_t head) const {
    return (block * num_layers + layer) * 2 * num_kv_heads + head;
  }
  constexpr int64_t num_slots() const { return num_blocks * block_size; }
};

}  // namespace bequest
