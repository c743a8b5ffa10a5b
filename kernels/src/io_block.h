// One block of an operation on its way, and what the result of a request for it means. The engines
// issue blocks and feed results back; this is the only place where results are judged.
#ifndef STRONGHOLD_IO_BLOCK_H_
#define STRONGHOLD_IO_BLOCK_H_

#include <cstdint>

namespace sh {

struct IoOperation;

enum class IoKind : uint8_t { kRead, kWrite };

struct IoBlock {
  IoOperation* operation;
  IoKind kind;
  bool direct;  // the rest of a short transfer must start at an aligned offset
  int fd;
  char* address;  // address, offset and nbytes are of what is left to transfer
  int64_t offset;
  int64_t nbytes;
  int stalls;  // results in a row that brought nothing forward
  int error;   // 0, or the errno that ended the block
};

// Takes the result of a request, bytes or -errno. True: the block has ended, well (error == 0) or
// badly. False: issue a request for what is left.
bool IoAdvance(IoBlock* block, int64_t result) noexcept;

}  // namespace sh

#endif  // STRONGHOLD_IO_BLOCK_H_
