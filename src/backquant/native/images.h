// What images meet between convolutions: 8-bit integers joined and scaled by channel, times one number a channel, their
// means and maxima; entries of a table; floats as integers, plane by plane, and times one number a channel. Images are
// [batch, height, width, channels].
#ifndef BACKQUANT_IMAGES
#define BACKQUANT_IMAGES
#include "lanes.h"

namespace backquant {

// Bytes of NB registers of channels, scaled: x * scale + shift, rounded, within low and high. stride: of the pixels of
// x and of out; the last register holds `tail` channels, all where WHOLE.
template <int NB, bool WHOLE>
BACKQUANT_APART static void rescale_registers(
    const uint8_t* x, int64_t stride, const float* scales, const float* shifts, int low, int high, int64_t pixels,
    int64_t tail, uint8_t* out, int64_t out_stride) {
  Floats scale[NB], shift[NB];
#pragma GCC unroll 4
  for (int j = 0; j < NB; j++) scale[j] = load(scales + j * LANES), shift[j] = load(shifts + j * LANES);
  const Bytes least = bytes_everywhere(low), most = bytes_everywhere(high);
  for (int64_t i = 0; i < pixels; i++, x += stride, out += out_stride) {
    Ints found[4];
#pragma GCC unroll 4
    for (int j = 0; j < NB; j++) {
      const uint8_t* from = x + j * LANES;
      const Floats v = WHOLE || j < NB - 1 ? widened(from) : widened(from, tail);
      found[j] = to_ints(multiply_add(v, scale[j], shift[j]));
    }
#pragma GCC unroll 4
    for (int j = NB; j < 4; j++) found[j] = found[NB - 1];
    const Bytes bytes = limited(by_register(narrowed(found[0], found[1], found[2], found[3])), least, most);
    if constexpr (NB == 4 && WHOLE)
      store(out, bytes);
    else
      store_first(out, bytes, (NB - 1) * LANES + (WHOLE ? LANES : tail));
  }
}

// The same for any number of channels.
static inline void rescale(
    const uint8_t* x, int64_t channels, int64_t stride, const float* scale, const float* shift, int low, int high,
    int64_t pixels, uint8_t* out, int64_t out_stride) {
  int64_t at = 0;
  for (; at + WIDTH <= channels; at += WIDTH)
    rescale_registers<4, true>(x + at, stride, scale + at, shift + at, low, high, pixels, LANES, out + at, out_stride);
  const int64_t left = channels - at, tail = (left - 1) % LANES + 1;
  if (left == 0) return;
  const auto rest = [&](auto run) {
    run(x + at, stride, scale + at, shift + at, low, high, pixels, tail, out + at, out_stride);
  };
  const int64_t registers = (left + LANES - 1) / LANES;
  const bool whole = tail == LANES;
  if (registers == 1) return rest(whole ? rescale_registers<1, true> : rescale_registers<1, false>);
  if (registers == 2) return rest(whole ? rescale_registers<2, true> : rescale_registers<2, false>);
  if (registers == 3) return rest(whole ? rescale_registers<3, true> : rescale_registers<3, false>);
  rest(rescale_registers<4, false>);
}

// A part of the channels of an image. stride: bytes from one pixel to the next.
struct Part {
  const uint8_t* x;
  int64_t channels, stride;
};

constexpr int64_t JOINED = 1 << 14;  // bytes of the result that are written at a time

// Parts next to each other, each channel scaled. scale, shift: of all channels, and a register more.
static void join(
    const Part* parts, int64_t count, int64_t channels, const float* scale, const float* shift, int low, int high,
    int64_t pixels, uint8_t* out) {
  const int64_t group = JOINED / channels > 1 ? JOINED / channels : 1;
#ifdef BACKQUANT_THREADS
#pragma omp parallel for
#endif
  for (int64_t first = 0; first < pixels; first += group) {
    const int64_t some = first + group < pixels ? group : pixels - first;
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
      const Part& part = parts[i];
      const uint8_t* x = part.x + first * part.stride;
      rescale(x, part.channels, part.stride, scale + at, shift + at, low, high, some, out + first * channels + at,
              channels);
      at += part.channels;
    }
  }
}

// Parts next to each other, as they are.
static void lay_behind(const Part* parts, int64_t count, int64_t channels, int64_t pixels, uint8_t* out) {
  const int64_t group = JOINED / channels > 1 ? JOINED / channels : 1;
  for (int64_t first = 0; first < pixels; first += group) {
    const int64_t end = first + group < pixels ? first + group : pixels;
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
      const Part& part = parts[i];
      for (int64_t k = first; k < end; k++)
        copy_bytes(part.x + k * part.stride, part.channels, out + k * channels + at);
      at += part.channels;
    }
  }
}

// What a product of integers is made of: (x - x_zero) * (y - y_zero) * scale + zero.
struct Factors {
  float x_zero, y_zero, scale, zero;
  int low, high;
};

constexpr int64_t GATED = 256;  // channels at a time

// Each pixel of an image times one number a channel. x: [images, pixels, channels], y: [images, channels].
static void gate(
    const uint8_t* x, const uint8_t* y, const Factors& f, int64_t images, int64_t pixels, int64_t channels,
    uint8_t* out) {
#ifdef BACKQUANT_THREADS
#pragma omp parallel for collapse(2)
#endif
  for (int64_t image = 0; image < images; image++)
    for (int64_t at = 0; at < channels; at += GATED) {
      const int64_t some = channels - at < GATED ? channels - at : GATED, start = image * pixels * channels + at;
      float scale[GATED + LANES], shift[GATED + LANES];
      for (int64_t i = 0; i < some; i++) {
        scale[i] = ((float)y[image * channels + at + i] - f.y_zero) * f.scale;
        shift[i] = f.zero - f.x_zero * scale[i];
      }
      for (int64_t i = some; i < some + LANES; i++) scale[i] = shift[i] = 0;
      rescale(x + start, some, channels, scale, shift, f.low, f.high, pixels, out + start, channels);
    }
}

// The mean of each channel of an image, in the integers of x. Four pixels are added up at a time.
static void average(const uint8_t* x, int64_t images, int64_t pixels, int64_t channels, uint8_t* out) {
  const Floats scale = splat(1.0f / pixels);
#ifdef BACKQUANT_THREADS
#pragma omp parallel for collapse(2)
#endif
  for (int64_t image = 0; image < images; image++)
    for (int64_t at = 0; at < channels; at += WIDTH) {
      const int64_t left = channels - at;
      const uint8_t* from = x + image * pixels * channels + at;
      Ints sums[4] = {zero(), zero(), zero(), zero()};
      for (int64_t i = 0; i < pixels; i += 4) {
        Bytes rows[4], mixed[4];
        for (int k = 0; k < 4; k++) {
          const uint8_t* row = from + (i + k) * channels;
          rows[k] = i + k >= pixels ? bytes_everywhere(0) : left >= WIDTH ? load(row) : load_first(row, left);
        }
        interleave(rows, mixed);
        for (int j = 0; j < 4; j++) sums[j] = fours_added(sums[j], mixed[j]);
      }
      for (int j = 0; j < 4; j++) sums[j] = to_ints(multiply(to_floats(sums[j]), scale));
      const Bytes bytes = narrowed(sums[0], sums[1], sums[2], sums[3]);
      store_first(out + image * channels + at, bytes, left < WIDTH ? left : WIDTH);
    }
}

// The windows of a max pooling along one side of an image, which may end beyond it.
struct Windows {
  int64_t length, taps, step, padding;

  // Of the window at `place`, the first element inside of the image and the one behind the last.
  int64_t first(int64_t place) const { return place * step < padding ? 0 : place * step - padding; }
  int64_t end(int64_t place) const {
    const int64_t found = place * step - padding + taps;
    return found < length ? found : length;
  }
};

// One row of a max pooling: maxima over rows of the image, then over their columns. tall: room for a row of the image,
// and a register more; out: [width, channels]. No window is empty.
BACKQUANT_APART static void pool_row(
    const uint8_t* image, const Windows& rows, const Windows& columns, int64_t channels, int64_t row, int64_t width,
    uint8_t* __restrict tall, uint8_t* out) {
  const int64_t size = columns.length * channels;
  const uint8_t* __restrict from = image + rows.first(row) * size;
  memcpy(tall, from, size);
  for (int64_t i = rows.first(row) + 1; i < rows.end(row); i++) {
    from += size;
    for (int64_t k = 0; k < size; k++) tall[k] = from[k] > tall[k] ? from[k] : tall[k];
  }
  const uint8_t* end = out + width * channels;
  for (int64_t place = 0; place < width; place++, out += channels) {
    const int64_t first = columns.first(place), last = columns.end(place);
    for (int64_t at = 0; at < channels; at += WIDTH) {
      Bytes most = load(tall + first * channels + at);
      for (int64_t i = first + 1; i < last; i++) most = larger(most, load(tall + i * channels + at));
      const int64_t left = channels - at;
      if (left >= WIDTH || out + at + WIDTH <= end)  // what is too much belongs to pixels that follow
        store(out + at, most);
      else
        store_first(out + at, most, left);
    }
  }
}

// Floats as integers: a whole number of steps, then the zero point, as in the reference model.
struct Steps {
  float inverse, zero;
};

BACKQUANT_INLINE Ints stepped(Floats x, Floats inverse, Floats shift) {
  const Floats whole = add(rounded(multiply(x, inverse)), shift);
  return to_ints(least(most(whole, splat(0.0f)), splat(255.0f)));
}

BACKQUANT_APART static void quantize(const float* x, int64_t count, const Steps& s, uint8_t* out) {
  const Floats inverse = splat(s.inverse), shift = splat(s.zero);
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) store_narrow(out + at, stepped(load(x + at), inverse, shift), LANES);
  const int64_t left = count - at;
  if (left) store_narrow(out + at, stepped(load_first(x + at, left), inverse, shift), left);
}

// The same of an image times one number a channel. x: [pixels, channels], y: [channels].
BACKQUANT_APART static void quantize_product(
    const float* x, const float* y, int64_t pixels, int64_t channels, const Steps& s, uint8_t* out) {
  const Floats inverse = splat(s.inverse), shift = splat(s.zero);
  const int64_t left = channels % LANES, whole = channels - left;
  for (int64_t pixel = 0; pixel < pixels; pixel++, x += channels, out += channels) {
    for (int64_t at = 0; at < whole; at += LANES)
      store_narrow(out + at, stepped(multiply(load(x + at), load(y + at)), inverse, shift), LANES);
    if (left == 0) continue;
    const Floats last = multiply(load_first(x + whole, left), load_first(y + whole, left));
    store_narrow(out + whole, stepped(last, inverse, shift), left);
  }
}

#if BACKQUANT_LANES == 16

// Sixteen pixels of three planes: which byte of a plane goes where in each register of the result.
struct ThreePlanes {
  __m128i place[3][3];
  __m512 scale, zero;

  ThreePlanes(float inverse, float shift) : scale(splat(inverse)), zero(splat(shift)) {
    for (int part = 0; part < 3; part++)
      for (int plane = 0; plane < 3; plane++) {
        alignas(16) int8_t from[16];
        for (int i = 0; i < 16; i++) from[i] = (part * 16 + i) % 3 == plane ? (part * 16 + i) / 3 : -1;
        place[part][plane] = _mm_load_si128((const __m128i*)from);
      }
  }

  // The first `left` pixels of x, 16 at most. stride: of the planes.
  inline void quantize(const float* x, int64_t stride, int64_t left, uint8_t* out) const {
    const __mmask16 mask = left >= 16 ? 0xffff : (1 << left) - 1;
    __m128i bytes[3];
    for (int plane = 0; plane < 3; plane++) {
      const __m512 v = _mm512_maskz_loadu_ps(mask, x + plane * stride);
      bytes[plane] = _mm512_cvtusepi32_epi8(stepped(v, scale, zero));
    }
    alignas(16) uint8_t some[48];
    uint8_t* to = left >= 16 ? out : some;
    for (int part = 0; part < 3; part++) {
      const __m128i mixed = _mm_or_si128(
          _mm_shuffle_epi8(bytes[0], place[part][0]),
          _mm_or_si128(_mm_shuffle_epi8(bytes[1], place[part][1]), _mm_shuffle_epi8(bytes[2], place[part][2])));
      _mm_storeu_si128((__m128i*)(to + part * 16), mixed);
    }
    if (left < 16) memcpy(out, some, left * 3);
  }
};

// Floats of three planes as integers with the planes next to each other. pixels: of one image.
BACKQUANT_APART static void quantize3(
    const float* x, int64_t images, int64_t pixels, float inverse, float shift, uint8_t* out) {
  const ThreePlanes planes(inverse, shift);
#ifdef BACKQUANT_THREADS
#pragma omp parallel for collapse(2)
#endif
  for (int64_t image = 0; image < images; image++)
    for (int64_t i = 0; i < (pixels + 15) / 16; i++)
      planes.quantize(
          x + image * 3 * pixels + i * 16, pixels, pixels - i * 16, out + (image * pixels + i * 16) * 3);
}

#endif

// The same for any number of planes. stride: of the planes; out: [pixels, planes].
BACKQUANT_APART static void quantize_planes(
    const float* x, int64_t planes, int64_t stride, int64_t pixels, const Steps& s, uint8_t* out) {
#if BACKQUANT_LANES == 16
  if (planes == 3) {
    const ThreePlanes three(s.inverse, s.zero);
    for (int64_t at = 0; at < pixels; at += 16) three.quantize(x + at, stride, pixels - at, out + at * 3);
    return;
  }
#endif
  uint8_t row[WIDTH];
  for (int64_t at = 0; at < pixels; at += WIDTH, out += WIDTH * planes) {
    const int64_t some = pixels - at < WIDTH ? pixels - at : WIDTH;
    for (int64_t plane = 0; plane < planes; plane++) {
      quantize(x + plane * stride + at, some, s, row);
      for (int64_t i = 0; i < some; i++) out[i * planes + plane] = row[i];
    }
  }
}

// The entry of a table of 256 for each byte of rows, the first of which are `between` bytes apart.
#if BACKQUANT_LANES == 16
__attribute__((target("avx512f,avx512bw,avx512vbmi"), noinline)) static void look_up_wide(
    const uint8_t* x, int64_t rows, int64_t count, int64_t between, const uint8_t* table, uint8_t* out) {
  __m512i part[4];
  for (int i = 0; i < 4; i++) part[i] = _mm512_loadu_si512(table + i * 64);
  for (int64_t row = 0; row < rows; row++, x += between, out += count)
    for (int64_t at = 0; at < count; at += 64) {
      const __mmask64 mask = count - at >= 64 ? ~0ull : (1ull << (count - at)) - 1;
      const __m512i index = _mm512_maskz_loadu_epi8(mask, x + at);
      const __m512i low = _mm512_permutex2var_epi8(part[0], index, part[1]);
      const __m512i high = _mm512_permutex2var_epi8(part[2], index, part[3]);
      _mm512_mask_storeu_epi8(out + at, mask, _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high));
    }
}
#endif

static inline void look_up_rows(
    const uint8_t* x, int64_t rows, int64_t count, int64_t between, const uint8_t* table, uint8_t* out) {
#if BACKQUANT_LANES == 16
  if (rows * count >= 64 && __builtin_cpu_supports("avx512vbmi"))
    return look_up_wide(x, rows, count, between, table, out);
#endif
  for (int64_t row = 0; row < rows; row++, x += between, out += count)
    for (int64_t at = 0; at < count; at++) out[at] = table[x[at]];
}

static inline void look_up(const uint8_t* x, int64_t count, const uint8_t* table, uint8_t* out) {
  look_up_rows(x, 1, count, count, table, out);
}

// The channels of two images in turn. step: bytes from one pixel to the next; out: [pixels, 2 * channels].
BACKQUANT_APART static void in_turns(
    const uint8_t* x, int64_t step_x, const uint8_t* y, int64_t step_y, int64_t pixels, int64_t channels,
    uint8_t* out) {
  for (int64_t pixel = 0; pixel < pixels; pixel++, x += step_x, y += step_y, out += 2 * channels) {
    const uint8_t *__restrict a = x, *__restrict b = y;
    uint8_t* __restrict to = out;
#if BACKQUANT_LANES == 16
    for (int64_t i = 0; i < channels; i += 32) {  // as numbers of 16 bits
      const __mmask32 mask = channels - i >= 32 ? ~0u : (1u << (channels - i)) - 1;
      const __m512i even = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, a + i));
      const __m512i odd = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, b + i));
      _mm512_mask_storeu_epi16(to + 2 * i, mask, _mm512_or_si512(even, _mm512_slli_epi16(odd, 8)));
    }
#else
    for (int64_t i = 0; i < channels; i++) to[2 * i] = a[i], to[2 * i + 1] = b[i];
#endif
  }
}

}  // namespace backquant

#endif
