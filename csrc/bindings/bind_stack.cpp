#include <pybind11/stl.h>

#include <optional>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "core/check.h"
#include "model/layer_stack.h"
#include "ops/cpu/linear_amx.h"

namespace py = pybind11;

namespace bequest {
namespace {

using Norm = std::tuple<Address, Address, float>;                     // weight, bias, eps
using Product = std::tuple<Address, int, Address, int64_t, int64_t>;  // weight, format, bias, N, K
using KvSizes = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;
using Embedding = std::tuple<Address, Address, int, int64_t, Address, Address, int64_t>;  // StackEmbedding
using Tap = std::tuple<Address, Address, Address, int64_t>;  // ring rows, layers, ring, rows of it

KvLayout layout_of(const KvSizes& sizes) {
  const auto [num_blocks, num_layers, num_kv_heads, block_size, head_dim] = sizes;
  return {num_blocks, num_layers, num_kv_heads, block_size, head_dim};
}

StackNorm norm_of(const Norm& norm) {
  const auto [weight, bias, eps] = norm;
  return {pointer<const float>(weight), pointer<const float>(bias), eps};
}

StackProduct product_of(const Product& product) {
  const auto [weight, format, bias, out_features, in_features] = product;
  return {pointer<const void>(weight), WeightFormat(format), pointer<const float>(bias), out_features,
          in_features};
}

StackEmbedding embedding_of(const Embedding& embedding) {
  const auto [ids, table, format, vocab_size, positions, rows, num_positions] = embedding;
  return {pointer<const int32_t>(ids),       pointer<const void>(table), WeightFormat(format), vocab_size,
          pointer<const int32_t>(positions), pointer<const float>(rows), num_positions};
}

StackLayer layer_of(const std::vector<Norm>& norms, const std::vector<Product>& products, bool has_cross) {
  check(norms.size() == (has_cross ? 3 : 2) && products.size() == 2 * norms.size(), "layers: wrong parts");
  StackLayer layer{};
  layer.attention_norm = norm_of(norms[0]);
  layer.qkv = product_of(products[0]);
  layer.attention_output = product_of(products[1]);
  if (has_cross) {
    layer.cross_norm = norm_of(norms[1]);
    layer.cross_q = product_of(products[2]);
    layer.cross_output = product_of(products[3]);
  }
  layer.inner_norm = norm_of(norms.back());
  layer.up = product_of(products[products.size() - 2]);
  layer.down = product_of(products.back());
  return layer;
}

}  // namespace

void bind_stack(py::module_& m) {
  m.def(
      "linear_into_cache",
      [](Address x, const Product& product, Address out, int64_t num_tokens, int64_t num_out, Address slots,
         Address kv_cache, const KvSizes& sizes, int64_t layer) {
        const StackProduct of = product_of(product);
        linear_into_cache(
            {pointer<const float>(x), of.weight, of.format, of.bias, pointer<float>(out), num_tokens,
             of.out_features, of.in_features, of.in_features},
            {num_out, pointer<BFloat16>(kv_cache), layout_of(sizes), layer, pointer<const int64_t>(slots)});
      },
      py::call_guard<py::gil_scoped_release>());
  py::class_<LayerStack>(m, "LayerStack")
      .def(py::init([](int64_t hidden, int64_t num_heads, int64_t head_dim, float scale, int activation,
                       bool gated, bool has_cross) {
        return LayerStack{hidden, num_heads, head_dim, scale, Activation(activation), gated, has_cross, {}};
      }))
      .def("add",
           [](LayerStack& stack, const std::vector<Norm>& norms, const std::vector<Product>& products) {
             stack.layers.push_back(layer_of(norms, products, stack.has_cross));
           })
      .def(
          "run",
          [](const LayerStack& stack, Address added, Address sum, int64_t num_tokens, Address slots,
             Address kv_cache, int kv_dtype, const KvSizes& sizes, const AttentionPlan& attention,
             const AttentionPlan* cross, Address bias, int64_t bias_reach, const Tap& tap,
             const std::optional<Embedding>& embedding) {
            const auto [ring_rows, layers, ring, num_ring_rows] = tap;
            const StackStep step{.added = pointer<float>(added),
                                 .sum = pointer<float>(sum),
                                 .num_tokens = num_tokens,
                                 .slots = pointer<const int64_t>(slots),
                                 .kv_cache = pointer<void>(kv_cache),
                                 .kv_dtype = static_cast<DType>(kv_dtype),
                                 .layout = layout_of(sizes),
                                 .attention = &attention,
                                 .cross = cross,
                                 .bias = pointer<const float>(bias),
                                 .bias_reach = bias_reach,
                                 .tap = {pointer<const int32_t>(ring_rows), pointer<const uint64_t>(layers),
                                         pointer<void>(ring), num_ring_rows, 0, false}};
            if (embedding) embed_rows(stack, embedding_of(*embedding), step);
            run_layers(stack, step);
          },
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace bequest
