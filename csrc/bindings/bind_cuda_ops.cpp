#include "bindings/bindings.h"

#ifdef BEQUEST_WITH_CUDA

#include <tuple>

#include "cache/cuda/kv_copy.h"
#include "model/cuda/skinny_chain.h"
#include "ops/cuda/activation.h"
#include "ops/cuda/gather.h"
#include "ops/cuda/late_copy.h"
#include "ops/cuda/logprobs.h"
#include "ops/cuda/norm.h"
#include "ops/cuda/rope.h"
#include "ops/cuda/sampling.h"
#include "ops/cuda/skinny_linear.h"

namespace py = pybind11;

namespace bequest {
namespace {

// Launches are too short to be worth releasing the GIL.
Stream stream_of(Address stream) { return pointer<CUstream_st>(stream); }

// (weight, bias, N, K) of a product, (weight, eps) of a norm
using ProductArguments = std::tuple<Address, Address, int64_t, int64_t>;
using NormArguments = std::tuple<Address, float>;

cuda::ChainProduct product_of(const ProductArguments& s) {
  return {pointer<void>(std::get<0>(s)), pointer<void>(std::get<1>(s)), std::get<2>(s), std::get<3>(s)};
}

cuda::ChainNorm norm_of(const NormArguments& s) { return {pointer<void>(std::get<0>(s)), std::get<1>(s)}; }

// (NB, L, NKV, BS, D), the sizes of a cache tensor [NB, L, 2, NKV, BS, D]
using KvSizes = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;

KvLayout layout_of(const KvSizes& s) {
  return {std::get<0>(s), std::get<1>(s), std::get<2>(s), std::get<3>(s), std::get<4>(s)};
}

void bind_norms(py::module_& m) {
  m.def("cuda_rms_norm",
        [](Address x, Address residual, Address weight, Address out, int dtype, int64_t num_tokens,
           int64_t hidden, float eps, Address ring_rows, Address layers, Address ring, int64_t num_ring_rows,
           int32_t layer, bool store_output, Address stream) {
          const HiddenTap tap{pointer<int32_t>(ring_rows),
                              pointer<uint64_t>(layers),
                              pointer<void>(ring),
                              num_ring_rows,
                              layer,
                              store_output};
          cuda::rms_norm({pointer<void>(x), pointer<void>(residual), pointer<void>(weight),
                          pointer<void>(out), DType(dtype), num_tokens, hidden, eps, tap},
                         stream_of(stream));
        });
  m.def("cuda_layer_norm", [](Address x, Address residual, Address weight, Address bias, Address out,
                              int dtype, int64_t num_tokens, int64_t hidden, float eps, Address ring_rows,
                              Address layers, Address ring, int64_t num_ring_rows, int32_t layer,
                              bool store_output, Address stream) {
    const HiddenTap tap{pointer<int32_t>(ring_rows),
                        pointer<uint64_t>(layers),
                        pointer<void>(ring),
                        num_ring_rows,
                        layer,
                        store_output};
    cuda::layer_norm({pointer<void>(x), pointer<void>(residual), pointer<void>(weight), pointer<void>(bias),
                      pointer<void>(out), DType(dtype), num_tokens, hidden, eps, tap},
                     stream_of(stream));
  });
}

void bind_heads(py::module_& m) {
  m.def("cuda_prepare_qkv",
        [](Address q, Address k, Address v, int64_t q_stride, int64_t k_stride, int64_t v_stride,
           int64_t num_tokens, int64_t q_heads, int64_t k_heads, int64_t head_dim, Address q_weight,
           Address k_weight, float eps, Address positions, Address cos_sin, int64_t rotary_dim, Address slots,
           Address kv_cache, const KvSizes& kv_sizes, int64_t layer, int kv_dtype, float key_factor,
           float value_factor, int dtype, Address stream) {
          cuda::prepare_qkv({.q = pointer<void>(q),
                             .k = pointer<void>(k),
                             .v = pointer<void>(v),
                             .q_stride = q_stride,
                             .k_stride = k_stride,
                             .v_stride = v_stride,
                             .num_tokens = num_tokens,
                             .q_heads = q_heads,
                             .k_heads = k_heads,
                             .head_dim = head_dim,
                             .q_weight = pointer<void>(q_weight),
                             .k_weight = pointer<void>(k_weight),
                             .eps = eps,
                             .positions = pointer<int32_t>(positions),
                             .cos_sin = pointer<float>(cos_sin),
                             .rotary_dim = rotary_dim,
                             .slots = pointer<int64_t>(slots),
                             .kv_cache = pointer<void>(kv_cache),
                             .layout = layout_of(kv_sizes),
                             .layer = layer,
                             .kv_dtype = DType(kv_dtype),
                             .key_factor = key_factor,
                             .value_factor = value_factor,
                             .dtype = DType(dtype)},
                            stream_of(stream));
        });
}

void bind_values(py::module_& m) {
  m.def("cuda_embedding", [](Address ids, Address last_tokens, int64_t num_rows, Address weight, Address out,
                             int dtype, int64_t num_tokens, int64_t vocab_size, int64_t hidden,
                             Address stream) {
    cuda::embedding({pointer<int32_t>(ids), pointer<int32_t>(last_tokens), num_rows, pointer<void>(weight),
                     pointer<void>(out), DType(dtype), num_tokens, vocab_size, hidden},
                    stream_of(stream));
  });
  m.def("cuda_gated_activation", [](Address gate_up, Address out, int dtype, int64_t num_tokens,
                                    int64_t intermediate, int activation, Address stream) {
    cuda::gated_activation({pointer<void>(gate_up), pointer<void>(out), DType(dtype), num_tokens,
                            intermediate, Activation(activation)},
                           stream_of(stream));
  });
  m.def("cuda_activate", [](Address x, int dtype, int64_t count, int activation, Address stream) {
    cuda::activate({pointer<void>(x), DType(dtype), count, Activation(activation)}, stream_of(stream));
  });
}

void bind_products(py::module_& m) {
  m.def("cuda_skinny_linear", [](Address x, Address weight, Address bias, Address out, int num_tokens,
                                 int64_t out_features, int64_t in_features, int result, int activation,
                                 Address norm_weight, float eps, Address ring_rows, Address layers,
                                 Address ring, int64_t num_ring_rows, int32_t layer, bool store_output,
                                 Address stream) {
    const HiddenTap tap{pointer<int32_t>(ring_rows),
                        pointer<uint64_t>(layers),
                        pointer<void>(ring),
                        num_ring_rows,
                        layer,
                        store_output};
    cuda::skinny_linear({pointer<void>(x), pointer<void>(weight), pointer<void>(bias), pointer<void>(out),
                         num_tokens, out_features, in_features, cuda::SkinnyResult(result),
                         Activation(activation), pointer<void>(norm_weight), eps, tap},
                        stream_of(stream));
  });
  m.def("cuda_skinny_linear_norms", &cuda::skinny_linear_norms);
  m.def("cuda_skinny_chain",
        [](int num_tokens, Address attended, Address residual, const ProductArguments& output,
           const NormArguments& norm, const ProductArguments& gate_up, int activation,
           const ProductArguments& down, const NormArguments& next_norm, const ProductArguments& next_qkv,
           Address qkv, Address ring_rows, Address layers, Address ring, int64_t num_ring_rows, int32_t layer,
           bool store_output, Address scratch, Address stream) {
          cuda::skinny_chain({.num_tokens = num_tokens,
                              .attended = pointer<void>(attended),
                              .residual = pointer<void>(residual),
                              .output = product_of(output),
                              .mlp_norm = norm_of(norm),
                              .gate_up = product_of(gate_up),
                              .activation = Activation(activation),
                              .down = product_of(down),
                              .next_norm = norm_of(next_norm),
                              .next_qkv = product_of(next_qkv),
                              .qkv = pointer<void>(qkv),
                              .tap = {pointer<int32_t>(ring_rows), pointer<uint64_t>(layers),
                                      pointer<void>(ring), num_ring_rows, layer, store_output},
                              .scratch = pointer<void>(scratch)},
                             stream_of(stream));
        });
  m.def("cuda_can_chain", &cuda::can_chain);
  m.attr("CHAIN_SCRATCH_BYTES") = cuda::kChainScratchBytes;
}

void bind_blocks(py::module_& m) {
  m.def("cuda_copy_blocks", [](Address cache, int64_t num_blocks, size_t block_bytes, Address pairs,
                               int64_t num_pairs, Address stream) {
    cuda::copy_blocks({pointer<void>(cache), num_blocks, block_bytes, pointer<int32_t>(pairs), num_pairs},
                      stream_of(stream));
  });
  m.def("cuda_copy_bytes", [](Address destination, Address source, size_t num_bytes, Address stream) {
    cuda::copy_bytes(pointer<void>(destination), pointer<void>(source), num_bytes, stream_of(stream));
  });
  m.def(
      "cuda_swap_blocks",
      [](Address source, int64_t source_blocks, Address destination, int64_t destination_blocks,
         size_t block_bytes, Address pairs, int64_t num_pairs, Address stream) {
        cuda::swap_blocks({pointer<void>(source), pointer<void>(destination), source_blocks,
                           destination_blocks, block_bytes, pointer<int32_t>(pairs), num_pairs},
                          stream_of(stream));
      },
      py::call_guard<py::gil_scoped_release>());
}

void bind_late_copy(py::module_& m) {
  m.def("cuda_late_copy", [](Address flag, uint32_t value, Address source, Address destination,
                             int64_t num_bytes, Address arrived, Address stream) {
    cuda::late_copy({pointer<uint32_t>(flag), value, pointer<void>(source), pointer<void>(destination),
                     num_bytes, pointer<uint32_t>(arrived)},
                    stream_of(stream));
  });
  m.def("cuda_wait_for_flag", [](Address flag, uint32_t value, Address stream) {
    cuda::wait_for_flag(pointer<uint32_t>(flag), value, stream_of(stream));
  });
  m.def("cuda_publish", [](Address flag, uint32_t value) { cuda::publish(pointer<uint32_t>(flag), value); });
}

void bind_rows(py::module_& m) {
  m.attr("cuda_sampler_row_bytes") = sizeof(cuda::SamplerRow);
  m.attr("cuda_row_update_bytes") = sizeof(cuda::RowUpdate);
  m.def("cuda_update_rows", [](Address updates, int64_t num_updates, Address payload, Address rows,
                               Address last_tokens, Address stream) {
    cuda::update_rows({pointer<cuda::RowUpdate>(updates), num_updates, pointer<int32_t>(payload),
                       pointer<cuda::SamplerRow>(rows), pointer<int32_t>(last_tokens)},
                      stream_of(stream));
  });
  m.def("cuda_sample", [](Address logits, int dtype, int64_t stride, Address row_ids, Address positions,
                          int64_t num, int64_t vocab_size, int64_t num_rows, Address rows,
                          Address last_tokens, Address masks, Address tokens, Address bad, Address stream) {
    cuda::sample(
        {pointer<void>(logits), DType(dtype), stride, pointer<int32_t>(row_ids), pointer<int32_t>(positions),
         num, vocab_size, num_rows, pointer<cuda::SamplerRow>(rows), pointer<int32_t>(last_tokens),
         pointer<int32_t>(masks), pointer<int32_t>(tokens), pointer<bool>(bad)},
        stream_of(stream));
  });
  m.def("cuda_logprobs", [](Address logits, int dtype, int64_t stride, int64_t num, int64_t vocab_size,
                            Address chosen, int64_t top, Address chosen_logprob, Address rank,
                            Address top_ids, Address top_logprob, Address stream) {
    cuda::logprobs({pointer<void>(logits), DType(dtype), stride, num, vocab_size, pointer<int32_t>(chosen),
                    top, pointer<float>(chosen_logprob), pointer<int32_t>(rank), pointer<int32_t>(top_ids),
                    pointer<float>(top_logprob)},
                   stream_of(stream));
  });
}

}  // namespace

void bind_cuda_ops(py::module_& m) {
  bind_norms(m);
  bind_heads(m);
  bind_values(m);
  bind_products(m);
  bind_blocks(m);
  bind_late_copy(m);
  bind_rows(m);
}

}  // namespace bequest

#endif
