"""The compute lane's row of the trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stronghold.devices.base import Device, Fence


class ComputeSpan:
    """Records one span for each use of a layer. At most one span is open.

    A wait inside a span ends it, and begins a further span of the same name after the wait. So the
    row shows compute alone. The thread that calls hooks enters.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open: tuple[str, object] | None = None

    def begin(self, name: object) -> None:
        """Open a span, if a trace is recorded."""
        if self._device.trace.recording:
            self._open = (str(name), self._device.compute.begin_span())

    def end(self) -> None:
        """Close the open span, if there is one."""
        if self._open is not None:
            name, begun = self._open
            self._device.compute.end_span(name, begun)
            self._open = None

    def drop(self) -> None:
        """The pass failed: do not record the open span."""
        self._open = None

    @contextmanager
    def waiting(self, fence: Fence) -> Iterator[None]:
        """Context manager around the compute lane's wait for `fence`."""
        name = self._open[0] if self._open is not None and not fence.done else None
        if name is not None:
            self.end()
        yield
        if name is not None:
            self.begin(name)
