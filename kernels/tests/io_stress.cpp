// Asynchronous file I/O under load and under faults, for the sanitizers. The linker turns the
// system calls of the library into those below (-Wl,--wrap), which transfer too little, are
// interrupted, and run out of memory on request. Takes a folder for its files.

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../src/io_block.h"
#include "stronghold_io.h"

namespace {

constexpr int64_t kPage = SH_IO_ALIGNMENT;
constexpr int64_t kBlock = 4 * kPage;
constexpr long kEnter = 426;  // io_uring_enter

std::atomic<bool> faults{false};
std::atomic<int> enter_error{0};
thread_local unsigned calls = 0;

}  // namespace

extern "C" {

ssize_t __real_pread(int fd, void* data, size_t count, off_t offset);
ssize_t __real_pwrite(int fd, const void* data, size_t count, off_t offset);
long __real_syscall(long number, ...);

// Every 3rd transfer is short, by an odd number; every 5th is interrupted; every 7th has to be
// tried again. 0 where there is no fault, and then `*result` is free.
static bool Faulty(ssize_t* result) {
  if (!faults) return false;
  ++calls;
  if (calls % 5 != 0 && calls % 7 != 0) {
    if (calls % 3 == 0 && *result > kPage) *result = *result / 2 + 100;
    return false;
  }
  errno = calls % 5 == 0 ? EINTR : EAGAIN;
  return true;
}

ssize_t __wrap_pread(int fd, void* data, size_t count, off_t offset) {
  ssize_t result = __real_pread(fd, data, count, offset);
  return result > 0 && Faulty(&result) ? -1 : result;
}

ssize_t __wrap_pwrite(int fd, const void* data, size_t count, off_t offset) {
  ssize_t result = __real_pwrite(fd, data, count, offset);
  return result > 0 && Faulty(&result) ? -1 : result;
}

long __wrap_syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  // Setup, enter and register, each with as many arguments as it has.
  const int count = number == kEnter ? 6 : number == kEnter - 1 ? 2 : 4;
  long a[6] = {};
  for (int i = 0; i < count; ++i) a[i] = va_arg(list, long);
  va_end(list);
  if (number == kEnter) {
    ssize_t unused = 0;
    if (enter_error != 0) {
      errno = enter_error;
      return -1;
    }
    if (Faulty(&unused)) return -1;
  }
  return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

}  // extern "C"

namespace {

void Check(bool holds, const char* what, int line) {
  if (holds) return;
  std::fprintf(stderr, "line %d: %s: %s\n", line, what, sh_last_error());
  std::exit(1);
}
#define CHECK(x) Check((x), #x, __LINE__)

struct FreeAligned {
  void operator()(char* data) const { std::free(data); }
};
using Pages = std::unique_ptr<char, FreeAligned>;

Pages MakePages(int64_t nbytes, unsigned seed) {
  char* data = static_cast<char*>(std::aligned_alloc(kPage, nbytes));
  for (int64_t i = 0; i < nbytes; ++i) {
    seed = seed * 1664525u + 1013904223u;
    data[i] = static_cast<char>(seed >> 24);
  }
  return Pages(data);
}

sh_io* MakeQueue(const char* engine, int depth, const sh_io_region* region = nullptr) {
  sh_io* io = nullptr;
  CHECK(sh_io_create(depth, kBlock, engine, region, region != nullptr, &io) == SH_OK);
  return io;
}

int32_t Open(sh_io* io, const std::string& path, int64_t size) {
  sh_io_file file;
  const int32_t flags = SH_IO_WRITABLE | SH_IO_CREATE | SH_IO_PREALLOCATE | SH_IO_DIRECT;
  CHECK(sh_io_open(io, path.c_str(), flags, size, &file) == SH_OK);
  return file.file;
}

sh::IoBlock BlockOf(sh::IoKind kind, bool direct, int64_t nbytes) {
  return {nullptr, kind, direct, -1, nullptr, 0, nbytes, 0, 0};
}

void ResultsMeanWhatTheySay() {
  using sh::IoAdvance;
  using sh::IoKind;
  for (bool direct : {false, true}) {
    sh::IoBlock block = BlockOf(IoKind::kRead, direct, 3 * kPage);
    for (int i = 0; i < 100; ++i) CHECK(!IoAdvance(&block, -EINTR));
    CHECK(!IoAdvance(&block, kPage + 7));
    CHECK(block.offset == (direct ? kPage : kPage + 7) && block.nbytes == 3 * kPage - block.offset);
    CHECK(IoAdvance(&block, block.nbytes) && block.error == 0);

    block = BlockOf(IoKind::kRead, direct, kPage);
    CHECK(IoAdvance(&block, 0) && block.error == ENODATA);
    block = BlockOf(IoKind::kWrite, direct, kPage);
    int tries = 1;
    while (!IoAdvance(&block, 0)) ++tries;
    CHECK(block.error == EIO && tries > 1 && tries < 100);
    block = BlockOf(IoKind::kWrite, direct, kPage);
    while (!IoAdvance(&block, -EAGAIN)) {
    }
    CHECK(block.error == EAGAIN);
    block = BlockOf(IoKind::kWrite, direct, 2 * kPage);
    CHECK(!IoAdvance(&block, kPage) && IoAdvance(&block, -ENOSPC));
    CHECK(block.error == ENOSPC && block.offset == kPage && block.nbytes == kPage);
  }
  sh::IoBlock odd_end = BlockOf(IoKind::kRead, true, kPage);
  while (!IoAdvance(&odd_end, 100)) {
  }
  CHECK(odd_end.error == ENODATA);
}

// Tickets from the thread that submits to the one that waits.
class Channel {
 public:
  void Send(int64_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tickets_.push_back(ticket);
    ready_.notify_one();
  }
  int64_t Receive() {
    std::unique_lock<std::mutex> lock(mutex_);
    ready_.wait(lock, [this] { return !tickets_.empty(); });
    const int64_t ticket = tickets_.front();
    tickets_.pop_front();
    return ticket;
  }

 private:
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<int64_t> tickets_;
};

// Writes `pages` of a file in operations of odd sizes, reads them back; tickets are waited for by
// another thread.
void WriteAndReadBack(sh_io* io, const std::string& path, int64_t pages, Pages* data, Pages* back) {
  const int32_t file = Open(io, path, pages * kPage);
  for (int round = 0; round < 2; ++round) {
    Channel channel;
    int submitted = 0;
    std::thread waiter([&] {
      for (int64_t ticket = channel.Receive(); ticket != 0; ticket = channel.Receive()) {
        double seconds = -1;
        CHECK(sh_io_wait(io, ticket, &seconds) == SH_OK && seconds >= 0);
      }
    });
    for (int64_t page = 0, step = 1; page < pages; page += step, step = step % 13 + 2) {
      const int64_t count = std::min(step, pages - page);
      char* address = (round == 0 ? data : back)->get() + page * kPage;
      int64_t ticket = 0;
      CHECK((round == 0
                 ? sh_io_write(io, file, page * kPage, address, count * kPage, &ticket)
                 : sh_io_read(io, file, page * kPage, address, count * kPage, &ticket)) == SH_OK);
      if (++submitted % 3 == 0) CHECK(sh_io_commit(io) == SH_OK);
      channel.Send(ticket);
    }
    channel.Send(0);
    waiter.join();
  }
  CHECK(std::memcmp(data->get(), back->get(), pages * kPage) == 0);
  CHECK(sh_io_close(io, file) == SH_OK);
}

void ManySubmittersManyWaiters(const char* engine, const std::string& folder) {
  constexpr int64_t kPages = 301;
  for (int depth : {1, 3, 16}) {
    std::vector<Pages> memory;
    for (unsigned i = 0; i < 6; ++i) memory.push_back(MakePages(kPages * kPage, i / 2 + i % 2 * 9));
    const sh_io_region region = {memory[0].get(), kPages * kPage};
    sh_io* io = MakeQueue(engine, depth, &region);
    std::vector<std::thread> submitters;
    for (unsigned i = 0; i < 3; ++i) {
      submitters.emplace_back([&, i] {
        WriteAndReadBack(io, folder + "/" + std::to_string(i), kPages, &memory[2 * i],
                         &memory[2 * i + 1]);
      });
    }
    for (std::thread& submitter : submitters) submitter.join();
    sh_io_destroy(io);
  }
}

void DestroyWaitsForWhatIsInFlight(const char* engine, const std::string& folder) {
  constexpr int64_t kPages = 257;
  const Pages data = MakePages(kPages * kPage, 5);
  for (int depth : {1, 8}) {
    const std::string path = folder + "/destroyed" + std::to_string(depth);
    sh_io* io = MakeQueue(engine, depth);
    const int32_t file = Open(io, path, kPages * kPage);
    int64_t ticket = 0;
    CHECK(sh_io_write(io, file, 0, data.get(), kPages * kPage, &ticket) == SH_OK);
    sh_io_destroy(io);
    const Pages back = MakePages(kPages * kPage, 6);
    const int fd = open(path.c_str(), O_RDONLY);
    for (int64_t i = 0; i < kPages; ++i) {
      CHECK(__real_pread(fd, back.get() + i * kPage, kPage, i * kPage) == kPage);
    }
    close(fd);
    CHECK(std::memcmp(data.get(), back.get(), kPages * kPage) == 0);
  }
  for (int i = 0; i < 50; ++i) sh_io_destroy(MakeQueue(engine, 1 + i % 7));
}

// A kernel that takes no more requests must end in an error, and the ring must live on.
void ARingThatIsRefusedFailsItsBlocks(const std::string& folder) {
  const Pages data = MakePages(kBlock, 5);
  sh_io* io = MakeQueue("io_uring", 4);
  const int32_t file = Open(io, folder + "/refused", kBlock);
  int64_t ticket = 0;
  enter_error = ENOMEM;
  CHECK(sh_io_write(io, file, 0, data.get(), kBlock, &ticket) == SH_OK);
  CHECK(sh_io_wait(io, ticket, nullptr) == SH_SYSTEM && sh_last_errno() == ENOMEM);
  enter_error = 0;
  CHECK(sh_io_write(io, file, 0, data.get(), kBlock, &ticket) == SH_OK);
  CHECK(sh_io_wait(io, ticket, nullptr) == SH_OK);
  sh_io_destroy(io);
}

void RunEngine(const char* engine, const std::string& folder) {
  for (bool faulty : {false, true}) {
    faults = faulty;
    ManySubmittersManyWaiters(engine, folder);
    DestroyWaitsForWhatIsInFlight(engine, folder);
  }
  faults = false;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string folder = argv[1];
  ResultsMeanWhatTheySay();
  RunEngine("threads", folder);
  sh_io* probe = MakeQueue(nullptr, 1);
  const std::string engine = sh_io_engine(probe), note = sh_io_note(probe);
  sh_io_destroy(probe);
  if (engine == "io_uring") {
    RunEngine("io_uring", folder);
    ARingThatIsRefusedFailsItsBlocks(folder);
    std::printf("threads, io_uring: ok\n");
  } else {
    std::printf("threads: ok; io_uring not tested: %s\n", note.c_str());
  }
  return 0;
}
