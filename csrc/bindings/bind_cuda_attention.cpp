// The work list is plain C++ and bound in every build; the kernels where CUDA is compiled.
#include <memory>
#include <tuple>
#include <utility>

#include "attention/cuda/few_queries.h"
#include "attention/cuda/single_token.h"
#include "attention/cuda/whole_image.h"
#include "attention/cuda/windows.h"
#include "attention/cuda/work_list.h"
#include "bindings/cuda_tensors.h"

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

// Memory that calls leave as they found it, or that means nothing between them: attention/cuda/attention.h.
struct Scratch {
  float* state_values;
  float* state_scales;
  int32_t* tickets;
  uint32_t* mail;
};

// A work shape with its layout: what the kernels and the list's writer share.
struct AttentionWork {
  WorkShape shape;
  WorkListLayout layout;
  Scratch scratch;
};

}  // namespace

template <>
inline constexpr auto fields_of<StepRows> =
    std::tuple(&StepRows::query_start, &StepRows::seq_lens, &StepRows::block_tables, &StepRows::num_sequences,
               &StepRows::max_blocks);
template <>
inline constexpr auto fields_of<DeviceFacts> = std::tuple(
    &DeviceFacts::num_multiprocessors, &DeviceFacts::prefill_blocks_per_sm, &DeviceFacts::wide_tiles);
template <>
inline constexpr auto fields_of<AttentionLaunches> =
    std::tuple(&AttentionLaunches::decode, &AttentionLaunches::prefill, &AttentionLaunches::max_merges);

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

void bind_work(py::module_& m) {
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

#ifdef BEQUEST_WITH_CUDA
// The work of a step in device memory, for all of its layers.
struct StepWork {
  std::shared_ptr<const AttentionWork> work;
  const int32_t* block_tables;
  int64_t max_blocks;
  const int32_t* work_list;
  AttentionLaunches launches;
};

// All that the step and the layer say; not the queries, the result and the scores' rule.
CudaAttentionParams params_of(const StepWork& step, const LayerCache& of) {
  const AttentionWork& work = *step.work;
  CudaAttentionParams params{};
  params.dtype = work.shape.dtype;
  params.kv_cache = of.cache.data;
  params.kv_dtype = of.cache.dtype;
  params.key_scale = static_cast<float>(of.key_scale);
  params.value_scale = static_cast<float>(of.value_scale);
  params.layout = of.cache.layout;
  params.layer = of.layer;
  params.num_q_heads = work.shape.num_q_heads;
  params.causal = work.shape.causal;
  params.window = work.shape.window;
  params.block_tables = step.block_tables;
  params.max_blocks = step.max_blocks;
  params.work_list = step.work_list;
  params.lists = work.layout;
  return params;
}

// Where the results of an attention go.
struct Results {
  void* out;
  void* codes;  // null: they are not rounded
  float* scales;
};

void attend_to(const StepWork& step, const Heads& q, const Results& results, const LayerCache& of,
               const ScoreRule& scores, Address stream) {
  CudaAttentionParams params = params_of(step, of);
  const Scratch& scratch = step.work->scratch;
  params.q = q.data;
  params.num_tokens = q.num_tokens;
  params.q_stride = q.stride;
  params.out = results.out;
  params.rounded = {results.codes, results.scales};
  params.scale = static_cast<float>(scores.scale);
  params.soft_cap = scores.soft_cap;
  params.bias = scores.bias;
  params.bias_reach = static_cast<int>(scores.bias_reach);
  params.sinks = scores.sinks;
  params.state_values = scratch.state_values;
  params.state_scales = scratch.state_scales;
  params.tickets = scratch.tickets;
  params.mail = scratch.mail;
  cuda_paged_attention(params, step.launches, stream_of(stream));
}

void attend(const StepWork& step, const Heads& q, Address out, const LayerCache& of, const ScoreRule& scores,
            Address stream) {
  attend_to(step, q, {pointer<void>(out), nullptr, nullptr}, of, scores, stream);
}

void attend_one(const StepWork& step, Address qkv, Address out, const ScoreRule& scores,
                const Preparation& steps, Address stream) {
  const LayerCache& of = steps.to.value();
  const KvLayout& layout = of.cache.layout;
  const WorkShape& shape = step.work->shape;
  const int64_t q_heads = shape.num_q_heads, kv_heads = layout.num_kv_heads, head_dim = layout.head_dim;
  const int64_t width = (q_heads + 2 * kv_heads) * head_dim;
  auto* const q = pointer<uint16_t>(qkv);
  CudaAttentionParams params = params_of(step, of);
  params.q = q;
  params.num_tokens = 1;
  params.q_stride = width;
  params.out = pointer<void>(out);
  params.scale = static_cast<float>(scores.scale);
  params.soft_cap = scores.soft_cap;
  params.bias = scores.bias;
  params.sinks = scores.sinks;
  cuda::QkvParams heads = qkv_params(steps, shape.dtype);
  heads.q = q;
  heads.k = q + q_heads * head_dim;
  heads.v = q + (q_heads + kv_heads) * head_dim;
  heads.q_stride = heads.k_stride = heads.v_stride = width;
  heads.num_tokens = 1;
  heads.q_heads = q_heads;
  heads.k_heads = kv_heads;
  heads.head_dim = head_dim;
  heads.key_factor = 1.0f / params.key_scale;
  heads.value_factor = 1.0f / params.value_scale;
  attend_token(params, heads, stream_of(stream));
}

void bind_kernels(py::module_& m) {
  m.def(
      "cuda_prefill_blocks_per_sm",
      [](int head_dim, int kv_dtype) { return prefill_blocks_per_sm(head_dim, DType(kv_dtype)); },
      py::arg("head_dim"), py::arg("kv_dtype"));
  m.def("cuda_has_wide_tiles", &has_wide_tiles);
  m.def(
      "cuda_can_attend_token", [](const AttentionWork& work) { return can_attend_token(work.shape); },
      py::arg("work"));
  py::class_<StepWork>(m, "CudaStep")
      .def(py::init([](std::shared_ptr<AttentionWork> work, Address block_tables, int64_t max_blocks,
                       Address work_list, const AttentionLaunches& launches) {
             return StepWork{std::move(work), pointer<int32_t>(block_tables), max_blocks,
                             pointer<int32_t>(work_list), launches};
           }),
           py::arg("work"), py::arg("block_tables"), py::arg("max_blocks"), py::arg("work_list"),
           py::arg("launches"));
  m.def("cuda_attend_token", &attend_one, py::call_guard<py::gil_scoped_release>(), py::arg("step"),
        py::arg("qkv"), py::arg("out"), py::arg("scores"), py::arg("steps"), py::arg("stream"));
  m.def(
      "cuda_attend_windows",
      [](Address qkv, Address begin, Address cos_sin, Address out, std::tuple<int64_t, int64_t, float> sizes,
         Address stream) {
        const auto [num_windows, num_heads, scale] = sizes;
        cuda::attend_windows(
            {pointer<const void>(qkv), pointer<const int32_t>(begin), pointer<const float>(cos_sin),
             pointer<void>(out), num_windows, num_heads, scale},
            stream_of(stream));
      },
      py::arg("qkv"), py::arg("begin"), py::arg("cos_sin"), py::arg("out"), py::arg("sizes"),
      py::arg("stream"));
  m.def("cuda_can_attend_image", &cuda::can_attend_image, py::arg("head_dim"));
  m.def(
      "cuda_attend_image",
      [](Address qkv, Address out, std::tuple<int64_t, int64_t, int64_t, float> sizes, Address stream) {
        const auto [num_patches, num_heads, head_dim, scale] = sizes;
        cuda::attend_image(
            {pointer<const void>(qkv), pointer<void>(out), num_patches, num_heads, head_dim, scale},
            stream_of(stream));
      },
      py::arg("qkv"), py::arg("out"), py::arg("sizes"), py::arg("stream"));
  m.def("cuda_paged_attention", &attend, py::call_guard<py::gil_scoped_release>(), py::arg("step"),
        py::arg("q"), py::arg("out"), py::arg("of"), py::arg("scores"), py::arg("stream"));
  m.def(
      "cuda_paged_attention_float8",
      [](const StepWork& step, const Heads& q, std::tuple<Address, Address, Address> out,
         const LayerCache& of, const ScoreRule& scores, Address stream) {
        const auto [rows, codes, scales] = out;
        attend_to(step, q, {pointer<void>(rows), pointer<void>(codes), pointer<float>(scales)}, of, scores,
                  stream);
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("step"), py::arg("q"), py::arg("out"), py::arg("of"),
      py::arg("scores"), py::arg("stream"));
}
#endif

}  // namespace

void bind_cuda_attention(py::module_& m) {
  bind_work(m);
#ifdef BEQUEST_WITH_CUDA
  bind_kernels(m);
#endif
}

}  // namespace bequest
