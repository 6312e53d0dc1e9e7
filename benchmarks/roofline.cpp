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

// A value unknown to the compiler, which would fold chains that start alike into one; in a register.
void hide(Vec& v) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(v));
#else
  asm volatile("" : "+w"(v));
#endif
}

// The pack makes every index a constant, so that the chains live in registers. Each sum is what its
// multiply-add adds to: the instruction of aarch64 knows no other place for its result.
template <size_t... I>
void spin_chains(long iterations, std::index_sequence<I...>) {
  Vec x = Vec{} + 1.0f, y = Vec{} + 0.5f;
  hide(x), hide(y);
  Vec acc[kChains] = {};
  (hide(acc[I]), ...);
  for (long i = 0; i < iterations; ++i) {
    hide(x);  // else x * y would be computed once
    ((acc[I] = x * y + acc[I]), ...);
  }
  (hide(acc[I]), ...);
}

constexpr size_t kLine = 64 / sizeof(float);

// A line of each stream at a time.
template <size_t... I>
void read_streams(const float* data, size_t stream, std::index_sequence<I...>) {
  Vec sum[sizeof...(I)][kLine / kLanes] = {};
  for (size_t i = 0; i < stream; i += kLine)
    for (size_t v = 0; v < kLine / kLanes; ++v)
      ((sum[I][v] += *reinterpret_cast<const Vec*>(data + I * stream + i + v * kLanes)), ...);
  for (size_t v = 0; v < kLine / kLanes; ++v) (hide(sum[I][v]), ...);
}

template <size_t Streams>
double timed_read(const float* data, size_t bytes, int threads) {
  const size_t stream = bytes / sizeof(float) / threads / Streams / kLine * kLine;
  const double elapsed = timed_on(threads, [=](int thread) {
    read_streams(data + thread * stream * Streams, stream, std::make_index_sequence<Streams>());
  });
  return stream * Streams * sizeof(float) * threads / elapsed * 1e-9;
}

}  // namespace

// GFLOP/s of independent fused multiply-adds on registers.
extern "C" double peak_gflops(int threads, long iterations) {
  const double elapsed =
      timed_on(threads, [=](int) { spin_chains(iterations, std::make_index_sequence<kChains>()); });
  return 2.0 * kLanes * kChains * iterations * threads / elapsed * 1e-9;
}

// GB/s of reading `bytes` of memory once, each thread its own part, in `streams`: 1, 4 or 8. Which number a
// chip's prefetchers like best is the chip's matter.
extern "C" double read_gbps(const float* data, size_t bytes, int threads, int streams) {
  if (streams == 1) return timed_read<1>(data, bytes, threads);
  return streams == 4 ? timed_read<4>(data, bytes, threads) : timed_read<8>(data, bytes, threads);
}
