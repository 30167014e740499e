// Convolutions in groups of few channels, several groups at a time.
#ifndef BACKQUANT_GROUPED
#define BACKQUANT_GROUPED
#include "kernels.h"

namespace backquant {

// Groups of DEEP channels in and out, 4, 8 or 16: SPAN channels at a time, whose 16 bytes are read to each 128 bits of a
// register. Its lanes hold, by turns, four integers of one group each; what one sum is made of in several lanes is added
// up at the end.
constexpr int SPAN = 16;
constexpr int SPAN_REGISTERS = SPAN / LANES;

template <int DEEP>
struct Grouped {
  static constexpr int OUTPUTS = LANES / 4;             // of each group in one register
  static constexpr int REGISTERS = DEEP / OUTPUTS;      // of sums before those of one group are added up
  static constexpr int PARTS = DEEP / 4;                // lanes that make one sum
  // pixels at a time, at most
  static constexpr int MOST = LANES == 8 ? 12 : 24;  // sums, of 16 registers or of 32
  static constexpr int ROWS = MOST / REGISTERS < 1 ? 1 : MOST / REGISTERS > 8 ? 8 : MOST / REGISTERS;

  // Where the sum of each channel is after `added_up`, in 32-bit numbers.
  struct Places {
    alignas(64) int32_t of[SPAN];
  };
  static constexpr Places places() {
    Places found{};
    for (int at = 0; at < SPAN; at++) {
      const int lane = at % 4, inner = at % LANES / 4, part = PARTS < 4 ? PARTS : 4;
      const int group = lane % (4 / part), row = at / LANES * part + lane / (4 / part);
      found.of[group * DEEP + row * OUTPUTS + inner] = at;
    }
    return found;
  }

  // The sums of one pixel in the order of its channels.
  static inline __attribute__((always_inline)) void arrange(Ints (&sums)[REGISTERS], Ints* out) {
#pragma GCC unroll 2
    for (int parts = PARTS, count = REGISTERS; parts > 1; parts /= 2, count /= 2)
#pragma GCC unroll 4
      for (int r = 0; r < count / 2; r++) sums[r] = pairs_added(sums[2 * r], sums[2 * r + 1]);
    static constexpr Places order = places();
    rearrange(sums, order.of, out);
  }

  // Products of MR pixels with SPAN channels. rows: MR pointers for each tap, to the first of the channels behind offset.
  template <int MR>
  BACKQUANT_APART static void accumulate(
      const uint8_t* const* rows, int64_t taps, int64_t offset, const int8_t* weight, Ints* out) {
    Ints sums[MR][REGISTERS];
#pragma GCC unroll 24
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
      for (int j = 0; j < REGISTERS; j++) sums[i][j] = zero();
    for (int64_t tap = 0; tap < taps; tap++, rows += MR, weight += REGISTERS * WEIGHTS) {
#pragma GCC unroll 24
      for (int i = 0; i < MR; i++) {
        const Fours a = sixteen_everywhere(rows[i] + offset);
#pragma GCC unroll 8
        for (int j = 0; j < REGISTERS; j++) sums[i][j] = dot(sums[i][j], a, weight + j * WEIGHTS);
      }
    }
#pragma GCC unroll 24
    for (int i = 0; i < MR; i++) arrange(sums[i], out + i * SPAN_REGISTERS);
  }
};

// The rows of the last channels, of which fewer than SPAN exist, copied where reading SPAN would pass the input's end.
static inline void within(
    const uint8_t* x, const Geometry& g, int64_t offset, int64_t count, const uint8_t** rows, uint8_t (*room)[SPAN]) {
  const uint8_t* beyond = x + g.n * g.h * g.w * g.c;
  for (int64_t i = 0; i < count; i++) {
    const uint8_t* from = rows[i] + offset;
    if (from < x || from >= beyond || from + SPAN <= beyond) continue;
    memset(room[i], 0, SPAN);
    memcpy(room[i], from, beyond - from);
    rows[i] = room[i] - offset;
  }
}

// A convolution in groups of DEEP channels, for the pixels from `begin` to `end`.
template <int MR, int DEEP, int TAIL, int ACT, typename OUT>
BACKQUANT_APART static void grouped_block(
    const uint8_t* x, const int8_t* weight, const Geometry& g, const Epilogue& e, int64_t begin, int64_t end,
    OUT* out) {
  constexpr int LAST = (TAIL + LANES - 1) / LANES;  // registers of the last channels
  const uint8_t* rows[MAX_TAPS * MR];
  uint8_t room[MAX_TAPS * MR][SPAN];
  const int64_t taps = g.kh * g.kw, size = taps * Grouped<DEEP>::REGISTERS * WEIGHTS;
  for (int64_t first = begin; first < end; first += MR) {
    const int64_t pixels = end - first < MR ? end - first : MR;
    addresses(x, g, first, pixels, MR, rows, nullptr, x);
    for (int64_t channel = 0; channel < g.oc; channel += SPAN) {
      const bool whole = channel + SPAN <= g.oc;
      if (!whole) within(x, g, channel, taps * MR, rows, room);
      Ints sums[MR][SPAN_REGISTERS];
      Grouped<DEEP>::template accumulate<MR>(rows, taps, channel, weight + channel / SPAN * size, &sums[0][0]);
      OUT* to = out + first * g.oc + channel;
      if (whole) {
        Tile<MR, SPAN_REGISTERS, LANES, ACT, false, OUT>::give(sums, e, channel, pixels, g.oc, to);
      } else if constexpr (LAST == SPAN_REGISTERS) {
        Tile<MR, LAST, TAIL - (LAST - 1) * LANES, ACT, false, OUT>::give(sums, e, channel, pixels, g.oc, to);
      } else {
        Ints some[MR][LAST];
        for (int i = 0; i < MR; i++)
          for (int j = 0; j < LAST; j++) some[i][j] = sums[i][j];
        Tile<MR, LAST, TAIL - (LAST - 1) * LANES, ACT, false, OUT>::give(some, e, channel, pixels, g.oc, to);
      }
    }
  }
}

// Pixels in groups for the threads.
template <int MR, int DEEP, int TAIL, int ACT, typename OUT>
static void grouped(const uint8_t* x, const int8_t* weight, const Geometry& g, const Epilogue& e, OUT* out) {
  const int64_t pixels = g.n * g.oh * g.ow;
#ifdef BACKQUANT_THREADS
#pragma omp parallel for
  for (int64_t row = 0; row < g.n * g.oh; row++)
    grouped_block<MR, DEEP, TAIL, ACT>(x, weight, g, e, row * g.ow, (row + 1) * g.ow, out);
#else
  grouped_block<MR, DEEP, TAIL, ACT>(x, weight, g, e, 0, pixels, out);
#endif
}

}  // namespace backquant

#endif
