// The parts of the C ABI that are not kernels: errors, instruction sets, pools.

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "pool.h"
#include "status.h"
#include "stronghold.h"
#include "targets.h"

namespace sh {
namespace {

// Fixed room: an error must be reportable when memory is not to be had.
thread_local char last_error[512] = "";
thread_local int last_errno = 0;

constexpr int32_t kMaxThreads = 4096;

const Kernels* ChooseKernels(const char* isa) {
  const char* source = "isa";
  if (isa == nullptr) {
    isa = std::getenv("STRONGHOLD_ISA");
    source = "STRONGHOLD_ISA";
    if (isa == nullptr || *isa == '\0') return KernelsAt(0);
  }
  const Kernels* kernels = KernelsNamed(isa);
  if (kernels != nullptr) return kernels;
  std::string message = std::string(source) + " is \"" + isa + "\"; this CPU runs";
  for (int i = 0; KernelsAt(i) != nullptr; ++i) {
    message += std::string(i == 0 ? " " : ", ") + KernelsAt(i)->name;
  }
  throw Invalid(message);
}

}  // namespace

void SetLastError(const char* message, int number) noexcept {
  std::strncpy(last_error, message, sizeof(last_error) - 1);
  last_errno = number;
}

}  // namespace sh

extern "C" {

const char* sh_last_error(void) { return sh::last_error; }

int32_t sh_last_errno(void) { return sh::last_errno; }

int32_t sh_abi_version(void) { return SH_ABI_VERSION; }

int64_t sh_segment_bytes(void) { return sizeof(sh_segment); }

int64_t sh_target_bytes(void) { return sizeof(sh_target); }

const char* sh_isa_at(int32_t index) {
  const sh::Kernels* kernels = sh::KernelsAt(index);
  return kernels == nullptr ? nullptr : kernels->name;
}

__attribute__((no_sanitize("thread")))  // meets plain writes of other threads, by contract
void sh_touch(void* memory, int64_t bytes) {
  auto* first = static_cast<unsigned char*>(memory);
  // A page has 4096 bytes or a multiple.
  for (int64_t i = 0; i < bytes; i += 4096) __atomic_fetch_or(first + i, 0, __ATOMIC_RELAXED);
}

void sh_store(int64_t* word, int64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

int64_t sh_load(const int64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

int32_t sh_pool_create(int32_t num_threads, const int32_t* cores, int32_t num_cores,
                       const char* isa, sh_pool** out) {
  return sh::Guarded([&] {
    sh::Require(out != nullptr, "out is NULL");
    *out = nullptr;
    sh::Require(num_threads >= 1 && num_threads <= sh::kMaxThreads,
                "num_threads must be from 1 to 4096");
    sh::Require(num_cores == 0 || (num_cores > 0 && cores != nullptr), "cores is NULL");
    std::vector<int> list(cores, cores + num_cores);
    for (int core : list) {
      sh::Require(core >= 0 && core < sh::kMaxCores, "a core's number is out of range");
    }
    *out = new sh_pool(num_threads, std::move(list), sh::ChooseKernels(isa));
  });
}

void sh_pool_destroy(sh_pool* pool) {
  // In a forked child the threads do not exist, and a mutex may be locked by a missing thread. So
  // the pool is left to the end of the process.
  if (pool != nullptr && !pool->forked()) delete pool;
}

const char* sh_pool_isa(const sh_pool* pool) { return pool->kernels().name; }

}  // extern "C"
