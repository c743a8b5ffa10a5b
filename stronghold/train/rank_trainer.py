"""Several ranks own whole layers: the nouns of one rank, with what ranks need.

[Note: turns]
1. All ranks share an order of layers. In a micro-batch each layer has one turn: all ranks reduce
   its gradients to its owner, from a gradient slot. A rank that has none reduces zeros.
2. A layer is ready when it is complete, when another one takes its slot, or when backward ends. If
   it is its turn, its slot is reduced.
3. An early layer is ready before its turn. It is copied to a host buffer of its own, and its slot
   goes to others. In its turn the reduce lane copies it back to a slot that is free.
4. A late layer has gradients after its turn, or is not in the order yet. Each rank sums them on the
   host, apart from the owner's sum, and the clip barrier reduces them.
5. The end of the micro-batch ends its turns. So ranks may differ in the number of backwards.

[Note: no deadlock between ranks]
1. Let T be the first turn that has not ended. A rank that has not submitted T waits at most for
   turns before T, and these have ended. So it comes to the end of its micro-batch, which submits
   all turns.
2. So every rank submits T, and no lane of reductions has anything before it. T ends.
3. A fetch waits for an update of the step before, and an update waits for no rank.

[Note: the mean] Gradients are added in the dtype in which they come, as in DDP. The division by the
number of ranks is a part of the factor that an update applies.

[Note: interrupts] An exception before a step's first turn stays on its rank. A later one, until the
step's end, ends all ranks: the others wait for a turn, or for an update, that does not come.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stronghold.devices.fences import LaneName, Record
from stronghold.errors import ConfigError, RankError
from stronghold.train.arrays import Arrays, Memory
from stronghold.train.early_updates import EarlyUpdates
from stronghold.train.gradients import Gradients
from stronghold.train.layer import GradientState, Layer, Slot
from stronghold.train.ranks import OwnersUpdate, Ranks
from stronghold.train.trainer import Trainer
from stronghold.train.updates import LayerUpdate, StepResult
from stronghold.train.weights import Weights

logger = logging.getLogger("stronghold")


class RankArrays(Arrays):
    """Weights lie in the node's memory. The other arrays of a layer exist on its owner alone."""

    def __init__(
        self,
        ranks: Ranks,
        device: Any,
        layers: Sequence[Layer],
        *,
        in_files: Mapping[Layer, Sequence[str]],
        **settings: Any,
    ) -> None:
        ranks.open(layers)
        self._ranks = ranks
        owned = {layer: in_files[layer] if ranks.owns(layer) else () for layer in layers}
        super().__init__(device, layers, in_files=owned, **settings)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            device.pinning.pin(ranks.memory.bytes)
            self._pinned.append(ranks.memory.bytes)
            self.host_bytes += ranks.memory.bytes.nbytes // ranks.count
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
            ranks.share_weights()
            for layer in filter(ranks.owns, layers):
                super()._begin_masters(layer)
            undo.pop_all()

    def _zeros(self, layer: Layer, array: str, numel: int, dtype: torch.dtype) -> Tensor:
        if array == "weights":
            return self._ranks.weights_of(layer)
        return super()._zeros(layer, array, numel if self._ranks.owns(layer) else 0, dtype)

    def _fill(self, layer: Layer, memory: Memory) -> None:
        if self._ranks.index == 0:  # the values of other ranks' models are not read
            super()._fill(layer, memory)

    def _begin_masters(self, layer: Layer) -> None:
        """Wait for the weights, which another rank may still fill."""

    def owns(self, layer: Layer) -> bool:
        return self._ranks.owns(layer)

    def fills(self, layer: Layer, array: str) -> bool:
        return self._ranks.index == 0 if array == "weights" else self._ranks.owns(layer)

    def restart_master(self, layer: Layer, position: int) -> None:
        if self._ranks.owns(layer):
            super().restart_master(layer, position)


class RankWeights(Weights):
    """Refuses what the program writes: the ranks of a node would all write the same memory."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._versions: dict[Layer, int] = {}
        self.accept(self._layers)

    def accept(self, layers: Sequence[Layer]) -> None:
        """The present values are right: no program has written them."""
        self._versions.update((layer, layer.version[1]) for layer in layers)

    def refresh(self, layer: Layer) -> None:
        if layer.version[1] != self._versions[layer] or self._arrays.moved(layer):
            raise ConfigError(
                f"the program wrote into parameters of the layer of {layer.names[0]}: the ranks of "
                "a node share their memory, and each of them would write. Write in `with "
                "engine.write() as writes:`, where `writes` is True, or use load_state_dict"
            )
        super().refresh(layer)


Buffer = tuple[Tensor, Record]


class RankGradients(Gradients):
    """Reduces each layer's gradients to its owner ([Note: turns])."""

    def __init__(self, ranks: Ranks, device: Any, *args: Any, **settings: Any) -> None:
        super().__init__(device, *args, **settings)
        self._ranks, self._lane = ranks, device.lane(LaneName.REDUCE)
        self._trained = [layer for layer in self._layers if layer.num_trained]
        # Until the first clip barrier a guess, which all ranks share: a wrong one costs buffers.
        self._order, self._is_agreed = self._trained[::-1], False
        self._turn = self.num_turns = 0  # of this micro-batch; of this step
        self._early: set[Layer] = set()
        self._late: set[Layer] = set()
        self._buffers: dict[tuple[Layer, str], Buffer] = {}  # made when first needed, and kept
        # The positions whose gradients have come in this step, on this rank.
        self._arrived: dict[Layer, set[int]] = {}

    # -- turns ------------------------------------------------------------------------------------
    def _offload(self, layer: Layer) -> None:
        slot = layer.gradient_slot
        assert slot is not None
        self._enter(slot)
        present = slot.arrived | slot.sums.keys()
        for position, view in enumerate(slot.views_of(layer, layer.trained_bytes)):
            if position not in present:
                view.zero_()
        self._arrived.setdefault(layer, set()).update(present)
        super()._offload(layer)

    def _to_host(self, layer: Layer, slot: Slot, positions: Sequence[int]) -> None:
        """The layer is ready, in its turn or not."""
        everything = range(layer.num_trained)
        if layer in self._early or layer not in self._order[self._turn :]:
            staged = self._staging_buffer()
            self._copy_to_host(layer, slot, everything, *staged)
            gradients = staged[0][: layer.trained_bytes].view(layer.dtype)
            total = self._buffer(layer, "late")
            self._add(layer, total, (gradients, staged[1]), is_first=layer not in self._late)
            self._late.add(layer)
        elif self._order[self._turn] is layer:
            self._reduce(layer, slot)
        else:
            self._copy_to_host(layer, slot, everything, *self._buffer(layer, "early"))
            self._early.add(layer)
        self._advance()

    def _buffer(self, layer: Layer, kind: str) -> Buffer:
        if (layer, kind) not in self._buffers:
            dtype = self._arrays.gradient_dtype(layer.dtype) if kind == "late" else layer.dtype
            self._buffers[layer, kind] = self._arrays.pinned(layer.trained_numel, dtype), Record()
        return self._buffers[layer, kind]

    def _add(self, layer: Layer, total: Buffer, addend: Buffer, *, is_first: bool) -> None:
        work: Any = partial(total[0].copy_ if is_first else total[0].add_, addend[0])
        reads, writes = (addend[1],), (total[1],)
        self._device.gradients.submit(f"sum {layer.index}", work, reads=reads, writes=writes)

    def _advance(self, *, is_over: bool = False) -> None:
        """Submit the turns of early layers, and of layers that this rank does not have."""
        while self._turn < len(self._order):
            layer = self._order[self._turn]
            is_missing = is_over or (layer.is_block and not layer.num_calls)
            if layer not in self._early and (layer.gradient_slot is not None or not is_missing):
                return
            slots = list(self._shared) if layer.is_block else [self._own_slot(layer)]
            slot = next((slot for slot in slots if slot.layer is None), None)
            if slot is None:  # layers gather in all of them
                return
            if slot in self._shared:
                self._shared.append(self._shared.pop(self._shared.index(slot)))
            load: Callable[[], object] = slot.memory[: layer.trained_bytes].zero_
            reads: tuple[Record, ...] = ()
            if layer in self._early:
                self._early.remove(layer)
                buffer, record = self._buffer(layer, "early")
                target = slot.memory[: layer.trained_bytes].view(layer.dtype)
                load, reads = partial(self._device.copy, target, buffer), (record,)
            self._reduce(layer, slot, load, reads)

    def _reduce(
        self,
        layer: Layer,
        slot: Slot,
        load: Callable[[], object] | None = None,
        reads: Sequence[Record] = (),
    ) -> None:
        """Queue the layer's turn, from a slot, which `load` fills first. The owner alone copies the
        sum to the host."""
        memory, is_owned = slot.memory[: layer.trained_bytes].view(layer.dtype), self._owns(layer)

        def work() -> None:
            if load is not None:
                load()
            self._ranks.reduce_to_owner(layer, memory)
            if not is_owned:
                self._device.memory.poison(slot.memory)

        self._lane.submit(
            f"reduce {layer.index}", work, reads=reads, writes=(slot.record,), nbytes=memory.nbytes
        )
        self._turn, self.num_turns = self._turn + 1, self.num_turns + 1
        if is_owned:
            super()._to_host(layer, slot, range(layer.num_trained))
            layer.gradient_state = GradientState.WAITING

    def _owns(self, layer: Layer) -> bool:
        return self._ranks.owns(layer)

    @property
    def has_begun(self) -> bool:
        """True if a layer was ready in this micro-batch."""
        return self._turn > 0 or bool(self._early)

    def end_turns(self) -> None:
        """End the turns of this micro-batch. What comes later in it is late."""
        self._advance(is_over=True)
        assert self._turn == len(self._order), "a layer still gathers gradients"

    def end_micro_batch(self) -> None:
        self.end_turns()
        self._turn = 0

    def collect(self, layer: Layer) -> None:
        """Let the owner have the layer's gradients of all ranks so far. Every rank calls it."""
        self.end_turns()
        if any(self._ranks.of_all(layer in self._late)):
            self._reduce_late(layer)

    # -- the clip barrier -------------------------------------------------------------------------
    def norm(self) -> Callable[[], float]:
        """All ranks meet. Afterwards each of them knows which gradients wait for the step."""
        self.end_micro_batch()
        squares: list[float] = []
        seen: list[tuple[float, Layer]] = []  # by their place in rank 0's order
        for layer, numbers in self._agreed_numbers().items():
            of_layer, arrivals = numbers[2:].view(2, layer.num_trained).tolist()
            squares += of_layer
            layer.waiting = {k for k, num_ranks in enumerate(arrivals) if num_ranks}
            if layer.waiting:
                layer.gradient_state = GradientState.WAITING
                seen.insert(0, (numbers[1].item() or math.inf, layer))
            else:
                self.drop(layer)
        known = self._order if self._is_agreed else []
        seen.sort(key=lambda pair: pair[0])  # those that rank 0 lacks: last
        self._order = [*known, *(layer for _, layer in seen if layer not in known)]
        self._is_agreed, self.num_turns = True, 0
        self._arrived.clear()
        norm = math.sqrt(math.fsum(squares)) / self._ranks.num_ranks
        return lambda: norm

    def _agreed_numbers(self) -> dict[Layer, Tensor]:
        """`_numbers` of each layer, added over the ranks. Where layers are late, the ranks reduce
        these, and add their numbers again."""
        places = {layer: k + 1 for k, layer in enumerate(self._arrived)}
        while True:
            rows = [self._numbers(layer, places.get(layer, 0)) for layer in self._trained]
            flat = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
            self._ranks.add(flat)
            agreed = dict(zip(self._trained, flat.split([*map(len, rows)]), strict=True))
            late = [layer for layer, numbers in agreed.items() if numbers[0]]
            for layer in late:
                self._reduce_late(layer)
            if not late:
                return agreed

    def _numbers(self, layer: Layer, place: int) -> list[float]:
        """The row of a layer: 1 if it is late; its place in rank 0's order; of each parameter the
        owner's sum of squares; of each parameter 1 if this rank had a gradient."""
        squares = [0.0] * layer.num_trained
        if layer.waiting:  # on its owner alone
            if layer not in self._square_sums:
                self._sum_squares(layer)
            sums, fence = self._square_sums[layer]
            fence.wait()
            for position, of_one in zip(sorted(layer.waiting), sums, strict=True):
                squares[position] = of_one
        arrived = self._arrived.get(layer, ())
        arrivals = [float(k in arrived) for k in range(layer.num_trained)]
        is_first = self._ranks.rank == 0
        return [float(layer in self._late), float(place * is_first), *squares, *arrivals]

    def _reduce_late(self, layer: Layer) -> None:
        """Add the late gradients of all ranks, and then the owner's others."""
        late, record = self._buffer(layer, "late")
        record.wait()
        if layer not in self._late:
            late.zero_()
        self._late.discard(layer)
        self._ranks.reduce_on_host(layer, late)
        if self._owns(layer):
            total = self._arrays.of(layer, "gradients"), layer.gradient_record
            self._add(layer, total, (late, record), is_first=not layer.waiting)
            layer.waiting = set(range(layer.num_trained))
            self._sum_squares(layer)

    # -- the end of a step ------------------------------------------------------------------------
    def drop(self, layer: Layer, positions: Collection[int] | None = None) -> None:
        super().drop(layer, positions)
        if positions is None:
            self._late.discard(layer)
            self._arrived.pop(layer, None)
        elif layer in self._arrived:
            self._arrived[layer].difference_update(positions)

    def forget(self) -> None:
        if self.num_turns:  # [Note: interrupts]
            error = sys.exc_info()[1]
            self._ranks.fail(f"{type(error).__name__}: {error}" if error else "an interrupt")
        super().forget()
        self._turn = 0
        self._early.clear()


class RankUpdates(EarlyUpdates):
    """The owner updates a layer. The other ranks wait for its counter."""

    def __init__(self, ranks: Ranks, *args: Any) -> None:
        super().__init__(*args)
        self._ranks = ranks

    def _close_barrier(self, *, clip: float, loss_scale: float) -> float:
        factor = super()._close_barrier(clip=clip, loss_scale=loss_scale)
        return factor / self._ranks.num_ranks  # [Note: the mean]

    def _update_on_host(self, update: LayerUpdate, scale: float) -> None:
        layer, ranks, version = update.layer, self._ranks, update.layer.num_updates + 1
        record, owner = layer.weight_record, ranks.owner(layer)
        exchange = partial(self._device.lane, LaneName.EXCHANGE)
        weights = ranks.weights_of(layer)[: layer.trained_bytes]
        send = partial(ranks.send_weights, layer, owner, weights)
        publish = partial(ranks.publish, layer, version)
        if ranks.owns(layer):
            super()._update_on_host(update, scale)
            self._device.update.submit(f"publish {layer.index}", publish, reads=(record,))
            if ranks.has_nodes:
                exchange().submit(
                    f"send {layer.index}", send, reads=(record,), nbytes=weights.nbytes
                )
        elif ranks.receives(layer):
            work = partial(_in_turn, send, publish)
            exchange().submit(
                f"receive {layer.index}", work, writes=(record,), nbytes=weights.nbytes
            )
        else:
            record.write(OwnersUpdate(ranks, layer, version))

    def _outdate(self, layers: Sequence[Layer], weights: Weights) -> None:
        super()._outdate(layers, weights)
        assert isinstance(weights, RankWeights)
        weights.accept(layers)


class RankTrainer(Trainer):
    """A `Trainer` for one of several ranks. Every rank makes it, and closes it."""

    gradients: RankGradients
    weights: RankWeights
    can_plan_again = False  # one rank alone may have a larger batch

    def __init__(self, *args: Any, ranks: Ranks, **settings: Any) -> None:
        plan, device = settings["plan"], settings["device"]
        assert not plan.early, "ranks update after backward"
        assert not plan.updated_on_gpu, "ranks update on the host"
        self._ranks, device.is_single_process = ranks, False
        device.on_failure = self._lane_failed
        device.lane(LaneName.EXCHANGE)  # the training thread makes it
        self.make_arrays = partial(RankArrays, ranks)
        self.make_weights = RankWeights
        self.make_gradients = partial(RankGradients, ranks)
        self.make_updates = partial(RankUpdates, ranks)
        super().__init__(*args, **settings)

    def _lane_failed(self, error: BaseException) -> None:
        logger.error("%s", error)  # before a launcher ends this process
        self._ranks.fail(str(error))

    def step(self, **settings: Any) -> StepResult:
        try:
            return super().step(**settings)
        except BaseException as error:  # [Note: interrupts]
            self._ranks.fail(f"{type(error).__name__}: {error}")
            raise

    def drop_gradients(self) -> None:
        """All ranks do it. What comes next has turns of its own."""
        self._end_begun()
        super().drop_gradients()

    def _end_begun(self) -> None:
        """End the micro-batch if it has begun on some rank."""
        begun = torch.tensor([float(self.gradients.has_begun)])
        self._ranks.add(begun)
        if begun.item():
            self.gradients.end_micro_batch()

    def drop_gradient(self, layer: Layer, position: int) -> None:
        if self.gradients.has_begun:
            self.gradients.end_turns()
        super().drop_gradient(layer, position)

    # -- between steps ----------------------------------------------------------------------------
    def of_owner(self, layer: Layer, numel: int, read: Callable[[], Tensor]) -> Tensor:
        owns = self._ranks.owns(layer)
        flat = super().of_owner(layer, numel, read).cpu() if owns else torch.empty(numel)
        self._ranks.from_owner(layer, flat)
        return flat

    def gradient(self, layer: Layer, position: int) -> Tensor:
        self.gradients.collect(layer)
        return super().gradient(layer, position) / self._ranks.num_ranks

    def wait_for_readers(self) -> None:
        super().wait_for_readers()
        self._ranks.barrier()

    def adopt(self, written: Callable[[Layer], Iterable[int]]) -> None:
        self._ranks.share_weights()
        self.weights.accept(self.layers)
        super().adopt(written)

    @contextlib.contextmanager
    def changing(self, operation: str) -> Iterator[None]:
        """All ranks enter. Each writes what it owns, and the first one of a node its weights."""
        self.check_between_passes(operation)
        self._end_begun()
        self.gradients.num_turns = 0  # so that what is dropped now ends no rank
        try:
            with super().changing(operation):
                self._ranks.barrier()  # no rank reads the old weights any more
                yield
                self._ranks.barrier()
        except BaseException as error:
            self._ranks.fail(f"{type(error).__name__}: {error}")
            raise
        self.weights.accept(self.layers)

    def close(self) -> None:
        self._stop()
        with contextlib.suppress(RankError):  # no rank leaves while another one reads
            self._ranks.barrier()
        super().close()
        self._ranks.memory.make_private()  # it is pinned no more


def _in_turn(*works: Callable[[], object]) -> None:
    for work in works:
        work()
