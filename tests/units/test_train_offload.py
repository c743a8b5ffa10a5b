"""Activations that wait on the host: what goes there, when its memory is free, and when it is back.
`tests/laws/test_core.py` has the bits of every level."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stronghold.devices.device import ThreadLane
from stronghold.devices.emulated import EmulatedDevice
from stronghold.errors import BudgetError
from stronghold.plan.cost import AWAY
from stronghold.train import offload
from tests.models import HIDDEN, Block, Decoder, loss_of, token_batch
from tests.support.core import Core, train_core
from tests.support.insides import offload_small
from tests.support.training import assert_identical, train_plain

LEVELS = sorted(AWAY)
NUM_BLOCKS = 4
Operation = tuple[str, int]  # "offload" or "onload", and the index of the layer


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    offload_small(monkeypatch)


def deep(block: type[nn.Module] = Block) -> Decoder:
    torch.manual_seed(0)
    return Decoder([block() for _ in range(NUM_BLOCKS)])


@contextmanager
def training(level: Any, model: nn.Module | None = None, **settings: Any) -> Iterator[Core]:
    settings = {"window": 1, "device": partial(EmulatedDevice, jitter_s=0.0002, seed=1)} | settings
    core = Core(model or deep(), activations=level, **settings)
    try:
        yield core
    finally:
        core.close()


def forward(core: Core, number: int = 0) -> Tensor:
    return loss_of(core.trainer.forward(**token_batch(number)))


def step(core: Core, number: int = 0) -> None:
    core.trainer.backward(forward(core, number))
    core.trainer.step(clipping=1.0)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """The operations of the two lanes from now on, in their order."""
    submit, found = ThreadLane.submit, []

    def noted(lane: ThreadLane, name: str, *args: Any, **kwargs: Any) -> Any:
        verb, _, index = name.partition(" ")
        if verb in ("offload", "onload"):
            found.append((verb, int(index)))
        return submit(lane, name, *args, **kwargs)

    monkeypatch.setattr(ThreadLane, "submit", noted)
    return found


# -- what goes -------------------------------------------------------------------------------------
def num_saved(block: nn.Module) -> int:
    """Storages that autograd saves of a block, without those of its parameters."""
    owned = {parameter.data_ptr() for parameter in block.parameters()}
    saved = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(torch.randn(2, 8, HIDDEN, requires_grad=True))
    del output
    return len(saved)


RESULTS = 2  # of torch's fused attention: the output, and the logarithms of sums


@pytest.mark.parametrize("updates", ["host", "gpu"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_storage_goes_once_and_comes_once(
    level: str, updates: str, moved: list[Operation]
) -> None:
    """With `offload` each storage, however many tensors view it. Else the input, and what the
    kernel of attention returns. No weight goes."""
    number = {
        "offload": num_saved(Block()),
        "attention_offload": 1 + RESULTS,
        "recompute_offload": 1,
    }[level]
    model = deep()
    with training(level, model, resident_layers=2, resident_updates=updates) as core:
        loss = forward(core)
        blocks = [layer.index for layer in core.layers if layer.is_block]
        assert moved == [("offload", index) for index in blocks for _ in range(number)]
        moved.clear()
        core.trainer.backward(loss)
        came = [index for verb, index in moved if verb == "onload"]
        assert came == [index for index in reversed(blocks) for _ in range(number)]


class Crossing(Block):
    """Its other argument, with a graph of its own, is the one of every block."""

    def forward(self, mask: Tensor, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * mask + other)


class Crossed(Decoder):
    def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
        other, mask = x * 0.5, torch.ones(1)
        for block in self.blocks:
            x = block(mask, x, other=other)
        return x


def crossed() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Crossed([Crossing() for _ in range(NUM_BLOCKS)]), token_batch


def test_of_several_inputs_the_first_with_a_graph_goes(moved: list[Operation]) -> None:
    with training("recompute_offload", crossed()[0]) as core:
        loss = forward(core)
        assert len(moved) == NUM_BLOCKS
        stored = [one() for call in core.trainer.offload._calls for one in call.storages]
        hidden_bytes = 4 * HIDDEN * token_batch(0)["input_ids"].numel()
        assert [one.host.nbytes for one in stored if one] == [hidden_bytes] * NUM_BLOCKS
        del loss


@pytest.mark.parametrize("level", LEVELS)
def test_inputs_that_blocks_share_change_no_bit(level: str) -> None:
    run = train_core(crossed, steps=3, activations=level, window=1)
    assert_identical(run, train_plain(crossed, steps=3))


LARGE = offload.MIN_OFFLOAD_BYTES // 4


@pytest.mark.parametrize(
    ("tensor", "goes"),
    [
        (torch.zeros(LARGE), True),
        (torch.zeros(LARGE - 1), False),
        (torch.zeros(LARGE, device="meta"), False),
        (torch.zeros(4 * LARGE)[:LARGE], True),
        (torch.zeros(4 * LARGE + 1)[:LARGE], False),
        (torch.zeros(2, LARGE).t(), True),
        (torch.zeros(LARGE).to_sparse(), False),
        (torch.zeros(LARGE, dtype=torch.complex64), True),
        (torch.zeros(LARGE, dtype=torch.complex64).conj(), False),
        (torch.zeros(LARGE, dtype=torch.complex64).conj().imag, False),
        (nn.Parameter(torch.zeros(LARGE)), False),
    ],
)
def test_a_tensor_goes_if_that_frees_enough(
    tensor: Tensor, goes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "MIN_OFFLOAD_BYTES", 4 * LARGE)
    with training("keep") as core:
        assert core.trainer.offload._is_worth_it(tensor) == goes


class Reentrant(Decoder):
    """The program's own checkpoint runs a block without a graph first."""

    def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def test_nothing_goes_in_backward() -> None:
    model = Reentrant([Block() for _ in range(NUM_BLOCKS)])
    with training("offload", model) as core:
        step(core)
        assert core.trainer.offload.host_bytes == 0


def test_nothing_goes_without_a_graph(moved: list[Operation]) -> None:
    with training("offload") as core, torch.no_grad():
        core.trainer.forward(**token_batch(0))
        assert not moved


@pytest.mark.parametrize("level", LEVELS)
def test_the_programs_own_hooks_decide(level: str, moved: list[Operation]) -> None:
    norms = []
    for number in range(2):
        with training(level) as core:
            if number:
                with save_on_cpu():
                    loss = forward(core)
                assert not moved
            else:
                loss = forward(core)
            core.trainer.backward(loss)
            norms.append(core.trainer.gradients.norm()())
        moved.clear()
    assert norms[0] == norms[1]


# -- memory of the device --------------------------------------------------------------------------
class Wide(nn.Module):
    """Autograd saves `hidden`, which the test follows. In backward it notes the layers of whose
    calls something is on the device, or on its way there."""

    alive: list[weakref.ref[torch.UntypedStorage]]
    loaded: list[weakref.ref[offload.Loaded]]
    in_backward: list[list[int]]

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        Wide.alive.append(weakref.ref(hidden.untyped_storage()))
        hidden.register_hook(self.note)
        return x + self.down(hidden)

    def note(self, _: Tensor) -> None:
        stored = (one.owner() for one in (one() for one in Wide.loaded) if one is not None)
        Wide.in_backward.append(sorted({one.call.layer.index for one in stored if one is not None}))


class Watched(Decoder):
    """It counts what is on the device when a block begins, and at the end."""

    def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
        self.in_forward: list[int] = []
        for block in self.blocks:
            self.in_forward.append(sum(storage() is not None for storage in Wide.alive))
            x = block(x)
        self.in_forward.append(sum(storage() is not None for storage in Wide.alive))
        return x


def levels_of(num_away: int) -> tuple[str, ...]:
    """The first blocks offload, the others keep."""
    with training("keep") as core:
        blocks = [layer.index for layer in core.layers if layer.is_block]
        return tuple("offload" if x.index in blocks[:num_away] else "keep" for x in core.layers)


@pytest.mark.parametrize("num_away", [NUM_BLOCKS, NUM_BLOCKS - 1])
def test_two_calls_at_most_are_on_the_device(
    num_away: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In forward the one that runs, and the one before. After the last one that offloads none: what
    follows keeps its own. In backward the one that runs, and the one that comes next."""
    torch.manual_seed(0)
    model = Watched([Wide() for _ in range(NUM_BLOCKS)])

    class Noted(offload.Loaded):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            Wide.loaded.append(weakref.ref(self))

    monkeypatch.setattr(offload, "Loaded", Noted)
    # A lane's thread would hold the source of its last copy a little longer.
    at_once = partial(EmulatedDevice, poison=False)
    with training(levels_of(num_away), model, device=at_once) as core:
        for number in range(2):
            Wide.alive, Wide.loaded, Wide.in_backward = [], [], []
            loss = forward(core, number)
            num_kept = NUM_BLOCKS - num_away
            assert model.in_forward == [0, *[1] * (num_away - 1), *range(num_kept + 1)]
            core.trainer.backward(loss)
            core.trainer.step()
            away = [layer.index for layer in core.layers if layer.level == "offload"]
            expected = [[away[-1]]] * num_kept
            expected += [away[max(0, k - 1) : k + 1] for k in reversed(range(num_away))]
            assert Wide.in_backward == expected


def test_no_source_is_dropped_before_its_copy_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    drop, ended = offload.Call.drop_sources, []

    def noted(call: offload.Call) -> None:
        ended.extend(one.saved is not None and one.saved.done for one in call.sources.values())
        drop(call)

    monkeypatch.setattr(offload.Call, "drop_sources", noted)
    with training("offload") as core:
        forward(core)
    assert len(ended) >= NUM_BLOCKS
    assert all(ended)


def test_memory_of_a_dead_graph_is_kept_until_its_load_has_ended() -> None:
    with training("offload") as core:
        for _ in range(2):
            out = forward(core)
            gradient = torch.autograd.grad(out, core.trainer.model.head.weight)  # type: ignore
            assert gradient
            waiting = core.trainer.offload
            assert waiting._coming  # of the last block, which backward has not reached
            del out, gradient
            assert all(loaded.owner() is None for loaded in waiting._coming)
            step(core)
            assert not waiting._coming
            assert len(waiting._calls) <= NUM_BLOCKS


def test_an_interrupted_call_keeps_nothing_on_the_device() -> None:
    with training("offload") as core:
        block = next(layer for layer in core.layers if layer.is_block)
        call = core.trainer.offload.call(block, is_last=False)
        keep = call.__enter__()
        keep(torch.zeros(8))
        core.trainer.forget()  # and the call never ends
        assert not core.trainer.offload._leaving
        step(core)
        assert not core.trainer.offload._leaving


class Outer(Block):
    """It calls another block within its forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner[0](torch.tanh(x))) * torch.tanh(x)


class Nested(Decoder):
    def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
        for block in self.blocks[::2]:
            x = block(x)
        return x


def nested() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    inner = [Block() for _ in range(2)]
    return Nested([block for one in inner for block in (Outer(one), one)]), token_batch


@pytest.mark.parametrize("level", LEVELS)
def test_a_block_within_a_block_changes_no_bit_and_leaves_nothing(level: str) -> None:
    settings = {"layers": "blocks", "window": 2}
    with training(level, nested()[0], **settings) as core:
        forward(core).backward()
        assert not any(call.sources for call in core.trainer.offload._calls)
    run = train_core(nested, steps=3, activations=level, **settings)
    assert_identical(run, train_plain(nested, steps=3))


class Scaled(Block):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * scale)


class Scaling(Block):
    """It calls another block with a weight of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]
        self.scale = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner[0](x, self.scale))


def scaled() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    inner = [Scaled() for _ in range(2)]
    return Nested([block for one in inner for block in (Scaling(one), one)]), token_batch


@pytest.mark.parametrize("outer", ["keep", *LEVELS])
@pytest.mark.parametrize("level", LEVELS)
def test_a_block_may_get_a_weight_of_the_block_around_it(level: str, outer: str) -> None:
    settings = {"layers": "blocks", "window": 3}
    with training("keep", scaled()[0], **settings) as core:
        blocks = [layer.index for layer in core.layers if layer.is_block]
        of_block = dict(zip(blocks, [outer, level] * 2, strict=True))
        levels = tuple(of_block.get(layer.index, "keep") for layer in core.layers)
    run = train_core(scaled, steps=3, activations=levels, **settings)
    assert_identical(run, train_plain(scaled, steps=3))


# -- memory of the host ----------------------------------------------------------------------------
@pytest.mark.parametrize("level", LEVELS)
def test_host_memory_is_used_again(level: str) -> None:
    with training(level) as core:
        step(core)
        nbytes = core.trainer.offload.host_bytes
        assert nbytes > 0
        for number in range(3):
            forward(core)  # a graph that nobody needs
            step(core, number)
        assert core.trainer.offload.host_bytes == nbytes


def test_copies_are_in_order(moved: list[Operation], monkeypatch: pytest.MonkeyPatch) -> None:
    """A load waits for the copy to the host. A copy to the host waits for the newest load, which
    may read the same memory for a graph that has died."""
    submit, orders = ThreadLane.submit, []

    def noted(lane: ThreadLane, name: str, work: Any, after: Any = (), **kwargs: Any) -> Any:
        fence = submit(lane, name, work, after, **kwargs)
        orders.append((name.partition(" ")[0], {waited.operation for waited in after}))
        return fence

    monkeypatch.setattr(ThreadLane, "submit", noted)
    with training("recompute_offload") as core:
        out = forward(core)
        torch.autograd.grad(out, core.trainer.model.head.weight)  # type: ignore[arg-type]
        last = max(layer.index for layer in core.layers if layer.is_block)
        assert [waits for verb, waits in orders if verb == "onload"] == [
            {f"offload {last}", f"room for activation {last}"}
        ]
        orders.clear()
        forward(core)
        stored = [waits for verb, waits in orders if verb == "offload"]
        assert len(stored) == NUM_BLOCKS
        assert all(f"onload {last}" in waits for waits in stored)


def test_a_host_without_room_is_said() -> None:
    with training("offload") as core:
        core.trainer.offload._pool._room_bytes = 1 << 14
        with pytest.raises(BudgetError, match="offloaded activations need"):
            forward(core)


# -- graphs ----------------------------------------------------------------------------------------
def norm(level: str, program: Any) -> float:
    with training(level) as core:
        program(core)
        found: float = core.trainer.gradients.norm()()
        return found


def twice(core: Core) -> None:
    loss = forward(core)
    core.trainer.backward(loss, ends_step=False, retain_graph=True)
    core.trainer.backward(loss)


def oldest_first(core: Core) -> None:
    losses = [forward(core, number) for number in range(2)]
    core.trainer.backward(losses[0], ends_step=False)
    core.trainer.backward(losses[1])


def newest_first(core: Core) -> None:
    losses = [forward(core, number) for number in range(2)]
    core.trainer.backward(losses[1], ends_step=False)
    core.trainer.backward(losses[0])


def one_of_two(core: Core) -> None:
    loss, _ = forward(core, 0), forward(core, 1)
    core.trainer.backward(loss)


def after_an_error(core: Core) -> None:
    block: Any = core.trainer.model.blocks[2]  # type: ignore[index]
    handle = block.mlp.register_forward_hook(raises)
    with pytest.raises(ZeroDivisionError):
        forward(core)
    handle.remove()
    core.trainer.backward(forward(core))
    assert not core.trainer.offload._leaving


def raises(*_: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("program", [twice, oldest_first, newest_first, one_of_two, after_an_error])
def test_graphs_are_exact_in_any_order(level: str, program: Any) -> None:
    assert norm(level, program) == norm("keep", program) > 0.0


# -- what is written -------------------------------------------------------------------------------
class Writes(Block):
    """It writes a tensor after autograd has saved it."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(super().forward(x))
        y = hidden * 2.0
        hidden.add_(1.0)
        return y


class Inner(Block):
    """It has a backward within its forward, perhaps after it has written a tensor of that."""

    writes = False

    def forward(self, x: Tensor) -> Tensor:
        own = x.detach().requires_grad_()
        hidden = torch.tanh(own)
        y = hidden.square()
        if self.writes:
            hidden.add_(1.0)
        (gradient,) = torch.autograd.grad(y.sum(), own)
        return super().forward(x + gradient)


def inner() -> tuple[nn.Module, Any]:
    return deep(Inner), token_batch


def test_a_backward_within_a_block_changes_no_bit() -> None:
    run = train_core(inner, steps=2, activations="offload", window=1)
    assert_identical(run, train_plain(inner, steps=2))


def test_a_write_before_a_backward_within_a_block_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Inner, "writes", True)
    with (
        training("offload", inner()[0]) as core,
        pytest.raises(RuntimeError, match="modified in place after it was saved"),
    ):
        forward(core)


class WritesInput(Block):
    """It writes its argument, which the block before has saved."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x.add_(1.0)))


@pytest.mark.parametrize("block", [Writes, WritesInput])
def test_a_tensor_that_is_written_after_it_was_saved_is_refused(block: type[nn.Module]) -> None:
    with training("offload", deep(block)) as core:
        loss = forward(core)
        with pytest.raises(RuntimeError, match="modified in place after it was saved"):
            core.trainer.backward(loss)


class WritesBetween(Decoder):
    def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.silu(block(x)).add(x).add_(1.0)
            held = x
            x = block(x)
            held.detach().mul_(2.0)
        return x


def test_an_input_that_is_written_after_the_call_is_refused() -> None:
    """That of the last block has left by then, and is the one that was saved."""
    torch.manual_seed(0)
    model = WritesBetween([Block() for _ in range(NUM_BLOCKS)])
    with training("recompute_offload", model) as core:
        loss = forward(core)
        with pytest.raises(RuntimeError, match=r"blocks\.2: .*an argument was written in place"):
            core.trainer.backward(loss)


class WritesLater(Block):
    """It saves a tensor, saves it again after it has written it, and needs the second one."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x).detach()
        with torch.enable_grad():
            unused = self.norm1(x) * hidden
        hidden.mul_(2.0)
        return x + self.norm1(x) * hidden + 0.0 * unused.detach()


def written_later() -> tuple[nn.Module, Any]:
    return deep(WritesLater), token_batch


def test_each_version_of_a_tensor_goes_by_itself() -> None:
    run = train_core(written_later, steps=2, activations="offload", window=1)
    assert_identical(run, train_plain(written_later, steps=2))
