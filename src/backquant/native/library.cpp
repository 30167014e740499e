// The kernels of kernels.h for any shape, in one library that PyTorch calls as operators.
//
// No header of PyTorch is needed: the functions below are its stable C interface (shim.h, 2.10 and later), looked
// up by name in the libtorch that the process has loaded. What a layer needs to know beside its input is one
// tensor of bytes, its plan: a `Plan`, then weights and numbers at the offsets that it names.
#include <dlfcn.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "attention.h"
#include "grouped.h"
#include "images.h"
#include "measure.h"
#ifdef BACKQUANT_TILED
#include "tiles.h"
#endif

namespace {

using namespace backquant;

using Tensor = void*;
using Value = uint64_t;
using Range = void (*)(int64_t, int64_t, void*);

struct Torch {
  int32_t (*uint8)();
  int32_t (*float32)();
  int32_t (*cpu)();
  int32_t (*dtype)(Tensor, int32_t*);
  int32_t (*dim)(Tensor, int64_t*);
  int32_t (*sizes)(Tensor, int64_t**);
  int32_t (*strides)(Tensor, int64_t**);
  int32_t (*data)(Tensor, void**);
  int32_t (*empty)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Tensor*);
  int32_t (*drop)(Tensor);
  int32_t (*length)(Tensor, size_t*);
  int32_t (*item)(Tensor, size_t, Value*);
  int32_t (*drop_list)(Tensor);
  int32_t (*parallel)(int64_t, int64_t, int64_t, Range, void*);
  int32_t (*threads)(uint32_t*);
  int32_t (*fragment)(const char*, const char*, uint32_t, void**);
  int32_t (*define)(void*, const char*);
  int32_t (*implementations)(const char*, const char*, const char*, uint32_t, void**);
  int32_t (*implement)(void*, const char*, void (*)(Value*, uint64_t, uint64_t));
} torch;

void check(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

void done(int32_t error) { check(error == 0, "backquant's kernels: a call of PyTorch's C interface failed"); }

// Frees the tensor unless it is given away.
struct Owned {
  Tensor tensor;
  explicit Owned(Value value) : tensor((Tensor)value) {}
  explicit Owned(Tensor made) : tensor(made) {}
  Owned(const Owned&) = delete;
  ~Owned() {
    if (tensor) torch.drop(tensor);
  }
  Value given() { return (Value)std::exchange(tensor, nullptr); }
  int64_t dim() const {
    int64_t found;
    done(torch.dim(tensor, &found));
    return found;
  }
  const int64_t* sizes() const {
    int64_t* found;
    done(torch.sizes(tensor, &found));
    return found;
  }
  const int64_t* strides() const {
    int64_t* found;
    done(torch.strides(tensor, &found));
    return found;
  }
  uint8_t* data() const {
    void* found;
    done(torch.data(tensor, &found));
    return (uint8_t*)found;
  }
  int32_t dtype() const {
    int32_t found;
    done(torch.dtype(tensor, &found));
    return found;
  }
  bool is_bytes() const { return dtype() == torch.uint8(); }
  bool is_floats() const { return dtype() == torch.float32(); }
};

#ifdef BACKQUANT_TILED
constexpr bool TILED = true;
#else
constexpr bool TILED = false;
#endif

constexpr int64_t MAGIC = 0x32306b71626c6e00 + LANES * 10 + ORDER + 1000 * TILED;  // the layout below, and that of weights

// As `plan.py` writes it. Offsets are from the start of the plan; correction: 0 if there is none. channels: of all
// groups; columns, count, last, tail: of one; spans: whether groups are computed SPAN channels at a time; step: of
// tiles, 0: by vectors.
struct Plan {
  int64_t magic, bytes, depthwise, channels, out_channels, kh, kw, sh, sw, ph, pw, dh, dw, run;
  int64_t columns, count, last, tail, groups, spans, step;
  int64_t activation, is_float, adds, zero_point;
  int64_t weight, scale, shift, correction;
  float other_scale, low, high, out_scale, out_shift, alpha;

  const uint8_t* at(int64_t offset) const { return (const uint8_t*)this + offset; }

  Epilogue epilogue(const uint8_t* other) const {
    return {(const float*)at(scale), (const float*)at(shift), other, other_scale, low, high, out_scale, out_shift,
            alpha, correction ? (const int32_t*)at(correction) : nullptr};
  }
};

const Plan& plan_of(const Owned& tensor) {
  const Plan* plan = (const Plan*)tensor.data();
  const bool fits = tensor.is_bytes() && tensor.dim() == 1 && tensor.sizes()[0] >= (int64_t)sizeof(Plan);
  check(fits && plan->magic == MAGIC && plan->bytes == tensor.sizes()[0], "not a plan of backquant's kernels");
  return *plan;
}

// A row of the input's zero points, kept from call to call.
const uint8_t* outside(int64_t bytes, int zero_point) {
  static thread_local std::unique_ptr<uint8_t[]> room;
  static thread_local int64_t size = 0;
  if (bytes > size) {
    room.reset(new uint8_t[bytes]);
    size = bytes;
  }
  memset(room.get(), zero_point, bytes);
  return room.get();
}

constexpr int64_t WORTH_A_THREAD = 1 << 17;  // multiply-adds

// `part(begin, end)` for parts of [0, count) on PyTorch's threads.
template <typename Part>
void in_parallel(int64_t count, int64_t work, Part part) {
  const int64_t grain = std::max<int64_t>(1, WORTH_A_THREAD / std::max<int64_t>(work / std::max<int64_t>(count, 1), 1));
  if (grain >= count) return part(0, count);
  const Range run = [](int64_t begin, int64_t end, void* own) { (*(Part*)own)(begin, end); };
  done(torch.parallel(0, count, grain, run, &part));
}

// ---- matrix products

using Accumulate = void (*)(const uint8_t* const*, int64_t, int64_t, const int8_t*, bool, Ahead, Ints*);

// Pixels at a time, by registers for channels: as many sums as registers hold beside what is multiplied.
#if BACKQUANT_LANES == 16
constexpr int ROWS[4] = {14, 12, 8, 6};
#elif BACKQUANT_LANES == 8
constexpr int ROWS[4] = {10, 6, 4, 3};
#elif BACKQUANT_ORDER == BACKQUANT_PLACES
constexpr int ROWS[4] = {12, 8, 6, 4};
#else
constexpr int ROWS[4] = {14, 9, 6, 5};
#endif
constexpr int MOST_ROWS = ROWS[0], MOST_SUMS = std::max({ROWS[0], ROWS[1] * 2, ROWS[2] * 3, ROWS[3] * 4});

template <int NB, int... I>
Accumulate accumulator(int64_t rows, std::integer_sequence<int, I...>) {
  static const Accumulate known[] = {&accumulate<I + 1, NB>...};
  return known[rows - 1];
}

Accumulate accumulator(int64_t rows, int64_t columns) {
  if (columns == 1) return accumulator<1>(rows, std::make_integer_sequence<int, ROWS[0]>());
  if (columns == 2) return accumulator<2>(rows, std::make_integer_sequence<int, ROWS[1]>());
  if (columns == 3) return accumulator<3>(rows, std::make_integer_sequence<int, ROWS[2]>());
  return accumulator<4>(rows, std::make_integer_sequence<int, ROWS[3]>());
}

// The bytes of NB registers; the last has `tail` of them.
template <int NB>
void store_registers(uint8_t* to, Bytes x, int64_t tail) {
  if (tail < LANES) return store_first(to, x, (NB - 1) * LANES + tail);
  NB == 4 ? store(to, x) : store_first(to, x, NB * LANES);
}

// Sums of `pixels` pixels times NB registers of channels become results. sums: NB registers a pixel.
template <int NB, int ACT, bool ADD, typename OUT>
void finish(
    const Ints* sums, const Epilogue& e, int64_t pixels, int64_t tail, int64_t stride, const uint8_t* other,
    int64_t channel, OUT* out) {
  Floats scale[NB], shift[NB];
  for (int j = 0; j < NB; j++) {
    scale[j] = load(e.scale + channel + j * LANES);
    shift[j] = load(e.shift + channel + j * LANES);
  }
  const Floats other_scale = splat(e.other_scale);
  const Bounds bounds = bounds_of(e);
  for (int64_t i = 0; i < pixels; i++, sums += NB, out += stride, other += ADD ? stride : 0) {
    Floats v[NB];
#pragma GCC unroll 4
    for (int j = 0; j < NB; j++) {
      v[j] = multiply_add(to_floats(corrected(sums[j], e, channel + j * LANES)), scale[j], shift[j]);
      if constexpr (ADD) {
        const uint8_t* from = other + j * LANES;
        v[j] = multiply_add(j == NB - 1 ? widened(from, tail) : widened(from), other_scale, v[j]);
      }
      v[j] = finished<ACT, sizeof(OUT) == 1 && (NB > 1)>(v[j], e);
    }
    if constexpr (sizeof(OUT) > 1) {
#pragma GCC unroll 4
      for (int j = 0; j < NB - 1; j++) store(out + j * LANES, v[j]);
      store_first(out + (NB - 1) * LANES, v[NB - 1], tail);
    } else if constexpr (NB == 1) {
      store_narrow(out, to_ints(v[0]), tail);
    } else {
      Ints whole[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) whole[j] = to_ints(v[j < NB ? j : NB - 1]);
      const Bytes found = by_register(narrowed(whole[0], whole[1], whole[2], whole[3]));
      store_registers<NB>(out, bounded<ACT>(found, bounds), tail);
    }
  }
}

// Of registers for channels, activation and what is added, the same for all tiles of a call.
template <typename OUT>
using Finish = void (*)(
    const Ints*, const Epilogue&, int64_t, int64_t, int64_t, const uint8_t*, int64_t, OUT*);

template <int NB, typename OUT>
Finish<OUT> finish_of(int64_t activation, bool adds) {
  if (adds) return activation == CLAMP ? finish<NB, CLAMP, true, OUT> : finish<NB, NONE, true, OUT>;
  switch (activation) {
    case NONE: return finish<NB, NONE, false, OUT>;
    case CLAMP: return finish<NB, CLAMP, false, OUT>;
    case SWISH: return finish<NB, SWISH, false, OUT>;
    case HARDSWISH: return finish<NB, HARDSWISH, false, OUT>;
    case GELU: return finish<NB, GELU, false, OUT>;
    case GELU_TANH: return finish<NB, GELU_TANH, false, OUT>;
    case TANH: return finish<NB, TANH, false, OUT>;
    case LEAKY: return finish<NB, LEAKY, false, OUT>;
    case GELU_BYTES: return finish<NB, GELU_BYTES, false, OUT>;
  }
  throw std::runtime_error("no such activation");
}

template <typename OUT>
Finish<OUT> finish_for(int64_t columns, int64_t activation, bool adds) {
  if (columns == 1) return finish_of<1, OUT>(activation, adds);
  if (columns == 2) return finish_of<2, OUT>(activation, adds);
  return columns == 3 ? finish_of<3, OUT>(activation, adds) : finish_of<4, OUT>(activation, adds);
}

// Pixels at a time: as few products as can be, of which none is for nothing.
int64_t rows_for(int64_t pixels, int64_t columns) {
  int64_t best = 1, least = INT64_MAX;
  for (int64_t n = 1; n <= ROWS[columns - 1]; n++) {
    const int64_t cost = (pixels + n - 1) / n * (std::max<int64_t>(n * columns, 8) + columns);
    if (cost <= least) best = n, least = cost;
  }
  return best;
}

template <typename OUT>
void product(const uint8_t* x, const Plan& p, const Geometry& g, const Epilogue& e, OUT* out) {
  const int64_t pixels = g.n * g.oh * g.ow, taps = g.kh * g.kw;
  const int64_t mr = rows_for(pixels, p.columns), total = ((g.run + 3) & ~int64_t(3)) * taps;
  uint32_t threads = 1;
  done(torch.threads(&threads));
  const int64_t group = pixels_together(g, mr, threads);
  const Accumulate sum_first = accumulator(mr, p.columns), sum_last = accumulator(mr, p.last);
  const Finish<OUT> first = finish_for<OUT>(p.columns, p.activation, e.other);
  const Finish<OUT> last = finish_for<OUT>(p.last, p.activation, e.other);
  const uint8_t* x_end = x + g.n * g.h * g.w * g.c;
  const int64_t work = pixels * g.run * taps * g.oc, blocks = p.count * p.groups, own = g.oc / p.groups;
  // bytes of the weights of a block, and of a group
  const int64_t size = total * p.columns * WEIGHTS / 4, all = total * ((p.count - 1) * p.columns + p.last) * WEIGHTS / 4;
  const int64_t places = (pixels + group - 1) / group * blocks;
  const auto weights = [&](int64_t place) -> Later {
    const int64_t block = place % p.count;
    const int64_t bytes = block == p.count - 1 ? size / p.columns * p.last : size;
    return {(const int8_t*)p.at(p.weight) + place % blocks / p.count * all + block * size, bytes};
  };
  in_parallel(places, work, [&](int64_t begin, int64_t end) {
    const uint8_t* rows[MAX_TAPS * MOST_ROWS];
    uint8_t edge[RUNS * MOST_ROWS][256];
    Ints sums[MOST_SUMS];
    for (int64_t place = begin; place < end; place++) {
      const int64_t member = place % blocks / p.count, block = place % p.count;
      const int64_t from = place / blocks * group, to = std::min(from + group, pixels);
      const bool is_last = block == p.count - 1;
      const Accumulate sum = is_last ? sum_last : sum_first;
      const Finish<OUT> finish = is_last ? last : first;
      const int64_t first_channel = p.groups > 1 ? member * g.run : 0;
      const int64_t channel = member * own + block * p.columns * LANES, tail = is_last ? p.tail : LANES;
      const int8_t* weight = weights(place).from;
      Later later{weight, 0};
      if (place + 1 < end && blocks > 1) later = weights(place + 1);
      Ahead ahead = later.shared((to - from + mr - 1) / mr, total / 4);
      for (int64_t pixel = from; pixel < to; pixel += mr) {
        const int64_t found = std::min(mr, to - pixel);
        const bool safe = addresses(x + first_channel, g, pixel, found, mr, rows, edge, x_end);
        sum(rows, taps, g.run, weight, safe, ahead, sums);
        ahead.from += ahead.step * (total / 4);
        const int64_t at = pixel * g.oc + channel;
        finish(sums, e, found, tail, g.oc, e.other ? e.other + at : nullptr, channel, out + at);
      }
    }
  });
}

// ---- matrix products by tiles

#ifdef BACKQUANT_TILED
// Sums of some channels from `channel` on, as results.
template <typename OUT>
struct Results {
  Finish<OUT> finish;
  const Epilogue& e;
  int64_t tail, stride, channel;
  OUT* out;

  void operator()(const int32_t* sums, int64_t count, int64_t pixel) const {
    const int64_t at = pixel * stride + channel;
    finish((const Ints*)sums, e, count, tail, stride, e.other ? e.other + at : nullptr, channel, out + at);
  }
};

template <typename OUT>
void tiled(const uint8_t* x, const Plan& p, const Geometry& g, const Epilogue& e, OUT* out) {
  uint32_t threads = 1;
  done(torch.threads(&threads));
  const TiledInput in(x, g, p.step, threads);
  const int64_t lines = in.bordered ? in.lines() : 0, work = g.n * g.oh * g.ow * in.total * g.oc;
  in_parallel(lines, lines * in.across * g.c, [&](int64_t begin, int64_t end) { add_borders(x, g, begin, end, in.bordered); });
  const Finish<OUT> whole = finish_for<OUT>(p.columns, p.activation, e.other);
  const Finish<OUT> last = finish_for<OUT>(p.last, p.activation, e.other);
  in_parallel(in.parts(), work, [&](int64_t begin, int64_t end) {
    for (int64_t place = begin; place < end; place++) {
      const Left a = in.part(place);
      shape_tiles(p.step);
      for (int64_t n = 0; n < p.count; n++) {
        const bool is_last = n == p.count - 1;
        const int64_t columns = is_last ? p.last : p.columns, channel = n * p.columns * 16;
        const int8_t* weight = (const int8_t*)p.at(p.weight) + channel * in.total;
        const Results<OUT> results{is_last ? last : whole, e, is_last ? p.tail : 16, g.oc, channel, out};
        columns == 2 ? run_tiles<2>(a, weight, results) : run_tiles<1>(a, weight, results);
      }
      release_tiles();
    }
  });
}
#else
template <typename OUT>
void tiled(const uint8_t*, const Plan&, const Geometry&, const Epilogue&, OUT*) {
  throw std::runtime_error("no tiles");
}
#endif

// ---- groups of few channels

using AccumulateSpan = void (*)(const uint8_t* const*, int64_t, int64_t, const int8_t*, Ints*);

template <int DEEP, int... I>
AccumulateSpan span_accumulator(int64_t rows, std::integer_sequence<int, I...>) {
  static const AccumulateSpan known[] = {&Grouped<DEEP>::template accumulate<I + 1>...};
  return known[rows - 1];
}

template <int DEEP, typename OUT>
void spans(const uint8_t* x, const Plan& p, const Geometry& g, const Epilogue& e, OUT* out) {
  constexpr int64_t most = Grouped<DEEP>::ROWS;
  const int64_t taps = g.kh * g.kw, pixels = g.n * g.oh * g.ow, size = taps * Grouped<DEEP>::REGISTERS * WEIGHTS;
  const int64_t parts = (g.ow + most - 1) / most, mr = (g.ow + parts - 1) / parts;
  const int64_t left = (g.oc - 1) % SPAN + 1, tail = (left - 1) % LANES + 1;  // of the last channels
  const int64_t registers = (left + LANES - 1) / LANES;
  const AccumulateSpan sum = span_accumulator<DEEP>(mr, std::make_integer_sequence<int, most>());
  const Finish<OUT> whole = finish_for<OUT>(SPAN_REGISTERS, p.activation, e.other);
  const Finish<OUT> last = finish_for<OUT>(registers, p.activation, e.other);
  in_parallel((pixels + mr - 1) / mr, pixels * DEEP * taps * g.oc, [&](int64_t begin, int64_t end) {
    const uint8_t* rows[MAX_TAPS * Grouped<DEEP>::ROWS];
    uint8_t room[MAX_TAPS * Grouped<DEEP>::ROWS][SPAN];
    Ints sums[Grouped<DEEP>::ROWS * SPAN_REGISTERS];
    for (int64_t pixel = begin * mr; pixel < std::min(end * mr, pixels); pixel += mr) {
      const int64_t found = std::min(mr, pixels - pixel);
      addresses(x, g, pixel, found, mr, rows, nullptr, x);
      for (int64_t channel = 0; channel < g.oc; channel += SPAN) {
        const bool is_whole = channel + SPAN <= g.oc;
        if (!is_whole) within(x, g, channel, taps * mr, rows, room);
        sum(rows, taps, channel, (const int8_t*)p.at(p.weight) + channel / SPAN * size, sums);
        if (most > 1 && !is_whole && registers < SPAN_REGISTERS)
          for (int64_t i = 1; i < mr; i++)
            for (int64_t j = 0; j < registers; j++) sums[i * registers + j] = sums[i * SPAN_REGISTERS + j];
        const int64_t at = pixel * g.oc + channel;
        const Finish<OUT> finish = is_whole ? whole : last;
        finish(sums, e, found, is_whole ? LANES : tail, g.oc, e.other ? e.other + at : nullptr, channel, out + at);
      }
    }
  });
}

template <typename OUT>
void spans(const uint8_t* x, const Plan& p, const Geometry& g, const Epilogue& e, OUT* out) {
  if (g.run == 4) return spans<4>(x, p, g, e, out);
  if (g.run == 8) return spans<8>(x, p, g, e, out);
  check(g.run == 16, "no such convolution in groups");
  spans<16>(x, p, g, e, out);
}

// ---- depthwise

template <typename OUT>
using Lines = void (*)(
    const uint8_t*, const int8_t*, const Geometry&, const Epilogue&, int64_t, int64_t, OUT*);

template <int K, int STRIDE, typename OUT>
Lines<OUT> lines_of(int64_t activation) {
  switch (activation) {
    case NONE: return Depthwise<K, K, STRIDE, NONE, OUT>::rows;
    case CLAMP: return Depthwise<K, K, STRIDE, CLAMP, OUT>::rows;
    case SWISH: return Depthwise<K, K, STRIDE, SWISH, OUT>::rows;
    case HARDSWISH: return Depthwise<K, K, STRIDE, HARDSWISH, OUT>::rows;
  }
  throw std::runtime_error("no such activation of a depthwise convolution");
}

template <typename OUT>
void depthwise(const uint8_t* x, const Plan& p, const Geometry& g, const Epilogue& e, OUT* out) {
  check(g.kh == g.kw && g.sh == g.sw && (g.sh == 1 || g.sh == 2), "no such depthwise convolution");
  const bool one = g.sh == 1;
  Lines<OUT> lines = nullptr;
  if (g.kh == 3) lines = one ? lines_of<3, 1, OUT>(p.activation) : lines_of<3, 2, OUT>(p.activation);
  if (g.kh == 5) lines = one ? lines_of<5, 1, OUT>(p.activation) : lines_of<5, 2, OUT>(p.activation);
  if (g.kh == 7) lines = one ? lines_of<7, 1, OUT>(p.activation) : lines_of<7, 2, OUT>(p.activation);
  check(lines, "no such depthwise convolution");
  const int8_t* weight = (const int8_t*)p.at(p.weight);
  in_parallel(g.n * g.oh, g.n * g.oh * g.ow * g.oc * g.kh * g.kw, [&](int64_t begin, int64_t end) {
    lines(x, weight, g, e, begin, end, out);
  });
}

// ---- operators

// Whether elements lie without holes, dimensions in the order of `order` (the innermost last).
bool is_dense(const Owned& tensor, const int* order, int64_t dims) {
  int64_t step = 1;
  for (int64_t i = dims - 1; i >= 0; i--) {
    const int64_t dim = order ? order[i] : i;
    if (tensor.sizes()[dim] != 1 && tensor.strides()[dim] != step) return false;
    step *= tensor.sizes()[dim];
  }
  return true;
}

constexpr int CHANNELS_LAST[4] = {0, 2, 3, 1};

constexpr int64_t FEWEST = 16;  // pixels; fewer are as fast by vectors

void run(const uint8_t* x, const uint8_t* other, const Plan& p, const Geometry& g, void* out) {
  const Epilogue e = p.epilogue(other);
  if (p.step && g.n * g.oh * g.ow >= FEWEST)
    p.is_float ? tiled(x, p, g, e, (float*)out) : tiled(x, p, g, e, (uint8_t*)out);
  else if (p.spans)
    p.is_float ? spans(x, p, g, e, (float*)out) : spans(x, p, g, e, (uint8_t*)out);
  else if (p.depthwise)
    p.is_float ? depthwise(x, p, g, e, (float*)out) : depthwise(x, p, g, e, (uint8_t*)out);
  else
    p.is_float ? product(x, p, g, e, (float*)out) : product(x, p, g, e, (uint8_t*)out);
}

Tensor made(int64_t dims, const int64_t* sizes, const int64_t* strides, bool is_float) {
  Tensor found;
  done(torch.empty(dims, sizes, strides, is_float ? torch.float32() : torch.uint8(), torch.cpu(), 0, &found));
  return found;
}

Value convolved(const Owned& x, const Owned* other, const Owned& packed) {
  const Plan& p = plan_of(packed);
  const int64_t* size = x.sizes();
  const bool fits = x.is_bytes() && x.dim() == 4 && size[1] == p.channels && is_dense(x, CHANNELS_LAST, 4);
  check(fits, "convolution takes uint8 [batch, channels, height, width], channels last");
  check(p.adds == (other != nullptr), "the plan and the call do not agree on what is added");
  const int64_t width = std::max<int64_t>(p.run / p.channels, 1);  // of the kernel, where its row is read as one
  const int64_t n = size[0], h = size[2], w = size[3], c = p.out_channels;
  const int64_t oh = (h + 2 * p.ph - p.dh * (p.kh - 1) - 1) / p.sh + 1;
  const int64_t across = p.depthwise ? p.kw : std::max(p.kw, width);
  const int64_t ow = (w + 2 * p.pw - p.dw * (across - 1) - 1) / p.sw + 1;
  check(n > 0 && h > 0 && w > 0 && oh > 0 && ow > 0, "convolution of an empty image");
  if (other) {
    const int64_t* added = other->sizes();
    const bool same = other->is_bytes() && other->dim() == 4 && added[0] == n && added[1] == c && added[2] == oh &&
                      added[3] == ow && is_dense(*other, CHANNELS_LAST, 4);
    check(same, "what is added has the shape of the result, channels last");
  }
  const int64_t sizes[4] = {n, c, oh, ow}, strides[4] = {oh * ow * c, 1, ow * c, c};
  Owned out(made(4, sizes, strides, p.is_float));
  const bool pads = p.ph + p.pw > 0;
  const Geometry g{n,    h,    w,    p.channels, oh,   ow,   c,    p.run,
                   p.kh, p.kw, p.sh, p.sw,       p.ph, p.pw, p.dh, p.dw,
                   pads ? outside(std::max(w * p.channels, p.run) + 64, (int)p.zero_point) : nullptr};
  run(x.data(), other ? other->data() : nullptr, p, g, out.data());
  return out.given();
}

void convolution(Value* stack, uint64_t, uint64_t) {
  Owned x(stack[0]), plan(stack[1]);
  stack[0] = convolved(x, nullptr, plan);
}

void convolution_add(Value* stack, uint64_t, uint64_t) {
  Owned x(stack[0]), other(stack[1]), plan(stack[2]);
  stack[0] = convolved(x, &other, plan);
}

void linear(Value* stack, uint64_t, uint64_t) {
  Owned x(stack[0]), packed(stack[1]);
  const Plan& p = plan_of(packed);
  constexpr int64_t most = 16;
  const int64_t dims = x.dim();
  const bool fits = x.is_bytes() && dims > 0 && dims <= most && x.sizes()[dims - 1] == p.channels && !p.adds &&
                    p.kh * p.kw == 1 && !p.depthwise && is_dense(x, nullptr, dims);
  check(fits, "linear takes uint8 [..., channels] without holes");
  int64_t rows = 1, sizes[most], strides[most], step = p.out_channels;
  for (int64_t i = 0; i + 1 < dims; i++) sizes[i] = x.sizes()[i], rows *= sizes[i];
  sizes[dims - 1] = p.out_channels, strides[dims - 1] = 1;
  for (int64_t i = dims - 2; i >= 0; i--) strides[i] = step, step *= sizes[i];
  check(rows > 0, "linear of nothing");
  Owned out(made(dims, sizes, strides, p.is_float));
  const Geometry g{1, 1, rows, p.channels, 1, rows, p.out_channels, p.run, 1, 1, 1, 1, 0, 0, 1, 1, nullptr};
  run(x.data(), nullptr, p, g, out.data());
  stack[0] = out.given();
}

// ---- images

struct Image {
  int64_t n, pixels, c;
};

// x as an image of bytes, channels last.
Image image_of(const Owned& x) {
  const int64_t* size = x.sizes();
  const bool fits = x.is_bytes() && x.dim() == 4 && is_dense(x, CHANNELS_LAST, 4);
  check(fits, "an image is uint8 [batch, channels, height, width], channels last");
  check(size[0] * size[1] * size[2] * size[3] > 0, "an empty image");
  return {size[0], size[2] * size[3], size[1]};
}

// A new image of the size of x; `pixel`: of one pixel.
Tensor made_as(const Owned& x, bool pixel) {
  const int64_t c = x.sizes()[1], h = pixel ? 1 : x.sizes()[2], w = pixel ? 1 : x.sizes()[3];
  const int64_t sizes[4] = {x.sizes()[0], c, h, w}, strides[4] = {h * w * c, 1, w * c, c};
  return made(4, sizes, strides, false);
}

double number(Value value) {
  double found;
  memcpy(&found, &value, sizeof(found));
  return found;
}

void averaged(Value* stack, uint64_t, uint64_t) {
  Owned x(stack[0]);
  const Image image = image_of(x);
  Owned out(made_as(x, true));
  in_parallel(image.n, image.n * image.pixels * image.c, [&](int64_t begin, int64_t end) {
    const uint8_t* from = x.data() + begin * image.pixels * image.c;
    average(from, end - begin, image.pixels, image.c, out.data() + begin * image.c);
  });
  stack[0] = out.given();
}

// Along one side; as many windows as PyTorch has, which lets the last begin inside of the image only.
int64_t count_windows(const Windows& w, bool ceil) {
  const bool sound = w.taps > 0 && w.step > 0 && w.padding >= 0 && w.padding * 2 <= w.taps;
  check(sound && w.length + 2 * w.padding >= w.taps, "no such window of a max pooling");
  const int64_t free = w.length + 2 * w.padding - w.taps, count = (free + (ceil ? w.step - 1 : 0)) / w.step + 1;
  return (count - 1) * w.step >= w.length + w.padding ? count - 1 : count;
}

void maxima(Value* stack, uint64_t, uint64_t) {
  Owned x(stack[0]);
  const Image image = image_of(x);
  const auto side = [&](int i) -> Windows {
    return {x.sizes()[2 + i], (int64_t)stack[1 + i], (int64_t)stack[3 + i], (int64_t)stack[5 + i]};
  };
  const Windows rows = side(0), columns = side(1);
  const int64_t h = count_windows(rows, stack[7]), w = count_windows(columns, stack[7]), c = image.c;
  const int64_t sizes[4] = {image.n, c, h, w}, strides[4] = {h * w * c, 1, w * c, c};
  Owned out(made(4, sizes, strides, false));
  in_parallel(image.n * h, image.n * image.pixels * c, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> tall(columns.length * c + WIDTH);
    for (int64_t place = begin; place < end; place++) {
      const uint8_t* from = x.data() + place / h * image.pixels * c;
      pool_row(from, rows, columns, c, place % h, w, tall.data(), out.data() + place * w * c);
    }
  });
  stack[0] = out.given();
}

void gated(Value* stack, uint64_t, uint64_t) {
  Owned x(stack[0]), y(stack[1]);
  const Image image = image_of(x), numbers = image_of(y);
  check(numbers.n == image.n && numbers.pixels == 1 && numbers.c == image.c, "a gate has one number a channel");
  const Factors f{(float)number(stack[2]), (float)number(stack[3]), (float)number(stack[4]), (float)number(stack[5]),
                  (int)stack[6], 255};
  Owned out(made_as(x, false));
  in_parallel(image.n * image.pixels, image.n * image.pixels * image.c, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t of = begin / image.pixels, some = std::min(end, (of + 1) * image.pixels) - begin;
      gate(x.data() + begin * image.c, y.data() + of * image.c, f, 1, some, image.c, out.data() + begin * image.c);
      begin += some;
    }
  });
  stack[0] = out.given();
}

// The scales of so many channels, and shifts behind them; each with a register more.
const float* scales_of(const Owned& numbers, int64_t channels) {
  const bool fits = numbers.is_floats() && numbers.dim() == 1 && numbers.sizes()[0] == 2 * (channels + SPAN);
  check(fits && is_dense(numbers, nullptr, 1), "scales and shifts are float32 [2 * (channels + 16)]");
  return (const float*)numbers.data();
}

void rescaled(Value* stack, uint64_t, uint64_t) {
  Owned x(stack[0]), numbers(stack[1]);
  const Image image = image_of(x);
  const float *scale = scales_of(numbers, image.c), *shift = scale + image.c + SPAN;
  const int low = (int)stack[2];
  Owned out(made_as(x, false));
  in_parallel(image.n * image.pixels, image.n * image.pixels * image.c, [&](int64_t begin, int64_t end) {
    const Part part{x.data() + begin * image.c, image.c, image.c};
    join(&part, 1, image.c, scale, shift, low, 255, end - begin, out.data() + begin * image.c);
  });
  stack[0] = out.given();
}

// ---- floats

constexpr int64_t SOME = 1 << 12;  // values at a time

Steps steps(Value scale, Value zero) { return {1.0f / (float)number(scale), (float)(int64_t)zero}; }

void quantized(Value* stack, uint64_t, uint64_t) {
  Owned x(stack[0]);
  const Steps s = steps(stack[1], stack[2]);
  const int64_t dims = x.dim();
  const bool fits = x.is_floats() && (is_dense(x, nullptr, dims) || (dims == 4 && is_dense(x, CHANNELS_LAST, 4)));
  check(fits, "what is quantized are float32 without holes, in order or channels last");
  int64_t count = 1;
  for (int64_t i = 0; i < dims; i++) count *= x.sizes()[i];
  Owned out(made(dims, x.sizes(), x.strides(), false));
  in_parallel((count + SOME - 1) / SOME, count, [&](int64_t begin, int64_t end) {
    const int64_t from = begin * SOME, to = std::min(end * SOME, count);
    quantize((const float*)x.data() + from, to - from, s, out.data() + from);
  });
  stack[0] = out.given();
}

void quantized_product(Value* stack, uint64_t, uint64_t) {
  Owned x(stack[0]), y(stack[1]);
  const Steps s = steps(stack[2], stack[3]);
  const bool fits = x.is_floats() && x.dim() == 4 && is_dense(x, CHANNELS_LAST, 4);
  check(fits, "an image of floats is float32 [batch, channels, height, width], channels last");
  const int64_t *size = x.sizes(), *of = y.dim() == 4 ? y.sizes() : nullptr;
  const int64_t n = size[0], c = size[1], pixels = size[2] * size[3];
  const bool gate = of && y.is_floats() && of[0] == n && of[1] == c && of[2] * of[3] == 1 && is_dense(y, nullptr, 4);
  check(gate && n * c * pixels > 0, "a gate has one number a channel");
  Owned out(made_as(x, false));
  in_parallel(n * pixels, n * pixels * c, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t image = begin / pixels, some = std::min(end, (image + 1) * pixels) - begin;
      const float *from = (const float*)x.data() + begin * c, *times = (const float*)y.data() + image * c;
      quantize_product(from, times, some, c, s, out.data() + begin * c);
      begin += some;
    }
  });
  stack[0] = out.given();
}

void quantized_planes(Value* stack, uint64_t, uint64_t) {
  Owned x(stack[0]);
  const Steps s = steps(stack[1], stack[2]);
  check(x.is_floats() && x.dim() == 4 && is_dense(x, nullptr, 4), "planes are float32 [batch, channels, height, width]");
  const int64_t n = x.sizes()[0], c = x.sizes()[1], pixels = x.sizes()[2] * x.sizes()[3];
  check(n * c * pixels > 0, "an empty image");
  Owned out(made_as(x, false));
  in_parallel(n * pixels, n * pixels * c, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t image = begin / pixels, some = std::min(end, (image + 1) * pixels) - begin;
      const float* from = (const float*)x.data() + image * c * pixels + begin - image * pixels;
      quantize_planes(from, c, pixels, some, s, out.data() + begin * c);
      begin += some;
    }
  });
  stack[0] = out.given();
}

// ---- tables

// Channels of an image, channels last, of which x has some: bytes from one pixel to the next; 0 for what is none.
int64_t pitch(const Owned& x) {
  if (x.dim() != 4) return 0;
  const int64_t *size = x.sizes(), *step = x.strides();
  const int64_t n = size[0], c = size[1], h = size[2], w = size[3];
  const int64_t found = w > 1 ? step[3] : h > 1 ? step[2] : n > 1 ? step[0] : c;
  const bool inside = (c == 1 || step[1] == 1) && found >= c;
  const bool outside = (h == 1 || step[2] == w * found) && (n == 1 || step[0] == h * w * found);
  return inside && outside ? found : 0;
}

void looked_up(Value* stack, uint64_t, uint64_t) {
  Owned x(stack[0]), table(stack[1]);
  const bool whole = table.is_bytes() && table.dim() == 1 && table.sizes()[0] == 256 && is_dense(table, nullptr, 1);
  check(whole, "a table is uint8 [256]");
  const int64_t dims = x.dim();
  const bool last = dims == 4 && is_dense(x, CHANNELS_LAST, 4), dense = last || is_dense(x, nullptr, dims);
  const int64_t between = dense ? 0 : pitch(x);
  check(x.is_bytes() && (dense || between), "what is looked up are uint8 without holes, or channels of an image");
  if (between) {
    const int64_t c = x.sizes()[1], pixels = x.sizes()[0] * x.sizes()[2] * x.sizes()[3];
    Owned out(made_as(x, false));
    in_parallel(pixels, pixels * c, [&](int64_t begin, int64_t end) {
      look_up_rows(x.data() + begin * between, end - begin, c, between, table.data(), out.data() + begin * c);
    });
    stack[0] = out.given();
    return;
  }
  int64_t count = 1;
  for (int64_t i = 0; i < dims; i++) count *= x.sizes()[i];
  Owned out(made(dims, x.sizes(), x.strides(), false));
  in_parallel((count + SOME - 1) / SOME, count, [&](int64_t begin, int64_t end) {
    const int64_t from = begin * SOME, to = std::min(end * SOME, count);
    look_up(x.data() + from, to - from, table.data(), out.data() + from);
  });
  stack[0] = out.given();
}

// ---- images whose channels stand behind each other

// A list of tensors, all of which it frees.
struct OwnedList {
  Tensor list;
  std::deque<Owned> items;  // which never move
  explicit OwnedList(Value value) : list((Tensor)value) {
    size_t count;
    done(torch.length(list, &count));
    for (size_t i = 0; i < count; i++) {
      Value item;
      done(torch.item(list, i, &item));
      items.emplace_back(item);
    }
  }
  OwnedList(const OwnedList&) = delete;
  ~OwnedList() { torch.drop_list(list); }
};

// What is behind each other in one image: parts of the first's size, but for their channels.
struct Joined {
  std::vector<Part> parts;
  int64_t sizes[4] = {0, 0, 0, 0};

  explicit Joined(const OwnedList& list) {
    for (const Owned& x : list.items) {
      const int64_t step = pitch(x), *size = x.sizes();
      check(x.is_bytes() && step, "what is joined are channels of uint8 images, channels last");
      if (parts.empty()) std::copy(size, size + 4, sizes), sizes[1] = 0;
      const bool same = size[0] == sizes[0] && size[2] == sizes[2] && size[3] == sizes[3];
      check(same && size[1] > 0, "images that are joined differ in their channels only");
      parts.push_back({x.data(), size[1], step});
      sizes[1] += size[1];
    }
    check(pixels() > 0, "a join of nothing");
  }

  int64_t pixels() const { return sizes[0] * sizes[2] * sizes[3]; }

  Tensor result() const {
    const int64_t c = sizes[1], h = sizes[2], w = sizes[3], strides[4] = {h * w * c, 1, w * c, c};
    return made(4, sizes, strides, false);
  }

  // `write(parts, first, count)`: pixels of the result from the first of the parts on.
  template <typename Write>
  void each(Write write) const {
    in_parallel(pixels(), pixels() * sizes[1], [&](int64_t begin, int64_t end) {
      std::vector<Part> from = parts;
      for (Part& part : from) part.x += begin * part.stride;
      write(from.data(), begin, end - begin);
    });
  }
};

void joined(Value* stack, uint64_t, uint64_t) {
  OwnedList list(stack[0]);
  const Joined all(list);
  const int64_t count = (int64_t)all.parts.size(), c = all.sizes[1];
  Owned out(all.result());
  all.each([&](const Part* parts, int64_t first, int64_t some) {
    lay_behind(parts, count, c, some, out.data() + first * c);
  });
  stack[0] = out.given();
}

void joined_rescaled(Value* stack, uint64_t, uint64_t) {
  OwnedList list(stack[0]);
  Owned numbers(stack[1]);
  const Joined all(list);
  const int64_t count = (int64_t)all.parts.size(), c = all.sizes[1];
  const float *scale = scales_of(numbers, c), *shift = scale + c + SPAN;
  const int low = (int)stack[2];
  Owned out(all.result());
  all.each([&](const Part* parts, int64_t first, int64_t some) {
    join(parts, count, c, scale, shift, low, 255, some, out.data() + first * c);
  });
  stack[0] = out.given();
}

void shuffled(Value* stack, uint64_t, uint64_t) {
  Owned x(stack[0]), y(stack[1]);
  const int64_t step_x = pitch(x), step_y = pitch(y);
  check(x.is_bytes() && y.is_bytes() && step_x && step_y, "what is shuffled are channels of uint8 images, channels last");
  const int64_t *size = x.sizes(), *other = y.sizes();
  const int64_t n = size[0], c = size[1], h = size[2], w = size[3], pixels = n * h * w;
  const bool same = other[0] == n && other[1] == c && other[2] == h && other[3] == w;
  check(same && pixels * c > 0, "both halves have the same size");
  const int64_t sizes[4] = {n, 2 * c, h, w}, strides[4] = {2 * c * h * w, 1, 2 * c * w, 2 * c};
  Owned out(made(4, sizes, strides, false));
  in_parallel(pixels, pixels * c * 2, [&](int64_t begin, int64_t end) {
    const uint8_t *a = x.data() + begin * step_x, *b = y.data() + begin * step_y;
    in_turns(a, step_x, b, step_y, end - begin, c, out.data() + begin * c * 2);
  });
  stack[0] = out.given();
}

// ---- attention

// q, k or v: [batch, heads, rows, channels], channels side by side.
Heads heads_of(const Owned& x) {
  const bool fits = x.is_floats() && x.dim() == 4 && (x.strides()[3] == 1 || x.sizes()[3] == 1);
  check(fits, "attention takes float32 [batch, heads, rows, channels], channels side by side");
  for (int i = 0; i < 4; i++) check(x.sizes()[i] > 0 && x.sizes()[i] <= INT32_MAX, "attention of nothing, or of too much");
  const int64_t* strides = x.strides();
  return {(const float*)x.data(), strides[0], strides[1], strides[2]};
}

// What is added to the scores: sizes of 1 repeat, and batches are counted modulo its own.
Added added_of(const Owned& x, const Attention& a) {
  const bool fits = x.is_floats() && x.dim() == 4 && (x.strides()[3] == 1 || x.sizes()[3] == 1);
  check(fits, "what is added to scores are float32 [batches, heads, queries, keys], keys side by side");
  const int64_t *size = x.sizes(), *strides = x.strides();
  const bool same = size[0] > 0 && a.batch % size[0] == 0 && (size[1] == 1 || size[1] == a.heads) &&
                    (size[2] == 1 || size[2] == a.queries) && size[3] == a.keys;
  check(same, "what is added to scores has their sizes, or 1 in place of heads and queries");
  const auto stride = [&](int i) { return size[i] == 1 ? 0 : strides[i]; };
  return {(const float*)x.data(), size[0], stride(0), stride(1), stride(2)};
}

template <int ADDED>
void attend_in_parallel(
    const Attention& a, const Heads& q, const Heads& k, const Heads& v, const Added* added, uint8_t* out) {
  uint32_t threads = 1;
  done(torch.threads(&threads));
  // where there are more threads than heads, each takes a part of the queries, and packs keys and values itself
  const int64_t all = a.batch * a.heads, most = std::max<int64_t>(1, a.queries / 64);
  const int64_t parts = std::min(most, (threads + all - 1) / all), part = (a.queries + parts - 1) / parts;
  in_parallel(all * parts, all * a.queries * a.keys * (a.deep + a.wide), [&](int64_t begin, int64_t end) {
    for (int64_t place = begin; place < end; place++) {
      const int64_t head = place / parts, first = place % parts * part, last = std::min(first + part, a.queries);
      attend_head<ADDED>(a, q, k, v, added, head / a.heads, head % a.heads, first, last, out);
    }
  });
}

// The terms that are added stand behind q, k and v, one by one: PyTorch takes the items out of a list that is constant.
template <int ADDED>
void attention(Value* stack, uint64_t, uint64_t) {
  Owned q(stack[0]), k(stack[1]), v(stack[2]);
  std::deque<Owned> terms;
  for (int i = 0; i < ADDED; i++) terms.emplace_back(stack[3 + i]);
  const Value* rest = stack + 3 + ADDED;
  const Heads queries = heads_of(q), keys = heads_of(k), values = heads_of(v);
  const int64_t *of = q.sizes(), *by = k.sizes(), *with = v.sizes();
  const bool same = by[0] == of[0] && with[0] == of[0] && by[1] == of[1] && with[1] == of[1] && by[3] == of[3] &&
                    by[2] == with[2];
  check(same, "queries, keys and values of attention have the same batch and heads, keys and values the same rows");
  const float scale = (float)number(rest[0]), out_scale = (float)number(rest[1]);
  const Attention a{of[0], of[1], of[2], by[2], of[3], with[3], scale, 0, 0, 0, 1.0f / out_scale, (float)(int64_t)rest[2]};
  Added added[2] = {};
  for (int i = 0; i < ADDED; i++) added[i] = added_of(terms[i], a);
  const int64_t sizes[4] = {a.batch, a.heads, a.queries, a.wide};
  const int64_t strides[4] = {a.queries * a.heads * a.wide, a.wide, a.heads * a.wide, 1};
  Owned out(made(4, sizes, strides, false));
  attend_in_parallel<ADDED>(a, queries, keys, values, added, out.data());
  stack[0] = out.given();
}

template <typename F>
bool find(void* handle, const char* name, F& function) {
  function = (F)dlsym(handle, name);
  return function != nullptr;
}

#define BACKQUANT_FIND(member, name) \
  if (!find(handle, name, torch.member)) return name;

// The name of the first function that is missing, or nullptr.
const char* look_up(void* handle) {
  BACKQUANT_FIND(uint8, "aoti_torch_dtype_uint8")
  BACKQUANT_FIND(float32, "aoti_torch_dtype_float32")
  BACKQUANT_FIND(cpu, "aoti_torch_device_type_cpu")
  BACKQUANT_FIND(dtype, "aoti_torch_get_dtype")
  BACKQUANT_FIND(dim, "aoti_torch_get_dim")
  BACKQUANT_FIND(sizes, "aoti_torch_get_sizes")
  BACKQUANT_FIND(strides, "aoti_torch_get_strides")
  BACKQUANT_FIND(data, "aoti_torch_get_data_ptr")
  BACKQUANT_FIND(empty, "aoti_torch_empty_strided")
  BACKQUANT_FIND(drop, "aoti_torch_delete_tensor_object")
  BACKQUANT_FIND(length, "torch_list_size")
  BACKQUANT_FIND(item, "torch_list_get_item")
  BACKQUANT_FIND(drop_list, "torch_delete_list")
  BACKQUANT_FIND(parallel, "torch_parallel_for")
  BACKQUANT_FIND(threads, "torch_get_num_threads")
  BACKQUANT_FIND(fragment, "aoti_torch_library_init_fragment")
  BACKQUANT_FIND(define, "aoti_torch_library_def")
  BACKQUANT_FIND(implementations, "aoti_torch_library_init_impl")
  BACKQUANT_FIND(implement, "aoti_torch_library_impl")
  return nullptr;
}

}  // namespace

#define BACKQUANT_VISIBLE __attribute__((visibility("default")))

extern "C" {

// Makes the operators known to the libtorch at `path`. nullptr, or what is wrong. To be called once.
BACKQUANT_VISIBLE const char* backquant_register(const char* path) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  if (!handle) return "libtorch is not loaded";
  if (const char* missing = look_up(handle)) return missing;
  const char* schemas[] = {
      "convolution(Tensor x, Tensor plan) -> Tensor",
      "convolution_add(Tensor x, Tensor other, Tensor plan) -> Tensor",
      "linear(Tensor x, Tensor plan) -> Tensor",
      "averaged(Tensor x) -> Tensor",
      "maxima(Tensor x, int kh, int kw, int sh, int sw, int ph, int pw, bool ceil) -> Tensor",
      "gated(Tensor x, Tensor y, float x_zero, float y_zero, float scale, float zero, int low) -> Tensor",
      "rescaled(Tensor x, Tensor numbers, int low) -> Tensor",
      "quantized(Tensor x, float scale, int zero) -> Tensor",
      "quantized_product(Tensor x, Tensor y, float scale, int zero) -> Tensor",
      "quantized_planes(Tensor x, float scale, int zero) -> Tensor",
      "looked_up(Tensor x, Tensor table) -> Tensor",
      "shuffled(Tensor x, Tensor y) -> Tensor",
      "joined(Tensor[] parts) -> Tensor",
      "joined_rescaled(Tensor[] parts, Tensor numbers, int low) -> Tensor",
      "attention(Tensor q, Tensor k, Tensor v, float scale, float out_scale, int out_zero) -> Tensor",
      "attention_biased(Tensor q, Tensor k, Tensor v, Tensor x, float scale, float out_scale, int out_zero) -> Tensor",
      "attention_biased_twice(Tensor q, Tensor k, Tensor v, Tensor x, Tensor y, float scale, float out_scale, int "
      "out_zero) -> Tensor",
  };
  void* library;
  if (torch.fragment("backquant_kernels", __FILE__, __LINE__, &library)) return "aoti_torch_library_init_fragment";
  for (const char* schema : schemas)
    if (torch.define(library, schema)) return "aoti_torch_library_def";
  void* cpu;
  if (torch.implementations("backquant_kernels", "CPU", __FILE__, __LINE__, &cpu)) return "aoti_torch_library_init_impl";
  if (torch.implement(cpu, "convolution", convolution) || torch.implement(cpu, "convolution_add", convolution_add) ||
      torch.implement(cpu, "linear", linear) || torch.implement(cpu, "averaged", averaged) ||
      torch.implement(cpu, "maxima", maxima) ||
      torch.implement(cpu, "gated", gated) || torch.implement(cpu, "rescaled", rescaled) ||
      torch.implement(cpu, "quantized", quantized) || torch.implement(cpu, "quantized_product", quantized_product) ||
      torch.implement(cpu, "quantized_planes", quantized_planes) || torch.implement(cpu, "looked_up", looked_up) ||
      torch.implement(cpu, "shuffled", shuffled) || torch.implement(cpu, "joined", joined) ||
      torch.implement(cpu, "joined_rescaled", joined_rescaled) || torch.implement(cpu, "attention", attention<0>) ||
      torch.implement(cpu, "attention_biased", attention<1>) ||
      torch.implement(cpu, "attention_biased_twice", attention<2>))
    return "aoti_torch_library_impl";
  return nullptr;
}

BACKQUANT_VISIBLE int64_t backquant_plan_layout() { return MAGIC; }

// See `sample` and `count_values`; `cut` has the five numbers of a `Cut`.
BACKQUANT_VISIBLE int64_t backquant_sample(const float* x, int64_t size, const int64_t* cut, float* bulk, float* large,
                                           float* ends) {
  return sample(x, size, Cut{cut[0], cut[1], cut[2], cut[3], cut[4]}, bulk, large, ends);
}

BACKQUANT_VISIBLE void backquant_count(const float* x, int64_t size, int64_t times, int32_t mantissa, int32_t steps,
                                       int64_t least, int64_t count, int64_t* bins) {
  count_values(x, size, times, mantissa, steps, least, count, (Bin*)bins);
}
}
