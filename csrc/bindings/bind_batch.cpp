// Batch preparation in Python: from sequences, tables and tokens to the arrays of a step.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <span>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/fields.h"
#include "bindings/progress.h"
#include "bindings/tables.h"
#include "cache/batch.h"
#include "cache/beam_tables.h"
#include "cache/token_list.h"

namespace py = pybind11;

namespace bequest {

template <>
inline constexpr auto fields_of<BatchShape> =
    std::tuple(&BatchShape::num_tokens, &BatchShape::num_rows, &BatchShape::columns);

namespace {

struct Batch {
  py::array_t<int32_t> input_ids;     // [T]
  py::array_t<int32_t> input_rows;    // [T]
  py::array_t<int32_t> positions;     // [T]
  py::array_t<int32_t> query_start;   // [S + 1]
  py::array_t<int32_t> seq_lens;      // [S]
  py::array_t<int64_t> slot_mapping;  // [G, T]
  py::array_t<int32_t> block_tables;  // [G, S, MB]

  explicit Batch(const BatchShape& shape)
      : input_ids(shape.num_tokens),
        input_rows(shape.num_tokens),
        positions(shape.num_tokens),
        query_start(shape.num_rows + 1),
        seq_lens(shape.num_rows),
        slot_mapping({shape.strips, shape.num_tokens}),
        block_tables({shape.strips, shape.num_rows, shape.columns}) {}

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

using Chunks = std::vector<std::tuple<py::object, py::object, int64_t, int64_t, int32_t>>;

// A row of each stream, then those of the chunks: one per table, and one per beam where there are BeamTables
// instead.
std::vector<BatchRow> to_rows(const py::list& streams, const Chunks& chunks) {
  std::vector<BatchRow> rows;
  rows.reserve(streams.size() + chunks.size());
  const Sequences all(streams);
  for (ssize_t i = 0; i < all.size(); ++i) {
    const Progress& progress = all[i].second;
    const int64_t last = progress.num_computed - 1;
    rows.push_back({&progress.block_table(), known_from(progress.token_list(), last), last, 1,
                    static_cast<int32_t>(progress.row)});
  }
  for (const auto& [table, tokens, computed, scheduled, last_row] : chunks) {
    if (py::isinstance<BeamTables>(table)) {
      const auto& beams = table.cast<const BeamTables&>();
      check(scheduled == 1, "beams compute one token each");
      check(beams.front().capacity() <= computed, "beams write behind what they share");
      for (int32_t b = 0; b < beams.size(); ++b)
        rows.push_back(
            {&beams.tail(b), std::span(&beams.tokens().at(b), 1), computed, 1, last_row, &beams.front()});
    } else {
      const auto known = known_from(tokens.cast<const TokenList&>(), computed);
      rows.push_back({&table.cast<const BlockTable&>(), known, computed, scheduled, last_row});
    }
  }
  return rows;
}

Batch prepare_batch(const py::list& streams, const Chunks& chunks, const BatchShape& room) {
  const std::vector<BatchRow> rows = to_rows(streams, chunks);
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
    check(table->num_strips() == 1, "cross tables have one strip");
    columns = std::max<ssize_t>(columns, table->num_rows());
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

}  // namespace

void bind_batch(py::module_& m) {
  py::class_<Batch>(m, "Batch")
      .def_readonly("input_ids", &Batch::input_ids)
      .def_readonly("input_rows", &Batch::input_rows)
      .def_readonly("positions", &Batch::positions)
      .def_readonly("query_start", &Batch::query_start)
      .def_readonly("seq_lens", &Batch::seq_lens)
      .def_readonly("slot_mapping", &Batch::slot_mapping)
      .def_readonly("block_tables", &Batch::block_tables);
  m.def("prepare_batch", &prepare_batch, py::arg("streams"), py::arg("chunks"),
        py::arg("room") = py::make_tuple(0, 0, 0));
  m.def("gather_tables", &gather_tables, py::arg("tables"));
}

}  // namespace bequest
