// How far a sequence is: what loops over the rows of a step read and move of it. It is a type of Python's,
// which the engine's Sequence derives from, so that its numbers have one place and C++ reads them without a
// call. Owned by the event-loop thread.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>

#include "cache/block_table.h"
#include "cache/token_list.h"

namespace bequest {

// What each member means, engine/_C/progress.pyi says. Objects are null until they are set.
struct Progress {
  PyObject_HEAD;
  PyObject* tokens;
  PyObject* table;
  PyObject* status;
  PyObject* ends;
  PyObject* outlet;
  PyObject* matcher;
  PyObject* account;
  int64_t num_prompt;
  int64_t num_computed;
  int64_t num_in_flight;
  int64_t num_output;
  int64_t planned_len;
  int64_t most_len;
  int64_t free_until;
  int64_t row;
  int64_t num_logprobs;
  int64_t adapter;
  double last_token_at;
  bool plain;

  TokenList& token_list() const { return pybind11::handle(tokens).cast<TokenList&>(); }
  BlockTable& block_table() const { return pybind11::handle(table).cast<BlockTable&>(); }

  // Tokens that the next step could compute. REQUIRES: plain
  int64_t num_ready() const {
    return planned_len < most_len || num_computed < num_prompt ? planned_len - num_computed : 0;
  }
};

// In num_logprobs: none are wanted.
inline constexpr int64_t kNoLogprobs = -1;

inline bool is_set(const PyObject* member) { return member != nullptr && member != Py_None; }

// Throws TypeError for anything else.
Progress& progress_of(pybind11::handle sequence);

// Sequences of a list or a tuple. REQUIRES: it outlives this and does not change
class Sequences {
 public:
  explicit Sequences(pybind11::handle container)
      : items_(PySequence_Fast_ITEMS(container.ptr())), size_(PySequence_Fast_GET_SIZE(container.ptr())) {}

  ssize_t size() const { return size_; }

  std::pair<pybind11::handle, Progress&> operator[](ssize_t i) const {
    return {items_[i], progress_of(items_[i])};
  }

 private:
  PyObject* const* items_;
  ssize_t size_;
};

// The type, and loops over sequences, as parts of bind_cache().
void bind_progress(pybind11::module_& m);
void bind_streams(pybind11::module_& m);

}  // namespace bequest
