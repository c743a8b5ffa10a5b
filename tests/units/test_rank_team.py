"""What one of several ranks adds to a step, and what ranks agree on, without other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from stronghold.device.emulated import EmulatedDevice
from stronghold.errors import RankError
from stronghold.memory.layer import GradientSlot, LayerState
from stronghold.model.layout import ModelLayout, ParameterShape, layer_layout
from stronghold.team.group import SilentGroup, mean_of, simulated_ranks
from stronghold.team.ranks import PARTS, RankTeam, SimulatedWeights
from tests.support.states import adam_formats

Make = Callable[..., RankTeam]
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
    def of(
        change: Change = nothing, model_parallel_rank: int = 0, split: Sequence[int] = ()
    ) -> RankTeam:
        shapes = [ParameterShape(name=f"p{k}", shape=(8,), trainable=True) for k in range(2)]
        layouts = tuple(
            layer_layout(shapes, index=i, name=f"layer{i}", streamed=True, num_ranks=2)
            for i in range(2)
        )
        ranks = simulated_ranks(2, 1)
        ranks.control = TwoRanks(change)
        ranks.model_parallel_rank = model_parallel_rank
        layers = [
            LayerState(
                layout=of_layer,
                weights=torch.empty(0),
                formats=adam_formats(torch.float32),
                shards=ranks.shards,
                parameters=[nn.Parameter(torch.zeros(8)) for _ in range(2)],
                trained=frozenset({0, 1}),
            )
            for of_layer in layouts
        ]
        for k in split:
            for state in layers:
                state.parameters[k].tensor_model_parallel = True  # type: ignore[attr-defined]
        layout = ModelLayout(layers=layouts)
        weights = SimulatedWeights(layout, adam_formats(torch.float32), ranks)
        return RankTeam(device, layers, weights)

    return of


def reduced(team: RankTeam, layer: int, *positions: int) -> None:
    """Gradients at these positions have come here, and the layer is reduced."""
    slot = GradientSlot(torch.zeros(team._layers[layer].layout.trainable_numel))
    slot.arrived.update(positions)
    team.reduce(team._layers[layer], slot, ())


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
    team, slot = make(), GradientSlot(torch.zeros(1))
    slot.arrived.add(1)
    assert team.absent(team._layers[0], slot) == {0}


def test_a_gradient_that_came_on_any_rank_has_come(make: Make) -> None:
    def second_of_the_other_layer(row: torch.Tensor) -> None:
        row[PARTS:] = torch.tensor([0.0, 0.0, 0.0, 1.0])

    team = make(second_of_the_other_layer)
    reduced(team, 0, 0)
    team.meet(team._layers, [])
    assert [state.arrived for state in team._layers] == [{0}, {1}]
    team.forget()
    second = make()
    second.meet(second._layers, [])
    assert [state.arrived for state in second._layers] == [set(), set()]
    team._ranks.control = TwoRanks(nothing)
    team.meet(team._layers, [])  # what came in the step before has not come in this one
    assert [state.arrived for state in team._layers] == [set(), set()]


@pytest.mark.parametrize("lane", [1, 2])
def test_ranks_that_gathered_or_reduced_other_layers_are_refused(make: Make, lane: int) -> None:
    def other(row: torch.Tensor) -> None:
        row[lane] += 1

    team = make(other)
    with pytest.raises(RankError, match=r"\[0\] against \[1\]"):
        team.meet(team._layers, [])


def test_the_order_of_reductions_and_a_step_thrown_away_are_compared(make: Make) -> None:
    one, two, three = make(), make(), make()
    for team, layers in ((one, (0, 1)), (two, (1, 0)), (three, (0, 1))):
        for layer in layers:
            reduced(team, layer)
    assert one.issued == three.issued != two.issued
    three.dropped()
    assert one.issued != three.issued


def test_a_parameter_that_model_parallel_ranks_have_whole_counts_once(make: Make) -> None:
    """One that is not finite counts on every rank: no rank may apply the step."""
    for rank, expected in ((0, 3.0), (1, 2.0)):
        team = make(model_parallel_rank=rank, split=[1])
        team._layers[0].square_sums = {0: 1.0, 1: 2.0}
        assert team.meet(team._layers, []) == [expected, expected]
    team._layers[1].square_sums = {0: float("inf")}
    assert all(value != value for value in team.meet(team._layers, []))


def test_an_order_of_uses_is_adopted_when_every_rank_has_seen_it(make: Make) -> None:
    def other_uses(row: torch.Tensor) -> None:
        row[3] += 1

    for change, times in ((nothing, 1), (other_uses, 0)):
        team, adopted = make(change), []
        team.propose(["F0", "B0"], lambda adopted=adopted: adopted.append(1))
        assert not adopted
        team.meet(team._layers, [])
        assert len(adopted) == times


def test_a_part_that_this_rank_reads_alone_is_read_before_it_changes(
    make: Make, device: EmulatedDevice
) -> None:
    """At the gate every rank goes on to update: what this one copies must be done by then."""
    team, done = make(), []
    state = team._layers[0]
    nbytes = state.maps["weights"].nbytes
    part = team.fetched(state, together=True)[0]
    assert part.stop - part.start == nbytes // 2
    assert team.fetched(state, together=False) == (slice(0, nbytes),)
    hold = device.lane("io").submit("hold", lambda: time.sleep(0.2))
    device.fetch.submit(
        "fetch 0", lambda: done.append(1), (hold,), reads=(state.records["weights"],)
    )
    team.meet(team._layers, [])
    assert done


def test_a_layer_is_new_when_every_ranks_part_is(make: Make) -> None:
    weights = make()._weights
    weights._versions = torch.zeros(2, 2, dtype=torch.int64).numpy()  # of two ranks
    weights.waiting(0)()
    weights.expect(0)
    weights.publish(0)  # this rank's part
    waiter = threading.Thread(target=weights.waiting(0))
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive()
    weights._versions[0, 1] += 1
    waiter.join(10)
    assert not waiter.is_alive()
