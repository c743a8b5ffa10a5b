"""A device's memory: buffers under a budget, and what the device counts of other tensors.

Owns the count of the bytes of buffers. The object that allocates a buffer releases it. The training
thread enters, and autograd's thread in backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from stronghold.errors import BudgetError, ErrorPage, format_size


class DeviceMemory(ABC):
    """The memory of one device.

    `budget_bytes` limits the bytes of live buffers; None: the device's memory is the limit. A
    device that does not count tensors returns None or 0 from the methods that count them.
    `peak_bytes` are the most bytes of buffers at once.
    """

    def __init__(self, name: str, budget_bytes: int | None) -> None:
        self._name = name
        self.budget_bytes = budget_bytes
        self.allocated_bytes = 0
        self.peak_bytes = 0

    # -- buffers ----------------------------------------------------------------------------------
    def allocate(self, numel: int, dtype: torch.dtype, purpose: str) -> torch.Tensor:
        """Return a flat buffer of `numel` elements on the device, with undefined contents.

        `purpose` names the buffer in errors. Raises BudgetError if it would pass the budget.
        """
        nbytes = numel * dtype.itemsize
        if self.budget_bytes is not None and self.allocated_bytes + nbytes > self.budget_bytes:
            raise BudgetError(
                f"{purpose}: {format_size(nbytes)} on {self._name} would pass the budget of "
                f"{format_size(self.budget_bytes)} ({format_size(self.allocated_bytes)} in use); "
                "raise stronghold.gpu_memory or lower stronghold.window",
                page=ErrorPage.GPU_MEMORY,
            )
        buffer = self._allocate(numel, dtype)
        self.allocated_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return buffer

    def allocate_zeros(self, nbytes: int, purpose: str) -> torch.Tensor:
        """Return a flat buffer of `nbytes` zero bytes, as `allocate`.

        Waits until the zeros are written. Without the wait there is a race: a copy on another
        stream writes the buffer, and the zeros of the caller's stream overwrite it afterwards.
        """
        buffer = self.allocate(nbytes, torch.uint8, purpose).zero_()
        self._wait_for_caller()
        return buffer

    @abstractmethod
    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor on the device, with undefined contents."""

    def _wait_for_caller(self) -> None:  # noqa: B027 - a CPU's operators have ended
        """Wait for the operators that the calling thread has launched."""

    def release(self, *buffers: torch.Tensor) -> None:
        """Take buffers of `allocate` out of the count. Their owner is about to drop them."""
        self.allocated_bytes -= sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def has_room(self, nbytes: int, beside_bytes: int) -> bool:
        """Return whether `nbytes` of buffers and `beside_bytes` of other memory are free now.

        A GPU tries to allocate them, since other processes may have taken its memory.
        """
        budget = self.budget_bytes
        return budget is None or self.allocated_bytes + nbytes <= budget

    def poison(self, buffer: torch.Tensor) -> None:  # noqa: B027 - a real one has no time for it
        """Overwrite a freed buffer, so that a later read shows, if the device can afford it."""

    def keep_for_lane(self, tensor: torch.Tensor) -> None:  # noqa: B027 - CPU memory is not reused
        """Keep the tensor's memory from other uses until the calling lane is done with it.

        The lane's work calls it. Without it there is a race: the last owner drops the tensor, the
        allocator gives its memory to another operation, and the lane still reads it.
        """

    # -- tensors ----------------------------------------------------------------------------------
    def free_bytes(self) -> int | None:
        """Return the bytes that are free now, or that buffers of `allocate` have. None: unknown."""
        return None

    def trim(self) -> None:  # noqa: B027 - CPU memory goes back by itself
        """Return memory of dropped tensors, and of earlier launches of kernels, to the system."""

    def restart_process_peak(self) -> None:  # noqa: B027
        """Give unused memory back, and begin the peak of `process_peak_bytes` again."""

    def process_peak_bytes(self) -> int:
        """Return the peak bytes of this process's tensors."""
        return 0
