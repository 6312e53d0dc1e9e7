// Four characters at a time: a table for each of their places has its six bits where they belong, so that
// they are put together without shifts. A character that is none sets a bit above all 24.
#include "ops/cpu/base64.h"

#include <array>
#include <string_view>

namespace bequest {
namespace {

constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
constexpr uint32_t kWrong = 1u << 24;
constexpr int kGroup = 4;  // characters that stand for three bytes

using Table = std::array<uint32_t, 256>;

constexpr std::array<Table, kGroup> make_tables() {
  std::array<Table, kGroup> tables{};
  for (int place = 0; place < kGroup; ++place) {
    tables[place].fill(kWrong);
    for (uint32_t i = 0; i < kAlphabet.size(); ++i)
      tables[place][static_cast<unsigned char>(kAlphabet[i])] = i << (6 * (kGroup - 1 - place));
  }
  return tables;
}

constexpr std::array<Table, kGroup> kTables = make_tables();

inline uint32_t bits_of(const unsigned char* text) {
  return kTables[0][text[0]] | kTables[1][text[1]] | kTables[2][text[2]] | kTables[3][text[3]];
}

int64_t padding(const char* text, int64_t size) {
  if (size == 0 || text[size - 1] != '=') return 0;
  return text[size - 2] == '=' ? 2 : 1;
}

}  // namespace

int64_t base64_size(const char* text, int64_t size) {
  return size % kGroup == 0 ? size / kGroup * 3 - padding(text, size) : -1;
}

bool decode_base64(const char* text, int64_t size, uint8_t* out) {
  const auto* from = reinterpret_cast<const unsigned char*>(text);
  const int64_t padded = padding(text, size);
  const unsigned char* const end = from + size - (padded ? kGroup : 0);
  uint32_t all = 0;
  for (; from < end; from += kGroup, out += 3) {
    const uint32_t bits = bits_of(from);
    all |= bits;
    out[0] = static_cast<uint8_t>(bits >> 16);
    out[1] = static_cast<uint8_t>(bits >> 8);
    out[2] = static_cast<uint8_t>(bits);
  }
  if (padded) {
    const unsigned char last[kGroup] = {from[0], from[1],
                                        padded == 2 ? static_cast<unsigned char>('A') : from[2], 'A'};
    const uint32_t bits = bits_of(last);
    all |= bits;
    out[0] = static_cast<uint8_t>(bits >> 16);
    if (padded == 1) out[1] = static_cast<uint8_t>(bits >> 8);
  }
  return all < kWrong;
}

}  // namespace bequest
