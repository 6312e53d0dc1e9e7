// The work lists of a GPU's attention: plain C++, bound in every build.
#include <memory>
#include <tuple>

#include "attention/cuda/few_queries.h"
#include "bindings/attention_work.h"
#include "bindings/tensors.h"

namespace py = pybind11;

namespace bequest {
namespace {

// The lengths and the tables of a step, as BlockTableRows has them but for the block size.
struct StepRows {
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  int64_t num_sequences;
  int64_t max_blocks;
};

// What is known of the device and its kernels.
struct DeviceFacts {
  int num_multiprocessors;
  int prefill_blocks_per_sm;
  bool wide_tiles;
};

}  // namespace

template <>
inline constexpr auto fields_of<StepRows> =
    std::tuple(&StepRows::query_start, &StepRows::seq_lens, &StepRows::block_tables, &StepRows::num_sequences,
               &StepRows::max_blocks);
template <>
inline constexpr auto fields_of<DeviceFacts> = std::tuple(
    &DeviceFacts::num_multiprocessors, &DeviceFacts::prefill_blocks_per_sm, &DeviceFacts::wide_tiles);

namespace {

std::shared_ptr<AttentionWork> make_work(const HeadCounts& heads, const Mask& mask, int dtype,
                                         int64_t max_sequences, int64_t max_tokens,
                                         const DeviceFacts& device) {
  const WorkShape shape{.num_q_heads = heads.num_q_heads,
                        .num_kv_heads = heads.num_kv_heads,
                        .head_dim = heads.head_dim,
                        .dtype = static_cast<DType>(dtype),
                        .causal = mask.causal,
                        .window = mask.window,
                        .num_multiprocessors = device.num_multiprocessors,
                        .max_sequences = max_sequences,
                        .max_tokens = max_tokens,
                        .prefill_blocks_per_sm = device.prefill_blocks_per_sm,
                        .wide_tiles = device.wide_tiles};
  return std::make_shared<AttentionWork>(AttentionWork{shape, work_list_layout(shape), {}});
}

std::tuple<int, int, int> write_list(const AttentionWork& self, const StepRows& rows, int block_size,
                                     Address buffer) {
  const BlockTableRows batch{rows.query_start,   rows.seq_lens,   rows.block_tables,
                             rows.num_sequences, rows.max_blocks, block_size};
  const WorkListHeader header = build_work_list(self.shape, self.layout, batch, pointer<int32_t>(buffer));
  return {header.num_decode_items, header.num_prefill_items, header.num_merges};
}

}  // namespace

void bind_attention_work(py::module_& m) {
  using Work = AttentionWork;
  py::class_<Work, std::shared_ptr<Work>>(m, "AttentionWork")
      .def(py::init(&make_work), py::arg("heads"), py::arg("mask"), py::arg("dtype"),
           py::arg("max_sequences"), py::arg("max_tokens"), py::arg("device"))
      .def_property_readonly("size", [](const Work& self) { return self.layout.size; })
      .def_property_readonly("state_rows", [](const Work& self) { return self.layout.state_rows; })
      .def_property_readonly("decode_tokens", [](const Work& self) { return self.layout.decode_tokens; })
      .def_property_readonly("few_tokens",
                             [](const Work& self) { return few_tokens(self.layout.decode_tokens); })
      .def_property_readonly("workers", [](const Work& self) { return self.layout.workers; })
      .def_property_readonly("max_merges",
                             [](const Work& self) {
                               return std::tuple(self.layout.max_decode_merges,
                                                 self.layout.max_prefill_merges);
                             })
      .def_property_readonly("ticket_ints", [](const Work& self) { return self.layout.ticket_ints; })
      .def_property_readonly("mail_ints",
                             [](const Work& self) {
                               const int64_t rows = int64_t{self.layout.mail_rows} * self.shape.num_kv_heads;
                               return rows * (self.shape.head_dim / 2 + 2);
                             })
      .def_property_readonly("sections",
                             [](const Work& self) {
                               return std::tuple(self.layout.merges, self.layout.decode_items,
                                                 self.layout.prefill_items);
                             })
      .def(
          "use_scratch",
          [](Work& self, Address state_values, Address state_scales, Address tickets, Address mail) {
            self.scratch = {pointer<float>(state_values), pointer<float>(state_scales),
                            pointer<int32_t>(tickets), pointer<uint32_t>(mail)};
          },
          py::arg("state_values"), py::arg("state_scales"), py::arg("tickets"), py::arg("mail"))
      // With the GIL: the list takes less time than to get it back.
      .def("write", &write_list, py::arg("rows"), py::arg("block_size"), py::arg("buffer"));
}

}  // namespace bequest
