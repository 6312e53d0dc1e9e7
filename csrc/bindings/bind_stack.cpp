#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/adapters.h"
#include "bindings/expert_structs.h"
#include "bindings/tensors.h"
#include "core/check.h"
#include "model/cpu/layer_stack.h"
#include "ops/cpu/linear_amx.h"

namespace py = pybind11;

namespace bequest {
namespace {

using KvSizes = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;
using Tap = std::tuple<Address, Address, Address, int64_t>;  // ring rows, layers, ring, rows of it

// What all tokens take beside their experts, and its gate.
using Shared = std::pair<StackFeedForward, std::optional<StackProduct>>;

// A member that is a pointer, as an address.
template <class Class, class T>
void bind_address(py::class_<Class>& bound, const char* name, T* Class::* member) {
  bound.def_property(
      name, [member](const Class& of) { return reinterpret_cast<Address>(of.*member); },
      [member](Class& of, Address address) { of.*member = pointer<T>(address); });
}

KvLayout layout_of(const KvSizes& sizes) {
  const auto [num_blocks, num_layers, num_kv_heads, block_size, head_dim] = sizes;
  return {num_blocks, num_layers, num_kv_heads, block_size, head_dim};
}

void bind_parts(py::module_& m) {
  py::class_<StackNorm>(m, "StackNorm")
      .def(py::init([](Address weight, Address bias, float eps) {
        return StackNorm{pointer<const float>(weight), pointer<const float>(bias), eps};
      }))
      .def(py::init<>());
  py::class_<StackProduct>(m, "StackProduct")
      .def(py::init([](Address weight, int format, Address bias, int64_t out_features, int64_t in_features,
                       int64_t site) {
        return StackProduct{pointer<const void>(weight),
                            WeightFormat(format),
                            pointer<const float>(bias),
                            out_features,
                            in_features,
                            site};
      }));
  py::class_<StackHeads> heads(m, "StackHeads");
  heads.def(py::init<>())
      .def_readwrite("num_heads", &StackHeads::num_heads)
      .def_readwrite("scale", &StackHeads::scale)
      .def_readwrite("cache_layer", &StackHeads::cache_layer)
      .def_readwrite("strip", &StackHeads::strip)
      .def_readwrite("norms_rows", &StackHeads::norms_rows)
      .def_readwrite("norm_eps", &StackHeads::norm_eps)
      .def_readwrite("num_positions", &StackHeads::num_positions)
      .def_readwrite("rotary_dim", &StackHeads::rotary_dim)
      .def_readwrite("bias_reach", &StackHeads::bias_reach)
      .def_readwrite("soft_cap", &StackHeads::soft_cap)
      .def_readwrite("value_scale", &StackHeads::value_scale)
      .def_readwrite("key_factor", &StackHeads::key_factor)
      .def_readwrite("value_factor", &StackHeads::value_factor);
  bind_address(heads, "q_norm", &StackHeads::q_norm);
  bind_address(heads, "k_norm", &StackHeads::k_norm);
  bind_address(heads, "cos_sin", &StackHeads::cos_sin);
  bind_address(heads, "query_scales", &StackHeads::query_scales);
  bind_address(heads, "bias", &StackHeads::bias);
  bind_address(heads, "sinks", &StackHeads::sinks);
}

void bind_mixers(py::module_& m) {
  py::class_<StackAttention>(m, "StackAttention")
      .def(py::init([](const StackProduct& qkv, const StackHeads& heads, const StackProduct& output) {
        return StackAttention{qkv, heads, output};
      }));
  py::class_<StackCross>(m, "StackCross")
      .def(py::init([](const StackProduct& q, const StackHeads& heads, const StackProduct& output) {
        return StackCross{q, heads, output};
      }));
  py::class_<StackFeedForward>(m, "StackFeedForward")
      .def(py::init([](const StackProduct& up, int activation, const StackProduct& down, bool gated) {
        return StackFeedForward{up, Activation(activation), down, gated};
      }));
  py::class_<StackExperts>(m, "StackExperts")
      .def(py::init([](const StackProduct& router, const RoutingRule& routing, const ExpertMatrices& up,
                       int activation, const ExpertMatrices& down, const std::optional<Shared>& shared) {
        StackExperts made{router, routing, up, Activation(activation), down, {}, {}};
        if (shared) std::tie(made.shared, made.shared_gate) = *shared;
        return made;
      }));
  py::class_<StackSublayer>(m, "StackSublayer")
      .def(py::init(
          [](const StackMixer& mixer, const std::array<StackNorm, 3>& norms, float factor, bool beside) {
            return StackSublayer{mixer, norms[0], norms[1], norms[2], factor, beside};
          }));
}

void bind_step(py::module_& m) {
  py::class_<StackStep> step(m, "StackStep");
  step.def(py::init<>())
      .def_readwrite("num_tokens", &StackStep::num_tokens)
      .def("set_cache",
           [](StackStep& step, Address kv_cache, int kv_dtype, const KvSizes& sizes) {
             step.kv_cache = pointer<void>(kv_cache);
             step.kv_dtype = static_cast<DType>(kv_dtype);
             step.layout = layout_of(sizes);
           })
      .def("set_slots",
           [](StackStep& step, const std::vector<Address>& slots) {
             step.slots.clear();
             for (const Address address : slots) step.slots.push_back(pointer<const int64_t>(address));
           })
      .def(
          "set_plans",
          [](StackStep& step, std::vector<const AttentionPlan*> plans, const AttentionPlan* cross) {
            step.plans = std::move(plans);
            step.cross = cross;
          },
          py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def(
          "set_read",
          [](StackStep& step, Address rows, int64_t num_rows, const AttentionPlan& attention) {
            step.read = {pointer<const int64_t>(rows), num_rows, &attention};
          },
          py::keep_alive<1, 4>())
      .def(
          "set_adapters", [](StackStep& step, const StepAdapters& adapters) { step.adapters = &adapters; },
          py::keep_alive<1, 2>())
      .def("set_tap", [](StackStep& step, const Tap& tap) {
        const auto [ring_rows, layers, ring, num_ring_rows] = tap;
        step.tap = {pointer<const int32_t>(ring_rows),
                    pointer<const uint64_t>(layers),
                    pointer<void>(ring),
                    num_ring_rows,
                    0,
                    false};
      });
  bind_address(step, "positions", &StackStep::positions);
  py::class_<StackStream>(m, "StackStream")
      .def(py::init([](Address sum, Address added, bool pending, int64_t num_rows) {
        return StackStream{pointer<float>(sum), pointer<float>(added), pending, num_rows};
      }))
      .def_readonly("pending", &StackStream::pending)
      .def_readonly("num_rows", &StackStream::num_rows)
      .def_readonly("num_experts_read", &StackStream::num_experts_read);
  py::class_<StackEmbedding>(m, "StackEmbedding")
      .def(py::init(
          [](Address ids, const PackedMatrix& table, float factor, Address rows, int64_t num_positions) {
            return StackEmbedding{
                pointer<const int32_t>(ids), table.data,   table.format, table.out_features, factor,
                pointer<const float>(rows),  num_positions};
          }));
}

}  // namespace

void bind_stack(py::module_& m) {
  bind_adapters(m);
  bind_parts(m);
  bind_mixers(m);
  bind_step(m);
  m.def(
      "linear_into_cache",
      [](Address x, const StackProduct& product, Address out, int64_t layer, const StackStep& step) {
        const int64_t keys_and_values = 2 * step.layout.num_kv_heads * step.layout.head_dim;
        linear_into_cache(
            {pointer<const float>(x), product.weight, product.format, product.bias, pointer<float>(out),
             step.num_tokens, product.out_features, product.in_features, product.in_features},
            {product.out_features - keys_and_values, static_cast<BFloat16*>(step.kv_cache), step.layout,
             layer, step.slots.at(0)});
      },
      py::call_guard<py::gil_scoped_release>());
  py::class_<LayerStack>(m, "LayerStack")
      .def(py::init([](int64_t hidden, bool narrows) { return LayerStack{hidden, narrows, {}}; }))
      .def("add",
           [](LayerStack& stack, int32_t index, const std::vector<StackSublayer>& sublayers) {
             stack.layers.push_back({index, sublayers});
           })
      .def(
          "run",
          [](const LayerStack& stack, const StackStep& step, StackStream& stream,
             const StackEmbedding* embedding) {
            if (embedding != nullptr) embed_rows(stack, *embedding, step, stream);
            run_layers(stack, step, stream);
          },
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace bequest
