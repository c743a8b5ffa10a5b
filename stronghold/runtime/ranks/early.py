"""Updates as gradients come, under several ranks: no gate, and 2 bytes per parameter less.

Owns what the ranks say to each other about one reduction, and the update that uses it. Never
reduces and never decides when: `drains` does. `Agreed` is written by the reduce lane and read by
the update lane behind that reduction's fence; all else is the training thread's.

[Note: flags] A parameter without a gradient on any rank takes no step of Adam: its moments must not
decay. One rank knows that when its hooks have fired; of several each knows its part. So a reduction
carries the flags of its layer, in one small exchange between CPUs, on the lane and at the moment
where the gradients themselves meet the other ranks': nobody waits who did not wait before, and
nobody waits for a GPU. The update reads them when it runs. What is decided before:
  * where gradients drain to       -> the ring; but layers that are deferred, or called several
                                      times ([Note: parts]), into an entry of their own
  * learning rate, bias correction -> read when the update is submitted, for every parameter; the
                                      steps are counted at the end of the step, of those that the
                                      gate names, once
  * that weights change            -> every rank's part of the layer has a new version, changed or
                                      not: whoever waits for it knows no flags

[Note: parts] A layer may be reduced twice in one backward: its slot was needed before all of its
gradients had come. Other parameters in the second one: they are updated alone, as one rank does.
More of the same parameter:
  * the layer was called several times   -> each rank knows that before backward, and all agree on
                                            it: it is held, and updated when backward has ended
  * else (the layer's first part is used) -> ConfigError on every rank, in the same words, as one
                                            rank raises it

Races beside those:
  * ranks reduce different layers  -> the flags carry a checksum of the order so far: RankError on
                                      every rank, before the layer changes
  * another rank's part of a layer is read by a pass that this rank made alone
                                   -> backward begins when such reads have ended
  * a rank dies in the exchange    -> as in every collective: `watch` names it
  * backward fails on one rank     -> the others end; layers that were updated stay so, and this
                                      rank refuses to go on without a checkpoint
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stronghold.device.base import Fence
from stronghold.errors import RankError
from stronghold.memory.gradients import GradientEntry
from stronghold.runtime.adam import ParameterStep, adam_bytes, adam_segments
from stronghold.runtime.distributed import Ranks
from stronghold.runtime.ranks.gathers import Gathers
from stronghold.runtime.updater import Updater


class Agreed:
    """Which of a layer's `count` parameters have a gradient on any rank, in one reduction.

    `arrived` are this rank's; `mark` is a checksum of what it has reduced so far. `touched` is
    known when `exchange`, which the reduce lane calls, has returned; `fence` says when.
    """

    def __init__(self, ranks: Ranks, layer: int, count: int, arrived: set[int], mark: int) -> None:
        self._ranks = ranks
        self._layer = layer
        flags = [int(position in arrived) for position in range(count)]
        self._row = torch.tensor([mark, *flags])
        self.touched: frozenset[int] = frozenset()
        self.fence: Fence | None = None

    def exchange(self) -> None:
        """Say what came here, and learn what came elsewhere. RankError when the ranks reduce
        different layers."""
        rows = self._ranks.flags.numbers(self._row, f"flags {self._layer}")
        check_marks(self._ranks, rows[:, :1].tolist(), used=False)
        self.touched = frozenset(rows[:, 1:].any(dim=0).nonzero().flatten().tolist())


def check_marks(ranks: Ranks, marks: list[list[float]], *, used: bool) -> None:
    """RankError when the ranks' checksums differ; `used`: weights may have changed meanwhile."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for rank, of_rank in zip(ranks.members, marks, strict=True):
        groups.setdefault(tuple(of_rank), []).append(rank)
    if len(groups) > 1:
        raise RankError(
            "the ranks gathered or reduced different layers in this step: "
            f"{' against '.join(map(str, groups.values()))}. Every rank must call forward and "
            "backward equally often, and use the layers in one order (skipping some is fine)"
            + ("; layers were updated already: load the last checkpoint" if used else "")
        )


class SharedUpdater(Updater):
    """`Updater` of one of several ranks."""

    def __init__(self, *, gathers: Gathers, **parts: Any) -> None:
        super().__init__(**parts)
        self._gathers = gathers

    def _published(self, layer: int) -> None:
        """Of several nodes the layer is new when their ranges of it have come, too."""
        updated, stored = self.ledger.updated(layer), self.ledger.stored(layer)
        here = self._gathers.exchanged(layer, updated)
        self.ledger.update(layer, here, stored=here if stored is updated else stored)

    @property
    def deferred(self) -> frozenset[int]:
        """Layers whose update waits for the end of backward, by the plan."""
        return self._deferred

    def update_agreed(
        self,
        layer: int,
        entry: GradientEntry,
        drained: Fence,
        last_fetch: Fence,
        agreed: Agreed,
    ) -> None:
        """Queue the update of the parameters in `agreed`, whose mean gradients are on their way
        into `entry` ([Note: flags])."""
        trained = self._adam_steps.trained(layer)
        self.ledger.arrive(layer, trained)
        positions = sorted(trained)
        steps = self._adam_steps.next_steps(layer, positions, 1.0)

        def chosen() -> list[ParameterStep]:
            pairs = zip(positions, steps, strict=True)
            return [step for position, step in pairs if position in agreed.touched]

        norms = self._agreed_norms(layer, entry.gradients, agreed)
        after = (drained, last_fetch, self.ledger.read(layer), self.ledger.updated(layer))
        dtype, numel = entry.gradients.dtype, self._numel(layer, trained)
        if self.spills.updates(layer):
            nbytes = dtype.itemsize * numel
            self._norm_done.append(self._submit("norm", layer, norms, (drained,), entry, nbytes))
            entry.free_after = self.spills.update(
                layer, steps, entry.gradients, after, chosen=chosen, finish=self._finish(layer)
            )
        else:
            arrays = self._arrays(layer, entry.gradients)

            def work() -> None:
                norms()
                self._kernels.adam(self._host.dtype, dtype, adam_segments(chosen(), arrays))

            nbytes = (dtype.itemsize + adam_bytes(self._host.dtype, dtype)) * numel
            run = self._publishing(layer, work)
            updated = self._submit("update", layer, run, after, entry, nbytes)
            self.ledger.update(layer, updated)
            self._norm_done.append(updated)
        self._published(layer)
        self.ledger.applied.add(layer)

    def _agreed_norms(
        self, layer: int, gradients: torch.Tensor, agreed: Agreed
    ) -> Callable[[], None]:
        sums = self._square_sums[layer]  # of this step, also if the step is abandoned meanwhile
        for position in self._adam_steps.trained(layer):
            sums.setdefault(position, 0.0)

        def run() -> None:
            self._norms(layer, agreed.touched, gradients, sums)()

        return run
