"""Sharding of a step over several ranks: links in its chains, and agreement at the gate.

A fetch is host -> [all-gather] -> slot, an offload is slot -> [reduce-scatter] -> host, an update
is kernel -> [exchange between nodes]. Owns the links in brackets. `Team` is the only process of a
training: its links do nothing. `RankTeam` is one of several ranks. Entered by the training thread,
and by autograd's in backward.

The access records of this process (`devices.base`) do not know of other processes:
  * whether another rank's part of the node's weights is new     -> `NodeWeights.wait`
  * whether others have read this rank's part before it changes  -> they have, before they take part
                                                                    in the gate (`_read_apart`)
  * whether all ranks gather and reduce the same layers          -> the name of each collective
                                                                    (`process_groups`), and the
                                                                    checksums `issued` at the gate

[Note: one order of uses]
1. A fetch of a training pass is an all-gather. Whether a layer is fetched, and when, follows from
   the schedule, from the uses before, and from what slots hold.
2. Every rank makes the same training passes, with the same layers in the same order. So all queue
   the same gathers in one order, as long as their slots hold the same layers.
3. One rank may evaluate or read weights while the others do not. It fetches apart: it copies whole
   layers from the node's memory, over its own link, without a collective.
4. Before the first such fetch a rank notes what its slots hold (`CommonSlots.leave`). Before the
   next use in training it copies the same layers back, by itself (`rejoin`). So step 2 holds again.
5. A rank that skips a layer, takes another order, or calls a pass more often comes for a collective
   that the others do not come for. All end with RankError, before a weight changes.

[Note: exchange]
1. On several nodes a rank's part of the node's weights has its own range, which it updates, and
   those of its peers ([Note: nodes] of `model.layout`), which the exchange lane writes.
2. The exchange is submitted with the layer's update, in the order of layers at the gate, which is
   one on all ranks.
3. A checkpoint reads own ranges. An exchange sends these and never writes them.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from stronghold.devices.base import Device, Fence
from stronghold.devices.lane_name import LaneName
from stronghold.distributed.common_slots import CommonSlots, SlotAgreement
from stronghold.distributed.node_weights import NodeWeights
from stronghold.distributed.order import OneOrder, Order
from stronghold.distributed.process_groups import Ranks
from stronghold.errors import ConfigError, RankError
from stronghold.memory.buffers import GradientSlot, Slot
from stronghold.memory.layer import LayerState
from stronghold.memory.window import Window
from stronghold.model.layout import ModelLayout
from stronghold.plan.plan import Plan

logger = logging.getLogger("stronghold")

# Columns of the numbers that a rank gives at the gate. Flags of parameters follow.
SQUARE_SUM, ISSUED, SEEN_ORDER, FLAGS = 0, slice(1, 3), 3, 4


class Team:
    """The links of one process: they do nothing.

    `writable`: a program may write weights in place.
    """

    writable = True

    # -- links ------------------------------------------------------------------------------------
    def fetched(self, state: LayerState, *, together: bool) -> Sequence[slice]:
        """Return the bytes of the layer's weights that this rank copies to a slot over its own
        link.

        `gather` brings the others. `together`: all ranks fetch the layer now.
        """
        return (slice(0, state.maps["weights"].nbytes),)

    def gather(self, state: LayerState, slot: Slot, *, together: bool) -> None:
        """Queue the all-gather that fills the slot from other ranks, behind the fetch."""

    def slots(self, window: Window, refreshed: Iterable[int]) -> SlotAgreement:
        """Return the record of layers that all ranks have in the slots of `window`.

        `refreshed`: resident layers that are fetched after an update.
        """
        return SlotAgreement()

    def order(self, expected: Sequence[int], num_slots: int) -> Order:
        """Return the order of offloads with `num_slots` gradient slots. `expected`: the
        schedule's."""
        return Order()

    def absent(self, state: LayerState, slot: GradientSlot) -> frozenset[int]:
        """Return the parameters that must be zeros in the slot: this rank got no gradient of
        them."""
        return frozenset()

    def reduce(self, state: LayerState, slot: GradientSlot, after: Sequence[Fence]) -> None:
        """Queue the reduce-scatter that makes this rank's range of the slot the mean over the
        ranks."""

    def publishing(self, state: LayerState, work: Callable[[], None]) -> Callable[[], None]:
        """Wrap `work`, the end of an update of the layer. Other ranks may read the layer after
        it."""
        return work

    def exchange(self, state: LayerState) -> None:
        """An update was submitted: queue the exchange that brings other nodes' ranges of the
        layer."""

    # -- agreement --------------------------------------------------------------------------------
    def prepare_training(self) -> None:
        """Allocate before the first backward."""

    def meet(self, layers: Sequence[LayerState], square_sums: list[float]) -> list[float]:
        """Meet the other ranks at the gate.

        `square_sums`: of this rank's gradients. Returns those of every rank. Each layer then has
        the gradients that came on any rank. Raises RankError if the ranks did not do the same.
        """
        return square_sums

    def forget(self) -> None:
        """Forget the step's gradients: they were used, or are void."""

    def dropped(self) -> None:
        """Note that the user dropped the step's gradients."""

    def settle(self, layers: Iterable[int]) -> None:
        """Wait until the other ranks have updated their parts of these layers' weights."""

    def refuse_write(self, state: LayerState) -> None:
        """Raise ConfigError if one rank cannot write weights in place."""

    def fail(self, reason: str) -> None:
        """End the other ranks' waits, because this rank cannot go on."""

    def barrier(self, operation: str) -> None:
        """Wait until every rank is here. Each sees the writes of all others afterwards."""

    def spread(self, operation: str) -> None:
        """Give every node the ranges that each rank has written."""

    def agree(self, operation: str) -> None:
        """Give every node the weights of the first. Every node's weights were written."""

    def close(self) -> None:
        """Release what the links hold. The lanes have ended."""


class RankTeam(Team):
    """The links of one of several ranks."""

    writable = False

    def __init__(self, device: Device, layers: Sequence[LayerState], weights: NodeWeights) -> None:
        ranks = weights.ranks
        self._device = device
        device.is_single_process = False
        self._layers = layers
        self._weights = weights
        self._ranks = ranks
        self._exchanges = ranks.num_nodes > 1
        # A checksum of the collectives that each lane was given. Each lane has an order of its own.
        self.issued = {"gather": 0, "reduce": 0}
        # layers of which this rank reads others' parts
        self._read_apart: set[int] = set()
        # gradients that came here in this step
        self._touched: set[tuple[int, int]] = set()
        self._room: torch.Tensor | None = None
        self._order = OneOrder(ranks.control, (), 1)

    # -- links ------------------------------------------------------------------------------------
    def fetched(self, state: LayerState, *, together: bool) -> Sequence[slice]:
        if together:
            bytes_of, shards = state.maps["weights"].bytes_of, self._ranks.shards
            return [bytes_of(*block) for _, block in shards.fetched(state.layout)]
        self._read_apart.add(state.index)
        # The fetch lane's next operation is the copy.
        layer, count = state.index, self._weights.submitted(state.index)
        self._device.fetch.submit(f"await {layer}", partial(self._weights.wait, layer, count))
        return super().fetched(state, together=together)

    def gather(self, state: LayerState, slot: Slot, *, together: bool) -> None:
        if not together:
            return
        self.note("gather", state.index)
        group, name = self._ranks.gather, f"gather {state.index}"
        if group.num_ranks == 1:  # the only one of its node
            return
        bytes_of = state.maps["weights"].bytes_of
        parts = [
            (bytes_of(*each.span), bytes_of(*block))
            for each, block in self._ranks.shards.fetched(state.layout)
        ]

        def gather() -> None:
            for whole, block in parts:
                group.gather(slot.weights[whole], slot.weights[block], f"{name} ({state.name})")

        had = sum(block.stop - block.start for _, block in parts)
        nbytes = state.maps["weights"].nbytes - had
        self._device.lane(LaneName.GATHER).submit(
            name, gather, writes=(slot.record,), nbytes=nbytes
        )

    def slots(self, window: Window, refreshed: Iterable[int]) -> SlotAgreement:
        return CommonSlots(window, self._layers, sorted(refreshed))

    def order(self, expected: Sequence[int], num_slots: int) -> Order:
        trained = [layer for layer in expected if self._layers[layer].optimizer.trained]
        self._order = OneOrder(self._ranks.control, trained, num_slots)
        return self._order

    def absent(self, state: LayerState, slot: GradientSlot) -> frozenset[int]:
        return state.optimizer.trained - slot.arrived

    def reduce(self, state: LayerState, slot: GradientSlot, after: Sequence[Fence]) -> None:
        self.note("reduce", state.index)
        self._touched.update((state.index, k) for k in slot.arrived)
        places = state.maps["weights"]
        gradients = [
            places.view(slot.gradients, *each.span) for each in state.layout.trainable_ranges
        ]
        group, room, name = self._ranks.reduce, self._room, f"reduce {state.index}"

        def reduce() -> None:
            for flat in gradients:
                memory = None if room is None else room[: flat.nbytes].view(flat.dtype)
                group.mean(flat, memory, f"{name} ({state.name})")

        received = sum(flat.nbytes for flat in gradients) - state.maps["gradients"].nbytes
        self._device.lane(LaneName.REDUCE).submit(
            name, reduce, after, writes=(slot.record,), nbytes=received
        )

    def publishing(self, state: LayerState, work: Callable[[], None]) -> Callable[[], None]:
        weights, layer = self._weights, state.index
        weights.expect(layer)
        if self._exchanges:
            return work

        def run() -> None:
            work()
            weights.publish(layer)

        return run

    def exchange(self, state: LayerState) -> None:
        if not self._exchanges:
            return
        name = f"exchange {state.index}"
        shards, bytes_of = self._ranks.shards, state.maps["weights"].bytes_of
        blocks = [
            bytes_of(*block) for each, block, _ in shards.exchanged(state.layout) if each.trainable
        ]
        received = sum(block.stop - block.start for block in blocks)

        def exchange() -> None:
            self._exchange_parts(state, name, trained_alone=True)
            self._weights.publish(state.index)

        self._device.lane(LaneName.EXCHANGE).submit(
            name,
            exchange,
            writes=(state.records["weights"],),
            nbytes=received // shards.num_nodes * (shards.num_nodes - 1),
        )

    def _exchange_parts(
        self, state: LayerState, operation: str, *, trained_alone: bool = False
    ) -> None:
        bytes_of = state.maps["weights"].bytes_of
        for layer_range, block, shard in self._ranks.shards.exchanged(state.layout):
            if layer_range.trainable or not trained_alone:
                self._ranks.exchange.gather(
                    state.weights[bytes_of(*block)],
                    state.weights[bytes_of(*shard)],
                    f"{operation}: layer {state.index}",
                )

    def note(self, lane: str, layer: int) -> None:
        """Add the layer to the checksum of a lane's collectives."""
        self.issued[lane] = zlib.crc32(layer.to_bytes(4, "little"), self.issued[lane])

    # -- agreement --------------------------------------------------------------------------------
    def prepare_training(self) -> None:
        """Allocate memory for other ranks' gradients, once."""
        ranges = (
            state.maps["weights"].bytes_of(*each.span)
            for state in self._layers
            for each in state.layout.trainable_ranges
        )
        largest = max((part.stop - part.start for part in ranges), default=0)
        if self._room is None and self._device.torch_device.type == "cpu" and largest:
            self._room = self._device.memory.allocate(largest, torch.uint8, "reduced gradients")

    def meet(self, layers: Sequence[LayerState], square_sums: list[float]) -> list[float]:
        for layer in self._read_apart:
            self._layers[layer].records["weights"].wait()
        self._read_apart.clear()
        sums = [value for state in layers for value in state.gradients.square_sums.values()]
        marks = [*self.issued.values(), _checksum(self._order.seen)]
        sizes = [len(state.layout.slices) for state in layers]
        flags = [
            float((state.index, k) in self._touched)
            for state in layers
            for k in range(len(state.layout.slices))
        ]
        numbers = torch.tensor([_sum(sums), *map(float, marks), *flags], dtype=torch.float64)
        rows = self._ranks.control.numbers(numbers, "gate")
        self._check_same(rows[:, ISSUED].tolist())
        if len(set(rows[:, SEEN_ORDER].tolist())) == 1:
            self._order.adopt()
        has_gradient = (rows[:, FLAGS:] > 0).any(dim=0).split(sizes)
        for state, layer_flags in zip(layers, has_gradient, strict=True):
            state.gradients.restrict(set(layer_flags.nonzero().flatten().tolist()))
        rank_sums: list[float] = rows[:, SQUARE_SUM].tolist()
        return rank_sums

    def _check_same(self, marks: list[list[float]]) -> None:
        """Raise RankError if the ranks' checksums differ."""
        groups: dict[tuple[float, ...], list[int]] = {}
        for rank, of_rank in zip(self._ranks.control.members, marks, strict=True):
            groups.setdefault(tuple(of_rank), []).append(rank)
        if len(groups) > 1:
            raise RankError(
                "the ranks gathered or reduced different layers in this step: "
                f"{' against '.join(map(str, groups.values()))}. Every rank must call forward and "
                "backward equally often, and use the same layers in one order. Load the last "
                "checkpoint"
            )

    def forget(self) -> None:
        self._touched.clear()

    def dropped(self) -> None:
        self.note("reduce", len(self._layers))  # the gate finds out if others have not

    def settle(self, layers: Iterable[int]) -> None:
        for layer in layers:
            self._weights.wait(layer, self._weights.submitted(layer))

    def refuse_write(self, state: LayerState) -> None:
        raise ConfigError(
            f"a parameter of {state.layout.name} was written in place: several ranks share its "
            "memory, and each would write. Use load_state_dict on every rank, or "
            "engine.load_checkpoint"
        )

    def fail(self, reason: str) -> None:
        self._ranks.fail(reason)

    def barrier(self, operation: str) -> None:
        self._ranks.control.barrier(operation)

    def spread(self, operation: str) -> None:
        def work() -> None:
            for state in self._layers:
                self._exchange_parts(state, operation)

        if self._exchanges:
            self._device.lane(LaneName.EXCHANGE).submit("exchange all", work).wait()
        self.barrier(operation)

    def agree(self, operation: str) -> None:
        self.barrier(operation)
        if self._exchanges:
            self._device.lane(LaneName.EXCHANGE).submit(
                "compare nodes", lambda: self._copy_first(operation)
            ).wait()
        self.barrier(operation)

    def _copy_first(self, operation: str) -> None:
        group = self._ranks.exchange
        parts = [
            state.weights[state.maps["weights"].bytes_of(*block)]
            for state in self._layers
            for _, block in self._ranks.shards.fetched(state.layout)
        ]
        sums = torch.tensor([_checksum(part.numpy()) for part in parts])
        rows = group.numbers(sums, operation)
        differ = (rows != rows[0]).any(dim=0).nonzero().flatten().tolist()
        if differ:
            logger.warning(
                "%s: %d of %d parts of the weights differ between the nodes: those of rank %d hold",
                operation,
                len(differ),
                len(parts),
                self._ranks.control.members[0],
            )
        for number in differ:
            group.send(parts[number], operation)

    def close(self) -> None:
        """The lanes have ended: the weights become this process's own."""
        self._weights.close()


def check_alike(ranks: Ranks, layout: ModelLayout, plan: Plan, precision: str) -> None:
    """Raise ConfigError on every rank if they got different models or configs."""
    parameters = [
        f"{part.name} {part.shape} {part.trainable}"
        for layer in layout.layers
        for part in layer.slices
    ]
    ranks.check_same(
        {
            "the model's parameters": ", ".join(parameters),
            "the precision": precision,
            "the plan": f"{plan.window} {plan.prefetch} {sorted(plan.resident)} "
            f"{plan.accumulates} {sorted(plan.early)} {plan.homes} "
            f"{[str(made) for made in plan.demand.formats]}",
        }
    )


def _checksum(data: Any) -> int:
    return zlib.crc32(data.encode() if isinstance(data, str) else data)


def _sum(values: Sequence[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan
