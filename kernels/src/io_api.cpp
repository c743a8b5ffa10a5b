// The C ABI of asynchronous file I/O: checks arguments, chooses the engine.

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <system_error>
#include <vector>

#include "io_engine.h"
#include "io_queue.h"
#include "status.h"
#include "stronghold_io.h"

// The opaque type of the C ABI.
struct sh_io {
  explicit sh_io(int64_t block_bytes) : queue(block_bytes), owner_pid(getpid()) {}

  sh::IoQueue queue;
  std::unique_ptr<sh::IoEngine> engine;  // after the queue, so that it is destroyed first
  std::string note;
  const pid_t owner_pid;
};

namespace sh {
namespace {

constexpr int32_t kMaxDepth = 4096;
constexpr int64_t kMaxBlockBytes = int64_t{1} << 30;

std::string EngineName(const char* engine) {
  const char* source = "engine";
  if (engine == nullptr) {
    engine = std::getenv("STRONGHOLD_IO_ENGINE");
    source = "STRONGHOLD_IO_ENGINE";
    if (engine == nullptr) return "";
  }
  const std::string name = engine;
  if (name == "io_uring" || name == "threads" || name.empty()) return name;
  throw Invalid(std::string(source) + " is \"" + name + "\", expected \"io_uring\" or \"threads\"");
}

void StartEngine(sh_io* io, const std::string& name, int32_t depth,
                 std::vector<sh_io_region> regions) {
  if (name != "threads") {
    try {
      int registration = 0;
      io->engine = MakeIoUring(&io->queue, depth, std::move(regions), &registration);
      if (registration != 0) {
        io->note = "memory was not registered with io_uring: " +
                   std::generic_category().message(registration);
      }
    } catch (const std::system_error& error) {
      if (name == "io_uring") throw;
      io->note = error.what();
    }
  }
  if (io->engine == nullptr) io->engine = MakeIoThreads(&io->queue, depth);
  io->queue.Attach(io->engine.get());
}

IoQueue* Live(sh_io* io) {
  Require(io != nullptr, "io is NULL");
  Require(io->owner_pid == getpid(), "the queue belongs to the process that forked this one");
  return &io->queue;
}

int32_t Submit(sh_io* io, IoKind kind, int32_t file, int64_t offset, void* address, int64_t nbytes,
               int64_t* ticket) {
  return Guarded([&] {
    Require(ticket != nullptr, "ticket is NULL");
    *ticket = Live(io)->Submit(kind, file, offset, static_cast<char*>(address), nbytes);
  });
}

}  // namespace
}  // namespace sh

extern "C" {

int32_t sh_io_create(int32_t depth, int64_t block_bytes, const char* engine,
                     const sh_io_region* regions, int32_t num_regions, sh_io** out) {
  return sh::Guarded([&] {
    sh::Require(out != nullptr, "out is NULL");
    *out = nullptr;
    sh::Require(depth >= 1 && depth <= sh::kMaxDepth, "depth must be from 1 to 4096");
    sh::Require(block_bytes >= SH_IO_ALIGNMENT && block_bytes <= sh::kMaxBlockBytes &&
                    block_bytes % SH_IO_ALIGNMENT == 0,
                "block_bytes must be a multiple of 4096, from 4096 to 2^30");
    sh::Require(num_regions == 0 || (num_regions > 0 && regions != nullptr), "regions is NULL");
    for (int32_t i = 0; i < num_regions; ++i) {
      sh::Require(regions[i].address != nullptr && regions[i].nbytes > 0,
                  "a region has no address or no bytes");
    }
    const std::string name = sh::EngineName(engine);
    auto io = std::make_unique<sh_io>(block_bytes);
    sh::StartEngine(io.get(), name, depth,
                    std::vector<sh_io_region>(regions, regions + num_regions));
    *out = io.release();
  });
}

void sh_io_destroy(sh_io* io) {
  // In a forked child the threads do not exist, and the mutex may be locked by a missing thread.
  if (io == nullptr || io->owner_pid != getpid()) return;
  io->queue.Drain();
  delete io;
}

const char* sh_io_engine(const sh_io* io) { return io->engine->name(); }

int32_t sh_io_registered(const sh_io* io) { return io->engine->registered() ? 1 : 0; }

const char* sh_io_note(const sh_io* io) { return io->note.c_str(); }

int32_t sh_io_open(sh_io* io, const char* path, int32_t flags, int64_t size, sh_io_file* out) {
  return sh::Guarded([&] {
    sh::Require(path != nullptr && out != nullptr, "path or out is NULL");
    constexpr int32_t kChanging = SH_IO_CREATE | SH_IO_PREALLOCATE;
    sh::Require((flags & ~(kChanging | SH_IO_WRITABLE | SH_IO_DIRECT)) == 0, "unknown flags");
    sh::Require((flags & kChanging) == 0 || (flags & SH_IO_WRITABLE) != 0,
                "a file that is created or preallocated must be writable");
    const sh::IoFile* file = nullptr;
    const int32_t number = sh::Live(io)->Open(path, flags, size, &file);
    *out = {number, file->direct() ? 1 : 0, file->preallocated() ? 1 : 0};
  });
}

int32_t sh_io_close(sh_io* io, int32_t file) {
  return sh::Guarded([&] { sh::Live(io)->Close(file); });
}

int32_t sh_io_read(sh_io* io, int32_t file, int64_t offset, void* address, int64_t nbytes,
                   int64_t* ticket) {
  return sh::Submit(io, sh::IoKind::kRead, file, offset, address, nbytes, ticket);
}

int32_t sh_io_write(sh_io* io, int32_t file, int64_t offset, const void* address, int64_t nbytes,
                    int64_t* ticket) {
  // A write only reads the memory.
  return sh::Submit(io, sh::IoKind::kWrite, file, offset, const_cast<void*>(address), nbytes,
                    ticket);
}

int32_t sh_io_commit(sh_io* io) {
  return sh::Guarded([&] { sh::Live(io)->Commit(); });
}

int32_t sh_io_wait(sh_io* io, int64_t ticket, double* seconds) {
  return sh::Guarded([&] {
    const double spent = sh::Live(io)->Wait(ticket);
    if (seconds != nullptr) *seconds = spent;
  });
}

}  // extern "C"
