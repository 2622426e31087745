// Causal depthwise convolution, bias and SiLU in one pass (fused.conv_silu), and the gradient.
#pragma once

#include "vectors.h"

namespace holotron {

constexpr int64_t STRETCH = 64;    // tokens of one task
constexpr int64_t CHANNELS = 512;  // of one strip: its rows stay in the first-level cache
constexpr int64_t MOST_TAPS = 8;

struct ConvInputs {
  Tensor x_, taps_, bias_, before_, segments_, none_;
  int64_t batch, length, channels, k;
  const float *x, *taps, *bias, *before, *none;  // taps (K, C), the newest token's last; before (B, K-1, C)
  const int64_t* segments;

  ConvInputs(const Tensor& x0, const Tensor& taps0, const std::optional<Tensor>& bias0,
             const std::optional<Tensor>& before0, const std::optional<Tensor>& segments0)
      : x_(packed(x0, 1)), taps_(taps0.contiguous()) {
    TORCH_CHECK(x0.dim() == 3 && taps0.dim() == 2, "x must be (B, T, C), taps (K, C)");
    batch = x_.size(0), length = x_.size(1), channels = x_.size(2), k = taps_.size(0);
    TORCH_CHECK(k >= 1 && k <= MOST_TAPS, k, " taps; at most ", MOST_TAPS);
    check(x_, {batch, length, channels}, "x");
    check(taps_, {k, channels}, "taps");
    none_ = at::zeros({channels}, x_.options());
    x = x_.const_data_ptr<float>(), taps = taps_.const_data_ptr<float>(), none = none_.const_data_ptr<float>();
    bias = before = nullptr;
    segments = nullptr;
    if (bias0) check(bias_ = bias0->contiguous(), {channels}, "bias"), bias = bias_.const_data_ptr<float>();
    if (before0)
      check(before_ = before0->contiguous(), {batch, k - 1, channels}, "before"), before = before_.const_data_ptr<float>();
    if (segments0) {
      TORCH_CHECK(segments0->scalar_type() == at::kLong && segments0->dim() == 2 && segments0->size(0) == batch &&
                      segments0->size(1) == length,
                  "segments must be int64 (B, T)");
      segments_ = segments0->contiguous(), segments = segments_.const_data_ptr<int64_t>();
    }
  }

  // Of tokens t and t - back: may the later one see the earlier one, both in the row?
  bool reaches(int64_t i, int64_t t, int64_t back) const {
    if (t >= length || t - back < 0) return false;
    return !segments || segments[i * length + t] == segments[i * length + t - back];
  }

  const float* row(int64_t i, int64_t t) const { return x + i * x_.stride(0) + t * x_.stride(1); }

  // rows[back]: what token t finds `back` tokens before itself.
  void reached(int64_t i, int64_t t, const float** rows) const {
    for (int64_t back = 0; back < k; ++back) {
      if (t - back < 0) rows[back] = before ? before + (i * (k - 1) + k - 1 + t - back) * channels : none;
      else rows[back] = reaches(i, t, back) ? row(i, t - back) : none;
    }
  }

  // to[c] = the sum before SiLU for channels first ... first + n.
  void total(const float* const* rows, int64_t first, int64_t n, float* __restrict to) const {
    const float* __restrict newest = taps + (k - 1) * channels + first;
    const float* offset = (bias ? bias : none) + first;
    if (k == 4) {  // one pass
      const float *r0 = rows[0] + first, *r1 = rows[1] + first, *r2 = rows[2] + first, *r3 = rows[3] + first;
      const float *w1 = newest - channels, *w2 = w1 - channels, *w3 = w2 - channels;
      for (int64_t c = 0; c < n; ++c)
        to[c] = offset[c] + r0[c] * newest[c] + r1[c] * w1[c] + r2[c] * w2[c] + r3[c] * w3[c];
      return;
    }
    for (int64_t c = 0; c < n; ++c) to[c] = offset[c] + rows[0][first + c] * newest[c];
    for (int64_t back = 1; back < k; ++back)
      for (int64_t c = 0; c < n; ++c) to[c] += rows[back][first + c] * newest[c - back * channels];
  }
};

inline Tensor conv_silu(const Tensor& x, const Tensor& taps, const std::optional<Tensor>& bias,
                        const std::optional<Tensor>& before, const std::optional<Tensor>& segments) {
  const ConvInputs in(x, taps, bias, before, segments);
  const int64_t C = in.channels, T = in.length;
  Tensor out = at::empty({in.batch, T, C}, x.options());
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, in.batch * T, grain(C * in.k * 2), [&](int64_t begin, int64_t end) {
    const float* rows[MOST_TAPS];
    for (int64_t token = begin; token < end; ++token) {
      float* y = to + token * C;
      in.reached(token / T, token % T, rows);
      in.total(rows, 0, C, y);
      for (int64_t c = 0; c < C; ++c) y[c] *= sigmoid(y[c]);
    }
  });
  return out;
}

// One stretch of tokens and one strip of channels of the gradient. The sum before SiLU is made again.
struct ConvBackward {
  const ConvInputs& in;
  const float* dout;  // (B, T, C) without gaps
  float* dx;
  int64_t dx_row, dx_token;

  // Gradient of the sum, for token t.
  void into_total(int64_t i, int64_t t, const float* const* rows, int64_t first, int64_t n, float* __restrict to) const {
    in.total(rows, first, n, to);
    const float* __restrict d = dout + (i * in.length + t) * in.channels + first;
    for (int64_t c = 0; c < n; ++c) {
      const float s = sigmoid(to[c]);
      to[c] = d[c] * s * (1.f + to[c] * (1.f - s));
    }
  }

  // dtaps (K, C) and dbias (C) of this stretch are added to `sums` ((K + 1), C).
  void operator()(int64_t i, int64_t begin, int64_t end, int64_t first, int64_t n, float* ring, float* sums) const {
    const int64_t k = in.k, C = in.channels;
    const float* rows[MOST_TAPS];
    for (int64_t t = begin; t < end + k - 1; ++t) {
      float* own = ring + t % k * CHANNELS;
      if (t < in.length) {
        in.reached(i, t, rows);
        into_total(i, t, rows, first, n, own);
        if (t < end) {
          for (int64_t back = 0; back < k; ++back) {
            float* __restrict sum = sums + (k - 1 - back) * C + first;
            const float* row = rows[back] + first;
            if (rows[back] != in.none)
              for (int64_t c = 0; c < n; ++c) sum[c] += own[c] * row[c];
          }
          float* __restrict sum = sums + k * C + first;
          for (int64_t c = 0; c < n; ++c) sum[c] += own[c];
        }
      }
      const int64_t target = t - (k - 1);  // every token that reaches it has been here
      if (target >= begin && target < end) into_x(i, target, first, n, ring);
    }
  }

  void into_x(int64_t i, int64_t t, int64_t first, int64_t n, const float* ring) const {
    const int64_t k = in.k, C = in.channels;
    float* __restrict to = dx + i * dx_row + t * dx_token + first;
    const float* newest = in.taps + (k - 1) * C + first;
    const float* own = ring + t % k * CHANNELS;
    for (int64_t c = 0; c < n; ++c) to[c] = own[c] * newest[c];
    for (int64_t back = 1; back < k; ++back) {
      if (!in.reaches(i, t + back, back)) continue;
      const float *later = ring + (t + back) % k * CHANNELS, *tap = newest - back * C;
      for (int64_t c = 0; c < n; ++c) to[c] += later[c] * tap[c];
    }
  }
};

// Writes dx (B, T, C), any strides between tokens; returns the gradients of taps (K, C) and, last, of bias: (K + 1, C).
inline Tensor conv_silu_backward(const Tensor& dout_, const Tensor& x, const Tensor& taps,
                                 const std::optional<Tensor>& bias, const std::optional<Tensor>& segments,
                                 const Tensor& dx) {
  const ConvInputs in(x, taps, bias, std::nullopt, segments);
  const int64_t C = in.channels, T = in.length, stretches = (T + STRETCH - 1) / STRETCH;
  check(dout_, {in.batch, T, C}, "dout");
  check(dx, {in.batch, T, C}, "dx");
  TORCH_CHECK(C == 0 || dx.stride(2) == 1, "channels of dx must lie next to each other");
  const Tensor dout = dout_.contiguous();
  Tensor sums = at::zeros({in.batch * stretches, in.k + 1, C}, x.options());
  float* parts = sums.mutable_data_ptr<float>();
  const ConvBackward backward{in, dout.const_data_ptr<float>(), dx.mutable_data_ptr<float>(), dx.stride(0), dx.stride(1)};
  at::parallel_for(0, in.batch * stretches, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> ring(in.k * CHANNELS);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t i = task / stretches, start = task % stretches * STRETCH;
      for (int64_t first = 0; first < C; first += CHANNELS)
        backward(i, start, std::min(start + STRETCH, T), first, std::min(CHANNELS, C - first), ring.data(),
                 parts + task * (in.k + 1) * C);
    }
  });
  return sums.sum(0);
}

}  // namespace holotron
