// The formula of updates.py, and the look for numbers that are not finite, each in one pass over all parameters.
// native.py compiles this file and writes the tables.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <omp.h>

namespace {

constexpr int64_t BLOCK = 4096;         // entries: what a thread takes at a time, so that small and large share fairly
constexpr int64_t GRAIN = int64_t{1} << 15;  // entries: a thread with fewer is not worth its start; torch has the same

// H is null where V is not refreshed, U where p itself moves. ROW is null where h is written out; elsewhere h is the outer
// product of the column at H and of the row, which has WIDTH entries.
enum Column { SIZE, P, G, H, M, V, U, STEP, ROW, WIDTH };

// Parameters by columns: count sizes, count addresses of p, and so on.
struct Table {
  int64_t count;
  const int64_t* columns;

  template <typename T>
  T* at(int64_t column, int64_t i) const {
    return reinterpret_cast<T*>(columns[column * count + i]);
  }
  int64_t size(int64_t i) const { return columns[i]; }
  int64_t width(int64_t i) const { return columns[WIDTH * count + i]; }
  int64_t blocks(int64_t i) const { return (size(i) + BLOCK - 1) / BLOCK; }
};

struct Numbers {
  double decay, sign, weight1, beta2, weight2, step_size, eps;
};

// What is seen in a parameter: an inf or nan in g or h; an h that is not zero (or a g, where there is no h).
constexpr int32_t NOT_FINITE = 1, NOT_ZERO = 2;

enum Scale { RMS, RMS_EPS_INSIDE, MEAN_ABS, MEAN };

// Calls work(i, begin, end) for all blocks of all parameters i. Where blocks begin does not depend on threads.
template <typename Work>
void for_each_block(const Table& table, int64_t threads, Work work) {
  int64_t blocks = 0, entries = 0;
  for (int64_t i = 0; i < table.count; i++) {
    blocks += table.blocks(i);
    entries += table.size(i);
  }
  const int64_t useful = entries / GRAIN < threads ? entries / GRAIN : threads;
  const int team = useful < 1 ? 1 : static_cast<int>(useful);
#pragma omp parallel num_threads(team) if (team > 1)
  {
    const int64_t thread = omp_get_thread_num(), there = omp_get_num_threads();
    int64_t skip = blocks * thread / there;
    int64_t left = blocks * (thread + 1) / there - skip;
    for (int64_t i = 0; i < table.count && left > 0; i++) {
      const int64_t own = table.blocks(i);
      int64_t block = skip < own ? skip : own;
      skip -= block;
      for (; block < own && left > 0; block++, left--) {
        const int64_t begin = block * BLOCK, rest = table.size(i) - begin;
        work(i, begin, begin + (rest < BLOCK ? rest : BLOCK));
      }
    }
  }
}

// Entries begin to end of h, which are written to room if they are not there yet.
template <typename T>
const T* curvature(const Table& table, int64_t i, int64_t begin, int64_t end, T* __restrict room) {
  const T* __restrict row = table.at<T>(ROW, i);
  if (!row) return table.at<T>(H, i) + begin;
  const T* __restrict column = table.at<T>(H, i);
  const int64_t width = table.width(i);
  for (int64_t j = begin; j < end;) {
    const int64_t first = j % width, rest = width - first, count = rest < end - j ? rest : end - j;
    const T entry = column[j / width];
    T* __restrict to = room + (j - begin);
#pragma omp simd
    for (int64_t k = 0; k < count; k++) to[k] = entry * row[first + k];
    j += count;
  }
  return room;
}

template <typename T, int SCALE, bool REFRESH, bool MOVING>
void update_block(const Table& table, int64_t i, const Numbers& numbers, int64_t begin, int64_t end) {
  const T decay = numbers.decay, sign = numbers.sign, weight1 = numbers.weight1, beta2 = numbers.beta2,
          weight2 = numbers.weight2, step_size = numbers.step_size, eps = numbers.eps;
  T room[BLOCK];
  T* __restrict p = table.at<T>(MOVING ? P : U, i) + begin;
  const T* __restrict g = table.at<T>(G, i) + begin;
  const T* __restrict h = REFRESH ? curvature(table, i, begin, end, room) : nullptr;
  T* __restrict m = table.at<T>(M, i) + begin;
  T* __restrict v = table.at<T>(V, i) + begin;
#pragma omp simd
  for (int64_t j = 0; j < end - begin; j++) {
    const T mean = m[j] + (sign * g[j] - m[j]) * weight1;
    m[j] = mean;
    T average = v[j];
    if constexpr (REFRESH) {
      if constexpr (SCALE == RMS || SCALE == RMS_EPS_INSIDE) {
        average = average * beta2 + h[j] * h[j] * weight2;
      } else {
        average += ((SCALE == MEAN_ABS ? std::abs(h[j]) : h[j]) - average) * weight2;
      }
      v[j] = average;
    }
    T c = std::abs(average);
    if constexpr (SCALE == RMS) c = std::sqrt(c);
    T denominator = c + eps;
    if constexpr (SCALE == RMS_EPS_INSIDE) denominator = std::sqrt(denominator);
    denominator = c > 0 ? denominator : std::numeric_limits<T>::infinity();
    const T u = step_size * mean / denominator;
    p[j] = MOVING ? p[j] * decay - u : u;
  }
}

template <typename T, int SCALE, bool REFRESH, bool MOVING>
void update(const Table& table, const Numbers* numbers, int64_t threads) {
  for_each_block(table, threads, [=](int64_t i, int64_t begin, int64_t end) {
    update_block<T, SCALE, REFRESH, MOVING>(table, i, numbers[i], begin, end);
  });
}

template <typename T, int SCALE>
void update(bool refresh, bool moving, const Table& table, const Numbers* numbers, int64_t threads) {
  if (refresh && moving) return update<T, SCALE, true, true>(table, numbers, threads);
  if (refresh) return update<T, SCALE, true, false>(table, numbers, threads);
  if (moving) return update<T, SCALE, false, true>(table, numbers, threads);
  return update<T, SCALE, false, false>(table, numbers, threads);
}

template <typename T>
void update(int64_t scale, bool refresh, bool moving, const Table& table, const Numbers* numbers, int64_t threads) {
  switch (scale) {
    case RMS: return update<T, RMS>(refresh, moving, table, numbers, threads);
    case RMS_EPS_INSIDE: return update<T, RMS_EPS_INSIDE>(refresh, moving, table, numbers, threads);
    case MEAN_ABS: return update<T, MEAN_ABS>(refresh, moving, table, numbers, threads);
    default: return update<T, MEAN>(refresh, moving, table, numbers, threads);
  }
}

template <typename Bits>
struct Tops {
  Bits g, h;
};

template <typename Bits>
Bits larger(Bits a, Bits b) {
  return a > b ? a : b;
}

// The size of x[j], x[j + part], ...: the largest of them without its sign, as bits, which are ordered as numbers are.
template <typename Bits>
Bits magnitude(const Bits* x, int64_t j, int64_t part) {
  constexpr Bits WITHOUT_SIGN = std::numeric_limits<Bits>::max();
  return larger(larger<Bits>(x[j] & WITHOUT_SIGN, x[j + part] & WITHOUT_SIGN),
                larger<Bits>(x[j + 2 * part] & WITHOUT_SIGN, x[j + 3 * part] & WITHOUT_SIGN));
}

// The largest entries of g and h: eight streams, which are read faster than two. Whole numbers throughout, since
// compilers that are told to be fast may take it that a floating-point number is finite.
template <typename Bits>
Tops<Bits> largest(const Table& table, int64_t i, int64_t begin, int64_t end) {
  const Bits* __restrict g = table.at<Bits>(G, i) + begin;
  const bool is_there = table.at<Bits>(H, i) && !table.at<Bits>(ROW, i);
  const Bits* __restrict h = table.at<Bits>(is_there ? H : G, i) + begin;
  const int64_t size = end - begin, part = size / 4;
  Bits top_g = 0, top_h = 0;
#pragma omp simd reduction(max : top_g, top_h)
  for (int64_t j = 0; j < part; j++) {
    top_g = larger(top_g, magnitude(g, j, part));
    top_h = larger(top_h, magnitude(h, j, part));
  }
  for (int64_t j = 4 * part; j < size; j++) {
    top_g = larger(top_g, magnitude(g, j, 0));
    top_h = larger(top_h, magnitude(h, j, 0));
  }
  return {top_g, top_h};
}

// The size of a vector, as above.
template <typename Bits>
Bits top(const Bits* __restrict x, int64_t size) {
  Bits found = 0;
#pragma omp simd reduction(max : found)
  for (int64_t j = 0; j < size; j++) found = larger(found, magnitude(x, j, 0));
  return found;
}

// A bound on the entries of an outer product, as above: the size of the column times that of the row.
template <typename T, typename Bits>
Bits top_of_outer(const Table& table, int64_t i) {
  const Bits factors[] = {top(table.at<Bits>(H, i), table.size(i) / table.width(i)),
                          top(table.at<Bits>(ROW, i), table.width(i))};
  T numbers[2];
  std::memcpy(numbers, factors, sizeof numbers);
  const T product = numbers[0] * numbers[1];
  Bits found;
  std::memcpy(&found, &product, sizeof found);
  return magnitude(&found, 0, 0);
}

template <typename T, typename Bits>
void look(Bits infinity, const Table& table, int32_t* seen, int64_t threads) {
  for_each_block(table, threads, [=](int64_t i, int64_t begin, int64_t end) {
    Tops<Bits> tops = largest<Bits>(table, i, begin, end);
    if (table.at<Bits>(ROW, i)) tops.h = begin == 0 ? top_of_outer<T, Bits>(table, i) : 0;
    const bool finite = tops.g < infinity && tops.h < infinity;
    const int32_t found = (finite ? 0 : NOT_FINITE) | (tops.h > 0 ? NOT_ZERO : 0);
#pragma omp atomic
    seen[i] |= found;
  });
}

}  // namespace

extern "C" void hesscale_look(int64_t is_double, int64_t count, const int64_t* columns, int32_t* seen,
                              int64_t threads) {
  const Table table{count, columns};
  if (is_double) {
    look<double, int64_t>(int64_t{0x7ff} << 52, table, seen, threads);
  } else {
    look<float, int32_t>(int32_t{0xff} << 23, table, seen, threads);
  }
}

extern "C" void hesscale_update(int64_t is_double, int64_t scale, int64_t refresh, int64_t moving, int64_t count,
                                const int64_t* columns, const Numbers* numbers, int64_t threads) {
  const Table table{count, columns};
  if (is_double) {
    update<double>(scale, refresh, moving, table, numbers, threads);
  } else {
    update<float>(scale, refresh, moving, table, numbers, threads);
  }
  for (int64_t i = 0; i < count; i++) *table.at<float>(STEP, i) += 1;
}
