#include <optional>

#include "bindings/cuda_tensors.h"
#include "cache/cuda/kv_copy.h"
#include "ops/cuda/activation.h"
#include "ops/cuda/coded_linear.h"
#include "ops/cuda/coded_rows.h"
#include "ops/cuda/fine_rows.h"
#include "ops/cuda/float8_rows.h"
#include "ops/cuda/gather.h"
#include "ops/cuda/logprobs.h"
#include "ops/cuda/norm.h"
#include "ops/cuda/product_choice.h"
#include "ops/cuda/sampling.h"
#include "ops/cuda/skinny_linear.h"
#include "ops/cuda/tile_linear.h"

namespace py = pybind11;

// Launches are too short to be worth releasing the GIL.

namespace bequest {
namespace {

using Tap = std::optional<HiddenTap>;
// In front of a product, and behind it.
using Norms = std::pair<std::optional<WeighedNorm>, std::optional<cuda::NormAhead>>;

// Of contiguous rows; the caller says where the result goes.
cuda::RmsNormParams norm_params(const Matrix& x, const RmsWeight& norm, Address residual, const Tap& tap) {
  return {.x = x.data,
          .residual = pointer<void>(residual),
          .weight = norm.weight,
          .offset = norm.offset,
          .out = nullptr,
          .dtype = x.dtype,
          .num_tokens = x.rows,
          .hidden = x.columns,
          .stride = x.columns,
          .eps = norm.eps,
          .tap = tap.value_or(HiddenTap{})};
}

void bind_norms(py::module_& m) {
  m.def(
      "cuda_rms_norm",
      [](const Matrix& x, const RmsWeight& norm, Address residual, Address out, const Tap& tap,
         Address stream) {
        cuda::RmsNormParams params = norm_params(x, norm, residual, tap);
        params.out = pointer<void>(out);
        cuda::rms_norm(params, stream_of(stream));
      },
      py::arg("x"), py::arg("norm"), py::arg("residual"), py::arg("out"), py::arg("tap"), py::arg("stream"));
  // `codes`: codes and scales
  m.def(
      "cuda_rms_norm_float8",
      [](const Matrix& x, const RmsWeight& norm, Address residual, const std::pair<Address, Address>& codes,
         const Tap& tap, Address stream) {
        cuda::RmsNormParams params = norm_params(x, norm, residual, tap);
        params.codes = {pointer<void>(codes.first), pointer<float>(codes.second)};
        cuda::rms_norm(params, stream_of(stream));
      },
      py::arg("x"), py::arg("norm"), py::arg("residual"), py::arg("codes"), py::arg("tap"),
      py::arg("stream"));
  m.def(
      "cuda_norm_in_place",
      [](const Matrix& x, int64_t stride, const RmsWeight& norm, Address stream) {
        cuda::RmsNormParams params = norm_params(x, norm, 0, {});
        params.out = x.data;
        params.stride = stride;
        cuda::rms_norm(params, stream_of(stream));
      },
      py::arg("x"), py::arg("stride"), py::arg("norm"), py::arg("stream"));
  m.def(
      "cuda_tap_rows",
      [](const Matrix& x, const HiddenTap& tap, Address stream) {
        cuda::tap_rows({x.data, x.dtype, x.rows, x.columns, tap}, stream_of(stream));
      },
      py::arg("x"), py::arg("tap"), py::arg("stream"));
  m.def(
      "cuda_layer_norm",
      [](const Matrix& x, const Norm& norm, Address residual, Address out, const Tap& tap, Address stream) {
        cuda::layer_norm({.x = x.data,
                          .residual = pointer<void>(residual),
                          .weight = norm.weight,
                          .bias = norm.bias,
                          .out = pointer<void>(out),
                          .dtype = x.dtype,
                          .num_tokens = x.rows,
                          .hidden = x.columns,
                          .eps = norm.eps,
                          .tap = tap.value_or(HiddenTap{})},
                         stream_of(stream));
      },
      py::arg("x"), py::arg("norm"), py::arg("residual"), py::arg("out"), py::arg("tap"), py::arg("stream"));
}

void prepare_qkv(const Heads& q, const Heads& k, const std::optional<Heads>& v, int dtype,
                 const Preparation& steps, Address stream) {
  cuda::QkvParams params = qkv_params(steps, DType(dtype));
  params.q = q.data;
  params.k = k.data;
  params.v = v ? v->data : nullptr;
  params.q_stride = q.stride;
  params.k_stride = k.stride;
  params.v_stride = v ? v->stride : 0;
  params.num_tokens = q.num_tokens;
  params.q_heads = q.num_heads;
  params.k_heads = k.num_heads;
  params.head_dim = q.head_dim;
  cuda::prepare_qkv(params, stream_of(stream));
}

void bind_values(py::module_& m) {
  m.def("cuda_prepare_qkv", &prepare_qkv, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("dtype"),
        py::arg("steps"), py::arg("stream"));
  m.def(
      "cuda_embedding",
      [](const TokenIds& ids, const Matrix& weight, Address out, Address stream) {
        cuda::embedding({.ids = ids.ids,
                         .last_tokens = ids.last_tokens,
                         .num_rows = ids.num_rows,
                         .weight = weight.data,
                         .out = pointer<void>(out),
                         .dtype = weight.dtype,
                         .num_tokens = ids.num_tokens,
                         .vocab_size = weight.rows,
                         .hidden = weight.columns},
                        stream_of(stream));
      },
      py::arg("ids"), py::arg("weight"), py::arg("out"), py::arg("stream"));
  m.def(
      "cuda_gated_activation",
      [](const Matrix& gate_up, Address out, const std::pair<Address, Address>& codes, int activation,
         Address stream) {
        const cuda::Float8Rows to{pointer<void>(codes.first), pointer<float>(codes.second)};
        cuda::gated_activation({gate_up.data, pointer<void>(out), gate_up.dtype, gate_up.rows,
                                gate_up.columns / 2, Activation(activation), to},
                               stream_of(stream));
      },
      py::arg("gate_up"), py::arg("out"), py::arg("codes"), py::arg("activation"), py::arg("stream"));
  m.def(
      "cuda_activate",
      [](Address x, int dtype, int64_t count, int activation, Address stream) {
        cuda::activate({pointer<void>(x), DType(dtype), count, Activation(activation)}, stream_of(stream));
      },
      py::arg("x"), py::arg("dtype"), py::arg("count"), py::arg("activation"), py::arg("stream"));
}

// `finish`: the code of a SkinnyResult and that of its activation.
cuda::SkinnyLinearParams skinny_params(const Matrix& x, const cuda::ChainProduct& product, Address out,
                                       const std::pair<int, int>& finish,
                                       const std::optional<TappedNorm>& norm) {
  const TappedNorm normed = norm.value_or(TappedNorm{});
  return {.x = x.data,
          .weight = product.weight,
          .bias = product.bias,
          .out = pointer<void>(out),
          .num_tokens = static_cast<int>(x.rows),
          .out_features = product.out_features,
          .in_features = product.in_features,
          .result = cuda::SkinnyResult(finish.first),
          .activation = Activation(finish.second),
          .norm_weight = normed.weight,
          .eps = normed.eps,
          .tap = normed.tap.value_or(HiddenTap{}),
          .scales = product.scales,
          .groups = product.groups};
}

void skinny_linear(const Matrix& x, const cuda::ChainProduct& product, Address out,
                   const std::pair<int, int>& finish, const std::optional<TappedNorm>& norm, Address stream) {
  cuda::skinny_linear(skinny_params(x, product, out, finish, norm), stream_of(stream));
}

// In tiles, divided as is best.
void tile_linear(const cuda::SkinnyLinearParams& p, Address stream) {
  const auto format = cuda::tile_format(p);
  cuda::tile_linear(p, cuda::tile_plan(p.num_tokens, p.out_features, p.in_features, format),
                    stream_of(stream));
}

void bind_tiles(py::module_& m) {
  m.def(
      "cuda_tile_linear",
      [](const Matrix& x, const cuda::ChainProduct& product, Address out, const std::pair<int, int>& finish,
         const Norms& norms, Address stream) {
        cuda::SkinnyLinearParams params = skinny_params(x, product, out, finish, std::nullopt);
        params.ahead = norms.second.value_or(cuda::NormAhead{});
        if (const auto& norm = norms.first) {
          params.squares = norm->squares, params.eps = norm->eps;
          params.tapped = norm->tapped, params.tap = norm->tap.value_or(HiddenTap{});
        }
        tile_linear(params, stream);
      },
      py::arg("x"), py::arg("product"), py::arg("out"), py::arg("finish"), py::arg("norms"),
      py::arg("stream"));
  m.def(
      "cuda_float8_tile_linear",
      [](const Matrix& x, Address x_scales, const cuda::ChainProduct& product, Address out,
         const std::pair<int, int>& finish, Address stream) {
        cuda::SkinnyLinearParams params = skinny_params(x, product, out, finish, std::nullopt);
        params.x_scales = pointer<const float>(x_scales);
        tile_linear(params, stream);
      },
      py::arg("x"), py::arg("x_scales"), py::arg("product"), py::arg("out"), py::arg("finish"),
      py::arg("stream"));
  // For sweeps. `x_scales`: of x in e4m3, else 0; `plan`: rows of W and parts of k
  m.def(
      "cuda_planned_tile_linear",
      [](const Matrix& x, Address x_scales, const cuda::ChainProduct& product, Address out,
         const std::pair<int, int>& plan, Address stream) {
        cuda::SkinnyLinearParams params = skinny_params(x, product, out, {0, 0}, std::nullopt);
        params.x_scales = pointer<const float>(x_scales);
        cuda::tile_linear(params, {plan.first, plan.second}, stream_of(stream));
      },
      py::arg("x"), py::arg("x_scales"), py::arg("product"), py::arg("out"), py::arg("plan"),
      py::arg("stream"));
  m.def(
      "cuda_tile_plan",
      [](int64_t num_tokens, int64_t out_features, int64_t in_features, int format) {
        const auto plan = cuda::tile_plan(num_tokens, out_features, in_features, cuda::TileFormat(format));
        return std::pair(plan.rows, plan.splits);
      },
      py::arg("num_tokens"), py::arg("out_features"), py::arg("in_features"), py::arg("format"));
  m.def(
      "cuda_is_tile_product",
      [](int64_t num_tokens, int64_t out_features, int64_t in_features, int format) {
        return cuda::is_tile_product(num_tokens, out_features, in_features, cuda::TileFormat(format));
      },
      py::arg("num_tokens"), py::arg("out_features"), py::arg("in_features"), py::arg("format"));
}

void skinny_chain(const Matrix& attended, Address residual, const ChainTail& tail,
                  const std::optional<ChainHead>& next, Address scratch, Address stream) {
  const ChainHead head = next.value_or(ChainHead{});
  cuda::skinny_chain({.num_tokens = static_cast<int>(attended.rows),
                      .attended = attended.data,
                      .residual = pointer<void>(residual),
                      .output = tail.output,
                      .mlp_norm = tail.norm,
                      .experts = tail.experts.value_or(cuda::ChainExperts{}),
                      .gate_up = tail.gate_up,
                      .activation = tail.activation,
                      .down = tail.down,
                      .next = {{head.norm.weight, head.norm.eps, head.offset},
                               head.qkv,
                               head.out,
                               head.norm.tap.value_or(HiddenTap{}),
                               head.gate_up.value_or(cuda::ChainProduct{})},
                      .scratch = pointer<void>(scratch),
                      .deltas = tail.deltas.value_or(ChainDeltas{}).params()},
                     stream_of(stream));
}

// `finish`: as that of skinny_linear.
void chained_linear(const Matrix& x, const cuda::ChainProduct& product, Address out,
                    const std::pair<int, int>& finish, Address scratch, Address stream) {
  cuda::chained_linear({.num_tokens = static_cast<int>(x.rows),
                        .x = x.data,
                        .product = product,
                        .result = cuda::SkinnyResult(finish.first),
                        .activation = Activation(finish.second),
                        .out = pointer<void>(out),
                        .scratch = pointer<void>(scratch)},
                       stream_of(stream));
}

// A weight in codes of 4 bits; `pitch`: words of a row of its groups.
void coded_linear(const Matrix& x, const cuda::ChainProduct& product, int64_t pitch, Address parts,
                  Address out, Address stream) {
  cuda::coded_linear({.x = x.data,
                      .codes = product.weight,
                      .scales = product.groups,
                      .pitch = pitch,
                      .bias = product.bias,
                      .out = pointer<void>(out),
                      .parts = pointer<float>(parts),
                      .num_tokens = static_cast<int>(x.rows),
                      .out_features = product.out_features,
                      .in_features = product.in_features},
                     stream_of(stream));
}

void coded_rows(const cuda::ChainProduct& product, int64_t pitch, Address out, Address stream) {
  cuda::coded_rows({.codes = product.weight,
                    .groups = product.groups,
                    .pitch = pitch,
                    .out = pointer<void>(out),
                    .num_rows = product.out_features,
                    .width = product.in_features},
                   stream_of(stream));
}

void bind_products(py::module_& m) {
  m.def(
      "cuda_float8_rows",
      [](const Matrix& x, Address codes, Address scales, Address stream) {
        cuda::float8_rows({x.data, {pointer<void>(codes), pointer<float>(scales)}, x.rows, x.columns},
                          stream_of(stream));
      },
      py::arg("x"), py::arg("codes"), py::arg("scales"), py::arg("stream"));
  m.def("cuda_skinny_linear", &skinny_linear, py::arg("x"), py::arg("product"), py::arg("out"),
        py::arg("finish"), py::arg("norm"), py::arg("stream"));
  m.def("cuda_is_skinny_product", &cuda::is_skinny_product, py::arg("num_tokens"), py::arg("out_features"),
        py::arg("in_features"));
  m.def("cuda_is_fused_product", &cuda::is_fused_product, py::arg("num_tokens"), py::arg("out_features"),
        py::arg("in_features"), py::arg("normed"));
  m.def("cuda_skinny_chain", &skinny_chain, py::arg("attended"), py::arg("residual"), py::arg("tail"),
        py::arg("head"), py::arg("scratch"), py::arg("stream"));
  m.def("cuda_can_chain", &cuda::can_chain, py::arg("attended"), py::arg("hidden"), py::arg("inner"),
        py::arg("bits"), py::arg("fine") = false);
  m.def("cuda_can_chain_experts", &cuda::can_chain_experts, py::arg("attended"), py::arg("hidden"),
        py::arg("inner"), py::arg("num_experts"), py::arg("num_chosen"), py::arg("has_shared"));
  m.def("cuda_can_chain_deltas", &cuda::can_chain_deltas, py::arg("attended"), py::arg("hidden"),
        py::arg("inner"), py::arg("most_rank"));
  m.def("cuda_can_chain_linear", &cuda::can_chain_linear, py::arg("in_features"), py::arg("bits"),
        py::arg("fine") = false);
  m.def("cuda_chained_linear", &chained_linear, py::arg("x"), py::arg("product"), py::arg("out"),
        py::arg("finish"), py::arg("scratch"), py::arg("stream"));
  m.def("cuda_can_multiply_codes", &cuda::can_multiply_codes, py::arg("out_features"),
        py::arg("in_features"));
  m.def("cuda_coded_splits", &cuda::coded_splits, py::arg("out_features"), py::arg("in_features"));
  m.def("cuda_coded_linear", &coded_linear, py::arg("x"), py::arg("product"), py::arg("pitch"),
        py::arg("parts"), py::arg("out"), py::arg("stream"));
  m.def("cuda_coded_rows", &coded_rows, py::arg("product"), py::arg("pitch"), py::arg("out"),
        py::arg("stream"));
  m.attr("cuda_chain_scratch_bytes") = cuda::kChainScratchBytes;
}

// Weights in codes with fine scales.
void bind_fine_products(py::module_& m) {
  m.def("cuda_fine_splits", &cuda::fine_splits, py::arg("out_features"), py::arg("in_features"));
  m.def(
      "cuda_fine_linear",
      [](const FineRows& rows, const cuda::FineMatrices& matrices, Address bias, Address stream) {
        cuda::fine_linear(rows.with(matrices, bias), stream_of(stream));
      },
      py::arg("rows"), py::arg("matrices"), py::arg("bias"), py::arg("stream"));
  m.def(
      "cuda_fine_rows",
      [](const cuda::FineMatrices& matrices, Address out, Address stream) {
        cuda::fine_rows(matrices, pointer<void>(out), stream_of(stream));
      },
      py::arg("matrices"), py::arg("out"), py::arg("stream"));
}

void bind_blocks(py::module_& m) {
  m.def(
      "cuda_copy_blocks",
      [](const Blocks& cache, size_t block_bytes, Address pairs, int64_t num_pairs, Address stream) {
        cuda::copy_blocks({cache.data, cache.count, block_bytes, pointer<int32_t>(pairs), num_pairs},
                          stream_of(stream));
      },
      py::arg("cache"), py::arg("block_bytes"), py::arg("pairs"), py::arg("num_pairs"), py::arg("stream"));
  m.def(
      "cuda_copy_bytes",
      [](Address destination, Address source, size_t num_bytes, Address stream) {
        cuda::copy_bytes(pointer<void>(destination), pointer<void>(source), num_bytes, stream_of(stream));
      },
      py::arg("destination"), py::arg("source"), py::arg("num_bytes"), py::arg("stream"));
  m.def(
      "cuda_swap_blocks",
      [](const Blocks& source, const Blocks& destination, size_t block_bytes, Address pairs,
         int64_t num_pairs, Address stream) {
        cuda::swap_blocks({source.data, destination.data, source.count, destination.count, block_bytes,
                           pointer<int32_t>(pairs), num_pairs},
                          stream_of(stream));
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("source"), py::arg("destination"),
      py::arg("block_bytes"), py::arg("pairs"), py::arg("num_pairs"), py::arg("stream"));
}

// The rows of a sampler in device memory.
struct SamplerRows {
  cuda::SamplerRow* rows;  // [num_rows]
  int32_t* last_tokens;    // [num_rows]
  int64_t num_rows;
};

cuda::SampleParams sample_params(const SamplerRows& rows, const Logits& logits, const SampledRows& by,
                                 const SampledTokens& out) {
  return {.logits = logits.data,
          .dtype = logits.dtype,
          .stride = logits.stride,
          .row_ids = by.rows,
          .positions = by.positions,
          .drafts = by.drafts,
          .num = logits.num,
          .vocab_size = logits.vocab_size,
          .num_rows = rows.num_rows,
          .rows = rows.rows,
          .last_tokens = rows.last_tokens,
          .masks = nullptr,
          .tokens = out.tokens,
          .bad = out.bad,
          .guesses = false,
          .told = out.told};
}

void bind_sampler(py::module_& m) {
  m.attr("cuda_sampler_row_bytes") = sizeof(cuda::SamplerRow);
  m.attr("cuda_row_update_bytes") = sizeof(cuda::RowUpdate);
  py::class_<SamplerRows>(m, "CudaSamplerRows")
      .def(py::init([](Address rows, Address last_tokens, int64_t num_rows) {
             return SamplerRows{pointer<cuda::SamplerRow>(rows), pointer<int32_t>(last_tokens), num_rows};
           }),
           py::arg("rows"), py::arg("last_tokens"), py::arg("num_rows"))
      .def(
          "update",
          [](const SamplerRows& self, Address updates, int64_t num_updates, Address payload, Address stream) {
            cuda::update_rows({pointer<cuda::RowUpdate>(updates), num_updates, pointer<int32_t>(payload),
                               self.rows, self.last_tokens},
                              stream_of(stream));
          },
          py::arg("updates"), py::arg("num_updates"), py::arg("payload"), py::arg("stream"))
      .def(
          "sample",
          [](const SamplerRows& self, const Logits& logits, const SampledRows& by, Address masks,
             const SampledTokens& out, Address stream) {
            cuda::SampleParams params = sample_params(self, logits, by, out);
            params.masks = pointer<int32_t>(masks);
            cuda::sample(params, stream_of(stream));
          },
          py::arg("logits"), py::arg("by"), py::arg("masks"), py::arg("out"), py::arg("stream"))
      .def(
          "guess",
          [](const SamplerRows& self, const Logits& logits, const SampledRows& by, Address guessed,
             const SampledTokens& out, Address stream) {
            cuda::SampleParams params = sample_params(self, logits, by, out);
            params.last_tokens = pointer<int32_t>(guessed);
            params.guesses = true;
            cuda::sample(params, stream_of(stream));
          },
          py::arg("logits"), py::arg("by"), py::arg("guessed"), py::arg("out"), py::arg("stream"));
  m.def(
      "cuda_logprobs",
      [](const Logits& logits, Address chosen, int64_t top, const LogprobOutput& out, Address stream) {
        cuda::logprobs({.logits = logits.data,
                        .dtype = logits.dtype,
                        .stride = logits.stride,
                        .num = logits.num,
                        .vocab_size = logits.vocab_size,
                        .chosen = pointer<int32_t>(chosen),
                        .top = top,
                        .chosen_logprob = out.chosen,
                        .rank = out.rank,
                        .top_ids = out.top_ids,
                        .top_logprob = out.top},
                       stream_of(stream));
      },
      py::arg("logits"), py::arg("chosen"), py::arg("top"), py::arg("out"), py::arg("stream"));
}

}  // namespace

void bind_cuda_ops(py::module_& m) {
  bind_norms(m);
  bind_values(m);
  bind_products(m);
  bind_tiles(m);
  bind_fine_products(m);
  bind_blocks(m);
  bind_sampler(m);
}

}  // namespace bequest
