// Calls the CPU kernels without Python, so that an emulator can run them.
//
//   driver digests                        one line per call: its name, and a digest of what it computed
//   driver linear KIND N IN OUT X W Y     y = x w^T of the files X and W, into the file Y
//
// Digests also checks that a row depends on no other row, and compares layers in float32, and in bfloat16 where it is widened,
// with a model in scalar operations.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

extern "C" {
int quire_verify_matrices();
const char* quire_arithmetic();
int64_t quire_linear_packed_bytes(int, int64_t, int64_t);
void quire_linear_pack(int, int, const void*, int64_t, int64_t, float*, void*, int);
void quire_linear(int, int, const void*, const void*, const float*, const void*, void*, int64_t, int64_t, int64_t, int64_t,
                  const int32_t*, int);
int64_t quire_linear_4bit_bytes(int, int64_t, int64_t, int64_t);
void quire_linear_4bit_pack(int, const uint8_t*, const uint16_t*, const uint8_t*, int64_t, int64_t, int64_t, void*, int);
void quire_add_norm(int, int, void*, const void*, const void*, const void*, void*, int64_t, int64_t, float, int);
void quire_gated_activation(int, const void*, void*, int64_t, int64_t, int, int);
void quire_soft_cap(int, void*, int64_t, int64_t, float, int);
void quire_paged_attention(int, const void*, const void*, const void*, void*, const int32_t*, int64_t, const int32_t*,
                           const int32_t*, const int32_t*, const int32_t*, int64_t, int64_t, int64_t, int64_t, int64_t,
                           float, float, int64_t, int64_t, const float*, int, const float*, int64_t, int64_t, int);
}

namespace {

enum Kind { kBfloat16 = 0, kInt8 = 1, kFloat32 = 2 };
const char* const kNames[] = {"bfloat16", "int8", "float32"};

typedef std::vector<char> Bytes;

void fail(const std::string& what) {
  fprintf(stderr, "%s\n", what.c_str());
  exit(1);
}

float widened(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

uint16_t narrowed(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float number(const Bytes& x, int is_bf16, int64_t i) {
  if (is_bf16) return widened(((const uint16_t*)x.data())[i]);
  return ((const float*)x.data())[i];
}

uint64_t state = 1;
// `count` numbers between -2 and 2.
Bytes random_numbers(int is_bf16, int64_t count) {
  Bytes x(count * (is_bf16 ? 2 : 4));
  for (int64_t i = 0; i < count; i++) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const float value = float(int32_t(state >> 32)) * 0x1p-30f;
    const uint16_t half = narrowed(value);
    is_bf16 ? memcpy(x.data() + 2 * i, &half, 2) : memcpy(x.data() + 4 * i, &value, 4);
  }
  return x;
}

void print(const std::string& name, const Bytes& y) {
  uint64_t digest = 14695981039346656037u;
  for (char byte : y) digest = (digest ^ uint8_t(byte)) * 1099511628211u;
  printf("%s %016llx\n", name.c_str(), (unsigned long long)digest);
}

Bytes linear(int kind, int is_bf16, const Bytes& x, const Bytes& w, int64_t n, int64_t in, int64_t out, int threads) {
  Bytes packed(quire_linear_packed_bytes(kind, out, in)), y(n * out * (is_bf16 ? 2 : 4));
  std::vector<float> scales((out + 31) / 32 * 32);
  quire_linear_pack(kind, is_bf16, w.data(), out, in, scales.data(), packed.data(), 1);
  quire_linear(kind, is_bf16, x.data(), packed.data(), scales.data(), nullptr, y.data(), n, in, out, 0, nullptr, threads);
  return y;
}

// An output is a chain of fused multiply-adds, inputs strictly in order.
Bytes linear_model(int is_bf16, const Bytes& x, const Bytes& w, int64_t n, int64_t in, int64_t out) {
  Bytes y(n * out * (is_bf16 ? 2 : 4));
  for (int64_t i = 0; i < n * out; i++) {
    float sum = 0;
    for (int64_t k = 0; k < in; k++)
      sum = fmaf(number(w, is_bf16, i % out * in + k), number(x, is_bf16, i / out * in + k), sum);
    const uint16_t half = narrowed(sum);
    is_bf16 ? memcpy(y.data() + 2 * i, &half, 2) : memcpy(y.data() + 4 * i, &sum, 4);
  }
  return y;
}

void check_linear(int kind, int64_t in, int64_t out) {
  const int is_bf16 = kind != kFloat32, most = 29;
  const int64_t row = in * (is_bf16 ? 2 : 4), output = out * (is_bf16 ? 2 : 4);
  const std::string name = std::string("linear ") + kNames[kind] + " " + std::to_string(in) + "x" + std::to_string(out);
  const Bytes x = random_numbers(is_bf16, most * in), w = random_numbers(is_bf16, out * in);
  const Bytes y = linear(kind, is_bf16, x, w, most, in, out, 1);
  const std::string words = quire_arithmetic();
  const bool has_order = words.find("bfloat16-") == std::string::npos && words.find("fma") != std::string::npos;
  if ((kind == kFloat32 || (kind == kBfloat16 && has_order)) && y != linear_model(is_bf16, x, w, most, in, out))
    fail(name + " differs from the model");
  for (int n = 1; n < most; n++)
    for (int threads = 1; threads <= 2; threads++) {
      const int first = n % (most - n + 1);
      const Bytes part(x.begin() + first * row, x.begin() + (first + n) * row);
      const Bytes found = linear(kind, is_bf16, part, w, n, in, out, threads);
      if (!std::equal(found.begin(), found.end(), y.begin() + first * output))
        fail(name + " differs with " + std::to_string(n) + " rows");
    }
  print(name, y);
}

// Weights in 4 bits; `kind`: 3 int4, 4 E2M1.
void check_4bit(int kind, int is_bf16, int64_t in, int64_t out, int64_t unit) {
  const int64_t most = 29, units = (in + unit - 1) / unit, output = out * (is_bf16 ? 2 : 4), row = in * (is_bf16 ? 2 : 4);
  const std::string name = std::string(kind == 3 ? "int4 " : "fp4 ") + (is_bf16 ? "bfloat16 " : "float32 ") +
                           std::to_string(in) + "x" + std::to_string(out) + " " + std::to_string(unit);
  std::vector<uint8_t> codes(out * in), zeros(out * units);
  std::vector<uint16_t> scales(out * units);
  const Bytes random = random_numbers(0, out * in), x = random_numbers(is_bf16, most * in);
  for (int64_t i = 0; i < out * in; i++) codes[i] = uint8_t(random[4 * i + 1]) % (kind == 3 ? 16 : 15);
  for (int64_t i = 0; i < out * units; i++) {
    zeros[i] = uint8_t(random[4 * i + 2]) % 16;
    scales[i] = uint16_t(kind == 3 ? 40 << 10 | uint8_t(random[4 * i]) << 2 : 119);
  }
  Bytes packed(quire_linear_4bit_bytes(kind, out, in, unit));
  quire_linear_4bit_pack(kind, codes.data(), scales.data(), zeros.data(), out, in, unit, packed.data(), 1);
  const auto compute = [&](int64_t first, int64_t n, int threads) {
    Bytes y(n * output);
    quire_linear(kind, is_bf16, x.data() + first * row, packed.data(), nullptr, nullptr, y.data(), n, in, out, unit, nullptr,
                 threads);
    return y;
  };
  const Bytes whole = compute(0, most, 1);
  for (int64_t n = 1; n < most; n++) {
    const int64_t first = n % (most - n + 1);
    const Bytes found = compute(first, n, 1 + n % 2);
    if (!std::equal(found.begin(), found.end(), whole.begin() + first * output))
      fail(name + " differs with " + std::to_string(n) + " rows");
  }
  print(name, whole);
}

// Rows that compute `queries` tokens after `context` tokens each.
struct Rows {
  int64_t count, queries, context;
};

// Attention over scattered blocks.
Bytes attend(int is_bf16, Rows rows, int64_t q_heads, int64_t kv_heads, int64_t dim, const Bytes& q, const Bytes& k,
             const Bytes& v, int64_t blocks, int64_t first, int64_t tokens) {
  const int64_t block_size = 16, stride = blocks / rows.count, row = q_heads * dim * (is_bf16 ? 2 : 4);
  std::vector<int32_t> tables(blocks), lines, starts{0}, contexts;
  for (int64_t i = 0; i < blocks; i++) tables[i] = int32_t(i * 7 % blocks);
  for (int64_t r = 0; r < rows.count; r++) {
    lines.push_back(int32_t(r));
    starts.push_back(int32_t((r + 1) * tokens));
    contexts.push_back(int32_t(rows.context + first));
  }
  Bytes part, out(rows.count * tokens * row);
  for (int64_t r = 0; r < rows.count; r++) {
    const auto begin = q.begin() + (r * rows.queries + first) * row;
    part.insert(part.end(), begin, begin + tokens * row);
  }
  quire_paged_attention(is_bf16, part.data(), k.data(), v.data(), out.data(), tables.data(), stride, lines.data(),
                        starts.data(), contexts.data(), nullptr, rows.count, q_heads, kv_heads, dim, block_size,
                        1 / std::sqrt(float(dim)), 0, 0, 0, nullptr, 0, nullptr, 0, 0, 1);
  return out;
}

void check_attention(int is_bf16, Rows rows, int64_t q_heads, int64_t kv_heads, int64_t dim) {
  const int64_t per_row = (rows.context + rows.queries + 15) / 16, blocks = rows.count * per_row;
  const int64_t numbers = blocks * kv_heads * dim * 16, row = q_heads * dim * (is_bf16 ? 2 : 4);
  const Bytes q = random_numbers(is_bf16, rows.count * rows.queries * q_heads * dim);
  const Bytes k = random_numbers(is_bf16, numbers), v = random_numbers(is_bf16, numbers);
  const std::string name = "attention " + std::string(is_bf16 ? "bfloat16 " : "float32 ") + std::to_string(dim) + " " +
                           std::to_string(rows.count) + "x" + std::to_string(rows.queries);
  const Bytes whole = attend(is_bf16, rows, q_heads, kv_heads, dim, q, k, v, blocks, 0, rows.queries);
  for (int64_t i = 0; i < rows.queries; i += 5) {
    const Bytes one = attend(is_bf16, rows, q_heads, kv_heads, dim, q, k, v, blocks, i, 1);
    for (int64_t r = 0; r < rows.count; r++)
      if (!std::equal(one.begin() + r * row, one.begin() + (r + 1) * row, whole.begin() + (r * rows.queries + i) * row))
        fail(name + ": token " + std::to_string(i) + " differs when it is computed alone");
  }
  print(name, whole);
}

void check_elements(int is_bf16) {
  const std::string type = is_bf16 ? " bfloat16" : " float32";
  const int64_t n = 5, dim = 83;
  const Bytes weight = random_numbers(is_bf16, dim), bias = random_numbers(is_bf16, dim);
  for (int kind = 0; kind < 3; kind++) {
    Bytes x = random_numbers(is_bf16, n * dim), residual = random_numbers(is_bf16, n * dim), y(x.size());
    quire_add_norm(is_bf16, kind, x.data(), residual.data(), weight.data(), bias.data(), y.data(), n, dim, 1e-6f, 1);
    print("norm " + std::to_string(kind) + type, y);
    const Bytes gate_up = random_numbers(is_bf16, 2 * n * dim);
    quire_gated_activation(is_bf16, gate_up.data(), y.data(), n, dim, kind, 1);
    print("activation " + std::to_string(kind) + type, y);
  }
  Bytes x = random_numbers(is_bf16, n * dim);
  quire_soft_cap(is_bf16, x.data(), n, dim, 0.7f, 1);
  print("soft cap" + type, x);
}

int digests() {
  if (!quire_verify_matrices()) fail("the matrix instructions differ from their specification");
  printf("arithmetic%s\n", quire_arithmetic());
  for (int kind : {kBfloat16, kInt8, kFloat32})
    for (int64_t in : {1, 37, 130})
      for (int64_t out : {5, 32, 75}) check_linear(kind, in, out);
  for (int kind : {3, 4})
    for (int is_bf16 : {0, 1})
      for (int64_t unit : {40, 128}) check_4bit(kind, is_bf16, 200, 75, unit);
  for (int is_bf16 : {0, 1}) {
    check_elements(is_bf16);
    check_attention(is_bf16, {2, 11, 5}, 4, 2, 32);
    check_attention(is_bf16, {1, 40, 120}, 6, 1, 64);
    check_attention(is_bf16, {3, 1, 150}, 2, 2, 80);
  }
  return 0;
}

Bytes read_file(const char* path) {
  FILE* file = fopen(path, "rb");
  if (!file) fail(std::string(path) + " cannot be read");
  Bytes bytes;
  char part[4096];
  while (const size_t count = fread(part, 1, sizeof part, file)) bytes.insert(bytes.end(), part, part + count);
  fclose(file);
  return bytes;
}

int linear_of_files(char** arguments) {
  const int kind = atoi(arguments[0]);
  const int64_t n = atoll(arguments[1]), in = atoll(arguments[2]), out = atoll(arguments[3]);
  const Bytes y = linear(kind, kind != kFloat32, read_file(arguments[4]), read_file(arguments[5]), n, in, out, 1);
  FILE* file = fopen(arguments[6], "wb");
  if (!file || fwrite(y.data(), 1, y.size(), file) != y.size() || fclose(file)) fail("the output cannot be written");
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 2 && !strcmp(arguments[1], "digests")) return digests();
  if (count == 9 && !strcmp(arguments[1], "linear")) return linear_of_files(arguments + 2);
  fail("usage: driver digests | driver linear KIND N IN OUT X W Y");
}
