// The block tables of a group of beams. Beams step together, one token each, and change places after every
// step, so that what a step asks of all of them is one call. The blocks that all of them begin with, most of
// them, are held once; a beam has a table of those behind.
//
//   front   [ b0 | b1 | b2 ]              rows that are written for good
//   tails          [ b3 ] [ b4 | b6 ] ..  of each beam; position p is p - front.capacity() there
//
// Where strips have windows the front is empty: which rows slide out depends on where they are.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "cache/block_table.h"

namespace bequest {

// What the blocks of several ended beams held: those that all of them begin with, and what comes behind,
// beam by beam.
struct BeamEpochs {
  BlockEpochs front;
  BlockEpochs tails;
  std::vector<size_t> ends;  // [B] beam i has tails [ends[i - 1], ends[i])

  size_t begin(size_t beam) const { return beam == 0 ? 0 : ends[beam - 1]; }
};

// A beam that has ended has no blocks of its own.
inline constexpr int32_t kNoPlace = -1;

class BeamTables {
 public:
  // One beam, which takes over the blocks of `first`: that is empty afterwards.
  explicit BeamTables(BlockTable& first);

  // Beam i continues beam parents[i] with tokens[i], for which the next step is going to write KV. Whole
  // blocks are shared; the last heir of a beam takes over its table, and beams without an heir give theirs
  // back. REQUIRES: as many tokens as parents, none negative
  void reorder(std::span<const int32_t> parents, std::span<const int32_t> tokens);

  // At least the blocks that try_prepare_write(position) takes from the pool.
  int64_t blocks_needed(int64_t position) const;
  // Makes `position` writable in every table and returns the copies to make first, or does nothing and
  // returns nullopt where the pool has too few blocks.
  std::optional<std::vector<BlockCopy>> try_prepare_write(int64_t position);

  // The tables of a step whose beams the device chooses: `width` beams, of which beam i writes `position` to
  // a block of its own as if it continued beam i % size(). `copies` gets a copy for each strip of each beam,
  // beam by beam, or nothing where a block begins at `position`: whoever knows the parents replaces the
  // sources. nullopt where parents would be told apart by more than these sources, or the pool has too few
  // blocks. REQUIRES: width >= size()
  std::optional<BeamTables> try_ahead(int32_t width, int64_t position, std::vector<BlockCopy>& copies) const;
  // These tables, made by before.try_ahead(), take its place: it has no beams afterwards, its ended ones are
  // here. The first tokens.size() beams run on, with these tokens. REQUIRES: none negative
  void succeed(BeamTables& before, std::span<const int32_t> tokens);

  // Beams that end here share the blocks of the running ones they came from, and keep them whatever becomes
  // of those: rows[i] at place `first + i`, where `first` is returned.
  int32_t end(std::span<const int32_t> rows);
  // The table of an ended beam, which is not here any more then.
  BlockTable take_ended(int32_t place);
  // The blocks of the first num_tokens[i] positions of the ended beam at places[i], or of running beam
  // rows[i] where the place is kNoPlace, to be adopted later.
  BeamEpochs epochs(std::span<const int32_t> places, std::span<const int32_t> rows,
                    std::span<const int32_t> num_tokens) const;

  // Gives back all blocks; there are no beams then, running or ended.
  void free();

  int32_t size() const { return static_cast<int32_t>(tails_.size()); }
  const BlockTable& front() const { return front_; }
  const BlockTable& tail(int32_t beam) const { return tails_.at(beam); }
  // A table that shares all blocks of a beam.
  BlockTable fork(int32_t beam) const;
  // One per place; empty where the table was taken.
  const std::vector<std::optional<BlockTable>>& ended() const { return ended_; }
  // The last token of each beam. REQUIRES: reorder() was called
  const std::vector<int32_t>& tokens() const { return tokens_; }

 private:
  struct Entries;
  BeamTables(BlockTable front, std::vector<BlockTable> tails)
      : front_(std::move(front)), tails_(std::move(tails)), tokens_(tails_.size()) {}
  bool differs_only_at(int64_t begin) const;
  const BlockTable& ended_at(int32_t place) const;

  BlockTable front_;
  std::vector<BlockTable> tails_;
  std::vector<std::optional<BlockTable>> ended_;  // whole ones
  std::vector<int32_t> tokens_;
};

}  // namespace bequest
