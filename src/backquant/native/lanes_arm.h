// The lanes of 64-bit ARM: NEON, four of 32 bits. Included by lanes.h, which has the constants.
//
// Products of bytes with signed bytes are one instruction with i8mm. The dot product of older CPUs takes signed bytes on
// both sides: inputs count less 128, and the plan's correction makes up for it. CPUs without either multiply 16 bits.
#ifndef BACKQUANT_LANES_ARM_H
#define BACKQUANT_LANES_ARM_H

namespace backquant {

using Floats = float32x4_t;
using Ints = int32x4_t;
using Bytes = uint8x16_t;

BACKQUANT_INLINE Ints as_ints(Floats x) { return vreinterpretq_s32_f32(x); }
BACKQUANT_INLINE Floats as_floats(Ints x) { return vreinterpretq_f32_s32(x); }
BACKQUANT_INLINE Floats splat(float x) { return vdupq_n_f32(x); }
BACKQUANT_INLINE Ints zero() { return vdupq_n_s32(0); }
BACKQUANT_INLINE Bytes bytes_everywhere(int x) { return vdupq_n_u8((uint8_t)x); }

// ---- memory; of some, the rest is 0

BACKQUANT_INLINE Floats load(const float* from) { return vld1q_f32(from); }
BACKQUANT_INLINE Ints load(const int32_t* from) { return vld1q_s32(from); }
BACKQUANT_INLINE Bytes load(const uint8_t* from) { return vld1q_u8(from); }
BACKQUANT_INLINE void store(float* to, Floats x) { vst1q_f32(to, x); }
BACKQUANT_INLINE void store(int32_t* to, Ints x) { vst1q_s32(to, x); }
BACKQUANT_INLINE void store(uint8_t* to, Bytes x) { vst1q_u8(to, x); }
BACKQUANT_INLINE Bytes load_first(const uint8_t* from, int64_t count) {
  uint8_t some[16] = {0};
  memcpy(some, from, count < 16 ? count : 16);
  return vld1q_u8(some);
}
BACKQUANT_INLINE Floats load_first(const float* from, int64_t count) {
  float some[4] = {0};
  memcpy(some, from, sizeof(float) * (count < 4 ? count : 4));
  return vld1q_f32(some);
}
BACKQUANT_INLINE void store_first(float* to, Floats x, int64_t count) {
  float some[4];
  vst1q_f32(some, x);
  memcpy(to, some, sizeof(float) * count);
}
BACKQUANT_INLINE void store_first(uint8_t* to, Bytes x, int64_t count) {
  uint8_t some[16];
  vst1q_u8(some, x);
  memcpy(to, some, count);
}
BACKQUANT_INLINE Bytes repeated(const uint8_t* from) { return vld1q_u8(from); }
// Each 128 bits of x, 16 numbers apart: there is one.
BACKQUANT_INLINE void store_apart(float* to, Floats x) { vst1q_f32(to, x); }

// Bytes as floats.
BACKQUANT_INLINE Floats widened(const uint8_t* from, int64_t count) {
  uint32_t some = 0;
  memcpy(&some, from, count);
  const uint16x8_t wide = vmovl_u8(vcreate_u8(some));
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
}
BACKQUANT_INLINE Floats widened(const uint8_t* from) { return widened(from, 4); }

// ---- floats. Of two, `least` and `most` give the number where one is none.

BACKQUANT_INLINE Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
BACKQUANT_INLINE Floats subtract(Floats a, Floats b) { return vsubq_f32(a, b); }
BACKQUANT_INLINE Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
BACKQUANT_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
BACKQUANT_INLINE Floats multiply_subtract(Floats a, Floats b, Floats c) { return vfmaq_f32(vnegq_f32(c), a, b); }
BACKQUANT_INLINE Floats subtract_product(Floats a, Floats b, Floats c) { return vfmsq_f32(c, a, b); }  // c - a * b
BACKQUANT_INLINE Floats least(Floats a, Floats b) { return vminnmq_f32(a, b); }
BACKQUANT_INLINE Floats most(Floats a, Floats b) { return vmaxnmq_f32(a, b); }
BACKQUANT_INLINE Floats rounded(Floats x) { return vrndnq_f32(x); }
BACKQUANT_INLINE Floats to_floats(Ints x) { return vcvtq_f32_s32(x); }
BACKQUANT_INLINE Ints to_ints(Floats x) { return vcvtnq_s32_f32(x); }
BACKQUANT_INLINE Floats times_power(Floats x, Floats whole) {  // x * 2**whole, whole from -126 to 127
  return vmulq_f32(x, as_floats(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(whole), vdupq_n_s32(127)), 23)));
}
BACKQUANT_INLINE Floats about_inverse(Floats x) {  // 16 bits, as the next step of Newton's wants no fewer than 12
  const Floats r = vrecpeq_f32(x);
  return vmulq_f32(r, vrecpsq_f32(x, r));
}
BACKQUANT_INLINE Floats magnitude(Floats x) { return vabsq_f32(x); }
BACKQUANT_INLINE Floats signed_as(Floats magnitude, Floats x) {
  return vbslq_f32(vdupq_n_u32(0x80000000), x, magnitude);
}
BACKQUANT_INLINE Floats where_negative(Floats x, Floats then) { return vbslq_f32(vcltzq_f32(x), then, x); }

// ---- integers

BACKQUANT_INLINE Ints subtract(Ints a, Ints b) { return vsubq_s32(a, b); }
BACKQUANT_INLINE Bytes larger(Bytes x, Bytes y) { return vmaxq_u8(x, y); }
BACKQUANT_INLINE Bytes limited(Bytes x, Bytes least, Bytes most) { return vminq_u8(larger(x, least), most); }
// The sums of neighbouring lanes, those of a before those of b.
BACKQUANT_INLINE Ints pairs_added(Ints a, Ints b) { return vpaddq_s32(a, b); }

// Four registers as bytes, saturated.
BACKQUANT_INLINE Bytes narrowed(Ints a, Ints b, Ints c, Ints d) {
  const uint16x8_t first = vcombine_u16(vqmovun_s32(a), vqmovun_s32(b));
  const uint16x8_t last = vcombine_u16(vqmovun_s32(c), vqmovun_s32(d));
  return vcombine_u8(vqmovn_u16(first), vqmovn_u16(last));
}
// What `narrowed` gives, in the order of the registers: as it is.
BACKQUANT_INLINE Bytes by_register(Bytes x) { return x; }
// The first `count` of four numbers as bytes, saturated.
BACKQUANT_INLINE void store_narrow(uint8_t* to, Ints x, int64_t count) {
  const uint32_t found = vgetq_lane_u32(vreinterpretq_u32_u8(narrowed(x, x, x, x)), 0);
  memcpy(to, &found, count);
}

// 16 numbers of four registers in another order: number i is the one at places[i].
BACKQUANT_INLINE void rearrange(const Ints* x, const int32_t* places, Ints* out) {
  uint8x16x4_t all;
  for (int i = 0; i < 4; i++) all.val[i] = vreinterpretq_u8_s32(x[i]);
  for (int i = 0; i < 4; i++) {  // byte k of number n is byte 4 * n + k
    const Ints each = vmlaq_s32(vdupq_n_s32(0x03020100), vld1q_s32(places + 4 * i), vdupq_n_s32(0x04040404));
    out[i] = vreinterpretq_s32_u8(vqtbl4q_u8(all, vreinterpretq_u8_s32(each)));
  }
}

// The bytes of four rows next to each other: four registers of four columns.
BACKQUANT_INLINE void interleave(const Bytes (&rows)[4], Bytes (&found)[4]) {
  const uint16x8_t low01 = vreinterpretq_u16_u8(vzip1q_u8(rows[0], rows[1]));
  const uint16x8_t high01 = vreinterpretq_u16_u8(vzip2q_u8(rows[0], rows[1]));
  const uint16x8_t low23 = vreinterpretq_u16_u8(vzip1q_u8(rows[2], rows[3]));
  const uint16x8_t high23 = vreinterpretq_u16_u8(vzip2q_u8(rows[2], rows[3]));
  found[0] = vreinterpretq_u8_u16(vzip1q_u16(low01, low23));
  found[1] = vreinterpretq_u8_u16(vzip2q_u16(low01, low23));
  found[2] = vreinterpretq_u8_u16(vzip1q_u16(high01, high23));
  found[3] = vreinterpretq_u8_u16(vzip2q_u16(high01, high23));
}

// ---- products. `fours`: the left side of `dot`, four bytes of each lane; `everywhere`: the same four for all lanes.

#if BACKQUANT_ORDER == BACKQUANT_BYTES

using Fours = Bytes;
struct Same {
  uint8x8_t four;
};
BACKQUANT_INLINE Fours fours(Bytes x) { return x; }
BACKQUANT_INLINE Same everywhere(int32_t four) { return {vcreate_u8((uint32_t)four)}; }
BACKQUANT_INLINE Ints dot(Ints sums, Fours a, const int8_t* weight) { return vusdotq_s32(sums, a, vld1q_s8(weight)); }
BACKQUANT_INLINE Ints dot(Ints sums, Same a, const int8_t* weight) {
  return vsudotq_lane_s32(sums, vld1q_s8(weight), a.four, 0);
}

#elif BACKQUANT_ORDER == BACKQUANT_SIGNED

using Fours = int8x16_t;
struct Same {
  int8x8_t four;
};
BACKQUANT_INLINE Fours fours(Bytes x) { return vreinterpretq_s8_u8(veorq_u8(x, vdupq_n_u8(128))); }  // less 128
BACKQUANT_INLINE Same everywhere(int32_t four) {
  return {vreinterpret_s8_u8(veor_u8(vcreate_u8((uint32_t)four), vdup_n_u8(128)))};
}
BACKQUANT_INLINE Ints dot(Ints sums, Fours a, const int8_t* weight) { return vdotq_s32(sums, a, vld1q_s8(weight)); }
BACKQUANT_INLINE Ints dot(Ints sums, Same a, const int8_t* weight) {
  return vdotq_lane_s32(sums, vld1q_s8(weight), a.four, 0);
}

#else

struct Fours {
  int16x4_t places[4];  // the first byte of each lane, the second ...
};
struct Same {
  int16x4_t four;
};
BACKQUANT_INLINE Fours fours(Bytes x) {
  const Ints all = vreinterpretq_s32_u8(x), byte = vdupq_n_s32(255);
  const auto narrow = [](Ints each) { return vmovn_s32(each); };
  return {{narrow(vandq_s32(all, byte)), narrow(vandq_s32(vshrq_n_s32(all, 8), byte)),
           narrow(vandq_s32(vshrq_n_s32(all, 16), byte)), narrow(vandq_s32(vshrq_n_s32(all, 24), byte))}};
}
BACKQUANT_INLINE Same everywhere(int32_t four) {
  return {vreinterpret_s16_u16(vget_low_u16(vmovl_u8(vcreate_u8((uint32_t)four))))};
}
BACKQUANT_INLINE Ints dot(Ints sums, const Fours& a, const int8_t* weight) {
  const int16x8_t first = vreinterpretq_s16_s8(vld1q_s8(weight)), last = vreinterpretq_s16_s8(vld1q_s8(weight + 16));
  sums = vmlal_s16(sums, a.places[0], vget_low_s16(first));
  sums = vmlal_s16(sums, a.places[1], vget_high_s16(first));
  sums = vmlal_s16(sums, a.places[2], vget_low_s16(last));
  return vmlal_s16(sums, a.places[3], vget_high_s16(last));
}
BACKQUANT_INLINE Ints dot(Ints sums, Same a, const int8_t* weight) {
  const int16x8_t first = vreinterpretq_s16_s8(vld1q_s8(weight)), last = vreinterpretq_s16_s8(vld1q_s8(weight + 16));
  sums = vmlal_lane_s16(sums, vget_low_s16(first), a.four, 0);
  sums = vmlal_lane_s16(sums, vget_high_s16(first), a.four, 1);
  sums = vmlal_lane_s16(sums, vget_low_s16(last), a.four, 2);
  return vmlal_lane_s16(sums, vget_high_s16(last), a.four, 3);
}

#endif
BACKQUANT_INLINE Fours sixteen_everywhere(const uint8_t* from) { return fours(repeated(from)); }

// The sums of four neighbouring bytes, added to those of each lane.
BACKQUANT_INLINE Ints fours_added(Ints sums, Bytes x) {
  return vreinterpretq_s32_u32(vpadalq_u16(vreinterpretq_u32_s32(sums), vpaddlq_u8(x)));
}

}  // namespace backquant

#endif
