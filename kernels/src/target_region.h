// Begin of every target_*.cpp: the headers and the macros of a target region.
//
// All headers of the kernels come before the region. A standard header inside a region would leave
// code for the wrong CPU in functions that the linker may share.
#pragma once

#include "targets.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define SH_INLINE inline __attribute__((always_inline))

#define SH_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define SH_TARGET_BEGIN(isa) \
  SH_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define SH_TARGET_END SH_PRAGMA(clang attribute pop)
#else
#define SH_TARGET_BEGIN(isa) SH_PRAGMA(GCC push_options) SH_PRAGMA(GCC target(isa))
#define SH_TARGET_END SH_PRAGMA(GCC pop_options)
#endif
