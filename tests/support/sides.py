"""A model in training, in plain PyTorch and by an engine, under the same names: `tests.programs`
performs a program on both. Batches are taken by seeds, parameters by names.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
)
from torch import nn

import stronghold
from stronghold.errors import ConfigError
from stronghold.optim.states import join_master
from stronghold.train.optimizer import make_scaler, restore_scaler, scaler_state
from tests.models import loss_of, without_caches
from tests.support.training import ADAM, DTYPES, WARMUP, KernelOptimizer, config, moments_of, on

Change = Callable[[torch.Tensor], Any]  # of a weight, in place
Edit = Callable[[nn.Module], None]


class Side:
    """`say` logs what is compared."""

    model: nn.Module
    make_batch: Callable[[int], dict[str, Any]]
    device = torch.device("cpu")

    def __init__(self, case: Any) -> None:
        self.case = case
        self.log: list[tuple[str, Any]] = []
        self.micro = 0  # batches taken
        self.hooks: list[Any] = []
        self.saved: Any = None
        self.trains: list[str] = []  # what the optimizer has
        # what the model has changed from one engine to the next
        self.edits: list[Edit] = []

    def say(self, what: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().to("cpu", copy=True)
        self.log.append((what, value))

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def batch(self, seed: int) -> dict[str, Any]:
        """Of two sequences, or of one."""
        made = self.make_batch(seed)
        tensors = [v for v in made.values() if isinstance(v, torch.Tensor)]
        if seed % 5 == 3 and all(v.dim() and len(v) == 2 for v in tensors):
            made = {k: v[:1] if isinstance(v, torch.Tensor) else v for k, v in made.items()}
        return on(self.device, made)

    def loss(self, seed: int) -> torch.Tensor:
        return loss_of(self.call(**self.batch(seed)))

    def next(self) -> torch.Tensor:
        self.micro += 1
        return self.loss(self.micro)

    def groups(self) -> list[Any]:
        """What the optimizer is given."""
        self.trains = [name for name, p in self.named().items() if p.requires_grad]
        trained = [self.named()[name] for name in self.trains]
        if not self.case.groups:
            return trained
        parts = {0.0: [p for p in trained if p.dim() < 2], 0.1: [p for p in trained if p.dim() > 1]}
        return [{"params": part, "weight_decay": decay} for decay, part in parts.items() if part]


class Plain(Side):
    """Autograd, sums over micro-batches in fp32, the native kernel over whole tensors."""

    def __init__(self, case: Any) -> None:
        super().__init__(case)
        self.model, self.make_batch = case.factory()
        configs = [getattr(m, "config", None) for m in self.model.modules()]
        self._caching = [c for c in configs if getattr(c, "use_cache", False)]
        without_caches(self.model)
        self._begin()

    def _begin(self) -> None:
        """With new moments."""
        case = self.case
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(DTYPES[case.precision])
        self.optimizer = torch.optim.AdamW(self.groups(), **ADAM)
        self._schedule: Any = None
        if case.warmup:
            self._schedule = WarmupLR(self.optimizer, **WARMUP["scheduler"]["params"])
        self._adam = KernelOptimizer(
            self.optimizer, "lean" if case.precision == "lean" else "exact"
        )
        self._scaler = make_scaler(DeepSpeedFP16Config(enabled=True, **case.scaling), 0)
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._micros = 0
        self.norm: float | None = None
        self.applied = False
        self._ends: bool | None = None

    def again(self, edit: Edit) -> None:
        edit(self.model)
        self._begin()

    def boundary(self, ends: bool | None) -> None:
        self._ends = ends

    def exported(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    def copied(self) -> nn.Module:
        for each in self._caching:
            each.use_cache = True
        return copy.deepcopy(self.model)

    def call(self, **batch: Any) -> Any:
        """As the engine, without a cache where gradients are wanted."""
        for each in self._caching:
            each.use_cache = not torch.is_grad_enabled()
        return self.model(**batch)

    raw = call

    def generated(self, tokens: torch.Tensor) -> torch.Tensor:
        for each in self._caching:
            each.use_cache = True
        return self.model.generate(tokens, max_new_tokens=3, do_sample=False)

    def backward(self, loss: torch.Tensor, *, retain: bool = False, by: str = "engine") -> None:
        """The loss is divided by the accumulation steps, by the engine or the "caller", or, as
        DeepSpeed has it in a backward of the "user"'s, the gradients are. They are this backward's
        alone."""
        count, by_user = self.case.accumulation, by == "user"
        if count > 1 and not by_user:
            loss = loss / count
        if self.case.precision == "fp16":
            loss = loss.float() * self._scaler.cur_scale
        try:
            loss.backward(retain_graph=retain)
        except BaseException:
            self.zero()
            self._micros -= self._micros % count
            raise
        for p in self.model.parameters():
            if p.grad is not None:
                gradient = p.grad / count if count > 1 and by_user else p.grad
                gradient = gradient.float() if count > 1 else gradient
                self._sums[p] = self._sums[p] + gradient if p in self._sums else gradient
                p.grad = None

    def step(self) -> None:
        case, precision = self.case, self.case.precision
        self._micros += 1
        self.applied = False
        if not (self._micros % case.accumulation == 0 if self._ends is None else self._ends):
            return
        self.norm = self._adam.step(
            self._sums,
            case.clipping,
            self._scaler.cur_scale if precision == "fp16" else 1.0,
            # bf16.check_grad_overflow of `config` is on with clipping alone
            skips=precision in ("fp16", "fp32") or case.clipping > 0,
        )
        self.applied = not self._adam.skipped
        if self._schedule is not None and self.applied:
            self._schedule.step()
        self._scaler.update_scale(self._adam.skipped)
        self.zero()

    def zero(self, _: bool = False) -> None:
        self._sums.clear()
        for p in self.model.parameters():
            p.grad = None

    # -- weights and states -----------------------------------------------------------------------
    def weights(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    def load_weights(self, weights: dict[str, torch.Tensor], _: str) -> None:
        """They are their own masters."""
        self.model.load_state_dict(weights, strict=False)
        for p in filter(self._adam.updates, (self.named()[name] for name in weights)):
            low = self._adam.begin(p).get("low")
            if low is not None:
                low.copy_(p.detach().flatten() if low.is_floating_point() else torch.tensor(0))

    def write(self, name: str, change: Change, _: str) -> None:
        """What is below a weight stays, which may be written back."""
        with torch.no_grad():
            change(self.named()[name])

    def master(self, name: str) -> torch.Tensor:
        p = self.named()[name]
        flat = p.detach().reshape(-1)
        return join_master(flat, self._adam.begin(p).get("low")).view(p.shape).clone()

    def moment(self, name: str, which: str) -> torch.Tensor:
        p = self.named()[name]
        states = self._adam.states(p)
        decoded = states.decode(states.moment(which), self._adam.begin(p))
        return decoded.clone().view(p.shape)

    def moments(self) -> dict[str, Any]:
        return {n: m for n, m in self._adam.moments(self.model).items() if n in self.trains}

    def gradient(self, name: str) -> torch.Tensor:
        p = self.named()[name]
        return self._sums[p].float().clone() if p in self._sums else torch.zeros(p.shape)

    # -- between steps ----------------------------------------------------------------------------
    def save(self) -> None:
        kept = {
            "weights": self.model.state_dict(),
            "states": {name: self._adam.begin(self.named()[name]) for name in self.trains},
            "groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in self.optimizer.param_groups
            ],
            "scaler": scaler_state(self._scaler),
            "schedule": self._schedule and self._schedule.state_dict(),
            "random": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "micros": self._begun(),
        }
        self.saved = copy.deepcopy(kept)

    def load(self) -> None:
        kept = copy.deepcopy(self.saved)
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_inference():  # only the engine can write these
                    setattr(module, name, buffer.clone())
        self.model.load_state_dict(kept["weights"])
        self._adam.state = {self.named()[name]: state for name, state in kept["states"].items()}
        for group, settings in zip(self.optimizer.param_groups, kept["groups"], strict=True):
            group.update(settings)
        restore_scaler(self._scaler, kept["scaler"])
        if self._schedule is not None:
            self._schedule.load_state_dict(kept["schedule"])
        torch.set_rng_state(kept["random"])
        random.setstate(kept["python"])
        np.random.set_state(kept["numpy"])
        self._micros = kept["micros"]
        self.zero()

    def _begun(self) -> int:
        """The micro-batches before the step that a save is in: it has none of its gradients."""
        return self._micros - self._micros % self.case.accumulation if self._sums else self._micros

    def resume(self) -> None:
        self._micros = self._begun()
        self.zero()

    def _nothing(self, *_: Any) -> None:
        return

    offload = reload = destroy = _nothing


class ByEngine(Side):
    """`section`: the next engine's, with the folder of its files."""

    def __init__(self, case: Any, folder: Path, section: Callable[[Path], dict[str, Any]]) -> None:
        super().__init__(case)
        self._folder, self._section = folder, section
        self._open(seed=0)

    def _open(self, seed: int) -> None:
        """Of a new model, or of the present one (-1)."""
        case = self.case
        self.section = self._section(self._folder)
        settings = config(
            accumulation=case.accumulation,
            clipping=case.clipping,
            precision=case.precision,
            section={"device": case.device, **case.section, **self.section},
        )
        settings |= copy.deepcopy(WARMUP) if case.warmup else {}
        if case.precision == "fp16":
            settings["fp16"] |= case.scaling
        if seed >= 0:
            self.model, self.make_batch = case.factory(seed=seed)
            for edit in self.edits:
                edit(self.model)
        self.engine: Any = stronghold.initialize(
            model=self.model, config=settings, model_parameters=self.groups()
        )[0]
        self.device, self.optimizer = self.engine.device, self.engine.optimizer

    def call(self, **batch: Any) -> Any:
        return self.engine(**batch)

    def raw(self, **batch: Any) -> Any:
        return self.engine.module(**batch)

    def generated(self, tokens: torch.Tensor) -> Any:
        return self.engine.module.generate(tokens, max_new_tokens=3, do_sample=False)

    def backward(self, loss: torch.Tensor, *, retain: bool = False, by: str = "engine") -> None:
        if by == "user":
            (self.engine.scale(loss) if self.case.precision == "fp16" else loss).backward()
            return
        try:
            if by == "caller":
                with self.engine.no_sync():
                    self.engine.backward(loss / self.case.accumulation, scale_wrt_gas=False)
            else:
                self.engine.backward(loss, retain_graph=retain)
        except Exception as error:
            unfinished = self.engine.inspect().unfinished
            if unfinished is not None:  # layers are ahead: all is refused now
                raise ConfigError(unfinished) from error
            raise

    def step(self) -> None:
        self.engine.step()

    @property
    def norm(self) -> Any:
        return self.engine.get_global_grad_norm()

    @property
    def applied(self) -> bool:
        return bool(self.engine.was_step_applied())

    def zero(self, by_optimizer: bool = False) -> None:
        (self.optimizer if by_optimizer else self.engine).zero_grad()

    def boundary(self, ends: bool | None) -> None:
        # None: as the config has it
        self.engine.set_gradient_accumulation_boundary(ends)

    def exported(self) -> Any:
        self.engine.save_16bit_model(self._folder, "weights.bin")
        return torch.load(self._folder / "weights.bin")

    def copied(self) -> nn.Module:
        return copy.deepcopy(self.engine.module)

    def weights(self) -> Any:
        return self.engine.module_state_dict()

    def load_weights(self, weights: dict[str, torch.Tensor], how: str) -> None:
        if how == "engine":
            self.engine.load_module_state_dict(weights, strict=False)
        else:
            self.model.load_state_dict(weights, strict=False)

    def write(self, name: str, change: Change, how: str) -> None:
        p = self.named()[name]
        if how == "gathered":
            with GatheredParameters([p], modifier_rank=0), torch.no_grad():
                change(p)
        elif how == "data":
            change(p.data)
        else:
            with torch.no_grad():
                change(p)

    def master(self, name: str) -> Any:
        return safe_get_full_fp32_param(self.named()[name])

    def moment(self, name: str, which: str) -> Any:
        return safe_get_full_optimizer_state(self.named()[name], which)

    def moments(self) -> dict[str, Any]:
        return moments_of(self.engine)

    def gradient(self, name: str) -> Any:
        return safe_get_full_grad(self.named()[name])

    def save(self) -> None:
        self.engine.save_checkpoint(self._folder / "saved", tag="t")
        self.saved = True

    def load(self) -> None:
        self.engine.load_checkpoint(self._folder / "saved", tag="t")
        self.engine.restore_random_states()

    def resume(self) -> None:
        """In another plan, by a model that had other values."""
        trained = {name: p.requires_grad for name, p in self.named().items()}
        self.engine.save_checkpoint(self._folder / "resumed")
        self.engine.destroy()
        before = self.model
        self._open(seed=1)
        if hasattr(self.model, "take_over"):  # what no checkpoint has
            self.model.take_over(before)
        self.engine.load_checkpoint(self._folder / "resumed")
        for name, p in self.named().items():
            p.requires_grad_(trained[name])

    def again(self, edit: Edit) -> None:
        self.engine.destroy()
        edit(self.model)
        self.edits.append(edit)
        self._open(seed=-1)

    def offload(self, include: list[str] | None) -> None:
        self.engine.offload_states(include=include)

    def reload(self) -> None:
        self.engine.reload_states()

    def destroy(self) -> None:
        self.engine.destroy()
