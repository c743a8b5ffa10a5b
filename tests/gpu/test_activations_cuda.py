"""Laws of offloaded activations that need compute that is done later than it is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.saved import saved_bytes
from tests.support.sleeping import sleep_on_stream
from tests.support.training import config, initialized

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SECTION = {"device": "cuda", "window": 1, "resident_layers": 0, "activations": "offload"}
NUM_BLOCKS = 20
HALF = NUM_BLOCKS // 2
WIDTH = 64
NUM_TOKENS = 1024
# half a second at 2 GHz: the host is through with all blocks by then
SLEEP_CYCLES = 1_000_000_000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Compute that is far behind the host, in forward and in backward. Where it is `cut`, no
    gradient comes to the first half of the blocks, whose output is given out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(
        self, x: torch.Tensor, cut: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        x = x * 1.0
        sleep_on_stream(SLEEP_CYCLES)
        for block in self.blocks[:HALF]:
            x = block(x)
        half = x
        if cut:
            x = half.detach()
        for block in self.blocks[HALF:]:
            x = block(x)
        x.register_hook(lambda gradient: sleep_on_stream(SLEEP_CYCLES))
        loss = x.square().mean()
        return (loss, half) if cut else loss


def active_bytes(key: str) -> int:
    """Memory that tensors have, or that was freed and may still be used."""
    return torch.cuda.memory_stats()[f"active_bytes.all.{key}"]


@pytest.mark.usefixtures("warm_products")
def test_offload_bounds_memory_while_compute_is_layers_behind_the_host() -> None:
    """Two layers' activations, as autograd saves them, whatever the host has asked for since."""
    torch.manual_seed(0)
    model = Model()
    x = torch.randn(NUM_TOKENS, WIDTH)
    saved = saved_bytes(Block(), x)
    engine = initialized(model, config(section=SECTION))
    try:
        x = x.cuda()
        device = engine.inspect().device
        before = active_bytes("current") - device.memory.allocated_bytes
        for _ in range(3):
            peaks = []
            for half in ("forward", "backward"):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                if half == "forward":
                    loss = engine(x)
                else:
                    engine.backward(loss)
                peaks.append(active_bytes("peak") - device.memory.allocated_bytes - before)
            engine.step()
            # Two layers' are kept. Beside them, what a block computes with: in forward what it is
            # about to save, in backward that and the gradients of it.
            assert peaks[0] <= 3 * saved + x.nbytes, [peak / saved for peak in peaks]
            assert peaks[1] <= 4 * saved + x.nbytes, [peak / saved for peak in peaks]
    finally:
        engine.destroy()


@pytest.mark.usefixtures("warm_products")
def test_a_graph_that_is_dropped_while_it_comes_back_leaves_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory on its way back that nobody will load is given out again after its copy alone: of the
    block before the one at which backward ends, which an earlier backward went on to."""
    torch.manual_seed(0)
    model = Model()
    engine = initialized(model, config(section=SECTION))
    fetch, onloaded = engine.inspect().device.fetch, list[str]()
    submit = fetch.submit

    def noting(name: str, *work: Any, **declared: Any) -> Any:
        onloaded.append(name)
        return submit(name, *work, **declared)

    monkeypatch.setattr(fetch, "submit", noting)
    last = f"onload {engine.inspect().layout.streamed[HALF - 1]}"
    x = torch.randn(NUM_TOKENS, WIDTH, device="cuda")

    def step(*, cut: bool) -> None:
        found = engine(x, cut=cut)
        loss, half = found if cut else (found, None)
        onloaded.clear()
        engine.backward(loss)
        assert last in onloaded
        del found, loss, half
        engine.step()

    try:
        step(cut=False)
        step(cut=False)
        active, pinned = [], []
        for _ in range(3):
            step(cut=True)
            step(cut=False)
            torch.cuda.synchronize()
            active.append(active_bytes("current"))
            pinned.append(engine.memory_report().host_activations)
        assert active == active[:1] * 3
        assert pinned == pinned[:1] * 3
    finally:
        engine.destroy()
