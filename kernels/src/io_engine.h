// An engine transfers blocks: by io_uring, or by threads that call pread and pwrite. It owns its
// threads. It takes blocks from the queue and returns them when they have ended.
#ifndef STRONGHOLD_IO_ENGINE_H_
#define STRONGHOLD_IO_ENGINE_H_

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "stronghold_io.h"

namespace sh {

class IoQueue;

class IoEngine {
 public:
  // Joins the threads. Nothing may be unfinished in the queue.
  virtual ~IoEngine() = default;
  virtual const char* name() const = 0;
  virtual bool registered() const { return false; }
  // Wakes the engine: blocks are ready after a Take without one. Any thread, with the queue's
  // mutex.
  virtual void Wake() noexcept = 0;
};

// Throws std::system_error if the kernel refuses io_uring. A refused registration of regions is no
// error: `registration` then takes its errno.
std::unique_ptr<IoEngine> MakeIoUring(IoQueue* queue, int depth, std::vector<sh_io_region> regions,
                                      int* registration);

std::unique_ptr<IoEngine> MakeIoThreads(IoQueue* queue, int depth);

// Starts a thread that takes no signals. The process's other threads run its handlers.
std::thread StartIoThread(void (*body)(void*), void* context);

}  // namespace sh

#endif  // STRONGHOLD_IO_ENGINE_H_
