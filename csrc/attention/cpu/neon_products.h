// The products of attention on NEON, for *.simd.cpp files.
//
// A multiply-add of NEON takes one factor from a lane of a vector. So one load serves four values of the
// inner index, where a broadcast would be an instruction for each of them. The multiply-adds are written as
// instructions: GCC 12 would first copy a lane that several of them use to a vector of its own, which costs
// as much as a multiply-add. Loops over registers are unrolled by templates: behind `#pragma GCC unroll` it
// would keep some of the sums in memory.
//
// Bits: every element is one chain of fused multiply-adds in the order of the inner index.
#pragma once

#include "attention/cpu/key_rows.h"
#include "core/shuffle.h"
#include "core/simd.h"

namespace bequest::BEQUEST_ISA {

inline constexpr int kLineBytes = 64;  // of the caches

// f.template operator()<i>() for 0 <= i < N.
template <int N, class F>
[[gnu::always_inline]] inline void each(F f) {
  if constexpr (N > 0) {
    each<N - 1>(f);
    f.template operator()<N - 1>();
  }
}

// Of a lambda that unrolls.
#define BEQUEST_INLINE __attribute__((always_inline))

// sum += by * factors[Lane]
template <int Lane>
[[gnu::always_inline]] inline void add_product(VecF& sum, VecF by, VecF factors) {
  VecF next;
  asm("fmla %0.4s, %2.4s, %3.s[%4]" : "=w"(next) : "0"(sum), "w"(by), "w"(factors), "i"(Lane));
  sum = next;
}

// Not std::memcpy, which GCC 12 moves through general registers.
inline void store_vector(float* p, VecF v) { vst1q_f32(p, (float32x4_t)v); }

// Vector i of Count that begin at p.
template <int Count, class T>
[[gnu::always_inline]] inline VecF load_vector(const T* p, int i) {
  if constexpr (Count % 2 == 0 && sizeof(T) == 2) {
    if constexpr (requires { load_of_two(p, 0); }) return load_of_two(p + i / 2 * 2 * kLanes, i % 2);
  }
  return load(p + i * kLanes);
}

// ---- Register tiles ----

// Vectors of a register tile of R rows: its sums, a vector of factors for each row and the vectors that pass
// through fit the registers, and there are at least 8 chains of sums.
constexpr int tile_vectors(int rows) { return rows == 1 ? 16 : rows <= 3 ? 8 : rows <= 5 ? 4 : 2; }

// Vectors that are loaded before those which they follow are used.
constexpr int loads_ahead(int rows, int vectors) { return rows * vectors <= 20 ? 4 : 2; }

// sums[R, C] += factors[R, Rows] · rows [Rows, C]
template <int Rows, int R, int C, class RowAt>
[[gnu::always_inline]] inline void add_rows(VecF (&sums)[R][C], const VecF (&factors)[R], RowAt row_at) {
  constexpr int kLoads = Rows * C, kAhead = loads_ahead(R, C);
  VecF loaded[kLoads];
  each<kLoads + kAhead>([&]<int Load>() BEQUEST_INLINE {
    if constexpr (Load < kLoads) loaded[Load] = load_vector<C>(row_at(Load / C), Load % C);
    if constexpr (Load >= kAhead) {
      constexpr int kUsed = Load - kAhead;
      each<R>([&]<int Row>() BEQUEST_INLINE {
        add_product<kUsed / C>(sums[Row][kUsed % C], loaded[kUsed], factors[Row]);
      });
    }
  });
}

// c[R, C * kLanes] = to c + a[R, depth] · b[depth, column .. column + C * kLanes).
template <int R, int C, class To, class Rows>
inline void multiply_tile(To to, const float* a, int64_t a_stride, const Rows& b, int64_t column, float* c,
                          int64_t c_stride, int64_t depth) {
  VecF sums[R][C];
  each<R * C>([&]<int I>() BEQUEST_INLINE { sums[I / C][I % C] = VecF{}; });
  int64_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    VecF factors[R];
    each<R>([&]<int Row>() BEQUEST_INLINE { factors[Row] = load(a + Row * a_stride + k); });
    if constexpr (requires { b.template fetch_ahead<C>(k, column); }) b.template fetch_ahead<C>(k, column);
    const auto row_at = [&](int row) BEQUEST_INLINE { return b.row(k + row) + column; };
    add_rows<kLanes>(sums, factors, row_at);
  }
  for (; k < depth; ++k) {
    VecF factors[R];
    each<R>([&]<int Row>() BEQUEST_INLINE { factors[Row] = vld1q_dup_f32(a + Row * a_stride + k); });
    add_rows<1>(sums, factors, [&](int) BEQUEST_INLINE { return b.row(k) + column; });
  }
  each<R * C>([&]<int I>() BEQUEST_INLINE {
    float* at = c + I / C * c_stride + column + I % C * kLanes;
    store_vector(at, to.add(at, I / C, sums[I / C][I % C]));
  });
}

// c[R, vectors * kLanes] = to c + a[R, depth] · b[depth, vectors * kLanes]: the widest tiles first.
template <int R, int C = tile_vectors(R), class To, class Rows>
inline void multiply(To to, const float* a, int64_t a_stride, const Rows& b, float* c, int64_t c_stride,
                     int64_t depth, int vectors, int first = 0) {
  for (; first + C <= vectors; first += C)
    multiply_tile<R, C>(to, a, a_stride, b, first * kLanes, c, c_stride, depth);
  if constexpr (C > 1) {
    if (first < vectors) multiply<R, C / 2>(to, a, a_stride, b, c, c_stride, depth, vectors, first);
  }
}

// Values where they lie, beside those of the tile that comes next.
template <class T>
struct StreamedRows {
  const T* const* at;
  const T* const* next;
  int64_t offset;
  const T* row(int64_t k) const { return at[k] + offset; }

  // Asks for what the next tile reads where this one reads C vectors of rows [k, k + kLanes): each line once.
  template <int C>
  [[gnu::always_inline]] void fetch_ahead(int64_t k, int64_t column) const {
    constexpr int kBytes = C * kLanes * sizeof(T), kLines = (kBytes + kLineBytes - 1) / kLineBytes;
    if (kBytes < kLineBytes && column * sizeof(T) % kLineBytes != 0) return;
    each<kLanes>([&]<int I>() BEQUEST_INLINE {
      const T* row = next[k + I] + offset + column;
      each<kLines>([&]<int Line>() BEQUEST_INLINE {
        bequest::BEQUEST_ISA::fetch_ahead(row + Line * kLineBytes / sizeof(T));
      });
    });
  }
};

// ---- Scores of few rows ----

// Vectors that hold a value of each query.
constexpr int query_vectors(int rows) { return (rows + kLanes - 1) / kLanes; }

// lanes[D, query_vectors(rows) * kLanes] = q[rows, D]ᵀ, zeros beside it.
inline void queries_as_lanes(const float* q, int rows, int dim, float* lanes) {
  const int width = query_vectors(rows) * kLanes;
  for (int d = 0; d < dim; ++d)
    for (int r = 0; r < width; ++r) lanes[d * width + r] = r < rows ? q[r * dim + d] : 0.0f;
}

inline constexpr int kStride = 16;  // values of a key that are read in one turn; divides D

// While kStride values of each of Keys keys are read from d on, asks for a share of the next tile's lines.
template <int Keys, class T>
[[gnu::always_inline]] inline void fetch_share(const T* const* next, int d) {
  constexpr int kTurns = kLineBytes / (kStride * sizeof(T));  // until a line is read
  constexpr int kShare = Keys / kTurns;
  const int turn = d / kStride;
  const T* const* share = next + turn % kTurns * kShare;
  const int line = turn / kTurns * kTurns * kStride;
  each<kShare>([&]<int I>() BEQUEST_INLINE { fetch_ahead(share[I] + line); });
}

// scores[rows, kKeyTile] = q · keysᵀ around `computed`, where a lane is a query and each value of a key a
// factor: no key is transposed. q: queries_as_lanes. REQUIRES: rows <= V * kLanes.
template <int V, class T>
[[gnu::noinline]] void score_by_lanes(const float* q, int rows, const KeyRows<T>& keys,
                                      const KeyRows<T>& next, KeyRange computed, int dim, float* scores) {
  constexpr int kKeys = 8 / V;  // read together: 8 chains of sums
  for (int j = computed.begin / kKeys * kKeys; j < computed.end; j += kKeys) {
    const T* at[kKeys];
    each<kKeys>([&]<int Key>() BEQUEST_INLINE { at[Key] = keys.at[j + Key]; });
    VecF sum[V][kKeys] = {};
    const float* query = q;
    for (int d = 0; d < dim; d += kStride, query += kStride * V * kLanes) {
      fetch_share<kKeys>(next.at + j, d);
      each<kStride / kLanes>([&]<int Part>() BEQUEST_INLINE {
        VecF key[kKeys];
        each<kKeys>([&]<int Key>()
                        BEQUEST_INLINE { key[Key] = load_vector<kStride / kLanes>(at[Key] + d, Part); });
        each<kLanes>([&]<int Lane>() BEQUEST_INLINE {
          each<V>([&]<int Vec>() BEQUEST_INLINE {
            const VecF values = load(query + ((Part * kLanes + Lane) * V + Vec) * kLanes);
            each<kKeys>([&]<int Key>()
                            BEQUEST_INLINE { add_product<Lane>(sum[Vec][Key], values, key[Key]); });
          });
        });
      });
    }
    each<V>([&]<int Vec>() BEQUEST_INLINE {
      each<kKeys / kLanes>([&]<int Square>() BEQUEST_INLINE {
        VecF square[kLanes];
        each<kLanes>([&]<int I>() BEQUEST_INLINE { square[I] = sum[Vec][Square * kLanes + I]; });
        transpose(square);
        each<kLanes>([&]<int Row>() BEQUEST_INLINE {
          const int row = Vec * kLanes + Row;
          if (row < rows) store_vector(scores + row * kKeyTile + j + Square * kLanes, square[Row]);
        });
      });
    });
  }
}

// Value i of each of four keys, in column<i>(), from values that begin at d. Eight of bfloat16 are transposed
// as four pairs.
template <class T>
struct KeySquare {
  static constexpr int kValues = kLanes;
  VecF columns[kLanes];
  [[gnu::always_inline]] void read(const T* const* at, int d) {
    each<kLanes>([&]<int I>() BEQUEST_INLINE { columns[I] = load(at[I] + d); });
    transpose(columns);
  }
  template <int Value>
  [[gnu::always_inline]] VecF column() const {
    return columns[Value];
  }
};
template <>
struct KeySquare<BFloat16> {
  static constexpr int kValues = 2 * kLanes;
  VecF pairs[kLanes];
  [[gnu::always_inline]] void read(const BFloat16* const* at, int d) {
    each<kLanes>([&]<int I>() BEQUEST_INLINE { pairs[I] = (VecF)vld1q_u16(&at[I][d].bits); });
    transpose(pairs);
  }
  template <int Value>
  [[gnu::always_inline]] VecF column() const {
    const VecU pair = (VecU)pairs[Value / 2];
    return Value % 2 == 0 ? (VecF)(pair << 16) : (VecF)(pair & 0xffff0000u);
  }
};

// The same scores where a lane is a key, whose values are transposed in registers: fewer instructions with
// one row, or two of bfloat16. q[R, D].
template <int R, class T>
[[gnu::noinline]] void score_by_squares(const float* q, const KeyRows<T>& keys, const KeyRows<T>& next,
                                        KeyRange computed, int dim, float* scores) {
  constexpr int kSquares = 4, kKeys = kSquares * kLanes;
  using Square = KeySquare<T>;
  for (int j = computed.begin / kKeys * kKeys; j < computed.end; j += kKeys) {
    const T* at[kKeys];
    each<kKeys>([&]<int Key>() BEQUEST_INLINE { at[Key] = keys.at[j + Key]; });
    VecF sum[R][kSquares] = {};
    for (int d = 0; d < dim; d += kStride) {
      fetch_share<kKeys>(next.at + j, d);
      each<kStride / Square::kValues>([&]<int Turn>() BEQUEST_INLINE {
        const int from = d + Turn * Square::kValues;
        Square squares[kSquares];
        each<kSquares>([&]<int S>() BEQUEST_INLINE { squares[S].read(at + S * kLanes, from); });
        each<Square::kValues / kLanes>([&]<int Part>() BEQUEST_INLINE {
          VecF factors[R];
          each<R>([&]<int Row>()
                      BEQUEST_INLINE { factors[Row] = load(q + Row * dim + from + Part * kLanes); });
          each<kLanes>([&]<int Lane>() BEQUEST_INLINE {
            each<kSquares>([&]<int S>() BEQUEST_INLINE {
              const VecF column = squares[S].template column<Part * kLanes + Lane>();
              each<R>([&]<int Row>()
                          BEQUEST_INLINE { add_product<Lane>(sum[Row][S], column, factors[Row]); });
            });
          });
        });
      });
    }
    each<R>([&]<int Row>() BEQUEST_INLINE {
      each<kSquares>([&]<int S>() BEQUEST_INLINE {
        store_vector(scores + Row * kKeyTile + j + S * kLanes, sum[Row][S]);
      });
    });
  }
}

// scores[rows, kKeyTile] = q[rows, D] · keysᵀ around `computed`. lanes: queries_as_lanes of q.
// REQUIRES: kStride divides D.
template <int R, class T>
void score_few(const float* q, const float* lanes, const KeyRows<T>& keys, const KeyRows<T>& next,
               KeyRange computed, int dim, float* scores) {
  if constexpr (R == 1 || (R == 2 && sizeof(T) == 2))
    score_by_squares<R>(q, keys, next, computed, dim, scores);
  else
    score_by_lanes<query_vectors(R)>(lanes, R, keys, next, computed, dim, scores);
}

#undef BEQUEST_INLINE

}  // namespace bequest::BEQUEST_ISA
