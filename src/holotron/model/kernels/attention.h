// Causal attention of many tokens, block by block with a running maximum, and its gradient.
#pragma once

#include "vectors.h"

namespace holotron {

constexpr int64_t QUERIES = 64, KEYS = 64;  // of one block: its scores stay in the first-level cache

template <int V>
void product_tile(int64_t n, const float* a, int64_t a_row, int64_t a_k, const float* b, int64_t b_k, float* c,
                  int64_t c_row, bool add) {
  vec total[TILE_ROWS][V];
  for (int64_t r = 0; r < TILE_ROWS; ++r)
    for (int v = 0; v < V; ++v) total[r][v] = add ? load(c + r * c_row + v * LANES) : vec{};
  for (int64_t k = 0; k < n; ++k) {
    vec right[V];
    for (int v = 0; v < V; ++v) right[v] = load(b + k * b_k + v * LANES);
#pragma GCC unroll 8
    for (int64_t r = 0; r < TILE_ROWS; ++r)
      for (int v = 0; v < V; ++v) total[r][v] += right[v] * a[r * a_row + k * a_k];
  }
  for (int64_t r = 0; r < TILE_ROWS; ++r)
    for (int v = 0; v < V; ++v) store(c + r * c_row + v * LANES, total[r][v]);
}

// c (rows, columns) = or += a (rows, n) b (n, columns); TILE_ROWS divides rows, LANES columns; columns lie side by side.
inline void product(int64_t rows, int64_t columns, int64_t n, const float* a, int64_t a_row, int64_t a_k, const float* b,
                    int64_t b_k, float* c, int64_t c_row, bool add) {
  for (int64_t column = 0; column < columns;) {
    const bool two = column + 2 * LANES <= columns;
    for (int64_t row = 0; row < rows; row += TILE_ROWS)
      (two ? product_tile<2> : product_tile<1>)(n, a + row * a_row, a_row, a_k, b + column, b_k, c + row * c_row + column,
                                                c_row, add);
    column += two ? 2 * LANES : LANES;
  }
}

struct Heads {  // (B, heads, tokens, size) with any strides but the last
  Tensor tensor;
  const float* at;
  explicit Heads(const Tensor& t) : tensor(packed(t, 1)), at(tensor.const_data_ptr<float>()) {}
  int64_t token() const { return tensor.stride(2); }
  const float* operator()(int64_t i, int64_t h, int64_t t) const {
    return at + i * tensor.stride(0) + h * tensor.stride(1) + t * tensor.stride(2);
  }
};

struct AttentionInputs {
  Heads q, k, v;
  Tensor starts_;
  const int64_t* starts;
  int64_t batch, heads, kv_heads, per, queries, keys, size, before;
  float scale;

  // Query t stands at position `before + t`; it sees keys from starts[t], or 0, to its own position.
  AttentionInputs(const Tensor& q0, const Tensor& k0, const Tensor& v0, const std::optional<Tensor>& starts0)
      : q(q0), k(k0), v(v0), starts(nullptr) {
    TORCH_CHECK(q0.dim() == 4 && k0.dim() == 4, "q, k, v must be (B, heads, tokens, size)");
    batch = q0.size(0), heads = q0.size(1), queries = q0.size(2), size = q0.size(3);
    kv_heads = k0.size(1), keys = k0.size(2), before = keys - queries;
    TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, kv_heads, " kv heads do not divide ", heads, " heads");
    TORCH_CHECK(before >= 0, queries, " queries, ", keys, " keys: the queries are the last of the keys' tokens");
    TORCH_CHECK(size % LANES == 0, "head size ", size, " is not a multiple of ", LANES);
    check(q0, {batch, heads, queries, size}, "q");
    check(k0, {batch, kv_heads, keys, size}, "k");
    check(v0, {batch, kv_heads, keys, size}, "v");
    if (starts0) {
      TORCH_CHECK(starts0->scalar_type() == at::kLong && starts0->dim() == 2 && starts0->size(0) == batch &&
                      starts0->size(1) == queries,
                  "starts must be int64 (B, queries)");
      starts_ = starts0->contiguous(), starts = starts_.const_data_ptr<int64_t>();
    }
    per = heads / kv_heads, scale = 1.f / std::sqrt(static_cast<float>(size));
  }

  int64_t first_key(int64_t i, int64_t t) const { return starts ? starts[i * queries + t] : 0; }
  int64_t wide() const { return padded(keys, KEYS); }

  // Keys or values of one head, turned to (size, wide()) with zeros behind the last.
  void turn(const Heads& from, int64_t i, int64_t h, float* to) const {
    const int64_t columns = wide();
    for (int64_t first = 0; first < columns; first += KEYS)
      for (int64_t n = 0; n < size; ++n)
        for (int64_t t = first; t < first + KEYS; ++t) to[n * columns + t] = t < keys ? from(i, h, t)[n] : 0.f;
  }

  // scores (count, KEYS) of queries from `first`: what a query does not see becomes -inf.
  void mask(int64_t i, int64_t first, int64_t count, int64_t key, float* scores) const {
    for (int64_t r = 0; r < count; ++r) {
      const int64_t from = std::max<int64_t>(first_key(i, first + r) - key, 0), end = before + first + r + 1 - key;
      float* row = scores + r * KEYS;
      for (int64_t j = 0; j < std::min(from, KEYS); ++j) row[j] = -INFINITY;
      for (int64_t j = std::max<int64_t>(end, 0); j < KEYS; ++j) row[j] = -INFINITY;
    }
  }
};

// Rows of a block, scaled, with zeros behind the last.
inline void block_in(const Heads& from, int64_t i, int64_t h, int64_t first, int64_t count, int64_t size, float scale,
                     float* to) {
  for (int64_t r = 0; r < QUERIES; ++r) {
    const float* row = r < count ? from(i, h, first + r) : nullptr;
    for (int64_t n = 0; n < size; ++n) to[r * size + n] = row ? scale * row[n] : 0.f;
  }
}

inline float highest(const float* row) {
  float lanes[LANES];
  std::copy_n(row, LANES, lanes);
  for (int64_t j = LANES; j < KEYS; j += LANES)
    for (int64_t l = 0; l < LANES; ++l) lanes[l] = lanes[l] > row[j + l] ? lanes[l] : row[j + l];
  return *std::max_element(lanes, lanes + LANES);
}

inline float sum_of(const float* row) {
  vec total{};
  for (int64_t j = 0; j < KEYS; j += LANES) total += load(row + j);
  return sum(total);
}

inline void exp_row(float* __restrict row, float less) {
  for (int64_t j = 0; j < KEYS; ++j) {
    const float e = exp_of(row[j] - less);
    row[j] = row[j] == -INFINITY ? 0.f : e;
  }
}

// (B, heads, queries, size), laid out token by token, and log sum exp of the scores (B, heads, queries).
inline std::tuple<Tensor, Tensor> attention(const Tensor& q_, const Tensor& k_, const Tensor& v_,
                                            const std::optional<Tensor>& starts_) {
  const AttentionInputs in(q_, k_, v_, starts_);
  const int64_t d = in.size, T = in.queries, blocks = (T + QUERIES - 1) / QUERIES, wide = in.wide();
  Tensor out = at::empty({in.batch, T, in.heads, d}, q_.options());
  Tensor lse = at::empty({in.batch, in.heads, T}, q_.options());
  float *to = out.mutable_data_ptr<float>(), *lses = lse.mutable_data_ptr<float>();
  std::vector<float> turned(in.batch * in.kv_heads * d * wide);
  at::parallel_for(0, in.batch * in.kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task)
      in.turn(in.k, task / in.kv_heads, task % in.kv_heads, turned.data() + task * d * wide);
  });
  // Blocks alternate between threads' shares: later ones see more keys. Heads last, so that shares are alike.
  at::parallel_for(0, blocks * in.batch * in.heads, 1, [&](int64_t begin, int64_t end) {
    const FlushTiny flush;
    std::vector<float> q(QUERIES * d), scores(QUERIES * KEYS), mixed(QUERIES * d), top(QUERIES), total(QUERIES);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t h = task / blocks % in.heads, i = task / blocks / in.heads, first = task % blocks * QUERIES;
      const int64_t count = std::min(QUERIES, T - first), kv = h / in.per, last = in.before + first + count;
      const float* kt = turned.data() + (i * in.kv_heads + kv) * d * wide;
      block_in(in.q, i, h, first, count, d, in.scale, q.data());
      std::fill(mixed.begin(), mixed.end(), 0.f);
      std::fill(top.begin(), top.end(), -INFINITY);
      std::fill(total.begin(), total.end(), 0.f);
      const int64_t rows = padded(count, TILE_ROWS);
      for (int64_t key = in.first_key(i, first) / KEYS * KEYS; key < last; key += KEYS) {
        product(rows, KEYS, d, q.data(), d, 1, kt + key, wide, scores.data(), KEYS, false);
        if (in.starts || key + KEYS > in.before + first + 1) in.mask(i, first, count, key, scores.data());
        for (int64_t r = 0; r < count; ++r) {
          float *row = scores.data() + r * KEYS, *own = mixed.data() + r * d;
          const float most = std::max(top[r], highest(row));
          if (most == -INFINITY) {  // nothing seen yet, here neither
            std::fill_n(row, KEYS, 0.f);
            continue;
          }
          exp_row(row, most);
          const float kept = top[r] == -INFINITY ? 0.f : exp_of(top[r] - most);
          total[r] = total[r] * kept + sum_of(row);
          top[r] = most;
          if (kept != 1.f)
            for (int64_t n = 0; n < d; ++n) own[n] *= kept;
        }
        product(rows, d, std::min(KEYS, last - key), scores.data(), KEYS, 1, in.v(i, kv, key), in.v.token(), mixed.data(),
                d, true);
      }
      for (int64_t r = 0; r < count; ++r) {
        float* own = to + ((i * T + first + r) * in.heads + h) * d;
        for (int64_t n = 0; n < d; ++n) own[n] = mixed[r * d + n] / total[r];
        lses[(i * in.heads + h) * T + first + r] = top[r] + std::log(total[r]);
      }
    }
  });
  return {out.transpose(1, 2), lse};
}

// All query heads of one kv head in one row.
inline void attention_backward_head(const AttentionInputs& in, const Heads& dout, const Heads& out, const float* lses,
                                    int64_t i, int64_t kv, float* dq, float* dk_to, float* dv_to) {
  const int64_t d = in.size, T = in.queries, wide = in.wide();
  std::vector<float> kt(d * wide), vt(d * wide), dk(wide * d), dv(wide * d), q(QUERIES * d), dy(QUERIES * d);
  std::vector<float> dq_block(QUERIES * d), weights(QUERIES * KEYS), dweights(QUERIES * KEYS), along(QUERIES);
  in.turn(in.k, i, kv, kt.data());
  in.turn(in.v, i, kv, vt.data());
  for (int64_t h = kv * in.per; h < (kv + 1) * in.per; ++h)
    for (int64_t first = 0; first < T; first += QUERIES) {
      const int64_t count = std::min(QUERIES, T - first), last = in.before + first + count;
      const int64_t rows = padded(count, TILE_ROWS);
      const float* lse = lses + (i * in.heads + h) * T + first;
      block_in(in.q, i, h, first, count, d, in.scale, q.data());
      block_in(dout, i, h, first, count, d, 1.f, dy.data());
      for (int64_t r = 0; r < count; ++r) along[r] = dot(dout(i, h, first + r), out(i, h, first + r), d);
      std::fill(dq_block.begin(), dq_block.end(), 0.f);
      for (int64_t key = in.first_key(i, first) / KEYS * KEYS; key < last; key += KEYS) {
        product(rows, KEYS, d, q.data(), d, 1, kt.data() + key, wide, weights.data(), KEYS, false);
        product(rows, KEYS, d, dy.data(), d, 1, vt.data() + key, wide, dweights.data(), KEYS, false);
        if (in.starts || key + KEYS > in.before + first + 1) in.mask(i, first, count, key, weights.data());
        for (int64_t r = 0; r < count; ++r) {
          float *row = weights.data() + r * KEYS, *__restrict drow = dweights.data() + r * KEYS;
          exp_row(row, lse[r]);
          for (int64_t j = 0; j < KEYS; ++j) drow[j] = row[j] * (drow[j] - along[r]);
        }
        const int64_t seen = std::min(KEYS, in.keys - key);
        product(KEYS, d, count, weights.data(), 1, KEYS, dy.data(), d, dv.data() + key * d, d, true);
        product(KEYS, d, count, dweights.data(), 1, KEYS, q.data(), d, dk.data() + key * d, d, true);
        product(rows, d, seen, dweights.data(), KEYS, 1, in.k(i, kv, key), in.k.token(), dq_block.data(), d, true);
      }
      for (int64_t r = 0; r < count; ++r) {
        float* own = dq + ((i * T + first + r) * in.heads + h) * d;
        for (int64_t n = 0; n < d; ++n) own[n] = in.scale * dq_block[r * d + n];
      }
    }
  for (int64_t t = 0; t < in.keys; ++t) {
    std::copy_n(dk.data() + t * d, d, dk_to + ((i * in.keys + t) * in.kv_heads + kv) * d);
    std::copy_n(dv.data() + t * d, d, dv_to + ((i * in.keys + t) * in.kv_heads + kv) * d);
  }
}

// Gradients of q, k and v in their shapes, laid out token by token.
inline std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& dout_, const Tensor& out_, const Tensor& lse_,
                                                             const Tensor& q_, const Tensor& k_, const Tensor& v_,
                                                             const std::optional<Tensor>& starts_) {
  const AttentionInputs in(q_, k_, v_, starts_);
  check(dout_, q_.sizes(), "dout");
  check(out_, q_.sizes(), "out");
  check(lse_, {in.batch, in.heads, in.queries}, "lse");
  const Heads dout(dout_), out(out_);
  const Tensor lse = lse_.contiguous();
  Tensor dq = at::empty({in.batch, in.queries, in.heads, in.size}, q_.options());
  Tensor dk = at::empty({in.batch, in.keys, in.kv_heads, in.size}, q_.options()), dv = at::empty_like(dk);
  const float* lses = lse.const_data_ptr<float>();
  float *dqs = dq.mutable_data_ptr<float>(), *dks = dk.mutable_data_ptr<float>(), *dvs = dv.mutable_data_ptr<float>();
  at::parallel_for(0, in.batch * in.kv_heads, 1, [&](int64_t begin, int64_t end) {
    const FlushTiny flush;
    for (int64_t task = begin; task < end; ++task)
      attention_backward_head(in, dout, out, lses, task / in.kv_heads, task % in.kv_heads, dqs, dks, dvs);
  });
  return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)};
}

}  // namespace holotron
