// Convolutions and linear layers on 8-bit integers for CPUs with AMX: products of tiles of 16 rows with 64 bytes.
//
// Weights are packed as for kernels.h, with at most 32 channels a block. A row of the left side is what one output
// pixel reads: of a 1x1 convolution or linear layer the input itself; of most others what lies in an image with
// borders, one tap after the other; of those with little in a line all taps, gathered beforehand.
#ifndef BACKQUANT_TILES
#define BACKQUANT_TILES
#include <algorithm>
#include <memory>
#include <vector>

#include "kernels.h"

namespace backquant {

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

#ifdef BACKQUANT_EMULATED_TILES
// The same without AMX, slowly: for tests.
struct EmulatedTiles {
  TileShapes shapes;
  uint8_t held[8][16][64];

  void zero(int tile) { memset(held[tile], 0, sizeof(held[tile])); }
  void load(int tile, const void* from, int64_t stride) {
    zero(tile);
    for (int i = 0; i < shapes.rows[tile]; i++)
      memcpy(held[tile][i], (const uint8_t*)from + i * stride, shapes.bytes[tile]);
  }
  void store(int tile, void* to, int64_t stride) const {
    for (int i = 0; i < shapes.rows[tile]; i++) memcpy((uint8_t*)to + i * stride, held[tile][i], shapes.bytes[tile]);
  }
  void multiply(int sum, int left, int right) {
    int32_t(*sums)[16] = (int32_t(*)[16])held[sum];
    for (int i = 0; i < shapes.rows[sum]; i++)
      for (int j = 0; j < shapes.bytes[sum] / 4; j++)
        for (int k = 0; k < shapes.bytes[left]; k++)
          sums[i][j] += held[left][i][k] * (int8_t)held[right][k / 4][j * 4 + k % 4];
  }
};
static thread_local EmulatedTiles emulated_tiles;
#define BACKQUANT_ZERO(tile) emulated_tiles.zero(tile)
#define BACKQUANT_LOAD(tile, from, stride) emulated_tiles.load(tile, from, stride)
#define BACKQUANT_STORE(tile, to, stride) emulated_tiles.store(tile, to, stride)
#define BACKQUANT_MULTIPLY(sum, left, right) emulated_tiles.multiply(sum, left, right)
static inline void configure_tiles(const TileShapes& shapes) { emulated_tiles.shapes = shapes; }
static inline void release_tiles() { emulated_tiles.shapes = TileShapes(); }
#else
// The instructions are spelled out: compilers differ in what they order around their intrinsics.
#define BACKQUANT_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::: "memory")
#define BACKQUANT_LOAD(tile, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define BACKQUANT_STORE(tile, to, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
#define BACKQUANT_MULTIPLY(sum, left, right) \
  asm volatile("tdpbusd %%tmm" #right ", %%tmm" #left ", %%tmm" #sum ::: "memory")
static inline void configure_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
static inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }
#endif

// Tiles 0 to 3 are sums, 4 and 5 pixels, 6 and 7 weights; step: integers that one product adds up.
static inline void shape_tiles(int64_t step) {
  TileShapes shapes;
  for (int i = 0; i < 8; i++) {
    shapes.bytes[i] = i == 4 || i == 5 ? step : 64;
    shapes.rows[i] = i >= 6 ? step / 4 : 16;
  }
  configure_tiles(shapes);
}

// What tiles multiply: pixels `row` bytes apart, in lines of `line` pixels, of which the first `ow` have results, in
// order from `result` on. The pixels from `begin` to `end` are computed; `most` of them can be read. Product s reads
// `step` bytes of a pixel from places[s] on.
struct Left {
  const uint8_t* from;
  int64_t row, begin, end, most, line, ow, result;
  const int64_t* places;
  int64_t steps, step;
};

// MT * 16 pixels times NB * 16 channels. `between` runs beside the products.
template <int MT, int NB, typename Between>
static inline __attribute__((always_inline)) void multiply_tiles(
    const uint8_t* first, const Left& a, const int8_t* b, int32_t* sums, Between between) {
  const int64_t row = a.row, step = a.step;
  BACKQUANT_ZERO(0);
  if constexpr (NB > 1) BACKQUANT_ZERO(1);
  if constexpr (MT > 1) BACKQUANT_ZERO(2);
  if constexpr (MT > 1 && NB > 1) BACKQUANT_ZERO(3);
  for (int64_t s = 0; s < a.steps; s++, b += step * NB * 16) {
    const uint8_t* from = first + a.places[s];
    BACKQUANT_LOAD(4, from, row);
    BACKQUANT_LOAD(6, b, NB * 64);
    BACKQUANT_MULTIPLY(0, 4, 6);
    if constexpr (NB > 1) {
      BACKQUANT_LOAD(7, b + 64, NB * 64);
      BACKQUANT_MULTIPLY(1, 4, 7);
    }
    if constexpr (MT > 1) {
      BACKQUANT_LOAD(5, from + 16 * row, row);
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

// Memory that is kept from call to call, by purpose; a line of the cache begins with it, so that no row of a tile is
// spread over two where pixels are such lines.
template <int PURPOSE>
inline uint8_t* room(size_t bytes) {
  static thread_local std::unique_ptr<uint8_t[]> held;
  static thread_local size_t size = 0;
  if (bytes > size) {
    held.reset(new uint8_t[bytes + 63]);
    size = bytes;
  }
  return (uint8_t*)(((uintptr_t)held.get() + 63) & ~(uintptr_t)63);
}

// The lines from `begin` to `end` of all images with the borders of padding around each.
BACKQUANT_APART static void add_borders(const uint8_t* x, const Geometry& g, int64_t begin, int64_t end, uint8_t* to) {
  const int64_t height = g.h + 2 * g.ph, side = g.pw * g.c, width = g.w * g.c, line = width + 2 * side;
  const int outside = g.ph + g.pw > 0 ? g.outside[0] : 0;
  for (int64_t i = begin; i < end; i++) {
    uint8_t* own = to + i * line;
    const int64_t y = i % height - g.ph;
    if (y < 0 || y >= g.h) {
      memset(own, outside, line);
      continue;
    }
    memset(own, outside, side);
    memcpy(own + side, x + (i / height * g.h + y) * width, width);
    memset(own + side + width, outside, side);
  }
}

// How the left side of a convolution, or of a linear layer over pixels, is read. step: divides what one result reads.
struct TiledInput {
  // BORDERED: all lines of an image as one, what lies between them is multiplied for nothing; LINES: each by itself.
  enum Way { LIES, BORDERED, LINES, GATHERED };
  static constexpr int64_t CACHED = 1 << 19;  // bytes that stay in the second-level cache while all channels read them

  const uint8_t* x;
  const Geometry& g;
  int64_t step, slot, total, across;  // across: pixels of a line with its borders
  Way way;
  int64_t images, pixels, line, ow, size, group;  // pixels: of an image, over whole lines; size: bytes between them
  std::vector<int64_t> places;
  uint8_t* bordered = nullptr;

  TiledInput(const uint8_t* x, const Geometry& g, int64_t step, int64_t threads)
      : x(x), g(g), step(step), slot((g.run + 3) & ~int64_t(3)), total(slot * g.kh * g.kw), across(g.w + 2 * g.pw) {
    const int64_t all = g.n * g.oh * g.ow, joined = (g.oh - 1) * across + g.ow;
    way = way_of(all, joined);
    const bool apart = way == LINES, together = way == BORDERED;
    images = apart ? g.n * g.oh : together ? g.n : 1;
    ow = apart || together ? g.ow : all;
    line = together ? across : ow;
    pixels = together ? joined : ow;
    size = way == GATHERED ? total : g.sw * g.c;
    const int64_t each = (images * pixels + threads - 1) / threads;
    group = (std::min(std::max<int64_t>(CACHED / size, 32), each) + 31) / 32 * 32;
    for (int64_t s = 0; s < total / step; s++) {
      const int64_t tap = s * step / slot, within = s * step % slot;
      const int64_t there = (tap / g.kw * g.dh * across + tap % g.kw * g.dw) * g.c + within;
      places.push_back(apart || together ? there : s * step);
    }
    if (apart || together) bordered = room<0>((lines() * across + 32 * g.sw) * g.c + 64);
  }

  Way way_of(int64_t all, int64_t joined) const {
    const bool follow = g.sh * g.sw == 1;
    const int64_t tiles = (g.ow + 15) / 16 * 16;
    if (follow && total == g.c && g.ph + g.pw == 0 && all >= 16) return LIES;
    if (slot % step) return GATHERED;
    if (follow && 2 * joined <= 3 * g.oh * g.ow) return BORDERED;
    return 4 * tiles <= 5 * g.ow ? LINES : GATHERED;
  }

  int64_t lines() const { return g.n * (g.h + 2 * g.ph); }  // that `add_borders` writes
  int64_t parts() const { return images * ((pixels + group - 1) / group); }

  Left part(int64_t place) const {
    const int64_t each = (pixels + group - 1) / group, image = place / each;
    const int64_t begin = place % each * group, end = std::min(begin + group, pixels);
    Left a{x, size, begin, end, pixels, line, ow, 0, places.data(), (int64_t)places.size(), step};
    if (bordered) {
      const int64_t y = way == LINES ? image / g.oh * (g.h + 2 * g.ph) + image % g.oh * g.sh : image * (g.h + 2 * g.ph);
      a.from = bordered + y * across * g.c;
      a.most = INT64_MAX;
      a.result = image * (way == LINES ? g.ow : g.oh * g.ow);
    } else if (way == GATHERED) {
      uint8_t* rows = room<1>((group + 32) * total + 64);
      gather(x, g, begin, end - begin, slot, rows);
      a.from = rows - begin * total;
      a.most = INT64_MAX;
    }
    return a;
  }
};

// One block of NB * 16 output channels. `finish(sums, count, result)` makes results of the sums of some pixels, while
// the products of the next ones are computed: what a tile stores is ready only much later.
template <int NB, typename Finish>
struct TiledBlock {
  const Left& a;
  const int8_t* weight;
  const Finish& finish;
  const int32_t* ready = nullptr;            // the sums of `pixel`
  int64_t pixel = 0, last = 0, column = 0, result = 0;  // pixels whose sums are no results yet

  inline void pass(int64_t count) {
    pixel += count, column += count, ready += count * NB * 16;
    if (column == a.line) column = 0;
  }

  inline void finish_some(int64_t count) {
    while (count > 0 && pixel < last) {
      if (column >= a.ow) {
        pass(std::min(a.line - column, last - pixel));
        continue;
      }
      const int64_t some = std::min({count, a.ow - column, last - pixel});
      finish(ready, some, result);
      result += some, count -= some;
      pass(some);
    }
  }

  template <int MT>
  inline void multiply(int64_t first, int32_t* sums) {
    const int64_t start = std::min(first, a.most - MT * 16);  // the last ones overlap those before
    const int64_t each = (32 + a.steps - 1) / a.steps;
    multiply_tiles<MT, NB>(a.from + start * a.row, a, weight, sums, [&] { finish_some(each); });
    finish_some(32);
    ready = sums + (first - start) * NB * 16, pixel = first, last = std::min(first + MT * 16, a.end);
  }

  BACKQUANT_APART void run() {
    alignas(64) int32_t sums[2][32 * NB * 16];
    int turn = 0;
    column = a.begin % a.line, result = a.result + a.begin / a.line * a.ow + std::min(column, a.ow);
    for (int64_t first = a.begin; first < a.end; turn ^= 1) {
      const bool two = a.end - first > 16 && a.most >= 32;
      two ? multiply<2>(first, sums[turn]) : multiply<1>(first, sums[turn]);
      first += two ? 32 : 16;
    }
    finish_some(32);
  }
};

template <int NB, typename Finish>
static inline void run_tiles(const Left& a, const int8_t* weight, const Finish& finish) {
  TiledBlock<NB, Finish>{a, weight, finish}.run();
}

// Sums of NB * 16 channels from `channel` on, as results.
template <int NB, int TAIL, int ACT, bool ADD, typename OUT>
struct TileResults {
  using One = Tile<1, NB, TAIL, ACT, ADD, OUT>;
  const Epilogue& e;
  int64_t channel, channels;
  OUT* out;

  inline void operator()(const int32_t* sums, int64_t count, int64_t pixel) const {
    for (; count > 0; count--, pixel++, sums += NB * 16) {
      __m512i found[1][NB];
#pragma GCC unroll 2
      for (int j = 0; j < NB; j++) found[0][j] = _mm512_load_si512(sums + j * 16);
      One::finish(found, e, channel, pixel, 1, channels);
      One::store(found[0], bounds_of(e), out + pixel * channels + channel);
    }
  }
};

// A convolution, or a linear layer over pixels; see `convolution` in kernels.h. step: divides the integers of a row.
template <int NB, int LAST, int TAIL, int ACT, bool ADD, typename OUT>
static void tiled_convolution(
    const uint8_t* x, const int8_t* weight, const Geometry& g, const Epilogue& e, int64_t blocks, int64_t threads,
    int64_t step, OUT* out) {
  const TiledInput in(x, g, step, threads);
  if (in.bordered) add_borders(x, g, 0, in.lines(), in.bordered);
#ifdef BACKQUANT_THREADS
#pragma omp parallel for
#endif
  for (int64_t place = 0; place < in.parts(); place++) {
    const Left a = in.part(place);
    shape_tiles(step);
    for (int64_t n = 0; n < blocks; n++) {
      const int8_t* own = weight + n * in.total * NB * 16;
      if (n < blocks - 1)
        run_tiles<NB>(a, own, TileResults<NB, 16, ACT, ADD, OUT>{e, n * NB * 16, g.oc, out});
      else
        run_tiles<LAST>(a, own, TileResults<LAST, TAIL, ACT, ADD, OUT>{e, n * NB * 16, g.oc, out});
    }
    release_tiles();
  }
}

}  // namespace backquant

#endif
