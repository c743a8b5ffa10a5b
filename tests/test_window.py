"""Laws of slots and residency."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stronghold.device.base import Fence, completed
from stronghold.device.emulated import EmulatedDevice
from stronghold.errors import BudgetError, StateError
from stronghold.memory.window import TRANSITIONS, Residency, Window
from stronghold.model.layout import LayerLayout

# Layer 0 is no block (an embedding), 1 to 4 are blocks of unlike sizes, 4 is frozen.
NUMEL = (4096, 2048, 6144, 2048, 4096)
TRAINABLE = (2048, 2048, 4096, 2048, 0)
LAYERS = tuple(
    LayerLayout(
        index=index,
        name=f"layer{index}",
        streamed=index > 0,
        slices=(),
        trainable_numel=trainable,
        numel=numel,
        num_parameters=numel,
        num_trainable=trainable,
    )
    for index, (numel, trainable) in enumerate(zip(NUMEL, TRAINABLE, strict=True))
)
EMBEDDING = 0


@pytest.fixture
def make_window(device: EmulatedDevice) -> Callable[..., Window]:
    def make(
        num_slots: int = 2,
        num_gradient_slots: int = 2,
        resident: frozenset[int] = frozenset({EMBEDDING}),
        dtype: torch.dtype = torch.bfloat16,
        layers: tuple[LayerLayout, ...] = LAYERS,
    ) -> Window:
        return Window(
            device,
            dtype,
            layers,
            resident=resident,
            num_slots=num_slots,
            num_gradient_slots=num_gradient_slots,
        )

    return make


def fence(name: str) -> Fence:
    return completed("compute", name)


def take(window: Window, layer: int, *, resident: bool = True) -> None:
    """Fetch the layer into the slot that is next."""
    slot = window.free_slot()
    assert slot is not None
    window.claim(slot, layer)
    slot.ready = completed("fetch", f"fetch {layer}")
    if resident:
        window.move(layer, Residency.RESIDENT)


# -- residency ---------------------------------------------------------------------------------
@pytest.mark.parametrize("begin", Residency)
@pytest.mark.parametrize("end", Residency)
def test_a_layer_moves_only_along_the_table(
    make_window: Callable[..., Window], begin: Residency, end: Residency
) -> None:
    window = make_window()
    window.residency[1] = begin
    if end in TRANSITIONS[begin]:
        window.move(1, end)
        assert window.residency[1] is end
    else:
        with pytest.raises(
            StateError, match=f"layer 1 cannot go from {begin.value} to {end.value}"
        ):
            window.move(1, end)
        assert window.residency[1] is begin


def test_the_table_is_this_one() -> None:
    host, fetching, resident = Residency.HOST, Residency.FETCHING, Residency.RESIDENT
    assert {begin: set(ends) for begin, ends in TRANSITIONS.items()} == {
        host: {fetching},
        fetching: {resident, host},
        resident: {host, fetching},
    }


def test_every_layer_begins_on_the_host(make_window: Callable[..., Window]) -> None:
    window = make_window()
    assert set(window.residency.values()) == {Residency.HOST}
    assert set(window.residency) == set(range(5))
    assert window.held_layers() == []


# -- weight slots ------------------------------------------------------------------------------
def test_a_window_takes_its_slots_and_not_a_byte_more(
    make_window: Callable[..., Window], device: EmulatedDevice
) -> None:
    window = make_window(num_slots=3, num_gradient_slots=2)
    slots = 3 * max(NUMEL[1:]) + NUMEL[EMBEDDING]
    assert device.allocated_bytes == 2 * slots
    window.prepare_training()
    gradients = 2 * max(TRAINABLE[1:]) + TRAINABLE[EMBEDDING]
    assert device.allocated_bytes == device.peak_bytes == 2 * (slots + gradients)
    window.prepare_training()
    assert device.allocated_bytes == 2 * (slots + gradients)


def test_slots_fit_the_layers_that_take_turns_only(
    make_window: Callable[..., Window], device: EmulatedDevice
) -> None:
    """The largest layer stays on the device: the others' slots need not hold it."""
    make_window(num_slots=1, resident=frozenset({EMBEDDING, 2}), dtype=torch.float32)
    assert device.allocated_bytes == 4 * (max(NUMEL[1], NUMEL[3], NUMEL[4]) + NUMEL[0] + NUMEL[2])


def test_without_streamed_layers_there_are_no_slots(make_window: Callable[..., Window]) -> None:
    window = make_window(num_slots=3, resident=frozenset(range(5)))
    assert window.free_slot() is None
    assert window.held_layers() == []


def test_a_layer_holds_its_slot_from_claim_to_release(make_window: Callable[..., Window]) -> None:
    window = make_window(num_slots=2)
    slot = window.free_slot()
    assert slot is not None
    assert window.slot_of(1) is None
    window.claim(slot, 1)
    assert window.slot_of(1) is slot
    assert window.residency[1] is Residency.FETCHING
    assert window.held_layers() == [1]
    window.move(1, Residency.RESIDENT)
    take(window, 2)
    assert window.free_slot() is None
    used = fence("release 1")
    window.release(1, used)
    assert window.slot_of(1) is None
    assert window.residency[1] is Residency.HOST
    assert window.free_slot() is slot
    assert slot.free_after is used
    assert slot.ready is None
    assert window.held_layers() == [2]


def test_the_slot_freed_last_is_taken_last(make_window: Callable[..., Window]) -> None:
    """Its compute may still run; the others' is longer ago."""
    window = make_window(num_slots=3)
    for layer in (1, 2, 3):
        take(window, layer)
    slots = {layer: window.slot_of(layer) for layer in (1, 2, 3)}
    for layer in (2, 1, 3):
        window.release(layer, fence(f"release {layer}"))
    order = []
    for layer in (4, 3, 1):
        order.append(window.free_slot())
        take(window, layer)
    assert order == [slots[2], slots[1], slots[3]]


def test_a_released_slot_is_poisoned(make_window: Callable[..., Window]) -> None:
    window = make_window()
    take(window, 1)
    slot = window.slot_of(1)
    assert slot is not None
    slot.weights.zero_()
    window.release(1, fence("release 1"))
    assert slot.weights.isnan().all()


def test_an_unused_prefetch_makes_the_next_fetch_wait_for_it(
    make_window: Callable[..., Window],
) -> None:
    """Its copy may still write the slot: poison now would be overwritten, and so would weights."""
    window = make_window()
    take(window, 1, resident=False)
    slot = window.slot_of(1)
    assert slot is not None
    slot.weights.zero_()
    ready = slot.ready
    window.release(1, fence("release 1"))
    assert slot.free_after is ready
    assert not slot.weights.isnan().any()
    assert window.residency[1] is Residency.HOST
    # Claimed, but its fetch was never submitted.
    window.claim(slot, 2)
    after = fence("release 2")
    window.release(2, after)
    assert slot.free_after is after


def test_a_resident_layer_is_fetched_again_into_its_own_slot(
    make_window: Callable[..., Window],
) -> None:
    window = make_window()
    slot = window.slot_of(EMBEDDING)
    assert slot is not None
    assert slot.weights.numel() == NUMEL[EMBEDDING]
    for _ in range(2):
        window.claim(slot, EMBEDDING)
        window.move(EMBEDDING, Residency.RESIDENT)
    assert window.held_layers() == []


def test_misuse_of_slots_is_a_state_error_that_changes_nothing(
    make_window: Callable[..., Window],
) -> None:
    window = make_window(num_slots=2)
    take(window, 1)
    slot, own, free = window.slot_of(1), window.slot_of(EMBEDDING), window.free_slot()
    assert slot is not None
    assert own is not None
    assert free is not None
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
        assert window.slot_of(1) is slot
        assert window.slot_of(2) is None
        assert window.slot_of(EMBEDDING) is own
        assert window.free_slot() is free
        assert window.residency[2] is Residency.HOST
    window.release(1, fence("release 1"))
    with pytest.raises(StateError, match="layer 1 has no slot"):
        window.release(1, fence("again"))


# -- gradient slots ----------------------------------------------------------------------------
def test_blocks_take_turns_in_gradient_slots(make_window: Callable[..., Window]) -> None:
    window = make_window(num_gradient_slots=2)
    assert window.free_gradient_slot(3) is None  # nothing before the first backward
    window.prepare_training()
    first = window.free_gradient_slot(3)
    assert first is not None
    assert window.gradient_slot_of(3) is None
    window.claim_gradients(first, 3)
    assert window.gradient_slot_of(3) is first
    first.arrived.update({0, 1})
    second = window.free_gradient_slot(2)
    assert second is not None
    assert second is not first
    window.claim_gradients(second, 2)
    assert window.free_gradient_slot(1) is None
    assert sorted(window.gathering()) == [2, 3]
    drained = completed("drain", "drain 3")
    window.release_gradients(first, drained)
    assert first.free_after is drained
    assert window.gathering() == [2]
    assert window.free_gradient_slot(1) is first
    window.claim_gradients(first, 1)
    assert first.arrived == set()  # not the gradients of layer 3


def test_the_gradient_slot_freed_last_is_taken_last(make_window: Callable[..., Window]) -> None:
    window = make_window(num_gradient_slots=2)
    window.prepare_training()
    slots = []
    for layer in (4, 3, 2, 1):
        slot = window.free_gradient_slot(layer)
        assert slot is not None
        window.claim_gradients(slot, layer)
        window.release_gradients(slot, completed("drain", f"drain {layer}"))
        slots.append(slot)
    assert slots[0] is slots[2]
    assert slots[1] is slots[3]
    assert slots[0] is not slots[1]


def test_what_is_no_block_has_a_gradient_slot_of_its_own(
    make_window: Callable[..., Window],
) -> None:
    """The embedding's gradients come early (tied head) and late: it would hold a shared slot."""
    window = make_window(num_gradient_slots=1, resident=frozenset({EMBEDDING, 4}))
    window.prepare_training()
    assert not window.shares_gradient_slots(EMBEDDING)
    assert all(window.shares_gradient_slots(layer) for layer in (1, 2, 3, 4))
    own, shared = window.free_gradient_slot(EMBEDDING), window.free_gradient_slot(1)
    assert own is not None
    assert shared is not None
    assert own is not shared
    assert own.gradients.numel() == TRAINABLE[EMBEDDING]
    assert shared.gradients.numel() == max(TRAINABLE[1:])
    window.claim_gradients(own, EMBEDDING)
    assert window.gradient_slot_of(EMBEDDING) is own
    assert window.free_gradient_slot(1) is shared
    window.release_gradients(own, completed("drain", "drain 0"))
    assert window.gradient_slot_of(EMBEDDING) is None
    assert window.free_gradient_slot(EMBEDDING) is own


def test_a_frozen_model_has_no_gradient_slots(
    make_window: Callable[..., Window], device: EmulatedDevice
) -> None:
    frozen = (LAYERS[4],)
    window = make_window(num_slots=1, resident=frozenset(), layers=frozen)
    before = device.allocated_bytes
    window.prepare_training()
    assert device.allocated_bytes == before
    assert window.free_gradient_slot(4) is None


def test_misuse_of_gradient_slots_is_a_state_error(make_window: Callable[..., Window]) -> None:
    window = make_window()
    window.prepare_training()
    slot = window.free_gradient_slot(1)
    assert slot is not None
    window.claim_gradients(slot, 1)
    slot.arrived.add(0)
    with pytest.raises(StateError, match="layer 2 cannot gather in the gradient slot of layer 1"):
        window.claim_gradients(slot, 2)
    assert (slot.layer, slot.arrived) == (1, {0})
    window.release_gradients(slot, completed("drain", "drain 1"))
    with pytest.raises(StateError, match="twice"):
        window.release_gradients(slot, completed("drain", "again"))


# -- life --------------------------------------------------------------------------------------
def test_a_window_past_the_budget_is_refused() -> None:
    device = EmulatedDevice(budget_bytes=2 * (max(NUMEL[1:]) + NUMEL[0]))
    try:
        with pytest.raises(BudgetError, match="weight slot 1"):
            Window(
                device,
                torch.bfloat16,
                LAYERS,
                resident=frozenset({EMBEDDING}),
                num_slots=2,
                num_gradient_slots=1,
            )
    finally:
        device.close()


def test_close_drops_every_buffer(make_window: Callable[..., Window]) -> None:
    window = make_window()
    window.prepare_training()
    take(window, 1)
    window.close()
    assert window.slot_of(1) is None
    assert window.slot_of(EMBEDDING) is None
    assert window.free_slot() is None
    assert window.free_gradient_slot(1) is None
    assert window.held_layers() == window.gathering() == []
