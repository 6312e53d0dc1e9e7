// Eight columns of a block at a time, in 32 bits; then its rows, which are columns of it turned over.
#include "ops/cpu/jpeg.h"

#include <algorithm>

namespace bequest::BEQUEST_ISA {
namespace {

using Lanes = int32_t __attribute__((vector_size(32)));
using Shorts = int16_t __attribute__((vector_size(16)));

// Cosines in 13 bits, as libjpeg's exact integer transform has them.
constexpr int kCosineBits = 13, kFirstBits = 2;
constexpr int k0_298 = 2446, k0_390 = 3196, k0_541 = 4433, k0_765 = 6270, k0_899 = 7373, k1_175 = 9633;
constexpr int k1_501 = 12299, k1_847 = 15137, k1_961 = 16069, k2_053 = 16819, k2_562 = 20995, k3_072 = 25172;

template <int kShift>
inline void transform_columns(Lanes (&x)[8]) {
  const Lanes turned = (x[2] + x[6]) * k0_541;
  const Lanes even2 = turned - x[6] * k1_847, even3 = turned + x[2] * k0_765;
  const Lanes even0 = (x[0] + x[4]) << kCosineBits, even1 = (x[0] - x[4]) << kCosineBits;
  const Lanes even[4] = {even0 + even3, even1 + even2, even1 - even2, even0 - even3};

  const Lanes all = (x[7] + x[3] + x[5] + x[1]) * k1_175;
  const Lanes z1 = (x[7] + x[1]) * -k0_899, z2 = (x[5] + x[3]) * -k2_562;
  const Lanes z3 = (x[7] + x[3]) * -k1_961 + all, z4 = (x[5] + x[1]) * -k0_390 + all;
  const Lanes odd[4] = {x[1] * k1_501 + z1 + z4, x[3] * k3_072 + z2 + z3, x[5] * k2_053 + z2 + z4,
                        x[7] * k0_298 + z1 + z3};
  for (int i = 0; i < 4; ++i) {
    x[i] = (even[i] + odd[i] + (1 << (kShift - 1))) >> kShift;
    x[7 - i] = (even[i] - odd[i] + (1 << (kShift - 1))) >> kShift;
  }
}

// x[i][j] → x[j][i], in three passes that lay the halves of the rows between each other.
inline void transpose(Lanes (&x)[8]) {
  for (int pass = 0; pass < 3; ++pass) {
    Lanes mixed[8];
    for (int i = 0; i < 4; ++i) {
      mixed[2 * i] = __builtin_shufflevector(x[i], x[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      mixed[2 * i + 1] = __builtin_shufflevector(x[i], x[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    __builtin_memcpy(x, mixed, sizeof(mixed));
  }
}

void transform_block(const int16_t* values, uint8_t* to, int64_t stride) {
  Lanes x[8];
  for (int i = 0; i < 8; ++i) {
    Shorts row;
    __builtin_memcpy(&row, values + 8 * i, sizeof(row));
    x[i] = __builtin_convertvector(row, Lanes);
  }
  transform_columns<kCosineBits - kFirstBits>(x);
  transpose(x);
  transform_columns<kCosineBits + kFirstBits + 3>(x);
  transpose(x);
  for (int i = 0; i < 8; ++i) {
    Lanes samples = x[i] + 128;
    samples = samples < 0 ? Lanes{} : samples;
    samples = samples > 255 ? Lanes{} + 255 : samples;
    for (int j = 0; j < 8; ++j) to[i * stride + j] = static_cast<uint8_t>(samples[j]);
  }
}

// Rows of chroma between others: 3 parts of the near one and 1 of the other, in both directions. `sums` has a
// column before the first and one behind the last.
void double_columns(const uint8_t* near, const uint8_t* far, int64_t columns, int16_t* sums, uint8_t* to) {
  int16_t* const sum = sums + 1;
  for (int64_t i = 0; i < columns; ++i) sum[i] = static_cast<int16_t>(3 * near[i] + far[i]);
  sum[-1] = sum[0];
  sum[columns] = sum[columns - 1];
  for (int64_t i = 0; i < columns; ++i) {
    to[2 * i] = static_cast<uint8_t>((3 * sum[i] + sum[i - 1] + 8) >> 4);
    to[2 * i + 1] = static_cast<uint8_t>((3 * sum[i] + sum[i + 1] + 7) >> 4);
  }
}

inline int limited(int value) { return value < 0 ? 0 : value > 255 ? 255 : value; }

constexpr int32_t fixed(double factor) { return static_cast<int32_t>(factor * 65536 + 0.5); }

void colour_row(const uint8_t* y, const uint8_t* cb, const uint8_t* cr, int64_t columns, uint8_t* out) {
  constexpr int32_t kHalf = 1 << 15;
  for (int64_t i = 0; i < columns; ++i) {
    const int32_t blue = cb[i] - 128, red = cr[i] - 128, light = y[i];
    const int32_t r = limited(light + ((fixed(1.402) * red + kHalf) >> 16));
    const int32_t g = limited(light + ((-fixed(0.34414) * blue + kHalf - fixed(0.71414) * red) >> 16));
    const int32_t b = limited(light + ((fixed(1.772) * blue + kHalf) >> 16));
    const uint32_t pixel = static_cast<uint32_t>(r | g << 8 | b << 16) | 255u << 24;
    __builtin_memcpy(out + 4 * i, &pixel, 4);
  }
}

}  // namespace

void jpeg_transform(const JpegHeader& header, const int16_t* values, int64_t row, const JpegPlanes& to) {
  const int num_luma = header.blocks() - 2, across = header.is_halved ? 2 : 1;
  for (int64_t unit = 0; unit < header.unit_columns(); ++unit)
    for (int block = 0; block < header.blocks(); ++block, values += kJpegBlock) {
      const bool is_luma = block < num_luma;
      const int plane = is_luma ? 0 : block - num_luma + 1;
      const int64_t down = is_luma ? row * across + block / across : row;
      const int64_t right = is_luma ? unit * across + block % across : unit;
      const int64_t stride = to.strides[plane];
      transform_block(values, to.planes[plane] + down * 8 * stride + right * 8, stride);
    }
}

void jpeg_colour(const JpegHeader& header, const JpegPlanes& from, int64_t begin, int64_t end, uint8_t* out,
                 uint8_t* chroma, int16_t* sums) {
  const int64_t columns = (header.width + 1) / 2, last = (header.height + 1) / 2 - 1;
  for (int64_t y = begin; y < end; ++y) {
    const uint8_t* rows[2];
    for (int c = 0; c < 2; ++c) {
      const uint8_t* const plane = from.planes[c + 1];
      const int64_t stride = from.strides[c + 1];
      if (!header.is_halved) {
        rows[c] = plane + y * stride;
        continue;
      }
      const int64_t near = y / 2, far = std::clamp<int64_t>(y % 2 ? near + 1 : near - 1, 0, last);
      uint8_t* const doubled = chroma + c * 2 * columns;
      double_columns(plane + near * stride, plane + far * stride, columns, sums, doubled);
      rows[c] = doubled;
    }
    colour_row(from.planes[0] + y * from.strides[0], rows[0], rows[1], header.width,
               out + y * header.width * 4);
  }
}

}  // namespace bequest::BEQUEST_ISA
