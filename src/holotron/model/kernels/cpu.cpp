// CPU kernels for fp32, loaded by kernels/__init__.py. Each has a plain torch twin that defines what it computes.

#include "attention.h"
#include "conv.h"
#include "decode.h"
#include "norms.h"
#include "scan.h"
#include "scan_backward.h"

TORCH_LIBRARY(holotron_cpu, m) {
  m.def("squared_relu(Tensor x) -> Tensor");
  m.def("squared_relu_backward(Tensor gradient, Tensor x) -> Tensor");
  m.def("norm(Tensor x, Tensor? z, Tensor weight, float eps) -> Tensor");
  m.def(
      "norm_backward(Tensor gradient, Tensor x, Tensor? z, Tensor weight, float eps, Tensor(a!) dx, Tensor(b!)? dz) -> "
      "Tensor");
  m.def("conv_silu(Tensor x, Tensor taps, Tensor? bias, Tensor? before, Tensor? segments) -> Tensor");
  m.def(
      "conv_silu_backward(Tensor dout, Tensor x, Tensor taps, Tensor? bias, Tensor? segments, Tensor(a!) dx) -> Tensor");
  m.def(
      "scan(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor d, Tensor state, Tensor? segments) -> "
      "(Tensor, Tensor)");
  m.def(
      "scan_backward(Tensor dy, Tensor dlast, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor d, Tensor state, "
      "Tensor? segments) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("attention(Tensor q, Tensor k, Tensor v, Tensor? starts) -> (Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor dout, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor? starts) -> "
      "(Tensor, Tensor, Tensor)");
  m.def("conv_step(Tensor(a!) pool, Tensor slots, Tensor xbc, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "ssd_step(Tensor(a!) pool, Tensor slots, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor d) -> Tensor");
  m.def("paged_attention(Tensor q, Tensor keys, Tensor values, Tensor table, Tensor lengths) -> Tensor");
}

TORCH_LIBRARY_IMPL(holotron_cpu, CPU, m) {
  m.impl("squared_relu", holotron::squared_relu);
  m.impl("squared_relu_backward", holotron::squared_relu_backward);
  m.impl("norm", holotron::norm);
  m.impl("norm_backward", holotron::norm_backward);
  m.impl("conv_silu", holotron::conv_silu);
  m.impl("conv_silu_backward", holotron::conv_silu_backward);
  m.impl("scan", holotron::scan);
  m.impl("scan_backward", holotron::scan_backward);
  m.impl("attention", holotron::attention);
  m.impl("attention_backward", holotron::attention_backward);
  m.impl("conv_step", holotron::conv_step);
  m.impl("ssd_step", holotron::ssd_step);
  m.impl("paged_attention", holotron::paged_attention);
}
