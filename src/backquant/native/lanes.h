// Registers of 32-bit lanes: what kernels.h computes with, on each set of instructions that it is compiled for.
//
// AVX-512 has 16 lanes, AVX2 eight (BACKQUANT_LANES=8 asks for eight where there are 16), NEON four. Four neighbouring
// bytes of an input times four of a weight are added to one lane, exactly: `dot`. ORDER is how it reads weights.
#ifndef BACKQUANT_LANES_H
#define BACKQUANT_LANES_H
#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

// Functions by themselves, so that the sums of their loops stay in registers. Sizes stay variables within: as constants
// they lead GCC to unroll until the sums do not fit.
#if defined(__GNUC__) && !defined(__clang__)
#define BACKQUANT_APART __attribute__((noipa))
#else
#define BACKQUANT_APART __attribute__((noinline))
#endif
#define BACKQUANT_INLINE static inline __attribute__((always_inline))

#ifndef BACKQUANT_LANES
#if defined(__aarch64__)
#define BACKQUANT_LANES 4
#elif defined(__AVX512BW__)
#define BACKQUANT_LANES 16
#else
#define BACKQUANT_LANES 8
#endif
#endif

// Orders of weights; see `Order` in packing.py.
#define BACKQUANT_BYTES 1   // four bytes of each lane
#define BACKQUANT_PAIRS 2   // 16 bits each, the even ones of a register before the odd ones
#define BACKQUANT_PLACES 3  // 16 bits each, the first ones of all lanes, then the second ones ...
#define BACKQUANT_SIGNED 4  // four bytes; inputs count less 128, which the correction makes up for
#if defined(__aarch64__)
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define BACKQUANT_ORDER BACKQUANT_BYTES
#elif defined(__ARM_FEATURE_DOTPROD)
#define BACKQUANT_ORDER BACKQUANT_SIGNED
#else
#define BACKQUANT_ORDER BACKQUANT_PLACES
#endif
#elif defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define BACKQUANT_ORDER BACKQUANT_BYTES
#else
#define BACKQUANT_ORDER BACKQUANT_PAIRS
#endif

namespace backquant {

constexpr int LANES = BACKQUANT_LANES;
constexpr int WIDTH = 4 * LANES;  // bytes of a register
constexpr int ORDER = BACKQUANT_ORDER;
constexpr int WEIGHT_BYTES = ORDER == BACKQUANT_PAIRS || ORDER == BACKQUANT_PLACES ? 2 : 1;  // of one, as it is packed
constexpr int WEIGHTS = WIDTH * WEIGHT_BYTES;  // bytes of the weights that one `dot` takes

}  // namespace backquant

#ifdef __aarch64__
#include "lanes_arm.h"
#else
#include "lanes_x86.h"
#endif

namespace backquant {

// Without masks 32 at a time, as far as there are: most images have such numbers of channels.
BACKQUANT_INLINE void copy_bytes(const uint8_t* from, int64_t count, uint8_t* to) {
  int64_t at = 0;
#if BACKQUANT_LANES == 16
  for (; at + WIDTH <= count; at += WIDTH) store(to + at, load(from + at));
  if (at < count) store_first(to + at, load_first(from + at, count - at), count - at);
#else
  for (; at + 32 <= count; at += 32) memcpy(to + at, from + at, 32);
  if (at + 16 <= count) memcpy(to + at, from + at, 16), at += 16;
  if (at < count) memcpy(to + at, from + at, count - at);
#endif
}

}  // namespace backquant

#endif
