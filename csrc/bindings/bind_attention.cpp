#include <memory>
#include <optional>

#include "attention/cpu/attention.h"
#include "bindings/tensors.h"
#include "cache/cpu/kv_copy.h"
#include "cache/cpu/kv_write.h"

namespace py = pybind11;

namespace bequest {

template <>
inline constexpr auto fields_of<AttentionBatch> =
    std::tuple(&AttentionBatch::query_start, &AttentionBatch::seq_lens, &AttentionBatch::block_tables,
               &AttentionBatch::num_sequences, &AttentionBatch::max_blocks);

namespace {

constexpr int64_t kSmallPlan = 64;  // sequences

void bind_kv(py::module_& m) {
  py::class_<KvCacheView>(m, "KvCacheView")
      .def(py::init([](Address data, int dtype, const KvLayout& layout) {
             return KvCacheView{pointer<void>(data), DType(dtype), layout};
           }),
           py::arg("data"), py::arg("dtype"), py::arg("sizes"));
  m.def(
      "write_kv",
      [](const Rows& k, const Rows& v, Address slots, const LayerCache& to) {
        write_kv({.k = k.data,
                  .v = v.data,
                  .k_stride = k.stride,
                  .v_stride = v.stride,
                  .slots = pointer<int64_t>(slots),
                  .num_tokens = k.count,
                  .kv_cache = to.cache.data,
                  .kv_dtype = to.cache.dtype,
                  .layout = to.cache.layout,
                  .layer = to.layer,
                  .key_factor = static_cast<float>(1 / to.key_scale),
                  .value_factor = static_cast<float>(1 / to.value_scale)});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("k"), py::arg("v"), py::arg("slots"), py::arg("to"));
  m.def(
      "copy_blocks",
      [](const Blocks& source, const Blocks& destination, size_t block_bytes, Address pairs,
         int64_t num_pairs) {
        copy_blocks({source.data, destination.data, source.count, destination.count, block_bytes,
                     pointer<int32_t>(pairs), num_pairs});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("source"), py::arg("destination"),
      py::arg("block_bytes"), py::arg("pairs"), py::arg("num_pairs"));
}

std::unique_ptr<AttentionPlan> make_plan(const AttentionBatch& batch, const HeadCounts& heads,
                                         const Mask& mask, int block_size, int num_blocks, bool bfloat16) {
  const AttentionShape shape{heads.num_q_heads, heads.num_kv_heads, heads.head_dim, block_size,
                             num_blocks,        mask.causal,        mask.window,    bfloat16};
  // Not a call_guard: pybind11 enters the new object in a table of its own, and needs the GIL for it.
  // A small plan is made sooner than others would give the GIL back.
  std::optional<py::gil_scoped_release> unlocked;
  if (batch.num_sequences > kSmallPlan) unlocked.emplace();
  return std::make_unique<AttentionPlan>(batch, shape);
}

}  // namespace

void bind_attention(py::module_& m) {
  bind_kv(m);
  py::class_<AttentionPlan>(m, "AttentionPlan")
      .def(py::init(&make_plan), py::arg("batch"), py::arg("heads"), py::arg("mask"), py::arg("block_size"),
           py::arg("num_blocks"), py::arg("bfloat16"))
      .def_property_readonly("num_tokens", &AttentionPlan::num_tokens)
      .def_property_readonly("num_items", [](const AttentionPlan& plan) { return plan.items().size(); });
  m.def(
      "paged_attention",
      [](const Rows& q, Address out, const LayerCache& of, const AttentionPlan& plan,
         const ScoreRule& scores) {
        paged_attention({.q = q.data,
                         .q_stride = q.stride,
                         .out = pointer<float>(out),
                         .kv_cache = of.cache.data,
                         .kv_dtype = of.cache.dtype,
                         .layout = of.cache.layout,
                         .layer = of.layer,
                         .scale = static_cast<float>(scores.scale * of.key_scale),
                         .soft_cap = scores.soft_cap,
                         .bias = scores.bias,
                         .bias_reach = scores.bias_reach,
                         .value_scale = static_cast<float>(of.value_scale),
                         .sinks = scores.sinks},
                        plan);
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("q"), py::arg("out"), py::arg("of"), py::arg("plan"),
      py::arg("scores"));
}

}  // namespace bequest
