// CPU kernels for fp32, loaded by kernels/__init__.py. Each has a plain torch twin that defines what it computes.

#include "decode.h"
#include "vectors.h"

namespace holotron {

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

}  // namespace holotron

TORCH_LIBRARY(holotron_cpu, m) {
  m.def("squared_relu(Tensor x) -> Tensor");
  m.def("conv_step(Tensor(a!) pool, Tensor slots, Tensor xbc, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "ssd_step(Tensor(a!) pool, Tensor slots, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor d) -> Tensor");
  m.def("paged_attention(Tensor q, Tensor keys, Tensor values, Tensor table, Tensor lengths) -> Tensor");
}

TORCH_LIBRARY_IMPL(holotron_cpu, CPU, m) {
  m.impl("squared_relu", holotron::squared_relu);
  m.impl("conv_step", holotron::conv_step);
  m.impl("ssd_step", holotron::ssd_step);
  m.impl("paged_attention", holotron::paged_attention);
}
