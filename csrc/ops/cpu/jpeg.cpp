#include "ops/cpu/jpeg.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "core/helpers.h"
#include "core/isa.h"
#include "ops/cpu/jpeg_codes.h"

namespace bequest {

// Values [unit_columns, blocks, 64] of row `row` of units, multiplied by their steps → its samples.
// Samples → rows [begin, end) of `out`. `chroma`: [2, 2 * columns], `sums`: [columns + 2] for half as many
// columns as the image has.
BEQUEST_DECLARE_PER_ISA(void jpeg_transform(const JpegHeader& header, const int16_t* values, int64_t row,
                                            const JpegPlanes& to);
                        void jpeg_colour(const JpegHeader& header, const JpegPlanes& from, int64_t begin,
                                         int64_t end, uint8_t* out, uint8_t* chroma, int16_t* sums))

namespace {

constexpr int64_t kMostPixels = 1 << 25;  // all values of an image are in memory at once
constexpr int64_t kLeastWidth = 16;       // narrower chroma is not smoothed
constexpr int64_t kManyPixels = 1 << 16;  // that a second thread is worth its while for

void transform(const JpegHeader& header, const int16_t* values, int64_t row, const JpegPlanes& to) {
  BEQUEST_DISPATCH_ISA(jpeg_transform(header, values, row, to));
}

void colour(const JpegHeader& header, const JpegPlanes& from, int64_t begin, int64_t end, uint8_t* out,
            uint8_t* chroma, int16_t* sums) {
  BEQUEST_DISPATCH_ISA(jpeg_colour(header, from, begin, end, out, chroma, sums));
}

// Values become pixels, row by row of units.
class Painter {
 public:
  Painter(const JpegHeader& header, uint8_t* out)
      : header_(header), out_(out), chroma_(2 * (header.width + 1)), sums_(header.width / 2 + 3) {
    const int64_t width = header.unit_columns() * header.side(), height = header.unit_rows() * header.side();
    const int64_t part = header.is_halved ? 2 : 1;
    const int64_t luma = width * height, each = luma / (part * part);
    samples_ = std::make_unique_for_overwrite<uint8_t[]>(luma + 2 * each);
    uint8_t* const first = samples_.get();
    planes_ = {{first, first + luma, first + luma + each}, {width, width / part, width / part}};
  }

  void paint(const int16_t* values, int64_t row) {
    transform(header_, values, row, planes_);
    // Chroma of the last line of a row is smoothed with the next row's.
    const int64_t side = header_.side(), end = (row + 1) * side - (header_.is_halved ? 1 : 0);
    const int64_t ready = row + 1 == header_.unit_rows() ? header_.height : std::min(header_.height, end);
    colour(header_, planes_, painted_, ready, out_, chroma_.data(), sums_.data());
    painted_ = ready;
  }

 private:
  const JpegHeader& header_;
  uint8_t* const out_;
  std::vector<uint8_t> chroma_;
  std::vector<int16_t> sums_;
  std::unique_ptr<uint8_t[]> samples_;
  JpegPlanes planes_;
  int64_t painted_ = 0;  // lines
};

int64_t row_size(const JpegHeader& header) { return header.unit_columns() * header.blocks() * kJpegBlock; }

bool decode_alone(const JpegHeader& header, uint8_t* out) {
  JpegPlace place{.at = header.begin};
  Painter painter(header, out);
  std::vector<int16_t> values(row_size(header));
  for (int64_t row = 0; row < header.unit_rows(); ++row) {
    if (!read_jpeg_row(header, place, values.data())) return false;
    painter.paint(values.data(), row);
  }
  return true;
}

bool decode_together(const JpegHeader& header, uint8_t* out) {
  constexpr int64_t kBroken = -1;
  const int64_t size = row_size(header), rows = header.unit_rows();
  const auto values = std::make_unique_for_overwrite<int16_t[]>(size * rows);
  std::atomic<int64_t> num_read = 0;
  Painter painter(header, out);
  JpegPlace place{.at = header.begin};
  const auto read = [&] {
    bool whole = true;
    for (int64_t row = 0; row < rows && whole; ++row) {
      whole = read_jpeg_row(header, place, values.get() + row * size);
      num_read = whole ? row + 1 : kBroken;
      num_read.notify_one();
    }
  };
  const auto paint = [&] {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t num = num_read; num <= row; num = num_read) {
        if (num == kBroken) return;
        num_read.wait(num);
      }
      painter.paint(values.get() + row * size, row);
    }
  };
  run_parts(2, [&](int part) { part == 0 ? read() : paint(); });
  return num_read != kBroken;
}

}  // namespace

bool decode_jpeg(const JpegParams& p) {
  const std::optional<JpegHeader> header = read_jpeg_header(p.data, p.size);
  if (!header || header->height != p.height || header->width != p.width) return false;
  if (header->width < kLeastWidth || p.height * p.width > kMostPixels) return false;
  const bool many = p.height * p.width >= kManyPixels;
  return many ? decode_together(*header, p.out) : decode_alone(*header, p.out);
}

}  // namespace bequest
