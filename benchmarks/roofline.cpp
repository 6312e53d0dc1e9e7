// What this machine can do at best, measured: the denominators of the benchmarks. Built by roofline.py with
// -march=native.
#include <chrono>
#include <cstddef>
#include <thread>
#include <utility>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kChains = 12;  // more than latency × throughput of the multiply-add on any chip we know
constexpr int kStreams = 8;

typedef float Vec __attribute__((vector_size(kLanes * 4)));

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class F>
double timed_on(int threads, F f) {
  std::vector<std::thread> others;
  const double start = seconds();
  for (int i = 1; i < threads; ++i) others.emplace_back([=] { f(i); });
  f(0);
  for (auto& thread : others) thread.join();
  return seconds() - start;
}

// The pack makes every index a constant, so that the chains live in registers.
template <size_t... I>
void spin_chains(long iterations, std::index_sequence<I...>) {
  Vec x = Vec{} + 1.0f, y = Vec{} + 0.5f;
  asm volatile("" : "+m"(x), "+m"(y));
  Vec acc[kChains] = {};
  // Unknown to the compiler: it would fold chains that start alike into one.
  asm volatile("" : "+m"(acc));
  for (long i = 0; i < iterations; ++i) ((acc[I] = x * acc[I] + y), ...);
  asm volatile("" ::"m"(acc));
}

template <size_t... I>
void read_streams(const float* data, size_t stream, std::index_sequence<I...>) {
  Vec sum[kStreams] = {};
  for (size_t i = 0; i < stream; i += kLanes)
    ((sum[I] += *reinterpret_cast<const Vec*>(data + I * stream + i)), ...);
  asm volatile("" ::"m"(sum));
}

}  // namespace

// GFLOP/s of independent fused multiply-adds on registers.
extern "C" double peak_gflops(int threads, long iterations) {
  const double elapsed =
      timed_on(threads, [=](int) { spin_chains(iterations, std::make_index_sequence<kChains>()); });
  return 2.0 * kLanes * kChains * iterations * threads / elapsed * 1e-9;
}

// GB/s of reading `bytes` of memory once, each thread its own part, in eight streams.
extern "C" double read_gbps(const float* data, size_t bytes, int threads) {
  const size_t stream = bytes / sizeof(float) / threads / kStreams / kLanes * kLanes;
  const double elapsed = timed_on(threads, [=](int thread) {
    read_streams(data + thread * stream * kStreams, stream, std::make_index_sequence<kStreams>());
  });
  return stream * kStreams * sizeof(float) * threads / elapsed * 1e-9;
}
