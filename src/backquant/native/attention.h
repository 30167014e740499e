// Attention on floats, from the queries to the integers that the next layer reads: one pass over each row of scores.
//
// softmax(q k' * scale + added) v, by head. With VNNI products are of whole numbers of 16 bits, and their sums exact:
// a row of queries or keys, a channel of values and a row of weights has a scale each, by its norm, so that no sum
// leaves 32 bits (Cauchy and Schwarz) and the result has an error of a few hundred-thousandths of the norms' product.
// Elsewhere products are of floats. A row of scores stays in the first-level cache between the two products.
#ifndef BACKQUANT_ATTENTION
#define BACKQUANT_ATTENTION
#include <cmath>
#include <memory>

#include "kernels.h"

namespace backquant {

constexpr int QUERIES = 6;  // at a time
// of keys, or of channels of the values, at a time: as many sums as registers hold beside what is multiplied
constexpr int REGISTERS = LANES == 8 ? 2 : 4;

// neighbours that one product adds up, 32 bits together
#if !defined(__aarch64__) && BACKQUANT_ORDER == BACKQUANT_BYTES
constexpr bool WHOLE = true;
constexpr int STEP = 2;
#else
constexpr bool WHOLE = false;
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

#if BACKQUANT_LANES == 16
BACKQUANT_INLINE Ints whole_product(Ints sums, Ints a, Ints b) {
#ifdef __AVX512VNNI__
  return _mm512_dpwssd_epi32(sums, a, b);
#else
  return sums;
#endif
}
BACKQUANT_INLINE Ints repeated(const int32_t* from) { return _mm512_set1_epi32(*from); }
#elif BACKQUANT_LANES == 8
BACKQUANT_INLINE Ints whole_product(Ints sums, Ints a, Ints b) {
#if defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sums, a, b);
#elif defined(__AVX512VNNI__)
  return _mm256_dpwssd_epi32(sums, a, b);
#else
  return sums;
#endif
}
BACKQUANT_INLINE Ints repeated(const int32_t* from) { return _mm256_set1_epi32(*from); }
#else
BACKQUANT_INLINE Ints whole_product(Ints sums, Ints, Ints) { return sums; }
BACKQUANT_INLINE Ints repeated(const int32_t* from) { return vld1q_dup_s32(from); }
#endif

// 32 bits of a row for all lanes times a register, added to sums: whole numbers, or floats.
BACKQUANT_INLINE Ints product(Ints sums, Ints a, const int32_t* b) {
  if (WHOLE) return whole_product(sums, a, load(b));
  return as_ints(multiply_add(as_floats(a), load((const float*)b), as_floats(sums)));
}

// LANES floats as units of 32 bits: two whole numbers together, or each by itself.
BACKQUANT_INLINE void narrow(Floats x, int32_t* to) {
#if BACKQUANT_LANES == 16
  if (WHOLE) return _mm256_storeu_si256((__m256i*)to, _mm512_cvtsepi32_epi16(to_ints(x)));
#elif BACKQUANT_LANES == 8
  if (WHOLE) {
    const Ints both = _mm256_packs_epi32(to_ints(x), zero());
    return _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(both, 0x08)));
  }
#endif
  store((float*)to, x);
}

// Two numbers of each lane as one unit.
BACKQUANT_INLINE void side_by_side(Floats low, Floats high, int32_t* to) {
  low = least(low, splat(32767.0f)), high = least(high, splat(32767.0f));
#if BACKQUANT_LANES == 16
  const Ints bits = _mm512_and_si512(to_ints(low), _mm512_set1_epi32(0xffff));
  _mm512_storeu_si512(to, _mm512_or_si512(bits, _mm512_slli_epi32(to_ints(high), 16)));
#elif BACKQUANT_LANES == 8
  const Ints bits = _mm256_and_si256(to_ints(low), _mm256_set1_epi32(0xffff));
  _mm256_storeu_si256((Ints*)to, _mm256_or_si256(bits, _mm256_slli_epi32(to_ints(high), 16)));
#else
  (void)low, (void)high, (void)to;
#endif
}

// The first `count` floats, and zeros behind them up to a whole register.
BACKQUANT_INLINE Floats load_floats(const float* from, int64_t count) {
  return count >= LANES ? load(from) : load_first(from, count);
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

// Sums of a product as floats.
BACKQUANT_INLINE Floats sums_at(const int32_t* from) {
  return WHOLE ? to_floats(load(from)) : load((const float*)from);
}

// A power of two, and its inverse.
struct Scale {
  float to, back;
};

// What numbers are multiplied by before they are rounded to 16 bits, by the sum of their squares (or more): their norm
// is up to 2**15 then, and not below 2**13.5. Norms beyond 2**64 are cut off.
static inline Scale scale_for(float squares) {
  if (!WHOLE) return {1.0f, 1.0f};
  int32_t bits;
  memcpy(&bits, &squares, 4);
  const int32_t shift = 15 - ((((bits >> 23) & 255) - 125) >> 1);
  const int32_t both[2] = {(127 + shift) << 23, (127 - shift) << 23};
  Scale found;
  memcpy(&found, both, 8);
  return found;
}

// Products of MR rows (`row` units apart) with NB * LANES columns; `next`: sums from one row of them to the next.
template <int MR, int NB>
BACKQUANT_APART static void multiply_rows(
    const int32_t* a, int64_t row, int64_t steps, const int32_t* b, int32_t* out, int64_t next) {
  Ints sums[MR][NB];
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NB; j++) sums[i][j] = zero();
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
    int64_t rows, const int32_t* a, int64_t row, int64_t steps, const int32_t* b, int64_t all, int32_t* out,
    int64_t next) {
  for (int64_t place = 0; place < all; place += REGISTERS) {
    const int64_t count = registers(all, place);
    const int32_t* own = b + place * steps * LANES;
    int32_t* to = out + place * LANES;
    if (rows == 1) {  // the last one of many; others are multiplied QUERIES at a time, whether they exist or not
      if (count == 4) multiply_rows<1, 4>(a, row, steps, own, to, next);
      else if (count == 3) multiply_rows<1, 3>(a, row, steps, own, to, next);
      else if (count == 2) multiply_rows<1, 2>(a, row, steps, own, to, next);
      else multiply_rows<1, 1>(a, row, steps, own, to, next);
    } else {
      if (count == 4) multiply_rows<QUERIES, 4>(a, row, steps, own, to, next);
      else if (count == 3) multiply_rows<QUERIES, 3>(a, row, steps, own, to, next);
      else if (count == 2) multiply_rows<QUERIES, 2>(a, row, steps, own, to, next);
      else multiply_rows<QUERIES, 1>(a, row, steps, own, to, next);
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

// One head's keys and values as the right side of a product, and the room for what is between.
struct Packed {
  int64_t units, key_registers, pairs, value_registers;  // units of 32 bits of a query; pairs of keys
  int32_t *keys, *values, *query, *weights, *scores, *sums;
  float *key_back, *value_to, *value_back;  // scales: see Scale

  static int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

  explicit Packed(const Attention& a) {
    units = rounded_up((a.deep + STEP - 1) / STEP, LANES);
    key_registers = (a.keys + LANES - 1) / LANES;
    pairs = (a.keys + STEP - 1) / STEP;
    value_registers = (a.wide + LANES - 1) / LANES;
    const int64_t row = key_registers * LANES, channels = value_registers * LANES;
    const int64_t sizes[] = {units * row, pairs * channels, QUERIES * units, QUERIES * row, QUERIES * row,
                             QUERIES * channels, row, channels, channels};
    int32_t** places[] = {&keys, &values, &query, &weights, &scores, &sums};
    float** floats[] = {&key_back, &value_to, &value_back};
    int64_t all = 16;
    for (int64_t size : sizes) all += rounded_up(size, 16);
    int32_t* room = kept(all);
    room += (16 - ((uintptr_t)room / 4) % 16) % 16;
    for (int i = 0; i < 9; i++, room += rounded_up(sizes[i - 1], 16))
      i < 6 ? (void)(*places[i] = room) : (void)(*floats[i - 6] = (float*)room);
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

  // A row as units; behind its end zeros. Returns what a product with it is multiplied by.
  static inline float narrow_row(const float* from, int64_t count, int32_t* to) {
    const Scale scale = row_scale(from, count);
    for (int64_t k = 0; k < count; k += LANES)
      narrow(multiply(load_floats(from + k, count - k), splat(scale.to)), to + k / STEP);
    return scale.back;
  }

  // [block of registers][unit of the depth][key of the block]
  BACKQUANT_APART void pack_keys(const Attention& a, const Heads& k, const float* from) {
    const int64_t deep = (a.deep + STEP - 1) / STEP;
    alignas(64) int32_t some[LANES][LANES];
    for (int64_t place = 0; place < key_registers; place++) {
      const int64_t block = place / REGISTERS * REGISTERS, wide = registers(key_registers, block) * LANES;
      int32_t* to = keys + block * LANES * deep + (place - block) * LANES;
      Scale scale[LANES];
      for (int64_t i = 0; i < LANES; i++) {
        scale[i] = place * LANES + i < a.keys ? row_scale(from + (place * LANES + i) * k.row, a.deep) : Scale{0.0f, 0.0f};
        key_back[place * LANES + i] = scale[i].back;
      }
      for (int64_t unit = 0; unit < deep; unit += LANES) {
        const int64_t left = a.deep - unit * STEP;
        for (int64_t i = 0; i < LANES; i++) {
          const int64_t key = place * LANES + i;
          for (int64_t part = 0; part < STEP; part++) {
            const int64_t first = part * LANES;
            const bool any = key < a.keys && first < left;
            const Floats x = any ? load_floats(from + key * k.row + unit * STEP + first, left - first) : splat(0.0f);
            narrow(multiply(x, splat(scale[i].to)), some[i] + first / STEP);
          }
        }
        columns(some, deep - unit, to + unit * wide, wide);
      }
    }
  }

  static inline Scale row_scale(const float* from, int64_t count) {
    if (!WHOLE) return {1.0f, 1.0f};
    Floats squares = splat(0.0f);
    for (int64_t k = 0; k < count; k += LANES) {
      const Floats x = load_floats(from + k, count - k);
      squares = multiply_add(x, x, squares);
    }
    return scale_for(total(squares));
  }

  // The first `count` columns of rows.
  static inline void columns(const int32_t (&rows)[LANES][LANES], int64_t count, int32_t* to, int64_t next) {
#if BACKQUANT_LANES == 16
    Ints x[16];
    for (int i = 0; i < 16; i++) x[i] = _mm512_load_si512(rows[i]);
    if (count >= LANES) return transpose(x, to, next);
    alignas(64) int32_t all[16 * 16];
    transpose(x, all, 16);
    for (int64_t u = 0; u < count; u++) memcpy(to + u * next, all + u * 16, 64);
#else
    for (int64_t u = 0; u < (count < LANES ? count : LANES); u++)
      for (int64_t i = 0; i < LANES; i++) to[u * next + i] = rows[i][u];
#endif
  }

  // [block of registers][unit of the keys][channel of the block]
  BACKQUANT_APART void pack_values(const Attention& a, const Heads& v, const float* from) {
    for (int64_t place = 0; place < value_registers; place++) {
      const int64_t block = place / REGISTERS * REGISTERS, wide = registers(value_registers, block) * LANES;
      int32_t* to = values + block * LANES * pairs + (place - block) * LANES;
      const int64_t left = a.wide - place * LANES;
      const float* column = from + place * LANES;
      float *scale = value_to + place * LANES, *back = value_back + place * LANES;
      Floats squares = splat(0.0f);
      if (WHOLE)
        for (int64_t key = 0; key < a.keys; key++) {
          const Floats x = load_floats(column + key * v.row, left);
          squares = multiply_add(x, x, squares);
        }
      store(scale, squares);
      for (int i = 0; i < LANES; i++) {
        const Scale found = scale_for(scale[i]);
        scale[i] = found.to, back[i] = found.back;
      }
      const Floats factor = load(scale);
      for (int64_t pair = 0; pair < pairs; pair++) {
        const float* row = column + pair * STEP * v.row;
        const Floats first = multiply(load_floats(row, left), factor);
        if (WHOLE) {
          const bool both = pair * STEP + 1 < a.keys;
          side_by_side(first, both ? multiply(load_floats(row + v.row, left), factor) : splat(0.0f), to + pair * wide);
        } else {
          store((float*)(to + pair * wide), first);
        }
      }
    }
  }
};

// Up to QUERIES rows of sums that become weights: what they are multiplied by, and what is added. In the end `factor`
// is what a product with the weights is multiplied by.
struct Rows {
  int64_t count, width;  // registers times lanes of a row
  const float* key_back;
  float factor[QUERIES];
  const float* added[QUERIES][2];
};

// One register of scores.
template <int ADDED, bool STEPS>
BACKQUANT_INLINE Floats scores_at(
    const int32_t* sums, const Attention& a, const Rows& rows, int64_t row, int64_t k, int64_t count) {
  Floats v = sums_at(sums + k), plus[ADDED + 1];
  const float factor = rows.factor[row];
#pragma GCC unroll 2
  for (int i = 0; i < ADDED; i++) {
    const float* from = rows.added[row][i] + k;
    plus[i] = count == LANES ? load(from) : load_floats(from, count);
  }
  if (WHOLE) v = multiply(v, load(rows.key_back + k));
  if (STEPS) {
    v = rounded(multiply(v, splat(factor / a.step)));
    v = multiply(least(most(v, splat(a.low)), splat(a.high)), splat(a.step));
    if (ADDED) v = add(v, plus[0]);
  } else {
    v = ADDED ? multiply_add(v, splat(factor), plus[0]) : multiply(v, splat(factor));
  }
  if (ADDED > 1) v = add(v, plus[ADDED - 1]);
  return count == LANES ? v : before(v, count);
}

constexpr float LOG2E = 1.44269504088896341f;

// Rows from `begin` to `end`, step by step, so that rows do not wait for each other's largest score and sum.
template <int ADDED, bool STEPS>
BACKQUANT_APART static void softmax_rows(
    int32_t* sums, const Attention& a, Rows& rows, int64_t begin, int64_t end, int32_t* weights) {
  const int64_t whole = a.keys / LANES * LANES, rest = a.keys - whole, next = rows.width;
  float* scores = (float*)sums;
  float shift[QUERIES], back[QUERIES];
  for (int64_t i = begin; i < end; i++) {
    Floats high = splat(-INFINITY);
    for (int64_t k = 0; k < whole; k += LANES) {
      const Floats v = scores_at<ADDED, STEPS>(sums + i * next, a, rows, i, k, LANES);
      store(scores + i * next + k, v);
      high = most(high, v);
    }
    if (rest) {
      const Floats v = scores_at<ADDED, STEPS>(sums + i * next, a, rows, i, whole, rest);
      store(scores + i * next + whole, v);
      high = most(high, v);
    }
    const float peak = largest(high);
    shift[i] = peak == -INFINITY ? 0.0f : -peak * LOG2E;
    back[i] = peak == -INFINITY ? 0.0f : 1.0f;  // no key at all: zeros
  }
  for (int64_t i = begin; i < end; i++) {
    Floats sum = splat(0.0f);
    for (int64_t k = 0; k < next; k += LANES) {
      float* at = scores + i * next + k;
      const Floats p = power_of_two(multiply_add(load(at), splat(LOG2E), splat(shift[i])));
      sum = add(sum, p);
      store(at, p);
    }
    rows.factor[i] = total(sum);
  }
  for (int64_t i = begin; i < end; i++) {
    const Scale scale = scale_for(rows.factor[i]);  // weights are up to 1: the sum of their squares is no more
    for (int64_t k = 0; k < next; k += LANES)
      narrow(multiply(load(scores + i * next + k), splat(scale.to)), weights + (i * next + k) / STEP);
    rows.factor[i] = back[i] * scale.back / rows.factor[i];
  }
}

constexpr int64_t SHORT = 512;  // keys of rows that the first-level cache holds together

template <int ADDED>
static void softmax(int32_t* sums, const Attention& a, Rows& rows, int32_t* weights) {
  const int64_t together = rows.width <= SHORT ? QUERIES : 1;
  for (int64_t i = 0; i < rows.count; i += together) {
    const int64_t end = i + together < rows.count ? i + together : rows.count;
    if (a.step)
      softmax_rows<ADDED, true>(sums, a, rows, i, end, weights);
    else
      softmax_rows<ADDED, false>(sums, a, rows, i, end, weights);
  }
}

// One row of a result.
BACKQUANT_INLINE void finish_row(
    const int32_t* sums, const Attention& a, float factor, const float* value_back, uint8_t* out) {
  const Floats scale = splat(factor * a.out_scale), shift = splat(a.out_shift);
  for (int64_t e = 0; e < a.wide; e += LANES) {
    const Floats v = WHOLE ? multiply(sums_at(sums + e), load(value_back + e)) : sums_at(sums + e);
    store_narrow(out + e, to_ints(multiply_add(v, scale, shift)), a.wide - e < LANES ? a.wide - e : LANES);
  }
}

constexpr int64_t AHEAD = 128;  // rows that are asked for before they are read; of more, the CPU finds the step itself

static inline void ask_for(const float* rows, int64_t count, int64_t next, int64_t length) {
  for (int64_t i = 0; i < (count < AHEAD ? count : AHEAD); i++)
    for (int64_t k = 0; k < length; k += 16) __builtin_prefetch(rows + i * next + k);
}

// Queries from `begin` to `end` of one head of one batch; out: [batch, queries, heads, wide].
template <int ADDED>
BACKQUANT_APART static void attend_head(
    const Attention& a, const Heads& q, const Heads& k, const Heads& v, const Added* added, int64_t batch, int64_t head,
    int64_t begin, int64_t end, uint8_t* out) {
  Packed packed(a);
  const float *from = q.data + batch * q.batch + head * q.head, *own_keys = k.data + batch * k.batch + head * k.head;
  const float* own_values = v.data + batch * v.batch + head * v.head;
  ask_for(own_keys, a.keys, k.row, a.deep);
  ask_for(own_values, a.keys, v.row, a.wide);
  packed.pack_keys(a, k, own_keys);
  ask_for(from + begin * q.row, end - begin, q.row, a.deep);
  packed.pack_values(a, v, own_values);
  const int64_t width = packed.key_registers * LANES, channels = packed.value_registers * LANES;
  const int64_t deep = (a.deep + STEP - 1) / STEP;
  const float* plus[2] = {nullptr, nullptr};
  for (int j = 0; j < ADDED; j++)
    plus[j] = added[j].data + batch % added[j].batches * added[j].batch + head * added[j].head;
  for (int64_t first = begin; first < end; first += QUERIES) {
    Rows rows{end - first < QUERIES ? end - first : QUERIES, width, packed.key_back, {}, {}};
    for (int64_t i = 0; i < rows.count; i++) {
      const float back = Packed::narrow_row(from + (first + i) * q.row, a.deep, packed.query + i * packed.units);
      rows.factor[i] = back * a.scale;
      for (int j = 0; j < ADDED; j++) rows.added[i][j] = plus[j] + (first + i) * added[j].row;
    }
    multiply_block(
        rows.count, packed.query, packed.units, deep, packed.keys, packed.key_registers, packed.scores, width);
    softmax<ADDED>(packed.scores, a, rows, packed.weights);
    multiply_block(
        rows.count, packed.weights, width / STEP, packed.pairs, packed.values, packed.value_registers, packed.sums,
        channels);
    uint8_t* to = out + ((batch * a.queries + first) * a.heads + head) * a.wide;
    for (int64_t i = 0; i < rows.count; i++, to += a.heads * a.wide)
      finish_row(packed.sums + i * channels, a, rows.factor[i], packed.value_back, to);
  }
}

template <int ADDED>
static void attend(
    const Attention& a, const Heads& q, const Heads& k, const Heads& v, const Added* added, uint8_t* out) {
#ifdef BACKQUANT_THREADS
#pragma omp parallel for
#endif
  for (int64_t place = 0; place < a.batch * a.heads; place++)
    attend_head<ADDED>(a, q, k, v, added, place / a.heads, place % a.heads, 0, a.queries, out);
}

}  // namespace backquant

#endif
