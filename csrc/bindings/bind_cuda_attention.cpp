#include <memory>
#include <tuple>
#include <utility>

#include "attention/cuda/few_queries.h"
#include "attention/cuda/single_token.h"
#include "attention/cuda/whole_image.h"
#include "attention/cuda/windows.h"
#include "bindings/attention_work.h"
#include "bindings/cuda_tensors.h"

namespace py = pybind11;

namespace bequest {

template <>
inline constexpr auto fields_of<AttentionLaunches> =
    std::tuple(&AttentionLaunches::decode, &AttentionLaunches::prefill, &AttentionLaunches::max_merges);

namespace {

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

}  // namespace

void bind_cuda_attention(py::module_& m) {
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

}  // namespace bequest
