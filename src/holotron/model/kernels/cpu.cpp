// CPU kernels for fp32, loaded by kernels/__init__.py. Each has a plain torch twin that defines what it computes.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace {

using at::Tensor;

Tensor squared_relu(const Tensor& input) {
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

}  // namespace

TORCH_LIBRARY(holotron_cpu, m) {
  m.def("squared_relu(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(holotron_cpu, CPU, m) {
  m.impl("squared_relu", squared_relu);
}
