// No vectors here: one code follows another. Newer machines shift by any number of bits in one instruction.
#include "ops/cpu/jpeg_codes.h"

#include <bit>
#include <cstdlib>
#include <cstring>

namespace bequest::BEQUEST_ISA {
namespace {

// Where the values of a block lie, in the order that they are coded in.
constexpr uint8_t kPlaces[kJpegBlock] = {0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,
                                         12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,  7,  14, 21, 28,
                                         35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51,
                                         58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};
constexpr int kRunOf16 = 0xf0, kEndOfBlock = 0;
// Of the sizes of a block's values, multiplied by their steps: up to it no sum of the transform leaves 16
// bits, so that vectors of 16 and of 32 bits make the same. Few blocks of any picture have half of it.
constexpr int kMostSum = 5790;
constexpr int kEnough = 32;  // bits, of a code and the value behind it

inline bool has_byte_ff(uint64_t bytes) {
  const uint64_t turned = ~bytes;
  return ((turned - 0x0101010101010101u) & ~turned & 0x8080808080808080u) != 0;
}

// A place, and what is read there.
class Reader {
 public:
  Reader(const JpegPlace& place, const uint8_t* end) : p_(place), end_(end) {}

  const JpegPlace& place() const { return p_; }

  void need() {
    if (p_.num < kEnough) [[unlikely]]
      refill();
  }

  uint32_t next(int count) const { return static_cast<uint32_t>(p_.held >> (64 - count)); }

  void pass(int count) {
    p_.held <<= count;
    p_.num -= count;
  }

  // -1: there is no such code.
  int symbol(const JpegCodes& codes) {
    const JpegCodes::Entry entry = codes.lookup[next(JpegCodes::kLookBits)];
    int length = entry.length, symbol = entry.symbol;
    if (length == 0) [[unlikely]] {
      length = JpegCodes::kLookBits + 1;
      while (length <= 16 && static_cast<int32_t>(next(length)) > codes.most[length]) ++length;
      if (length > 16) return -1;
      symbol = codes.symbols[(static_cast<int32_t>(next(length)) + codes.shift[length]) & 255];
    }
    pass(length);
    return symbol;
  }

  // `size` > 0 bits, of which those that begin with 0 are negative.
  int value(int size) {
    const int bits = static_cast<int>(next(size));
    const int below = p_.held >> 63 ? 0 : (1 << size) - 1;
    pass(size);
    return bits - below;
  }

 private:
  // More than 56 bits from now on.
  void refill() {
    if (end_ - p_.at >= 8) {
      uint64_t bytes;
      std::memcpy(&bytes, p_.at, sizeof(bytes));
      if (!has_byte_ff(bytes)) {
        if constexpr (std::endian::native == std::endian::little) bytes = __builtin_bswap64(bytes);
        // What stands behind the whole bytes is put there again by the next call, to the same bits.
        p_.held |= bytes >> p_.num;
        const int whole = (63 - p_.num) >> 3;
        p_.at += whole;
        p_.num += whole * 8;
        return;
      }
    }
    for (; p_.num <= 56; p_.num += 8) {
      uint64_t byte = 0;
      if (p_.at < end_ && *p_.at != 0xff) {
        byte = *p_.at++;
      } else if (end_ - p_.at >= 2 && p_.at[1] == 0) {  // a byte of all ones, and not a marker
        byte = 0xff;
        p_.at += 2;
      } else {
        p_.num_invented += 8;
      }
      p_.held |= byte << (56 - p_.num);
    }
  }

  JpegPlace p_;
  const uint8_t* const end_;
};

// A block of 64 values, which are 0 before.
inline bool read_block(Reader& reader, const JpegHeader& header, const JpegComponent& component, int& last_dc,
                       int16_t* values) {
  reader.need();
  const int size = reader.symbol(header.dc[component.dc]);
  if (size < 0) return false;
  if (size > 0) last_dc += reader.value(size);
  int sum = std::abs(last_dc * component.steps[0]);
  values[0] = static_cast<int16_t>(last_dc * component.steps[0]);
  const JpegCodes& codes = header.ac[component.ac];
  for (int k = 1; k < kJpegBlock; ++k) {
    reader.need();
    int value;
    if (const JpegCodes::Short& known = codes.shorts[reader.next(JpegCodes::kLookBits)]; known.length)
        [[likely]] {
      reader.pass(known.length);
      k += known.run;
      value = known.value;
    } else {
      const int symbol = reader.symbol(codes);
      if (symbol == kEndOfBlock) break;
      if (symbol == kRunOf16) {
        k += 15;
        continue;
      }
      if (symbol < 0 || (symbol & 15) == 0) return false;
      k += symbol >> 4;
      value = reader.value(symbol & 15);
    }
    if (k >= kJpegBlock) return false;
    value *= component.steps[k];
    sum += std::abs(value);
    values[kPlaces[k]] = static_cast<int16_t>(value);
  }
  return sum <= kMostSum;
}

}  // namespace

bool jpeg_codes(const JpegHeader& header, JpegPlace& place, int16_t* values) {
  const int64_t units = header.unit_columns();
  std::memset(values, 0, units * header.blocks() * kJpegBlock * sizeof(int16_t));
  const int num_luma = header.blocks() - 2;
  Reader reader(place, header.end);
  std::array<int, 3> last_dc = place.last_dc;
  for (int64_t unit = 0; unit < units; ++unit)
    for (int block = 0; block < header.blocks(); ++block, values += kJpegBlock) {
      const int component = block < num_luma ? 0 : block - num_luma + 1;
      if (!read_block(reader, header, header.components[component], last_dc[component], values)) return false;
    }
  place = reader.place();
  place.last_dc = last_dc;
  return place.num >= place.num_invented;
}

}  // namespace bequest::BEQUEST_ISA
