#include "ops/cpu/resize.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <thread>
#include <vector>

#include "core/isa.h"

namespace bequest {

BEQUEST_DECLARE_PER_ISA(void resize_columns(const ResizeColumns& p); void resize_rows(const ResizeRows& p))

namespace {

constexpr int kWeightBits = 22;
constexpr int64_t kTogether = 16;  // rows that a pass over columns takes
constexpr double kBicubic = -0.5;

double sinc(double x) {
  if (x == 0.0) return 1.0;
  x *= std::numbers::pi;
  return std::sin(x) / x;
}

double value_at(ResizeFilter filter, double x) {
  switch (filter) {
    case ResizeFilter::kLanczos:
      return -3.0 <= x && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0;
    case ResizeFilter::kBilinear:
      return std::max(0.0, 1.0 - std::abs(x));
    case ResizeFilter::kBicubic:
      x = std::abs(x);
      if (x < 1.0) return ((kBicubic + 2.0) * x - (kBicubic + 3.0)) * x * x + 1;
      return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * kBicubic : 0.0;
    case ResizeFilter::kBox:
      return x > -0.5 && x <= 0.5 ? 1.0 : 0.0;
    case ResizeFilter::kHamming:
      x = std::abs(x);
      if (x == 0.0) return 1.0;
      if (x >= 1.0) return 0.0;
      x *= std::numbers::pi;
      return std::sin(x) / x * (0.54f + 0.46f * std::cos(x));
  }
  fail("there is no such filter");
}

double reach_of(ResizeFilter filter) {
  switch (filter) {
    case ResizeFilter::kLanczos:
      return 3.0;
    case ResizeFilter::kBicubic:
      return 2.0;
    case ResizeFilter::kBox:
      return 0.5;
    default:
      return 1.0;
  }
}

class Taps {
 public:
  Taps(int64_t in_size, int64_t count, ResizeFilter filter) {
    const double scale = static_cast<double>(in_size) / static_cast<double>(count);
    const double wide = std::max(scale, 1.0);
    const double reach = reach_of(filter) * wide;
    stride_ = static_cast<int64_t>(std::ceil(reach)) * 2 + 1;
    weights_.resize(count * stride_);
    first_.resize(count);
    num_.resize(count);
    std::vector<double> exact(stride_);
    for (int64_t i = 0; i < count; ++i) {
      const double centre = (static_cast<double>(i) + 0.5) * scale;
      const auto first = std::max(0, static_cast<int>(centre - reach + 0.5));
      const auto end = std::min(static_cast<int>(in_size), static_cast<int>(centre + reach + 0.5));
      first_[i] = first;
      num_[i] = end - first;
      double sum = 0.0;
      for (int k = 0; k < end - first; ++k) {
        exact[k] = value_at(filter, (k + first - centre + 0.5) * (1.0 / wide));
        sum += exact[k];
      }
      for (int k = 0; k < end - first; ++k) weights_[i * stride_ + k] = whole(exact[k], sum);
    }
  }

  ResizeTaps taps() const {
    return {weights_.data(), first_.data(), num_.data(), static_cast<int64_t>(first_.size()), stride_};
  }

 private:
  static int32_t whole(double weight, double sum) {
    if (sum != 0.0) weight /= sum;
    return static_cast<int32_t>((weight < 0 ? -0.5 : 0.5) + weight * (1 << kWeightBits));
  }

  int64_t stride_;
  std::vector<int32_t> weights_, first_, num_;
};

void run_columns(const ResizeColumns& p) { BEQUEST_DISPATCH_ISA(resize_columns(p)); }
void run_rows(const ResizeRows& p) { BEQUEST_DISPATCH_ISA(resize_rows(p)); }

// Threads for so many pixels. Not those of the kernels, which a step may need meanwhile.
int64_t threads_for(int64_t pixels) {
  constexpr int64_t kLarge = 1 << 18, kMost = 4;
  const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
  return pixels < kLarge ? 1 : std::clamp<int64_t>(cores / 4, 1, kMost);
}

// run(begin, end) over parts of [0, count), each in a thread of its own.
template <class Run>
void in_parts(int64_t count, int64_t num_threads, Run run) {
  const int64_t groups = (count + kTogether - 1) / kTogether;
  const int64_t part = (groups + num_threads - 1) / num_threads * kTogether;
  std::vector<std::jthread> others;
  for (int64_t begin = part; begin < count; begin += part)
    others.emplace_back([=] { run(begin, std::min(count, begin + part)); });
  run(0, std::min(count, part));
}

void make_columns(const ResizeParams& p, uint8_t* out, int64_t num_threads) {
  const Taps taps(p.width, p.out_width, p.filter);
  in_parts(p.height, num_threads, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> scratch((p.width * p.in_pixel + p.out_width * 3) * kTogether);
    run_columns({p.in, out, begin, end, p.width, p.in_pixel, taps.taps(), scratch.data()});
  });
}

void make_rows(const ResizeParams& p, const uint8_t* in, int64_t num_threads) {
  const Taps taps(p.height, p.out_height, p.filter);
  in_parts(p.out_height, num_threads, [&](int64_t begin, int64_t end) {
    run_rows({in, p.out, begin, end, p.out_width * 3, taps.taps()});
  });
}

// [count, in_pixel] → [count, 3]
void pack(const uint8_t* in, int64_t count, int64_t in_pixel, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) std::copy_n(in + i * in_pixel, 3, out + i * 3);
}

}  // namespace

void resize(const ResizeParams& p) {
  check(p.height > 0 && p.width > 0 && p.out_height > 0 && p.out_width > 0, "an image has pixels");
  check(p.in_pixel == 3 || p.in_pixel == 4, "a pixel has three bytes, or four");
  const int64_t num_threads = threads_for(p.out_height * p.out_width);
  const bool ends = p.height == p.out_height;
  std::vector<uint8_t> between(ends ? 0 : p.height * p.out_width * 3);
  uint8_t* const made = ends ? p.out : between.data();
  if (p.width != p.out_width)
    make_columns(p, made, num_threads);
  else
    pack(p.in, p.height * p.width, p.in_pixel, made);
  if (!ends) make_rows(p, made, num_threads);
}

}  // namespace bequest
