"""The engine and a plain PyTorch loop over equal models, step by step: equal to the bit or a test
fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import stronghold
from stronghold.optim.states import StateKind
from tests.models import MODELS, loss_of, without_caches
from tests.support.training import ADAM, KernelOptimizer, config

Objective = Callable[[Any], torch.Tensor]


class Twin:
    """`engine` and `plain` train the same model. `of` is the engine's, when it has to exist before
    (for an optimizer); `early` layers are updated before the clip barrier, or "all"; `extra` goes
    into the config, `initialize` to stronghold.initialize.
    """

    def __init__(
        self,
        name: str = "gpt",
        *,
        precision: str = "fp32",
        clipping: float = 1.0,
        accumulation: int = 1,
        early: int | str = 0,
        section: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        of: nn.Module | None = None,
        **initialize: Any,
    ) -> None:
        self.model, self.make_batch = MODELS[name]()
        self.model = self.model if of is None else of
        self.plain = without_caches(MODELS[name]()[0])
        self.accumulation, self.clipping = accumulation, clipping
        self.kind: StateKind = "lean" if precision == "lean" else "exact"
        self.settings = config(
            accumulation=accumulation,
            clipping=clipping,
            precision=precision,
            section={"window": 1, "early_layers": early, **(section or {})},
        )
        self.settings.update(extra or {})
        if "optimizer" not in initialize:
            initialize.setdefault("model_parameters", list(self.model.parameters()))
        self.engine: Any = stronghold.initialize(
            model=self.model, config=self.settings, **initialize
        )[0]
        if precision in ("bf16", "lean"):
            for parameter in self.plain.parameters():
                parameter.data = parameter.data.bfloat16()
        self.parameters = [p for p in self.plain.parameters() if p.requires_grad]
        self.restart_plain()

    def restart_plain(self, groups: Any = None, hyper: dict[str, Any] | None = None) -> None:
        """A new optimizer for the plain model: moments and sums are gone."""
        self.shown = torch.optim.AdamW(groups or self.parameters, **(hyper or ADAM))
        self.adam = KernelOptimizer(self.shown, self.kind)
        self.sums: dict[nn.Parameter, torch.Tensor] = {}

    def on(self, seed: int) -> Objective:
        """The loss on one batch."""
        return lambda model: loss_of(model(**self.make_batch(seed)))

    def plain_backward(self, objective: Objective) -> torch.Tensor:
        """The plain half of `backward`."""
        loss = objective(self.plain)
        (loss / self.accumulation if self.accumulation > 1 else loss).backward()
        if self.accumulation > 1:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    gradient = parameter.grad.float()
                    before = self.sums.get(parameter)
                    self.sums[parameter] = gradient if before is None else before + gradient
                    parameter.grad = None
        return loss

    def backward(self, objective: Objective) -> None:
        """Forward and backward of both; losses must be equal."""
        loss = objective(self.engine)
        self.engine.backward(loss)
        expected = self.plain_backward(objective)
        assert torch.equal(loss, expected), f"{loss.item()!r} != {expected.item()!r}"

    def plain_step(self) -> float:
        """The plain half of `step`; returns the norm before clipping."""
        gradients = {p: p.grad for p in self.parameters if p.grad is not None}
        norm = self.adam.step(self.sums or gradients, self.clipping)  # type: ignore[arg-type]
        self.drop_plain()
        # without gradients nothing changes, but torch's schedules want a step
        self.shown.step()
        return norm

    def drop_plain(self) -> None:
        """Forget the plain model's gradients."""
        self.sums.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        """Both take a step, with equal norms."""
        self.engine.step()
        assert self.engine.was_step_applied()
        assert self.engine.get_global_grad_norm() == self.plain_step()

    def train(self, *seeds: int) -> None:
        """One step over these micro-batches."""
        for seed in seeds[:-1]:
            self.backward(self.on(seed))
            self.engine.step()
        self.backward(self.on(seeds[-1]))
        self.step()

    def check(self) -> None:
        """Every weight equal to the bit."""
        expected = self.plain.state_dict()
        for name, value in self.engine.module_state_dict().items():
            assert torch.equal(value, expected[name]), f"{name} differs"


@contextmanager
def twin(*args: Any, **options: Any) -> Iterator[Twin]:
    """A Twin whose weights are compared, and whose engine is destroyed, at the end."""
    made = Twin(*args, **options)
    try:
        yield made
        made.check()
    finally:
        made.engine.destroy()


@contextmanager
def failing_once(module: nn.Module, where: str) -> Iterator[None]:
    """The next forward, or backward, through `module` runs out of memory."""
    failures = iter([torch.OutOfMemoryError("CUDA out of memory (injected)")])

    def fail(*_: Any) -> None:
        for failure in failures:
            raise failure

    if where == "forward":
        handle = module.register_forward_pre_hook(fail)
    else:
        parameter = next(module.parameters())
        handle = parameter.register_hook(fail)  # in backward, as its gradient is made
    try:
        yield
    finally:
        handle.remove()
