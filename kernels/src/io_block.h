// One block of an operation in flight, and the meaning of a request's result. The engines issue
// blocks and pass results on. No other file interprets results.
#ifndef STRONGHOLD_IO_BLOCK_H_
#define STRONGHOLD_IO_BLOCK_H_

#include <cstdint>

namespace sh {

struct IoOperation;

enum class IoKind : uint8_t { kRead, kWrite };

struct IoBlock {
  IoOperation* operation;
  IoKind kind;
  bool direct;  // after a short transfer the next one must start at an aligned offset
  int fd;
  char* address;  // address, offset and nbytes are those of the bytes still to transfer
  int64_t offset;
  int64_t nbytes;
  int stalls;  // results in a row without progress
  int error;   // 0, or the errno that ended the block
};

// Takes the result of a request, bytes or -errno. True: the block has ended, with or without an
// error. False: issue a request for the bytes still to transfer.
bool IoAdvance(IoBlock* block, int64_t result) noexcept;

}  // namespace sh

#endif  // STRONGHOLD_IO_BLOCK_H_
