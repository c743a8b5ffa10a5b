#include "io_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#if defined(__linux__)
#include <linux/magic.h>
#include <sys/vfs.h>
#endif

#include "status.h"
#include "stronghold_io.h"

namespace sh {
namespace {

#if defined(O_DIRECT)
constexpr int kDirect = O_DIRECT;
#else
constexpr int kDirect = 0;
#endif

// True if the page cache is the file system's storage. New kernels accept O_DIRECT and ignore it.
bool LivesInMemory(int fd) {
#if defined(__linux__)
  struct statfs info;
  if (fstatfs(fd, &info) != 0) return false;
  return info.f_type == TMPFS_MAGIC || info.f_type == RAMFS_MAGIC;
#else
  static_cast<void>(fd);
  return false;
#endif
}

bool IsRegular(int fd, int64_t* size) {
  struct stat info;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) return false;
  *size = info.st_size;
  return true;
}

int Reserve(int fd, int64_t size) {
#if defined(__linux__)
  int result;
  do {
    result = fallocate(fd, 0, 0, size);
  } while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
#else
  static_cast<void>(fd);
  static_cast<void>(size);
  return ENOSYS;
#endif
}

}  // namespace

IoFile::IoFile(const char* path, int flags, int64_t size)
    : path_(path), size_(size), writable_((flags & SH_IO_WRITABLE) != 0) {
  try {
    Open(flags);
    if ((flags & SH_IO_PREALLOCATE) != 0 && size > 0) Preallocate();
    if (direct_ && (LivesInMemory(fd_) || !DirectWorks())) {
      if (fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) & ~kDirect) != 0) Refuse("fcntl", errno);
      direct_ = false;
    }
  } catch (...) {
    if (fd_ >= 0) close(fd_);
    throw;
  }
}

IoFile::~IoFile() {
  if (fd_ >= 0) close(fd_);
}

void IoFile::Open(int flags) {
  int mode = O_CLOEXEC | (writable_ ? O_RDWR : O_RDONLY);
  if ((flags & SH_IO_CREATE) != 0) mode |= O_CREAT;
  int direct = (flags & SH_IO_DIRECT) != 0 ? kDirect : 0;
  for (;;) {
    fd_ = open(path_.c_str(), mode | direct, 0600);
    if (fd_ >= 0) break;
    if (errno == EINTR) continue;
    if (errno != EINVAL || direct == 0) Refuse("open", errno);
    direct = 0;  // EINVAL: the file system has no O_DIRECT
  }
  direct_ = direct != 0;
}

void IoFile::Preallocate() {
  const int error = Reserve(fd_, size_);
  preallocated_ = error == 0;
  if (preallocated_) return;
  int64_t length = 0;
  const bool unable = error == EOPNOTSUPP || error == ENOSYS || error == EINVAL ||
                      error == ENODEV || error == ESPIPE;
  if (!unable) Refuse("fallocate", error);
  if (!IsRegular(fd_, &length)) return;
  if (length < size_ && ftruncate(fd_, size_) != 0) Refuse("ftruncate", errno);
}

// Some file systems accept O_DIRECT in open and refuse the requests, or need more than our
// alignment. Reading the first block shows that, if the file has one.
bool IoFile::DirectWorks() const {
  int64_t length = 0;
  if (!IsRegular(fd_, &length) || length < SH_IO_ALIGNMENT) return true;
  alignas(SH_IO_ALIGNMENT) char block[SH_IO_ALIGNMENT];
  return pread(fd_, block, sizeof(block), 0) >= 0 || errno != EINVAL;
}

void IoFile::Close() {
  const int fd = fd_;
  fd_ = -1;
  // Linux has closed the descriptor even if it reports EINTR.
  if (close(fd) != 0 && errno != EINTR) Refuse("close", errno);
}

void IoFile::Refuse(const char* what, int error) const {
  throw Refused(error, std::string(what) + " of " + std::to_string(size_) +
                           " bytes: " + std::generic_category().message(error) + ": " + path_);
}

}  // namespace sh
