"""Laws of slots and residency."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stronghold.devices.base import Fence, completed
from stronghold.devices.emulated import EmulatedDevice
from stronghold.devices.lane_name import LaneName
from stronghold.errors import StateError
from stronghold.memory.gradient_slots import gradient_view, round_sums, sum_view
from stronghold.memory.layer import TRANSITIONS, LayerState, Residency
from stronghold.memory.window import Window
from stronghold.model.layout import ParameterShape, Shards, layer_layout
from tests.support.states import adam_formats

# Layer 0 is no block (an embedding), 1 to 4 are blocks of unlike sizes, 4 is frozen.
NUMEL = (4096, 2048, 6144, 2048, 4096)
TRAINABLE = (2048, 2048, 4096, 2048, 0)
LAYERS = tuple(
    layer_layout(
        [
            ParameterShape(name=f"p{trains}", shape=(size,), trainable=trains)
            for size, trains in ((trainable, True), (numel - trainable, False))
            if size
        ],
        index=index,
        name=f"layer{index}",
        streamed=index > 0,
    )
    for index, (numel, trainable) in enumerate(zip(NUMEL, TRAINABLE, strict=True))
)
EMBEDDING = 0
Layers = list[LayerState]
Make = Callable[..., Window]


@pytest.fixture
def layers() -> Layers:
    return [
        LayerState(
            layout=layer,
            weights=torch.empty(0, dtype=torch.bfloat16),
            formats=adam_formats(torch.bfloat16),
            shards=Shards(),
        )
        for layer in LAYERS
    ]


@pytest.fixture
def make_window(device: EmulatedDevice, layers: Layers) -> Make:
    def make(
        num_slots: int = 2,
        num_gradient_slots: int = 2,
        resident: frozenset[int] = frozenset({EMBEDDING}),
    ) -> Window:
        return Window(
            device,
            layers,
            resident=resident,
            num_slots=num_slots,
            num_gradient_slots=num_gradient_slots,
            own_gradients=frozenset({EMBEDDING}),
        )

    return make


def fence(name: str) -> Fence:
    return completed(LaneName.COMPUTE, name)


def take(window: Window, state: LayerState, *, resident: bool = True) -> None:
    """Fetch the layer into the slot that is next."""
    slot = window.free_slot()
    window.claim(slot, state.index)
    slot.record.write(completed(LaneName.FETCH, f"fetch {state.index}"))
    if resident:
        state.move(Residency.READY)


# -- residency ---------------------------------------------------------------------------------
@pytest.mark.parametrize("begin", Residency)
@pytest.mark.parametrize("end", Residency)
def test_a_layer_moves_only_along_the_table(
    make_window: Make, begin: Residency, end: Residency, layers: Layers
) -> None:
    make_window()
    layers[1].on_gpu.residency = begin
    if end in TRANSITIONS[begin]:
        layers[1].move(end)
        assert layers[1].on_gpu.residency is end
    else:
        with pytest.raises(
            StateError, match=f"layer 1 cannot go from {begin.value} to {end.value}"
        ):
            layers[1].move(end)
        assert layers[1].on_gpu.residency is begin


def test_the_table_is_this_one() -> None:
    away, fetching, ready = Residency.AWAY, Residency.FETCHING, Residency.READY
    assert {begin: set(ends) for begin, ends in TRANSITIONS.items()} == {
        away: {fetching},
        fetching: {ready, away},
        ready: {away, fetching},
    }


# -- weight slots ------------------------------------------------------------------------------
def test_a_window_takes_its_slots_and_not_a_byte_more(
    make_window: Make, device: EmulatedDevice
) -> None:
    window = make_window(num_slots=3, num_gradient_slots=2)
    slots = 3 * max(NUMEL[1:]) + NUMEL[EMBEDDING]
    assert device.memory.allocated_bytes == 2 * slots
    window.prepare_training()
    gradients = 2 * max(TRAINABLE[1:]) + TRAINABLE[EMBEDDING]
    assert device.memory.allocated_bytes == device.memory.peak_bytes == 2 * (slots + gradients)
    window.prepare_training()
    assert device.memory.allocated_bytes == 2 * (slots + gradients)


def test_without_streamed_layers_there_are_no_slots(make_window: Make) -> None:
    window = make_window(num_slots=3, resident=frozenset(range(5)))
    assert window.free_slot() is None
    assert window.held_layers() == []


def test_a_layer_holds_its_slot_from_claim_to_release(make_window: Make, layers: Layers) -> None:
    window = make_window(num_slots=2)
    slot = window.free_slot()
    assert layers[1].on_gpu.slot is None
    window.claim(slot, 1)
    assert layers[1].on_gpu.slot is slot
    assert layers[1].on_gpu.residency is Residency.FETCHING
    assert window.held_layers() == [1]
    layers[1].move(Residency.READY)
    take(window, layers[2])
    assert window.free_slot() is None
    used = fence("release 1")
    window.release(1, used)
    assert layers[1].on_gpu.slot is None
    assert layers[1].on_gpu.residency is Residency.AWAY
    assert window.free_slot() is slot
    assert used in slot.record.users
    assert window.held_layers() == [2]


def test_the_slot_freed_last_is_taken_last(make_window: Make, layers: Layers) -> None:
    """Its compute may still run; the others' is longer ago."""
    window = make_window(num_slots=3)
    for layer in (1, 2, 3):
        take(window, layers[layer])
    slots = {layer: layers[layer].on_gpu.slot for layer in (1, 2, 3)}
    for layer in (2, 1, 3):
        window.release(layer, fence(f"release {layer}"))
    order = []
    for layer in (4, 3, 1):
        order.append(window.free_slot())
        take(window, layers[layer])
    assert order == [slots[2], slots[1], slots[3]]


def test_a_released_slot_is_poisoned(make_window: Make, layers: Layers) -> None:
    window = make_window()
    take(window, layers[1])
    slot = layers[1].on_gpu.slot
    slot.weights.zero_()
    window.release(1, fence("release 1"))
    assert slot.weights.view(torch.bfloat16).isnan().all()


def test_an_unused_prefetch_makes_the_next_fetch_wait_for_it(
    make_window: Make, layers: Layers
) -> None:
    """Its copy may still write the slot: poison now would be overwritten, and so would weights."""
    window = make_window()
    take(window, layers[1], resident=False)
    slot = layers[1].on_gpu.slot
    slot.weights.zero_()
    ready = slot.record.writer
    window.release(1, fence("release 1"))
    assert slot.record.users == (ready,)
    assert not slot.weights.view(torch.bfloat16).isnan().any()
    assert layers[1].on_gpu.residency is Residency.AWAY
    # Claimed, but its fetch was never submitted.
    window.claim(slot, 2)
    window.release(2, fence("release 2"))
    assert slot.record.users == (ready,)


def test_misuse_of_slots_is_a_state_error_that_changes_nothing(
    make_window: Make, layers: Layers
) -> None:
    window = make_window(num_slots=2)
    take(window, layers[1])
    slot, own, free = (layers[1].on_gpu.slot, layers[EMBEDDING].on_gpu.slot, window.free_slot())
    misuses: list[Callable[[], object]] = [
        lambda: window.claim(slot, 2),  # taken
        lambda: window.claim(own, 2),  # a resident layer's
        lambda: window.claim(free, EMBEDDING),  # a resident layer has its own
        lambda: window.release(EMBEDDING, fence("x")),
        lambda: window.release(2, fence("x")),  # holds none
    ]
    for misuse in misuses:
        with pytest.raises(StateError):
            misuse()
        assert layers[1].on_gpu.slot is slot
        assert layers[2].on_gpu.slot is None
        assert layers[EMBEDDING].on_gpu.slot is own
        assert window.free_slot() is free
        assert layers[2].on_gpu.residency is Residency.AWAY
    window.release(1, fence("release 1"))
    with pytest.raises(StateError, match="layer 1 has no slot"):
        window.release(1, fence("again"))


# -- gradient slots ----------------------------------------------------------------------------


def test_the_gradient_slot_freed_last_is_taken_last(make_window: Make) -> None:
    window = make_window(num_gradient_slots=2)
    window.prepare_training()
    slots = []
    for layer in (4, 3, 2, 1):
        slot = window.free_gradient_slot(layer)
        window.claim_gradients(slot, layer)
        window.release_gradients(slot)
        slots.append(slot)
    assert slots[0] is slots[2]
    assert slots[1] is slots[3]
    assert slots[0] is not slots[1]


def test_misuse_of_gradient_slots_is_a_state_error(make_window: Make) -> None:
    window = make_window()
    window.prepare_training()
    slot = window.free_gradient_slot(1)
    window.claim_gradients(slot, 1)
    slot.arrived.add(0)
    with pytest.raises(StateError, match="layer 2 cannot gather in the gradient slot of layer 1"):
        window.claim_gradients(slot, 2)
    assert (slot.layer, slot.arrived) == (1, {0})
    window.release_gradients(slot)
    with pytest.raises(StateError, match="twice"):
        window.release_gradients(slot)


# -- life --------------------------------------------------------------------------------------


def test_close_drops_every_buffer(make_window: Make, layers: Layers) -> None:
    window = make_window()
    window.prepare_training()
    take(window, layers[1])
    window.close()
    assert layers[1].on_gpu.slot is None
    assert layers[EMBEDDING].on_gpu.slot is None
    assert window.free_slot() is None
    assert window.free_gradient_slot(1) is None
    assert window.held_layers() == window.gathering_layers() == []


def test_sums_of_a_layer_that_was_abandoned_are_not_the_next_ones(
    make_window: Make, layers: Layers
) -> None:
    window = make_window(num_gradient_slots=1)
    window.prepare_training()
    slot = window.free_gradient_slot(3)
    window.claim_gradients(slot, 3)
    slot.summing[0] = sum_view(slot, layers[3], 0).fill_(7)
    window.release_gradients(slot)  # never rounded
    window.claim_gradients(slot, 2)
    gradient_view(slot, layers[2], 0).fill_(1)
    round_sums(slot, layers[2])
    assert bool((gradient_view(slot, layers[2], 0) == 1).all())
