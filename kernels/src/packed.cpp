// Packed weights: checks, and the split over threads.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "pool.h"
#include "status.h"
#include "stronghold.h"
#include "targets.h"

namespace sh {
namespace {

// Elements that a thread claims at a time, over all weights laid end to end: 80 kB and more of
// traffic, some 5 us.
constexpr int64_t kChunk = 32768;
// Elements that are decoded at once to be compared: they stay in the first cache.
constexpr int64_t kCompared = 4096;
static_assert(kChunk % kCodeGroup == 0 && kCompared % kCodeGroup == 0);

constexpr int64_t kBytes[kNumDtypes] = {4, 2, 2};

const Format& FormatNamed(const Kernels& kernels, const char* name) {
  Require(name != nullptr, "format is NULL");
  for (int i = 0; i < kernels.num_formats; ++i) {
    if (std::strcmp(kernels.formats[i].name, name) == 0) return kernels.formats[i];
  }
  std::string message = std::string("format is \"") + name + "\"; the kernels have";
  for (int i = 0; i < kernels.num_formats; ++i) {
    message += std::string(i == 0 ? " " : ", ") + kernels.formats[i].name;
  }
  throw Invalid(message);
}

// The arguments of one call, for its items.
struct Job {
  const Kernels* kernels;
  const Format* format;
  int dtype;
  const sh_packed* weights;
  int64_t num_weights;
  const int64_t* ends;  // [num_weights], the number of items up to and with this weight
  double* square_sums;  // [items]
  double* largest;      // [items]
};

int64_t Numel(const sh_packed& packed) { return packed.rows * packed.columns; }

// Calls item(weight, item within the weight) for an item of a job.
template <class Body>
void AtItem(const Job& job, int64_t index, const Body& body) {
  const int64_t i = std::upper_bound(job.ends, job.ends + job.num_weights, index) - job.ends;
  body(job.weights[i], index - (i == 0 ? 0 : job.ends[i - 1]));
}

char* WeightAt(const sh_packed& packed, int dtype, int64_t element) {
  return static_cast<char*>(packed.weight) + element * kBytes[dtype];
}

void DecodeItem(void* context, int64_t index) {
  const Job& job = *static_cast<const Job*>(context);
  AtItem(job, index, [&job](const sh_packed& packed, int64_t chunk) {
    const int64_t from = chunk * kChunk;
    job.format->decode[job.dtype](packed, from, std::min(from + kChunk, Numel(packed)),
                                  WeightAt(packed, job.dtype, from));
  });
}

void EncodeItem(void* context, int64_t index) {
  const Job& job = *static_cast<const Job*>(context);
  AtItem(job, index, [&job](const sh_packed& packed, int64_t unit) {
    job.format->encode[job.dtype](packed, unit);
  });
}

void CompareItem(void* context, int64_t index) {
  const Job& job = *static_cast<const Job*>(context);
  AtItem(job, index, [&job, index](const sh_packed& packed, int64_t chunk) {
    alignas(64) char decoded[kCompared * 4];
    double square_sum = 0.0, largest = 0.0;
    const int64_t end = std::min((chunk + 1) * kChunk, Numel(packed));
    for (int64_t from = chunk * kChunk; from < end; from += kCompared) {
      const int64_t upto = std::min(from + kCompared, end);
      job.format->decode[job.dtype](packed, from, upto, decoded);
      job.kernels->compare[job.dtype](decoded, WeightAt(packed, job.dtype, from), upto - from,
                                      &square_sum, &largest);
    }
    job.square_sums[index] = square_sum;
    job.largest[index] = largest;
  });
}

// Refuses arguments that break their contract. Returns the format.
template <class NeedsInner>
const Format& Check(const sh_pool* pool, const char* name, sh_dtype dtype, const sh_packed* weights,
                    int64_t num_weights, const NeedsInner& needs_inner) {
  Require(pool != nullptr, "pool is NULL");
  Require(!pool->forked(), "the pool was made before fork(); make one in this process");
  Require(dtype >= SH_F32 && dtype <= SH_F16, "unknown dtype");
  Require(num_weights >= 0, "num_weights is negative");
  Require(num_weights == 0 || weights != nullptr, "weights is NULL");
  const Format& format = FormatNamed(pool->kernels(), name);
  for (int64_t i = 0; i < num_weights; ++i) {
    const sh_packed& packed = weights[i];
    RequireAt(packed.rows >= 0 && packed.columns >= 0, i, "rows or columns is negative");
    if (Numel(packed) == 0) continue;
    RequireAt(packed.weight != nullptr, i, "weight is NULL");
    for (int k = 0; k < SH_MAX_INNER; ++k) {
      RequireAt(packed.inner[k] != nullptr || !needs_inner(format, k), i, "an inner tensor is NULL");
    }
  }
  return format;
}

bool IsRead(const Format& format, int k) { return k < format.num_inner; }
bool IsEncoded(const Format& format, int k) { return format.encoded[k]; }

int64_t NumChunks(const sh_packed& packed) { return (Numel(packed) + kChunk - 1) / kChunk; }

// Writes job.ends from the number of items of each weight. Returns the number of all.
template <class NumItems>
int64_t SplitIntoItems(std::vector<int64_t>& ends, Job& job, const NumItems& num_items) {
  ends.resize(job.num_weights);
  int64_t total = 0;
  for (int64_t i = 0; i < job.num_weights; ++i) {
    total += Numel(job.weights[i]) == 0 ? 0 : num_items(job.weights[i]);
    ends[i] = total;
  }
  job.ends = ends.data();
  return total;
}

template <class NumItems>
void RunJob(sh_pool* pool, Job job, const NumItems& num_items, sh_pool::Item item) {
  sh_pool::Call call(pool);
  call.Run(SplitIntoItems(call.offsets(), job, num_items), item, &job);
}

Job JobOf(const sh_pool* pool, const Format& format, sh_dtype dtype, const sh_packed* weights,
          int64_t num_weights) {
  return {&pool->kernels(), &format, dtype, weights, num_weights, nullptr, nullptr, nullptr};
}

}  // namespace
}  // namespace sh

extern "C" {

const char* sh_format_at(int32_t index) {
  const sh::Kernels& kernels = *sh::KernelsAt(0);
  const bool known = index >= 0 && index < kernels.num_formats;
  return known ? kernels.formats[index].name : nullptr;
}

int32_t sh_decode(sh_pool* pool, const char* format, sh_dtype dtype, const sh_packed* weights,
                  int64_t num_weights) {
  return sh::Guarded([&] {
    const sh::Format& row = sh::Check(pool, format, dtype, weights, num_weights, sh::IsRead);
    sh::RunJob(pool, sh::JobOf(pool, row, dtype, weights, num_weights), sh::NumChunks,
               sh::DecodeItem);
  });
}

int32_t sh_encode(sh_pool* pool, const char* format, sh_dtype dtype, const sh_packed* weights,
                  int64_t num_weights) {
  return sh::Guarded([&] {
    const sh::Format& row = sh::Check(pool, format, dtype, weights, num_weights, sh::IsEncoded);
    sh::RunJob(pool, sh::JobOf(pool, row, dtype, weights, num_weights), row.num_units,
               sh::EncodeItem);
  });
}

int32_t sh_packing_error(sh_pool* pool, const char* format, sh_dtype dtype,
                         const sh_packed* weights, int64_t num_weights, double* square_sum,
                         double* largest) {
  return sh::Guarded([&] {
    const sh::Format& row = sh::Check(pool, format, dtype, weights, num_weights, sh::IsRead);
    sh::Require(num_weights == 0 || (square_sum != nullptr && largest != nullptr),
                "square_sum or largest is NULL");
    sh::Job job = sh::JobOf(pool, row, dtype, weights, num_weights);
    sh_pool::Call call(pool);
    const int64_t num_items = sh::SplitIntoItems(call.offsets(), job, sh::NumChunks);
    call.partials().assign(2 * num_items, 0.0);
    job.square_sums = call.partials().data();
    job.largest = job.square_sums + num_items;
    call.Run(num_items, sh::CompareItem, &job);
    int64_t item = 0;
    for (int64_t i = 0; i < num_weights; ++i) {
      square_sum[i] = largest[i] = 0.0;
      for (; item < job.ends[i]; ++item) {
        square_sum[i] += job.square_sums[item];
        largest[i] = std::max(largest[i], job.largest[item]);
      }
    }
  });
}

}  // extern "C"
