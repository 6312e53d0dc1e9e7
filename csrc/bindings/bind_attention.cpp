#include <optional>
#include <vector>

#include "attention/cpu/attention.h"
#include "bindings/bindings.h"
#include "cache/cpu/kv_copy.h"
#include "cache/cpu/kv_write.h"

namespace py = pybind11;

namespace bequest {
namespace {

// (NB, L, NKV, BS, D), the sizes of a cache tensor [NB, L, 2, NKV, BS, D]
using KvSizes = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;

constexpr int64_t kSmallPlan = 64;  // sequences

KvLayout layout_of(const KvSizes& s) {
  return {std::get<0>(s), std::get<1>(s), std::get<2>(s), std::get<3>(s), std::get<4>(s)};
}

void bind_kv(py::module_& m) {
  m.def(
      "write_kv",
      [](Address k, int64_t k_stride, Address v, int64_t v_stride, Address slots, int64_t num_tokens,
         Address kv_cache, int kv_dtype, const KvSizes& kv_sizes, int64_t layer, float key_factor,
         float value_factor) {
        write_kv({pointer<float>(k), pointer<float>(v), k_stride, v_stride, pointer<int64_t>(slots),
                  num_tokens, pointer<void>(kv_cache), static_cast<DType>(kv_dtype), layout_of(kv_sizes),
                  layer, key_factor, value_factor});
      },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "copy_blocks",
      [](Address source, int64_t source_blocks, Address destination, int64_t destination_blocks,
         size_t block_bytes, Address pairs, int64_t num_pairs) {
        copy_blocks({pointer<void>(source), pointer<void>(destination), source_blocks, destination_blocks,
                     block_bytes, pointer<int32_t>(pairs), num_pairs});
      },
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_attention(py::module_& m) {
  bind_kv(m);
  py::class_<AttentionPlan>(m, "AttentionPlan")
      .def(py::init([](Address query_start, Address seq_lens, Address block_tables, int64_t num_sequences,
                       int64_t max_blocks, int num_q_heads, int num_kv_heads, int head_dim, int block_size,
                       int num_blocks, bool causal, int window, bool bfloat16) {
        // Not a call_guard: pybind11 enters the new object in a table of its own, and needs the GIL for it.
        // A small plan is made sooner than others would give the GIL back.
        std::optional<py::gil_scoped_release> unlocked;
        if (num_sequences > kSmallPlan) unlocked.emplace();
        return std::make_unique<AttentionPlan>(
            AttentionBatch{pointer<int32_t>(query_start), pointer<int32_t>(seq_lens),
                           pointer<int32_t>(block_tables), num_sequences, max_blocks},
            AttentionShape{num_q_heads, num_kv_heads, head_dim, block_size, num_blocks, causal, window,
                           bfloat16});
      }))
      .def_property_readonly("num_tokens", &AttentionPlan::num_tokens)
      .def_property_readonly("num_items", [](const AttentionPlan& plan) { return plan.items().size(); });
  m.def(
      "paged_attention",
      [](Address q, int64_t q_stride, Address out, Address kv_cache, int kv_dtype, const KvSizes& kv_sizes,
         int64_t layer, float scale, float soft_cap, Address bias, int64_t bias_reach, float value_scale,
         const AttentionPlan& plan) {
        paged_attention({pointer<float>(q), q_stride, pointer<float>(out), pointer<void>(kv_cache),
                         static_cast<DType>(kv_dtype), layout_of(kv_sizes), layer, scale, soft_cap,
                         pointer<float>(bias), bias_reach, value_scale},
                        plan);
      },
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace bequest
