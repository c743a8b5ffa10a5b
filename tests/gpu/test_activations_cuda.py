"""Laws of offloaded activations that need compute that is done later than it is asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.training import config, initialized

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SECTION = {"device": "cuda", "window": 1, "resident_layers": 0, "activations": "offload"}
NUM_BLOCKS = 20
WIDTH = 64
NUM_TOKENS = 1024
SLEEP_CYCLES = 1_000_000_000  # half a second at 2 GHz: the host is through with all blocks by then


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Compute that is far behind the host, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        torch.cuda._sleep(SLEEP_CYCLES)
        for block in self.blocks:
            x = block(x)
        x.register_hook(lambda gradient: torch.cuda._sleep(SLEEP_CYCLES))
        return x.square().mean()


def active_bytes(key: str) -> int:
    """Memory that tensors have, or that was freed and may still be used."""
    return torch.cuda.memory_stats()[f"active_bytes.all.{key}"]


@pytest.mark.usefixtures("warm_products")
def test_offload_bounds_memory_while_compute_is_layers_behind_the_host() -> None:
    """Two layers' activations, as the plan counts them, whatever the host has asked for since."""
    torch.manual_seed(0)
    model = Model()
    engine = initialized(model, config(section=SECTION))
    try:
        sizes = engine._stack.runtime.activations.sizes
        sizes.counting = True
        x = torch.randn(NUM_TOKENS, WIDTH, device="cuda")
        device = engine.inspect().device
        before = active_bytes("current") - device.allocated_bytes
        for _ in range(3):
            peaks = []
            for half in ("forward", "backward"):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                if half == "forward":
                    loss = engine(x)
                else:
                    engine.backward(loss)
                peaks.append(active_bytes("peak") - device.allocated_bytes - before)
            engine.step()
            # Two layers' are kept. Beside them, what a block computes with: in forward what it is
            # about to save, in backward that and the gradients of it.
            saved = max(sizes.saved)
            assert peaks[0] <= 3 * saved + x.nbytes, [peak / saved for peak in peaks]
            assert peaks[1] <= 4 * saved + x.nbytes, [peak / saved for peak in peaks]
    finally:
        engine.destroy()


def test_a_graph_that_is_dropped_while_it_comes_back_leaves_no_memory() -> None:
    """Memory on its way back that nobody will load is given out again after its copy alone."""
    torch.manual_seed(0)
    model = Model()
    engine = initialized(model, config(section=SECTION))
    try:
        activations = engine._stack.runtime.activations
        x = torch.randn(NUM_TOKENS, WIDTH, device="cuda")
        for _ in range(3):
            loss = engine(x)
            activations.prefetch(engine.inspect().layout.streamed[-1])
            assert activations._coming
            del loss
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        assert not activations._coming
        pinned = activations.host_bytes
        for _ in range(2):
            engine.backward(engine(x))
            engine.step()
        assert activations.host_bytes == pinned
    finally:
        engine.destroy()
