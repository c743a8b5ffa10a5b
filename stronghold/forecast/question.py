"""The question of a forecast: a model, a machine with its budgets, and a way to train.

Owns the defaults of what was not said. Reads a profile and a model's configuration; measures
nothing. One thread enters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from stronghold.config.section import parse_bytes
from stronghold.errors import ConfigError
from stronghold.forecast.subject import Subject, check_depth, from_config, from_sizes
from stronghold.model.layout import ModelLayout, for_ranks
from stronghold.plan.profile import MachineProfile, find, machine_names

SEQ = 2048  # without --seq, or as many as the model knows
CLIPPING = 1.0  # DeepSpeed's default


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked. Budgets are bytes; `nvme_bytes` is 0 without that tier. `window` and
    `resident_layers` are pinned where they are given."""

    subject: Subject
    machine: MachineProfile
    batch: int
    seq: int
    accumulation: int
    dtype: str
    clipping: float
    overflow_check: bool
    gpu_bytes: int
    host_bytes: int
    nvme_bytes: int = 0
    nvme_path: str = ""
    window: int | None = None
    resident_layers: int | None = None
    gpus: int = 1  # of each node, each a rank; `gpu_bytes` and `batch` are of each
    nodes: int = 1  # `host_bytes` are of each
    wire_gbps: float | None = None  # what a rank receives from its node; None: as over its link
    network_gbps: float | None = None  # and from other nodes; None: the simulator's

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @property
    def tokens(self) -> int:
        """Per optimizer step."""
        return self.batch * self.seq * self.accumulation * self.ranks

    @property
    def layout(self) -> ModelLayout:
        """The model's, as that many ranks share it."""
        return for_ranks(self.subject.layout, self.ranks) if self.ranks > 1 else self.subject.layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The command's options as they were written; None where one was left out."""

    model: Path | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    vocab: int | None = None
    machine: str | None = None
    gpu: str | None = None
    host: str | None = None
    nvme: str | None = None
    nvme_path: Path | None = None
    batch: int | None = 1  # None: the largest that fits
    seq: int | None = None
    accumulation: int = 1
    precision: str = "bf16"
    clipping: float = CLIPPING
    no_overflow_check: bool = False
    gpus: int = 1
    nodes: int = 1
    wire: float | None = None
    network: float | None = None


def understand(words: Words) -> Question:
    """The question that the options ask; ConfigError, with the option's name, for a mistake."""
    for option, value in (
        ("--batch", words.batch),
        ("--seq", words.seq),
        ("--accumulation", words.accumulation),
        ("--gpus", words.gpus),
        ("--nodes", words.nodes),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{option}: got {value}, expected at least 1")
    if not words.clipping >= 0.0:
        raise ConfigError(f"--clipping: got {words.clipping}, expected a norm, or 0 for none")
    if words.no_overflow_check and words.precision != "bf16":
        raise ConfigError(
            f"--no-overflow-check: got it with --precision {words.precision}, expected bf16: "
            + ("fp16 scales the loss by it" if words.precision == "fp16" else "fp32 has no check")
        )
    for option, rate in (("--wire", words.wire), ("--network", words.network)):
        if rate is not None and not 0.0 < rate < float("inf"):
            raise ConfigError(f"{option}: got {rate}, expected 1e9 bytes per second, above 0")
    _check_company(words)
    machine = _machine(words.machine)
    gpu_bytes = _bytes("--gpu", words.gpu, machine.gpu_memory_bytes)
    host_bytes = _bytes("--host", words.host, machine.host_memory_bytes)
    nvme_bytes = _bytes("--nvme", words.nvme, 0)
    subject = _subject(words)
    return Question(
        subject=subject,
        machine=replace(machine, gpu_memory_bytes=gpu_bytes, host_memory_bytes=host_bytes),
        batch=words.batch or 1,
        seq=words.seq or min(SEQ, subject.positions or SEQ),
        accumulation=words.accumulation,
        dtype=words.precision,
        clipping=words.clipping,
        # 16-bit gradients are checked before any is used: DeepSpeed's default.
        overflow_check=words.precision != "fp32" and not words.no_overflow_check,
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes,
        nvme_bytes=nvme_bytes,
        nvme_path=_nvme_path(words, machine) if nvme_bytes else "",
        gpus=words.gpus,
        nodes=words.nodes,
        wire_gbps=words.wire,
        network_gbps=words.network,
    )


def _check_company(words: Words) -> None:
    """An option that says nothing without another is a question that would not be answered."""
    for option, value, company, there in (
        ("--nvme-path", words.nvme_path, "--nvme SIZE", words.nvme is not None),
        ("--wire", words.wire, "--gpus N or --nodes M above 1", words.gpus * words.nodes > 1),
        ("--network", words.network, "--nodes M above 1", words.nodes > 1),
    ):
        if value is not None and not there:
            raise ConfigError(f"{option}: got {value}, expected it with {company} alone")


def _subject(words: Words) -> Subject:
    sizes = {
        "--layers": words.layers,
        "--hidden": words.hidden,
        "--heads": words.heads,
        "--vocab": words.vocab,
    }
    given = [name for name, value in sizes.items() if value is not None]
    if words.model is not None:
        if given:
            raise ConfigError(
                f"--model and {given[0]}: expected one of the two ways to say a model"
            )
        return from_config(words.model)
    missing = [name for name, value in sizes.items() if value is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: missing; expected --model DIR, or all of {', '.join(sizes)}"
        )
    check_depth("--layers", words.layers)
    layers, hidden, heads, vocab = (value or 0 for value in sizes.values())
    return from_sizes(layers, hidden, heads, vocab, words.seq or SEQ)


def _machine(name: str | None) -> MachineProfile:
    if name is not None:
        return MachineProfile.load(name)
    found = find()
    if found is None:
        raise ConfigError(
            "no profile of this machine: run `stronghold doctor`, which takes less than a minute, "
            f"or name a machine with --machine: {', '.join(machine_names())}, or a profile's file"
        )
    return found


def _bytes(option: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from error


def _nvme_path(words: Words, machine: MachineProfile) -> str:
    if machine.nvme_read_gbps is None or machine.nvme_write_gbps is None:
        raise ConfigError(
            f"--nvme: the profile of {machine.name} has no disk; measure one with `stronghold "
            "doctor --path DIR`, or name another --machine"
        )
    return str(words.nvme_path or machine.nvme_path or "/path/to/nvme")
