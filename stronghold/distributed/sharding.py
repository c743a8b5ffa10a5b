"""What several ranks add to a step: links in its chains, and agreement.

A fetch is host -> [gather] -> slot, a drain is slot -> [reduce] -> host, an update is kernel ->
[exchange]. Owns the links in brackets, the order in which ranks make them, and what they decide
together. `Team` is a process that trains alone and agrees with itself, `RankTeam` one of several
ranks; `NodeWeights` are the weights that a node's ranks share, with versions that say since when
another rank's part is new. Entered by the training thread, and by autograd's in backward.

What the records of this process (`device.base`) cannot tell, for it is about other processes:
  * whether another rank's part of the node's weights is new   -> `NodeWeights.waiting`
  * whether others have read this rank's part before it changes -> they have, before they take part
                                                                  in the gate (`_read_apart`)
  * whether all ranks gather and reduce the same layers        -> `issued`, which the gate compares

[Note: lockstep] The fetches of a training pass are gathers, in which every rank takes part; their
order must depend on nothing that may differ between ranks:
  * a layer that this rank does not use  -> the schedule is followed as if it did
  * a pass that this rank makes alone,   -> its fetches meet nobody, and the slots hold afterwards
    or a use that is not next               what they held before
  * another order of uses than predicted -> adopted when every rank has seen it (`propose`), with
                                            the layers that were skipped
A fetch that meets nobody copies the whole layer from the node's weights over this rank's own link.

[Note: one order] Every backward reduces every trained layer once, in one order, with zeros where
nothing came. A layer is closed when all of its gradients have come, when a slot is needed for
another, or when backward ends; closed layers are reduced as soon as those before them are. What
comes later gathers in memory of torch's, and is reduced in rounds that are agreed on when backward
ends.

[Note: no wait in a circle] One rank waits for a gradient slot, so for other ranks' reductions of
the layer that was there; another waits for a gather, so for the first to come further. But a rank
that has come as far as a layer has closed all layers whose slots this one could need, whether it
used them or not; and the first rank has issued every gather up to there.

[Note: exchange] On several nodes a rank's part of the node's weights has its own range, which it
updates, and those of its peers, which the exchange lane writes ([Note: nodes] of `model.layout`).
It is submitted with the layer's update, in the order of layers that the gate agreed on, for each
exchange meets the peers: two orders would be a deadlock. A checkpoint reads own ranges, which an
exchange sends and never writes.
"""

from __future__ import annotations

import logging
import math
import mmap
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from stronghold.device.base import Device, Fence, only_waits
from stronghold.distributed.process_groups import Group, Ranks
from stronghold.errors import ConfigError, RankError
from stronghold.memory.buffers import GradientSlot, Slot
from stronghold.memory.layer import LayerState
from stronghold.memory.slab import NodeMemory, meta_slab
from stronghold.model.arrays import weight_map
from stronghold.model.layout import ModelLayout
from stronghold.optim.states import Formats
from stronghold.plan.plan import Plan

logger = logging.getLogger("stronghold")

PARTS = 5  # of the gate's numbers, before the parameters' flags: a sum, four checksums


class Order:
    """The order in which layers' gradients leave their slots. Every method but `passed` returns the
    layers that are due now. Alone: each when it is complete."""

    def complete(self, layer: int) -> list[int]:
        """All gradients of the layer have come."""
        return [layer]

    def reached(self, layer: int) -> list[int]:
        """Backward has come to the layer, or would have: this rank may not use it."""
        return []

    def making_room(self, gathering: Sequence[int]) -> Sequence[int]:
        """A slot is needed, and these layers gather in all that there are."""
        return gathering[:1]

    def rest(self) -> list[int]:
        """Backward has ended."""
        return []

    def further(self, gathering: Sequence[int]) -> list[int]:
        """These layers still have gradients; to be asked until none is due."""
        return list(gathering)

    def passed(self, layer: int) -> bool:
        """Whether the layer was due in this backward: what comes now waits for `further`."""
        return False

    def begin_again(self) -> None:
        """The next backward begins."""


class OneOrder(Order):
    """That of several ranks ([Note: one order]): `trained` layers, as they are expected to be
    complete. Blocks take turns in `num_slots` gradient slots."""

    def __init__(self, control: Group, trained: Sequence[int], num_slots: int) -> None:
        self._control = control
        self._layers = list(trained)
        self._num_slots = max(1, num_slots)
        self._next = 0
        self._closed: set[int] = set()
        self._complete: list[int] = []  # as they came in this backward
        self._seen = list(trained)  # in the last one

    def complete(self, layer: int) -> list[int]:
        if self.passed(layer):
            return []
        self._complete.append(layer)
        return self._close([layer])

    def reached(self, layer: int) -> list[int]:
        """Close the layers whose slots it could need ([Note: no wait in a circle])."""
        if layer not in self._layers:
            return []
        return self._close(self._layers[: max(0, self._layers.index(layer) + 1 - self._num_slots)])

    def making_room(self, gathering: Sequence[int]) -> Sequence[int]:
        return self._close(self._layers[: min(map(self._layers.index, gathering)) + 1])

    def rest(self) -> list[int]:
        return self._close(self._layers)

    def further(self, gathering: Sequence[int]) -> list[int]:
        if not self._layers:
            return []
        mine = torch.tensor([layer in gathering for layer in self._layers], dtype=torch.uint8)
        wanted = self._control.numbers(mine, "further gradients").any(dim=0).tolist()
        return [layer for layer, found in zip(self._layers, wanted, strict=True) if found]

    def passed(self, layer: int) -> bool:
        return layer in self._layers[: self._next]

    def begin_again(self) -> None:
        complete = dict.fromkeys(self._complete)
        self._seen = [*complete, *(layer for layer in self._layers if layer not in complete)]
        self._next = 0
        self._closed.clear()
        self._complete.clear()

    def _close(self, layers: Iterable[int]) -> list[int]:
        self._closed.update(layers)
        begin = self._next
        while self._next < len(self._layers) and self._layers[self._next] in self._closed:
            self._next += 1
        return self._layers[begin : self._next]

    # -- agreed on at the gate --------------------------------------------------------------------
    @property
    def seen(self) -> str:
        """In what order this rank's layers were complete in the last backward."""
        return str(self._seen)

    def adopt(self) -> None:
        """Every rank saw the same order: expect it from now on."""
        self._layers = list(self._seen)


class Team:
    """A process that trains alone. `lockstep`: what one rank does alone must not change the order
    of its fetches ([Note: lockstep])."""

    lockstep = False

    # -- links ------------------------------------------------------------------------------------
    def fetched(self, state: LayerState, *, together: bool) -> Sequence[slice]:
        """What this rank copies to a slot over its own link, in bytes of the layer's weights;
        `gather` brings the others. `together`: all ranks fetch the layer now."""
        return (slice(0, state.maps["weights"].nbytes),)

    def gather(self, state: LayerState, slot: Slot, *, together: bool) -> None:
        """Queue, behind the fetch, what fills the slot from other ranks."""

    def order(self, expected: Sequence[int], num_slots: int) -> Order:
        """The order of the drains with so many gradient slots, `expected` by the schedule."""
        return Order()

    def absent(self, state: LayerState, slot: GradientSlot) -> frozenset[int]:
        """The parameters that must be zeros in the slot, since no gradient came here."""
        return frozenset()

    def reduce(self, state: LayerState, slot: GradientSlot, after: Sequence[Fence]) -> None:
        """Queue what makes this rank's range of the slot the mean over the ranks."""

    def publishing(self, state: LayerState, work: Callable[[], None]) -> Callable[[], None]:
        """`work`, the end of an update of the layer, after which other ranks may read it."""
        return work

    def exchange(self, state: LayerState) -> None:
        """An update was submitted: queue what brings other nodes' ranges of the layer."""

    # -- agreement --------------------------------------------------------------------------------
    def prepare_training(self) -> None:
        """The first backward begins."""

    def propose(self, uses: Sequence[object], adopt: Callable[[], None]) -> None:
        """A training pass has used layers in this order: `adopt` it, if every rank has."""
        adopt()

    def meet(self, layers: Sequence[LayerState], square_sums: list[float]) -> list[float]:
        """The sums of squares of every rank's gradients of the step, those here being
        `square_sums`; each layer then has the gradients that came on any rank. RankError when the
        ranks did not do the same."""
        return square_sums

    def forget(self) -> None:
        """The step's gradients were used, or are void."""

    def dropped(self) -> None:
        """The user threw the step's gradients away."""

    def settle(self, layers: Iterable[int]) -> None:
        """Wait until other ranks' parts of these layers' weights are new, too."""

    def refuse_write(self, state: LayerState) -> None:
        """ConfigError where weights cannot be written in place on one rank."""

    def fail(self, reason: str) -> None:
        """This rank cannot go on: the others shall not wait for it."""

    def check(self) -> None:
        """RankError once this rank has failed."""

    def barrier(self, operation: str) -> None:
        """Wait until every rank is here; what each wrote before, all see after."""

    def spread(self, operation: str) -> None:
        """Every rank has written its own ranges: when this returns, every node has all of them."""

    def agree(self, operation: str) -> None:
        """Every node's weights were written: when this returns, all have those of the first."""

    def close(self) -> None:
        """The lanes have ended."""


class RankTeam(Team):
    """One of several ranks."""

    lockstep = True

    def __init__(self, device: Device, layers: Sequence[LayerState], weights: NodeWeights) -> None:
        ranks = weights.ranks
        self._device = device
        device.alone = False
        self._layers = layers
        self._weights = weights
        self._ranks = ranks
        self._exchange = ranks.exchange if ranks.num_nodes > 1 else None
        # A checksum of what each lane was given to do with the other ranks: each lane has an order
        # of its own, and how the two mix differs where ranks skip layers.
        self.issued = {"gather": 0, "reduce": 0}
        self._read_apart: set[int] = set()  # layers of which this rank reads others' parts
        self._touched: set[tuple[int, int]] = set()  # gradients that came here in this step
        self._room: torch.Tensor | None = None
        self._order = OneOrder(ranks.control, (), 1)
        self._uses: tuple[Sequence[object], Callable[[], None]] = (), lambda: None

    # -- links ------------------------------------------------------------------------------------
    def fetched(self, state: LayerState, *, together: bool) -> Sequence[slice]:
        if together:
            bytes_of, shards = state.maps["weights"].bytes_of, self._ranks.shards
            return [bytes_of(*block) for _, block in shards.fetched(state.layout)]
        self._read_apart.add(state.index)
        # The fetch lane's next operation is the copy.
        self._device.fetch.submit(f"await {state.index}", self._weights.waiting(state.index))
        return super().fetched(state, together=together)

    def gather(self, state: LayerState, slot: Slot, *, together: bool) -> None:
        if not together:
            return
        self.note("gather", state.index)
        group, name = self._ranks.gather, f"gather {state.index}"
        said = f"{name} ({state.name})"
        if group.num_ranks == 1:  # the only one of its node
            return
        bytes_of = state.maps["weights"].bytes_of
        parts = [
            (bytes_of(*each.span), bytes_of(*block))
            for each, block in self._ranks.shards.fetched(state.layout)
        ]

        def gather() -> None:
            for whole, block in parts:
                group.gather(slot.weights[whole], slot.weights[block], said)

        had = sum(block.stop - block.start for _, block in parts)
        nbytes = state.maps["weights"].nbytes - had
        self._device.lane("gather").submit(name, gather, writes=(slot.record,), nbytes=nbytes)

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
                there = None if room is None else room[: flat.nbytes].view(flat.dtype)
                group.mean(flat, there, f"{name} ({state.name})")

        received = sum(flat.nbytes for flat in gradients) - state.maps["gradients"].nbytes
        self._device.lane("reduce").submit(
            name, reduce, after, writes=(slot.record,), nbytes=received
        )

    def publishing(self, state: LayerState, work: Callable[[], None]) -> Callable[[], None]:
        weights, layer = self._weights, state.index
        weights.expect(layer)
        if self._exchange is not None:
            return work

        def run() -> None:
            work()
            weights.publish(layer)

        return run

    def exchange(self, state: LayerState) -> None:
        if self._exchange is None:
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

        self._device.lane("exchange").submit(
            name,
            exchange,
            writes=(state.records["weights"],),
            nbytes=received // shards.num_nodes * (shards.num_nodes - 1),
        )

    def _exchange_parts(
        self, state: LayerState, operation: str, *, trained_alone: bool = False
    ) -> None:
        assert self._exchange is not None
        bytes_of = state.maps["weights"].bytes_of
        for each, block, own in self._ranks.shards.exchanged(state.layout):
            if each.trainable or not trained_alone:
                self._exchange.gather(
                    state.weights[bytes_of(*block)],
                    state.weights[bytes_of(*own)],
                    f"{operation}: layer {state.index}",
                )

    def note(self, lane: str, layer: int) -> None:
        """The layer is on its way to a lane that meets the other ranks."""
        self.issued[lane] = zlib.crc32(layer.to_bytes(4, "little"), self.issued[lane])

    # -- agreement --------------------------------------------------------------------------------
    def prepare_training(self) -> None:
        """Make room for other ranks' gradients, once."""
        ranges = (
            state.maps["weights"].bytes_of(*each.span)
            for state in self._layers
            for each in state.layout.trainable_ranges
        )
        largest = max((part.stop - part.start for part in ranges), default=0)
        if self._room is None and self._device.torch_device.type == "cpu" and largest:
            self._room = self._device.allocate(largest, torch.uint8, "reduced gradients")

    def propose(self, uses: Sequence[object], adopt: Callable[[], None]) -> None:
        self._uses = uses, adopt

    def meet(self, layers: Sequence[LayerState], square_sums: list[float]) -> list[float]:
        for layer in self._read_apart:
            self._layers[layer].records["weights"].wait()
        self._read_apart.clear()
        # As DeepSpeed does: of parameters that every model-parallel rank has whole, one counts.
        whole = self._ranks.model_parallel_rank == 0
        sums = [
            value
            for state in layers
            for k, value in state.gradients.square_sums.items()
            if whole or _is_split(state.parameters[k]) or not math.isfinite(value)
        ]
        uses, adopt_uses = self._uses
        marks = [*self.issued.values(), _checksum(str(uses)), _checksum(self._order.seen)]
        sizes = [len(state.layout.slices) for state in layers]
        flags = [
            float((state.index, k) in self._touched)
            for state in layers
            for k in range(len(state.layout.slices))
        ]
        mine = torch.tensor([_sum(sums), *map(float, marks), *flags], dtype=torch.float64)
        rows = self._ranks.control.numbers(mine, "gate")
        self._check_same(rows[:, 1:3].tolist())
        for column, adopt in ((3, adopt_uses), (4, self._order.adopt)):
            if len(set(rows[:, column].tolist())) == 1:
                adopt()
        came = (rows[:, PARTS:] > 0).any(dim=0).split(sizes)
        for state, of_layer in zip(layers, came, strict=True):
            state.gradients.restrict(set(of_layer.nonzero().flatten().tolist()))
        found: list[float] = rows[:, 0].tolist()
        if self._ranks.norms is not None:
            mine = torch.tensor([_sum(found)], dtype=torch.float64)
            found = self._ranks.norms.numbers(mine, "norm").flatten().tolist()
        return found

    def _check_same(self, marks: list[list[float]]) -> None:
        """RankError when the ranks' checksums differ."""
        groups: dict[tuple[float, ...], list[int]] = {}
        for rank, of_rank in zip(self._ranks.control.members, marks, strict=True):
            groups.setdefault(tuple(of_rank), []).append(rank)
        if len(groups) > 1:
            raise RankError(
                "the ranks gathered or reduced different layers in this step: "
                f"{' against '.join(map(str, groups.values()))}. Every rank must call forward and "
                "backward equally often, and use the layers in one order (skipping some is fine)"
            )

    def forget(self) -> None:
        self._touched.clear()

    def dropped(self) -> None:
        self.note("reduce", len(self._layers))  # the gate finds out if others have not

    def settle(self, layers: Iterable[int]) -> None:
        for layer in layers:
            self._weights.waiting(layer)()

    def refuse_write(self, state: LayerState) -> None:
        raise ConfigError(
            f"a parameter of {state.layout.name} was written in place: several ranks share its "
            "memory, and each would write. Use load_state_dict on every rank, or "
            "engine.load_checkpoint"
        )

    def fail(self, reason: str) -> None:
        self._ranks.fail(reason)

    def check(self) -> None:
        if self._ranks.watch is not None:
            self._ranks.watch.check_self()

    def barrier(self, operation: str) -> None:
        self._ranks.control.barrier(operation)

    def spread(self, operation: str) -> None:
        def work() -> None:
            for state in self._layers:
                self._exchange_parts(state, operation)

        if self._exchange is not None:
            self._device.lane("exchange").submit("exchange all", work).wait()
        self.barrier(operation)

    def agree(self, operation: str) -> None:
        self.barrier(operation)
        if self._exchange is not None:
            self._device.lane("exchange").submit(
                "compare nodes", lambda: self._copy_first(operation)
            ).wait()
        self.barrier(operation)

    def _copy_first(self, operation: str) -> None:
        group = self._exchange
        assert group is not None
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
    """ConfigError, on every rank, when they were given different models or configs."""
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


def _is_split(parameter: nn.Parameter) -> bool:
    """Whether a model-parallel rank has a part of the parameter that no other has."""
    names = ("model_parallel", "tensor_model_parallel")
    return any(bool(getattr(parameter, name, False)) for name in names)


POLL_S = 1e-4
CHECK_EVERY_S = 1.0


class NodeWeights:
    """Every layer's weights: all ranks of the node see them whole, each writes its own part, and on
    several nodes what its peers have written of theirs. The ranks make it together, and `fills`
    says who writes the model's values. `versions[layer, index]` counts updates of the part that
    process `index` of the node fetches: whoever reads another's waits for them."""

    def __init__(self, layout: ModelLayout, formats: Formats, ranks: Ranks) -> None:
        self.ranks = ranks
        self._layers = layout.layers
        self._maps = [weight_map(layer, formats) for layer in layout.layers]
        self._expected = [0] * len(layout.layers)  # updates of each layer that were submitted
        self.fills = ranks.on_node.index == 0
        counts = len(layout.layers) * ranks.on_node.count
        end = -(-counts * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        self._begins = []
        for of_layer in self._maps:
            self._begins.append(end)
            end += of_layer.nbytes
        self._make(max(end, 1), counts)

    def _make(self, nbytes: int, counts: int) -> None:
        neighbours = self.ranks.on_node
        self._memory = NodeMemory("weights", nbytes, neighbours)
        versions = self._memory.part(0, counts, torch.int64).view(-1, neighbours.count)
        self._versions: Any = versions.numpy()
        for layer in self._layers:  # a page lies near the process that touches it first
            for _, block in self.ranks.shards.fetched(layer):
                self.room(layer.index)[self._maps[layer.index].bytes_of(*block)].zero_()
        neighbours.barrier()  # before the values of all ranks are written by one

    def room(self, index: int) -> torch.Tensor:
        """The layer's whole weight array, as bytes."""
        return self._memory.part(self._begins[index], self._maps[index].nbytes, torch.uint8)

    def close(self) -> None:
        """The model is given back: what each process does to it from now on is its own affair."""
        self._memory.make_private()
        self._memory.close()

    # -- versions ---------------------------------------------------------------------------------
    def expect(self, layer: int) -> None:
        """An update of the layer is submitted, on every rank."""
        self._expected[layer] += 1

    def publish(self, layer: int) -> None:
        """This rank's part of the layer is new."""
        self._versions[layer, self.ranks.on_node.index] += 1

    def waiting(self, layer: int) -> Callable[[], None]:
        """What waits until the layer is as new as every rank's last submitted update."""
        expected, versions, ranks = self._expected[layer], self._versions[layer], self.ranks

        @only_waits
        def wait() -> None:
            looked_s = time.monotonic()
            while int(versions.min()) < expected:
                time.sleep(POLL_S)
                if ranks.watch is not None and time.monotonic() - looked_s > CHECK_EVERY_S:
                    looked_s = time.monotonic()
                    ranks.watch.check(f"updates of layer {layer}", ranks.control.members)

        return wait


class SimulatedWeights(NodeWeights):
    """The node's weights without bytes; of the others' parts nothing is awaited."""

    def _make(self, nbytes: int, counts: int) -> None:
        self._versions = np.zeros((len(self._layers), 1), dtype=np.int64)

    def room(self, index: int) -> torch.Tensor:
        return meta_slab(self._maps[index].nbytes, torch.uint8)

    def close(self) -> None:
        """There are no bytes."""
