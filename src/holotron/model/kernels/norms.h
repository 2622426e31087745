// RMS norm over groups of channels, with or without a SiLU gate before it, and squared ReLU; with gradients.
#pragma once

#include "vectors.h"

namespace holotron {

constexpr int64_t ROWS = 64;  // whose shares in the gradient of a weight are summed in one place

inline Tensor squared_relu(const Tensor& input) {
  const Tensor x = input.contiguous();
  Tensor out = at::empty(x.sizes(), x.options());
  const float* from = x.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, x.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float positive = from[i] < 0.f ? 0.f : from[i];
      to[i] = positive * positive;
    }
  });
  return out;
}

inline Tensor squared_relu_backward(const Tensor& gradient, const Tensor& input) {
  check(gradient, input.sizes(), "gradient");
  const Tensor x = input.contiguous(), d = gradient.contiguous();
  Tensor out = at::empty(x.sizes(), x.options());
  const float *from = x.const_data_ptr<float>(), *ds = d.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, x.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = 2.f * ds[i] * (from[i] < 0.f ? 0.f : from[i]);
  });
  return out;
}

struct NormInputs {  // of rows of `groups * n` channels; z is null without a gate
  Tensor x_, z_, weight_;
  int64_t rows, groups, n, x_row, z_row;
  const float *x, *z, *weight;
  float eps;

  // x and z (rows, groups * n), weight (groups, n)
  NormInputs(const Tensor& x0, const std::optional<Tensor>& z0, const Tensor& weight0, double eps0)
      : x_(packed(x0, 1)), weight_(weight0.contiguous()), eps(static_cast<float>(eps0)) {
    TORCH_CHECK(x0.dim() == 2 && weight0.dim() == 2, "x must be (rows, channels), weight (groups, channels of a group)");
    rows = x_.size(0), groups = weight_.size(0), n = weight_.size(1), x_row = x_.stride(0), z_row = 0;
    check(x_, {rows, groups * n}, "x");
    check(weight_, {groups, n}, "weight");
    x = x_.const_data_ptr<float>(), weight = weight_.const_data_ptr<float>(), z = nullptr;
    if (z0) {
      check(z_ = packed(*z0, 1), {rows, groups * n}, "z");
      z = z_.const_data_ptr<float>(), z_row = z_.stride(0);
    }
  }
};

inline Tensor norm(const Tensor& x_, const std::optional<Tensor>& z_, const Tensor& weight_, double eps) {
  const NormInputs in(x_, z_, weight_, eps);
  const int64_t n = in.n, width = in.groups * n;
  Tensor out = at::empty({in.rows, width}, x_.options());
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, in.rows, grain(width * 4), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t g = 0; g < in.groups; ++g) {
        const float *x = in.x + row * in.x_row + g * n, *w = in.weight + g * n;
        float* __restrict y = to + row * width + g * n;
        const float* gated = x;
        if (in.z) {
          const float* z = in.z + row * in.z_row + g * n;
          for (int64_t i = 0; i < n; ++i) y[i] = x[i] * (z[i] * sigmoid(z[i]));
          gated = y;
        }
        const float scale = 1.f / std::sqrt(dot(gated, gated, n) / n + in.eps);
        for (int64_t i = 0; i < n; ++i) y[i] = gated[i] * scale * w[i];
      }
  });
  return out;
}

// dx, dz (rows, channels) are written where they are given, any strides between rows; returns that of the weight.
inline Tensor norm_backward(const Tensor& gradient_, const Tensor& x_, const std::optional<Tensor>& z_,
                            const Tensor& weight_, double eps, const Tensor& dx, const std::optional<Tensor>& dz) {
  const NormInputs in(x_, z_, weight_, eps);
  const int64_t n = in.n, width = in.groups * n, blocks = (in.rows + ROWS - 1) / ROWS;
  check(gradient_, {in.rows, width}, "gradient");
  check(dx, {in.rows, width}, "dx");
  TORCH_CHECK(width == 0 || dx.stride(1) == 1, "channels of dx must lie next to each other");
  TORCH_CHECK(dz.has_value() == (in.z != nullptr), "dz belongs to z");
  if (dz) {
    check(*dz, {in.rows, width}, "dz");
    TORCH_CHECK(width == 0 || dz->stride(1) == 1, "channels of dz must lie next to each other");
  }
  const Tensor gradient = packed(gradient_, 1);
  Tensor sums = at::zeros({blocks, in.groups, n}, x_.options());
  float *parts = sums.mutable_data_ptr<float>(), *dxs = dx.mutable_data_ptr<float>();
  float* dzs = dz ? dz->mutable_data_ptr<float>() : nullptr;
  const float* ds = gradient.const_data_ptr<float>();
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> gated_room(n), weighted_room(n), sigmoid_room(n);
    float *__restrict gated = gated_room.data(), *__restrict weighted = weighted_room.data();
    float* __restrict gate = sigmoid_room.data();
    for (int64_t row = begin * ROWS; row < std::min(end * ROWS, in.rows); ++row)
      for (int64_t g = 0; g < in.groups; ++g) {
        const float *x = in.x + row * in.x_row + g * n, *w = in.weight + g * n, *z = in.z + row * in.z_row + g * n;
        const float* d = ds + row * gradient.stride(0) + g * n;
        float *to = dxs + row * dx.stride(0) + g * n, *dw = parts + (row / ROWS * in.groups + g) * n;
        if (in.z)
          for (int64_t i = 0; i < n; ++i) gate[i] = sigmoid(z[i]), gated[i] = x[i] * (z[i] * gate[i]);
        else
          std::copy_n(x, n, gated);
        for (int64_t i = 0; i < n; ++i) weighted[i] = d[i] * w[i];
        const float scale = 1.f / std::sqrt(dot(gated, gated, n) / n + in.eps);
        const float along = dot(weighted, gated, n) * scale * scale / n;
        for (int64_t i = 0; i < n; ++i) dw[i] += d[i] * gated[i] * scale;
        for (int64_t i = 0; i < n; ++i) weighted[i] = scale * (weighted[i] - gated[i] * along);
        if (!in.z) {
          std::copy_n(weighted, n, to);
          continue;
        }
        float* __restrict dzi = dzs + row * dz->stride(0) + g * n;
        for (int64_t i = 0; i < n; ++i) dzi[i] = weighted[i] * x[i] * gate[i] * (1.f + z[i] * (1.f - gate[i]));
        for (int64_t i = 0; i < n; ++i) to[i] = weighted[i] * z[i] * gate[i];
      }
  });
  return sums.sum(0);
}

}  // namespace holotron
