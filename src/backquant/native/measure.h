// What observers measure: the work of observe/histogram_sample.py and histogram_grid.py, and the same results, with
// each value read once. Plain loops, which compilers turn into vectors on every set of instructions.
#ifndef BACKQUANT_MEASURE_H
#define BACKQUANT_MEASURE_H
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "lanes.h"

namespace backquant {

// How a tensor is cut: `_Cut` of histogram_sample.py. `groups`: how many the columns are put into.
struct Cut {
  int64_t columns, inside, groups, tail, step;
};

struct Limits {
  float below, above;
  bool outside(float low, float high) const { return (high > above) | (low < below); }
};

// Infinities and NaN have all bits of the exponent.
BACKQUANT_INLINE uint32_t not_finite(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (bits & 0x7f800000u) == 0x7f800000u;
}

// The extremes of `count` columns over `rows`, within `low` and `high`; whether a value is not finite.
BACKQUANT_APART bool column_extremes(const float* x, int64_t rows, int64_t count, int64_t columns, float* __restrict low,
                                     float* __restrict high) {
  uint32_t bad = 0;
  for (int64_t row = 0; row < rows; ++row, x += columns)
    for (int64_t i = 0; i < count; ++i) {
      float value = x[i];
      bad |= not_finite(value);
      low[i] = std::min(low[i], value);
      high[i] = std::max(high[i], value);
    }
  return bad != 0;
}

// The `tail`-th largest of the groups' maxima. Columns that fill no group have no part in it.
inline float limit(const std::vector<float>& tops, const Cut& cut) {
  std::vector<float> most(tops.begin(), tops.begin() + cut.groups);
  for (int64_t row = 1; row < cut.columns / cut.groups; ++row)
    for (int64_t i = 0; i < cut.groups; ++i) most[i] = std::max(most[i], tops[row * cut.groups + i]);
  std::nth_element(most.begin(), most.begin() + (cut.groups - cut.tail), most.end());
  return most[cut.groups - cut.tail];
}

// Rule 2 of histogram_sample.py. `bulk`: room for every step-th value, `large`: for `size` values, `ends`: for two.
// The number of large values, or -1 where a value is not finite.
inline int64_t sample(const float* x, int64_t size, const Cut& cut, float* bulk, float* large, float* ends) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  int64_t rows = cut.inside / cut.columns, rest = size - cut.inside;
  std::vector<float> bottoms(cut.columns, infinity), tops(cut.columns, -infinity);
  float least[1] = {infinity}, most[1] = {-infinity};
  if (column_extremes(x, rows, cut.columns, cut.columns, bottoms.data(), tops.data())) return -1;
  if (column_extremes(x + cut.inside, rest, 1, 1, least, most)) return -1;
  ends[0] = std::min(least[0], *std::min_element(bottoms.begin(), bottoms.end()));
  ends[1] = std::max(most[0], *std::max_element(tops.begin(), tops.end()));
  std::vector<float> turned(cut.columns);
  for (int64_t i = 0; i < cut.columns; ++i) turned[i] = -bottoms[i];
  Limits limits{ends[0] >= 0 ? -infinity : -limit(turned, cut), ends[1] <= 0 ? infinity : limit(tops, cut)};

  std::vector<int64_t> places;
  for (int64_t i = 0; i < cut.columns; ++i)
    if (limits.outside(bottoms[i], tops[i])) places.push_back(i);
  int64_t found = 0;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t place : places) {
      float value = x[row * cut.columns + place];
      large[found] = value;
      found += limits.outside(value, value);
    }
  for (int64_t i = cut.inside; i < size; ++i)
    if (limits.outside(x[i], x[i])) large[found++] = x[i];
  for (int64_t i = 0; i < size; i += cut.step)
    *bulk++ = limits.outside(x[i], x[i]) ? std::numeric_limits<float>::quiet_NaN() : x[i];
  return found;
}

// A column of `_Table` of histogram_grid.py.
struct Bin {
  int64_t number, first, second;
};

// Add `size` values, each `times`, to `count` bins from the key `least` on, and to one before and one behind them for
// what is not finite. `steps`: bits of a position.
inline void count_values(const float* x, int64_t size, int64_t times, int32_t mantissa, int32_t steps, int64_t least,
                         int64_t count, Bin* bins) {
  int32_t width = 23 - mantissa, shift = width - steps;
  int64_t start = least - 1;
  for (int64_t i = 0; i < size; ++i) {
    float value = x[i] + 0.0f;  // no negative zero
    int32_t bits;
    memcpy(&bits, &value, 4);
    int32_t magnitude = (bits & 0x7fffffff) >> width;
    int64_t place = std::clamp<int64_t>((magnitude ^ (bits >> 31)) - start, 0, count + 1);
    int64_t position = (bits >> shift) & ((1 << steps) - 1);
    bins[place].number += times;
    bins[place].first += times * position;
    bins[place].second += times * position * position;
  }
}

}  // namespace backquant

#endif
