"""Lightning's DeepSpeed strategy on a CPU: its two checks of the GPU are left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from lightning.pytorch import strategies
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies import deepspeed as source


class OnCPU(DeepSpeedStrategy):  # type: ignore[misc]
    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def lightning_on_cpu() -> Iterator[None]:
    """Who imports the strategy gets `OnCPU`."""
    with (
        patch.object(source, "_validate_device_index_selection", lambda *_: None),
        patch.object(strategies, "DeepSpeedStrategy", OnCPU),
    ):
        yield
