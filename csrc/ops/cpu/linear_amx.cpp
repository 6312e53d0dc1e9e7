#include "ops/cpu/linear_amx.h"

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "cache/cpu/kv_write.h"
#include "core/isa.h"
#include "core/threads.h"
#include "ops/cpu/norm.h"

namespace bequest {

#if defined(__x86_64__)
namespace {

// Memory of one call, cut into pieces that begin at multiples of 64. malloc keeps what the last call freed.
class Scratch {
 public:
  explicit Scratch(int64_t bytes)
      : memory_(static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(bytes))), &std::free),
        next_(memory_.get()) {
    check(memory_ != nullptr, "linear: out of memory");
  }
  template <class T>
  T* take(int64_t bytes) {
    T* const piece = reinterpret_cast<T*>(next_);
    next_ += bytes;
    return piece;
  }

 private:
  std::unique_ptr<char, decltype(&std::free)> memory_;
  char* next_;
};

// All of a product by all threads; each has kItemSumBytes of `sums`.
void multiply_together(const TiledProduct& product, char* sums) {
  const int threads = num_threads();
  const int64_t strips = product.strips(), row_tiles = product.row_tiles();
  const int64_t blocks = (row_tiles + kItemRowTiles - 1) / kItemRowTiles;
  // Many small items: where another guest of the machine slows one thread down, the others wait for it at the
  // end of every product, for half an item on average.
  const int64_t most = kItemStrips / (product.params.gated() ? 2 : 1);
  const int64_t group = std::clamp<int64_t>(strips * blocks / (threads * 16), 1, most);
  const int64_t groups = (strips + group - 1) / group;
  for_each_item(groups * blocks, [&](int64_t i, int worker) {
    const int64_t block = i / groups, first = i % groups * group;
    const TiledItem item{.row_begin = row_tiles * block / blocks,
                         .row_end = row_tiles * (block + 1) / blocks,
                         .strip_begin = first,
                         .strip_end = std::min(first + group, strips)};
    amx::multiply_strips(product, item, reinterpret_cast<float*>(sums + worker * kItemSumBytes));
  });
}

// All of a product of few enough rows by this thread.
void multiply_alone(const TiledProduct& product, float* sums) {
  const int64_t strips = product.strips(), most = kItemStrips / (product.params.gated() ? 2 : 1);
  for (int64_t first = 0; first < strips; first += most)
    amx::multiply_strips(product, {0, product.row_tiles(), first, std::min(first + most, strips)}, sums);
}

// Rows [begin, end) of the tiles, of which those past T are zeros.
void norm_rows(const TiledProduct& product, int64_t begin, int64_t end) {
  constexpr int64_t kRows = 4;  // at a time
  const int64_t width = product.params.in_features, tokens = product.params.num_tokens;
  const auto normed = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(kRows * width));
  for (int64_t row = begin; row < end; row += kRows) {
    const int64_t stop = std::min(row + kRows, end), count = std::min(stop, tokens) - row;
    if (count > 0) {
      const RowNorm norm = product.norm->from(row, width);
      const float* x = product.params.x + row * width;
      if (norm.bias == nullptr)
        rms_norm({x, norm.residual, norm.weight, normed.get(), count, width, norm.eps, norm.tap});
      else
        layer_norm(
            {x, norm.residual, norm.weight, norm.bias, normed.get(), count, width, norm.eps, norm.tap});
    }
    for (int64_t i = 0; row + i < stop; ++i)
      amx::round_row(product, row + i, i < count ? normed.get() + i * width : nullptr);
  }
}

void round_together(const TiledProduct& product) {
  if (product.norm != nullptr)
    return parallel_for(product.row_tiles() * product.rows_in_tile(), 1 + 8192 / product.params.in_features,
                        [&](int64_t begin, int64_t end) { norm_rows(product, begin, end); });
  parallel_for(product.row_tiles() * product.k_tiles(), 1 + 16 * kTileSide / product.rows_in_tile(),
               [&](int64_t begin, int64_t end) { amx::round_rows(product, begin, end); });
}

void multiply_rows(TiledProduct product) {
  check(current_isa() == Isa::kAmx, "linear: this chip has no matrix units");
  const int64_t sum_bytes = kItemSumBytes * num_threads();
  Scratch scratch(product.row_bytes() + sum_bytes);
  product.rows = scratch.take<BFloat16>(product.row_bytes());
  round_together(product);
  multiply_together(product, scratch.take<char>(sum_bytes));
}

// The two products of rows [begin, end).
struct Layers {
  TiledProduct up, down;

  Layers(const FeedForwardParams& p, int64_t begin, int64_t end)
      : up{.params = {.x = p.x + begin * p.in_features,
                      .weight = p.up,
                      .format = WeightFormat::kTiles,
                      .bias = p.up_bias,
                      .out = nullptr,
                      .num_tokens = end - begin,
                      .out_features = p.inner_features * (p.gated ? 2 : 1),
                      .in_features = p.in_features,
                      .x_stride = p.in_features,
                      .finish = p.gated ? Finish::kGated : Finish::kActivated,
                      .activation = p.activation},
           .rows = nullptr,
           .inner = nullptr},
        down{.params = {.x = nullptr,
                        .weight = p.down,
                        .format = WeightFormat::kTiles,
                        .bias = p.down_bias,
                        .out = p.out + begin * p.out_features,
                        .num_tokens = end - begin,
                        .out_features = p.out_features,
                        .in_features = p.inner_features,
                        .x_stride = 0},
             .rows = nullptr,
             .inner = nullptr} {}

  int64_t bytes() const { return up.row_bytes() + down.row_bytes(); }
  void place(Scratch& scratch) {
    up.rows = scratch.take<BFloat16>(up.row_bytes());
    up.inner = down.rows = scratch.take<BFloat16>(down.row_bytes());
  }
};

// Rows per block whose inner values leave room in L2; 0 where so few would reread the weights too often.
int64_t block_rows(const FeedForwardParams& p) {
  constexpr int64_t kInnerBytes = 1 << 20, kLeastTiles = 8;
  const int64_t tiles =
      kInnerBytes / (num_k_tiles(p.inner_features) * kTileValues * int64_t{sizeof(BFloat16)});
  return tiles < kLeastTiles ? 0 : std::min(tiles, kItemRowTiles) * kTileSide;
}

void multiply_layers(const FeedForwardParams& p, const RowNorm* norm) {
  check(current_isa() == Isa::kAmx, "feed_forward: this chip has no matrix units");
  const int64_t threads = num_threads(), sum_bytes = kItemSumBytes * threads;
  const int64_t rows = block_rows(p), blocks = rows ? (p.num_tokens + rows - 1) / rows : 0;
  if (blocks < 2 * threads) {
    Layers layers(p, 0, p.num_tokens);
    layers.up.norm = norm;
    Scratch scratch(layers.bytes() + sum_bytes);
    layers.place(scratch);
    char* const sums = scratch.take<char>(sum_bytes);
    round_together(layers.up);
    multiply_together(layers.up, sums);
    multiply_together(layers.down, sums);
    return;
  }
  const int64_t worker_bytes = Layers(p, 0, rows).bytes() + kItemSumBytes;
  Scratch scratch(worker_bytes * threads);
  char* const memory = scratch.take<char>(worker_bytes * threads);
  for_each_item(blocks, [&](int64_t block, int worker) {
    const int64_t begin = p.num_tokens * block / blocks;
    Layers layers(p, begin, p.num_tokens * (block + 1) / blocks);
    char* const own = memory + worker * worker_bytes;
    auto* const sums = reinterpret_cast<float*>(own);
    layers.up.rows = reinterpret_cast<BFloat16*>(own + kItemSumBytes);
    layers.up.inner = layers.down.rows = layers.up.rows + layers.up.row_bytes() / int64_t{sizeof(BFloat16)};
    if (norm != nullptr) {
      const RowNorm of_block = norm->from(begin, p.in_features);
      layers.up.norm = &of_block;
      norm_rows(layers.up, 0, layers.up.row_tiles() * layers.up.rows_in_tile());
    } else {
      amx::round_rows(layers.up, 0, layers.up.row_tiles() * layers.up.k_tiles());
    }
    multiply_alone(layers.up, sums);
    multiply_alone(layers.down, sums);
  });
}

}  // namespace

void linear_amx(const LinearParams& p) { multiply_rows({.params = p, .rows = nullptr, .inner = nullptr}); }

void normed_linear(const LinearParams& p, const RowNorm& norm) {
  if (p.num_tokens > 0) multiply_rows({.params = p, .rows = nullptr, .inner = nullptr, .norm = &norm});
}

void linear_into_cache(const LinearParams& p, const KvColumns& kv, const RowNorm* norm) {
  const int64_t dim = kv.layout.head_dim;
  check(p.finish == Finish::kSum && can_store_in_cache(p.format, DType::kBF16, kv.first, dim) &&
            kv.first + 2 * kv.layout.num_kv_heads * dim == p.out_features,
        "linear: columns do not fit the cache");
  check_kv_places(kv.slots, p.num_tokens, kv.layout, kv.layer);
  if (p.num_tokens > 0)
    multiply_rows({.params = p, .rows = nullptr, .inner = nullptr, .kv = &kv, .norm = norm});
}

void feed_forward_amx(const FeedForwardParams& p) { multiply_layers(p, nullptr); }
void normed_feed_forward(const FeedForwardParams& p, const RowNorm& norm) {
  if (p.num_tokens > 0) multiply_layers(p, &norm);
}
#else
void linear_amx(const LinearParams&) { fail("linear: this chip has no matrix units"); }
void linear_into_cache(const LinearParams&, const KvColumns&, const RowNorm*) {
  fail("linear: this chip has no matrix units");
}
void normed_linear(const LinearParams&, const RowNorm&) { fail("linear: this chip has no matrix units"); }
void normed_feed_forward(const FeedForwardParams&, const RowNorm&) {
  fail("feed_forward: this chip has no matrix units");
}
void feed_forward_amx(const FeedForwardParams&) { fail("feed_forward: this chip has no matrix units"); }
#endif

}  // namespace bequest
