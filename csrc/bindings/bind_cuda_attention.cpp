// The work list is plain C++ and bound in every build; the kernels where CUDA is compiled.
#include "attention/cuda/single_token.h"
#include "attention/cuda/work_list.h"
#include "bindings/bindings.h"

namespace py = pybind11;

namespace bequest {
namespace {

// (NB, L, NKV, BS, D), the sizes of a cache tensor [NB, L, 2, NKV, BS, D]
using KvSizes = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;

// A work shape with its layout: what the kernels and the list's writer share.
struct AttentionWork {
  WorkShape shape;
  WorkListLayout layout;
};

std::tuple<int, int, int> write_list(const AttentionWork& self, Address query_start, Address seq_lens,
                                     Address block_tables, int64_t num_sequences, int64_t max_blocks,
                                     int block_size, Address buffer) {
  const BlockTableRows batch{pointer<int32_t>(query_start),
                             pointer<int32_t>(seq_lens),
                             pointer<int32_t>(block_tables),
                             num_sequences,
                             max_blocks,
                             block_size};
  const WorkListHeader header = build_work_list(self.shape, self.layout, batch, pointer<int32_t>(buffer));
  return {header.num_decode_items, header.num_prefill_items, header.num_merges};
}

#ifdef BEQUEST_WITH_CUDA
void attend(const AttentionWork& self, Address q, int64_t q_stride, Address out, Address kv_cache,
            int kv_dtype, const KvSizes& sizes, int64_t layer, float key_scale, float value_scale,
            float scale, float soft_cap, Address bias, int bias_reach, Address block_tables,
            int64_t max_blocks, Address work_list, Address state_values, Address state_scales,
            Address tickets, Address mail, bool decode, bool prefill, int max_merges, Address stream) {
  const auto [num_blocks, num_layers, num_kv_heads, block_size, head_dim] = sizes;
  const CudaAttentionParams params{pointer<void>(q),
                                   q_stride,
                                   pointer<void>(out),
                                   self.shape.dtype,
                                   pointer<void>(kv_cache),
                                   static_cast<DType>(kv_dtype),
                                   key_scale,
                                   value_scale,
                                   {num_blocks, num_layers, num_kv_heads, block_size, head_dim},
                                   layer,
                                   self.shape.num_q_heads,
                                   scale,
                                   soft_cap,
                                   pointer<float>(bias),
                                   bias_reach,
                                   self.shape.causal,
                                   self.shape.window,
                                   pointer<int32_t>(block_tables),
                                   max_blocks,
                                   pointer<int32_t>(work_list),
                                   self.layout,
                                   pointer<float>(state_values),
                                   pointer<float>(state_scales),
                                   pointer<int32_t>(tickets),
                                   pointer<uint32_t>(mail)};
  cuda_paged_attention(params, {decode, prefill, max_merges}, pointer<CUstream_st>(stream));
}

void attend_one(const AttentionWork& self, Address qkv, Address out, Address kv_cache, int kv_dtype,
                const KvSizes& sizes, int64_t layer, float key_scale, float value_scale, float scale,
                Address q_weight, Address k_weight, float eps, Address positions, Address cos_sin,
                int64_t rotary_dim, Address slots, Address block_tables, int64_t max_blocks,
                Address work_list, Address stream) {
  const auto [num_blocks, num_layers, num_kv_heads, block_size, head_dim] = sizes;
  const KvLayout layout{num_blocks, num_layers, num_kv_heads, block_size, head_dim};
  const int64_t q_heads = self.shape.num_q_heads, width = (q_heads + 2 * num_kv_heads) * head_dim;
  auto* const q = pointer<uint16_t>(qkv);
  uint16_t* const k = q + q_heads * head_dim;
  uint16_t* const v = k + num_kv_heads * head_dim;
  CudaAttentionParams params{};
  params.q = q;
  params.q_stride = width;
  params.out = pointer<void>(out);
  params.dtype = self.shape.dtype;
  params.kv_cache = pointer<void>(kv_cache);
  params.kv_dtype = static_cast<DType>(kv_dtype);
  params.key_scale = key_scale;
  params.value_scale = value_scale;
  params.layout = layout;
  params.layer = layer;
  params.num_q_heads = self.shape.num_q_heads;
  params.scale = scale;
  params.causal = self.shape.causal;
  params.window = self.shape.window;
  params.block_tables = pointer<int32_t>(block_tables);
  params.max_blocks = max_blocks;
  params.work_list = pointer<int32_t>(work_list);
  params.lists = self.layout;
  attend_token(params,
               {.q = q,
                .k = k,
                .v = v,
                .q_stride = width,
                .k_stride = width,
                .v_stride = width,
                .num_tokens = 1,
                .q_heads = q_heads,
                .k_heads = num_kv_heads,
                .head_dim = head_dim,
                .q_weight = pointer<void>(q_weight),
                .k_weight = pointer<void>(k_weight),
                .eps = eps,
                .positions = pointer<int32_t>(positions),
                .cos_sin = pointer<float>(cos_sin),
                .rotary_dim = rotary_dim,
                .slots = pointer<int64_t>(slots),
                .kv_cache = pointer<void>(kv_cache),
                .layout = layout,
                .layer = layer,
                .kv_dtype = static_cast<DType>(kv_dtype),
                .key_factor = 1.0f / key_scale,
                .value_factor = 1.0f / value_scale,
                .dtype = self.shape.dtype},
               pointer<CUstream_st>(stream));
}
#endif

}  // namespace

void bind_cuda_attention(py::module_& m) {
  py::class_<AttentionWork>(m, "AttentionWork")
      .def(py::init([](int num_q_heads, int num_kv_heads, int head_dim, int dtype, bool causal, int window,
                       int num_multiprocessors, int64_t max_sequences, int64_t max_tokens,
                       int prefill_blocks_per_sm, bool wide_tiles) {
        const WorkShape shape{.num_q_heads = num_q_heads,
                              .num_kv_heads = num_kv_heads,
                              .head_dim = head_dim,
                              .dtype = static_cast<DType>(dtype),
                              .causal = causal,
                              .window = window,
                              .num_multiprocessors = num_multiprocessors,
                              .max_sequences = max_sequences,
                              .max_tokens = max_tokens,
                              .prefill_blocks_per_sm = prefill_blocks_per_sm,
                              .wide_tiles = wide_tiles};
        return AttentionWork{shape, work_list_layout(shape)};
      }))
      .def_property_readonly("size", [](const AttentionWork& self) { return self.layout.size; })
      .def_property_readonly("state_rows", [](const AttentionWork& self) { return self.layout.state_rows; })
      .def_property_readonly("decode_tokens",
                             [](const AttentionWork& self) { return self.layout.decode_tokens; })
      .def_property_readonly("workers", [](const AttentionWork& self) { return self.layout.workers; })
      .def_property_readonly("max_merges",
                             [](const AttentionWork& self) {
                               return std::tuple(self.layout.max_decode_merges,
                                                 self.layout.max_prefill_merges);
                             })
      .def_property_readonly("ticket_ints", [](const AttentionWork& self) { return self.layout.ticket_ints; })
      .def_property_readonly("mail_ints",
                             [](const AttentionWork& self) {
                               const int64_t rows = int64_t{self.layout.mail_rows} * self.shape.num_kv_heads;
                               return rows * (self.shape.head_dim / 2 + 2);
                             })
      .def_property_readonly("sections",
                             [](const AttentionWork& self) {
                               return std::tuple(self.layout.merges, self.layout.decode_items,
                                                 self.layout.prefill_items);
                             })
      // With the GIL: the list takes less time than to get it back.
      .def("write", &write_list);
#ifdef BEQUEST_WITH_CUDA
  m.def("prefill_blocks_per_sm", [](int head_dim, int kv_dtype) {
    return prefill_blocks_per_sm(head_dim, static_cast<DType>(kv_dtype));
  });
  m.def("has_wide_tiles", &has_wide_tiles);
  m.def("can_attend_token", [](const AttentionWork& self) { return can_attend_token(self.shape); });
  m.def("cuda_attend_token", &attend_one, py::call_guard<py::gil_scoped_release>());
  m.def("cuda_paged_attention", &attend, py::call_guard<py::gil_scoped_release>());
#endif
}

}  // namespace bequest
