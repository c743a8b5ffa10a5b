// Errors on their way to the C border: an exception inside, a status and a message outside.
#ifndef STRONGHOLD_STATUS_H_
#define STRONGHOLD_STATUS_H_

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>

#include "stronghold.h"

namespace sh {

// An argument breaks the contract.
class Invalid : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The system refused a request: its errno, and our message with the request and its place.
class Refused : public std::runtime_error {
 public:
  Refused(int number, const std::string& message) : std::runtime_error(message), number_(number) {}
  int number() const { return number_; }

 private:
  int number_;
};

inline void Require(bool holds, const char* message) {
  if (!holds) throw Invalid(message);
}

// A check of one segment. The message is built only if it fails.
inline void RequireAt(bool holds, int64_t index, const char* message) {
  if (!holds) throw Invalid("segment " + std::to_string(index) + ": " + message);
}

void SetLastError(const char* message, int number = 0) noexcept;

// Runs body(). An exception of it becomes a status and sh_last_error().
template <class Body>
int32_t Guarded(const Body& body) noexcept {
  try {
    body();
    return SH_OK;
  } catch (const Invalid& error) {
    SetLastError(error.what());
    return SH_INVALID;
  } catch (const Refused& error) {
    SetLastError(error.what(), error.number());
    return SH_SYSTEM;
  } catch (const std::system_error& error) {
    SetLastError(error.what(), error.code().value());
    return SH_SYSTEM;
  } catch (const std::exception& error) {
    SetLastError(error.what());
    return SH_SYSTEM;
  }
}

}  // namespace sh

#endif  // STRONGHOLD_STATUS_H_
