// Vectors of floats, exp and SiLU that compilers vectorise, and how tensors are read.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace holotron {

using at::Tensor;

#if defined(__AVX512F__)
constexpr int64_t LANES = 16, TILE_ROWS = 8;  // TILE_ROWS x 2 vectors of state stay in registers
#else
constexpr int64_t LANES = 8, TILE_ROWS = 4;
#endif

typedef float vec __attribute__((vector_size(LANES * sizeof(float))));
typedef float unaligned_vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

inline vec load(const float* from) { return *reinterpret_cast<const unaligned_vec*>(from); }
inline void store(float* to, vec value) { *reinterpret_cast<unaligned_vec*>(to) = value; }

// n <= LANES numbers, zeros behind them.
inline vec load_some(const float* from, int64_t n) {
  if (n == LANES) return load(from);
  vec some{};
  std::memcpy(&some, from, n * sizeof(float));
  return some;
}

inline void store_some(float* to, vec value, int64_t n) {
  if (n == LANES) store(to, value);
  else std::memcpy(to, &value, n * sizeof(float));
}

inline float sum(vec v) {
  typedef float half __attribute__((vector_size(LANES * sizeof(float) / 2)));
  typedef float four __attribute__((vector_size(16)));
  half halves[2];
  std::memcpy(halves, &v, sizeof v);
  const half h = halves[0] + halves[1];
  four fours[sizeof(half) / sizeof(four)];
  std::memcpy(fours, &h, sizeof h);
  four f = fours[0];
  for (size_t i = 1; i < sizeof(half) / sizeof(four); ++i) f += fours[i];
  return (f[0] + f[2]) + (f[1] + f[3]);
}

inline float dot(const float* a, const float* b, int64_t n) {
  vec even{}, odd{};
  int64_t i = 0;
  for (; i + 2 * LANES <= n; i += 2 * LANES) {
    even += load(a + i) * load(b + i);
    odd += load(a + i + LANES) * load(b + i + LANES);
  }
  if (i + LANES <= n) {
    even += load(a + i) * load(b + i);
    i += LANES;
  }
  float rest = sum(even + odd);
  for (; i < n; ++i) rest += a[i] * b[i];
  return rest;
}

// e^x within 2 units in the last place, never below 1e-38 nor above 2e38; NaN stays NaN. x = k ln 2 + r, and a Taylor
// series for e^r. Without branches, so that a loop around it is vectorised. Real is float or vec, Bits as wide.
template <class Real, class Bits>
inline Real exp_as(Real x) {
  const Real high = Real{} + 88.f, low = Real{} - 87.f;
  x = x > high ? high : x;
  x = x < low ? low : x;
  const Real shifted = x * 1.44269504f + 12582912.f;  // 1.5 * 2^23: the integer k is in the low bits
  const Real k = shifted - 12582912.f;
  const Real r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
  Real series = r * (1.f / 5040) + 1.f / 720;
  series = series * r + 1.f / 120;
  series = series * r + 1.f / 24;
  series = series * r + 1.f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.f;
  series = series * r + 1.f;
  return series * std::bit_cast<Real>((std::bit_cast<Bits>(shifted) << 23) + 0x3f800000u);
}

template <class Real, class Bits>
inline Real sigmoid_as(Real x) {
  const Real s = 1.f / (1.f + exp_as<Real, Bits>(-x));
  return x < Real{} - 87.f ? Real{} : s;
}

typedef uint32_t bits __attribute__((vector_size(LANES * sizeof(uint32_t))));

inline float exp_of(float x) { return exp_as<float, uint32_t>(x); }
inline float sigmoid(float x) { return sigmoid_as<float, uint32_t>(x); }
inline vec sigmoid(vec x) { return sigmoid_as<vec, bits>(x); }

// While it lives, numbers too small for full precision count as 0: what decays would otherwise slow down in the end.
class FlushTiny {
 public:
#if defined(__SSE__)
  FlushTiny() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushTiny() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
  FlushTiny() {}
#endif
};

inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// The last `inner` axes without gaps, the first ones as they are.
inline Tensor packed(const Tensor& t, int64_t inner) {
  int64_t expected = 1;
  for (int64_t axis = t.dim() - 1; axis >= t.dim() - inner; --axis) {
    if (t.size(axis) != 1 && t.stride(axis) != expected) return t.contiguous();
    expected *= t.size(axis);
  }
  return t;
}

inline void check(const Tensor& t, at::IntArrayRef sizes, const char* name) {
  TORCH_CHECK(t.scalar_type() == at::kFloat && t.device().is_cpu(), name, " must be fp32 on the CPU");
  TORCH_CHECK(t.sizes() == sizes, name, " has shape ", t.sizes(), ", expected ", sizes);
}

inline void check_pool(const Tensor& pool, const char* name) {
  TORCH_CHECK(pool.scalar_type() == at::kFloat && pool.device().is_cpu(), name, " must be fp32 on the CPU");
  TORCH_CHECK(pool.is_contiguous(), name, " must be contiguous");
}

// int64 on the CPU, every entry a row of a pool.
inline Tensor checked_slots(const Tensor& slots, int64_t rows) {
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.dim() == 1, "slots must be int64 (B,)");
  const Tensor list = slots.contiguous();
  const int64_t* at = list.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < list.numel(); ++i)
    TORCH_CHECK(at[i] >= 0 && at[i] < rows, "slot ", at[i], " is not in a pool of ", rows);
  return list;
}

inline int64_t grain(int64_t work_each) { return std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, work_each)); }

}  // namespace holotron
