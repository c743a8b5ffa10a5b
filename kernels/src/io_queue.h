// The queue: owns files and operations, cuts operations into blocks, and records their ends. The
// engine transfers the blocks.
#ifndef STRONGHOLD_IO_QUEUE_H_
#define STRONGHOLD_IO_QUEUE_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io_block.h"
#include "io_engine.h"
#include "io_file.h"

namespace sh {

// The states of an operation, in order. The first follows the last.
enum class IoState : uint8_t {
  kFree,
  kHeld,    // submitted, not committed
  kReady,   // some of its blocks are not issued yet
  kIssued,  // the last block has been issued, or an earlier one failed
  kEnded    // no block is in flight; the result waits for its waiter
};

struct IoOperation {
  IoState state = IoState::kFree;
  IoKind kind = IoKind::kRead;
  int32_t index = 0;
  int64_t ticket = 0;  // grows with every submission
  std::shared_ptr<IoFile> file;
  char* address = nullptr;
  int64_t offset = 0;
  int64_t nbytes = 0;
  int64_t issued = 0;     // bytes of which blocks have been made
  int32_t in_flight = 0;  // blocks
  int32_t error = 0;      // errno of the failed block with the lowest offset, and where it failed
  int64_t error_offset = 0;
  int64_t error_nbytes = 0;
  std::chrono::steady_clock::time_point begun;
  std::chrono::steady_clock::time_point ended;
  IoOperation* next = nullptr;
};

// First in, first out, through IoOperation::next.
class IoList {
 public:
  bool empty() const { return first_ == nullptr; }
  IoOperation* first() const { return first_; }
  void Push(IoOperation* operation);
  IoOperation* Pop();

 private:
  IoOperation* first_ = nullptr;
  IoOperation* last_ = nullptr;
};

class IoQueue {
 public:
  explicit IoQueue(int64_t block_bytes) : block_bytes_(block_bytes) {}

  // ---- For callers.

  // The engine that the queue wakes for new work. It must outlive every later call.
  void Attach(IoEngine* engine) { engine_ = engine; }

  int32_t Open(const char* path, int flags, int64_t size, const IoFile** file);
  void Close(int32_t file);
  int64_t Submit(IoKind kind, int32_t file, int64_t offset, char* address, int64_t nbytes);
  void Commit();
  double Wait(int64_t ticket);
  void Drain();  // commits, then waits until nothing is unfinished

  // ---- For the engine.

  // Takes the next block. If there is none, returns false; IoEngine::Wake will announce the next
  // committed one.
  bool Take(IoBlock* block);
  // Takes the next block, and waits until there is one; false after Stop.
  bool TakeOrWait(IoBlock* block);
  void Stop();  // ends TakeOrWait
  void End(const IoBlock& block);

 private:
  std::shared_ptr<IoFile>& FileAt(int32_t file);
  IoOperation* Find(int64_t ticket);
  IoOperation* Allocate();
  void CommitLocked();
  bool Cut(IoBlock* block);
  void Finish(IoOperation* operation);
  void Free(IoOperation* operation);

  const int64_t block_bytes_;
  IoEngine* engine_ = nullptr;

  std::mutex mutex_;               // guards all following members, and IoFile::unfinished
  std::condition_variable work_;   // TakeOrWait waits here for ready_ or stop_
  std::condition_variable ended_;  // Wait, Close and Drain wait here for an operation's end
  bool hungry_ = false;            // the engine waits for Wake
  bool stop_ = false;
  int64_t sequence_ = 0;
  int64_t unfinished_ = 0;
  std::vector<std::shared_ptr<IoFile>> files_;
  std::deque<IoOperation> operations_;  // reused: steady state allocates nothing
  IoList free_;
  IoList held_;
  IoList ready_;
};

}  // namespace sh

#endif  // STRONGHOLD_IO_QUEUE_H_
