#include <cstddef>
#include <optional>
#include <vector>

#include "attention/cuda/work_list.h"
#include "bindings/cuda_tensors.h"
#include "model/cuda/row_stack.h"

namespace py = pybind11;

namespace bequest {
namespace {

// What all layers of a stack have in common.
struct StackRule {
  float eps;
  float head_eps;
  Activation activation;
  float scale;
  const float* cos_sin;
};

// The step's only token, as tensors of one element, and its row of the table of blocks.
struct StackToken {
  const int32_t* position;
  const int64_t* slot;
  const int32_t* block_table;
  const int32_t* work_list;
};

struct StackTable {
  const void* data;
  int64_t num_layers;
  void* scratch;
};

}  // namespace

template <>
inline constexpr auto fields_of<cuda::RowStackShape> =
    std::tuple(&cuda::RowStackShape::hidden, &cuda::RowStackShape::inner, &cuda::RowStackShape::q_heads,
               &cuda::RowStackShape::kv_heads, &cuda::RowStackShape::head_dim);
template <>
inline constexpr auto fields_of<cuda::RowStackLayer> =
    std::tuple(&cuda::RowStackLayer::attention_norm, &cuda::RowStackLayer::qkv, &cuda::RowStackLayer::q_norm,
               &cuda::RowStackLayer::k_norm, &cuda::RowStackLayer::output, &cuda::RowStackLayer::mlp_norm,
               &cuda::RowStackLayer::gate_up, &cuda::RowStackLayer::down, &cuda::RowStackLayer::cache_layer,
               &cuda::RowStackLayer::index);
template <>
inline constexpr auto fields_of<StackRule> = std::tuple(
    &StackRule::eps, &StackRule::head_eps, &StackRule::activation, &StackRule::scale, &StackRule::cos_sin);
template <>
inline constexpr auto fields_of<StackToken> =
    std::tuple(&StackToken::position, &StackToken::slot, &StackToken::block_table, &StackToken::work_list);
template <>
inline constexpr auto fields_of<StackTable> =
    std::tuple(&StackTable::data, &StackTable::num_layers, &StackTable::scratch);

namespace {

// The residual, and where hidden states of it go on its way.
using StackRow = std::pair<Address, std::optional<HiddenTap>>;

void row_stack(const cuda::RowStackShape& shape, const StackTable& table, const StackRow& row,
               const StackRule& rule, const std::pair<KvCacheView, StackToken>& of, Address stream) {
  const auto& [cache, token] = of;
  constexpr size_t kItems = offsetof(WorkListHeader, num_decode_items) / sizeof(int32_t);
  cuda::row_stack({.shape = shape,
                   .table = table.data,
                   .num_layers = table.num_layers,
                   .residual = pointer<void>(row.first),
                   .eps = rule.eps,
                   .head_eps = rule.head_eps,
                   .activation = rule.activation,
                   .scale = rule.scale,
                   .cos_sin = rule.cos_sin,
                   .kv_cache = cache.data,
                   .layout = cache.layout,
                   .position = token.position,
                   .slot = token.slot,
                   .block_table = token.block_table,
                   .num_items = token.work_list + kItems,
                   .tap = row.second.value_or(HiddenTap{}),
                   .scratch = table.scratch},
                  stream_of(stream));
}

}  // namespace

void bind_cuda_stack(py::module_& m) {
  m.def("cuda_can_stack_row", &cuda::can_stack_row, py::arg("shape"));
  m.def("cuda_row_stack_table_bytes", &cuda::row_stack_table_bytes, py::arg("num_layers"));
  m.def(
      "cuda_write_row_stack_table",
      [](const cuda::RowStackShape& shape, const std::vector<cuda::RowStackLayer>& layers, Address table) {
        cuda::write_row_stack_table(shape, layers.data(), static_cast<int64_t>(layers.size()),
                                    pointer<void>(table));
      },
      py::arg("shape"), py::arg("layers"), py::arg("table"));
  m.def("cuda_row_stack", &row_stack, py::arg("shape"), py::arg("table"), py::arg("row"), py::arg("rule"),
        py::arg("of"), py::arg("stream"));
  m.attr("cuda_row_stack_scratch_bytes") = cuda::kRowStackScratchBytes;
}

}  // namespace bequest
