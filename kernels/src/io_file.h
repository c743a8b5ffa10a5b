// A file of a queue: opens it past the page cache if that works, reserves its bytes, closes it.
#ifndef STRONGHOLD_IO_FILE_H_
#define STRONGHOLD_IO_FILE_H_

#include <cstdint>
#include <string>

namespace sh {

class IoFile {
 public:
  // `flags` are sh_io_flags. Throws Refused with the path.
  IoFile(const char* path, int flags, int64_t size);
  ~IoFile();
  IoFile(const IoFile&) = delete;
  IoFile& operator=(const IoFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }
  bool writable() const { return writable_; }
  bool direct() const { return direct_; }
  bool preallocated() const { return preallocated_; }
  int fd() const { return fd_; }

  // Throws Refused if close(2) reports an error, as network file systems do.
  void Close();

  int64_t unfinished = 0;  // operations, the queue's count under its mutex

 private:
  void Open(int flags);
  void Preallocate();
  bool DirectWorks() const;
  [[noreturn]] void Refuse(const char* what, int error) const;

  const std::string path_;
  const int64_t size_;
  const bool writable_;
  bool direct_ = false;
  bool preallocated_ = false;
  int fd_ = -1;
};

}  // namespace sh

#endif  // STRONGHOLD_IO_FILE_H_
