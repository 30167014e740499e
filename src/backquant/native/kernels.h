// Convolutions and linear layers on 8-bit integers for CPUs with AVX-512 VNNI.
//
// Activations are uint8 [batch, height, width, channels]; weights int8, packed beforehand. Sums are exact in
// 32 bits; they become floats as sum * scale + shift, where shift makes up for the zero point of the input.
#ifndef BACKQUANT_KERNELS
#define BACKQUANT_KERNELS
#include <immintrin.h>

#include <cstdint>
#include <cstring>

// Sizes stay variables within: as constants they lead GCC to unroll until the sums do not fit in registers.
#if defined(__GNUC__) && !defined(__clang__)
#define BACKQUANT_APART __attribute__((noipa))
#else
#define BACKQUANT_APART __attribute__((noinline))
#endif

namespace backquant {

enum Activation { NONE, CLAMP, SWISH, HARDSWISH, GELU, GELU_TANH, TANH, LEAKY };

constexpr int MAX_TAPS = 64;  // of a kernel
constexpr int RUNS = 8;       // of a kernel whose rows are read as one

// How sums become results. scale, shift: by channel. NONE, CLAMP: they give the result's own integers (or floats),
// the latter clamped to low and high. Else: values, then the activation, then * out_scale + out_shift.
struct Epilogue {
  const float* scale;
  const float* shift;
  const uint8_t* other;  // added: other * other_scale (its shift is in shift)
  float other_scale;
  float low, high;
  float out_scale, out_shift;
  float alpha;
  // by channel, may be missing: what the zero point of the input adds to the sums, where that has to be exact
  const int32_t* correction = nullptr;
};

// Input [n, h, w, c] and output [n, oh, ow, oc]. run: how many integers in a row one tap of the kernel reads
// (c, or c times the kernel's width, which is then 1 here). outside: what is read beyond the borders: a row of
// the input (w * c), and 64 more.
struct Geometry {
  int64_t n, h, w, c, oh, ow, oc, run;
  int64_t kh, kw, sh, sw, ph, pw, dh, dw;
  const uint8_t* outside;
};

static inline __m512 exp512(__m512 x) {
  // 2**(x / ln 2): a power series for the part between -1/2 and 1/2, relative error below 3e-7
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.3f)), _mm512_set1_ps(88.3f));
  const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
  const __m512 whole = _mm512_roundscale_ps(t, 8);
  const __m512 f = _mm512_sub_ps(t, whole);
  __m512 p = _mm512_set1_ps(1.5403530e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3333558e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, whole);
}

static inline __m512 sigmoid512(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 d = _mm512_add_ps(one, exp512(_mm512_sub_ps(_mm512_setzero_ps(), x)));
  const __m512 r = _mm512_rcp14_ps(d);
  return _mm512_mul_ps(r, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(2.0f)));
}

static inline __m512 erf512(__m512 x) {
  // Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7
  const __m512 magnitude = _mm512_abs_ps(x);
  const __m512 d = _mm512_fmadd_ps(magnitude, _mm512_set1_ps(0.3275911f), _mm512_set1_ps(1.0f));
  __m512 t = _mm512_rcp14_ps(d);
  t = _mm512_mul_ps(t, _mm512_fnmadd_ps(d, t, _mm512_set1_ps(2.0f)));
  __m512 p = _mm512_set1_ps(1.061405429f);
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-1.453152027f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.421413741f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.284496736f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.254829592f));
  p = _mm512_mul_ps(p, t);
  const __m512 e = exp512(_mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), x), x));
  const __m512 y = _mm512_fnmadd_ps(p, e, _mm512_set1_ps(1.0f));
  const __m512i sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x80000000));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(y), sign));
}

template <int ACT>
static inline __m512 activated(__m512 v, const Epilogue& e) {
  const __m512 half = _mm512_set1_ps(0.5f);
  if constexpr (ACT == SWISH) {
    return _mm512_mul_ps(v, sigmoid512(v));
  } else if constexpr (ACT == HARDSWISH) {
    __m512 gate = _mm512_fmadd_ps(v, _mm512_set1_ps(1.0f / 6.0f), half);
    gate = _mm512_min_ps(_mm512_max_ps(gate, _mm512_setzero_ps()), _mm512_set1_ps(1.0f));
    return _mm512_mul_ps(v, gate);
  } else if constexpr (ACT == GELU) {
    const __m512 s = erf512(_mm512_mul_ps(v, _mm512_set1_ps(0.70710678118654752f)));
    return _mm512_mul_ps(_mm512_mul_ps(v, half), _mm512_add_ps(s, _mm512_set1_ps(1.0f)));
  } else if constexpr (ACT == GELU_TANH || ACT == TANH) {
    __m512 u = v;
    if constexpr (ACT == GELU_TANH) {
      const __m512 cube = _mm512_fmadd_ps(_mm512_mul_ps(v, v), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
      u = _mm512_mul_ps(_mm512_mul_ps(v, cube), _mm512_set1_ps(0.79788456080286536f));
    }
    const __m512 s = sigmoid512(_mm512_add_ps(u, u));
    if constexpr (ACT == GELU_TANH) return _mm512_mul_ps(v, s);
    return _mm512_fmsub_ps(s, _mm512_set1_ps(2.0f), _mm512_set1_ps(1.0f));
  } else if constexpr (ACT == LEAKY) {
    const __m512 low = _mm512_mul_ps(v, _mm512_set1_ps(e.alpha));
    return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_LT_OS), low);
  }
  return v;
}

template <int ACT>
static inline __m512 finished(__m512 v, const Epilogue& e) {
  if constexpr (ACT == NONE) return v;
  if constexpr (ACT == CLAMP)
    return _mm512_min_ps(_mm512_max_ps(v, _mm512_set1_ps(e.low)), _mm512_set1_ps(e.high));
  return _mm512_fmadd_ps(activated<ACT>(v, e), _mm512_set1_ps(e.out_scale), _mm512_set1_ps(e.out_shift));
}

// The sums of 16 channels without the correction.
static inline __m512i corrected(__m512i sums, const Epilogue& e, int64_t channel) {
  return e.correction ? _mm512_sub_epi32(sums, _mm512_loadu_si512(e.correction + channel)) : sums;
}

// The first `count` bytes of 16.
template <int COUNT>
static inline void store_bytes(uint8_t* to, __m128i v) {
  if constexpr (COUNT >= 16) {
    _mm_storeu_si128((__m128i*)to, v);
  } else {
    alignas(16) uint8_t bytes[16];
    _mm_store_si128((__m128i*)bytes, v);
    memcpy(to, bytes, COUNT);
  }
}

// 16 integers as bytes, saturated
static inline __m128i as_bytes(__m512i v) {
  return _mm512_cvtusepi32_epi8(_mm512_max_epi32(v, _mm512_setzero_si512()));
}

template <int COUNT>
static inline __m512 load_other(const uint8_t* from) {
  __m128i bytes;
  if constexpr (COUNT >= 16) {
    bytes = _mm_loadu_si128((const __m128i*)from);
  } else {
    alignas(16) uint8_t some[16] = {0};
    memcpy(some, from, COUNT);
    bytes = _mm_load_si128((const __m128i*)some);
  }
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}

// The last one to three integers.
static inline int32_t rest(const uint8_t* from, int64_t count) {
  if (count == 1) return from[0];
  return from[0] | from[1] << 8 | (count == 3 ? from[2] << 16 : 0);
}

// A row of the kernel that is partly beyond the border, put together in `edge`.
static inline const uint8_t* at_edge(uint8_t* edge, const uint8_t* row, const Geometry& g, int64_t column) {
  const int64_t end = column + g.run / g.c;
  const int64_t first = column < 0 ? 0 : column, last = end > g.w ? g.w : end;
  memcpy(edge, g.outside, g.run);
  if (first < last) memcpy(edge + (first - column) * g.c, row + first * g.c, (last - first) * g.c);
  return edge;
}

// What one tap reads for one output pixel.
static inline const uint8_t* pixel(const uint8_t* x, const Geometry& g, int64_t place, int64_t tap, uint8_t* edge) {
  const int64_t width = g.run / g.c, line = place / g.ow;
  const int64_t r = line % g.oh * g.sh - g.ph + tap / g.kw * g.dh;
  const int64_t c = place % g.ow * g.sw - g.pw + tap % g.kw * g.dw;
  if ((uint64_t)r >= (uint64_t)g.h) return g.outside;
  const uint8_t* row = x + ((line / g.oh) * g.h + r) * g.w * g.c;
  if (c >= 0 && c + width <= g.w) return row + c * g.c;
  return width == 1 ? g.outside : at_edge(edge, row, g, c);
}

// What each tap reads for `count` output pixels from `first` on, of which only some exist: the last one stands for
// the others. Whether three bytes more may be read behind each row.
static inline __attribute__((always_inline)) bool addresses(
    const uint8_t* x, const Geometry& g, int64_t first, int64_t pixels, int64_t count, const uint8_t** rows,
    uint8_t (*edge)[256]) {
  const uint8_t* beyond = x + g.n * g.h * g.w * g.c;
  const int64_t width = g.run / g.c, taps = g.kh * g.kw;  // width: of the kernel, where its row is read as one
  if (taps * width * g.sh * g.sw == 1 && g.ph + g.pw == 0) {
    for (int64_t i = 0; i < count; i++) rows[i] = x + (first + (i < pixels ? i : pixels - 1)) * g.c;
    return rows[count - 1] + g.run + 3 <= beyond;
  }
  const int64_t column = first % g.ow, line = first / g.ow;
  const int64_t top = line % g.oh * g.sh - g.ph, left = column * g.sw - g.pw;
  const int64_t reach = left + (count - 1) * g.sw + (g.kw - 1) * g.dw + width;
  // most tiles lie in one row, and within the borders to its sides
  if (column + count <= g.ow && pixels == count && left >= 0 && reach <= g.w) {
    const uint8_t* image = x + line / g.oh * g.h * g.w * g.c;
    const int64_t next = g.sw * g.c;
    for (int64_t tap = 0; tap < taps; tap++) {
      const int64_t r = top + tap / g.kw * g.dh;
      const bool inside = (uint64_t)r < (uint64_t)g.h;
      const uint8_t* start = inside ? image + (r * g.w + left + tap % g.kw * g.dw) * g.c : g.outside;
      for (int64_t i = 0; i < count; i++) rows[tap * count + i] = start + (inside ? i * next : 0);
    }
  } else {
    for (int64_t tap = 0; tap < taps; tap++)
      for (int64_t i = 0; i < count; i++)
        rows[tap * count + i] =
            pixel(x, g, first + (i < pixels ? i : pixels - 1), tap, edge[width == 1 ? 0 : tap * count + i]);
  }
  if (g.run % 4 == 0) return true;
  for (int64_t i = 0; i < taps * count; i++)
    if (rows[i] >= x && rows[i] < beyond && rows[i] + g.run + 3 > beyond) return false;
  return true;
}

// Products of MR pixels with NB * 16 channels, added up over all taps. rows: MR pointers for each tap. Apart from
// everything else, so that the compiler keeps the sums in registers. safe: three bytes more may be read.
template <int MR, int NB>
BACKQUANT_APART static void accumulate(
    const uint8_t* const* rows, int64_t taps, int64_t channels, const int8_t* weight, bool safe, __m512i* out) {
  __m512i sums[MR][NB];
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NB; j++) sums[i][j] = _mm512_setzero_si512();
  // weights are 0 behind the last channel, so that whatever is read there does not count
  const int64_t whole = (channels + (safe ? 3 : 0)) & ~int64_t(3);
  const int64_t step = ((channels + 3) & ~int64_t(3)) * NB * 16;
  for (int64_t tap = 0; tap < taps; tap++, weight += step, rows += MR) {
    for (int64_t k = 0; k < whole; k += 4) {
      __m512i b[NB];
#pragma GCC unroll 4
      for (int j = 0; j < NB; j++) b[j] = _mm512_loadu_si512(weight + k * NB * 16 + j * 64);
#pragma GCC unroll 16
      for (int i = 0; i < MR; i++) {
        int32_t four;
        memcpy(&four, rows[i] + k, 4);
        const __m512i a = _mm512_set1_epi32(four);
#pragma GCC unroll 4
        for (int j = 0; j < NB; j++) sums[i][j] = _mm512_dpbusd_epi32(sums[i][j], a, b[j]);
      }
    }
    if (whole < channels) {
#pragma GCC unroll 16
      for (int i = 0; i < MR; i++) {
        const __m512i a = _mm512_set1_epi32(rest(rows[i] + whole, channels & 3));
#pragma GCC unroll 4
        for (int j = 0; j < NB; j++)
          sums[i][j] = _mm512_dpbusd_epi32(sums[i][j], a, _mm512_loadu_si512(weight + whole * NB * 16 + j * 64));
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NB; j++) _mm512_store_si512(out + i * NB + j, sums[i][j]);
}

// MR output pixels times NB * 16 channels, of which the last 16 hold TAIL (1 to 16).
template <int MR, int NB, int TAIL, int ACT, bool ADD, typename OUT>
struct Tile {
  static constexpr int last = 16 * (NB - 1);

  // The sums become results, still 32 bits each.
  static inline __attribute__((always_inline)) void finish(
      __m512i (&sums)[MR][NB], const Epilogue& e, int64_t channel, int64_t first, int64_t pixels, int64_t channels) {
#pragma GCC unroll 4
    for (int j = 0; j < NB; j++) {
      const int64_t at = channel + j * 16;
      const __m512 scale = _mm512_loadu_ps(e.scale + at), shift = _mm512_loadu_ps(e.shift + at);
#pragma GCC unroll 16
      for (int i = 0; i < MR; i++) {
        __m512 v = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[i][j]), scale, shift);
        if constexpr (ADD) {
          const uint8_t* other = e.other + (first + (i < pixels ? i : pixels - 1)) * channels + at;
          const __m512 value = j == NB - 1 ? load_other<TAIL>(other) : load_other<16>(other);
          v = _mm512_fmadd_ps(value, _mm512_set1_ps(e.other_scale), v);
        }
        v = finished<ACT>(v, e);
        sums[i][j] = sizeof(OUT) == 1 ? _mm512_cvtps_epi32(v) : _mm512_castps_si512(v);
      }
    }
  }

  static inline __attribute__((always_inline)) void store(const __m512i* sums, OUT* out) {
    if constexpr (sizeof(OUT) == 1) {
      const __m512i low = _mm512_packs_epi32(sums[0], sums[NB > 1 ? 1 : 0]);
      const __m512i high = NB > 2 ? _mm512_packs_epi32(sums[2], sums[NB > 3 ? 3 : 2]) : low;
      const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high));
      if constexpr (NB == 4 && TAIL == 16) return _mm512_storeu_si512(out, bytes);
      if constexpr (NB > 2) _mm256_storeu_si256((__m256i*)out, _mm512_castsi512_si256(bytes));
      if constexpr (NB == 2 || NB == 4)
        _mm_storeu_si128((__m128i*)((uint8_t*)out + (NB - 2) * 16), _mm512_extracti32x4_epi32(bytes, NB - 2));
      store_bytes<TAIL>((uint8_t*)out + last, _mm512_extracti32x4_epi32(bytes, NB - 1));
    } else {
#pragma GCC unroll 4
      for (int j = 0; j < NB - 1; j++) _mm512_storeu_si512(out + j * 16, sums[j]);
      _mm512_mask_storeu_epi32(out + last, (__mmask16)((1 << TAIL) - 1), sums[NB - 1]);
    }
  }

  static inline void run(
      const uint8_t* x, const int8_t* weight, const Geometry& g, const Epilogue& e, int64_t first, int64_t pixels,
      int64_t channel, OUT* out) {
    const uint8_t* rows[MAX_TAPS * MR];
    uint8_t edge[RUNS * MR][256];
    const bool safe = addresses(x, g, first, pixels, MR, rows, edge);
    __m512i sums[MR][NB];
    accumulate<MR, NB>(rows, g.kh * g.kw, g.run, weight, safe, &sums[0][0]);
    finish(sums, e, channel, first, pixels, g.oc);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
      if (i >= pixels) break;
      store(sums[i], out + (first + i) * g.oc + channel);
    }
  }
};

// One block of NB * 16 output channels from `channel` on, for the pixels from `begin` to `end`.
template <int MR, int NB, int TAIL, int ACT, bool ADD, typename OUT>
BACKQUANT_APART static void block(
    const uint8_t* x, const int8_t* weight, const Geometry& g, const Epilogue& e, int64_t channel, int64_t begin,
    int64_t end, OUT* out) {
  for (int64_t first = begin; first < end; first += MR) {
    const int64_t left = end - first;
    Tile<MR, NB, TAIL, ACT, ADD, OUT>::run(x, weight, g, e, first, left < MR ? left : MR, channel, out);
  }
}

// A convolution, or a linear layer over pixels. Output channels in `blocks` blocks of NB * 16, of which the last
// has LAST * 16 and of these the last 16 TAIL; pixels in groups whose input stays in the cache.
template <int MR, int NB, int LAST, int TAIL, int ACT, bool ADD, typename OUT>
static void convolution(
    const uint8_t* x, const int8_t* weight, const Geometry& g, const Epilogue& e, int64_t blocks, int64_t group,
    OUT* out) {
  const int64_t pixels = g.n * g.oh * g.ow, groups = (pixels + group - 1) / group;
  const int64_t size = ((g.run + 3) & ~int64_t(3)) * g.kh * g.kw * NB * 16;
#ifdef BACKQUANT_THREADS
#pragma omp parallel for collapse(2)
#endif
  for (int64_t place = 0; place < groups; place++)
    for (int64_t n = 0; n < blocks; n++) {
      const int64_t begin = place * group, end = begin + group < pixels ? begin + group : pixels;
      if (n < blocks - 1)
        block<MR, NB, 16, ACT, ADD, OUT>(x, weight + n * size, g, e, n * NB * 16, begin, end, out);
      else
        block<MR, LAST, TAIL, ACT, ADD, OUT>(x, weight + n * size, g, e, n * NB * 16, begin, end, out);
    }
}

// Depthwise: one channel of the output per channel of the input. Four rows of the kernel at a time are
// interleaved to groups of four bytes; weights are packed in the order in which that puts the channels.
template <int KH, int KW, int STRIDE, int ACT, typename OUT>
struct Depthwise {
  static constexpr int GROUPS = (KH + 3) / 4;

  template <bool WHOLE>
  static inline __attribute__((always_inline)) __m512i load(const uint8_t* from, __mmask64 mask) {
    if constexpr (WHOLE) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi8(mask, from);
  }

  // the rows 4 * group ... of one column as groups of four bytes
  template <bool WHOLE>
  static inline __attribute__((always_inline)) void column(
      const uint8_t* const* rows, int64_t at, int group, __mmask64 mask, __m512i (&found)[4]) {
    const __m512i zero = _mm512_setzero_si512();
    __m512i r[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) r[i] = group * 4 + i < KH ? load<WHOLE>(rows[group * 4 + i] + at, mask) : zero;
    const __m512i low01 = _mm512_unpacklo_epi8(r[0], r[1]), high01 = _mm512_unpackhi_epi8(r[0], r[1]);
    const __m512i low23 = _mm512_unpacklo_epi8(r[2], r[3]), high23 = _mm512_unpackhi_epi8(r[2], r[3]);
    found[0] = _mm512_unpacklo_epi16(low01, low23);
    found[1] = _mm512_unpackhi_epi16(low01, low23);
    found[2] = _mm512_unpacklo_epi16(high01, high23);
    found[3] = _mm512_unpackhi_epi16(high01, high23);
  }

  static inline __attribute__((always_inline)) void clear(__m512i (&sums)[4]) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) sums[j] = _mm512_setzero_si512();
  }

  // what one group of rows of a column adds to the sums, by its 256 bytes of the weight
  static inline __attribute__((always_inline)) void add(
      __m512i (&sums)[4], const __m512i (&found)[4], const int8_t* weight) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
      sums[j] = _mm512_dpbusd_epi32(sums[j], found[j], _mm512_loadu_si512(weight + j * 64));
  }

  // scale and shift are in the order of the sums, 64 at a time
  template <bool WHOLE>
  static inline __attribute__((always_inline)) void store(
      const __m512i (&sums)[4], const Epilogue& e, int64_t channel, OUT* out, __mmask64 mask) {
    __m512 v[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      v[j] = _mm512_fmadd_ps(
          _mm512_cvtepi32_ps(corrected(sums[j], e, channel + j * 16)),
          _mm512_loadu_ps(e.scale + channel + j * 16), _mm512_loadu_ps(e.shift + channel + j * 16));
      v[j] = finished<ACT>(v[j], e);
    }
    if constexpr (sizeof(OUT) == 1) {
      const __m512i a = _mm512_packs_epi32(_mm512_cvtps_epi32(v[0]), _mm512_cvtps_epi32(v[1]));
      const __m512i b = _mm512_packs_epi32(_mm512_cvtps_epi32(v[2]), _mm512_cvtps_epi32(v[3]));
      const __m512i bytes = _mm512_packus_epi16(a, b);
      if constexpr (WHOLE)
        _mm512_storeu_si512(out, bytes);
      else {
        alignas(64) uint8_t some[64];
        _mm512_store_si512(some, bytes);
        memcpy(out, some, __builtin_popcountll(mask));
      }
    } else {
      alignas(64) float some[64];
      for (int j = 0; j < 4; j++)
        for (int lane = 0; lane < 4; lane++)
          _mm_store_ps(some + lane * 16 + j * 4, _mm512_castps512_ps128(_mm512_shuffle_f32x4(v[j], v[j], lane)));
      memcpy(out, some, sizeof(float) * __builtin_popcountll(mask));
    }
  }

  template <bool WHOLE>
  static inline __attribute__((always_inline)) void line(
      const uint8_t* const* rows, const int8_t* weight, const Geometry& g, const Epilogue& e, int64_t channel,
      __mmask64 mask, OUT* out) {
    const uint8_t* beyond[KH];
    for (int i = 0; i < KH; i++) beyond[i] = g.outside;
    if constexpr (STRIDE == 1) {
      // each column of the input is read once and adds to KW sums
      __m512i sums[KW][4];
#pragma GCC unroll 8
      for (int k = 0; k < KW; k++) clear(sums[k]);
      for (int64_t i = -g.pw; i < g.ow + KW - 1 - g.pw; i++) {
        const bool inside = (uint64_t)i < (uint64_t)g.w;
#pragma GCC unroll 2
        for (int group = 0; group < GROUPS; group++) {
          __m512i found[4];
          column<WHOLE>(inside ? rows : beyond, inside ? i * g.c + channel : 0, group, mask, found);
#pragma GCC unroll 8
          for (int k = 0; k < KW; k++)  // sums[k] is the output whose tap KW - 1 - k this column is
            add(sums[k], found, weight + ((KW - 1 - k) * GROUPS + group) * 256);
        }
        const int64_t o = i + g.pw - (KW - 1);
        if (o >= 0) store<WHOLE>(sums[0], e, channel, out + o * g.oc + channel, mask);
#pragma GCC unroll 8
        for (int k = 0; k + 1 < KW; k++)
#pragma GCC unroll 4
          for (int j = 0; j < 4; j++) sums[k][j] = sums[k + 1][j];
        clear(sums[KW - 1]);
      }
    } else {
      for (int64_t o = 0; o < g.ow; o++) {
        __m512i sums[4];
        clear(sums);
#pragma GCC unroll 8
        for (int k = 0; k < KW; k++) {
          const int64_t i = o * STRIDE - g.pw + k;
          const bool inside = (uint64_t)i < (uint64_t)g.w;
#pragma GCC unroll 2
          for (int group = 0; group < GROUPS; group++) {
            __m512i found[4];
            column<WHOLE>(inside ? rows : beyond, inside ? i * g.c + channel : 0, group, mask, found);
            add(sums, found, weight + (k * GROUPS + group) * 256);
          }
        }
        store<WHOLE>(sums, e, channel, out + o * g.oc + channel, mask);
      }
    }
  }

  // The rows of the output from `begin` to `end`, counted over all images.
  BACKQUANT_APART static void rows(
      const uint8_t* x, const int8_t* weight, const Geometry& g, const Epilogue& e, int64_t begin, int64_t end,
      OUT* out) {
    for (int64_t place = begin; place < end; place++) {
      const int64_t row = place % g.oh;
      const uint8_t* image = x + (place / g.oh) * g.h * g.w * g.c;
      OUT* to = out + place * g.ow * g.oc;
      for (int64_t channel = 0; channel < g.c; channel += 64) {
        const uint8_t* rows[KH];
        for (int k = 0; k < KH; k++) {
          const int64_t r = row * STRIDE - g.ph + k;
          rows[k] = (uint64_t)r < (uint64_t)g.h ? image + r * g.w * g.c : g.outside;
        }
        const int64_t left = g.c - channel;
        const int8_t* own = weight + channel / 64 * (KW * GROUPS * 4 * 64);
        const __mmask64 mask = left >= 64 ? ~0ull : (1ull << left) - 1;
        if (left >= 64)
          line<true>(rows, own, g, e, channel, mask, to);
        else
          line<false>(rows, own, g, e, channel, mask, to);
      }
    }
  }

  static void run(const uint8_t* x, const int8_t* weight, const Geometry& g, const Epilogue& e, OUT* out) {
#ifdef BACKQUANT_THREADS
#pragma omp parallel for
    for (int64_t place = 0; place < g.n * g.oh; place++) rows(x, weight, g, e, place, place + 1, out);
#else
    rows(x, weight, g, e, 0, g.n * g.oh, out);
#endif
  }
};

// Floats of three planes as integers with the planes next to each other. pixels: of one image.
BACKQUANT_APART static void quantize3(
    const float* x, int64_t images, int64_t pixels, float inverse, float shift, uint8_t* out) {
  const __m512 scale = _mm512_set1_ps(inverse), zero = _mm512_set1_ps(shift);
  __m128i place[3][3];  // [register of the result][plane]: which byte of the plane goes where
  for (int part = 0; part < 3; part++)
    for (int plane = 0; plane < 3; plane++) {
      alignas(16) int8_t from[16];
      for (int i = 0; i < 16; i++) from[i] = (part * 16 + i) % 3 == plane ? (part * 16 + i) / 3 : -1;
      place[part][plane] = _mm_load_si128((const __m128i*)from);
    }
#ifdef BACKQUANT_THREADS
#pragma omp parallel for collapse(2)
#endif
  for (int64_t image = 0; image < images; image++)
    for (int64_t i = 0; i < (pixels + 15) / 16; i++) {
      const int64_t left = pixels - i * 16;
      const __mmask16 mask = left >= 16 ? 0xffff : (1 << left) - 1;
      __m128i bytes[3];
      for (int plane = 0; plane < 3; plane++) {
        const __m512 v = _mm512_maskz_loadu_ps(mask, x + (image * 3 + plane) * pixels + i * 16);
        // round, then add the zero point: as quantize_per_tensor does
        const __m512 whole = _mm512_add_ps(_mm512_roundscale_ps(_mm512_mul_ps(v, scale), 8), zero);
        const __m512 most = _mm512_min_ps(whole, _mm512_set1_ps(255.0f));
        bytes[plane] = as_bytes(_mm512_cvtps_epi32(_mm512_max_ps(most, _mm512_setzero_ps())));
      }
      alignas(16) uint8_t some[48];
      uint8_t* to = left >= 16 ? out + (image * pixels + i * 16) * 3 : some;
      for (int part = 0; part < 3; part++) {
        const __m128i mixed = _mm_or_si128(
            _mm_shuffle_epi8(bytes[0], place[part][0]),
            _mm_or_si128(_mm_shuffle_epi8(bytes[1], place[part][1]), _mm_shuffle_epi8(bytes[2], place[part][2])));
        _mm_storeu_si128((__m128i*)(to + part * 16), mixed);
      }
      if (left < 16) memcpy(out + (image * pixels + i * 16) * 3, some, left * 3);
    }
}

}  // namespace backquant

#endif
