#include "io_block.h"

#include <cerrno>

#include "stronghold_io.h"

namespace sh {
namespace {

// A request may make no progress now and then. One that never does must not repeat for ever.
constexpr int kMaxStalls = 8;

bool Fail(IoBlock* block, int error) noexcept {
  block->error = error;
  return true;
}

bool Stall(IoBlock* block, int error) noexcept {
  return ++block->stalls < kMaxStalls ? false : Fail(block, error);
}

}  // namespace

bool IoAdvance(IoBlock* block, int64_t result) noexcept {
  if (result == -EINTR) return false;
  if (result == -EAGAIN) return Stall(block, EAGAIN);
  if (result < 0) return Fail(block, static_cast<int>(-result));
  const bool reading = block->kind == IoKind::kRead;
  if (result == 0 && block->nbytes > 0 && reading) return Fail(block, ENODATA);
  if (result > block->nbytes) return Fail(block, EIO);  // no kernel does
  int64_t moved = result;
  // O_DIRECT refuses to continue at an odd offset: bytes past the last aligned one move again.
  if (block->direct && moved < block->nbytes) moved -= moved % SH_IO_ALIGNMENT;
  block->address += moved;
  block->offset += moved;
  block->nbytes -= moved;
  if (block->nbytes == 0) return true;
  if (moved == 0) return Stall(block, reading ? ENODATA : EIO);
  block->stalls = 0;
  return false;
}

}  // namespace sh
