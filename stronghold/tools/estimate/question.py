"""The question of an estimate: a model, a machine with its budgets, and a way to train.

Owns the options of `stronghold plan`, their defaults and their checks. It reads the profile of a
machine and measures nothing. One thread enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stronghold.config import settings_from_config
from stronghold.config.section import parse_bytes
from stronghold.errors import ConfigError, did_you_mean
from stronghold.limits import update_cores
from stronghold.model.costs import DTYPES, ModelCosts
from stronghold.model.layout import ModelLayout
from stronghold.optim import examples
from stronghold.optim.contract import Optimizer
from stronghold.optim.states import EXACT, LEAN, StateKind, States, states_of
from stronghold.plan.cost import Demand, Workload, workload_of
from stronghold.plan.machine import MachineProfile, Rates, find_profile, machine_names, rates_of
from stronghold.tools.estimate.adapters import Adapters, adapters_from_options
from stronghold.tools.estimate.model import MetaModel, from_config, from_sizes

SEQ = 2048  # without --seq, or as many as the model knows
CLIPPING = 1.0  # DeepSpeed's default


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model, a machine with its budgets in bytes, and a way to train.

    `nvme_bytes` is 0 without that tier. `window` and `resident_layers` are pinned if given.
    """

    model: MetaModel
    machine: MachineProfile
    batch: int
    seq: int
    accumulation: int
    dtype: str
    clipping: float
    gpu_bytes: int
    host_bytes: int
    states: StateKind = EXACT
    optimizer: str = next(iter(examples()))
    nvme_bytes: int = 0
    window: int | None = None
    resident_layers: int | None = None
    chunk: int | None = None  # sequences that go through a block together; None: all
    gpus: int = 1  # of each node, each a rank; `gpu_bytes` and `batch` are of each
    nodes: int = 1  # `host_bytes` are of each
    network_gbps: float | None = None  # of a rank from other nodes; None: NETWORK_GBPS

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step, of all ranks."""
        return self.batch * self.seq * self.accumulation * self.ranks

    @cached_property
    def layout(self) -> ModelLayout:
        """The layout of the model with these states."""
        return self.model.laid_out(self._optimizer, DTYPES[self.dtype], self.states)

    @property
    def costs(self) -> ModelCosts:
        return self.model.costs_of(self.batch, self.seq, self.dtype)

    @property
    def work(self) -> Workload:
        return workload_of(self.costs, self.machine, micro_batches=self.accumulation)

    @property
    def rates(self) -> Rates:
        return rates_of(
            self.machine,
            self.cpu_threads,
            sharing=self.gpus,
            num_nodes=self.nodes,
            network_gbps=self.network_gbps,
            states=self.states,
        )

    @property
    def cpu_threads(self) -> int:
        """Threads of each rank's optimizer, as the engine has by default."""
        return update_cores(self.machine.num_cores // self.gpus, compute_threads=1)

    @property
    def arrays(self) -> States:
        """The arrays of a trained parameter."""
        return states_of(DTYPES[self.dtype], self.states, self._optimizer.moments)

    @property
    def _optimizer(self) -> Optimizer:
        settings = settings_from_config(examples()[self.optimizer])
        assert settings is not None
        return settings.optimizer

    @property
    def demand(self) -> Demand:
        return Demand(
            states=self.arrays,
            # a clipped step makes early updates twice; else the rules choose
            early_layers=0 if self.clipping else None,
            accumulate=self.accumulation > 1,
            gpu_budget_bytes=self.gpu_bytes,
            host_budget_bytes=self.host_bytes // self.gpus,
            window=self.window,
            resident_layers=self.resident_layers,
            work=self.work.layers,
            sequences=self.batch,
            tokens=self.batch * self.seq,
            num_cores=self.cpu_threads,
            num_ranks=self.ranks,
            num_nodes=self.nodes,
            resident_updates="host" if self.ranks > 1 or self.states == LEAN else None,
            nvme=self.nvme_bytes > 0,
            nvme_capacity_bytes=self.nvme_bytes // self.gpus or None,
            micro_batches=self.accumulation,
            chunk=self.chunk,
            chunks=1 if self.chunk is None else -(-self.batch // self.chunk),
        )


def question_from_options(
    *,
    model: Path | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    vocab: int | None = None,
    lora: int | None = None,
    lora_targets: Sequence[str] | None = None,
    frozen: str | None = None,
    machine: str | None = None,
    gpu: str | None = None,
    host: str | None = None,
    nvme: str | None = None,
    batch: int | None = 1,
    seq: int | None = None,
    accumulation: int = 1,
    chunk: int | None = None,
    precision: str = "bf16",
    states: StateKind = EXACT,
    optimizer: str = next(iter(examples())),
    clipping: float = CLIPPING,
    gpus: int = 1,
    nodes: int = 1,
    network: float | None = None,
) -> Question:
    """The question of the command's options. An option that was left out is None.

    `batch` None asks for the largest batch, and becomes 1: `with_largest_batch` answers.

    Raises ConfigError, with the option's name, for a mistake.
    """
    sizes = {"--layers": layers, "--hidden": hidden, "--heads": heads, "--vocab": vocab}
    counts = {"--batch": batch, "--seq": seq, "--accumulation": accumulation, "--chunk": chunk}
    for option, count in (sizes | counts | {"--gpus": gpus, "--nodes": nodes}).items():
        if count is not None and count < 1:
            raise ConfigError(f"{option}: got {count}, expected at least 1")
    if not clipping >= 0.0:
        raise ConfigError(f"--clipping: got {clipping}, expected a norm, or 0 for none")
    if states == LEAN and precision != "bf16":
        raise ConfigError(
            f"--states: got lean with --precision {precision}, expected bf16: lean states are a "
            "layout of bf16 weights"
        )
    if optimizer.lower() not in examples():
        known = ", ".join(example["type"] for example in examples().values())
        hint = did_you_mean(optimizer.lower(), examples())
        raise ConfigError(f"--optimizer: got {optimizer!r}, expected one of {known}.{hint}")
    if network is not None and not (nodes > 1 and 0.0 < network < float("inf")):
        raise ConfigError(
            f"--network: got {network}, expected 1e9 bytes per second, above 0, and with --nodes M "
            "above 1 alone"
        )
    profile = _machine(machine)
    gpu_bytes = _bytes("--gpu", gpu, profile.gpu_memory_bytes)
    host_bytes = _bytes("--host", host, profile.host_memory_bytes)
    nvme_bytes = _bytes("--nvme", nvme, 0)
    asked = _model(model, sizes, seq, adapters_from_options(lora, lora_targets, frozen, precision))
    if nvme_bytes and None in (profile.nvme_read_gbps, profile.nvme_write_gbps):
        raise ConfigError(
            f"--nvme: the profile of {profile.name} has no disk; measure one with "
            "`stronghold doctor --path DIR`, or name another --machine"
        )
    return Question(
        model=asked,
        machine=profile,
        batch=batch or 1,
        seq=seq or min(SEQ, asked.positions or SEQ),
        accumulation=accumulation,
        chunk=chunk,
        dtype=precision,
        states=states,
        optimizer=optimizer.lower(),
        clipping=clipping,
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes,
        nvme_bytes=nvme_bytes,
        gpus=gpus,
        nodes=nodes,
        network_gbps=network,
    )


def _machine(name: str | None) -> MachineProfile:
    if name is not None:
        return MachineProfile.load(name)
    profile = find_profile()
    if profile is None:
        raise ConfigError(
            "no profile of this machine: run `stronghold doctor`, which takes less than a minute, "
            f"or name a machine with --machine: {', '.join(machine_names())}, or a profile's file"
        )
    return profile


def _bytes(option: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from error


# -- the model ------------------------------------------------------------------------------------
def _model(
    path: Path | None, sizes: dict[str, int | None], seq: int | None, adapters: Adapters | None
) -> MetaModel:
    named = [name for name, size in sizes.items() if size is not None]
    if path is not None:
        if named:
            raise ConfigError(
                f"--model and {named[0]}: expected one of the two ways to name a model"
            )
        return from_config(path, adapters)
    missing = [name for name in sizes if name not in named]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: missing; expected --model DIR, or all of {', '.join(sizes)}"
        )
    layers, hidden, heads, vocab = (size or 0 for size in sizes.values())
    return from_sizes(layers, hidden, heads, vocab, seq or SEQ, adapters)
