// The gradient of the recurrence; roles and formulas are at the top of scan.h.
#pragma once

#include "scan.h"

namespace holotron {

struct ScanGradients {  // where they go
  float *dx, *db, *dc;  // of row 0, token 0, head or group 0
  int64_t x_token, bc_token, bc_part;
  float *ddt, *da, *dd, *dstate;
};

// All heads of one group in one row; what several heads share, the gradients of B and C, is summed up here.
class GroupBackward {
 public:
  GroupBackward(const ScanInputs& in, const Source& dy, const float* start, const float* dlast, const ScanGradients& to)
      : in_(in), dy_(dy), start_(start), dlast_(dlast), to_(to), L_(in.length), P_(in.width), N_(in.size),
        P_rows_(padded(P_, TILE_ROWS)), N_rows_(padded(N_, TILE_ROWS)), P_lanes_(padded(P_, LANES)),
        N_lanes_(padded(N_, LANES)), state_(std::max(P_rows_ * N_lanes_, N_rows_ * P_lanes_)),
        v_(SPAN * std::max(P_lanes_, N_lanes_)), out_(v_.size()), decay_(L_ + 1), step_(L_), own_(L_), x_dy_(L_),
        flow_(L_), flow_after_(L_ / SPAN + 1), after_(padded(L_, SPAN) / SPAN * P_rows_ * N_lanes_), first_room_(operand_room(std::max(P_, N_))), second_room_(first_room_) {}

  void head(int64_t i, int64_t h, int64_t part, bool first_of_part) {
    i_ = i, h_ = h, g_ = h / in_.per;
    const int64_t bc = part * to_.bc_part + i * L_ * to_.bc_token + g_ * N_;
    db_ = to_.db + bc, dc_ = to_.dc + bc, add_ = !first_of_part;
    in_.decays(i, h, decay_.data());
    decay_[L_] = 1.f;
    float dd = 0.f;
    for (int64_t t = 0; t < L_; ++t) {
      step_[t] = in_.dt(i, t)[h];
      x_dy_[t] = dot(in_.x(i, t) + h * P_, dy_(i, t) + h * P_, P_);
      own_[t] = dot(in_.b(i, t) + g_ * N_, in_.c(i, t) + g_ * N_, N_);
      dd += x_dy_[t];
    }
    to_.dd[i * in_.heads + h] = dd;
    for_c();
    for_b();
    for_x();
  }

 private:
  // Forward again, keeping the state after every span.
  void for_c() {
    const int64_t state_at = (i_ * in_.heads + h_) * P_ * N_;
    state_in(start_ + state_at, P_, N_, false, N_lanes_, state_);
    for (int64_t first = 0; first < L_; first += SPAN) {
      const int64_t tokens = std::min(SPAN, L_ - first);
      lay_out(in_.b, i_, first, tokens, g_ * N_, N_, N_lanes_, step_.data() + first, v_.data());
      recur(tokens, 1, P_rows_, N_lanes_, operand(in_.x, i_, first, tokens, h_ * P_, P_, first_room_),
            operand(dy_, i_, first, tokens, h_ * P_, P_, second_room_), v_.data(), decay_.data() + first, state_.data(),
            out_.data());
      for (int64_t t = first; t < first + tokens; ++t) {
        const float *out = out_.data() + (t - first) * N_lanes_, *b = in_.b(i_, t) + g_ * N_;
        flow_[t] = dot(out, in_.c(i_, t) + g_ * N_, N_);
        put(dc_ + t * to_.bc_token, out, b, 1.f, step_[t] * x_dy_[t], N_);
      }
      std::copy_n(state_.data(), P_rows_ * N_lanes_, after_.data() + first / SPAN * P_rows_ * N_lanes_);
    }
  }

  void for_b() {
    const int64_t state_at = (i_ * in_.heads + h_) * P_ * N_;
    state_in(dlast_ + state_at, P_, N_, false, N_lanes_, state_);
    for (int64_t first = padded(L_, SPAN) - SPAN; first >= 0; first -= SPAN) {
      const int64_t tokens = std::min(SPAN, L_ - first), span = first / SPAN;
      const float* after = after_.data() + span * P_rows_ * N_lanes_;
      flow_after_[span] = decay_[first + tokens] * dot(state_.data(), after, P_rows_ * N_lanes_);
      lay_out(in_.c, i_, first, tokens, g_ * N_, N_, N_lanes_, nullptr, v_.data());
      recur(tokens, -1, P_rows_, N_lanes_, operand(dy_, i_, first, tokens, h_ * P_, P_, first_room_),
            operand(in_.x, i_, first, tokens, h_ * P_, P_, second_room_), v_.data(), decay_.data() + 1 + first,
            state_.data(), out_.data());
      for (int64_t t = first; t < first + tokens; ++t)
        put(db_ + t * to_.bc_token, out_.data() + (t - first) * N_lanes_, in_.c(i_, t) + g_ * N_, step_[t],
            step_[t] * x_dy_[t], N_);
    }
    state_out(state_, P_, N_, false, N_lanes_, decay_[0], to_.dstate + state_at);
  }

  void for_x() {
    state_in(dlast_ + (i_ * in_.heads + h_) * P_ * N_, P_, N_, true, P_lanes_, state_);
    double da = 0.0;
    for (int64_t first = padded(L_, SPAN) - SPAN; first >= 0; first -= SPAN) {
      const int64_t tokens = std::min(SPAN, L_ - first);
      lay_out(dy_, i_, first, tokens, h_ * P_, P_, P_lanes_, nullptr, v_.data());
      recur(tokens, -1, N_rows_, P_lanes_, operand(in_.c, i_, first, tokens, g_ * N_, N_, first_room_),
            operand(in_.b, i_, first, tokens, g_ * N_, N_, second_room_), v_.data(), decay_.data() + 1 + first,
            state_.data(), out_.data());
      double ddecay = flow_after_[first / SPAN];
      for (int64_t t = first + tokens - 1; t >= first; --t) {
        const float *out = out_.data() + (t - first) * P_lanes_, *dy = dy_(i_, t) + h_ * P_;
        const float along = dot(out, in_.x(i_, t) + h_ * P_, P_);
        ddecay = in_.opens(i_, t) ? 0.0 : ddecay + flow_[t] - step_[t] * along;
        da += ddecay * step_[t];
        to_.ddt[(i_ * L_ + t) * in_.heads + h_] = along + own_[t] * x_dy_[t] + static_cast<float>(ddecay * in_.a[h_]);
        float* dx = to_.dx + (i_ * L_ + t) * to_.x_token + h_ * P_;
        const float direct = step_[t] * own_[t] + in_.d[h_];
        for (int64_t p = 0; p < P_; ++p) dx[p] = step_[t] * out[p] + direct * dy[p];
      }
    }
    to_.da[i_ * in_.heads + h_] = static_cast<float>(da);
  }

  void put(float* to, const float* first, const float* second, float by_first, float by_second, int64_t n) const {
    if (add_)
      for (int64_t k = 0; k < n; ++k) to[k] += by_first * first[k] + by_second * second[k];
    else
      for (int64_t k = 0; k < n; ++k) to[k] = by_first * first[k] + by_second * second[k];
  }

  const ScanInputs& in_;
  const Source dy_;
  const float *start_, *dlast_;
  const ScanGradients& to_;
  const int64_t L_, P_, N_, P_rows_, N_rows_, P_lanes_, N_lanes_;
  std::vector<float> state_, v_, out_, decay_, step_, own_, x_dy_;
  std::vector<float> flow_, flow_after_, after_;
  std::vector<float> first_room_, second_room_;
  int64_t i_ = 0, h_ = 0, g_ = 0;
  float *db_ = nullptr, *dc_ = nullptr;
  bool add_ = false;
};

// Gradients of x, B and C side by side as the convolution left them, (B, L, H P + 2 G N); of dt (B, L, H); of a and d,
// for every row, (B, H); of the first state.
inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> scan_backward(
    const Tensor& dy_, const Tensor& dlast_, const Tensor& x_, const Tensor& dt_, const Tensor& a_, const Tensor& b_,
    const Tensor& c_, const Tensor& d_, const Tensor& state_, const std::optional<Tensor>& segments_) {
  const ScanInputs in(x_, dt_, a_, b_, c_, d_, segments_);
  const int64_t B = in.batch, H = in.heads, P = in.width, N = in.size, L = in.length, G = in.groups;
  check(dy_, {B, L, H, P}, "dy");
  check(dlast_, {B, H, P, N}, "dlast");
  check(state_, {B, H, P, N}, "state");
  const Tensor dy = packed(dy_, 2), dlast = dlast_.contiguous(), start = state_.contiguous();
  const int64_t channels = H * P + 2 * G * N;
  Tensor dxbc = at::empty({B, L, channels}, x_.options()), ddt = at::empty({B, L, H}, x_.options());
  Tensor da = at::empty({B, H}, x_.options()), dd = at::empty({B, H}, x_.options());
  Tensor dstate = at::empty(start.sizes(), x_.options());
  // Heads of a group take turns; where groups are too few for the threads they are parted, and the parts summed.
  const int64_t parts = B * G >= at::get_num_threads() ? 1 : std::min<int64_t>(in.per, at::get_num_threads());
  float* to = dxbc.mutable_data_ptr<float>();
  std::vector<float> parted(parts > 1 ? parts * B * L * 2 * G * N : 0);
  ScanGradients gradients{to, to + H * P, to + H * P + G * N, channels, channels, 0,
                          ddt.mutable_data_ptr<float>(), da.mutable_data_ptr<float>(), dd.mutable_data_ptr<float>(),
                          dstate.mutable_data_ptr<float>()};
  if (parts > 1) {
    gradients.db = parted.data(), gradients.dc = parted.data() + G * N;
    gradients.bc_token = 2 * G * N, gradients.bc_part = B * L * 2 * G * N;
  }
  at::parallel_for(0, B * G * parts, grain(L * P * N * in.per), [&](int64_t begin, int64_t end) {
    const FlushTiny flush;
    GroupBackward backward(in, source(dy), start.const_data_ptr<float>(), dlast.const_data_ptr<float>(), gradients);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t part = task % parts, g = task / parts % G, i = task / parts / G;
      const int64_t from = part * in.per / parts, until = (part + 1) * in.per / parts;
      for (int64_t k = from; k < until; ++k) backward.head(i, g * in.per + k, part, k == from);
    }
  });
  if (parts > 1)
    for (int64_t token = 0; token < B * L; ++token)
      for (int64_t k = 0; k < 2 * G * N; ++k) {
        float total = 0.f;
        for (int64_t part = 0; part < parts; ++part) total += parted[(part * B * L + token) * 2 * G * N + k];
        to[token * channels + H * P + k] = total;
      }
  return {dxbc, ddt, da, dd, dstate};
}

}  // namespace holotron
