"""The C library's heap, which keeps freed memory for whoever asks next.

Owns nothing. glibc takes tensors of up to 32 MiB from its heap and does not give their pages back
to the system when they are freed: of a model with smaller ones a second copy would stay.
"""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give the pages of freed heap memory back to the system; nothing without glibc. Any thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
