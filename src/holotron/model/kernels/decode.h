// One token of many sequences, in place on pools (pooled.py).
#pragma once

#include "vectors.h"

namespace holotron {

template <int64_t K>
void shift_and_convolve(int64_t channels, int64_t taps, float* state, const float* x, const float* weight, float* out) {
  const int64_t k = K ? K : taps;
  for (int64_t c = 0; c < channels; ++c) {
    float* before = state + c * (k - 1);
    const float* w = weight + c * k;
    float total = w[k - 1] * x[c];
    for (int64_t j = 0; j < k - 1; ++j) total += w[j] * before[j];
    for (int64_t j = 0; j + 1 < k - 1; ++j) before[j] = before[j + 1];
    if (k > 1) before[k - 2] = x[c];
    out[c] += total;
  }
}

inline Tensor conv_step(const Tensor& pool, const Tensor& slots, const Tensor& input, const Tensor& weight,
                        const std::optional<Tensor>& bias) {
  check_pool(pool, "pool");
  const int64_t batch = slots.numel(), channels = weight.size(0), k = weight.size(1);
  TORCH_CHECK(pool.dim() == 3 && pool.size(1) == channels && pool.size(2) == k - 1, "pool has shape ", pool.sizes());
  check(input, {batch, channels}, "xbc");
  if (bias) check(*bias, {channels}, "bias");
  const Tensor rows = checked_slots(slots, pool.size(0)), x = packed(input, 1), w = weight.contiguous();
  const Tensor b = bias ? bias->contiguous() : Tensor();
  Tensor out = at::empty({batch, channels}, x.options());
  float* state = pool.mutable_data_ptr<float>();
  const int64_t* slot = rows.const_data_ptr<int64_t>();
  const float *from = x.const_data_ptr<float>(), *taps = w.const_data_ptr<float>();
  const float* offset = bias ? b.const_data_ptr<float>() : nullptr;
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, batch, grain(channels * 8), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float *y = to + i * channels, *own = state + slot[i] * channels * (k - 1);
      if (offset) std::memcpy(y, offset, channels * sizeof(float));
      else std::fill(y, y + channels, 0.f);
      (k == 4 ? shift_and_convolve<4> : shift_and_convolve<0>)(channels, k, own, from + i * x.stride(0), taps, y);
      for (int64_t c = 0; c < channels; ++c) y[c] *= sigmoid(y[c]);
    }
  });
  return out;
}

inline Tensor ssd_step(const Tensor& pool, const Tensor& slots, const Tensor& x_, const Tensor& dt_, const Tensor& a_,
                       const Tensor& b_, const Tensor& c_, const Tensor& d_) {
  check_pool(pool, "pool");
  TORCH_CHECK(pool.dim() == 4 && b_.dim() == 3, "pool must be (S, H, P, N), b and c (B, G, N)");
  const int64_t batch = slots.numel(), heads = pool.size(1), width = pool.size(2), size = pool.size(3);
  const int64_t groups = b_.size(1);
  TORCH_CHECK(groups > 0 && heads % groups == 0, groups, " groups do not divide ", heads, " heads");
  check(x_, {batch, heads, width}, "x");
  check(dt_, {batch, heads}, "dt");
  check(a_, {heads}, "a");
  check(d_, {heads}, "d");
  check(b_, {batch, groups, size}, "b");
  check(c_, {batch, groups, size}, "c");
  const Tensor rows = checked_slots(slots, pool.size(0));
  const Tensor x = packed(x_, 2), dt = packed(dt_, 1), b = packed(b_, 2), c = packed(c_, 2);
  const Tensor a = a_.contiguous(), d = d_.contiguous();
  Tensor out = at::empty({batch, heads, width}, x.options());
  float *states = pool.mutable_data_ptr<float>(), *ys = out.mutable_data_ptr<float>();
  const int64_t* slot = rows.const_data_ptr<int64_t>();
  const float *xs = x.const_data_ptr<float>(), *dts = dt.const_data_ptr<float>(), *as = a.const_data_ptr<float>();
  const float *bs = b.const_data_ptr<float>(), *cs = c.const_data_ptr<float>(), *ds = d.const_data_ptr<float>();
  at::parallel_for(0, batch * heads, grain(width * size * 2), [&](int64_t begin, int64_t end) {
    const FlushTiny flush;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t i = task / heads, h = task % heads, g = h / (heads / groups);
      float* state = states + (slot[i] * heads + h) * width * size;
      const float *xi = xs + i * x.stride(0) + h * width, *bi = bs + i * b.stride(0) + g * size;
      const float* ci = cs + i * c.stride(0) + g * size;
      const float step = dts[i * dt.stride(0) + h], decay = std::exp(step * as[h]);
      for (int64_t p = 0; p < width; ++p, state += size) {
        const float added = step * xi[p];
        vec total{};
        int64_t n = 0;
        for (; n + LANES <= size; n += LANES) {
          const vec s = load(state + n) * decay + load(bi + n) * added;
          store(state + n, s);
          total += s * load(ci + n);
        }
        float y = sum(total);
        for (; n < size; ++n) {
          state[n] = state[n] * decay + bi[n] * added;
          y += state[n] * ci[n];
        }
        ys[task * width + p] = y + ds[h] * xi[p];
      }
    }
  });
  return out;
}

// Query heads of one kv head over the tokens of one sequence, page by page, with a running maximum.
struct RunningAttention {
  int64_t heads, size, page_tokens;
  std::vector<float> out, scores, top, weight;

  RunningAttention(int64_t heads, int64_t size, int64_t page_tokens)
      : heads(heads), size(size), page_tokens(page_tokens), out(heads * size), scores(page_tokens), top(heads),
        weight(heads) {}

  void start() {
    std::fill(out.begin(), out.end(), 0.f);
    std::fill(top.begin(), top.end(), -INFINITY);
    std::fill(weight.begin(), weight.end(), 0.f);
  }

  void page(const float* q, const float* keys, const float* values, int64_t tokens) {
    const float scale = 1.f / std::sqrt(static_cast<float>(size));
    for (int64_t h = 0; h < heads; ++h) {
      float highest = top[h];
      for (int64_t t = 0; t < tokens; ++t) {
        scores[t] = scale * dot(q + h * size, keys + t * size, size);
        highest = scores[t] > highest ? scores[t] : highest;
      }
      const float kept = top[h] == -INFINITY ? 0.f : exp_of(top[h] - highest);
      float total = 0.f;
      for (int64_t t = 0; t < tokens; ++t) scores[t] = exp_of(scores[t] - highest);
      for (int64_t t = 0; t < tokens; ++t) total += scores[t];
      top[h] = highest;
      weight[h] = weight[h] * kept + total;
      mix(out.data() + h * size, kept, values, tokens);
    }
  }

 private:
  void mix(float* to, float kept, const float* values, int64_t tokens) const {
    int64_t i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES) {
      vec first = load(to + i) * kept, second = load(to + i + LANES) * kept;
      for (int64_t t = 0; t < tokens; ++t) {
        first += load(values + t * size + i) * scores[t];
        second += load(values + t * size + i + LANES) * scores[t];
      }
      store(to + i, first);
      store(to + i + LANES, second);
    }
    for (; i + LANES <= size; i += LANES) {
      vec first = load(to + i) * kept;
      for (int64_t t = 0; t < tokens; ++t) first += load(values + t * size + i) * scores[t];
      store(to + i, first);
    }
    for (; i < size; ++i) {
      float one = to[i] * kept;
      for (int64_t t = 0; t < tokens; ++t) one += values[t * size + i] * scores[t];
      to[i] = one;
    }
  }
};

inline Tensor paged_attention(const Tensor& q_, const Tensor& keys, const Tensor& values, const Tensor& table_,
                              const Tensor& lengths_) {
  check_pool(keys, "keys");
  check_pool(values, "values");
  TORCH_CHECK(keys.dim() == 4 && keys.sizes() == values.sizes(), "keys are ", keys.sizes(), ", values ", values.sizes());
  const int64_t pages = keys.size(0), kv_heads = keys.size(1), page_tokens = keys.size(2), size = keys.size(3);
  TORCH_CHECK(q_.dim() == 3 && kv_heads > 0 && q_.size(1) % kv_heads == 0, "q has shape ", q_.sizes());
  const int64_t batch = q_.size(0), heads = q_.size(1), per = heads / kv_heads, most = table_.size(1);
  check(q_, {batch, heads, size}, "q");
  TORCH_CHECK(table_.dim() == 2 && table_.size(0) == batch && lengths_.numel() == batch, "table is ", table_.sizes(),
              ", lengths ", lengths_.sizes(), ", for ", batch, " rows");
  const Tensor q = packed(q_, 2), table = table_.to(at::kLong).contiguous(), lengths = lengths_.to(at::kLong).contiguous();
  const int64_t *page = table.const_data_ptr<int64_t>(), *length = lengths.const_data_ptr<int64_t>();
  int64_t longest = 0;
  for (int64_t i = 0; i < batch; ++i) {
    longest = std::max(longest, length[i]);
    const int64_t used = (length[i] + page_tokens - 1) / page_tokens;
    TORCH_CHECK(length[i] >= 0 && used <= most, "row ", i, ": length ", length[i], " in a table of ", most, " pages");
    for (int64_t j = 0; j < used; ++j)
      TORCH_CHECK(page[i * most + j] >= 0 && page[i * most + j] < pages, "row ", i, ": no page ", page[i * most + j]);
  }
  Tensor out = at::empty({batch, heads, size}, q.options());
  const float *qs = q.const_data_ptr<float>(), *ks = keys.const_data_ptr<float>(), *vs = values.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, batch * kv_heads, grain(longest * size * per * 2), [&](int64_t begin, int64_t end) {
    RunningAttention running(per, size, page_tokens);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t i = task / kv_heads, kv = task % kv_heads;
      running.start();
      for (int64_t first = 0; first < length[i]; first += page_tokens) {
        const int64_t at = (page[i * most + first / page_tokens] * kv_heads + kv) * page_tokens * size;
        running.page(qs + i * q.stride(0) + kv * per * size, ks + at, vs + at, std::min(page_tokens, length[i] - first));
      }
      for (int64_t h = 0; h < per; ++h)
        for (int64_t n = 0; n < size; ++n)
          to[(task * per + h) * size + n] = length[i] ? running.out[h * size + n] / running.weight[h] : 0.f;
    }
  });
  return out;
}

}  // namespace holotron
