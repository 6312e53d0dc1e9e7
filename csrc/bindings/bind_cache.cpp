// The cache core in Python: TokenList, BlockPool, BlockTable, BeamTables, swap.
#include <pybind11/numpy.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/progress.h"
#include "bindings/tables.h"
#include "cache/beam_tables.h"
#include "cache/block_pool.h"
#include "cache/block_table.h"
#include "cache/ngram_index.h"
#include "cache/suffix_index.h"
#include "cache/swap.h"
#include "cache/token_list.h"

PYBIND11_MAKE_OPAQUE(std::vector<bequest::BlockEpoch>)

namespace py = pybind11;

namespace bequest {

namespace {

using Pairs = std::vector<std::pair<int32_t, int32_t>>;

Pairs to_pairs(const std::vector<BlockCopy>& copies) {
  Pairs pairs;
  pairs.reserve(copies.size());
  for (const auto [source, destination] : copies) pairs.emplace_back(source, destination);
  return pairs;
}

std::optional<Pairs> to_pairs(const std::optional<std::vector<BlockCopy>>& copies) {
  if (!copies) return std::nullopt;
  return to_pairs(*copies);
}

// [C, 2]: of many copies, a list would take longer to make and to read.
py::array_t<int32_t> to_array(const std::vector<BlockCopy>& copies) {
  static_assert(sizeof(BlockCopy) == 2 * sizeof(int32_t));
  py::array_t<int32_t> pairs({static_cast<ssize_t>(copies.size()), ssize_t{2}});
  std::copy_n(reinterpret_cast<const int32_t*>(copies.data()), 2 * copies.size(), pairs.mutable_data());
  return pairs;
}

// --- TokenList

int64_t to_token(py::handle value) {
  const long long token = PyLong_AsLongLong(value.ptr());
  if (token == -1 && PyErr_Occurred()) throw py::error_already_set();
  return token;
}

// All or nothing: a bad element leaves the list as it was.
void extend(TokenList& list, const py::iterable& tokens) {
  const size_t before = list.size();
  try {
    if (PyTuple_CheckExact(tokens.ptr())) {  // as prompts are: each search begins with a long one
      const ssize_t count = PyTuple_GET_SIZE(tokens.ptr());
      list.reserve_more(count);
      for (ssize_t i = 0; i < count; ++i) list.append(to_token(PyTuple_GET_ITEM(tokens.ptr(), i)));
      return;
    }
    if (const ssize_t hint = PyObject_LengthHint(tokens.ptr(), 0); hint > 0) list.reserve_more(hint);
    for (const py::handle token : tokens) list.append(to_token(token));
  } catch (...) {
    list.truncate(before);
    throw;
  }
}

py::list get_slice(const TokenList& list, const py::slice& slice) {
  ssize_t start, stop, step, length;
  if (!slice.compute(static_cast<ssize_t>(list.size()), &start, &stop, &step, &length)) {
    throw py::error_already_set();
  }
  py::list items(length);
  for (ssize_t i = 0; i < length; ++i) items[i] = py::int_(list[start + i * step]);
  return items;
}

int32_t get_item(const TokenList& list, ssize_t i) {
  if (i < 0) i += static_cast<ssize_t>(list.size());
  if (i < 0 || i >= static_cast<ssize_t>(list.size())) throw py::index_error("token index out of range");
  return list[i];
}

void bind_token_list(py::module_& m) {
  py::class_<TokenList>(m, "TokenList")
      .def(py::init([](const py::iterable& tokens) {
             TokenList list;
             extend(list, tokens);
             return list;
           }),
           py::arg("tokens") = py::tuple())
      .def(
          "append", [](TokenList& list, py::int_ token) { list.append(to_token(token)); }, py::arg("token"))
      .def("extend", &extend, py::arg("tokens"))
      .def("truncate", &TokenList::truncate, py::arg("num_tokens"))
      .def("common_prefix", &TokenList::common_prefix, py::arg("other"))
      .def(
          "fork",
          [](const TokenList& list, const std::vector<int64_t>& more) { return TokenList(list, more); },
          py::arg("more") = py::tuple())
      .def("to_list",
           [](const TokenList& list) {
             return get_slice(list, py::slice(std::nullopt, std::nullopt, std::nullopt));
           })
      .def("array", [](const TokenList& list) { return py::array_t<int32_t>(list.size(), list.data()); })
      .def("__len__", &TokenList::size)
      .def("__getitem__", &get_item)
      .def("__getitem__", &get_slice)
      .def(py::self == py::self);
}

void bind_ngram_index(py::module_& m) {
  py::class_<NgramIndex>(m, "NgramIndex")
      .def(py::init<int64_t>(), py::arg("n"))
      .def("learn", &NgramIndex::learn, py::arg("tokens"))
      .def(
          "follow",
          [](const NgramIndex& index, const TokenList& tokens, size_t most) {
            return py::tuple(py::cast(index.follow(tokens, most)));
          },
          py::arg("tokens"), py::arg("most"))
      .def("run", &NgramIndex::run, py::arg("tokens"))
      .def("__len__", &NgramIndex::size);
}

void bind_suffix_index(py::module_& m) {
  py::class_<SuffixIndex>(m, "SuffixIndex")
      .def(py::init<int64_t, int64_t>(), py::arg("n"), py::arg("most"))
      .def(
          "learn",
          [](SuffixIndex& index, const TokenList& tokens, size_t begin) {
            const SuffixIndex::Span span = index.learn(tokens, begin);
            return py::make_tuple(span.begin, span.end);
          },
          py::arg("tokens"), py::arg("begin") = 0)
      .def(
          "forget", [](SuffixIndex& index, uint64_t begin, uint64_t end) { index.forget({begin, end}); },
          py::arg("begin"), py::arg("end"))
      .def(
          "follow",
          [](const SuffixIndex& index, const TokenList& tokens, size_t most) {
            return py::tuple(py::cast(index.follow(tokens, most)));
          },
          py::arg("tokens"), py::arg("most"))
      .def("run", &SuffixIndex::run, py::arg("tokens"))
      .def("__len__", &SuffixIndex::size);
}

// --- BlockPool

double usage(const BlockPool& pool) {
  const int32_t usable = pool.num_blocks() - 1;
  return usable == 0 ? 0.0 : static_cast<double>(pool.num_used()) / usable;
}

// Those whose content the prefix index finds, held or not.
// [N, 2]: blocks of the prefix index, and the strip of each.
py::array_t<int32_t> indexed_blocks(const BlockPool& pool) {
  std::vector<int32_t> found;
  for (int32_t block = 1; block < pool.num_blocks(); ++block) {
    if (pool.indexed(block)) found.insert(found.end(), {block, pool.indexed_strip(block)});
  }
  const auto count = static_cast<py::ssize_t>(found.size() / 2);
  return py::array_t<int32_t>({count, py::ssize_t{2}}, found.data());
}

// Blocks of all strips that a lease of `num_tokens` tokens may hold, beside those of strips that keep them
// all.
int64_t most_leased_of_windows(const BlockPool& pool, int64_t num_tokens, int64_t num_prompt) {
  int64_t most = 0;
  for (int32_t s = 0; s < pool.strips().count(); ++s) {
    if (!pool.strips().is_whole(s)) most += pool.strips().most_leased(s, num_tokens, num_prompt);
  }
  return most;
}

int32_t num_whole(const BlockPool& pool) {
  int32_t count = 0;
  for (int32_t s = 0; s < pool.strips().count(); ++s) count += pool.strips().is_whole(s);
  return count;
}

using StripSizes = std::tuple<std::vector<int64_t>, int64_t, int64_t>;  // windows, interval, most_chunk

std::shared_ptr<BlockPool> make_pool(int32_t num_blocks, int32_t block_size, bool prefix_index, int hash_bits,
                                     const StripSizes& strips) {
  const auto& [windows, interval, most_chunk] = strips;
  return std::make_shared<BlockPool>(
      num_blocks, block_size, Strips(windows, block_size, interval, most_chunk), prefix_index, hash_bits);
}

void bind_block_pool(py::module_& m) {
  py::class_<BlockPool, std::shared_ptr<BlockPool>>(m, "BlockPool")
      .def(py::init(&make_pool), py::arg("num_blocks"), py::arg("block_size"), py::arg("prefix_index") = true,
           py::arg("hash_bits") = 32, py::arg("strips") = StripSizes{{0}, 1, 0})
      .def_property_readonly("windows", [](const BlockPool& pool) { return pool.strips().windows(); })
      .def_property_readonly("num_strips", [](const BlockPool& pool) { return pool.strips().count(); })
      .def_property_readonly("num_whole_strips", &num_whole)
      .def_property_readonly("slides", [](const BlockPool& pool) { return pool.strips().slides(); })
      .def("most_leased_of_windows", &most_leased_of_windows, py::arg("num_tokens"), py::arg("num_prompt"))
      .def_property_readonly("num_blocks", &BlockPool::num_blocks)
      .def_property_readonly("block_size", &BlockPool::block_size)
      .def_property_readonly("num_free", &BlockPool::num_free)
      .def_property_readonly("num_used", &BlockPool::num_used)
      .def_property_readonly("usage", &usage)
      .def_property_readonly("num_indexed",
                             [](const BlockPool& pool) { return pool.index() ? pool.index()->size() : 0; })
      .def_property_readonly(
          "num_roots", [](const BlockPool& pool) { return pool.index() ? pool.index()->num_roots() : 0; })
      .def("indexed_blocks", &indexed_blocks)
      .def("ref_count", &BlockPool::ref_count, py::arg("block"))
      .def("epoch", &BlockPool::epoch, py::arg("block"))
      .def("settled_slots", &BlockPool::settled_slots, py::arg("block"))
      .def("try_revive", &BlockPool::try_revive, py::arg("block"), py::arg("epoch"))
      .def("release", &BlockPool::release, py::arg("block"))
      .def("begin_plan", &BlockPool::begin_plan)
      .def("end_plan", &BlockPool::end_plan)
      .def("clear_index", &BlockPool::clear_index)
      .def("check", &BlockPool::verify);
}

// --- BlockTable

BlockTable adopt(std::shared_ptr<BlockPool> pool, const py::bytes& salt, const BlockEpochs& blocks) {
  return BlockTable::adopt(std::move(pool), salt, blocks);
}

// The blocks of a table, strip beside strip, without what windows gave back.
std::vector<int32_t> held(const std::vector<int32_t>& entries) {
  std::vector<int32_t> blocks;
  blocks.reserve(entries.size());
  std::copy_if(entries.begin(), entries.end(), std::back_inserter(blocks),
               [](int32_t entry) { return entry != kNullBlock; });
  return blocks;
}

BlockEpochs to_epochs(const py::sequence& pairs) {
  BlockEpochs blocks;
  blocks.reserve(pairs.size());
  for (const py::handle pair : pairs) {
    const auto [block, epoch] = pair.cast<std::pair<int32_t, uint64_t>>();
    blocks.push_back({block, epoch});
  }
  return blocks;
}

// Calls visit(block) for those that still hold what they held, from the first on until a strip that keeps all
// tokens has lost one.
template <class Visit>
void for_each_left(const BlockEpochs& blocks, const BlockPool& pool, Visit visit) {
  const auto strips = static_cast<size_t>(pool.strips().count());
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto [block, epoch] = blocks[i];
    if (block != kNullBlock && pool.epoch(block) == epoch) {
      visit(block);
    } else if (pool.strips().is_whole(static_cast<int32_t>(i % strips))) {
      return;
    }
  }
}

size_t num_left(const BlockEpochs& blocks, const BlockPool& pool) {
  size_t left = 0;
  for_each_left(blocks, pool, [&](BlockId) { ++left; });
  return left;
}

size_t num_held(const BlockEpochs& blocks, const BlockPool& pool) {
  size_t held = 0;
  for_each_left(blocks, pool, [&](BlockId block) { held += pool.ref_count(block) > 0; });
  return held;
}

// The blocks at the beginning that still hold what they held.
py::array_t<int32_t> blocks_left(const BlockEpochs& blocks, const BlockPool& pool) {
  std::vector<int32_t> left;
  for_each_left(blocks, pool, [&](BlockId block) { left.push_back(block); });
  return py::array_t<int32_t>(static_cast<py::ssize_t>(left.size()), left.data());
}

// Most are never looked at, so that they are not made Python objects when a request ends.
void bind_block_epochs(py::module_& m) {
  py::class_<BlockEpochs>(m, "BlockEpochs")
      .def(py::init(&to_epochs), py::arg("pairs") = py::tuple())
      .def("num_left", &num_left, py::arg("pool"))
      .def("num_held", &num_held, py::arg("pool"))
      .def("blocks_left", &blocks_left, py::arg("pool"))
      .def("__len__", &BlockEpochs::size)
      .def("__getitem__",
           [](const BlockEpochs& blocks, size_t i) {
             if (i >= blocks.size()) throw py::index_error("block index out of range");
             return std::pair(blocks[i].block, blocks[i].epoch);
           })
      .def(py::self == py::self);
  py::implicitly_convertible<py::sequence, BlockEpochs>();
}

void bind_block_table(py::module_& m) {
  py::class_<BlockTable>(m, "BlockTable")
      .def(py::init([](std::shared_ptr<BlockPool> pool, const py::bytes& salt) {
             return BlockTable(std::move(pool), salt);
           }),
           py::arg("pool"), py::arg("salt") = py::bytes())
      .def_static("adopt", &adopt, py::arg("pool"), py::arg("salt"), py::arg("blocks"))
      .def("match_prefix", &BlockTable::match_prefix, py::arg("tokens"), py::arg("limit"))
      .def("match_partial", &BlockTable::match_partial, py::arg("tokens"), py::arg("limit"))
      .def("keep_window", [](BlockTable& table) { table.keep({}); })
      .def(
          "keep_for_lease",
          [](BlockTable& table, int64_t num_prompt) { table.keep({Keeping::What::kLease, num_prompt}); },
          py::arg("num_prompt"))
      .def("keep_all", [](BlockTable& table) { table.keep({Keeping::What::kAll}); })
      .def("slide", &BlockTable::slide, py::arg("position"))
      .def("servable", &BlockTable::servable, py::arg("limit"))
      .def("copyable", &BlockTable::copyable, py::arg("num_tokens"))
      .def("blocks_needed", &BlockTable::blocks_needed, py::arg("begin"), py::arg("end"))
      .def("blocks_to_reach", &BlockTable::blocks_to_reach, py::arg("computed"), py::arg("num_tokens"))
      .def("try_append", &BlockTable::try_append, py::arg("present"), py::arg("num_tokens"))
      .def(
          "try_prepare_write",
          [](BlockTable& table, int64_t begin, int64_t end) {
            return to_pairs(table.try_prepare_write(begin, end));
          },
          py::arg("begin"), py::arg("end"))
      .def("commit", &BlockTable::commit, py::arg("tokens"), py::arg("num_computed"))
      .def("uncommit", &BlockTable::uncommit, py::arg("from_token"))
      .def("fork", &BlockTable::fork)
      .def("slice_to", &BlockTable::slice_to, py::arg("num_tokens"))
      .def("truncate", &BlockTable::truncate, py::arg("num_tokens"))
      .def("share_front", &BlockTable::share_front, py::arg("other"), py::arg("num_rows"))
      .def("free", &BlockTable::free)
      .def("epochs", [](const BlockTable& table) { return table.epochs(); })
      .def_property_readonly("blocks", [](const BlockTable& table) { return held(table.entries()); })
      .def_property_readonly("entries", &BlockTable::entries)
      .def_property_readonly("capacity", &BlockTable::capacity)
      .def_property_readonly("num_shared", &BlockTable::num_shared)
      .def_property_readonly("num_on_host", &BlockTable::num_on_host)
      .def_property_readonly("resident", &BlockTable::resident)
      .def("__len__", &BlockTable::num_held);
}

// --- BeamTables

std::span<const int32_t> span_of(const py::array_t<int32_t, py::array::c_style>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

size_t num_left_of_all(const BeamEpochs& epochs, const BlockPool& pool) {
  return epochs.ends.size() * num_left(epochs.front, pool) + num_left(epochs.tails, pool);
}

BlockEpochs epochs_of(const BeamEpochs& epochs, size_t beam) {
  if (beam >= epochs.ends.size()) throw py::index_error("beam out of range");
  BlockEpochs blocks = epochs.front;
  const BlockEpoch* tails = epochs.tails.data();
  blocks.insert(blocks.end(), tails + epochs.begin(beam), tails + epochs.ends[beam]);
  return blocks;
}

// [blocks of the ended beam at each place]; empty where its table was taken.
std::vector<std::vector<int32_t>> ended_blocks(const BeamTables& beams) {
  std::vector<std::vector<int32_t>> blocks;
  for (const auto& table : beams.ended())
    blocks.push_back(table ? held(table->entries()) : std::vector<int32_t>{});
  return blocks;
}

void bind_beam_tables(py::module_& m) {
  using Ints = py::array_t<int32_t, py::array::c_style>;
  py::class_<BeamEpochs>(m, "BeamEpochs")
      .def("num_left", &num_left_of_all, py::arg("pool"))
      .def("__len__", [](const BeamEpochs& epochs) { return epochs.ends.size(); })
      .def("__getitem__", &epochs_of);
  py::class_<BeamTables>(m, "BeamTables")
      .def(py::init<BlockTable&>(), py::arg("first"))
      .def(
          "reorder",
          [](BeamTables& beams, const Ints& parents, const Ints& tokens) {
            beams.reorder(span_of(parents), span_of(tokens));
          },
          py::arg("parents"), py::arg("tokens"))
      .def("blocks_needed", &BeamTables::blocks_needed, py::arg("position"))
      .def(
          "try_prepare_write",
          [](BeamTables& beams, int64_t position) {
            const auto copies = beams.try_prepare_write(position);
            return copies ? std::optional(to_array(*copies)) : std::nullopt;
          },
          py::arg("position"))
      .def(
          "try_ahead",
          [](const BeamTables& beams, int32_t width, int64_t position) -> py::object {
            std::vector<BlockCopy> copies;
            auto ahead = beams.try_ahead(width, position, copies);
            if (!ahead) return py::none();
            return py::make_tuple(std::move(*ahead), to_array(copies));
          },
          py::arg("width"), py::arg("position"))
      .def(
          "succeed",
          [](BeamTables& beams, BeamTables& before, const Ints& tokens) {
            beams.succeed(before, span_of(tokens));
          },
          py::arg("before"), py::arg("tokens"))
      .def("fork", &BeamTables::fork, py::arg("beam"))
      .def(
          "blocks", [](const BeamTables& beams, int32_t beam) { return held(beams.fork(beam).entries()); },
          py::arg("beam"))
      .def(
          "end", [](BeamTables& beams, const Ints& rows) { return beams.end(span_of(rows)); },
          py::arg("rows"))
      .def("take_ended", &BeamTables::take_ended, py::arg("place"))
      .def(
          "epochs",
          [](const BeamTables& beams, const Ints& places, const Ints& rows, const Ints& num_tokens) {
            return beams.epochs(span_of(places), span_of(rows), span_of(num_tokens));
          },
          py::kw_only(), py::arg("places"), py::arg("rows"), py::arg("num_tokens"))
      .def("front_blocks", [](const BeamTables& beams) { return held(beams.front().entries()); })
      .def("ended_blocks", &ended_blocks)
      .def("free", &BeamTables::free)
      .def("__len__", &BeamTables::size);
}

void bind_swap(py::module_& m) {
  m.def(
      "count_distinct_blocks",
      [](const py::sequence& tables) { return count_distinct_blocks(to_tables(tables)); }, py::arg("tables"));
  m.def(
      "try_swap_out",
      [](const py::sequence& tables, const std::shared_ptr<BlockPool>& host) {
        return to_pairs(try_swap_out(to_tables(tables), host));
      },
      py::arg("tables"), py::arg("host"));
  m.def(
      "swap_out_some",
      [](const py::sequence& tables, const std::shared_ptr<BlockPool>& host, int64_t most) {
        return to_pairs(swap_out_some(to_tables(tables), host, most));
      },
      py::arg("tables"), py::arg("host"), py::arg("most"));
  m.def(
      "try_swap_in",
      [](const py::sequence& tables, const std::shared_ptr<BlockPool>& device) {
        return to_pairs(try_swap_in(to_tables(tables), device));
      },
      py::arg("tables"), py::arg("device"));
}

}  // namespace

void bind_cache(py::module_& m) {
  bind_token_list(m);
  bind_ngram_index(m);
  bind_suffix_index(m);
  bind_block_pool(m);
  bind_block_epochs(m);
  bind_block_table(m);
  bind_beam_tables(m);
  bind_swap(m);
  bind_progress(m);
  bind_streams(m);
  bind_batch(m);
}

}  // namespace bequest
