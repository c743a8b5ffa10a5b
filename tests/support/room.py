"""The room that engines of this test run train on: `pytest --room`."""

from __future__ import annotations

import pytest

from stronghold.config import StrongholdConfig

OFFLOADS = ("stronghold.streaming.activations.offload", "stronghold.train.offload")


def choose(room: str | None) -> None:
    """Let engines of this process train on a room, if their config names none."""
    StrongholdConfig.model_fields["room"].default = room
    StrongholdConfig.model_rebuild(force=True)


def is_next() -> bool:
    """True if engines of one rank train on the room `train`, as by default."""
    return StrongholdConfig().room != "streaming"


def offload_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are offloaded, too, on both rooms."""
    for module in OFFLOADS:
        monkeypatch.setattr(f"{module}.MIN_OFFLOAD_BYTES", 1)
