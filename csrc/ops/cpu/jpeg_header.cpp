#include "ops/cpu/jpeg_header.h"

#include <algorithm>

namespace bequest {
namespace {

constexpr int kStart = 0xd8, kBaseline = 0xc0, kCodes = 0xc4, kScan = 0xda, kSteps = 0xdb, kAdobe = 0xee;
constexpr int kComment = 0xfe, kFirstApplication = 0xe0, kLastApplication = 0xef;
constexpr int kMostDcSize = 11, kMostAcSize = 10;  // bits of values, where samples have 8

// Bytes of a segment; whoever reads behind its end gets zeros, and `failed` says so.
class Bytes {
 public:
  Bytes(const uint8_t* begin, const uint8_t* end) : at_(begin), end_(end) {}

  int one() {
    if (at_ >= end_) {
      failed_ = true;
      return 0;
    }
    return *at_++;
  }
  int two() {
    const int high = one();
    return high << 8 | one();
  }
  Bytes part(int64_t size) {
    const uint8_t* const begin = at_;
    if (size < 0 || size > left()) failed_ = true;
    at_ += std::clamp<int64_t>(size, 0, left());
    return {begin, at_};
  }
  int64_t left() const { return end_ - at_; }
  bool failed() const { return failed_; }
  const uint8_t* place() const { return at_; }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
  bool failed_ = false;
};

bool make_codes(Bytes& from, bool is_dc, JpegCodes& codes) {
  std::array<int, 17> counts{};
  int total = 0;
  for (int length = 1; length <= 16; ++length) total += counts[length] = from.one();
  if (total > 256 || total > from.left()) return false;
  codes = {};
  codes.most.fill(-1);
  for (int i = 0; i < total; ++i) codes.symbols[i] = static_cast<uint8_t>(from.one());
  int code = 0, place = 0;
  for (int length = 1; length <= 16; ++length, code <<= 1) {
    if (code + counts[length] > 1 << length) return false;
    codes.shift[length] = place - code;
    for (int i = 0; i < counts[length]; ++i, ++code, ++place) {
      const uint8_t symbol = codes.symbols[place];
      if (is_dc ? symbol > kMostDcSize : (symbol & 15) > kMostAcSize) return false;
      if (length > JpegCodes::kLookBits) continue;
      const int spare = JpegCodes::kLookBits - length;
      std::fill_n(codes.lookup.begin() + (code << spare), 1 << spare,
                  JpegCodes::Entry{static_cast<uint8_t>(length), symbol});
    }
    if (counts[length]) codes.most[length] = code - 1;
  }
  return true;
}

// AC codes that lie in kLookBits bits together with their values.
void make_shorts(JpegCodes& codes) {
  for (int bits = 0; bits < 1 << JpegCodes::kLookBits; ++bits) {
    const JpegCodes::Entry entry = codes.lookup[bits];
    const int size = entry.symbol & 15, length = entry.length + size;
    if (entry.length == 0 || size == 0 || length > JpegCodes::kLookBits) continue;
    const int value = bits >> (JpegCodes::kLookBits - length) & ((1 << size) - 1);
    const bool negative = value >> (size - 1) == 0;
    codes.shorts[bits] = {static_cast<int16_t>(negative ? value - (1 << size) + 1 : value),
                          static_cast<uint8_t>(entry.symbol >> 4), static_cast<uint8_t>(length)};
  }
}

class HeaderReader {
 public:
  HeaderReader(const uint8_t* data, int64_t size) : bytes_(data, data + size) { header_.end = data + size; }

  std::optional<JpegHeader> read() {
    if (bytes_.two() != (0xff00 | kStart)) return {};
    while (!bytes_.failed()) {
      if (bytes_.one() != 0xff) return {};
      int marker = bytes_.one();
      while (marker == 0xff && !bytes_.failed()) marker = bytes_.one();  // they may be repeated
      Bytes segment = bytes_.part(bytes_.two() - 2);
      if (bytes_.failed() || !take(marker, segment) || segment.failed()) return {};
      if (marker != kScan) continue;
      header_.begin = bytes_.place();
      return header_;
    }
    return {};
  }

 private:
  bool take(int marker, Bytes& segment) {
    switch (marker) {
      case kSteps:
        return take_steps(segment);
      case kCodes:
        return take_codes(segment);
      case kBaseline:
        return take_frame(segment);
      case kScan:
        return take_scan(segment);
      case kAdobe:  // may say that colours are others
        return false;
      default:
        return marker == kComment || (marker >= kFirstApplication && marker <= kLastApplication);
    }
  }

  bool take_steps(Bytes& segment) {
    while (segment.left() > 0) {
      const int which = segment.one();
      if (which > 3) return false;  // the upper half: steps of 16 bits
      for (uint16_t& step : steps_[which]) step = static_cast<uint16_t>(segment.one());
      has_steps_ |= 1 << which;
    }
    return true;
  }

  bool take_codes(Bytes& segment) {
    while (segment.left() > 0) {
      const int which = segment.one(), number = which & 15;
      if (which >> 4 > 1 || number > 1) return false;
      const bool is_dc = which >> 4 == 0;
      if (!make_codes(segment, is_dc, is_dc ? header_.dc[number] : header_.ac[number])) return false;
      if (!is_dc) make_shorts(header_.ac[number]);
      has_codes_ |= 1 << (number + (is_dc ? 0 : 2));
    }
    return true;
  }

  bool take_frame(Bytes& segment) {
    if (header_.width || segment.one() != 8) return false;
    header_.height = segment.two();
    header_.width = segment.two();
    if (!header_.height || !header_.width || segment.one() != 3) return false;
    for (int i = 0; i < 3; ++i) {
      const int id = segment.one(), sampling = segment.one(), steps = segment.one();
      if (id != i + 1 || steps > 3) return false;  // other ids may mean other colours
      if (i == 0 ? sampling != 0x11 && sampling != 0x22 : sampling != 0x11) return false;
      if (i == 0) header_.is_halved = sampling == 0x22;
      which_steps_[i] = steps;
    }
    return segment.left() == 0;
  }

  bool take_scan(Bytes& segment) {
    if (!header_.width || segment.one() != 3) return false;
    for (int i = 0; i < 3; ++i) {
      const int id = segment.one(), codes = segment.one(), dc = codes >> 4, ac = codes & 15;
      if (id != i + 1 || dc > 1 || ac > 1) return false;
      if (!(has_codes_ >> dc & 1) || !(has_codes_ >> (2 + ac) & 1) || !(has_steps_ >> which_steps_[i] & 1))
        return false;
      header_.components[i] = {steps_[which_steps_[i]], dc, ac};
    }
    return segment.one() == 0 && segment.one() == 63 && segment.one() == 0 && segment.left() == 0;
  }

  Bytes bytes_;
  JpegHeader header_{};
  std::array<std::array<uint16_t, kJpegBlock>, 4> steps_{};
  std::array<int, 3> which_steps_{};
  int has_steps_ = 0, has_codes_ = 0;
};

}  // namespace

std::optional<JpegHeader> read_jpeg_header(const uint8_t* data, int64_t size) {
  return HeaderReader(data, size).read();
}

}  // namespace bequest
