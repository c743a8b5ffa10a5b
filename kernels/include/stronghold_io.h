/* stronghold's asynchronous file I/O: a queue of reads and writes by file and address.
 *
 * Errors are those of stronghold.h: a status; sh_last_error() for the message, sh_last_errno() for
 * the number. No function throws, prints or keeps globals.
 *
 * [Note: progress]
 * 1. Every queue has threads that issue requests. They continue after short transfers and
 *    interruptions, while no caller waits. They take no signals.
 * 2. With the engine "io_uring" a queue has one thread, the only issuer of its ring.
 * 3. With "threads" it has up to 64 threads that call pread and pwrite.
 *
 * [Note: callers]
 * 1. Any thread may call any function at any time, several at once. No call may begin after
 *    sh_io_destroy has begun.
 * 2. A ticket has one waiter. The first wait that returns forgets the ticket.
 * 3. A queue does not survive fork(). In the child every call fails, except sh_io_destroy, which
 *    leaves everything to the end of the process.
 *
 * [Note: alignment] Offsets, lengths, addresses and sizes of files are multiples of
 * SH_IO_ALIGNMENT, for every file system. O_DIRECT requires it; the other ways have the same rule.
 *
 * [Note: order] Operations may overtake each other, also on the same bytes (a race). The caller
 * waits if order counts.
 */
#ifndef STRONGHOLD_IO_H_
#define STRONGHOLD_IO_H_

#include "stronghold.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SH_IO_ALIGNMENT 4096

typedef struct sh_io sh_io;

/* Host memory to register with the kernel once, instead of pinning its pages in every request. */
typedef struct {
  void* address;
  int64_t nbytes;
} sh_io_region;

/* A queue that keeps up to `depth` (1 to 4096) blocks in flight. Operations larger than
 * `block_bytes` (up to 1 GiB) are split into blocks of that size.
 *
 * `engine` is "io_uring" or "threads". NULL: the environment variable STRONGHOLD_IO_ENGINE. If that
 * is unset or empty: "io_uring", or "threads" if the kernel refuses it (too old, a seccomp filter,
 * a sysctl). It is an error if a named engine is refused.
 *
 * `regions` stay mapped until the queue is destroyed. Requests inside a region take the registered
 * path; all others work as well. If the kernel refuses to register the regions (RLIMIT_MEMLOCK),
 * the queue works without them: see sh_io_registered and sh_io_note. */
SH_API int32_t sh_io_create(int32_t depth, int64_t block_bytes, const char* engine,
                            const sh_io_region* regions, int32_t num_regions, sh_io** out);

/* Commits all operations, waits for them, and closes the files. NULL is allowed. */
SH_API void sh_io_destroy(sh_io* io);

SH_API const char* sh_io_engine(const sh_io* io);

/* 1 if all regions are registered. */
SH_API int32_t sh_io_registered(const sh_io* io);

/* The reason for which io_uring or the registration was refused; "" if neither was. */
SH_API const char* sh_io_note(const sh_io* io);

/* ---- Files ----------------------------------------------------------------------------------- */

typedef enum {
  SH_IO_WRITABLE = 1,    /* for reading and writing; without it for reading alone */
  SH_IO_CREATE = 2,      /* a missing file is made (mode 0600); none is truncated */
  SH_IO_PREALLOCATE = 4, /* `size` bytes are reserved on the disk, so that no write runs out */
  SH_IO_DIRECT = 8       /* past the page cache, if the file system can */
} sh_io_flags;

typedef struct {
  int32_t file;   /* its number in the other calls, never used again after sh_io_close */
  int32_t direct; /* 0: through the page cache, by the flags or the file system */
  int32_t
      preallocated; /* 0: not asked for, or refused: then the file was made `size` long, sparse */
} sh_io_file;

/* Opens a file whose first `size` bytes the operations may touch. It may be shorter: reads past
 * its end fail with ENODATA, writes lengthen it. A failed open may leave a created file behind. */
SH_API int32_t sh_io_open(sh_io* io, const char* path, int32_t flags, int64_t size,
                          sh_io_file* out);

/* Waits for the file's operations, then closes it. Their tickets stay valid. */
SH_API int32_t sh_io_close(sh_io* io, int32_t file);

/* ---- Operations ------------------------------------------------------------------------------ */

/* Submit an operation, and give it a ticket. The memory must stay valid until the operation has
 * ended and, for a write, unchanged. Zero bytes are allowed. sh_io_commit starts the operation, and
 * so does every wait, close and destroy. */
SH_API int32_t sh_io_read(sh_io* io, int32_t file, int64_t offset, void* address, int64_t nbytes,
                          int64_t* ticket);
SH_API int32_t sh_io_write(sh_io* io, int32_t file, int64_t offset, const void* address,
                           int64_t nbytes, int64_t* ticket);

/* Starts all submitted operations. One call for many operations saves wake-ups. */
SH_API int32_t sh_io_commit(sh_io* io);

/* Waits until the operation has ended, and forgets its ticket. SH_SYSTEM if it failed. Then
 * sh_last_errno() is the errno of the failing block with the lowest offset, ENODATA if the file
 * ends too early; sh_last_error() has operation, length, offset and path. After a failed block no
 * further block is issued, and none is in flight any more. `seconds`, unless NULL, takes the time
 * from the first block's issue to the operation's end. */
SH_API int32_t sh_io_wait(sh_io* io, int64_t ticket, double* seconds);

#ifdef __cplusplus
}
#endif

#endif /* STRONGHOLD_IO_H_ */
