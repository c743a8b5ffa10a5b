"""Training runs for tests: the same model and batches, through the engine or in a plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import stronghold
from stronghold import native
from stronghold.model.stored_tensors import CAST, COMPUTED
from stronghold.optim.adam import Adam
from stronghold.optim.contract import Optimizer
from stronghold.optim.lion import Lion
from stronghold.optim.sgd import SGD
from stronghold.optim.states import EXACT, StateKind, States, num_items, states_of
from tests.models import loss_of, without_caches
from tests.support.chunked import chunk_blocks

Batch = dict[str, Any]
Factory = Callable[[], tuple[nn.Module, Callable[[int], Batch]]]
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
ADAMW = Adam()
LION: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}


@dataclass(frozen=True, kw_only=True)
class Trains:
    """An optimizer as the config names it, and as the plain loop has it. `flags`: params of the
    config that `optimizer` has taken up."""

    type: str
    hyperparameters: dict[str, Any]
    optimizer: Optimizer
    flags: dict[str, Any] = field(default_factory=dict)

    @property
    def section(self) -> dict[str, Any]:
        """Of the config."""
        params = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in self.hyperparameters.items()
        }
        return {"type": self.type, "params": {**params, **self.flags}}

    def groups(self, params: Any) -> torch.optim.Optimizer:
        """Parameter groups alone: nothing calls its `step`."""
        defaults = self.optimizer.hyperparameters(self.hyperparameters)
        return torch.optim.Optimizer(params, defaults)


OPTIMIZERS = {
    "adamw": Trains(type="AdamW", hyperparameters=ADAM, optimizer=ADAMW),
    "lion": Trains(type="Lion", hyperparameters=LION, optimizer=Lion()),
    "sgd": Trains(type="SGD", hyperparameters={"lr": 0.05, "weight_decay": 0.1}, optimizer=SGD()),
    "nesterov": Trains(
        type="SGD",
        hyperparameters={"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        optimizer=SGD(has_momentum=True, nesterov=True),
    ),
}
WARMUP = {
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10, "warmup_type": "linear"},
    }
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES["lean"] = torch.bfloat16  # with lean states
SCALE_POWER = 8  # of two: the first loss scale in fp16


@dataclass(kw_only=True)
class Run:
    """What a run leaves: the loss of every micro-batch, and weights and norms at the end."""

    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Equal values, or equal bytes: packed codes in bf16 may be the bits of NaN."""
    one, two = one.cpu(), two.cpu()
    if torch.equal(one, two):
        return True
    if one.dtype is not two.dtype or one.shape != two.shape:
        return False
    bytes_of = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, two)]
    return torch.equal(*bytes_of)


def assert_identical(run: Run, expected: Run) -> None:
    """Every loss and every weight equal to the bit, wherever they lie."""
    for step, (loss, other) in enumerate(zip(run.losses, expected.losses, strict=True)):
        same = torch.equal(loss.cpu(), other.cpu())
        assert same, f"micro-batch {step}: {loss.item()!r} != {other.item()!r}"
    assert run.weights.keys() == expected.weights.keys()
    for name, weight in run.weights.items():
        assert same_bits(weight, expected.weights[name]), f"{name} differs"
    assert run.moments.keys() >= expected.moments.keys()
    for name in expected.moments:
        for moment, other in zip(run.moments[name], expected.moments[name], strict=True):
            assert torch.equal(moment, other), f"a moment of {name} differs"


@contextmanager
def operators_in_one_order() -> Iterator[None]:
    """Operators add in the same order in every run, where torch has such ones, with a warning where
    it has none. Attention is written out: of the fused kernels the backward adds in any order at
    real lengths, unless what has no such operator may raise instead of warning.
    """
    before = torch.utils.deterministic.fill_uninitialized_memory
    # it would write beside the lanes
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


@contextmanager
def flash_in_one_order() -> Iterator[None]:
    """Flash attention, and operators that add in the same order in every run. Flash attention's
    backward does so only where an operator that cannot raises, instead of warning.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    before = torch.utils.deterministic.fill_uninitialized_memory
    # it would write beside the lanes
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
        torch.utils.deterministic.fill_uninitialized_memory = before


def on(device: torch.device, batch: Batch) -> Batch:
    """The batch with its tensors on `device`."""
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def config(
    *,
    accumulation: int = 1,
    clipping: float = 1.0,
    precision: str = "fp32",
    section: dict[str, Any] | None = None,
    optimizer: str = "adamw",
) -> dict[str, Any]:
    """A DeepSpeed config with the "stronghold" section given; overflow is checked when gradients
    are clipped. Updates stand behind the clip barrier unless the section has another number of
    early layers: early updates would change what a test counts.
    """
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "steps_per_print": 10**9,
        "optimizer": OPTIMIZERS[optimizer].section,
        "stronghold": {"device": "emulated", "early_layers": 0, **(section or {})},
    }
    if precision == "lean":
        made["stronghold"].setdefault("states", "lean")
    if precision in ("bf16", "lean"):
        made["bf16"] = {"enabled": True, "check_grad_overflow": clipping > 0.0}
    if precision == "fp16":
        made["fp16"] = {"enabled": True, "initial_scale_power": SCALE_POWER}
    return made


def initialized(model: nn.Module, settings: dict[str, Any]) -> Any:
    """An engine that trains all of the model."""
    return stronghold.initialize(model=model, config=settings, model_parameters=model.parameters())[
        0
    ]


def train_windowed(
    factory: Factory,
    *,
    steps: int,
    settings: dict[str, Any],
    groups: Callable[[nn.Module], Iterable[Any]] | None = None,
    inspect: Callable[[Any], None] | None = None,
    after: Callable[[Any, int], None] | None = None,
) -> Run:
    """Train through the engine. `inspect` sees the engine before it is destroyed, `after` sees it
    after each micro-batch, with its number."""
    torch.manual_seed(0)
    model, make_batch = factory()
    engine, _, _, _ = stronghold.initialize(
        model=model,
        config=settings,
        model_parameters=groups(model) if groups else model.parameters(),
    )
    run = Run()
    try:
        torch.manual_seed(1)
        for micro in range(steps * engine.gradient_accumulation_steps()):
            loss = loss_of(engine(**on(engine.device, make_batch(micro))))
            engine.backward(loss)
            engine.step()
            run.losses.append(loss.detach().clone())
            if engine.was_step_applied():
                run.norms.append(engine.get_global_grad_norm())
            if after is not None:
                after(engine, micro)
        if inspect is not None:
            inspect(engine)
        run.weights = dense_copies(engine.module_state_dict())
        run.moments = moments_of(engine)
    finally:
        engine.destroy()
    return run


def dense_copies(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of the tensors of a state dict. Of a wrapper subclass (torchao): of each tensor that
    it consists of, since two wrappers cannot be compared."""
    copies: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            copies[name] = value.clone()
            continue
        for inner in flatten()[0]:
            copies[f"{name}.{inner}"] = getattr(value, inner).clone()
    return copies


def moments_of(engine: Any) -> dict[str, tuple[torch.Tensor, ...]]:
    """The arrays of the optimizer's moments by parameter name."""
    engine.synchronize()
    found = {}
    now = engine.inspect()
    for layer in now.layers:
        layer.wait()
        for name in layer.trained:
            arrays = layer.layout.states.moment_dtypes
            found[name] = tuple(layer.read(array, name) for array in arrays)
    return found


def train_plain(
    factory: Factory,
    *,
    steps: int,
    accumulation: int = 1,
    clipping: float = 1.0,
    precision: str = "fp32",
    groups: Callable[[nn.Module], Iterable[Any]] | None = None,
    scaler: Any = None,
    chunks: tuple[Callable[[nn.Module], list[nn.Module]], int] | None = None,
    optimizer: str | Trains = "adamw",
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    dtypes: str = CAST,
) -> Run:
    """The same training without a window: autograd, fp32 sums, torch's clipping formula, the same
    kernel of the optimizer. In fp16 the loss is fp32, times the scale of `scaler`, or the config's.
    `chunks`: which blocks take their batch in chunks, and of how many sequences. `schedule`: makes
    the schedule of the learning rate, which goes on after each step that was applied. `dtypes`: as
    stronghold.dtypes.
    """
    torch.manual_seed(0)
    model, make_batch = factory()
    without_caches(model)
    if dtypes == CAST:
        cast(model, DTYPES[precision])
    of_chunks = chunk_blocks(chunks[0](model), chunks[1]) if chunks else None
    parameters = [p for p in model.parameters() if p.requires_grad]
    trains = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    groups_of = trains.groups(groups(model) if groups else parameters)
    schedules = [] if schedule is None else [schedule(groups_of)]
    stepping = KernelOptimizer(
        groups_of, "lean" if precision == "lean" else "exact", trains.optimizer
    )
    sums: dict[nn.Parameter, torch.Tensor] = {}
    run = Run()
    torch.manual_seed(1)
    for micro in range(steps * accumulation):
        loss = loss_of(model(**make_batch(micro)))
        run.losses.append(loss.detach().clone())
        loss = loss / accumulation if accumulation > 1 else loss
        scale = 1.0
        if precision == "fp16":
            scale = 2.0**SCALE_POWER if scaler is None else scaler.cur_scale
            loss = loss.float() * scale
        loss.backward()
        if of_chunks is not None:
            of_chunks.to_grad()
        if accumulation > 1:
            _add_up(parameters, sums)
        if (micro + 1) % accumulation == 0:
            norm = _step(parameters, sums, stepping, clipping, scale)
            run.norms += [norm] if scaler is None or math.isfinite(norm) else []
            if scaler is not None:
                scaler.update_scale(not math.isfinite(norm))
            if not stepping.skipped:
                for one in schedules:
                    one.step()
    run.weights = dense_copies(model.state_dict())
    run.moments = stepping.moments(model)
    return run


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """What the rule "cast" does: not to frozen tensors of a module that has a matrix of codes."""
    for module in model.modules():
        parameters = list(module.parameters(recurse=False))
        codes = [p for p in parameters if not p.requires_grad and p.dim() > 1 and _is_code(p)]
        for parameter in parameters:
            is_kept = _is_code(parameter) or (codes and not parameter.requires_grad)
            if not is_kept:
                parameter.data = parameter.data.to(dtype)


def _is_code(parameter: nn.Parameter) -> bool:
    is_library_s = type(parameter) not in (nn.Parameter, torch.Tensor)
    return is_library_s or parameter.dtype not in COMPUTED


def _add_up(parameters: list[nn.Parameter], sums: dict[nn.Parameter, torch.Tensor]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad.float()
            sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
            parameter.grad = None


def _step(
    parameters: list[nn.Parameter],
    sums: dict[nn.Parameter, torch.Tensor],
    optimizer: KernelOptimizer,
    clipping: float,
    scale: float,
) -> float:
    gradients = dict(sums) if sums else {p: p.grad for p in parameters if p.grad is not None}
    norm = optimizer.step(gradients, clipping, scale)
    sums.clear()
    for parameter in parameters:
        parameter.grad = None
    return norm


class KernelOptimizer:
    """The native kernel over whole tensors, one after the other: what the engine does, without
    everything it does. `kind`: of its states. `optimizer`: how every group is updated, or one for
    each group. `state` has each updated parameter's arrays by name, and its number of steps.
    """

    def __init__(
        self,
        groups_of: torch.optim.Optimizer,
        kind: StateKind = "exact",
        optimizer: Optimizer | Sequence[Optimizer] = ADAMW,
        *,
        num_threads: int = 1,
    ) -> None:
        groups = groups_of.param_groups
        each = [optimizer] * len(groups) if isinstance(optimizer, Optimizer) else optimizer
        self._optimizers = {
            p: one for group, one in zip(groups, each, strict=True) for p in group["params"]
        }
        self._kind = kind
        self._groups = groups_of.param_groups
        self.state: dict[nn.Parameter, dict[str, Any]] = {}
        self._pool = native.Pool(num_threads)
        self.skipped = False

    def moments(self, model: nn.Module) -> dict[str, tuple[torch.Tensor, ...]]:
        """What `moments_of` gives, flat; of what was ever updated."""
        named = {name: (p, self.state.get(p)) for name, p in model.named_parameters()}
        return {
            name: tuple(state[array] for array in self.states(p).moment_dtypes)
            for name, (p, state) in named.items()
            if state
        }

    def states(self, parameter: nn.Parameter) -> States:
        kind = self._kind if parameter.dtype is torch.bfloat16 else EXACT
        return states_of(parameter.dtype, kind, self._optimizers[parameter].moments)

    def updates(self, parameter: nn.Parameter) -> bool:
        """False for a parameter that was frozen from the start."""
        return parameter in self._optimizers

    def step(
        self,
        gradients: dict[nn.Parameter, torch.Tensor],
        clipping: float,
        loss_scale: float = 1.0,
        *,
        skips: bool = False,
    ) -> float:
        """Clip by the global norm as torch.nn.utils.clip_grad_norm_ does, then update; returns the
        norm. With a loss scale the gradients are divided by it; then, or where it `skips`, none is
        applied when one is not finite, and the norm is infinity.
        """
        sums = [
            self._pool.sum_squares(g.dtype, [(g.data_ptr(), g.numel())])[0]
            for g in gradients.values()
        ]
        norm = math.sqrt(math.fsum(sums)) / loss_scale
        clipped = clipping / (norm + 1e-6) if clipping > 0.0 else 1.0  # as `clip_grad_norm_`
        scale = (1.0 if clipped > 1.0 else clipped) / loss_scale
        self.skipped = (skips or loss_scale != 1.0) and not math.isfinite(norm)
        if self.skipped:
            return math.inf
        for group in self._groups:
            for parameter in group["params"]:
                if parameter in gradients:
                    self._update(parameter, gradients[parameter], group, scale)
        return norm

    def begin(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Its state, which is new where it was never updated."""
        if parameter not in self.state:
            self.state[parameter] = {"step": 0} | {
                array: torch.zeros(num_items(array, parameter.numel()), dtype=dtype)
                for array, dtype in self.states(parameter).dtypes.items()
                if array != "weights"
            }
            if parameter.dtype is torch.float16:  # the master itself
                self.state[parameter]["low"].copy_(parameter.detach().flatten())
        return self.state[parameter]

    def _update(
        self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any], scale: float
    ) -> None:
        states, state = self.states(parameter), self.begin(parameter)
        state["step"] += 1
        gradient, weight = gradient.contiguous(), parameter.detach().contiguous()
        places = {array: state[array].data_ptr() for array in state if array != "step"}
        places["weights"] = weight.data_ptr()
        address, low, *moments = (places.get(str(array), 0) for array in states.kernel_arrays)
        optimizer = self._optimizers[parameter]
        numbers = optimizer.numbers(group)
        segment = native.UpdateSegment(
            address,
            low,
            gradient.data_ptr(),
            parameter.numel(),
            *moments,
            *numbers,
            *(0.0,) * (native.MAX_NUMBERS - len(numbers)),
            scale,
            state["step"],
            optimizer.flags,
        )
        self._pool.update(
            optimizer.kernel, parameter.dtype, gradient.dtype, [segment], lean=states.is_lean
        )
        if not parameter.is_contiguous():  # else it was written where it lies
            parameter.data.copy_(weight)


def train(engine: Any, make_batch: Any, steps: range) -> None:
    """The engine's steps of these numbers; micro-batch k is `make_batch(k)`."""
    accumulation = engine.gradient_accumulation_steps()
    for micro in range(steps.start * accumulation, steps.stop * accumulation):
        engine.backward(loss_of(engine(**make_batch(micro))))
        engine.step()
