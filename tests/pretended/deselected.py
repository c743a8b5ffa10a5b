"""Laws that only a GPU keeps: a test's function, and what it asks for that is not pretended."""

from __future__ import annotations

ASYNCHRONOUS = "needs asynchronous compute: an operator here waits for its stream"

DESELECTED = {
    "tests/gpu/test_device_cuda.py::test_a_fence_is_issued_before_it_is_done": ASYNCHRONOUS,
}
