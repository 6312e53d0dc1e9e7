// Loops over the streams of a step: sequences that compute their last token and sample behind it, which in
// most steps is all there is. What a stream needs beyond that is left to its work, in Python. Owned by the
// event-loop thread.
#include <pybind11/numpy.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/progress.h"
#include "cache/batch.h"
#include "core/check.h"

namespace py = pybind11;

namespace bequest {
namespace {

// Those that need one token, those that need more, and those that are not plain, whose work has to be asked.
py::tuple ready_streams(const py::dict& running) {
  py::list decoding, prefilling, others;
  Py_ssize_t place = 0;
  for (PyObject* sequence; PyDict_Next(running.ptr(), &place, &sequence, nullptr);) {
    const Progress& progress = progress_of(sequence);
    if (!progress.plain) {
      others.append(py::handle(sequence));
    } else if (const int64_t num = progress.num_ready(); num > 0) {
      (num == 1 ? decoding : prefilling).append(py::handle(sequence));
    }
  }
  return py::make_tuple(decoding, prefilling, others);
}

bool contains(const py::set& set, py::handle element) {
  const int found = PySet_Contains(set.ptr(), element.ptr());
  if (found < 0) throw py::error_already_set();
  return found == 1;
}

// A stream that has a sampler row is past its prompt.
std::optional<std::vector<BlockCopy>> try_plan_token(const Progress& progress) {
  if (!progress.plain || progress.row == kNoRow) return std::nullopt;
  return progress.block_table().try_prepare_write(progress.num_computed, progress.num_computed + 1);
}

// From number `first` on, up to `most`, until one that is no stream or finds no block. Those that do not run,
// or that the step uses, are passed over. Returns them, the blocks to copy, and the number of the first that
// was not reached.
py::tuple plan_streams(const py::list& sequences, ssize_t first, int64_t most, py::set& used,
                       const py::handle& running) {
  py::list planned, copies;
  const Sequences all(sequences);
  for (; first < all.size() && most > 0; ++first) {
    const auto [sequence, progress] = all[first];
    if (progress.status != running.ptr() || contains(used, sequence)) continue;
    const auto pairs = try_plan_token(progress);
    if (!pairs) break;
    for (const auto [source, destination] : *pairs) copies.append(py::make_tuple(source, destination));
    planned.append(sequence);
    used.add(sequence);
    ++progress.num_computed;
    --most;
  }
  return py::make_tuple(planned, copies, first);
}

// A launched step samples a token for each. Returns the positions, the most alternatives that anybody wants,
// and how many have a grammar.
py::tuple sample_streams(const py::list& streams) {
  py::list positions(streams.size());
  int64_t num_logprobs = kNoLogprobs;
  int64_t num_masked = 0;
  const Sequences all(streams);
  for (ssize_t i = 0; i < all.size(); ++i) {
    const auto [_, progress] = all[i];
    positions[i] = py::int_(progress.planned_len);
    num_logprobs = std::max(num_logprobs, progress.num_logprobs);
    num_masked += is_set(progress.matcher) ? 1 : 0;
    ++progress.num_in_flight;
    ++progress.planned_len;
  }
  py::object most = py::none();
  if (num_logprobs != kNoLogprobs) most = py::int_(num_logprobs);
  return py::make_tuple(positions, most, num_masked);
}

// How many there are of each account.
py::list count_accounts(const py::list& sequences) {
  std::vector<std::pair<PyObject*, int64_t>> counts;  // few, and mostly one after the other
  for (const py::handle sequence : sequences) {
    PyObject* const account = progress_of(sequence).account;
    const auto known = std::find_if(counts.rbegin(), counts.rend(),
                                    [&](const auto& count) { return count.first == account; });
    if (known != counts.rend()) {
      ++known->second;
    } else {
      counts.emplace_back(account, 1);
    }
  }
  py::list result;
  for (const auto& [account, count] : counts) result.append(py::make_tuple(py::handle(account), count));
  return result;
}

// [S] of each sequence.
py::array_t<int32_t> rows_of(const py::list& sequences) {
  py::array_t<int32_t> rows(static_cast<ssize_t>(sequences.size()));
  int32_t* out = rows.mutable_data();
  for (const py::handle sequence : sequences) *out++ = static_cast<int32_t>(progress_of(sequence).row);
  return rows;
}

bool any_adapter(const py::list& sequences) {
  return std::any_of(sequences.begin(), sequences.end(),
                     [](py::handle s) { return progress_of(s).adapter != 0; });
}

// Whether the work of a stream need not look at its token.
bool passes(const Progress& progress, const py::int_& token) {
  const bool free = progress.num_output + 1 < progress.free_until && progress.last_token_at != 0;
  if (!free || !is_set(progress.outlet) || !is_set(progress.ends)) return false;
  const int ends = PySequence_Contains(progress.ends, token.ptr());
  if (ends < 0) throw py::error_already_set();
  return ends == 0;
}

// The token in flight is known; full blocks become findable.
void accept(Progress& progress, int32_t token, bool commits) {
  TokenList& tokens = progress.token_list();
  tokens.append(token);
  ++progress.num_output;
  if (!commits) return;
  BlockTable& table = progress.block_table();
  const int64_t known = std::min<int64_t>(progress.num_computed, static_cast<int64_t>(tokens.size()));
  if (known % table.pool().block_size() == 0) table.commit(tokens, known);
}

using Tokens = py::array_t<int32_t, py::array::c_style>;
using Flags = py::array_t<bool, py::array::c_style>;

// One sample of each sequence. Tokens that are nothing but their own text are accepted here: these sequences,
// their tokens, the seconds since the token before, and the numbers of all other samples.
py::tuple take_samples(const py::tuple& sequences, const Tokens& sampled, const Flags& bad, double now,
                       const py::handle& running, bool commits) {
  const Sequences all(sequences);
  check(sampled.size() >= all.size() && bad.size() >= all.size(), "a sequence has no sample");
  py::list passed, tokens, seconds, left;
  py::float_ waited(0.0);
  double before = now;
  for (ssize_t i = 0; i < all.size(); ++i) {
    const auto [sequence, progress] = all[i];
    --progress.num_in_flight;
    const py::int_ token(sampled.data()[i]);
    if (progress.status != running.ptr() || bad.data()[i] || !passes(progress, token)) {
      left.append(i);
      continue;
    }
    if (progress.last_token_at != before) {  // most streams of a step have waited equally long
      before = progress.last_token_at;
      waited = py::float_(now - before);
    }
    progress.last_token_at = now;
    accept(progress, sampled.data()[i], commits);
    passed.append(sequence), tokens.append(token), seconds.append(waited);
  }
  return py::make_tuple(passed, tokens, seconds, left);
}

}  // namespace

void bind_streams(py::module_& m) {
  m.def("ready_streams", &ready_streams, py::arg("running"));
  m.def("plan_streams", &plan_streams, py::arg("sequences"), py::arg("first"), py::arg("most"),
        py::arg("used"), py::arg("running"));
  m.def("sample_streams", &sample_streams, py::arg("streams"));
  m.def("count_accounts", &count_accounts, py::arg("sequences"));
  m.def("rows_of", &rows_of, py::arg("sequences"));
  m.def("any_adapter", &any_adapter, py::arg("sequences"));
  m.def("take_samples", &take_samples, py::arg("sequences"), py::arg("tokens"), py::arg("bad_rows"),
        py::arg("now"), py::arg("running"), py::arg("commits"));
}

}  // namespace bequest
