// Convolutions and linear layers on 8-bit integers, for the CPUs of lanes.h.
//
// Activations are uint8 [batch, height, width, channels]; weights int8, packed beforehand. Sums are exact in
// 32 bits; they become floats as sum * scale + shift, where shift makes up for the zero point of the input.
#ifndef BACKQUANT_KERNELS
#define BACKQUANT_KERNELS

#include "lanes.h"

namespace backquant {

enum Activation { NONE, CLAMP, SWISH, HARDSWISH, GELU, GELU_TANH, TANH, LEAKY, GELU_BYTES };

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
// the input (w * c), and 64 more. Of a convolution in groups run is the channels of one, c and oc those of all.
struct Geometry {
  int64_t n, h, w, c, oh, ow, oc, run;
  int64_t kh, kw, sh, sw, ph, pw, dh, dw;
  const uint8_t* outside;

  int64_t width() const { return run > c ? run / c : 1; }  // of the kernel, where its row is read as one
};

static inline Floats exponential(Floats x) {
  // 2**(x / ln 2): a power series for the part between -1/2 and 1/2, relative error below 3e-7
  x = least(most(x, splat(-87.3f)), splat(88.3f));
  const Floats t = multiply(x, splat(1.44269504088896341f));
  const Floats whole = rounded(t);
  const Floats f = subtract(t, whole);
  Floats p = splat(1.5403530e-4f);
  p = multiply_add(p, f, splat(1.3333558e-3f));
  p = multiply_add(p, f, splat(9.6181291e-3f));
  p = multiply_add(p, f, splat(5.5504109e-2f));
  p = multiply_add(p, f, splat(2.4022651e-1f));
  p = multiply_add(p, f, splat(6.9314718e-1f));
  p = multiply_add(p, f, splat(1.0f));
  return times_power(p, whole);
}

static inline Floats inverse(Floats d) {
  const Floats r = about_inverse(d);
  return multiply(r, subtract_product(d, r, splat(2.0f)));
}

static inline Floats sigmoid(Floats x) { return inverse(add(splat(1.0f), exponential(subtract(splat(0.0f), x)))); }

static inline Floats error_function(Floats x) {
  // Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7
  const Floats t = inverse(multiply_add(magnitude(x), splat(0.3275911f), splat(1.0f)));
  Floats p = splat(1.061405429f);
  p = multiply_add(p, t, splat(-1.453152027f));
  p = multiply_add(p, t, splat(1.421413741f));
  p = multiply_add(p, t, splat(-0.284496736f));
  p = multiply_add(p, t, splat(0.254829592f));
  p = multiply(p, t);
  const Floats e = exponential(multiply(subtract(splat(0.0f), x), x));
  return signed_as(subtract_product(p, e, splat(1.0f)), x);
}

// What GELU multiplies x by, for results of 8 bits: 1/2 and an odd polynomial up to 4.6, fitted with x as its weight, in
// powers around the middle of x * x, which keep its rounding small. GELU is off by 1.2e-5 at most.
static inline Floats normal_share(Floats x) {
  const Floats u = least(most(x, splat(-4.6f)), splat(4.6f)), t = multiply_subtract(u, u, splat(10.58f));
  Floats p = splat(-1.1085347e-12f);
  p = multiply_add(p, t, splat(3.5793438e-11f));
  p = multiply_add(p, t, splat(-5.2897803e-10f));
  p = multiply_add(p, t, splat(7.8065998e-09f));
  p = multiply_add(p, t, splat(-1.4347199e-07f));
  p = multiply_add(p, t, splat(2.3566331e-06f));
  p = multiply_add(p, t, splat(-3.4295161e-05f));
  p = multiply_add(p, t, splat(0.00048363957f));
  p = multiply_add(p, t, splat(-0.0071602804f));
  p = multiply_add(p, t, splat(0.15354344f));
  return multiply_add(p, u, splat(0.5f));
}

template <int ACT>
static inline Floats activated(Floats v, const Epilogue& e) {
  if constexpr (ACT == SWISH) {
    return multiply(v, sigmoid(v));
  } else if constexpr (ACT == HARDSWISH) {
    const Floats gate = multiply_add(v, splat(1.0f / 6.0f), splat(0.5f));
    return multiply(v, least(most(gate, splat(0.0f)), splat(1.0f)));
  } else if constexpr (ACT == GELU) {
    const Floats s = error_function(multiply(v, splat(0.70710678118654752f)));
    return multiply(multiply(v, splat(0.5f)), add(s, splat(1.0f)));
  } else if constexpr (ACT == GELU_BYTES) {
    return multiply(v, normal_share(v));
  } else if constexpr (ACT == GELU_TANH || ACT == TANH) {
    Floats u = v;
    if constexpr (ACT == GELU_TANH) {
      const Floats cube = multiply_add(multiply(v, v), splat(0.044715f), splat(1.0f));
      u = multiply(multiply(v, cube), splat(0.79788456080286536f));
    }
    const Floats s = sigmoid(add(u, u));
    if constexpr (ACT == GELU_TANH) return multiply(v, s);
    return multiply_subtract(s, splat(2.0f), splat(1.0f));
  } else if constexpr (ACT == LEAKY) {
    return where_negative(v, multiply(v, splat(e.alpha)));
  }
  return v;
}

// LATER: what CLAMP asks for is done with bytes, by `bounded`, which gives the same: rounding keeps the order.
template <int ACT, bool LATER>
static inline Floats finished(Floats v, const Epilogue& e) {
  if constexpr (ACT == NONE || (ACT == CLAMP && LATER)) return v;
  if constexpr (ACT == CLAMP) return least(most(v, splat(e.low)), splat(e.high));
  return multiply_add(activated<ACT>(v, e), splat(e.out_scale), splat(e.out_shift));
}

struct Bounds {
  Bytes least, most;
};

// A number from 0 to 255, rounded as results are, in each byte. Not by `lrintf`: compilers call that, and keep no
// register while they do.
static inline Bytes byte_everywhere(float x) {
  const Ints whole = to_ints(splat(x));
  return narrowed(whole, whole, whole, whole);
}

static inline Bounds bounds_of(const Epilogue& e) { return {byte_everywhere(e.low), byte_everywhere(e.high)}; }

template <int ACT>
static inline Bytes bounded(Bytes x, const Bounds& bounds) {
  if constexpr (ACT == CLAMP) return limited(x, bounds.least, bounds.most);
  return x;
}

// The sums of a register of channels without the correction.
static inline Ints corrected(Ints sums, const Epilogue& e, int64_t channel) {
  return e.correction ? subtract(sums, load(e.correction + channel)) : sums;
}

// The last one to three integers.
static inline int32_t rest(const uint8_t* from, int64_t count) {
  if (count == 1) return from[0];
  return from[0] | from[1] << 8 | (count == 3 ? from[2] << 16 : 0);
}

// A row of the kernel that is partly beyond the border, put together in `edge`.
static inline const uint8_t* at_edge(uint8_t* edge, const uint8_t* row, const Geometry& g, int64_t column) {
  const int64_t end = column + g.width();
  const int64_t first = column < 0 ? 0 : column, last = end > g.w ? g.w : end;
  copy_bytes(g.outside, g.run, edge);
  if (first < last) copy_bytes(row + first * g.c, (last - first) * g.c, edge + (first - column) * g.c);
  return edge;
}

// What each tap reads for the output pixel whose first tap is at row `top` and column `left` of an image; rows are
// `step` apart.
static inline void pixel(
    const uint8_t* image, const Geometry& g, int64_t top, int64_t left, int64_t step, const uint8_t** rows,
    uint8_t (*edge)[256]) {
  const int64_t width = g.width();
  for (int64_t i = 0, r = top; i < g.kh; i++, r += g.dh) {
    const bool inside = (uint64_t)r < (uint64_t)g.h;
    const uint8_t* row = image + r * g.w * g.c;
    for (int64_t j = 0, c = left; j < g.kw; j++, c += g.dw, rows += step, edge += width > 1 ? step : 0) {
      if (width == 1) {  // nothing to predict
        const bool read = inside & ((uint64_t)c < (uint64_t)g.w);
        *rows = read ? row + c * g.c : g.outside;
      } else if (inside) {
        *rows = c >= 0 && c + width <= g.w ? row + c * g.c : at_edge(*edge, row, g, c);
      } else {
        *rows = g.outside;
      }
    }
  }
}

// What each tap reads for `count` output pixels from `first` on, of which only some exist: the last one stands for
// the others. Whether three bytes more may be read behind each row, which must not be read from `end` on.
static inline __attribute__((always_inline)) bool addresses(
    const uint8_t* x, const Geometry& g, int64_t first, int64_t pixels, int64_t count, const uint8_t** rows,
    uint8_t (*edge)[256], const uint8_t* end) {
  const int64_t width = g.width(), taps = g.kh * g.kw, size = g.h * g.w * g.c;
  if (taps * width * g.sh * g.sw == 1 && g.ph + g.pw == 0) {
    for (int64_t i = 0; i < count; i++) rows[i] = x + (first + (i < pixels ? i : pixels - 1)) * g.c;
    return rows[count - 1] + g.run + 3 <= end;
  }
  const int64_t line = first / g.ow;
  int64_t column = first - line * g.ow, y = g.n == 1 ? line : line % g.oh;
  int64_t top = y * g.sh - g.ph, left = column * g.sw - g.pw;
  const uint8_t* image = x + (g.n == 1 ? 0 : line / g.oh * size);
  const int64_t reach = left + (count - 1) * g.sw + (g.kw - 1) * g.dw + width;
  // most tiles lie in one row, and within the borders to its sides
  if (column + count <= g.ow && pixels == count && left >= 0 && reach <= g.w) {
    const uint8_t* last = x;  // of what is read
    for (int64_t i = 0, r = top; i < g.kh; i++, r += g.dh) {
      const bool inside = (uint64_t)r < (uint64_t)g.h;
      const int64_t next = inside ? g.sw * g.c : 0, along = inside ? g.dw * g.c : 0;
      const uint8_t* start = inside ? image + (r * g.w + left) * g.c : g.outside;
      for (int64_t j = 0; j < g.kw; j++, start += along, rows += count)
        for (int64_t k = 0; k < count; k++) rows[k] = start + k * next;
      if (inside) last = rows[-1];
    }
    return g.run % 4 == 0 || last + g.run + 3 <= end;
  }
  for (int64_t i = 0; i < count; i++) {
    pixel(image, g, top, left, count, rows + i, edge + (width == 1 ? 0 : i));
    if (i + 1 >= pixels) continue;
    left += g.sw;
    if (++column < g.ow) continue;
    column = 0, left = -g.pw, top += g.sh;
    if (++y == g.oh) y = 0, top = -g.ph, image += size;
  }
  if (g.run % 4 == 0) return true;
  for (int64_t i = 0; i < taps * count; i++)
    if (rows[i] >= x && rows[i] < end && rows[i] + g.run + 3 > end) return false;
  return true;
}

// What is read later, to be in the cache by then: `step` bytes further at each turn of a loop, or 0. The address may be
// any: where nothing is, nothing is fetched.
struct Ahead {
  const int8_t* from;
  int64_t step;
};

// So many bytes that are read later.
struct Later {
  const int8_t* from;
  int64_t bytes;

  // What each of `loops` loops of `turns` asks for in its turn: no more than a line of the cache at once.
  Ahead shared(int64_t loops, int64_t turns) const {
    const int64_t step = (bytes + loops * turns - 1) / (loops * turns);
    return {from, step < 64 ? step : 64};
  }
};

// Products of MR pixels with NB * LANES channels, added up over all taps. rows: MR pointers for each tap. Apart from
// everything else, so that the compiler keeps the sums in registers. safe: three bytes more may be read.
template <int MR, int NB>
BACKQUANT_APART static void accumulate(
    const uint8_t* const* rows, int64_t taps, int64_t channels, const int8_t* weight, bool safe, Ahead ahead, Ints* out) {
  Ints sums[MR][NB];
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NB; j++) sums[i][j] = zero();
  // weights are 0 behind the last channel, so that whatever is read there does not count
  const int64_t whole = (channels + (safe ? 3 : 0)) & ~int64_t(3);
  for (int64_t tap = 0; tap < taps; tap++, rows += MR) {
    for (int64_t k = 0; k < whole; k += 4, weight += NB * WEIGHTS) {
      __builtin_prefetch(ahead.from);
      ahead.from += ahead.step;
#pragma GCC unroll 16
      for (int i = 0; i < MR; i++) {
        int32_t four;
        memcpy(&four, rows[i] + k, 4);
        const auto a = everywhere(four);
#pragma GCC unroll 4
        for (int j = 0; j < NB; j++) sums[i][j] = dot(sums[i][j], a, weight + j * WEIGHTS);
      }
    }
    if (whole < channels) {
#pragma GCC unroll 16
      for (int i = 0; i < MR; i++) {
        const auto a = everywhere(rest(rows[i] + whole, channels & 3));
#pragma GCC unroll 4
        for (int j = 0; j < NB; j++) sums[i][j] = dot(sums[i][j], a, weight + j * WEIGHTS);
      }
      weight += NB * WEIGHTS;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NB; j++) out[i * NB + j] = sums[i][j];
}

// MR output pixels times NB * LANES channels, of which the last register holds TAIL.
template <int MR, int NB, int TAIL, int ACT, bool ADD, typename OUT>
struct Tile {
  static constexpr int last = LANES * (NB - 1);
  static constexpr bool LATER = sizeof(OUT) == 1 && NB > 1;

  // The sums become results, still 32 bits each.
  static inline __attribute__((always_inline)) void finish(
      Ints (&sums)[MR][NB], const Epilogue& e, int64_t channel, int64_t first, int64_t pixels, int64_t channels) {
#pragma GCC unroll 4
    for (int j = 0; j < NB; j++) {
      const int64_t at = channel + j * LANES;
      const Floats scale = load(e.scale + at), shift = load(e.shift + at);
#pragma GCC unroll 16
      for (int i = 0; i < MR; i++) {
        Floats v = multiply_add(to_floats(sums[i][j]), scale, shift);
        if constexpr (ADD) {
          const uint8_t* other = e.other + (first + (i < pixels ? i : pixels - 1)) * channels + at;
          const Floats value = j == NB - 1 && TAIL < LANES ? widened(other, TAIL) : widened(other);
          v = multiply_add(value, splat(e.other_scale), v);
        }
        v = finished<ACT, LATER>(v, e);
        sums[i][j] = sizeof(OUT) == 1 ? to_ints(v) : as_ints(v);
      }
    }
  }

  static inline __attribute__((always_inline)) void store(const Ints* sums, const Bounds& bounds, OUT* out) {
    if constexpr (sizeof(OUT) == 1 && NB == 1) {
      store_narrow((uint8_t*)out, sums[0], TAIL);
    } else if constexpr (sizeof(OUT) == 1) {
      const Bytes found = by_register(
          narrowed(sums[0], sums[NB > 1 ? 1 : 0], sums[NB > 2 ? 2 : 0], sums[NB > 3 ? 3 : NB > 2 ? 2 : 0]));
      const Bytes bytes = bounded<ACT>(found, bounds);
      if constexpr (NB == 4 && TAIL == LANES) return backquant::store((uint8_t*)out, bytes);
      store_first((uint8_t*)out, bytes, last + TAIL);
    } else {
#pragma GCC unroll 4
      for (int j = 0; j < NB - 1; j++) backquant::store(out + j * LANES, as_floats(sums[j]));
      store_first(out + last, as_floats(sums[NB - 1]), TAIL);
    }
  }

  // The sums of pixels without an addition as results. stride: of the pixels in out.
  static inline __attribute__((always_inline)) void give(
      Ints (&sums)[MR][NB], const Epilogue& e, int64_t channel, int64_t pixels, int64_t stride, OUT* out) {
    finish(sums, e, channel, 0, pixels, stride);
    const Bounds bounds = bounds_of(e);
#pragma GCC unroll 24
    for (int i = 0; i < MR; i++) {
      if (i >= pixels) break;
      store(sums[i], bounds, out + i * stride);
    }
  }

  static inline void run(
      const uint8_t* x, const int8_t* weight, Ahead ahead, const Geometry& g, const Epilogue& e, int64_t first,
      int64_t pixels, int64_t channel, OUT* out) {
    const uint8_t* rows[MAX_TAPS * MR];
    uint8_t edge[RUNS * MR][256];
    const bool safe = addresses(x, g, first, pixels, MR, rows, edge, x + g.n * g.h * g.w * g.c);
    Ints sums[MR][NB];
    accumulate<MR, NB>(rows, g.kh * g.kw, g.run, weight, safe, ahead, &sums[0][0]);
    finish(sums, e, channel, first, pixels, g.oc);
    const Bounds bounds = bounds_of(e);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
      if (i >= pixels) break;
      store(sums[i], bounds, out + (first + i) * g.oc + channel);
    }
  }
};

// One block of NB * LANES output channels from `channel` on, for the pixels from `begin` to `end`; `later`: the weights
// of the block after it.
template <int MR, int NB, int TAIL, int ACT, bool ADD, typename OUT>
BACKQUANT_APART static void block(
    const uint8_t* x, const int8_t* weight, Later later, const Geometry& g, const Epilogue& e, int64_t channel,
    int64_t begin, int64_t end, OUT* out) {
  const int64_t turns = (g.run + 3) / 4 * g.kh * g.kw;
  Ahead ahead = later.shared((end - begin + MR - 1) / MR, turns);
  for (int64_t first = begin; first < end; first += MR, ahead.from += ahead.step * turns) {
    const int64_t left = end - first;
    Tile<MR, NB, TAIL, ACT, ADD, OUT>::run(x, weight, ahead, g, e, first, left < MR ? left : MR, channel, out);
  }
}

// Pixels that are read for all channels before the next ones: their input stays in the second-level cache.
static inline int64_t pixels_together(const Geometry& g, int64_t rows, int64_t threads) {
  constexpr int64_t cached = 1 << 18;  // bytes
  const int64_t pixels = g.n * g.oh * g.ow, share = (pixels + threads - 1) / threads;
  const int64_t most = cached / (g.c * g.sh * g.sw), group = most < rows ? rows : most < share ? most : share;
  return (group + rows - 1) / rows * rows;
}

// A convolution, or a linear layer over pixels. Output channels in `blocks` blocks of NB * LANES, of which the last
// has LAST * LANES and of these the last register TAIL.
template <int MR, int NB, int LAST, int TAIL, int ACT, bool ADD, typename OUT>
static void convolution(
    const uint8_t* x, const int8_t* weight, const Geometry& g, const Epilogue& e, int64_t blocks, int64_t threads,
    OUT* out) {
  const int64_t pixels = g.n * g.oh * g.ow, group = pixels_together(g, MR, threads);
  const int64_t groups = (pixels + group - 1) / group;
  const int64_t size = ((g.run + 3) & ~int64_t(3)) * g.kh * g.kw * NB * LANES * WEIGHT_BYTES;
#ifdef BACKQUANT_THREADS
#pragma omp parallel for collapse(2)
#endif
  for (int64_t place = 0; place < groups; place++)
    for (int64_t n = 0; n < blocks; n++) {
      const int64_t begin = place * group, end = begin + group < pixels ? begin + group : pixels;
      const int8_t* own = weight + n * size;
      if (n < blocks - 1) {
        const Later later{own + size, n < blocks - 2 ? size : size / NB * LAST};
        block<MR, NB, LANES, ACT, ADD, OUT>(x, own, later, g, e, n * NB * LANES, begin, end, out);
      } else {
        const Later later{weight, blocks > 1 && end < pixels ? size : 0};
        block<MR, LAST, TAIL, ACT, ADD, OUT>(x, own, later, g, e, n * NB * LANES, begin, end, out);
      }
    }
}

// Depthwise: one channel of the output per channel of the input. Four rows of the kernel at a time are
// interleaved to groups of four bytes; weights are packed in the order in which that puts the channels.
template <int KH, int KW, int STRIDE, int ACT, typename OUT>
struct Depthwise {
  static constexpr int GROUPS = (KH + 3) / 4;

  static inline __attribute__((always_inline)) void clear(Ints (&sums)[4]) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) sums[j] = zero();
  }

  // What one column adds to the sums, for `group` of the rows and the tap of its place in the kernel.
  static inline __attribute__((always_inline)) void add_products(
      Ints (&sums)[4], const Fours (&found)[4], const int8_t* weight, int tap, int group) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
      sums[j] = dot(sums[j], found[j], weight + ((tap * GROUPS + group) * 4 + j) * WEIGHTS);
  }

  // the rows 4 * group ... of one column as groups of four bytes. WHOLE: a register of channels is left
  template <bool WHOLE>
  static inline __attribute__((always_inline)) void column(
      const uint8_t* const* rows, int64_t at, int group, int64_t left, Fours (&found)[4]) {
    Bytes r[4], mixed[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      r[i] = bytes_everywhere(0);
      if (group * 4 + i >= KH) continue;
      const uint8_t* from = rows[group * 4 + i] + at;
      r[i] = WHOLE ? load(from) : load_first(from, left);
    }
    interleave(r, mixed);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) found[j] = fours(mixed[j]);
  }

  // scale and shift are in the order of the sums, a register of bytes at a time
  template <bool WHOLE>
  static inline __attribute__((always_inline)) void store(
      const Ints (&sums)[4], const Epilogue& e, const Bounds& bounds, int64_t channel, OUT* out, int64_t left) {
    Floats v[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const int64_t at = channel + j * LANES;
      v[j] = multiply_add(to_floats(corrected(sums[j], e, at)), load(e.scale + at), load(e.shift + at));
      v[j] = finished<ACT, sizeof(OUT) == 1>(v[j], e);
    }
    if constexpr (sizeof(OUT) == 1) {
      const Bytes found = narrowed(to_ints(v[0]), to_ints(v[1]), to_ints(v[2]), to_ints(v[3]));
      const Bytes bytes = bounded<ACT>(found, bounds);
      if constexpr (WHOLE)
        backquant::store((uint8_t*)out, bytes);
      else
        store_first((uint8_t*)out, bytes, left);
    } else {
      alignas(64) float some[WIDTH];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) store_apart(some + j * 4, v[j]);
      memcpy(out, some, sizeof(float) * (WHOLE ? WIDTH : left));
    }
  }

  template <bool WHOLE>
  static inline __attribute__((always_inline)) void line(
      const uint8_t* const* rows, const int8_t* weight, const Geometry& g, const Epilogue& e, int64_t channel,
      int64_t left, OUT* out) {
    const Bounds bounds = bounds_of(e);
    const uint8_t* beyond[KH];
    for (int i = 0; i < KH; i++) beyond[i] = g.outside;
    if constexpr (STRIDE == 1) {
      // each column of the input is read once and adds to KW sums
      Ints sums[KW][4];
#pragma GCC unroll 8
      for (int k = 0; k < KW; k++) clear(sums[k]);
      for (int64_t i = -g.pw; i < g.ow + KW - 1 - g.pw; i++) {
        const bool inside = (uint64_t)i < (uint64_t)g.w;
#pragma GCC unroll 2
        for (int group = 0; group < GROUPS; group++) {
          Fours found[4];
          column<WHOLE>(inside ? rows : beyond, inside ? i * g.c + channel : 0, group, left, found);
#pragma GCC unroll 8
          for (int k = 0; k < KW; k++)  // sums[k] is the output whose tap KW - 1 - k this column is
            add_products(sums[k], found, weight, KW - 1 - k, group);
        }
        const int64_t o = i + g.pw - (KW - 1);
        if (o >= 0) store<WHOLE>(sums[0], e, bounds, channel, out + o * g.oc + channel, left);
#pragma GCC unroll 8
        for (int k = 0; k + 1 < KW; k++)
#pragma GCC unroll 4
          for (int j = 0; j < 4; j++) sums[k][j] = sums[k + 1][j];
        clear(sums[KW - 1]);
      }
    } else {
      for (int64_t o = 0; o < g.ow; o++) {
        Ints sums[4];
        clear(sums);
#pragma GCC unroll 8
        for (int k = 0; k < KW; k++) {
          const int64_t i = o * STRIDE - g.pw + k;
          const bool inside = (uint64_t)i < (uint64_t)g.w;
#pragma GCC unroll 2
          for (int group = 0; group < GROUPS; group++) {
            Fours found[4];
            column<WHOLE>(inside ? rows : beyond, inside ? i * g.c + channel : 0, group, left, found);
            add_products(sums, found, weight, k, group);
          }
        }
        store<WHOLE>(sums, e, bounds, channel, out + o * g.oc + channel, left);
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
      for (int64_t channel = 0; channel < g.c; channel += WIDTH) {
        const uint8_t* rows[KH];
        for (int k = 0; k < KH; k++) {
          const int64_t r = row * STRIDE - g.ph + k;
          rows[k] = (uint64_t)r < (uint64_t)g.h ? image + r * g.w * g.c : g.outside;
        }
        const int64_t left = g.c - channel;
        const int8_t* own = weight + channel / WIDTH * (KW * GROUPS * 4 * WEIGHTS);
        if (left >= WIDTH)
          line<true>(rows, own, g, e, channel, left, to);
        else
          line<false>(rows, own, g, e, channel, left, to);
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

}  // namespace backquant

#endif
