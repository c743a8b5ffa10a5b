"""The compute lane's row of the trace: one span for each use of a layer.

Owns the span that is open. A wait inside of it ends it, and what follows is a further span of the
same name: the row shows compute alone. Entered by whoever calls hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stronghold.device.base import Device, Fence


class ComputeSpan:
    """At most one is open."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open: tuple[str, object] | None = None

    def begin(self, name: str) -> None:
        self._open = (name, self._device.begin_compute_span())

    def end(self) -> None:
        """Close the open span, if there is one."""
        if self._open is not None:
            name, begun = self._open
            self._device.end_compute_span(name, begun)
            self._open = None

    def drop(self) -> None:
        """The pass failed: what is open is not recorded."""
        self._open = None

    @contextmanager
    def waiting(self, fence: Fence) -> Iterator[None]:
        """Around the compute lane's wait for `fence`."""
        name = self._open[0] if self._open is not None and not fence.done else None
        if name is not None:
            self.end()
        yield
        if name is not None:
            self.begin(name)
