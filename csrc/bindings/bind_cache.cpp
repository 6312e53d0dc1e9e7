// The cache core in Python: TokenList, BlockPool, BlockTable, swap, batch preparation.
#include <pybind11/numpy.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/fields.h"
#include "cache/batch.h"
#include "cache/beam_tables.h"
#include "cache/block_pool.h"
#include "cache/block_table.h"
#include "cache/ngram_index.h"
#include "cache/swap.h"
#include "cache/token_list.h"

PYBIND11_MAKE_OPAQUE(std::vector<bequest::BlockEpoch>)

namespace py = pybind11;

namespace bequest {

template <>
inline constexpr auto fields_of<BatchShape> =
    std::tuple(&BatchShape::num_tokens, &BatchShape::num_rows, &BatchShape::columns);

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

std::vector<BlockTable*> to_tables(const py::sequence& tables) {
  std::vector<BlockTable*> pointers;
  pointers.reserve(tables.size());
  for (const py::handle table : tables) pointers.push_back(&table.cast<BlockTable&>());
  return pointers;
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
      .def("__len__", &NgramIndex::size);
}

// --- BlockPool

double usage(const BlockPool& pool) {
  const int32_t usable = pool.num_blocks() - 1;
  return usable == 0 ? 0.0 : static_cast<double>(pool.num_used()) / usable;
}

// Those whose content the prefix index finds, held or not.
py::array_t<int32_t> indexed_blocks(const BlockPool& pool) {
  std::vector<int32_t> found;
  for (int32_t block = 1; block < pool.num_blocks(); ++block) {
    if (pool.indexed(block)) found.push_back(block);
  }
  return py::array_t<int32_t>(static_cast<py::ssize_t>(found.size()), found.data());
}

void bind_block_pool(py::module_& m) {
  py::class_<BlockPool, std::shared_ptr<BlockPool>>(m, "BlockPool")
      .def(py::init<int32_t, int32_t, bool, int>(), py::arg("num_blocks"), py::arg("block_size"),
           py::arg("prefix_index") = true, py::arg("hash_bits") = 32)
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

std::pair<BlockTable, int32_t> adopt(std::shared_ptr<BlockPool> pool, const py::bytes& salt,
                                     const BlockEpochs& blocks) {
  BlockTable table = BlockTable::adopt(std::move(pool), salt, blocks);
  const int32_t num_blocks = table.num_blocks();
  return {std::move(table), num_blocks};
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

size_t num_left(const BlockEpochs& blocks, const BlockPool& pool) {
  const auto gone = std::find_if(blocks.begin(), blocks.end(),
                                 [&](const BlockEpoch& b) { return pool.epoch(b.block) != b.epoch; });
  return gone - blocks.begin();
}

size_t num_held(const BlockEpochs& blocks, const BlockPool& pool) {
  return std::count_if(blocks.begin(), blocks.begin() + num_left(blocks, pool),
                       [&](const BlockEpoch& b) { return pool.ref_count(b.block) > 0; });
}

// The blocks at the beginning that still hold what they held.
py::array_t<int32_t> blocks_left(const BlockEpochs& blocks, const BlockPool& pool) {
  py::array_t<int32_t> left(static_cast<py::ssize_t>(num_left(blocks, pool)));
  for (py::ssize_t i = 0; i < left.size(); ++i) left.mutable_at(i) = blocks[i].block;
  return left;
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
      .def("blocks_needed", &BlockTable::blocks_needed, py::arg("begin"), py::arg("end"))
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
      .def("share_front", &BlockTable::share_front, py::arg("other"), py::arg("num_blocks"))
      .def("free", &BlockTable::free)
      .def("epochs", &BlockTable::epochs)
      .def_property_readonly("blocks", &BlockTable::entries)
      .def_property_readonly("num_blocks", &BlockTable::num_blocks)
      .def_property_readonly("num_shared", &BlockTable::num_shared)
      .def_property_readonly("num_on_host", &BlockTable::num_on_host)
      .def_property_readonly("resident", &BlockTable::resident)
      .def("__len__", &BlockTable::num_blocks);
}

// --- BeamTables

std::span<const int32_t> span_of(const py::array_t<int32_t, py::array::c_style>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

size_t num_left_of_all(const BeamEpochs& epochs, const BlockPool& pool) {
  size_t left = 0;
  for (const BlockEpochs& blocks : epochs.beams) left += num_left(blocks, pool);
  return left;
}

// [blocks of the ended beam at each place]; empty where its table was taken.
std::vector<std::vector<int32_t>> ended_blocks(const BeamTables& beams) {
  std::vector<std::vector<int32_t>> blocks;
  for (const auto& table : beams.ended()) blocks.push_back(table ? table->entries() : std::vector<int32_t>{});
  return blocks;
}

void bind_beam_tables(py::module_& m) {
  using Ints = py::array_t<int32_t, py::array::c_style>;
  py::class_<BeamEpochs>(m, "BeamEpochs")
      .def("num_left", &num_left_of_all, py::arg("pool"))
      .def("__len__", [](const BeamEpochs& epochs) { return epochs.beams.size(); })
      .def("__getitem__", [](const BeamEpochs& epochs, size_t beam) {
        if (beam >= epochs.beams.size()) throw py::index_error("beam out of range");
        return epochs.beams[beam];
      });
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
          "fork", [](const BeamTables& beams, int32_t beam) { return beams.table(beam).fork(); },
          py::arg("beam"))
      .def(
          "blocks", [](const BeamTables& beams, int32_t beam) { return beams.table(beam).entries(); },
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

// --- Batch

struct Batch {
  py::array_t<int32_t> input_ids;     // [T]
  py::array_t<int32_t> input_rows;    // [T]
  py::array_t<int32_t> positions;     // [T]
  py::array_t<int32_t> query_start;   // [S + 1]
  py::array_t<int32_t> seq_lens;      // [S]
  py::array_t<int64_t> slot_mapping;  // [T]
  py::array_t<int32_t> block_tables;  // [S, MB]

  explicit Batch(const BatchShape& shape)
      : input_ids(shape.num_tokens),
        input_rows(shape.num_tokens),
        positions(shape.num_tokens),
        query_start(shape.num_rows + 1),
        seq_lens(shape.num_rows),
        slot_mapping(shape.num_tokens),
        block_tables({shape.num_rows, shape.columns}) {}

  BatchBuffers buffers(const BatchShape& shape) {
    return {.shape = shape,
            .input_ids = input_ids.mutable_data(),
            .input_rows = input_rows.mutable_data(),
            .positions = positions.mutable_data(),
            .query_start = query_start.mutable_data(),
            .seq_lens = seq_lens.mutable_data(),
            .slot_mapping = slot_mapping.mutable_data(),
            .block_tables = block_tables.mutable_data()};
  }
};

std::span<const int32_t> known_from(const TokenList& tokens, int64_t position) {
  const std::span all(tokens.data(), tokens.size());
  return all.subspan(std::clamp<int64_t>(position, 0, static_cast<int64_t>(all.size())));
}

// One row per table, and one per beam where there are BeamTables instead.
std::vector<BatchRow> to_rows(const py::sequence& tables, const py::sequence& tokens,
                              const std::vector<int64_t>& computed, const std::vector<int64_t>& scheduled,
                              const std::vector<int32_t>& last_rows) {
  const size_t count = tables.size();
  check(tokens.size() == count && computed.size() == count && scheduled.size() == count &&
            last_rows.size() == count,
        "tables, tokens, computed, scheduled and last_rows have one element per sequence");
  std::vector<BatchRow> rows;
  rows.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const py::object item = tables[i];
    if (py::isinstance<BeamTables>(item)) {
      const auto& beams = item.cast<const BeamTables&>();
      check(scheduled[i] == 1, "beams compute one token each");
      for (int32_t b = 0; b < beams.size(); ++b)
        rows.push_back({&beams.table(b), std::span(&beams.tokens().at(b), 1), computed[i], 1, last_rows[i]});
    } else {
      const auto known = known_from(tokens[i].cast<const TokenList&>(), computed[i]);
      rows.push_back({&item.cast<const BlockTable&>(), known, computed[i], scheduled[i], last_rows[i]});
    }
  }
  return rows;
}

Batch prepare_batch(const py::sequence& tables, const py::sequence& tokens,
                    const std::vector<int64_t>& computed, const std::vector<int64_t>& scheduled,
                    const std::vector<int32_t>& last_rows, const BatchShape& room) {
  const std::vector<BatchRow> rows = to_rows(tables, tokens, computed, scheduled, last_rows);
  BatchShape shape = measure_batch(rows);
  if (room.num_tokens > 0) shape.num_tokens = room.num_tokens;
  if (room.num_rows > 0) shape.num_rows = room.num_rows;
  if (room.columns > 0) shape.columns = room.columns;
  Batch batch(shape);
  write_batch(rows, batch.buffers(shape));
  return batch;
}

// [S, MB]: the blocks of each table, padded with the null block.
py::array_t<int32_t> gather_tables(const py::sequence& tables) {
  const std::vector<BlockTable*> rows = to_tables(tables);
  ssize_t columns = 0;
  for (const BlockTable* table : rows) {
    check(table->resident(), "a table that was swapped out cannot be scheduled");
    columns = std::max<ssize_t>(columns, table->num_blocks());
  }
  py::array_t<int32_t> gathered({static_cast<ssize_t>(rows.size()), columns});
  int32_t* out = gathered.mutable_data();
  for (const BlockTable* table : rows) {
    const auto& entries = table->entries();
    std::fill(std::copy(entries.begin(), entries.end(), out), out + columns, kNullBlock);
    out += columns;
  }
  return gathered;
}

void bind_batch(py::module_& m) {
  py::class_<Batch>(m, "Batch")
      .def_readonly("input_ids", &Batch::input_ids)
      .def_readonly("input_rows", &Batch::input_rows)
      .def_readonly("positions", &Batch::positions)
      .def_readonly("query_start", &Batch::query_start)
      .def_readonly("seq_lens", &Batch::seq_lens)
      .def_readonly("slot_mapping", &Batch::slot_mapping)
      .def_readonly("block_tables", &Batch::block_tables);
  m.def("prepare_batch", &prepare_batch, py::arg("tables"), py::arg("tokens"), py::arg("computed"),
        py::arg("scheduled"), py::arg("last_rows"), py::arg("room") = py::make_tuple(0, 0, 0));
  m.def("gather_tables", &gather_tables, py::arg("tables"));
}

}  // namespace

void bind_cache(py::module_& m) {
  bind_token_list(m);
  bind_ngram_index(m);
  bind_block_pool(m);
  bind_block_epochs(m);
  bind_block_table(m);
  bind_beam_tables(m);
  bind_swap(m);
  bind_batch(m);
}

}  // namespace bequest
