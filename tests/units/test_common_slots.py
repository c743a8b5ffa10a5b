"""What one of several ranks holds in its slots, while it fetches for itself and after that."""

from __future__ import annotations

import torch

from stronghold.devices.base import completed
from stronghold.devices.emulated import EmulatedDevice
from stronghold.distributed.common_slots import CommonSlots, SlotAgreement
from stronghold.memory.layer import LayerState
from stronghold.memory.window import Window
from stronghold.model.layout import ParameterShape, Shards, layer_layout
from tests.support.states import adam_formats

RESIDENT = 0  # layers 1 to 4 are blocks


class Case:
    """A window of two slots, and the common ones."""

    def __init__(self, device: EmulatedDevice) -> None:
        shape = [ParameterShape(name="p", shape=(8,), trainable=True)]
        self.layers = [
            LayerState(
                layout=layer_layout(shape, index=k, name=f"layer{k}", streamed=k != RESIDENT),
                weights=torch.empty(0),
                formats=adam_formats(torch.float32),
                shards=Shards(),
            )
            for k in range(5)
        ]
        resident = frozenset({RESIDENT})
        self.window = Window(
            device,
            self.layers,
            resident=resident,
            num_slots=2,
            num_gradient_slots=1,
            own_gradients=resident,
        )
        self.slots = CommonSlots(self.window, self.layers, [RESIDENT])

    def fetch(self, *layers: int) -> None:
        for layer in layers:
            slot = self.layers[layer].on_gpu.slot or self.window.free_slot()
            assert slot is not None
            self.window.claim(slot, layer)
            self.window.make_ready(layer)

    def release(self, *layers: int) -> None:
        for layer in layers:
            self.window.release(layer, completed("compute", "release"))

    def rejoin(self) -> None:
        self.release(*self.slots.extra())
        self.fetch(*self.slots.missing())
        self.slots.rejoin()


def test_one_rank_depends_on_nothing() -> None:
    slots = SlotAgreement()
    slots.leave()
    assert slots.are_common
    assert slots.extra() == slots.missing() == []


def test_slots_hold_the_same_layers_in_the_same_order_again(device: EmulatedDevice) -> None:
    case = Case(device)
    case.fetch(1, 2)
    places = case.window.places()
    case.slots.leave()
    assert not case.slots.are_common
    case.release(1)
    case.fetch(3)
    case.slots.leave()  # a second time changes nothing
    case.release(2)
    case.fetch(4)
    assert (case.slots.extra(), case.slots.missing()) == ([3, 4], [1, 2])
    case.rejoin()
    assert case.slots.are_common
    assert case.window.places() == places


def test_a_resident_layer_that_one_rank_fetched_is_fetched_with_the_others(
    device: EmulatedDevice,
) -> None:
    case = Case(device)
    case.slots.leave()
    case.fetch(RESIDENT)
    case.rejoin()
    assert not case.layers[RESIDENT].is_fetched


def test_a_resident_layer_that_all_ranks_have_is_brought_back(device: EmulatedDevice) -> None:
    """An exception in an evaluation of one rank empties its slots."""
    case = Case(device)
    case.fetch(RESIDENT, 1)
    case.slots.leave()
    case.window.start_again()
    assert case.slots.missing() == [RESIDENT, 1]
    case.rejoin()
    assert case.layers[RESIDENT].is_fetched
    assert case.window.held_layers() == [1]


def test_slots_that_are_empty_on_every_rank_are_common(device: EmulatedDevice) -> None:
    case = Case(device)
    case.fetch(1)
    case.slots.leave()
    case.release(1)
    case.slots.forget()
    assert case.slots.are_common
    assert case.slots.missing() == []
