#include "io_ring.h"

#if defined(STRONGHOLD_HAS_IO_URING)

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#if !defined(__NR_io_uring_setup)  // the same numbers on every architecture
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#define __NR_io_uring_register 427
#endif

namespace sh {
namespace {

// One thread issues and reaps, so completions may wait until it asks for them: no interrupts of
// its own work. Linux 6.1 and younger headers have these; older kernels answer EINVAL.
#if !defined(IORING_SETUP_SINGLE_ISSUER)
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif
constexpr unsigned kSingleIssuer = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;

[[noreturn]] void Throw(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// The kernel accesses these words concurrently, like another thread.
unsigned Acquire(const unsigned* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void Publish(unsigned* word, unsigned value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

int Setup(unsigned entries, unsigned flags, io_uring_params* params) {
  std::memset(params, 0, sizeof(*params));
  params->flags = flags;
  return static_cast<int>(syscall(__NR_io_uring_setup, entries, params));
}

}  // namespace

IoRing::IoRing(unsigned entries) {
  io_uring_params params;
  fd_ = Setup(entries, kSingleIssuer, &params);
  if (fd_ < 0 && errno == EINVAL) fd_ = Setup(entries, 0, &params);
  if (fd_ < 0) Throw("io_uring_setup");
  try {
    if (!Supports()) {
      errno = EOPNOTSUPP;
      Throw("io_uring without IORING_OP_READ");
    }
    Map(params);
  } catch (...) {
    Release();
    throw;
  }
}

IoRing::~IoRing() { Release(); }

void IoRing::Release() {
  if (rings_.address != nullptr) munmap(rings_.address, rings_.nbytes);
  if (entries_.address != nullptr) munmap(entries_.address, entries_.nbytes);
  if (fd_ >= 0) close(fd_);
}

bool IoRing::Supports() const {
  constexpr unsigned kOps = 64;
  alignas(io_uring_probe) char room[sizeof(io_uring_probe) + kOps * sizeof(io_uring_probe_op)];
  std::memset(room, 0, sizeof(room));
  io_uring_probe* probe = reinterpret_cast<io_uring_probe*>(room);
  if (syscall(__NR_io_uring_register, fd_, IORING_REGISTER_PROBE, probe, kOps) != 0) return false;
  for (unsigned op : {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED,
                      IORING_OP_POLL_ADD}) {
    if (op > probe->last_op || (probe->ops[op].flags & IO_URING_OP_SUPPORTED) == 0) return false;
  }
  return true;
}

void IoRing::Map(const io_uring_params& params) {
  const auto map = [this](size_t nbytes, off_t offset) {
    void* address =
        mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, offset);
    if (address == MAP_FAILED) Throw("mmap of the ring");
    return Mapping{address, nbytes};
  };
  // One mapping for both rings, as since 5.4; the probe asked for a younger kernel.
  rings_ = map(std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe)),
               IORING_OFF_SQ_RING);
  entries_ = map(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
  char* base = static_cast<char*>(rings_.address);
  const auto word = [base](unsigned offset) { return reinterpret_cast<unsigned*>(base + offset); };
  sqes_ = static_cast<io_uring_sqe*>(entries_.address);
  cqes_ = reinterpret_cast<io_uring_cqe*>(base + params.cq_off.cqes);
  sq_head_ = word(params.sq_off.head);
  sq_tail_ = word(params.sq_off.tail);
  sq_array_ = word(params.sq_off.array);
  sq_mask_ = *word(params.sq_off.ring_mask);
  cq_head_ = word(params.cq_off.head);
  cq_tail_ = word(params.cq_off.tail);
  cq_mask_ = *word(params.cq_off.ring_mask);
}

int IoRing::RegisterBuffers(const std::vector<iovec>& buffers) {
  const long result = syscall(__NR_io_uring_register, fd_, IORING_REGISTER_BUFFERS, buffers.data(),
                              static_cast<unsigned>(buffers.size()));
  return result == 0 ? 0 : errno;
}

io_uring_sqe* IoRing::Prepare() {
  const unsigned tail = *sq_tail_;
  io_uring_sqe* entry = &sqes_[tail & sq_mask_];
  std::memset(entry, 0, sizeof(*entry));
  sq_array_[tail & sq_mask_] = tail & sq_mask_;
  // The kernel reads entries in io_uring_enter alone, so the tail may move before they are filled.
  Publish(sq_tail_, tail + 1);
  return entry;
}

int IoRing::SubmitAndWait() {
  const unsigned unsubmitted = *sq_tail_ - Acquire(sq_head_);
  const long result =
      syscall(__NR_io_uring_enter, fd_, unsubmitted, 1u, IORING_ENTER_GETEVENTS, nullptr, 0);
  return result >= 0 ? 0 : errno;
}

bool IoRing::Withdraw(io_uring_sqe* entry) {
  // From the young end, because only the kernel may move the head.
  const unsigned tail = *sq_tail_;
  if (tail == Acquire(sq_head_)) return false;
  *entry = sqes_[(tail - 1) & sq_mask_];
  Publish(sq_tail_, tail - 1);
  return true;
}

bool IoRing::Reap(io_uring_cqe* completion) {
  const unsigned head = *cq_head_;
  if (head == Acquire(cq_tail_)) return false;
  *completion = cqes_[head & cq_mask_];
  Publish(cq_head_, head + 1);
  return true;
}

}  // namespace sh

#endif  // STRONGHOLD_HAS_IO_URING
