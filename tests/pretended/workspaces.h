// The workspaces of cuBLAS on the pretended device, as torch gives them out.
//
// Owns them: memory of the device's allocator, for each handle and stream, taken by the first matrix
// product and kept for good. A thread has a handle of its own, which the next new thread takes over
// when it ends. Sizes are those of torch on an H100: CUBLAS_WORKSPACE_CONFIG decides, 32 MiB without
// it. A product with a bias runs by cublasLt, which takes another one, of CUBLASLT_WORKSPACE_SIZE
// KiB or 1 MiB, unless TORCH_CUBLASLT_UNIFIED_WORKSPACE is 1. Nobody reads or writes them here, so
// that they take addresses, not memory. Any thread may enter.
#pragma once

#include <cstdlib>
#include <map>
#include <mutex>
#include <regex>
#include <set>
#include <string>
#include <utility>

#include "memory.h"

namespace pretended {

class Workspaces {
 public:
  static Workspaces& get() {
    static auto* workspaces = new Workspaces();
    return *workspaces;
  }

  // The calling thread multiplies on its current stream: `with_bias`, by cublasLt.
  void multiplies(bool with_bias) {
    take(false, of_cublas_);
    if (with_bias && !unified_) take(true, of_lt_);
  }

  // What torch._C._cuda_clearCublasWorkspaces does: the next products take them anew.
  void clear() {
    std::lock_guard<std::mutex> hold(mutex_);
    for (const auto& [place, address] : taken_) Arena::get().give_back(address);
    taken_.clear();
  }

 private:
  struct Handle {
    int number;
    Handle() : number(Workspaces::get().reserve()) {}
    ~Handle() { Workspaces::get().release(number); }
  };
  using Place = std::tuple<bool, int, c10::StreamId>;  // of cublasLt, handle, stream

  void take(bool lt, size_t bytes) {
    static thread_local Handle handle;
    const Place place{lt, handle.number, Streams::current()};
    {
      std::lock_guard<std::mutex> hold(mutex_);
      if (bytes == 0 || taken_.count(place) > 0) return;
    }
    void* address = Arena::get().take(bytes, false);
    std::lock_guard<std::mutex> hold(mutex_);
    taken_[place] = address;
  }

  int reserve() {
    std::lock_guard<std::mutex> hold(mutex_);
    if (free_.empty()) return num_handles_++;
    const int number = *free_.begin();
    free_.erase(free_.begin());
    return number;
  }
  void release(int number) {
    std::lock_guard<std::mutex> hold(mutex_);
    free_.insert(number);
  }

  // The sum of all :KiB:COUNT.
  static size_t configured() {
    const char* value = std::getenv("CUBLAS_WORKSPACE_CONFIG");
    if (value == nullptr) return size_t{32} << 20;
    const std::string config(value);
    const std::regex part(":([0-9]+):([0-9]+)");
    size_t bytes = 0;
    for (std::sregex_iterator found(config.begin(), config.end(), part), end; found != end; ++found) {
      bytes += 1024 * std::stoull((*found)[1]) * std::stoull((*found)[2]);
    }
    return bytes;
  }
  static size_t configured_lt() {
    const char* value = std::getenv("CUBLASLT_WORKSPACE_SIZE");
    return 1024 * (value == nullptr ? size_t{1024} : std::stoull(value));
  }
  static bool configured_unified() {
    const char* value = std::getenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE");
    return value != nullptr && std::string(value) == "1";
  }

  const size_t of_cublas_ = configured(), of_lt_ = configured_lt();
  const bool unified_ = configured_unified();
  std::mutex mutex_;
  std::map<Place, void*> taken_;
  std::set<int> free_;
  int num_handles_ = 0;
};

}  // namespace pretended
