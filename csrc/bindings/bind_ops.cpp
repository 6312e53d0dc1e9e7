#include "bindings/bindings.h"
#include "ops/cpu/activation.h"
#include "ops/cpu/feed_forward.h"
#include "ops/cpu/gather.h"
#include "ops/cpu/linear.h"
#include "ops/cpu/norm.h"
#include "ops/cpu/quantised.h"
#include "ops/cpu/rope.h"

namespace py = pybind11;

namespace bequest {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

void bind_weights(py::module_& m) {
  m.def(
      "pack_weight",
      [](Address weight, int weight_dtype, Address packed, int format, int64_t first_row, int64_t rows,
         int64_t in_features) {
        pack_weight({pointer<const void>(weight), DType(weight_dtype), pointer<void>(packed),
                     WeightFormat(format), first_row, rows, in_features});
      },
      Unlocked());
  m.def(
      "pack_quantised",
      [](Address rows, int bits, Address packed, int64_t first_row, int64_t num_rows, int64_t in_features) {
        pack_quantised(
            {pointer<const uint8_t>(rows), bits, pointer<void>(packed), first_row, num_rows, in_features});
      },
      Unlocked());
}

void bind_products(py::module_& m) {
  m.def(
      "linear",
      [](Address x, Address weight, int format, Address bias, Address out, int64_t num_tokens,
         int64_t out_features, int64_t in_features, int64_t x_stride) {
        linear({pointer<const float>(x), pointer<const void>(weight), WeightFormat(format),
                pointer<const float>(bias), pointer<float>(out), num_tokens, out_features, in_features,
                x_stride});
      },
      Unlocked());
  m.def(
      "finished_linear",
      [](Address x, Address weight, int format, Address bias, Address out, int64_t num_tokens,
         int64_t out_features, int64_t in_features, int64_t x_stride, bool gated, int activation) {
        linear({pointer<const float>(x), pointer<const void>(weight), WeightFormat(format),
                pointer<const float>(bias), pointer<float>(out), num_tokens, out_features, in_features,
                x_stride, gated ? Finish::kGated : Finish::kActivated, Activation(activation)});
      },
      Unlocked());
  m.def(
      "feed_forward",
      [](Address x, Address up, Address up_bias, Address down, Address down_bias, Address out,
         int64_t num_tokens, int64_t in_features, int64_t inner_features, int64_t out_features,
         int activation, bool gated) {
        feed_forward({pointer<const float>(x), pointer<const void>(up), pointer<const float>(up_bias),
                      pointer<const void>(down), pointer<const float>(down_bias), pointer<float>(out),
                      num_tokens, in_features, inner_features, out_features, Activation(activation), gated});
      },
      Unlocked());
  m.def(
      "gather_rows",
      [](Address ids, Address weight, int format, Address out, int64_t num_tokens, int64_t out_features,
         int64_t in_features) {
        gather_rows({pointer<const int32_t>(ids), pointer<const void>(weight), WeightFormat(format),
                     pointer<float>(out), num_tokens, out_features, in_features});
      },
      Unlocked());
}

void bind_norms(py::module_& m) {
  m.def(
      "rms_norm",
      [](Address x, Address residual, Address weight, Address out, int64_t num_tokens, int64_t hidden,
         float eps, Address ring_rows, Address layers, Address ring, int64_t num_ring_rows, int32_t layer,
         bool store_output) {
        const HiddenTap tap{pointer<const int32_t>(ring_rows),
                            pointer<const uint64_t>(layers),
                            pointer<void>(ring),
                            num_ring_rows,
                            layer,
                            store_output};
        rms_norm({pointer<const float>(x), pointer<float>(residual), pointer<const float>(weight),
                  pointer<float>(out), num_tokens, hidden, eps, tap});
      },
      Unlocked());
  m.def(
      "layer_norm",
      [](Address x, Address residual, Address weight, Address bias, Address out, int64_t num_tokens,
         int64_t hidden, float eps, Address ring_rows, Address layers, Address ring, int64_t num_ring_rows,
         int32_t layer, bool store_output) {
        const HiddenTap tap{pointer<const int32_t>(ring_rows),
                            pointer<const uint64_t>(layers),
                            pointer<void>(ring),
                            num_ring_rows,
                            layer,
                            store_output};
        layer_norm({pointer<const float>(x), pointer<float>(residual), pointer<const float>(weight),
                    pointer<const float>(bias), pointer<float>(out), num_tokens, hidden, eps, tap});
      },
      Unlocked());
  m.def(
      "head_rms_norm",
      [](Address x, int64_t row_stride, Address weight, int64_t num_tokens, int64_t num_heads,
         int64_t head_dim, float eps) {
        head_rms_norm({pointer<float>(x), row_stride, pointer<const float>(weight), num_tokens, num_heads,
                       head_dim, eps});
      },
      Unlocked());
}

void bind_rows(py::module_& m) {
  m.def(
      "rotary",
      [](Address q, Address k, int64_t q_stride, int64_t k_stride, Address positions, Address cos_sin,
         int64_t num_tokens, int64_t num_positions, int64_t q_heads, int64_t k_heads, int64_t head_dim,
         int64_t rotary_dim) {
        rotary({pointer<float>(q), pointer<float>(k), q_stride, k_stride, pointer<const int32_t>(positions),
                pointer<const float>(cos_sin), num_tokens, num_positions, q_heads, k_heads, head_dim,
                rotary_dim});
      },
      Unlocked());
  m.def(
      "gated_activation",
      [](Address gate_up, Address out, int64_t num_tokens, int64_t intermediate, int activation) {
        gated_activation({pointer<const float>(gate_up), pointer<float>(out), num_tokens, intermediate,
                          Activation(activation)});
      },
      Unlocked());
  m.def(
      "activate",
      [](Address x, int64_t count, int activation) {
        activate(pointer<float>(x), count, Activation(activation));
      },
      Unlocked());
}

}  // namespace

void bind_ops(py::module_& m) {
  bind_weights(m);
  bind_products(m);
  bind_norms(m);
  bind_rows(m);
}

}  // namespace bequest
