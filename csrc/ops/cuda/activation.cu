// Memory-bound: 3 I elements per token, one vector of gate and of up per thread. Where the result is rounded
// to e4m3 a thread block has a row and holds it in registers until the largest of it is known, which saves
// writing and reading it in bfloat16: 2.5 I elements instead of 4.5.
#include "device/launch.cuh"
#include "device/vectors.cuh"
#include "ops/cuda/activation.cuh"
#include "ops/cuda/activation.h"
#include "ops/cuda/float8_rows.cuh"

namespace bequest::cuda {
namespace {

constexpr int kThreads = 128;

template <class T, int W, Activation kActivation>
__global__ void gated_kernel(const T* gate_up, T* out, int64_t intermediate) {
  let_next_start();
  wait_for_previous();
  const int64_t i = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * W;
  if (i >= intermediate) return;
  const T* gate = gate_up + blockIdx.x * 2 * intermediate + i;
  float a[W];
  float b[W];
  load_vector<T, W>(gate, a);
  load_vector<T, W>(gate + intermediate, b);
#pragma unroll
  for (int j = 0; j < W; ++j) a[j] = activate<kActivation>(a[j]) * factor<kActivation>(b[j]);
  store_vector<T, W>(out + blockIdx.x * intermediate + i, a);
}

constexpr int kMostRowThreads = 512;

// N vectors of gate and of up per thread, all of them asked for before the first is used.
template <int N, Activation kActivation>
__global__ void __launch_bounds__(kMostRowThreads)
    gated_float8_kernel(const BFloat16* gate_up, const Float8Rows to, int64_t intermediate) {
  constexpr int W = kVectorWidth<BFloat16>;
  __shared__ float shared[kMostRowThreads / kWarp];
  let_next_start();
  const RowPlace<W, N, false> place(intermediate);
  const BFloat16* const gate = gate_up + place.row() * 2 * intermediate;
  wait_for_previous();
  Packed<BFloat16, W> row[N], up[N];
  place.for_each_vector([&](int n, int at) {
    row[n] = load_packed<BFloat16, W>(gate + at);
    up[n] = load_packed<BFloat16, W>(gate + intermediate + at);
  });
  place.for_each_vector([&](int n, int) {
    float a[W], b[W];
    unpack<BFloat16, W>(row[n], a);
    unpack<BFloat16, W>(up[n], b);
#pragma unroll
    for (int j = 0; j < W; ++j) a[j] = activate<kActivation>(a[j]) * factor<kActivation>(b[j]);
    row[n] = pack<BFloat16, W>(a);
  });
  store_float8(place, to, intermediate, row, shared);
}

template <class T, int W, Activation kActivation>
__global__ void plain_kernel(T* x, int64_t count) {
  let_next_start();
  wait_for_previous();
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * W;
  if (i >= count) return;
  float a[W];
  load_vector<T, W>(x + i, a);
#pragma unroll
  for (int j = 0; j < W; ++j) a[j] = activate<kActivation>(a[j]);
  store_vector<T, W>(x + i, a);
}

// f<activation>()
template <class F>
void with_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kSilu:
      return f.template operator()<Activation::kSilu>();
    case Activation::kGeluErf:
      return f.template operator()<Activation::kGeluErf>();
    case Activation::kGeluTanh:
      return f.template operator()<Activation::kGeluTanh>();
    case Activation::kRelu:
      return f.template operator()<Activation::kRelu>();
    case Activation::kClampedSwish:
      return f.template operator()<Activation::kClampedSwish>();
  }
  fail("unknown activation");
}

template <class T, int W>
void launch_width(const GatedParams& p, Stream stream) {
  with_activation(p.activation, [&]<Activation kActivation>() {
    const dim3 grid(static_cast<unsigned>(p.num_tokens),
                    static_cast<unsigned>(ceil_div(p.intermediate, kThreads * W)));
    launch(gated_kernel<T, W, kActivation>, {.grid = grid, .block = kThreads, .overlaps_previous = true},
           stream, static_cast<const T*>(p.gate_up), static_cast<T*>(p.out), p.intermediate);
  });
}

template <int N>
void launch_float8(const GatedParams& p, Stream stream) {
  with_activation(p.activation, [&]<Activation kActivation>() {
    const int64_t threads = round_up(ceil_div(p.intermediate / kVectorWidth<BFloat16>, N), kWarp);
    const LaunchShape shape{.grid = static_cast<unsigned>(p.num_tokens),
                            .block = static_cast<unsigned>(threads),
                            .overlaps_previous = true};
    launch(gated_float8_kernel<N, kActivation>, shape, stream, static_cast<const BFloat16*>(p.gate_up),
           p.codes, p.intermediate);
  });
}

void gated_codes(const GatedParams& p, Stream stream) {
  constexpr int W = kVectorWidth<BFloat16>;
  check(p.dtype == DType::kBF16 && p.intermediate % W == 0 && is_aligned(p.gate_up, 16) &&
            is_aligned(p.codes.codes, 8),
        "gated_activation: codes are of aligned rows in bfloat16");
  check(p.intermediate <= kMostGatedCodes, "gated_activation: the rows are too long");
  if (p.intermediate <= 4 * W * kMostRowThreads) return launch_float8<4>(p, stream);
  launch_float8<8>(p, stream);
}

template <class T, int W>
void launch_plain(const ActivateParams& p, Stream stream) {
  with_activation(p.activation, [&]<Activation kActivation>() {
    const auto blocks = static_cast<unsigned>(ceil_div(p.count, kThreads * W));
    launch(plain_kernel<T, W, kActivation>, {.grid = blocks, .block = kThreads, .overlaps_previous = true},
           stream, static_cast<T*>(p.x), p.count);
  });
}

}  // namespace

void gated_activation(const GatedParams& p, Stream stream) {
  check(p.num_tokens >= 0 && p.intermediate >= 1, "gated_activation: empty rows");
  if (p.codes.codes != nullptr) return gated_codes(p, stream);
  dispatch(p.dtype, [&]<class T>() {
    constexpr int kWide = kVectorWidth<T>;
    if (p.intermediate % kWide == 0 && is_aligned(p.gate_up, 16) && is_aligned(p.out, 16))
      return launch_width<T, kWide>(p, stream);
    launch_width<T, 1>(p, stream);
  });
}

void activate(const ActivateParams& p, Stream stream) {
  check(p.count >= 0, "activate: negative count");
  dispatch(p.dtype, [&]<class T>() {
    constexpr int kWide = kVectorWidth<T>;
    if (p.count % kWide == 0 && is_aligned(p.x, 16)) return launch_plain<T, kWide>(p, stream);
    launch_plain<T, 1>(p, stream);
  });
}

}  // namespace bequest::cuda
