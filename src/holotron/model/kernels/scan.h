// The recurrence of ssd.py token by token, its state in registers, and its gradient.
//
// Forward and backward are one routine, `recur`, run with different roles. It carries a matrix S (rows x lanes):
//
//     S_t = decay_t S_{t-1} + u_t outer v_t          out_t = w_t (decay_t S_{t-1})
//
//   what                               order     rows   u    v       w    lanes
//   y   = C S                          forward   N      B    dt x    C    P
//   dC  = dy S                         forward   P      x    dt B    dy   N
//   dB  = x G, G the gradient of S     backward  P      dy   C       x    N
//   dx  = B G                          backward  N      C    dy      B    P
//
// A token's share in its own output is left out of `out` and added by the caller in closed form. So it is also absent
// from the gradient of the decay, where it would only be subtracted from itself:
//
//     d(dt_t A) = <G_t, decay_t S_{t-1}> = sum over s >= t of <dy_s, out_s of y> - <dt_s x_s, out_s of dx>
//
// The sum starts again at every border between documents (decay 0), where it is 0, and at the end of every span, where
// the left side is cheap enough to be computed as it stands: so rounding errors do not gather along a row.
#pragma once

#include "vectors.h"

namespace holotron {

constexpr int64_t SPAN = 32;  // tokens for which operands are laid out side by side, in the first-level cache

// One strip of V vectors of lanes, TILE_ROWS rows, all tokens of a span. `step` is -1 from the last token to the first.
template <int V>
void recur_tile(int64_t tokens, int64_t step, const float* u, int64_t u_stride, const float* w, int64_t w_stride,
                const float* v, const float* decay, float* state, float* out, int64_t lanes) {
  vec s[TILE_ROWS][V];
  for (int64_t r = 0; r < TILE_ROWS; ++r)
    for (int k = 0; k < V; ++k) s[r][k] = load(state + r * lanes + k * LANES);
  for (int64_t i = 0, t = step > 0 ? 0 : tokens - 1; i < tokens; ++i, t += step) {
    vec added[V], total[V];
    for (int k = 0; k < V; ++k) {
      added[k] = load(v + t * lanes + k * LANES);
      total[k] = load(out + t * lanes + k * LANES);
    }
    const float *ut = u + t * u_stride, *wt = w + t * w_stride, kept = decay[t];
#pragma GCC unroll 8
    for (int64_t r = 0; r < TILE_ROWS; ++r)
      for (int k = 0; k < V; ++k) {
        const vec before = s[r][k] * kept;
        total[k] += before * wt[r];
        s[r][k] = before + added[k] * ut[r];
      }
    for (int k = 0; k < V; ++k) store(out + t * lanes + k * LANES, total[k]);
  }
  for (int64_t r = 0; r < TILE_ROWS; ++r)
    for (int k = 0; k < V; ++k) store(state + r * lanes + k * LANES, s[r][k]);
}

struct Operand {  // of rows: token t's begin at `at + t * stride`, TILE_ROWS divides how many may be read
  const float* at;
  int64_t stride;
};

// rows and lanes are padded; v, out (tokens, lanes) and state (rows, lanes) without gaps; out is overwritten.
inline void recur(int64_t tokens, int64_t step, int64_t rows, int64_t lanes, Operand u, Operand w, const float* v,
                  const float* decay, float* state, float* out) {
  std::fill(out, out + tokens * lanes, 0.f);
  for (int64_t lane = 0; lane < lanes;) {
    const bool two = lane + 2 * LANES <= lanes;
    for (int64_t row = 0; row < rows; row += TILE_ROWS)
      (two ? recur_tile<2> : recur_tile<1>)(tokens, step, u.at + row, u.stride, w.at + row, w.stride, v + lane, decay,
                                            state + row * lanes + lane, out + lane, lanes);
    lane += two ? 2 * LANES : LANES;
  }
}

// Token-major data with a gap between tokens: token t of row i begins at `at + i * row + t * token`.
struct Source {
  const float* at;
  int64_t row, token;
  const float* operator()(int64_t i, int64_t t) const { return at + i * row + t * token; }
};

inline Source source(const Tensor& t) { return {t.const_data_ptr<float>(), t.stride(0), t.stride(1)}; }

struct ScanInputs {
  Tensor x_, dt_, a_, b_, c_, d_, segments_;
  int64_t batch, length, heads, width, groups, size, per;
  Source x, dt, b, c;
  const float *a, *d;
  const int64_t* segments;

  ScanInputs(const Tensor& x0, const Tensor& dt0, const Tensor& a0, const Tensor& b0, const Tensor& c0, const Tensor& d0,
             const std::optional<Tensor>& segments0)
      : x_(packed(x0, 2)), dt_(packed(dt0, 1)), a_(a0.contiguous()), b_(packed(b0, 2)), c_(packed(c0, 2)),
        d_(d0.contiguous()) {
    TORCH_CHECK(x0.dim() == 4 && b0.dim() == 4, "x must be (B, L, H, P), b and c (B, L, G, N)");
    batch = x_.size(0), length = x_.size(1), heads = x_.size(2), width = x_.size(3);
    groups = b_.size(2), size = b_.size(3);
    TORCH_CHECK(groups > 0 && heads % groups == 0, groups, " groups do not divide ", heads, " heads");
    per = heads / groups;
    check(x_, {batch, length, heads, width}, "x");
    check(dt_, {batch, length, heads}, "dt");
    check(a_, {heads}, "a");
    check(d_, {heads}, "d");
    check(b_, {batch, length, groups, size}, "b");
    check(c_, {batch, length, groups, size}, "c");
    segments = nullptr;
    if (segments0) {
      TORCH_CHECK(segments0->scalar_type() == at::kLong && segments0->dim() == 2 && segments0->size(0) == batch &&
                      segments0->size(1) == length,
                  "segments must be int64 (B, L)");
      segments_ = segments0->contiguous();
      segments = segments_.const_data_ptr<int64_t>();
    }
    x = source(x_), dt = source(dt_), b = source(b_), c = source(c_);
    a = a_.const_data_ptr<float>(), d = d_.const_data_ptr<float>();
  }

  bool opens(int64_t i, int64_t t) const {  // does token t begin a document, other than the first of its row?
    return segments && t && segments[i * length + t] != segments[i * length + t - 1];
  }

  // to (length): the decay on the way into every token.
  void decays(int64_t i, int64_t h, float* to) const {
    for (int64_t t = 0; t < length; ++t) to[t] = dt(i, t)[h] * a[h];
    for (int64_t t = 0; t < length; ++t) to[t] = exp_of(std::min(to[t], 0.f));
    if (segments)
      for (int64_t t = 1; t < length; ++t)
        if (opens(i, t)) to[t] = 0.f;
  }
};

// Rows of one operand, read where they lie if TILE_ROWS divides them, else copied to `room` and filled up with zeros.
inline Operand operand(const Source& from, int64_t i, int64_t first, int64_t tokens, int64_t offset, int64_t n,
                       std::vector<float>& room) {
  if (n % TILE_ROWS == 0) return {from(i, first) + offset, from.token};
  const int64_t wide = padded(n, TILE_ROWS);
  for (int64_t t = 0; t < tokens; ++t) {
    std::copy_n(from(i, first + t) + offset, n, room.data() + t * wide);
    std::fill_n(room.data() + t * wide + n, wide - n, 0.f);
  }
  return {room.data(), wide};
}

inline std::vector<float> operand_room(int64_t n) { return std::vector<float>(SPAN * padded(n, TILE_ROWS)); }

// to (tokens, lanes) = factor[t] * from, zeros behind the n numbers that there are.
inline void lay_out(const Source& from, int64_t i, int64_t first, int64_t tokens, int64_t offset, int64_t n,
                    int64_t lanes, const float* factor, float* to) {
  for (int64_t t = 0; t < tokens; ++t) {
    const float *one = from(i, first + t) + offset, times = factor ? factor[t] : 1.f;
    float* row = to + t * lanes;
    for (int64_t k = 0; k < n; ++k) row[k] = times * one[k];
    for (int64_t k = n; k < lanes; ++k) row[k] = 0.f;
  }
}

// A state (P, N) as (rows, lanes), padded, and back; `turned`: rows are N.
inline void state_in(const float* from, int64_t width, int64_t size, bool turned, int64_t lanes, std::vector<float>& to) {
  std::fill(to.begin(), to.end(), 0.f);
  for (int64_t p = 0; p < width; ++p)
    for (int64_t n = 0; n < size; ++n) to[turned ? n * lanes + p : p * lanes + n] = from[p * size + n];
}

inline void state_out(const std::vector<float>& from, int64_t width, int64_t size, bool turned, int64_t lanes,
                      float factor, float* to) {
  for (int64_t p = 0; p < width; ++p)
    for (int64_t n = 0; n < size; ++n) to[p * size + n] = factor * from[turned ? n * lanes + p : p * lanes + n];
}

// y (B, L, H, P) and the state after the last token (B, H, P, N).
inline std::tuple<Tensor, Tensor> scan(const Tensor& x_, const Tensor& dt_, const Tensor& a_, const Tensor& b_,
                                       const Tensor& c_, const Tensor& d_, const Tensor& state_,
                                       const std::optional<Tensor>& segments_) {
  const ScanInputs in(x_, dt_, a_, b_, c_, d_, segments_);
  const int64_t P = in.width, N = in.size, H = in.heads, L = in.length;
  check(state_, {in.batch, H, P, N}, "state");
  const Tensor start = state_.contiguous();
  Tensor y = at::empty({in.batch, L, H, P}, x_.options()), last = at::empty(start.sizes(), start.options());
  const float* starts = start.const_data_ptr<float>();
  float *ys = y.mutable_data_ptr<float>(), *lasts = last.mutable_data_ptr<float>();
  const int64_t rows = padded(N, TILE_ROWS), lanes = padded(P, LANES);
  at::parallel_for(0, in.batch * H, grain(L * P * N), [&](int64_t begin, int64_t end) {
    const FlushTiny flush;
    std::vector<float> state(rows * lanes), out(SPAN * lanes), v(SPAN * lanes), decay(L), step(SPAN);
    std::vector<float> room_b = operand_room(N), room_c = operand_room(N);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t i = task / H, h = task % H, g = h / in.per;
      state_in(starts + task * P * N, P, N, true, lanes, state);
      in.decays(i, h, decay.data());
      for (int64_t first = 0; first < L; first += SPAN) {
        const int64_t tokens = std::min(SPAN, L - first);
        for (int64_t t = 0; t < tokens; ++t) step[t] = in.dt(i, first + t)[h];
        lay_out(in.x, i, first, tokens, h * P, P, lanes, step.data(), v.data());
        recur(tokens, 1, rows, lanes, operand(in.b, i, first, tokens, g * N, N, room_b),
              operand(in.c, i, first, tokens, g * N, N, room_c), v.data(), decay.data() + first, state.data(), out.data());
        for (int64_t t = 0; t < tokens; ++t) {
          const float own = step[t] * dot(in.b(i, first + t) + g * N, in.c(i, first + t) + g * N, N) + in.d[h];
          const float *xt = in.x(i, first + t) + h * P, *ot = out.data() + t * lanes;
          float* to = ys + ((i * L + first + t) * H + h) * P;
          for (int64_t p = 0; p < P; ++p) to[p] = ot[p] + own * xt[p];
        }
      }
      state_out(state, P, N, true, lanes, 1.f, lasts + task * P * N);
    }
  });
  return {y, last};
}

}  // namespace holotron
