"""A device's memory: buffers under a budget, and what the device counts of other tensors.

Owns the count of the bytes of buffers. Whoever allocates a buffer releases it. The training thread
enters, and autograd's in backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from stronghold.errors import BudgetError, format_size


class DeviceMemory(ABC):
    """The memory of one device.

    `budget_bytes` limits the sum of live `allocate` calls; None leaves it to the device. A device
    that does not count tensors returns None, or 0, for what it would have to count.
    """

    def __init__(self, name: str, budget_bytes: int | None) -> None:
        self._name = name
        self.budget_bytes = budget_bytes
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self._earlier_peak_bytes = 0

    # -- buffers ----------------------------------------------------------------------------------
    def allocate(self, numel: int, dtype: torch.dtype, purpose: str) -> torch.Tensor:
        """A flat buffer on the device, contents undefined; BudgetError past the budget."""
        nbytes = numel * dtype.itemsize
        if self.budget_bytes is not None and self.allocated_bytes + nbytes > self.budget_bytes:
            raise BudgetError(
                f"{purpose}: {format_size(nbytes)} on {self._name} would pass the budget of "
                f"{format_size(self.budget_bytes)} ({format_size(self.allocated_bytes)} in use); "
                "raise stronghold.gpu_memory or lower stronghold.window"
            )
        buffer = self._allocate(numel, dtype)
        self.allocated_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return buffer

    @abstractmethod
    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor: ...

    def release(self, *buffers: torch.Tensor) -> None:
        """These buffers of `allocate` are about to be dropped by their owner."""
        self.allocated_bytes -= sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def peak_with(self, beside_bytes: int) -> int:
        """The peak with `beside_bytes` of torch's memory beside it, or an earlier one."""
        return max(self._earlier_peak_bytes, self.peak_bytes + beside_bytes)

    def restart_peak(self, beside_bytes: int) -> None:
        """Another plan begins: what was allocated for the one before does not count with it."""
        self._earlier_peak_bytes = self.peak_with(beside_bytes)
        self.peak_bytes = self.allocated_bytes

    def has_room(self, nbytes: int, beside_bytes: int) -> bool:
        """Whether buffers of `nbytes` can be had now, and `beside_bytes` of other memory beside
        them. A real device tries it, since others may have taken what was free."""
        budget = self.budget_bytes
        return budget is None or self.allocated_bytes + nbytes <= budget

    def poison(self, buffer: torch.Tensor) -> None:  # noqa: B027 - a real one has no time for it
        """Make any later read of a freed buffer visible where the device can afford it."""

    def keep_for_lane(self, tensor: torch.Tensor) -> None:  # noqa: B027 - CPU memory is not reused
        """Called from a lane's work: the allocator may not give the tensor's memory to others
        before the lane is done with it, even if everybody drops the tensor."""

    # -- tensors ----------------------------------------------------------------------------------
    def reachable_bytes(self) -> int | None:
        """Bytes that all tensors of this process can have together as things are now."""
        return None

    def trim(self) -> None:  # noqa: B027 - CPU memory goes back by itself
        """Give the system back what the allocator keeps of tensors that are gone, and what kernels
        keep of earlier launches."""

    def restart_activation_peak(self) -> None:  # noqa: B027
        """Count `activation_peak_bytes` and `fragment_bytes` from now on. Torch keeps one peak for
        the whole program, so that this restarts the program's too: `process_peak_bytes` knows the
        earlier one."""

    def activation_peak_bytes(self) -> int | None:
        """The most bytes that were in use beside `allocate`d buffers, since
        `restart_activation_peak`."""
        return None

    def fragment_bytes(self) -> int:
        """The most that the allocator held since `restart_activation_peak`, beyond what tensors
        needed at most: fragments that are of no use to them."""
        return 0

    def process_peak_bytes(self) -> int:
        """The most bytes that this process's tensors had at once, also before
        `restart_activation_peak`."""
        return 0

    def num_failures(self) -> int:
        """How often this process asked the device for memory and got none."""
        return 0
