/* stronghold's asynchronous file I/O: a queue of reads and writes by file and address.
 *
 * Errors as in stronghold.h: a status, sh_last_error() for the words, sh_last_errno() for the
 * number. Nothing is thrown, printed or kept in globals.
 *
 * [Note: progress] Every queue has threads of its own that issue requests, go on after short
 * transfers and interruptions, and need nobody who waits. With the engine "io_uring" it
 * is one thread, the only issuer of its ring; with "threads" up to 64 that call pread and pwrite.
 * They take no signals.
 *
 * [Note: who may call] Any thread may call any function at any time, several at once, except that
 * no call may begin after sh_io_destroy has. A ticket has one waiter: the first wait that returns
 * forgets it. A queue does not survive fork(): in the child every call fails, except
 * sh_io_destroy, which leaves everything to the end of the process.
 *
 * [Note: alignment] Offsets, lengths, addresses and sizes of files are multiples of
 * SH_IO_ALIGNMENT, for every file system: O_DIRECT asks for it, and the others do not hide it.
 *
 * [Note: order] Operations may overtake each other, also on the same bytes; wait where order
 * counts.
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
 * `engine` is "io_uring" or "threads"; NULL takes the environment variable STRONGHOLD_IO_ENGINE,
 * and where that is unset or empty "io_uring", or "threads" where the kernel refuses it (too old,
 * a seccomp filter, a sysctl). A named engine that is refused is an error.
 *
 * `regions` stay mapped until the queue is destroyed. Requests that lie inside one take the
 * registered path; all others work as well. Where the kernel refuses to register them
 * (RLIMIT_MEMLOCK) the queue works without: see sh_io_registered and sh_io_note. */
SH_API int32_t sh_io_create(int32_t depth, int64_t block_bytes, const char* engine,
                            const sh_io_region* regions, int32_t num_regions, sh_io** out);

/* Commits and waits for everything that was submitted, closes the files. NULL is allowed. */
SH_API void sh_io_destroy(sh_io* io);

SH_API const char* sh_io_engine(const sh_io* io);

/* 1 when all regions are registered. */
SH_API int32_t sh_io_registered(const sh_io* io);

/* Why io_uring or the registration of the regions was refused; "" when nothing was. */
SH_API const char* sh_io_note(const sh_io* io);

/* ---- Files ----------------------------------------------------------------------------------- */

typedef enum {
  SH_IO_WRITABLE = 1,    /* for reading and writing; without it for reading alone */
  SH_IO_CREATE = 2,      /* made (mode 0600) where it is missing; never truncated */
  SH_IO_PREALLOCATE = 4, /* `size` bytes are reserved on the disk, so that no write runs out */
  SH_IO_DIRECT = 8       /* past the page cache, where the file system can */
} sh_io_flags;

typedef struct {
  int32_t file;   /* its number in the other calls, never used again after sh_io_close */
  int32_t direct; /* 0: through the page cache, because it was asked for or is all there is */
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

/* Submit an operation and name it. The memory must stay valid and, for a write, unchanged until
 * the operation has ended. Zero bytes are allowed. It is started by sh_io_commit, and by every
 * wait, close and destroy. */
SH_API int32_t sh_io_read(sh_io* io, int32_t file, int64_t offset, void* address, int64_t nbytes,
                          int64_t* ticket);
SH_API int32_t sh_io_write(sh_io* io, int32_t file, int64_t offset, const void* address,
                           int64_t nbytes, int64_t* ticket);

/* Starts what was submitted and not started. One call for many operations saves wake-ups. */
SH_API int32_t sh_io_commit(sh_io* io);

/* Waits until the operation has ended, and forgets it. SH_SYSTEM when it failed: sh_last_errno()
 * is the errno of the failing block with the lowest offset, ENODATA where the file ends too early;
 * sh_last_error() has operation, length, offset and path. Blocks that had not been issued when one
 * failed are left out; nothing is in flight any more. `seconds`, where not NULL, takes the time
 * from its first block's issue to its end. */
SH_API int32_t sh_io_wait(sh_io* io, int64_t ticket, double* seconds);

#ifdef __cplusplus
}
#endif

#endif /* STRONGHOLD_IO_H_ */
