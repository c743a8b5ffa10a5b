"""The names of lanes."""

from __future__ import annotations

from enum import Enum


class LaneName(str, Enum):
    """Which lane of a device. Traces, errors and threads have its value as the lane's name."""

    COMPUTE = "compute"  # forward, backward, and updates on the device
    FETCH = "fetch"  # weights, host to device
    DRAIN = "drain"  # gradients, device to host
    GRADIENTS = "gradients"  # sums, merges and norms of gradients on the host
    UPDATE = "update"  # optimizer steps on the host
    LOAD = "load"  # files to host, ahead of updates
    STAGE = "stage"  # files to host, ahead of fetches
    SPILL = "spill"  # host to files
    IO = "io"  # checkpoints
    GATHER = "gather"  # all-gather of weights between ranks
    REDUCE = "reduce"  # reduce-scatter of gradients between ranks
    EXCHANGE = "exchange"  # updated weights between nodes

    def __str__(self) -> str:
        return self.value


# Lanes for which a GPU has a stream.
STREAM_LANES = (LaneName.FETCH, LaneName.DRAIN, LaneName.GATHER, LaneName.REDUCE)
