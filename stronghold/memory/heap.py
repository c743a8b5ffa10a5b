"""The C library's heap, which keeps freed memory for whoever asks next.

glibc takes tensors of up to 32 MiB from its heap and does not give their pages back to the system
when they are freed: of a model with smaller ones a second copy would stay. Any thread may enter.
"""

from __future__ import annotations

import ctypes

TRIM_BYTES = 256 << 20  # so much may wait in the heap


class FreedMemory:
    """Counts bytes that were freed, and from time to time gives their pages back."""

    def __init__(self) -> None:
        self._waiting_bytes = 0

    def add(self, nbytes: int) -> None:
        """So many more were freed."""
        self._waiting_bytes += nbytes
        if self._waiting_bytes >= TRIM_BYTES:
            self.give_back()

    def give_back(self) -> None:
        """Give the heap's free pages back to the system; nothing without glibc."""
        self._waiting_bytes = 0
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
