// Attention on floats, from the queries to the integers that the next layer reads: one pass over each row of scores.
//
// softmax(q k' * scale + added) v, by head. Products are of bfloat16 where the CPU multiplies those (AVX512_BF16; sums
// are floats), else of floats; a row of scores stays in the first-level cache between the two products.
#ifndef BACKQUANT_ATTENTION
#define BACKQUANT_ATTENTION
#include <cmath>
#include <memory>

#include "kernels.h"

namespace backquant {

constexpr int ROWS = 6;       // queries at a time
constexpr int REGISTERS = 4;  // of keys, or of channels of the values, at a time

#if defined(__AVX512BF16__) && BACKQUANT_LANES == 16
constexpr int STEP = 2;  // neighbours that one product adds up, 32 bits together
#else
constexpr int STEP = 1;
#endif

// A float tensor [batch, heads, rows, channels], channels side by side; the other strides are in numbers.
struct Heads {
  const float* data;
  int64_t batch, head, row;
};

// What is added to the scores: [batches, heads, queries, keys], keys side by side; a batch is counted modulo
// `batches`, and a stride of 0 repeats.
struct Added {
  const float* data;
  int64_t batches, batch, head, row;
};

// deep: channels of queries and keys, wide: of values.
struct Attention {
  int64_t batch, heads, queries, keys, deep, wide;
  float scale;
  // scores are rounded to integers of this step before anything is added; 0: they are not
  float step, low, high;
  float out_scale, out_shift;
};

// The left side of a product, the sums of which are floats: 32 bits of a row for all lanes.
BACKQUANT_INLINE Floats product(Floats sums, Ints a, const int32_t* b) {
#if defined(__AVX512BF16__) && BACKQUANT_LANES == 16
  return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)_mm512_loadu_si512(b));
#else
  return multiply_add(as_floats(a), load((const float*)b), sums);
#endif
}

// 32 bits for all lanes
BACKQUANT_INLINE Ints repeated(const int32_t* from) {
#if BACKQUANT_LANES == 16
  return _mm512_set1_epi32(*from);
#else
  return _mm256_set1_epi32(*from);
#endif
}

// LANES floats as units of 32 bits: two of bfloat16 together, or each by itself.
BACKQUANT_INLINE void narrow(Floats x, int32_t* to) {
#if defined(__AVX512BF16__) && BACKQUANT_LANES == 16
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x));
#else
  store((float*)to, x);
#endif
}

// The first `count` floats, and zeros behind them up to a whole register.
BACKQUANT_INLINE Floats load_floats(const float* from, int64_t count) {
#if BACKQUANT_LANES == 16
  return _mm512_maskz_loadu_ps((__mmask16)(count >= 16 ? 0xffff : (1 << count) - 1), from);
#else
  alignas(32) float some[LANES] = {0};
  memcpy(some, from, sizeof(float) * (count < LANES ? count : LANES));
  return load(some);
#endif
}

// The first `count` lanes; minus infinity in the others.
BACKQUANT_INLINE Floats before(Floats x, int64_t count) {
#if BACKQUANT_LANES == 16
  return _mm512_mask_mov_ps(splat(-INFINITY), (__mmask16)((1 << count) - 1), x);
#else
  alignas(32) float some[LANES];
  store(some, x);
  for (int64_t i = count; i < LANES; i++) some[i] = -INFINITY;
  return load(some);
#endif
}

BACKQUANT_INLINE float largest(Floats x) {
#if BACKQUANT_LANES == 16
  return _mm512_reduce_max_ps(x);
#else
  alignas(32) float some[LANES];
  store(some, x);
  float found = some[0];
  for (int i = 1; i < LANES; i++) found = some[i] > found ? some[i] : found;
  return found;
#endif
}

BACKQUANT_INLINE float total(Floats x) {
#if BACKQUANT_LANES == 16
  return _mm512_reduce_add_ps(x);
#else
  alignas(32) float some[LANES];
  store(some, x);
  float found = 0;
  for (int i = 0; i < LANES; i++) found += some[i];
  return found;
#endif
}

// 2**x for x up to 0, relative error below 5e-6; 2**-126 at least.
BACKQUANT_INLINE Floats power_of_two(Floats x) {
  x = most(x, splat(-126.0f));
  const Floats whole = rounded(x);
  const Floats f = subtract(x, whole);
  Floats p = splat(9.6181291e-3f);
  p = multiply_add(p, f, splat(5.5504109e-2f));
  p = multiply_add(p, f, splat(2.4022651e-1f));
  p = multiply_add(p, f, splat(6.9314718e-1f));
  p = multiply_add(p, f, splat(1.0f));
  return times_power(p, whole);
}

// Products of MR rows (`row` units apart) with NB * LANES columns; `next`: floats from one row of sums to the next.
template <int MR, int NB>
BACKQUANT_APART static void multiply_rows(
    const int32_t* a, int64_t row, int64_t steps, const int32_t* b, float* out, int64_t next) {
  Floats sums[MR][NB];
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NB; j++) sums[i][j] = splat(0.0f);
  for (int64_t k = 0; k < steps; k++, b += NB * LANES)
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
      const Ints each = repeated(a + i * row + k);
#pragma GCC unroll 4
      for (int j = 0; j < NB; j++) sums[i][j] = product(sums[i][j], each, b + j * LANES);
    }
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NB; j++) store(out + i * next + j * LANES, sums[i][j]);
}

// How many registers there are from `place` of `all` on, at most REGISTERS.
static inline int64_t registers(int64_t all, int64_t place) { return all - place < REGISTERS ? all - place : REGISTERS; }

// All columns: `all` registers of them, packed in blocks of up to REGISTERS.
static inline void multiply_block(
    int64_t rows, const int32_t* a, int64_t row, int64_t steps, const int32_t* b, int64_t all, float* out,
    int64_t next) {
  for (int64_t place = 0; place < all; place += REGISTERS) {
    const int64_t count = registers(all, place);
    const int32_t* own = b + place * steps * LANES;
    float* to = out + place * LANES;
    if (rows == 1) {  // the last one of many; others are multiplied ROWS at a time, whether they exist or not
      if (count == 4) multiply_rows<1, 4>(a, row, steps, own, to, next);
      else if (count == 3) multiply_rows<1, 3>(a, row, steps, own, to, next);
      else if (count == 2) multiply_rows<1, 2>(a, row, steps, own, to, next);
      else multiply_rows<1, 1>(a, row, steps, own, to, next);
    } else {
      if (count == 4) multiply_rows<ROWS, 4>(a, row, steps, own, to, next);
      else if (count == 3) multiply_rows<ROWS, 3>(a, row, steps, own, to, next);
      else if (count == 2) multiply_rows<ROWS, 2>(a, row, steps, own, to, next);
      else multiply_rows<ROWS, 1>(a, row, steps, own, to, next);
    }
  }
}

// Sixteen rows of sixteen units of 32 bits become sixteen columns.
#if BACKQUANT_LANES == 16
BACKQUANT_INLINE void transpose(const Ints (&x)[16], int32_t* to, int64_t next) {
  Ints a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    a[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {  // b[4 * r + i] has the columns i, 4 + i, 8 + i, 12 + i of the rows 4 * r ...
    const Ints c = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x44), d = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x44);
    const Ints e = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xee), f = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xee);
    _mm512_storeu_si512(to + i * next, _mm512_shuffle_i32x4(c, d, 0x88));
    _mm512_storeu_si512(to + (4 + i) * next, _mm512_shuffle_i32x4(c, d, 0xdd));
    _mm512_storeu_si512(to + (8 + i) * next, _mm512_shuffle_i32x4(e, f, 0x88));
    _mm512_storeu_si512(to + (12 + i) * next, _mm512_shuffle_i32x4(e, f, 0xdd));
  }
}
#endif

// One head's keys, or values, as the right side of a product; and the room for what is between.
struct Packed {
  int64_t units, key_registers, pairs, value_registers;  // units of 32 bits of a query; pairs of keys
  int32_t *keys, *values, *query, *weights;
  float *scores, *sums;

  static int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

  explicit Packed(const Attention& a) {
    units = rounded_up((a.deep + STEP - 1) / STEP, LANES);
    key_registers = (a.keys + LANES - 1) / LANES;
    pairs = (a.keys + STEP - 1) / STEP;
    value_registers = (a.wide + LANES - 1) / LANES;
    const int64_t sizes[] = {
        units * key_registers * LANES, pairs * value_registers * LANES, ROWS * units, ROWS * key_registers * LANES,
        ROWS * key_registers * LANES, ROWS * value_registers * LANES};
    int64_t all = 16;
    for (int64_t size : sizes) all += rounded_up(size, 16);
    int32_t* room = kept(all);
    room += (16 - ((uintptr_t)room / 4) % 16) % 16;
    keys = room, room += rounded_up(sizes[0], 16);
    values = room, room += rounded_up(sizes[1], 16);
    query = room, room += rounded_up(sizes[2], 16);
    weights = room, room += rounded_up(sizes[3], 16);
    scores = (float*)room, room += rounded_up(sizes[4], 16);
    sums = (float*)room;
  }

  // Kept from call to call.
  static int32_t* kept(int64_t size) {
    static thread_local std::unique_ptr<int32_t[]> room;
    static thread_local int64_t known = 0;
    if (size > known) {
      room.reset(new int32_t[size]);
      known = size;
    }
    return room.get();
  }

  // A row as units; behind its end zeros.
  static inline void narrow_row(const float* from, int64_t count, int32_t* to) {
    for (int64_t k = 0; k < count; k += LANES) narrow(load_floats(from + k, count - k), to + k / STEP);
  }

  // [block of registers][unit of the depth][key of the block]
  BACKQUANT_APART void pack_keys(const Attention& a, const Heads& k, const float* from) {
    const int64_t deep = (a.deep + STEP - 1) / STEP;
    alignas(64) int32_t rows[LANES][LANES];
    for (int64_t place = 0; place < key_registers; place++) {
      const int64_t block = place / REGISTERS * REGISTERS, wide = registers(key_registers, block) * LANES;
      int32_t* to = keys + block * LANES * deep + (place - block) * LANES;
      for (int64_t unit = 0; unit < deep; unit += LANES) {
        const int64_t left = a.deep - unit * STEP, some = left < LANES * STEP ? left : LANES * STEP;
        for (int64_t i = 0; i < LANES; i++) {
          const int64_t key = place * LANES + i;
          for (int64_t part = 0; part < STEP; part++) {
            const int64_t first = part * LANES;
            const bool any = key < a.keys && first < some;
            const Floats x = any ? load_floats(from + key * k.row + unit * STEP + first, some - first) : splat(0.0f);
            narrow(x, rows[i] + first / STEP);
          }
        }
        const int64_t count = deep - unit < LANES ? deep - unit : LANES;
#if BACKQUANT_LANES == 16
        Ints x[16];
        for (int i = 0; i < 16; i++) x[i] = _mm512_load_si512(rows[i]);
        if (count == LANES) {
          transpose(x, to + unit * wide, wide);
          continue;
        }
        alignas(64) int32_t columns[16 * 16];
        transpose(x, columns, 16);
        for (int64_t u = 0; u < count; u++) memcpy(to + (unit + u) * wide, columns + u * 16, 64);
#else
        for (int64_t u = 0; u < count; u++)
          for (int64_t i = 0; i < LANES; i++) to[(unit + u) * wide + i] = rows[i][u];
#endif
      }
    }
  }

  // [block of registers][unit of the keys][channel of the block]
  BACKQUANT_APART void pack_values(const Attention& a, const Heads& v, const float* from) {
    for (int64_t place = 0; place < value_registers; place++) {
      const int64_t block = place / REGISTERS * REGISTERS, wide = registers(value_registers, block) * LANES;
      int32_t* to = values + block * LANES * pairs + (place - block) * LANES;
      const int64_t left = a.wide - place * LANES;
      for (int64_t pair = 0; pair < pairs; pair++) {
        const float* row = from + pair * STEP * v.row + place * LANES;
#if defined(__AVX512BF16__) && BACKQUANT_LANES == 16
        const bool both = pair * STEP + 1 < a.keys;
        const Ints even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(load_floats(row, left)));
        const Floats second = both ? load_floats(row + v.row, left) : splat(0.0f);
        const Ints odd = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second));
        _mm512_storeu_si512(to + pair * wide, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
#else
        store((float*)(to + pair * wide), load_floats(row, left));
#endif
      }
    }
  }
};

// A row of scores becomes weights, without their common factor, which is given back.
template <int ADDED>
BACKQUANT_APART static float softmax_row(
    float* scores, const Attention& a, const float* const* added, int32_t* weights) {
  const Floats scale = splat(a.scale), step = splat(a.step), inverse = splat(a.step ? 1.0f / a.step : 0.0f);
  Floats high = splat(-INFINITY);
  int64_t k = 0;
  for (; k < a.keys; k += LANES) {
    Floats v = multiply(load(scores + k), scale);
    if (a.step) {
      v = least(most(rounded(multiply(v, inverse)), splat(a.low)), splat(a.high));
      v = multiply(v, step);
    }
#pragma GCC unroll 2
    for (int i = 0; i < ADDED; i++)
      v = add(v, k + LANES <= a.keys ? load(added[i] + k) : load_floats(added[i] + k, a.keys - k));
    if (k + LANES > a.keys) v = before(v, a.keys - k);
    store(scores + k, v);
    high = most(high, v);
  }
  const float peak = largest(high);
  const Floats log2e = splat(1.44269504088896341f);
  const Floats shift = splat(peak == -INFINITY ? 0.0f : -peak * 1.44269504088896341f);
  Floats sum = splat(0.0f);
  for (k = 0; k < a.keys; k += LANES) {
    const Floats p = power_of_two(multiply_add(load(scores + k), log2e, shift));
    sum = add(sum, p);
    narrow(p, weights + k / STEP);
  }
  return peak == -INFINITY ? 0.0f : 1.0f / total(sum);  // no key at all: zeros
}

// One row of a result.
BACKQUANT_INLINE void finish_row(const float* sums, const Attention& a, float factor, uint8_t* out) {
  const Floats scale = splat(factor * a.out_scale), shift = splat(a.out_shift);
  for (int64_t e = 0; e < a.wide; e += LANES) {
    const Ints x = to_ints(multiply_add(load(sums + e), scale, shift));
    const Bytes bytes = by_register(narrowed(x, x, x, x));
    if (a.wide - e >= LANES)
      memcpy(out + e, &bytes, LANES);
    else
      store_first(out + e, bytes, a.wide - e);
  }
}

// All queries of one head of one batch; out: [batch, queries, heads, wide].
template <int ADDED>
BACKQUANT_APART static void attend_head(
    const Attention& a, const Heads& q, const Heads& k, const Heads& v, const Added* added, int64_t batch, int64_t head,
    uint8_t* out) {
  Packed packed(a);
  packed.pack_keys(a, k, k.data + batch * k.batch + head * k.head);
  packed.pack_values(a, v, v.data + batch * v.batch + head * v.head);
  const float* from = q.data + batch * q.batch + head * q.head;
  const int64_t width = packed.key_registers * LANES, row = width / STEP, channels = packed.value_registers * LANES;
  const int64_t deep = (a.deep + STEP - 1) / STEP;
  for (int64_t first = 0; first < a.queries; first += ROWS) {
    const int64_t left = a.queries - first, rows = left < ROWS ? left : ROWS;
    for (int64_t i = 0; i < rows; i++)
      Packed::narrow_row(from + (first + i) * q.row, a.deep, packed.query + i * packed.units);
    multiply_block(
        rows, packed.query, packed.units, deep, packed.keys, packed.key_registers, packed.scores, width);
    float factors[ROWS];
    for (int64_t i = 0; i < rows; i++) {
      const float* plus[2] = {nullptr, nullptr};
      for (int j = 0; j < ADDED; j++)
        plus[j] = added[j].data + batch % added[j].batches * added[j].batch + head * added[j].head +
                  (first + i) * added[j].row;
      factors[i] = softmax_row<ADDED>(packed.scores + i * width, a, plus, packed.weights + i * row);
    }
    multiply_block(
        rows, packed.weights, row, packed.pairs, packed.values, packed.value_registers, packed.sums, channels);
    for (int64_t i = 0; i < rows; i++)
      finish_row(
          packed.sums + i * channels, a, factors[i],
          out + ((batch * a.queries + first + i) * a.heads + head) * a.wide);
  }
}

template <int ADDED>
static void attend(
    const Attention& a, const Heads& q, const Heads& k, const Heads& v, const Added* added, uint8_t* out) {
#ifdef BACKQUANT_THREADS
#pragma omp parallel for
#endif
  for (int64_t place = 0; place < a.batch * a.heads; place++)
    attend_head<ADDED>(a, q, k, v, added, place / a.heads, place % a.heads, out);
}

}  // namespace backquant

#endif
