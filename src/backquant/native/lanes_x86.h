// The lanes of x86-64: AVX-512 (16 of 32 bits) and AVX2 (eight). Included by lanes.h, which has the constants.
#ifndef BACKQUANT_LANES_X86_H
#define BACKQUANT_LANES_X86_H

namespace backquant {

#if BACKQUANT_LANES == 16

using Floats = __m512;
using Ints = __m512i;  // 16 of 32 bits
using Bytes = __m512i;
#define BACKQUANT_NAME(name) _mm512_##name
#define BACKQUANT_INTS(name) _mm512_##name##_si512

BACKQUANT_INLINE Floats rounded(Floats x) { return _mm512_roundscale_ps(x, 8); }
BACKQUANT_INLINE Floats times_power(Floats x, Floats whole) { return _mm512_scalef_ps(x, whole); }  // x * 2**whole
BACKQUANT_INLINE Floats about_inverse(Floats x) { return _mm512_rcp14_ps(x); }
BACKQUANT_INLINE Floats magnitude(Floats x) { return _mm512_abs_ps(x); }
BACKQUANT_INLINE Floats signed_as(Floats magnitude, Floats x) {
  const Ints sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x80000000));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(magnitude), sign));
}
BACKQUANT_INLINE Floats where_negative(Floats x, Floats then) {
  return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OS), then);
}
BACKQUANT_INLINE Ints as_ints(Floats x) { return _mm512_castps_si512(x); }
BACKQUANT_INLINE Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }

BACKQUANT_INLINE __mmask64 first_bytes(int64_t count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }
BACKQUANT_INLINE Bytes load_first(const uint8_t* from, int64_t count) {
  return _mm512_maskz_loadu_epi8(first_bytes(count), from);
}
// Masks: a copy of a number of bytes that varies is a call, and takes ten times as long.
BACKQUANT_INLINE void store_first(uint8_t* to, Bytes x, int64_t count) {
  _mm512_mask_storeu_epi8(to, first_bytes(count), x);
}
BACKQUANT_INLINE Floats load_first(const float* from, int64_t count) {
  return _mm512_maskz_loadu_ps((__mmask16)((1 << count) - 1), from);
}
BACKQUANT_INLINE void store_first(float* to, Floats x, int64_t count) {
  _mm512_mask_storeu_ps(to, (__mmask16)((1 << count) - 1), x);
}
// Bytes as floats; of some, the rest is 0.
BACKQUANT_INLINE Floats widened(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
BACKQUANT_INLINE Floats widened(const uint8_t* from, int64_t count) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8((__mmask16)((1 << count) - 1), from)));
}
// What `narrowed` gives, in the order of the registers.
BACKQUANT_INLINE Bytes by_register(Bytes x) {
  const Ints order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, x);
}
// The first `count` of 16 numbers as bytes, saturated.
BACKQUANT_INLINE void store_narrow(uint8_t* to, Ints x, int64_t count) {
  const __m128i bytes = _mm512_cvtusepi32_epi8(_mm512_max_epi32(x, _mm512_setzero_si512()));
  _mm_mask_storeu_epi8(to, (__mmask16)((1 << count) - 1), bytes);
}
// 16 numbers of one register (of two, where it holds eight) in another order: number i is the one at places[i].
BACKQUANT_INLINE void rearrange(const Ints* x, const int32_t* places, Ints* out) {
  out[0] = _mm512_permutexvar_epi32(_mm512_load_si512(places), x[0]);
}
BACKQUANT_INLINE Bytes repeated(const uint8_t* from) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)from));
}
// Each 128 bits of x, 16 numbers apart.
BACKQUANT_INLINE void store_apart(float* to, Floats x) {
  _mm_store_ps(to, _mm512_castps512_ps128(x));
  _mm_store_ps(to + 16, _mm512_extractf32x4_ps(x, 1));
  _mm_store_ps(to + 32, _mm512_extractf32x4_ps(x, 2));
  _mm_store_ps(to + 48, _mm512_extractf32x4_ps(x, 3));
}
#if BACKQUANT_ORDER == BACKQUANT_BYTES
BACKQUANT_INLINE Ints dot(Ints sums, Bytes a, const int8_t* weight) {
  return _mm512_dpbusd_epi32(sums, a, _mm512_loadu_si512(weight));
}
#endif

#else

using Floats = __m256;
using Ints = __m256i;  // eight of 32 bits
using Bytes = __m256i;
#define BACKQUANT_NAME(name) _mm256_##name
#define BACKQUANT_INTS(name) _mm256_##name##_si256

BACKQUANT_INLINE Ints as_ints(Floats x) { return _mm256_castps_si256(x); }
BACKQUANT_INLINE Floats as_floats(Ints x) { return _mm256_castsi256_ps(x); }
BACKQUANT_INLINE Floats rounded(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
BACKQUANT_INLINE Floats times_power(Floats x, Floats whole) {  // x * 2**whole, whole from -126 to 127
  const Ints exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, as_floats(_mm256_slli_epi32(exponent, 23)));
}
BACKQUANT_INLINE Floats about_inverse(Floats x) {  // 22 bits, as the next step of Newton's wants no fewer than 12
  const Floats r = _mm256_rcp_ps(x);
  return _mm256_mul_ps(r, _mm256_fnmadd_ps(x, r, _mm256_set1_ps(2.0f)));
}
BACKQUANT_INLINE Floats magnitude(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
BACKQUANT_INLINE Floats signed_as(Floats magnitude, Floats x) {
  return _mm256_or_ps(magnitude, _mm256_and_ps(x, _mm256_set1_ps(-0.0f)));
}
BACKQUANT_INLINE Floats where_negative(Floats x, Floats then) {
  return _mm256_blendv_ps(x, then, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OS));
}

BACKQUANT_INLINE Bytes load_first(const uint8_t* from, int64_t count) {
  alignas(32) uint8_t some[32] = {0};
  memcpy(some, from, count < 32 ? count : 32);
  return _mm256_load_si256((const __m256i*)some);
}
BACKQUANT_INLINE void store_first(uint8_t* to, Bytes x, int64_t count) {
  alignas(32) uint8_t some[32];
  _mm256_store_si256((__m256i*)some, x);
  memcpy(to, some, count);
}
BACKQUANT_INLINE Ints first_lanes(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
BACKQUANT_INLINE Floats load_first(const float* from, int64_t count) {
  return _mm256_maskload_ps(from, first_lanes(count));
}
BACKQUANT_INLINE void store_first(float* to, Floats x, int64_t count) {
  _mm256_maskstore_ps(to, first_lanes(count), x);
}
// Bytes as floats; of some, the rest is 0.
BACKQUANT_INLINE Floats widened(const uint8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
BACKQUANT_INLINE Floats widened(const uint8_t* from, int64_t count) {
  uint64_t some = 0;
  memcpy(&some, from, count);
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)some)));
}
// What `narrowed` gives, in the order of the registers.
BACKQUANT_INLINE Bytes by_register(Bytes x) {
  return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
// The first `count` of eight numbers as bytes, saturated.
BACKQUANT_INLINE void store_narrow(uint8_t* to, Ints x, int64_t count) {
  const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(x, x), _mm256_setzero_si256());
  const uint64_t found = (uint32_t)_mm256_extract_epi32(bytes, 0) | (uint64_t)(uint32_t)_mm256_extract_epi32(bytes, 4) << 32;
  memcpy(to, &found, count);
}
// 16 numbers of two registers in another order: number i is the one at places[i].
BACKQUANT_INLINE void rearrange(const Ints* x, const int32_t* places, Ints* out) {
  alignas(32) int32_t all[16];
  _mm256_store_si256((__m256i*)all, x[0]);
  _mm256_store_si256((__m256i*)(all + 8), x[1]);
  for (int i = 0; i < 2; i++) out[i] = _mm256_i32gather_epi32(all, _mm256_load_si256((const __m256i*)places + i), 4);
}
BACKQUANT_INLINE Bytes repeated(const uint8_t* from) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
}
// Each 128 bits of x, 16 numbers apart.
BACKQUANT_INLINE void store_apart(float* to, Floats x) {
  _mm_store_ps(to, _mm256_castps256_ps128(x));
  _mm_store_ps(to + 16, _mm256_extractf128_ps(x, 1));
}
#ifdef __AVXVNNI__
BACKQUANT_INLINE Ints dot(Ints sums, Bytes a, const int8_t* weight) {
  return _mm256_dpbusd_avx_epi32(sums, a, _mm256_loadu_si256((const __m256i*)weight));
}
#elif defined(__AVX512VNNI__)
BACKQUANT_INLINE Ints dot(Ints sums, Bytes a, const int8_t* weight) {
  return _mm256_dpbusd_epi32(sums, a, _mm256_loadu_si256((const __m256i*)weight));
}
#endif

#endif

BACKQUANT_INLINE Floats load(const float* from) { return BACKQUANT_NAME(loadu_ps)(from); }
BACKQUANT_INLINE void store(float* to, Floats x) { BACKQUANT_NAME(storeu_ps)(to, x); }
BACKQUANT_INLINE Floats splat(float x) { return BACKQUANT_NAME(set1_ps)(x); }
BACKQUANT_INLINE Floats add(Floats a, Floats b) { return BACKQUANT_NAME(add_ps)(a, b); }
BACKQUANT_INLINE Floats subtract(Floats a, Floats b) { return BACKQUANT_NAME(sub_ps)(a, b); }
BACKQUANT_INLINE Floats multiply(Floats a, Floats b) { return BACKQUANT_NAME(mul_ps)(a, b); }
BACKQUANT_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return BACKQUANT_NAME(fmadd_ps)(a, b, c); }
BACKQUANT_INLINE Floats multiply_subtract(Floats a, Floats b, Floats c) { return BACKQUANT_NAME(fmsub_ps)(a, b, c); }
BACKQUANT_INLINE Floats subtract_product(Floats a, Floats b, Floats c) { return BACKQUANT_NAME(fnmadd_ps)(a, b, c); }  // c - a * b
BACKQUANT_INLINE Floats least(Floats a, Floats b) { return BACKQUANT_NAME(min_ps)(a, b); }
BACKQUANT_INLINE Floats most(Floats a, Floats b) { return BACKQUANT_NAME(max_ps)(a, b); }
BACKQUANT_INLINE Floats to_floats(Ints x) { return BACKQUANT_NAME(cvtepi32_ps)(x); }
BACKQUANT_INLINE Ints to_ints(Floats x) { return BACKQUANT_NAME(cvtps_epi32)(x); }
BACKQUANT_INLINE Ints zero() { return BACKQUANT_INTS(setzero)(); }
BACKQUANT_INLINE Ints load(const int32_t* from) { return BACKQUANT_INTS(loadu)((const Ints*)from); }
BACKQUANT_INLINE void store(int32_t* to, Ints x) { BACKQUANT_INTS(storeu)((Ints*)to, x); }
BACKQUANT_INLINE Ints subtract(Ints a, Ints b) { return BACKQUANT_NAME(sub_epi32)(a, b); }
BACKQUANT_INLINE Bytes load(const uint8_t* from) { return BACKQUANT_INTS(loadu)((const Bytes*)from); }
BACKQUANT_INLINE void store(uint8_t* to, Bytes x) { BACKQUANT_INTS(storeu)((Bytes*)to, x); }

BACKQUANT_INLINE Bytes bytes_everywhere(int x) { return BACKQUANT_NAME(set1_epi8)((char)x); }
BACKQUANT_INLINE Bytes larger(Bytes x, Bytes y) { return BACKQUANT_NAME(max_epu8)(x, y); }
BACKQUANT_INLINE Bytes limited(Bytes x, Bytes least, Bytes most) {
  return BACKQUANT_NAME(min_epu8)(larger(x, least), most);
}

// The sums of neighbouring lanes; within each 128 bits those of a before those of b.
BACKQUANT_INLINE Ints pairs_added(Ints a, Ints b) {
  const Floats even = BACKQUANT_NAME(shuffle_ps)(as_floats(a), as_floats(b), 0x88);
  const Floats odd = BACKQUANT_NAME(shuffle_ps)(as_floats(a), as_floats(b), 0xdd);
  return BACKQUANT_NAME(add_epi32)(as_ints(even), as_ints(odd));
}

// Four registers as bytes, saturated; within each 128 bits four of each register.
BACKQUANT_INLINE Bytes narrowed(Ints a, Ints b, Ints c, Ints d) {
  return BACKQUANT_NAME(packus_epi16)(BACKQUANT_NAME(packs_epi32)(a, b), BACKQUANT_NAME(packs_epi32)(c, d));
}

// The bytes of four rows next to each other: four registers, in each of which 128 bits hold four columns.
BACKQUANT_INLINE void interleave(const Bytes (&rows)[4], Bytes (&found)[4]) {
  const Bytes low01 = BACKQUANT_NAME(unpacklo_epi8)(rows[0], rows[1]);
  const Bytes high01 = BACKQUANT_NAME(unpackhi_epi8)(rows[0], rows[1]);
  const Bytes low23 = BACKQUANT_NAME(unpacklo_epi8)(rows[2], rows[3]);
  const Bytes high23 = BACKQUANT_NAME(unpackhi_epi8)(rows[2], rows[3]);
  found[0] = BACKQUANT_NAME(unpacklo_epi16)(low01, low23);
  found[1] = BACKQUANT_NAME(unpackhi_epi16)(low01, low23);
  found[2] = BACKQUANT_NAME(unpacklo_epi16)(high01, high23);
  found[3] = BACKQUANT_NAME(unpackhi_epi16)(high01, high23);
}

// The left side of `dot`: groups of four bytes. Without VNNI the products are those of pairs of 16 bits.
#if BACKQUANT_ORDER == BACKQUANT_BYTES
using Fours = Bytes;
BACKQUANT_INLINE Fours fours(Bytes x) { return x; }
#else
struct Fours {
  Ints even, odd;  // of 16 bits
};
BACKQUANT_INLINE Fours fours(Bytes x) {
  return {BACKQUANT_INTS(and)(x, BACKQUANT_NAME(set1_epi32)(0x00ff00ff)), BACKQUANT_NAME(srli_epi16)(x, 8)};
}
BACKQUANT_INLINE Ints dot(Ints sums, const Fours& a, const int8_t* weight) {
  const Ints* both = (const Ints*)weight;
  const Ints even = BACKQUANT_NAME(madd_epi16)(a.even, BACKQUANT_INTS(loadu)(both));
  const Ints odd = BACKQUANT_NAME(madd_epi16)(a.odd, BACKQUANT_INTS(loadu)(both + 1));
  return BACKQUANT_NAME(add_epi32)(BACKQUANT_NAME(add_epi32)(sums, even), odd);
}
#endif
// The sums of four neighbouring bytes, added to those of each lane.
BACKQUANT_INLINE Ints fours_added(Ints sums, Bytes x) {
#if BACKQUANT_ORDER == BACKQUANT_BYTES
  alignas(64) int8_t ones[WEIGHTS];
  BACKQUANT_INTS(store)((Ints*)ones, BACKQUANT_NAME(set1_epi8)(1));
  return dot(sums, x, ones);
#else
  const Fours each = fours(x);
  const Ints pairs = BACKQUANT_NAME(add_epi16)(each.even, each.odd);
  return BACKQUANT_NAME(add_epi32)(sums, BACKQUANT_NAME(madd_epi16)(pairs, BACKQUANT_NAME(set1_epi16)(1)));
#endif
}
BACKQUANT_INLINE Fours sixteen_everywhere(const uint8_t* from) { return fours(repeated(from)); }
BACKQUANT_INLINE Fours everywhere(int32_t four) { return fours(BACKQUANT_NAME(set1_epi32)(four)); }

#undef BACKQUANT_NAME
#undef BACKQUANT_INTS

}  // namespace backquant

#endif
