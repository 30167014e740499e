// Calls the operators of a library of kernels without PyTorch: reads calls from standard input, writes results to
// standard output. It has the functions of PyTorch's C interface that the library looks up, over plain memory.
//
//     emulated LIBRARY
//
// A call: 64-bit numbers, then data. The length of the operator's name, the name, the count of values; each value: 0 and
// its 64 bits, or 1 and a tensor: its dtype (0 uint8, 6 float32), its dimensions, sizes, strides, bytes and data; or 2
// and a list of tensors: how many, each without the 1. The answer: 0 and a tensor, or the length of a message, and that.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <string>
#include <vector>

struct Tensor {
  int64_t dtype;
  std::vector<int64_t> sizes, strides;
  std::vector<uint8_t> bytes;
};
using List = std::vector<Tensor*>;
using Operator = void (*)(uint64_t*, uint64_t, uint64_t);

static std::map<std::string, Operator> operators;
static int64_t alive = 0;  // tensors, and lists of them

#define SHOWN extern "C" __attribute__((visibility("default")))

SHOWN int32_t aoti_torch_dtype_uint8() { return 0; }
SHOWN int32_t aoti_torch_dtype_float32() { return 6; }
SHOWN int32_t aoti_torch_device_type_cpu() { return 0; }
SHOWN int32_t aoti_torch_get_dtype(Tensor* t, int32_t* out) { return *out = (int32_t)t->dtype, 0; }
SHOWN int32_t aoti_torch_get_dim(Tensor* t, int64_t* out) { return *out = (int64_t)t->sizes.size(), 0; }
SHOWN int32_t aoti_torch_get_sizes(Tensor* t, int64_t** out) { return *out = t->sizes.data(), 0; }
SHOWN int32_t aoti_torch_get_strides(Tensor* t, int64_t** out) { return *out = t->strides.data(), 0; }
SHOWN int32_t aoti_torch_get_data_ptr(Tensor* t, void** out) { return *out = t->bytes.data(), 0; }
SHOWN int32_t aoti_torch_empty_strided(
    int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t, int32_t, Tensor** out) {
  int64_t count = 1;
  for (int64_t i = 0; i < dims; i++) count *= sizes[i];
  *out = new Tensor{dtype, {sizes, sizes + dims}, {strides, strides + dims}, {}};
  (*out)->bytes.resize(count * (dtype == 6 ? 4 : 1));
  alive++;
  return 0;
}
SHOWN int32_t aoti_torch_delete_tensor_object(Tensor* t) { return delete t, alive--, 0; }
SHOWN int32_t torch_list_size(List* list, size_t* out) { return *out = list->size(), 0; }
SHOWN int32_t torch_list_get_item(List* list, size_t place, uint64_t* out) { return *out = (uint64_t)(*list)[place], 0; }
SHOWN int32_t torch_delete_list(List* list) { return delete list, alive--, 0; }
// Three parts, as three threads would have them.
SHOWN int32_t torch_parallel_for(
    int64_t begin, int64_t end, int64_t grain, void (*part)(int64_t, int64_t, void*), void* own) {
  const int64_t step = (end - begin + 2) / 3 > grain ? (end - begin + 2) / 3 : grain;
  for (; begin < end; begin += step) part(begin, begin + step < end ? begin + step : end, own);
  return 0;
}
SHOWN int32_t torch_get_num_threads(uint32_t* out) { return *out = 3, 0; }
SHOWN int32_t aoti_torch_library_init_fragment(const char*, const char*, uint32_t, void** out) { return *out = nullptr, 0; }
SHOWN int32_t aoti_torch_library_def(void*, const char*) { return 0; }
SHOWN int32_t aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t, void** out) {
  return *out = nullptr, 0;
}
SHOWN int32_t aoti_torch_library_impl(void*, const char* name, Operator run) { return operators[name] = run, 0; }

static void fail(const char* what) {
  fprintf(stderr, "%s\n", what);
  exit(1);
}

static void read_all(void* to, size_t size) {
  if (size && fread(to, 1, size, stdin) != size) fail("a call ends too early");
}

static int64_t read_number() {
  int64_t found;
  read_all(&found, sizeof(found));
  return found;
}

static void write_number(int64_t number) { fwrite(&number, sizeof(number), 1, stdout); }

static std::vector<int64_t> read_numbers(int64_t count) {
  std::vector<int64_t> found(count);
  for (int64_t& number : found) number = read_number();
  return found;
}

static Tensor* read_tensor() {
  Tensor* made = new Tensor{read_number(), {}, {}, {}};
  const int64_t dims = read_number();
  made->sizes = read_numbers(dims);
  made->strides = read_numbers(dims);
  made->bytes.resize(read_number());
  read_all(made->bytes.data(), made->bytes.size());
  alive++;
  return made;
}

static uint64_t read_value() {
  const int64_t kind = read_number();
  if (kind == 0) return (uint64_t)read_number();
  if (kind == 1) return (uint64_t)read_tensor();
  List* made = new List(read_number());
  for (Tensor*& each : *made) each = read_tensor();
  alive++;
  return (uint64_t)made;
}

static void write_tensor(const Tensor& t) {
  write_number(t.dtype);
  write_number((int64_t)t.sizes.size());
  for (int64_t number : t.sizes) write_number(number);
  for (int64_t number : t.strides) write_number(number);
  write_number((int64_t)t.bytes.size());
  fwrite(t.bytes.data(), 1, t.bytes.size(), stdout);
}

static void answer(Operator run, std::vector<uint64_t>& values) {
  try {
    run(values.data(), values.size(), 1);
  } catch (const std::exception& error) {
    const std::string what = error.what();
    write_number((int64_t)what.size());
    fwrite(what.data(), 1, what.size(), stdout);
    return;
  }
  write_number(0);
  write_tensor(*(Tensor*)values[0]);
  aoti_torch_delete_tensor_object((Tensor*)values[0]);
  if (alive) fail("the operator does not free its tensors");
}

int main(int count, char** arguments) {
  void* library = count == 2 ? dlopen(arguments[1], RTLD_NOW) : nullptr;
  if (!library) fail(dlerror());
  const auto known = (const char* (*)(const char*))dlsym(library, "backquant_register");
  const auto layout = (int64_t (*)())dlsym(library, "backquant_plan_layout");
  if (!known || !layout) fail("not a library of kernels");
  if (const char* missing = known(nullptr)) fail(missing);
  write_number(layout());
  fflush(stdout);
  for (int64_t size; fread(&size, sizeof(size), 1, stdin) == 1;) {
    std::string name(size, ' ');
    read_all(&name[0], size);
    std::vector<uint64_t> values(read_number());
    for (uint64_t& value : values) value = read_value();
    const auto found = operators.find(name);
    if (found == operators.end()) fail(("no operator " + name).c_str());
    answer(found->second, values);
    fflush(stdout);
  }
}
