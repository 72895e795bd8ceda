// The update of optim/updates.py, and the look for numbers that are not finite, each in one sweep over all parameters.
// native.py compiles this file, and makes the rows.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <limits>
#include <mutex>
#include <vector>

namespace {

constexpr int64_t BLOCK = 4096;  // entries: what a thread takes at a time, so that small and large share fairly
constexpr int64_t GRAIN = int64_t{1} << 15;  // entries: a thread with fewer is not worth its start; torch has the same

enum Scale { RMS, RMS_EPS_INSIDE, MEAN_ABS, MEAN };

// One parameter, in the order of native.Row. h is null where V is not refreshed, u where p itself moves.
struct Row {
  int64_t size, is_double, scale;
  void *p, *g, *h, *m, *v, *u;
  double decay, sign, weight1, beta2, weight2, step_size, eps, limit;
  double top_g, top_h;  // found by hesscale_look: the largest magnitudes, nan and inf among them
};

// Of numbers whose squares T has no room for. In double precision: faster than std::hypot.
template <typename T>
inline T root_of_squares(T a, double weight_a, T b, double weight_b) {
  const double x = a, y = b;
  return static_cast<T>(std::sqrt(weight_a * x * x + weight_b * y * y));
}

// As torch's lerp: near either end it does not cancel.
template <typename T>
inline T between(T from, T to, T weight) {
  return weight < T(0.5) ? from + (to - from) * weight : to - (to - from) * (1 - weight);
}

template <typename T, int SCALE, bool REFRESH, bool MOVING>
void update(const Row& row, int64_t begin, int64_t end) {
  const T decay = row.decay, sign = row.sign, weight1 = row.weight1, weight2 = row.weight2,
          step_size = row.step_size, eps = row.eps, limit = row.limit;
  const double of_old = row.beta2, of_new = row.weight2, eps_inside = row.eps;
  T* __restrict p = static_cast<T*>(MOVING ? row.p : row.u);
  const T* __restrict g = static_cast<const T*>(row.g);
  const T* __restrict h = static_cast<const T*>(row.h);
  T* __restrict m = static_cast<T*>(row.m);
  T* __restrict v = static_cast<T*>(row.v);
#pragma omp simd
  for (int64_t j = begin; j < end; j++) {
    const T mean = between(m[j], sign * g[j], weight1);
    m[j] = mean;
    T average = v[j];
    if constexpr (REFRESH) {
      if constexpr (SCALE == RMS || SCALE == RMS_EPS_INSIDE) {
        average = root_of_squares(average, of_old, h[j], of_new);
      } else {
        average = between(average, SCALE == MEAN_ABS ? std::abs(h[j]) : h[j], weight2);
      }
      v[j] = average;
    }
    const T c = std::abs(average);
    const T denominator = SCALE == RMS_EPS_INSIDE ? root_of_squares(c, 1.0, T(1), eps_inside) : c + eps;
    const T divisor = c > 0 ? denominator : std::numeric_limits<T>::infinity();
    const T u = std::min(std::max(step_size * mean / divisor, -limit), limit);
    p[j] = MOVING ? p[j] * decay - u : u;
  }
}

template <typename T, int SCALE>
void update(const Row& row, int64_t begin, int64_t end) {
  if (row.h && !row.u) return update<T, SCALE, true, true>(row, begin, end);
  if (row.h) return update<T, SCALE, true, false>(row, begin, end);
  if (!row.u) return update<T, SCALE, false, true>(row, begin, end);
  return update<T, SCALE, false, false>(row, begin, end);
}

template <typename T>
void update(const Row& row, int64_t begin, int64_t end) {
  switch (row.scale) {
    case RMS: return update<T, RMS>(row, begin, end);
    case RMS_EPS_INSIDE: return update<T, RMS_EPS_INSIDE>(row, begin, end);
    case MEAN_ABS: return update<T, MEAN_ABS>(row, begin, end);
    default: return update<T, MEAN>(row, begin, end);
  }
}

// The largest magnitude. Bits without their sign are ordered as numbers are, with inf and then nan at the top.
template <typename T, typename Bits>
double largest(const void* memory, int64_t begin, int64_t end) {
  constexpr Bits WITHOUT_SIGN = std::numeric_limits<Bits>::max();
  const Bits* __restrict x = static_cast<const Bits*>(memory);
  Bits found = 0;
#pragma omp simd reduction(max : found)
  for (int64_t j = begin; j < end; j++) {
    const Bits magnitude = x[j] & WITHOUT_SIGN;
    found = magnitude > found ? magnitude : found;
  }
  T number;
  std::memcpy(&number, &found, sizeof number);
  return number;
}

double largest(const Row& row, const void* x, int64_t begin, int64_t end) {
  return row.is_double ? largest<double, int64_t>(x, begin, end) : largest<float, int32_t>(x, begin, end);
}

double larger(double a, double b) { return std::isnan(a) || a > b ? a : b; }  // nan is larger than all

int64_t blocks_of(const Row& row) { return (row.size + BLOCK - 1) / BLOCK; }

template <typename Work>
struct Job {
  Row* rows;
  int64_t count, blocks;
  Work work;
  std::atomic<int64_t> next{0};

  // Takes block after block until there is none left. Which thread takes which makes no difference.
  void run() {
    int64_t i = 0, first = 0;  // a row, and its first block
    for (int64_t block = next++; block < blocks; block = next++) {
      while (block >= first + blocks_of(rows[i])) first += blocks_of(rows[i++]);
      const int64_t begin = (block - first) * BLOCK;
      work(rows[i], begin, std::min(begin + BLOCK, rows[i].size));
    }
  }
};

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

template <typename Work>
void for_each_block(Row* rows, int64_t count, int64_t threads, Work work) {
  // the threads that torch itself uses: a second OpenMP beside its own would compete for the same cores
  static const Parallel parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  int64_t blocks = 0, entries = 0;
  for (int64_t i = 0; i < count; i++) {
    blocks += blocks_of(rows[i]);
    entries += rows[i].size;
  }
  Job<Work> job{rows, count, blocks, work};
  const int64_t team = std::min(entries / GRAIN, threads);
  if (team < 2 || !parallel) return job.run();
  parallel([](void* it) { static_cast<Job<Work>*>(it)->run(); }, &job, static_cast<unsigned>(team), 0);
}

struct Span {
  const char *begin, *end;
  bool is_written;
};

}  // namespace

// 1 if memory that is written overlaps with other memory of these rows: then the order of steps would matter.
extern "C" int64_t hesscale_overlap(const Row* rows, int64_t count) {
  std::vector<Span> spans;
  for (int64_t i = 0; i < count; i++) {
    const Row& row = rows[i];
    const int64_t bytes = row.size * (row.is_double ? 8 : 4);
    for (void* x : {row.p, row.m, row.v, row.g, row.h}) {
      const char* begin = static_cast<const char*>(x);
      if (x) spans.push_back({begin, begin + bytes, x == row.p || x == row.m || x == row.v});
    }
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  const char *end = nullptr, *written = nullptr;  // of all spans so far, and of those that are written
  for (const Span& span : spans) {
    if (span.begin < written || (span.is_written && span.begin < end)) return 1;
    end = std::max(end, span.end);
    if (span.is_written) written = std::max(written, span.end);
  }
  return 0;
}

// Writes top_g and top_h.
extern "C" void hesscale_look(Row* rows, int64_t count, int64_t threads) {
  static std::mutex mutex;
  for (int64_t i = 0; i < count; i++) rows[i].top_g = rows[i].top_h = 0;
  for_each_block(rows, count, threads, [](Row& row, int64_t begin, int64_t end) {
    const double g = largest(row, row.g, begin, end), h = row.h ? largest(row, row.h, begin, end) : 0;
    const std::lock_guard<std::mutex> lock(mutex);
    row.top_g = larger(row.top_g, g);
    row.top_h = larger(row.top_h, h);
  });
}

extern "C" void hesscale_update(Row* rows, int64_t count, int64_t threads) {
  for_each_block(rows, count, threads, [](Row& row, int64_t begin, int64_t end) {
    row.is_double ? update<double>(row, begin, end) : update<float>(row, begin, end);
  });
}
