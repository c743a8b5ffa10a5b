// Errors on their way to the C border: an exception inside, a status and a message outside.
#ifndef STRONGHOLD_STATUS_H_
#define STRONGHOLD_STATUS_H_

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

#include "stronghold.h"

namespace sh {

// An argument breaks the contract.
class Invalid : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

inline void Require(bool holds, const char* message) {
  if (!holds) throw Invalid(message);
}

// For a check in a list: the message is built only when it fails.
inline void RequireAt(bool holds, int64_t index, const char* message) {
  if (!holds) throw Invalid("segment " + std::to_string(index) + ": " + message);
}

void SetLastError(const char* message) noexcept;

// Runs body(); what it throws becomes a status and sh_last_error().
template <class Body>
int32_t Guarded(const Body& body) noexcept {
  try {
    body();
    return SH_OK;
  } catch (const Invalid& error) {
    SetLastError(error.what());
    return SH_INVALID;
  } catch (const std::exception& error) {
    SetLastError(error.what());
    return SH_SYSTEM;
  }
}

}  // namespace sh

#endif  // STRONGHOLD_STATUS_H_
