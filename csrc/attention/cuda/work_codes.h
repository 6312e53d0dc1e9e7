// What a single int32 of a work list may mean. Host and device make and read it by these names alone, so the
// numbers are nobody else's matter.
#pragma once

#include <cstdint>

namespace bequest {

// An index, or none.
struct MaybeIndex {
  int32_t code;

  static constexpr MaybeIndex none() { return {-1}; }
  static constexpr MaybeIndex of(int32_t index) { return {index}; }

  constexpr bool exists() const { return code >= 0; }
  constexpr int32_t get() const { return code; }  // REQUIRES: exists()
};

// Where the rows of an item's result go: to a partial state; to the output; or to the output when the states
// that a JoinEntry names are joined to them.
struct ResultPlace {
  int32_t code;

  static constexpr ResultPlace state(int32_t row) { return {row}; }
  static constexpr ResultPlace output() { return {-1}; }
  static constexpr ResultPlace joined(int32_t entry) { return {-2 - entry}; }

  constexpr bool is_state() const { return code >= 0; }
  constexpr bool is_joined() const { return code < -1; }
  constexpr int32_t state_row() const { return code; }        // REQUIRES: is_state()
  constexpr int32_t join_entry() const { return -2 - code; }  // REQUIRES: is_joined()
};

// Added to the positions of queries that are not causal: past every key, and it can be taken off again.
inline constexpr int32_t kFarPosition = 1 << 28;

// The position of the queries of a wide tile whose readers wait for a counter. Its keys are all seen, so any
// position past them will do, and this one names the counter too. REQUIRES: causal queries
constexpr int32_t counted_position(int32_t counter) { return kFarPosition + counter; }
constexpr bool is_counted(int32_t position) { return position >= kFarPosition; }
constexpr int32_t counter_of_position(int32_t position) { return position - kFarPosition; }

}  // namespace bequest
