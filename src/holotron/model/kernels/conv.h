// Causal depthwise convolution, bias and SiLU in one pass (fused.conv_silu), and the gradient.
#pragma once

#include "vectors.h"

namespace holotron {

constexpr int64_t STRETCH = 64;  // tokens of one task
constexpr int64_t MOST_TAPS = 4;

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

// The gradient for one stretch of tokens. The sum before SiLU is made again. One vector of channels at a time goes down
// the tokens, with all that it needs of earlier ones in registers.
template <int K>
struct ConvBackward {
  const ConvInputs& in;
  const float* dout;  // (B, T, C) without gaps
  float* dx;
  int64_t dx_row, dx_token;

  // Gradients of taps and bias of this stretch go to `sums` (K + 1, C).
  void operator()(int64_t i, int64_t begin, int64_t end, float* sums) const {
    bool reach[STRETCH + K][K];  // of token begin + t, `back` tokens before
    for (int64_t t = 0; t < end - begin + K - 1; ++t)
      for (int64_t back = 0; back < K; ++back) reach[t][back] = in.reaches(i, begin + t, back);
    for (int64_t c = 0; c < in.channels; c += LANES) strip(i, begin, end, c, std::min(LANES, in.channels - c), reach, sums);
  }

 private:
  void strip(int64_t i, int64_t begin, int64_t end, int64_t c, int64_t n, const bool (*reach)[K], float* sums) const {
    const int64_t C = in.channels;
    vec x[K]{}, g[K]{}, tap[K], dtap[K]{}, dbias{};  // x[b], g[b]: b tokens ago
    for (int64_t b = 0; b < K; ++b) tap[b] = load_some(in.taps + (K - 1 - b) * C + c, n);
    const vec offset = in.bias ? load_some(in.bias + c, n) : vec{};
    for (int64_t b = 0; b + 1 < K; ++b)
      if (begin - 1 - b >= 0) x[b] = load_some(in.row(i, begin - 1 - b) + c, n);
    for (int64_t t = begin; t < end + K - 1; ++t) {
      for (int64_t b = K - 1; b > 0; --b) x[b] = x[b - 1], g[b] = g[b - 1];
      if (t < in.length) {
        x[0] = load_some(in.row(i, t) + c, n);
        vec seen[K], total = offset;
        for (int64_t b = 0; b < K; ++b) {
          seen[b] = reach[t - begin][b] ? x[b] : vec{};
          total += seen[b] * tap[b];
        }
        const vec s = sigmoid(total);
        g[0] = load_some(dout + (i * in.length + t) * C + c, n) * s * (1.f + total * (1.f - s));
        if (t < end) {
          for (int64_t b = 0; b < K; ++b) dtap[b] += g[0] * seen[b];
          dbias += g[0];
        }
      } else {
        g[0] = vec{};
      }
      const int64_t target = t - (K - 1);  // every token that reaches it has been here
      if (target < begin) continue;
      vec own{};
      for (int64_t b = 0; b < K; ++b)
        if (reach[target + b - begin][b]) own += g[K - 1 - b] * tap[b];
      store_some(dx + i * dx_row + target * dx_token + c, own, n);
    }
    for (int64_t b = 0; b < K; ++b) store_some(sums + (K - 1 - b) * C + c, dtap[b], n);
    store_some(sums + K * C + c, dbias, n);
  }
};

// Writes dx (B, T, C), any strides between tokens; returns the gradients of taps (K, C) and, last, of bias: (K + 1, C).
inline Tensor conv_silu_backward(const Tensor& dout_, const Tensor& x, const Tensor& taps,
                                 const std::optional<Tensor>& bias, const std::optional<Tensor>& segments,
                                 const Tensor& dx) {
  const ConvInputs in(x, taps, bias, std::nullopt, segments);
  const int64_t C = in.channels, T = in.length, k = in.k, stretches = (T + STRETCH - 1) / STRETCH;
  check(dout_, {in.batch, T, C}, "dout");
  check(dx, {in.batch, T, C}, "dx");
  TORCH_CHECK(C == 0 || dx.stride(2) == 1, "channels of dx must lie next to each other");
  const Tensor dout = dout_.contiguous();
  Tensor sums = at::empty({in.batch * stretches, k + 1, C}, x.options());
  float *parts = sums.mutable_data_ptr<float>(), *to = dx.mutable_data_ptr<float>();
  const float* from = dout.const_data_ptr<float>();
  at::parallel_for(0, in.batch * stretches, grain(STRETCH * C), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t i = task / stretches, first = task % stretches * STRETCH, last = std::min(first + STRETCH, T);
      float* own = parts + task * (k + 1) * C;
      if (k == 1) ConvBackward<1>{in, from, to, dx.stride(0), dx.stride(1)}(i, first, last, own);
      if (k == 2) ConvBackward<2>{in, from, to, dx.stride(0), dx.stride(1)}(i, first, last, own);
      if (k == 3) ConvBackward<3>{in, from, to, dx.stride(0), dx.stride(1)}(i, first, last, own);
      if (k == 4) ConvBackward<4>{in, from, to, dx.stride(0), dx.stride(1)}(i, first, last, own);
    }
  });
  return sums.sum(0);
}

}  // namespace holotron
