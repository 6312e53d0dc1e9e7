// Chooses the next token of each row, on the device: the contract and the results of ops/cpu/sampling.h.
//
// What a row remembers lives in device memory and nothing is sized by the vocabulary: parameters and counters
// in a SamplerRow of fixed size, lists in a storage of the row's own, which rows without masks, bias, bad
// words and penalties do not have. Rows are opened and closed by records that travel with a step's staging
// copy.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"
#include "ops/catalogue.h"

namespace bequest::cuda {

enum class RowState : int32_t { kClosed = 0, kGreedy = 1, kDraws = 2 };

// One record rather than an array per field: a row is read by one cluster, at once.
struct SamplerRow {
  uint64_t seed;
  int32_t* storage;           // lists, at the offsets below; null if there are none
  float inverse_temperature;  // of kDraws
  float top_p;
  float min_p_offset;  // log(min_p) * temperature: tokens this far below the best are kept; -inf: all
  int32_t top_k;       // 0: all
  float presence_penalty;
  float frequency_penalty;
  float repetition_penalty;
  uint32_t choice;
  RowState state;
  int32_t min_tokens;
  int32_t num_outputs;
  int32_t allowed;  // bit mask [ceil(V / 32)] of what may be sampled; -1: everything
  int32_t bias;     // ids [num_bias], then values [num_bias] as float
  int32_t num_bias;
  int32_t held_back;  // ids [num_held_back], not sampled before min_tokens
  int32_t num_held_back;
  int32_t bad_words;  // starts [num_bad_words + 1], then all their tokens, which starts count from
  int32_t num_bad_words;
  int32_t tail;  // the last tokens [tail_capacity], as many as the longest bad word has before its end
  int32_t tail_capacity;
  int32_t tail_len;
  int32_t counts;           // (token, times among the outputs) [counts_capacity], one per distinct token
  int32_t counts_capacity;  // 0: no penalties
  int32_t num_counts;
  const CatalogueRule* rule;  // in device memory; null: no catalogue
  int32_t node;               // in its tree; -1: the item was ended
  int32_t reserved;
};
static_assert(sizeof(SamplerRow) == 128);

// Makes a row what the record says. The payload is the head of its storage; the rest needs no initial value.
struct RowUpdate {
  int32_t row;
  int32_t last_token;     // -1: none yet
  int32_t payload_begin;  // in the payload of all records
  int32_t payload_len;
  SamplerRow state;
};
static_assert(sizeof(RowUpdate) == 144);

struct RowUpdateParams {
  const RowUpdate* updates;  // [U] in device memory, no row twice
  int64_t num_updates;
  const int32_t* payload;
  SamplerRow* rows;      // [num_rows]
  int32_t* last_tokens;  // [num_rows]
};

void update_rows(const RowUpdateParams& p, Stream stream);

// Where the host looks for the tokens of a step: in pinned memory, so that no copy has to follow.
struct HostTokens {
  int32_t* tokens;       // [N]; null: it does not
  bool* bad;             // [N]
  uint64_t* num_read;    // [1]; null: nobody asks
  const uint64_t* read;  // [1] on the device: what goes to num_read
};
static_assert(sizeof(HostTokens) == 32);

struct SampleParams {
  const void* logits;  // [N, V], rows `stride` apart; not changed
  DType dtype;
  int64_t stride;            // elements
  const int32_t* row_ids;    // [N]; -1: skipped, its token is 0 and not bad. The samples of a row are a run
  const int32_t* positions;  // [N] absolute position of the sampled token: keys its random numbers
  // [N] what was drafted to follow each: behind a sample that differs from its draft, or is bad, the row is
  // not sampled again, and the tokens of the rest of its run are 0 and not bad. Null: no row is there twice.
  const int32_t* drafts;
  int64_t num;  // N
  int64_t vocab_size;
  int64_t num_rows;
  SamplerRow* rows;      // [num_rows]
  int32_t* last_tokens;  // [num_rows]
  const int32_t* masks;  // [N, ceil(V / 32)] bit i % 32 of word i / 32: token i may be sampled; null: all may
  int32_t* tokens;       // [N]; 0 where bad
  bool* bad;  // [N]: NaN or +inf in the logits, nothing left to sample, or a closed row; the row stays as it
              // was
  // No row changes: what each would sample goes to last_tokens, which is then another array than the
  // sampler's. REQUIRES: no drafts, so that no row is there twice
  bool guesses;
  const HostTokens* told;  // on the device: get what tokens and bad get; null: nobody does
};

// Two launches for up to 15 rows and three for more, whatever the rows' mixture. In a graph they read rows,
// row_ids and told as these were when it began, unless they guess: nothing in it may change them before.
// Throws on a vocabulary above 416,000.
void sample(const SampleParams& p, Stream stream);

}  // namespace bequest::cuda
