// What transfers blocks: io_uring, or threads that call pread and pwrite. An engine owns its
// threads; it takes blocks from the queue and gives them back ended.
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
  // Blocks are ready in a queue whose Take had found none. Any thread, the queue's mutex held.
  virtual void Wake() noexcept = 0;
};

// Throws std::system_error where the kernel refuses io_uring. A refused registration of regions is
// not an error: `registration` then takes its errno.
std::unique_ptr<IoEngine> MakeIoUring(IoQueue* queue, int depth, std::vector<sh_io_region> regions,
                                      int* registration);

std::unique_ptr<IoEngine> MakeIoThreads(IoQueue* queue, int depth);

// A thread that takes no signals: handlers are the business of the process's own threads.
std::thread StartIoThread(void (*body)(void*), void* context);

}  // namespace sh

#endif  // STRONGHOLD_IO_ENGINE_H_
