// Products of experts: the choice of the kernel, rows one by one, and the sum of a token's products.
#include "device/current_device.cuh"
#include "device/launch.cuh"
#include "device/reductions.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/activation.cuh"
#include "ops/cuda/expert_linear.cuh"

namespace bequest::cuda {
namespace {

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / kWarp;
constexpr int kSumThreads = 128;

// x · row of W, in every lane.
template <class T>
__device__ __forceinline__ float dot(const T* x, const T* row, int64_t depth) {
  float sum = 0;
  for (int64_t i = threadIdx.x % kWarp; i < depth; i += kWarp) sum = fmaf(widen(x[i]), widen(row[i]), sum);
  return warp_sum(sum);
}

// A warp has an output of a pair. For comparisons and odd sizes, not for speed.
template <class T>
__global__ void expert_row_kernel(const __grid_constant__ ExpertProduct p) {
  let_next_start();
  wait_for_previous();
  const int64_t pair = blockIdx.x, outputs = p.outputs(), depth = p.matrices.in_features;
  const int64_t output = int64_t{blockIdx.y} * kRowWarps + threadIdx.x / kWarp;
  if (output >= outputs) return;
  const int64_t first = p.choice.ids[pair] * p.matrices.out_features;  // row of W of all experts
  const T* x = static_cast<const T*>(p.x) + (p.shares_rows ? pair / p.choice.sizes.num_chosen : pair) * depth;
  const auto product = [&](int64_t row) {
    const float sum = dot(x, static_cast<const T*>(p.matrices.weight) + row * depth, depth);
    return rounded<T>(p.matrices.bias == nullptr ? sum : sum + p.matrices.bias[row]);
  };
  float value = product(first + output);
  if (p.gated) value = gate(p.activation, value, product(first + outputs + output));
  if (threadIdx.x % kWarp == 0) static_cast<T*>(p.out)[pair * outputs + output] = narrow<T>(value);
}

// A token's products times what they count, by rank. A thread has W columns.
template <class T, int W>
__global__ __launch_bounds__(kSumThreads) void expert_sum_kernel(const T* products, const float* weights,
                                                                 T* out, int num_chosen, int64_t columns) {
  let_next_start();
  const int64_t token = blockIdx.x, column = (int64_t{blockIdx.y} * kSumThreads + threadIdx.x) * W;
  wait_for_previous();
  if (column >= columns) return;
  products += token * num_chosen * columns + column;
  float sum[W] = {};
#pragma unroll 8
  for (int k = 0; k < num_chosen; ++k) {
    float x[W];
    load_vector<T, W>(products + k * columns, x);
    const float weight = weights[token * num_chosen + k];
#pragma unroll
    for (int i = 0; i < W; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
  }
  store_vector<T, W>(out + token * columns + column, sum);
}

template <class T, int W>
void launch_sum(const ExpertSumParams& p, Stream stream) {
  const ExpertSizes& sizes = p.choice.sizes;
  const int64_t columns = p.columns;
  const LaunchShape shape{.grid = {static_cast<unsigned>(sizes.num_tokens),
                                   static_cast<unsigned>(ceil_div(columns, kSumThreads * W))},
                          .block = kSumThreads,
                          .overlaps_previous = true};
  launch(expert_sum_kernel<T, W>, shape, stream, static_cast<const T*>(p.products), p.choice.weights,
         static_cast<T*>(p.out), static_cast<int>(sizes.num_chosen), columns);
}

void check_product(const ExpertProduct& p) {
  const ExpertMatrices& w = p.matrices;
  const ExpertSizes& sizes = p.choice.sizes;
  check(sizes.num_tokens >= 0 && sizes.num_experts >= 1 && sizes.num_experts <= kMostExperts &&
            sizes.num_chosen >= 1 && sizes.num_chosen <= kMostChosen,
        "expert products: sizes of the choice");
  check(w.out_features >= 1 && w.in_features >= 1 && w.in_features <= INT32_MAX / 2 &&
            sizes.num_experts * w.out_features <= INT32_MAX,
        "expert products: sizes of the matrices");
  check(!p.gated || w.out_features % 2 == 0, "expert products: gate without up");
}

void multiply(const ExpertProduct& p, Stream stream) {
  check_product(p);
  if (p.choice.sizes.num_tokens == 0) return;
  const bool has_tiles =
      p.matrices.dtype == DType::kBF16 && has_expert_tiles(p.outputs(), p.matrices.in_features);
  has_tiles ? multiply_tiles(p, stream) : multiply_rows(p, stream);
}

}  // namespace

bool has_expert_tiles(int64_t outputs, int64_t in_features) {
  return in_features % 8 == 0 && outputs % 8 == 0 && is_hopper();
}

void multiply_rows(const ExpertProduct& p, Stream stream) {
  const LaunchShape shape{.grid = {static_cast<unsigned>(p.choice.sizes.num_pairs()),
                                   static_cast<unsigned>(ceil_div(p.outputs(), kRowWarps))},
                          .block = kRowThreads,
                          .overlaps_previous = true};
  dispatch(p.matrices.dtype, [&]<class T>() { launch(expert_row_kernel<T>, shape, stream, p); });
}

void expert_gated(const ExpertGatedParams& p, Stream stream) {
  multiply({.x = p.x,
            .matrices = p.matrices,
            .choice = p.choice,
            .gated = true,
            .shares_rows = true,
            .activation = p.activation,
            .out = p.out},
           stream);
}

void expert_products(const ExpertProductsParams& p, Stream stream) {
  multiply({.x = p.x,
            .matrices = p.matrices,
            .choice = p.choice,
            .gated = false,
            .shares_rows = p.shares_rows,
            .activation = Activation::kSilu,
            .out = p.out},
           stream);
}

void sum_expert_products(const ExpertSumParams& p, Stream stream) {
  if (p.choice.sizes.num_tokens == 0) return;
  dispatch(p.dtype, [&]<class T>() {
    constexpr int kWide = kVectorWidth<T>;
    if (p.columns % kWide == 0 && is_aligned(p.products, 16) && is_aligned(p.out, 16))
      return launch_sum<T, kWide>(p, stream);
    launch_sum<T, 1>(p, stream);
  });
}

void expert_summed(const ExpertSummedParams& p, Stream stream) {
  expert_products(
      {.x = p.x, .matrices = p.matrices, .choice = p.choice, .shares_rows = false, .out = p.products},
      stream);
  sum_expert_products({.products = p.products,
                       .columns = p.matrices.out_features,
                       .dtype = p.matrices.dtype,
                       .choice = p.choice,
                       .out = p.out},
                      stream);
}

}  // namespace bequest::cuda
