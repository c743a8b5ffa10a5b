"""What one of several ranks adds to a step, and what ranks agree on, without other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, cast

import pytest
import torch
from torch import nn

from stronghold.devices.emulated import EmulatedDevice
from stronghold.devices.lane_name import LaneName
from stronghold.distributed.node_weights import NodeWeights, SimulatedWeights
from stronghold.distributed.process_groups import Ranks, SilentGroup, mean_of, simulated_ranks
from stronghold.distributed.sharding import FLAGS, RankTeam
from stronghold.errors import RankError
from stronghold.memory.buffers import GradientSlot
from stronghold.memory.layer import LayerState, OptimizerRecord
from stronghold.memory.neighbours import Neighbours, Result
from stronghold.model.layout import ModelLayout, ParameterShape, Shards, layer_layout
from tests.support.states import adam_formats


class Case(NamedTuple):
    """A rank's team, and what it is made of."""

    team: RankTeam
    layers: list[LayerState]
    ranks: Ranks

    def meet(self) -> list[float]:
        """The gate of a step without gradients of its own."""
        return self.team.meet(self.layers, [])


Make = Callable[..., Case]
Change = Callable[[torch.Tensor], None]


class TwoRanks(SilentGroup):
    """This rank, and one that says the same but for `change`."""

    def __init__(self, change: Change) -> None:
        super().__init__(2)
        self._change = change

    def numbers(self, mine: torch.Tensor, operation: str) -> torch.Tensor:
        other = mine.clone()
        self._change(other)
        return torch.stack([mine, other])


def nothing(_: torch.Tensor) -> None:
    """The other rank says the same."""


@pytest.fixture
def make(device: EmulatedDevice) -> Make:
    def of(change: Change = nothing) -> Case:
        shapes = [ParameterShape(name=f"p{k}", shape=(8,), trainable=True) for k in range(2)]
        layouts = tuple(
            layer_layout(shapes, index=i, name=f"layer{i}", streamed=True, num_ranks=2)
            for i in range(2)
        )
        ranks = simulated_ranks(2, 1)
        ranks.control = TwoRanks(change)
        layers = [
            LayerState(
                layout=of_layer,
                weights=torch.empty(0),
                formats=adam_formats(torch.float32),
                shards=ranks.shards,
                parameters=[nn.Parameter(torch.zeros(8)) for _ in range(2)],
                optimizer=OptimizerRecord(trained=frozenset({0, 1})),
            )
            for of_layer in layouts
        ]
        layout = ModelLayout(layers=layouts)
        weights = SimulatedWeights(layout, adam_formats(torch.float32), ranks)
        return Case(RankTeam(device, layers, weights), layers, ranks)

    return of


def reduced(case: Case, layer: int, *positions: int, array: str = "gradients") -> None:
    """Gradients at these positions have come here, and the layer is reduced: of its other trained
    parameters with zeros. All of them are in `array` then."""
    state = case.layers[layer]
    state.gradients.positions(array).update(state.optimizer.trained)
    slot = GradientSlot(torch.zeros(state.layout.trainable_numel))
    slot.arrived.update(positions)
    case.team.reduce(state, slot, ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_is_added_in_fp32_in_the_order_of_the_ranks_and_rounded_once(
    dtype: torch.dtype,
) -> None:
    pieces = torch.randn(3, 4097, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = torch.empty(4097, dtype=dtype)
    mean_of(pieces, found, [2, 1, 0])
    rows = pieces.float()
    assert torch.equal(found, (((rows[2] + rows[1]) + rows[0]) / 3).to(dtype))


def test_what_did_not_come_here_is_zeros_for_the_others(make: Make) -> None:
    case, slot = make(), GradientSlot(torch.zeros(1))
    slot.arrived.add(1)
    assert case.team.absent(case.layers[0], slot) == {0}


@pytest.mark.parametrize("array", ["gradients", "accumulated"])
def test_a_gradient_that_came_on_any_rank_has_come(array: str, make: Make) -> None:
    def second_of_the_other_layer(row: torch.Tensor) -> None:
        row[FLAGS:] = torch.tensor([0.0, 0.0, 0.0, 1.0])

    def arrived(case: Case) -> list[set[int]]:
        return [set(state.gradients.arrived) for state in case.layers]

    case = make(second_of_the_other_layer)
    reduced(case, 0, 0, array=array)
    reduced(case, 1, array=array)
    case.meet()
    assert arrived(case) == [{0}, {1}]
    case.team.forget()
    second = make()
    second.meet()
    assert arrived(second) == [set(), set()]
    case.ranks.control = TwoRanks(nothing)
    case.meet()  # what came in the step before has not come in this one
    assert arrived(case) == [set(), set()]


@pytest.mark.parametrize("lane", [1, 2])
def test_ranks_that_gathered_or_reduced_other_layers_are_refused(make: Make, lane: int) -> None:
    def other(row: torch.Tensor) -> None:
        row[lane] += 1

    with pytest.raises(RankError, match=r"\[0\] against \[1\]"):
        make(other).meet()


def test_the_order_of_reductions_and_a_step_thrown_away_are_compared(make: Make) -> None:
    cases = [make(), make(), make()]
    for case, layers in zip(cases, ((0, 1), (1, 0), (0, 1)), strict=True):
        for layer in layers:
            reduced(case, layer)
    one, two, three = (case.team for case in cases)
    assert one.issued == three.issued != two.issued
    three.dropped()
    assert one.issued != three.issued


def test_an_order_of_reductions_is_adopted_when_every_rank_has_seen_it(make: Make) -> None:
    def other_order(row: torch.Tensor) -> None:
        row[3] += 1

    for change, adopted in ((nothing, True), (other_order, False)):
        case = make(change)
        order = case.team.order([1, 0], 2)
        for layer in (0, 1):
            order.complete(layer)
        order.begin_again()
        case.meet()
        assert (order.complete(0) == [0]) is adopted


def test_a_part_that_this_rank_reads_alone_is_read_before_it_changes(
    make: Make, device: EmulatedDevice
) -> None:
    """At the gate every rank goes on to update: what this one copies must be done by then."""
    case, done = make(), []
    state = case.layers[0]
    nbytes = state.maps["weights"].nbytes
    part = case.team.fetched(state, together=True)[0]
    assert part.stop - part.start == nbytes // 2
    assert case.team.fetched(state, together=False) == (slice(0, nbytes),)
    hold = device.lane(LaneName.IO).submit("hold", lambda: time.sleep(0.2))
    device.fetch.submit(
        "fetch 0", lambda: done.append(1), (hold,), reads=(state.records["weights"],)
    )
    case.meet()
    assert done


class Beside(Neighbours):
    """One of two processes of a node, played by two threads of this one: `said` is theirs."""

    count = 2

    def __init__(self, index: int, said: list[object], meeting: threading.Barrier) -> None:
        self.index, self._said, self._meeting = index, said, meeting

    def of_node(self, mine: Result) -> list[Result]:
        self._said[self.index] = mine
        self._meeting.wait(10)
        found = list(self._said)
        self._meeting.wait(10)
        return cast(list[Result], found)

    of_all = of_node

    def barrier(self) -> None:
        self._meeting.wait(10)


def test_a_layer_is_new_when_every_ranks_part_is() -> None:
    shapes = [ParameterShape(name="p", shape=(8,), trainable=True)]
    layer = layer_layout(shapes, index=0, name="layer", streamed=True, num_ranks=2)
    said, meeting = [None, None], threading.Barrier(2)

    def weights_of(index: int) -> NodeWeights:
        ranks = replace(
            simulated_ranks(2, 1),
            shards=Shards(num_ranks=2, rank=index),
            on_node=Beside(index, said, meeting),
        )
        return NodeWeights(ModelLayout(layers=(layer,)), adam_formats(torch.float32), ranks)

    with ThreadPoolExecutor(2) as processes:
        one, other = processes.map(weights_of, range(2))
    one.wait(0, one.submitted(0))
    one.expect(0)
    one.publish(0)  # this rank's part
    waiter = threading.Thread(target=one.wait, args=(0, one.submitted(0)))
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive()
    other.publish(0)
    waiter.join(10)
    assert not waiter.is_alive()
    one.close(), other.close()
