// One io_uring, by its system calls. Owns the ring's descriptor and mappings. It has no queues and
// blocks. One thread makes it and makes all calls.
#ifndef STRONGHOLD_IO_RING_H_
#define STRONGHOLD_IO_RING_H_

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

// IORING_OP_READ and the probe came with this one, in Linux 5.6.
#if defined(IORING_FEAT_CUR_PERSONALITY)
#define STRONGHOLD_HAS_IO_URING 1

#include <cstddef>
#include <cstdint>
#include <vector>

struct iovec;

namespace sh {

class IoRing {
 public:
  // Throws std::system_error if the kernel refuses the ring, or lacks an operation that we need.
  explicit IoRing(unsigned entries);
  ~IoRing();
  IoRing(const IoRing&) = delete;
  IoRing& operator=(const IoRing&) = delete;

  // 0 or errno.
  int RegisterBuffers(const std::vector<iovec>& buffers);

  // The next free entry of the submission queue, zeroed. At most `entries` may be unsubmitted.
  io_uring_sqe* Prepare();
  // Submits the prepared entries and waits for a completion; 0 or errno. With EINTR, EAGAIN and
  // EBUSY some or none were submitted.
  int SubmitAndWait();
  // Takes back the youngest entry that the kernel has not taken; false if there is none.
  bool Withdraw(io_uring_sqe* entry);
  // The oldest completion; false if there is none.
  bool Reap(io_uring_cqe* completion);

 private:
  void Map(const io_uring_params& params);
  bool Supports() const;
  void Release();

  struct Mapping {
    void* address = nullptr;
    size_t nbytes = 0;
  };

  int fd_ = -1;
  Mapping rings_;
  Mapping entries_;
  io_uring_sqe* sqes_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
  unsigned* sq_head_ = nullptr;
  unsigned* sq_tail_ = nullptr;
  unsigned* sq_array_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  unsigned cq_mask_ = 0;
};

}  // namespace sh

#endif  // IORING_FEAT_CUR_PERSONALITY

#endif  // STRONGHOLD_IO_RING_H_
