"""What one engine has because it is one of several ranks: made in order, closed in reverse.

Owns the node's weights and the parts that meet the other ranks. The training thread alone enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stronghold.config import StrongholdConfig
from stronghold.device.base import Device
from stronghold.errors import ConfigError
from stronghold.memory.host import HostStore
from stronghold.memory.neighbours import Neighbours
from stronghold.memory.shared import NodeWeights
from stronghold.model.layout import ModelLayout
from stronghold.plan.planner import Plan
from stronghold.runtime.distributed import OfNode, Ranks
from stronghold.runtime.ranks.drains import SharedDrains
from stronghold.runtime.ranks.early import SharedUpdater
from stronghold.runtime.ranks.executor import SharedExecutor
from stronghold.runtime.ranks.gate import Gate
from stronghold.runtime.ranks.gathers import Gathers
from stronghold.runtime.ranks.nodes import this_node


def check_section(section: StrongholdConfig) -> None:
    """ConfigError for what this release does on one rank alone."""
    if section.resident_updates == "gpu":
        raise ConfigError(
            'stronghold.resident_updates: got "gpu", which this release does on one rank alone: '
            'leave it out, or set it to "host"'
        )


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
            "the plan": f"{plan.window} {plan.prefetch} {sorted(plan.resident)} {plan.gradients} "
            f"{sorted(plan.deferred)} {[sorted(arrays) for arrays in plan.spilled]}",
        }
    )


def neighbours(ranks: Ranks) -> Neighbours:
    """The ranks of this node, whatever part of the model they have, as they open files on its
    disks."""
    mine, nodes = ranks.company.index(ranks.global_rank), ranks.files.objects(this_node())
    local = [place for place, node in enumerate(nodes) if node == nodes[mine]]
    return Neighbours(
        index=local.index(mine),
        count=len(local),
        rank=ranks.global_rank,
        exchange=OfNode(ranks.files, local),
    )


def node_weights(ranks: Ranks, layout: ModelLayout, dtype: torch.dtype) -> NodeWeights:
    """The weights that this node's ranks have in common; they make it together."""
    return NodeWeights(
        layout,
        dtype,
        ranks.shards,
        index=ranks.index,
        num_local=ranks.num_local,
        exchange=ranks.of_node,
    )


class Sharing:
    """The parts of one rank. `parameters[i]` are layer i's parameters in the layout's order."""

    def __init__(
        self,
        device: Device,
        host: HostStore,
        weights: NodeWeights,
        parameters: Sequence[Sequence[nn.Parameter]],
        ranks: Ranks,
    ) -> None:
        self._device = device
        self._host = host
        self._weights = weights
        self._ranks = ranks
        self.gathers = Gathers(device, host, weights, ranks)
        self.gate = Gate(ranks, self.gathers, parameters)

    def make_updater(self, **parts: Any) -> SharedUpdater:
        """The updater of these parts, as `Updater` takes them."""
        return SharedUpdater(gathers=self.gathers, agreement=self.gate, **parts)

    def make_executor(self, **parts: Any) -> SharedExecutor:
        """The executor of these parts, as `Executor` takes them, with the drains of several
        ranks."""
        executor = SharedExecutor(gathers=self.gathers, **parts)
        own = ("device", "host", "window", "updater", "adam", "metrics")
        executor.drains = drains = SharedDrains(
            **{name: parts[name] for name in own},
            last_fetch=executor.last_fetch,
            ranks=self._ranks,
            gathers=self.gathers,
        )
        self.gate.connect(executor, drains)
        return executor

    def meet(self, operation: str) -> None:
        """Wait until every rank is here; what each wrote before, all see after."""
        self._ranks.control.barrier(operation)

    def spread(self, operation: str) -> None:
        """Every rank has written its own ranges: when this returns, every node has all of them."""
        self.gathers.exchange_all(operation)
        self.meet(operation)

    def agree(self, operation: str) -> None:
        """Every node's weights were written: when this returns, all have those of the first."""
        self.meet(operation)
        self.gathers.copy_first(operation)
        self.meet(operation)

    def note_dropped(self) -> None:
        """This rank threw its gradients away: the gate finds out if others did not."""
        self.gathers.note("reduce", len(self._host.layers))

    def fail(self, reason: str) -> None:
        """This rank cannot go on: the others shall not wait for it."""
        self._ranks.watch.fail(reason)

    def close(self) -> None:
        """The lanes have ended: the weights become this process's own."""
        self._weights.give_back()
