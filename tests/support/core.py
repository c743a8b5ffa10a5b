"""Training runs on `stronghold.train`, the room of one rank: the calls of `train_windowed`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.runtime.precision_config import DeepSpeedFP16Config

from stronghold import native
from stronghold.devices.device import Device
from stronghold.devices.emulated import EmulatedDevice
from stronghold.errors import ConfigError
from stronghold.model.inner_tensors import HeldTensors
from stronghold.model.packed_weight import pack_frozen
from stronghold.model.partition import Partition, find_blocks, partition
from stronghold.model.stored_tensors import CAST, stored_tensors, training_dtypes
from stronghold.optim.contract import Optimizer
from stronghold.optim.states import EXACT, LEAN, items, join_master, states_of
from stronghold.plan.cost import Demand
from stronghold.plan.plan import Plan, make_plan
from stronghold.telemetry.metrics import Metrics
from stronghold.train.layer import Groups, Layer, layers_of, layout_of
from stronghold.train.optimizer import make_scaler
from stronghold.train.rank_trainer import RankTrainer
from stronghold.train.ranks import Ranks
from stronghold.train.trainer import Trainer
from stronghold.train.training_thread import TrainingThread
from tests.models import loss_of, without_caches
from tests.support.sides import Change, Side
from tests.support.training import (
    DTYPES,
    OPTIMIZERS,
    SCALE_POWER,
    WARMUP,
    Factory,
    Run,
    Trains,
    dense_copies,
    on,
)


class Core:
    """A model on `stronghold.train`, with what a test needs to see. `settings` are `Demand`'s.
    `optimizers`: one for each group, if they differ."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        precision: str = "fp32",
        optimizer: str | Trains = "adamw",
        groups: Any = None,
        device: Callable[[], Device] = EmulatedDevice,
        layers: Any = None,
        dtypes: str = CAST,
        optimizers: Sequence[Optimizer] | None = None,
        folders: Sequence[Path] = (),
        frozen: str | None = None,
        ranks: Ranks | None = None,
        gradient_slots: int | None = None,
        **settings: Any,
    ) -> None:
        self.ranks = ranks
        trains = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = trains.groups(groups or trained)
        groups_of = self.optimizer.param_groups
        self.groups: Groups = {
            parameter: (group, one)
            for group, one in zip(
                groups_of, optimizers or [trains.optimizer] * len(groups_of), strict=True
            )
            for parameter in group["params"]
        }
        kind, dtype = LEAN if precision == "lean" else EXACT, DTYPES[precision]
        if frozen == "nf4":
            pack_frozen(model, find_blocks(model, layers), dtype if dtypes == CAST else None)
        stored = stored_tensors(model)
        dtype_of = training_dtypes(stored, dtype=dtype, rule=dtypes)
        trained_in = {parameter: dtype_of[parameter] for parameter in self.groups}
        self.partition: Partition = partition(model, layers, trained_in.get)
        self.layers: list[Layer] = layers_of(
            self.partition,
            self.groups,
            dtype_of=dtype_of.__getitem__,
            kind=kind,
            aliases=stored.aliases,
        )
        HeldTensors(model)  # moves scales where a first forward puts them
        if settings.get("resident_layers") == "all":
            settings["resident_layers"] = len(self.partition.streamed)
        self.layout = layout_of(self.layers, self.partition)
        self.plan: Plan = make_plan(
            self.layout,
            Demand(
                states=states_of(dtype, kind, trains.optimizer.moments),
                **{"window": 2, "resident_layers": 0, "resident_updates": "host"}
                | {"accumulate": False, "cpu_threads": 1, "early_layers": 0, "nvme": bool(folders)}
                | settings,
            ),
        )
        if gradient_slots is not None:
            self.plan = replace(self.plan, gradient_slots=gradient_slots)
        self.device = device()
        self.pool = native.Pool(1)
        make: Any = Trainer if ranks is None else partial(RankTrainer, ranks=ranks)
        self.trainer: Trainer = make(
            self.partition,
            self.layers,
            self.groups,
            plan=self.plan,
            device=self.device,
            kernels=self.pool,
            metrics=Metrics(num_parameters=0),
            thread=TrainingThread(),
            folders=folders,
        )

    def moments(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """Flat, of every trained parameter that this rank owns, by name. In host memory."""
        self.trainer.synchronize()
        found = {}
        for layer in self.layers:
            if self.ranks is not None and not self.ranks.owns(layer):
                continue
            for k in range(layer.num_trained):
                assert layer.states is not None
                begin, numel = layer.element(k), layer.parameters[k].numel()
                found[layer.names[k]] = tuple(
                    self.trainer.arrays.of(layer, array)
                    .cpu()[items(array, begin, begin + numel)]
                    .clone()
                    for array in layer.states.moment_dtypes
                )
        return found

    def close(self) -> None:
        self.trainer.close()
        self.device.close()
        self.pool.close()


@contextmanager
def opened(model: torch.nn.Module, **settings: Any) -> Any:
    """A `Core` that is closed at the end."""
    core = Core(model, **settings)
    try:
        yield core
    finally:
        core.close()


def train_core(
    factory: Factory,
    *,
    steps: int,
    accumulation: int = 1,
    clipping: float = 1.0,
    precision: str = "fp32",
    groups: Callable[[torch.nn.Module], Any] | None = None,
    inspect: Callable[[Core], None] | None = None,
    **settings: Any,
) -> Run:
    """Train on `stronghold.train`. `inspect` sees it before it is closed."""
    torch.manual_seed(0)
    model, make_batch = factory()
    without_caches(model)
    run = Run()
    settings = {"accumulate": accumulation > 1, "micro_batches": accumulation} | settings
    with opened(model, precision=precision, groups=groups and groups(model), **settings) as core:
        torch.manual_seed(1)
        scale = 2.0**SCALE_POWER if precision == "fp16" else 1.0
        device = core.device.torch_device
        for micro in range(steps * accumulation):
            loss = loss_of(core.trainer.forward(**on(device, make_batch(micro))))
            run.losses.append(loss.detach().clone())
            loss = loss / accumulation if accumulation > 1 else loss
            ends_step = (micro + 1) % accumulation == 0
            core.trainer.backward(
                loss.float() * scale if scale != 1.0 else loss, ends_step=ends_step
            )
            if not ends_step:
                core.trainer.end_micro_batch()
            if ends_step:
                result = core.trainer.step(
                    clipping=clipping, loss_scale=scale, skips_overflow=precision == "fp16"
                )
                run.norms.append(
                    result.grad_norm if isinstance(result.grad_norm, float) else result.grad_norm()
                )
        run.moments = core.moments()
        if inspect is not None:
            inspect(core)
    run.weights = dense_copies(model.state_dict())
    return run


class ByCore(Side):
    """A model on `stronghold.train`, under the names of `sides`. `settings` are `Core`'s."""

    def __init__(self, case: Any, **settings: Any) -> None:
        super().__init__(case)
        self.model, self.make_batch = case.factory()
        self._caching = caching_configs(self.model)
        self.core = Core(
            self.model,
            precision=case.precision,
            groups=self.groups(),
            accumulate=case.accumulation > 1,
            micro_batches=case.accumulation,
            **settings,
        )
        self.device, self.optimizer = self.core.device.torch_device, self.core.optimizer
        self._trainer = self.core.trainer
        self._schedule: Any = None
        if case.warmup:
            self._schedule = WarmupLR(self.optimizer, **WARMUP["scheduler"]["params"])
        self._scaler = make_scaler(DeepSpeedFP16Config(enabled=True, **case.scaling), 0)
        self._micros = 0
        self._ends: bool | None = None
        self.norm: float | None = None
        self.applied = False

    @property
    def _is_boundary(self) -> bool:
        """Whether the next `step` ends one."""
        ends = (self._micros + 1) % self.case.accumulation == 0
        return ends if self._ends is None else self._ends

    def boundary(self, ends: bool | None) -> None:
        self._ends = ends

    def call(self, **batch: Any) -> Any:
        with caching(self._caching, on=not torch.is_grad_enabled()):
            return self._trainer.forward(**batch)

    def raw(self, **batch: Any) -> Any:
        with caching(self._caching, on=not torch.is_grad_enabled()):
            return self.model(**batch)

    def generated(self, tokens: torch.Tensor) -> Any:
        with caching(self._caching, on=True):
            return self.model.generate(tokens, max_new_tokens=3, do_sample=False)

    def copied(self) -> torch.nn.Module:
        with caching(self._caching, on=True):
            return copy.deepcopy(self.model)

    def exported(self) -> dict[str, torch.Tensor]:
        return self.weights()

    def backward(self, loss: torch.Tensor, *, retain: bool = False, by: str = "engine") -> None:
        """The accumulation is a power of two, so it does not matter what is divided."""
        if self.case.accumulation > 1:
            loss = loss / self.case.accumulation
        if self.case.precision == "fp16":
            loss = loss.float() * self._scaler.cur_scale
        if by == "user":
            loss.backward(retain_graph=retain)
            return
        try:
            self._trainer.backward(loss, ends_step=self._is_boundary, retain_graph=retain)
        except BaseException:
            self._micros -= self._micros % self.case.accumulation
            raise

    def step(self) -> None:
        case, ends = self.case, self._is_boundary
        self._micros += 1
        self.applied = False
        if not ends:
            self._trainer.end_micro_batch()
            return
        result = self._trainer.step(
            clipping=case.clipping,
            loss_scale=self._scaler.cur_scale if case.precision == "fp16" else 1.0,
            skips_overflow=case.precision in ("fp16", "fp32") or case.clipping > 0,
        )
        self.norm = result.grad_norm if isinstance(result.grad_norm, float) else result.grad_norm()
        self.applied = not result.overflow
        if self._schedule is not None and self.applied:
            self._schedule.step()
        self._scaler.update_scale(result.overflow)

    def zero(self, _: bool = False) -> None:
        self._trainer.drop_gradients()

    def weights(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    def write(self, name: str, change: Change, how: str) -> None:
        p = self.named()[name]
        with torch.no_grad():
            change(p.data if how == "data" else p)

    def _place(self, name: str) -> tuple[Layer, slice]:
        """Layer of a trained parameter, and its elements."""
        self._trainer.synchronize()
        layer = next(layer for layer in self.core.layers if name in layer.names)
        begin, numel = layer.element(layer.names.index(name)), self.named()[name].numel()
        return layer, slice(begin, begin + numel)

    def _arrays(self, name: str, arrays: Iterable[str]) -> dict[str, torch.Tensor]:
        layer, part = self._place(name)
        of = self._trainer.arrays.of
        return {a: of(layer, a).cpu()[items(a, part.start, part.stop)].clone() for a in arrays}

    def moment(self, name: str, which: str) -> torch.Tensor:
        states = self._place(name)[0].states
        assert states is not None
        moment = states.moment(which)
        assert moment is not None
        arrays = self._arrays(name, states.arrays_of(moment))
        return states.decode(moment, arrays).view(self.named()[name].shape)

    def master(self, name: str) -> torch.Tensor:
        states = self._place(name)[0].states
        assert states is not None
        arrays = self._arrays(name, ["weights", "low"][: 2 if states.low else 1])
        return join_master(arrays["weights"], arrays.get("low")).view(self.named()[name].shape)

    def gradient(self, name: str) -> torch.Tensor:
        layer, _ = self._place(name)
        layer.gradient_record.wait()
        shape = self.named()[name].shape
        if layer.names.index(name) not in layer.waiting:
            return torch.zeros(shape)
        return self._arrays(name, ["gradients"])["gradients"].float().view(shape)

    def moments(self) -> dict[str, Any]:
        return self.core.moments()

    def destroy(self) -> None:
        self.core.close()


class ByRankCore(ByCore):
    """The same on one of several ranks, all of which do the same. Owners tell what they have."""

    def __init__(self, case: Any, ranks: Ranks, **settings: Any) -> None:
        super().__init__(case, ranks=ranks, **settings)
        self._ranks = ranks

    def _of_owner(self, name: str, read: Callable[..., Any], *args: Any) -> Any:
        owner = self._ranks.owner(self._place(name)[0])
        return self._ranks.of_all(read(name, *args) if owner == self._ranks.rank else None)[owner]

    def moment(self, name: str, which: str) -> torch.Tensor:
        return self._of_owner(name, super().moment, which)

    def master(self, name: str) -> torch.Tensor:
        return self._of_owner(name, super().master)

    def gradient(self, name: str) -> torch.Tensor:
        raise ConfigError("gradients are on their owners, without those that come late")

    def moments(self) -> dict[str, Any]:
        return {k: own for each in self._ranks.of_all(super().moments()) for k, own in each.items()}


def caching_configs(model: torch.nn.Module) -> list[Any]:
    """The configs of Transformers that have key-value caches on."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return [config for config in configs if getattr(config, "use_cache", False)]


@contextmanager
def caching(configs: list[Any], *, on: bool) -> Iterator[None]:
    """With or without key-value caches."""
    for config in configs:
        config.use_cache = on
    yield
