/* What this core can do at most: products of 8-bit integers a second, bytes read a second. One line of JSON. */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SUMS 16
#define ROUNDS 2000000
#define TRIES 7

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Multiply-adds a second of vpdpbusd in a loop that stays in registers. */
static double products(volatile int *sink) {
  __m512i sums[SUMS], x = _mm512_set1_epi8((char)*sink), w = _mm512_set1_epi8((char)(*sink + 1));
  double best = 0;
  for (int i = 0; i < SUMS; i++) sums[i] = _mm512_setzero_si512();
  for (int t = 0; t < TRIES; t++) {
    double start = now();
    for (int r = 0; r < ROUNDS; r++) {
#pragma GCC unroll 16
      for (int i = 0; i < SUMS; i++) sums[i] = _mm512_dpbusd_epi32(sums[i], x, w);
    }
    double rate = 64.0 * SUMS * ROUNDS / (now() - start);
    if (rate > best) best = rate;
  }
  for (int i = 1; i < SUMS; i++) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
  *sink = _mm512_reduce_add_epi32(sums[0]);
  return best;
}

/* Bytes a second of a loop that reads ``size`` bytes over and over, 512 MiB in all for each try. */
static double reads(size_t size, volatile int *sink) {
  char *data = aligned_alloc(4096, size);
  if (!data) exit(1);
  memset(data, 1, size);
  size_t times = ((size_t)512 << 20) / size;
  double best = 0;
  __m512i sum[8];
  for (int i = 0; i < 8; i++) sum[i] = _mm512_setzero_si512();
  for (int t = 0; t < TRIES; t++) {
    double start = now();
    for (size_t r = 0; r < times; r++)
      for (size_t at = 0; at < size; at += 512) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
          sum[i] = _mm512_add_epi32(sum[i], _mm512_load_si512((const void *)(data + at + 64 * i)));
      }
    double rate = (double)size * times / (now() - start);
    if (rate > best) best = rate;
  }
  for (int i = 1; i < 8; i++) sum[0] = _mm512_add_epi32(sum[0], sum[i]);
  *sink = _mm512_reduce_add_epi32(sum[0]);
  free(data);
  return best;
}

int main(void) {
  volatile int sink = 3;
  double memory = reads((size_t)256 << 20, &sink), cache = reads((size_t)4 << 20, &sink);
  printf("{\"products\": %.4g, \"memory\": %.4g, \"cache\": %.4g}\n", products(&sink), memory, cache);
  return 0;
}
