// Convolutions and linear layers on 8-bit integers for CPUs with AMX: products of tiles of 16 rows with 64 bytes.
//
// Weights are packed as for kernels.h, with at most 32 channels a block. A row of the left side is what one output
// pixel reads: of a 1x1 convolution or linear layer the input itself, of others gathered beforehand.
#ifndef BACKQUANT_TILES
#define BACKQUANT_TILES
#include <algorithm>
#include <memory>

#include "kernels.h"

namespace backquant {

// The instructions are spelled out: compilers differ in what they order around their intrinsics.
#define BACKQUANT_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::: "memory")
#define BACKQUANT_LOAD(tile, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define BACKQUANT_STORE(tile, to, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
#define BACKQUANT_MULTIPLY(sum, left, right) \
  asm volatile("tdpbusd %%tmm" #right ", %%tmm" #left ", %%tmm" #sum ::: "memory")

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums, 4 and 5 pixels, 6 and 7 weights; step: integers that one product adds up.
static inline void shape_tiles(int64_t step) {
  TileShapes shapes;
  for (int i = 0; i < 8; i++) {
    shapes.bytes[i] = i == 4 || i == 5 ? step : 64;
    shapes.rows[i] = i >= 6 ? step / 4 : 16;
  }
  asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
}

static inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

// MT * 16 pixels times NB * 16 channels. `between` runs beside the products.
template <int MT, int NB, typename Between>
static inline __attribute__((always_inline)) void multiply_tiles(
    const uint8_t* a, int64_t row, const int8_t* b, int64_t steps, int64_t step, int32_t* sums, Between between) {
  BACKQUANT_ZERO(0);
  if constexpr (NB > 1) BACKQUANT_ZERO(1);
  if constexpr (MT > 1) BACKQUANT_ZERO(2);
  if constexpr (MT > 1 && NB > 1) BACKQUANT_ZERO(3);
  for (int64_t s = 0; s < steps; s++, a += step, b += step * NB * 16) {
    BACKQUANT_LOAD(4, a, row);
    BACKQUANT_LOAD(6, b, NB * 64);
    BACKQUANT_MULTIPLY(0, 4, 6);
    if constexpr (NB > 1) {
      BACKQUANT_LOAD(7, b + 64, NB * 64);
      BACKQUANT_MULTIPLY(1, 4, 7);
    }
    if constexpr (MT > 1) {
      BACKQUANT_LOAD(5, a + 16 * row, row);
      BACKQUANT_MULTIPLY(2, 5, 6);
      if constexpr (NB > 1) BACKQUANT_MULTIPLY(3, 5, 7);
    }
    between();
  }
  BACKQUANT_STORE(0, sums, NB * 64);
  if constexpr (NB > 1) BACKQUANT_STORE(1, sums + 16, NB * 64);
  if constexpr (MT > 1) BACKQUANT_STORE(2, sums + 256 * NB, NB * 64);
  if constexpr (MT > 1 && NB > 1) BACKQUANT_STORE(3, sums + 256 * NB + 16, NB * 64);
}

// Up to 63 bytes more than `count` are written.
static inline void copy_run(uint8_t* to, const uint8_t* from, int64_t count) {
  for (; count >= 64; count -= 64, to += 64, from += 64) _mm512_storeu_si512(to, _mm512_loadu_si512(from));
  if (count > 0) _mm512_storeu_si512(to, _mm512_maskz_loadu_epi8((1ull << count) - 1, from));
}

// What each of `count` pixels reads, its taps `slot` bytes apart.
BACKQUANT_APART static void gather(
    const uint8_t* x, const Geometry& g, int64_t first, int64_t count, int64_t slot, uint8_t* to) {
  const int64_t width = g.run / g.c;
  int64_t column = first % g.ow, line = first / g.ow;
  uint8_t edge[256];
  for (int64_t p = 0; p < count; p++) {
    const uint8_t* image = x + line / g.oh * g.h * g.w * g.c;
    const int64_t top = line % g.oh * g.sh - g.ph, left = column * g.sw - g.pw;
    for (int64_t i = 0; i < g.kh; i++) {
      const int64_t r = top + i * g.dh;
      const uint8_t* row = image + r * g.w * g.c;
      for (int64_t j = 0; j < g.kw; j++, to += slot) {
        const int64_t c = left + j * g.dw;
        const uint8_t* from = row + c * g.c;
        if ((uint64_t)r >= (uint64_t)g.h)
          from = g.outside;
        else if (c < 0 || c + width > g.w)
          from = width == 1 ? g.outside : at_edge(edge, row, g, c);
        copy_run(to, from, g.run);
      }
    }
    if (++column == g.ow) column = 0, line++;
  }
}

// Room for gathered rows, kept from call to call.
inline uint8_t* gathered(size_t bytes) {
  static thread_local std::unique_ptr<uint8_t[]> room;
  static thread_local size_t size = 0;
  if (bytes > size) {
    room.reset(new uint8_t[bytes]);
    size = bytes;
  }
  return room.get();
}

// The left side of the pixels from `begin` to `end`: rows `row` bytes apart, of which there are some from pixel
// `origin` (at `from`) up to `most`.
struct Rows {
  const uint8_t* from;
  int64_t row, origin, begin, end, most;
};

// One block of NB * 16 output channels from `channel` on. The sums of some pixels become results while the products
// of the next ones are computed: what a tile stores is ready only much later.
template <int NB, int TAIL, int ACT, bool ADD, typename OUT>
struct TiledBlock {
  using One = Tile<1, NB, TAIL, ACT, ADD, OUT>;
  static constexpr int SUMS = 32 * NB * 16;
  const Rows& a;
  const int8_t* weight;
  const Geometry& g;
  const Epilogue& e;
  int64_t steps, step, channel;
  OUT* out;
  const int32_t* ready = nullptr;  // the sums of `pixel`
  int64_t pixel = 0, last = 0;     // pixels whose sums are no results yet

  inline __attribute__((always_inline)) void finish(int64_t count) {
    for (; count > 0 && pixel < last; count--, pixel++, ready += NB * 16) {
      __m512i found[1][NB];
#pragma GCC unroll 2
      for (int j = 0; j < NB; j++) found[0][j] = _mm512_load_si512(ready + j * 16);
      One::finish(found, e, channel, pixel, 1, g.oc);
      One::store(found[0], bounds_of(e), out + pixel * g.oc + channel);
    }
  }

  template <int MT>
  inline void multiply(int64_t first, int32_t* sums) {
    const int64_t start = std::min(first, a.most - MT * 16);  // the last ones overlap those before
    const int64_t each = (32 + steps - 1) / steps;
    multiply_tiles<MT, NB>(
        a.from + (start - a.origin) * a.row, a.row, weight, steps, step, sums, [&] { finish(each); });
    finish(32);
    ready = sums + (first - start) * NB * 16, pixel = first, last = std::min(first + MT * 16, a.end);
  }

  BACKQUANT_APART void run() {
    alignas(64) int32_t sums[2][SUMS];
    int turn = 0;
    for (int64_t first = a.begin; first < a.end; turn ^= 1) {
      const bool two = a.end - first > 16 && a.most >= 32;
      two ? multiply<2>(first, sums[turn]) : multiply<1>(first, sums[turn]);
      first += two ? 32 : 16;
    }
    finish(32);
  }
};

// A convolution, or a linear layer over pixels; see `convolution` in kernels.h. step: divides the integers of a row.
template <int NB, int LAST, int TAIL, int ACT, bool ADD, typename OUT>
static void tiled_convolution(
    const uint8_t* x, const int8_t* weight, const Geometry& g, const Epilogue& e, int64_t blocks, int64_t group,
    int64_t step, OUT* out) {
  const int64_t pixels = g.n * g.oh * g.ow, groups = (pixels + group - 1) / group;
  const int64_t slot = (g.run + 3) & ~int64_t(3), taps = g.kh * g.kw, total = slot * taps;
  const bool direct = taps * g.sh * g.sw == 1 && g.run == g.c && g.ph + g.pw == 0 && slot == g.run && pixels >= 16;
#ifdef BACKQUANT_THREADS
#pragma omp parallel for
#endif
  for (int64_t place = 0; place < groups; place++) {
    Rows a{x, g.c, 0, place * group, std::min(place * group + group, pixels), pixels};
    if (!direct) {
      uint8_t* room = gathered((group + 31) * total + 64);
      gather(x, g, a.begin, a.end - a.begin, slot, room);
      a.from = room, a.row = total, a.origin = a.begin, a.most = a.end + 31;
    }
    shape_tiles(step);
    for (int64_t n = 0; n < blocks; n++) {
      const int8_t* own = weight + n * total * NB * 16;
      if (n < blocks - 1)
        TiledBlock<NB, 16, ACT, ADD, OUT>{a, own, g, e, total / step, step, n * NB * 16, out}.run();
      else
        TiledBlock<LAST, TAIL, ACT, ADD, OUT>{a, own, g, e, total / step, step, n * NB * 16, out}.run();
    }
    release_tiles();
  }
}

}  // namespace backquant

#endif
