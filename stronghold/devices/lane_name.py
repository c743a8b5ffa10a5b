"""The names of lanes."""

from __future__ import annotations

from enum import Enum

THREAD_PREFIX = "stronghold:"  # of the name of a device's threads


class LaneName(str, Enum):
    """The lane of a device. Traces, errors and names of threads have its value."""

    COMPUTE = "compute"  # forward, backward, and updates on the device
    FETCH = "fetch"  # weights, host to device (prefetch, unshard)
    OFFLOAD = "offload"  # gradients, device to host
    GRADIENTS = "gradients"  # sums, merges and norms of gradients on the host
    UPDATE = "update"  # optimizer steps on the host
    LOAD = "load"  # files to host, ahead of updates (swap in)
    STAGE = "stage"  # files to host, ahead of fetches (swap in)
    SPILL = "spill"  # host to files (swap out)
    IO = "io"  # checkpoints
    REDUCE = "reduce"  # gradients between ranks
    EXCHANGE = "exchange"  # updated weights between nodes

    def __str__(self) -> str:
        return self.value


# The lanes for which a GPU has a stream.
STREAM_LANES = (LaneName.FETCH, LaneName.OFFLOAD, LaneName.REDUCE)
