#include "io_queue.h"

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "status.h"

namespace sh {
namespace {

// A ticket is a sequence number and the index of its operation's place in operations_.
constexpr int kIndexBits = 20;
constexpr int64_t kMaxOperations = int64_t{1} << kIndexBits;

const char* NameOf(IoKind kind) { return kind == IoKind::kRead ? "read" : "write"; }

std::string Span(const char* name, int64_t nbytes, int64_t offset) {
  return std::string(name) + " of " + std::to_string(nbytes) + " bytes at offset " +
         std::to_string(offset);
}

// "write of 4096 bytes at offset 8192 (in a write of ... ): No space left on device: /path"
Refused FailureOf(const IoOperation& operation) {
  const char* name = NameOf(operation.kind);
  std::string message = Span(name, operation.error_nbytes, operation.error_offset);
  if (operation.error_nbytes != operation.nbytes) {
    message += " (in a " + Span(name, operation.nbytes, operation.offset) + ")";
  }
  message += ": " + (operation.error == ENODATA && operation.kind == IoKind::kRead
                         ? std::string("the file ends before that")
                         : std::generic_category().message(operation.error));
  return Refused(operation.error, message + ": " + operation.file->path());
}

void RequireAligned(const char* what, int64_t value) {
  if (value >= 0 && value % SH_IO_ALIGNMENT == 0) return;
  throw Invalid(std::string(what) + " is " + std::to_string(value) +
                ", expected a multiple of 4096, not negative");
}

}  // namespace

void IoList::Push(IoOperation* operation) {
  operation->next = nullptr;
  (first_ == nullptr ? first_ : last_->next) = operation;
  last_ = operation;
}

IoOperation* IoList::Pop() {
  IoOperation* operation = first_;
  first_ = operation->next;
  return operation;
}

int32_t IoQueue::Open(const char* path, int flags, int64_t size, const IoFile** file) {
  RequireAligned("size", size);
  auto opened = std::make_shared<IoFile>(path, flags, size);
  *file = opened.get();
  const std::lock_guard<std::mutex> lock(mutex_);
  files_.push_back(std::move(opened));
  return static_cast<int32_t>(files_.size()) - 1;
}

std::shared_ptr<IoFile>& IoQueue::FileAt(int32_t file) {
  Require(file >= 0 && file < static_cast<int64_t>(files_.size()) && files_[file] != nullptr,
          "the file's number is of no open file of this queue");
  return files_[file];
}

void IoQueue::Close(int32_t file) {
  std::shared_ptr<IoFile> closing;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    // Out of the table first: no other thread may submit to it or close it while this call waits.
    closing = std::move(FileAt(file));
    files_[file] = nullptr;
    CommitLocked();
    ended_.wait(lock, [&] { return closing->unfinished == 0; });
  }
  closing->Close();
}

int64_t IoQueue::Submit(IoKind kind, int32_t file, int64_t offset, char* address, int64_t nbytes) {
  RequireAligned("offset", offset);
  RequireAligned("nbytes", nbytes);
  if (reinterpret_cast<uintptr_t>(address) % SH_IO_ALIGNMENT != 0) {
    throw Invalid("address ends in " +
                  std::to_string(reinterpret_cast<uintptr_t>(address) % SH_IO_ALIGNMENT) +
                  ", expected a multiple of 4096");
  }
  Require(address != nullptr || nbytes == 0, "address is NULL");
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::shared_ptr<IoFile>& target = FileAt(file);
  if (kind == IoKind::kWrite && !target->writable()) {
    throw Invalid("the file was opened for reading alone: " + target->path());
  }
  if (nbytes > target->size() || offset > target->size() - nbytes) {
    throw Invalid(Span(NameOf(kind), nbytes, offset) + " passes the size given at open, " +
                  std::to_string(target->size()) + ": " + target->path());
  }
  IoOperation* operation = Allocate();
  operation->kind = kind;
  operation->file = target;
  operation->address = address;
  operation->offset = offset;
  operation->nbytes = nbytes;
  operation->issued = 0;
  operation->in_flight = 0;
  operation->error = 0;
  operation->state = IoState::kHeld;
  ++target->unfinished;
  ++unfinished_;
  held_.Push(operation);
  return operation->ticket;
}

IoOperation* IoQueue::Allocate() {
  if (free_.empty()) {
    Require(static_cast<int64_t>(operations_.size()) < kMaxOperations,
            "too many operations were submitted and never waited for");
    operations_.emplace_back();
    operations_.back().index = static_cast<int32_t>(operations_.size()) - 1;
    free_.Push(&operations_.back());
  }
  IoOperation* operation = free_.Pop();
  operation->ticket = ++sequence_ << kIndexBits | operation->index;
  return operation;
}

void IoQueue::Commit() {
  const std::lock_guard<std::mutex> lock(mutex_);
  CommitLocked();
}

void IoQueue::CommitLocked() {
  while (!held_.empty()) {
    IoOperation* operation = held_.Pop();
    operation->state = IoState::kReady;
    ready_.Push(operation);
  }
  if (ready_.empty()) return;
  work_.notify_all();
  if (hungry_) {
    hungry_ = false;
    engine_->Wake();
  }
}

bool IoQueue::Take(IoBlock* block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool found = Cut(block);
  hungry_ = !found;
  return found;
}

bool IoQueue::TakeOrWait(IoBlock* block) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (Cut(block)) return true;
    if (stop_) return false;
    work_.wait(lock);
  }
}

void IoQueue::Stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stop_ = true;
  work_.notify_all();
}

bool IoQueue::Cut(IoBlock* block) {
  while (!ready_.empty()) {
    IoOperation* operation = ready_.first();
    const int64_t left = operation->nbytes - operation->issued;
    if (operation->issued == 0) operation->begun = std::chrono::steady_clock::now();
    if (operation->error != 0 || left == 0) {
      // A block failed, so that no further one is issued; or there were no bytes.
      ready_.Pop();
      operation->state = IoState::kIssued;
      if (operation->in_flight == 0) Finish(operation);
      continue;
    }
    const int64_t nbytes = std::min(left, block_bytes_);
    *block = {operation,
              operation->kind,
              operation->file->direct(),
              operation->file->fd(),
              operation->address + operation->issued,
              operation->offset + operation->issued,
              nbytes,
              0,
              0};
    operation->issued += nbytes;
    ++operation->in_flight;
    if (nbytes == left) {
      ready_.Pop();
      operation->state = IoState::kIssued;
    }
    return true;
  }
  return false;
}

void IoQueue::End(const IoBlock& block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  IoOperation* operation = block.operation;
  if (block.error != 0 && (operation->error == 0 || block.offset < operation->error_offset)) {
    operation->error = block.error;
    operation->error_offset = block.offset;
    operation->error_nbytes = block.nbytes;
  }
  if (--operation->in_flight == 0 && operation->state == IoState::kIssued) Finish(operation);
}

void IoQueue::Finish(IoOperation* operation) {
  operation->ended = std::chrono::steady_clock::now();
  operation->state = IoState::kEnded;
  --operation->file->unfinished;
  --unfinished_;
  ended_.notify_all();
}

IoOperation* IoQueue::Find(int64_t ticket) {
  const int64_t index = ticket & (kMaxOperations - 1);
  if (ticket > 0 && index < static_cast<int64_t>(operations_.size())) {
    IoOperation* operation = &operations_[index];
    if (operation->ticket == ticket && operation->state != IoState::kFree) return operation;
  }
  throw Invalid("the ticket is of no operation of this queue, or was waited for before");
}

double IoQueue::Wait(int64_t ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (Find(ticket)->state == IoState::kHeld) CommitLocked();
  // Looked up again each time: another waiter may have forgotten the ticket meanwhile (a race).
  ended_.wait(lock, [&] { return Find(ticket)->state == IoState::kEnded; });
  IoOperation* operation = Find(ticket);
  const std::chrono::duration<double> seconds = operation->ended - operation->begun;
  if (operation->error == 0) {
    Free(operation);
    return seconds.count();
  }
  const Refused failure = FailureOf(*operation);
  Free(operation);
  throw failure;
}

void IoQueue::Free(IoOperation* operation) {
  operation->state = IoState::kFree;
  operation->file.reset();
  free_.Push(operation);
}

void IoQueue::Drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  CommitLocked();
  ended_.wait(lock, [&] { return unfinished_ == 0; });
}

}  // namespace sh
