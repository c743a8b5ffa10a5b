"""`CPUAdam`: the engine's Adam kernels as an ordinary `torch.optim.Optimizer`.

Owns a thread pool and, in `self.state`, the moments and the master remainders. Never writes
gradients. One thread at a time may call `step`.

The state of a parameter, contiguous and in the order of its elements:

    step            int
    each moment     fp32, under torch's name
    low             bf16: the signed 16-bit remainder, bits(master) = (bits(weight) << 16) + low
                    fp16: the fp32 master
                    fp32: absent

Lean states (bf16 only) have the arrays of `stronghold.optim.states`: `low` and signed moments are
int8, roots are uint8, and each moment has flat scales, `MOMENT_scale`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from stronghold.errors import ConfigError, did_you_mean
from stronghold.native import MAX_NUMBERS, Pool, UpdateSegment, available_cores
from stronghold.optim.adam import Adam
from stronghold.optim.contract import Optimizer
from stronghold.optim.states import (
    EXACT,
    KINDS,
    LEAN,
    LOW_DTYPE,
    SCALE,
    StateKind,
    States,
    num_items,
    states_of,
)

_EXPECTED = "float32, bfloat16 or float16"
# torch's base class puts this key into the defaults of every optimizer that is loaded.
TORCHS_DEFAULT = "differentiable"
_Closure = Callable[[], "torch.Tensor | float"]


class CPUAdam(torch.optim.Optimizer):
    """AdamW, or Adam with L2 decay (`adamw_mode=False`), on CPU parameters, with the kernels that
    the engine uses.

    Parameters and gradients are fp32, bf16 or fp16, independently of each other. Arithmetic is
    fp32 on exact fp32 masters; formula and order are in `kernels/include/stronghold.h`. The bits
    depend neither on `num_threads` nor on the instruction set. Every hyper-parameter may differ
    between parameter groups. Parameters without a gradient are skipped. `num_threads` includes the
    calling thread; None: the number of this process's cores.

    `states="lean"` keeps fewer bytes of a bf16 parameter: a master of 24 bits and 8-bit moments.
    Lean states round otherwise, within the bounds of `stronghold.optim.states`. They are as
    deterministic as exact states.

    The state of a parameter has `step`, `exp_avg`, `exp_avg_sq` and `low`. `load_state_dict` also
    takes the state of `torch.optim.Adam` and `AdamW`. It converts states of the other kind: it
    decodes lean ones and encodes exact ones.

    `step` raises `ConfigError`, before it updates anything, for

    * sparse gradients;
    * parameters that are not on the CPU, have another dtype, or overlap themselves in memory;
    * hyper-parameters that the optimizer refuses, such as `amsgrad=True`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adamw_mode: bool = True,
        bias_correction: bool = True,
        amsgrad: bool = False,
        maximize: bool = False,
        states: StateKind = EXACT,
        num_threads: int | None = None,
    ) -> None:
        if states not in KINDS:
            raise ConfigError(
                f'states: got {states!r}, expected "exact" or "lean".'
                f"{did_you_mean(str(states), KINDS)}"
            )
        self.states: StateKind = states
        self._pool = Pool(available_cores() if num_threads is None else num_threads)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adamw_mode": adamw_mode,
            "bias_correction": bias_correction,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        # before the parameters, as torch's optimizers do it
        self._check_defaults(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
            for param in self.param_groups[-1]["params"]:
                self._check_parameter(param)
        except ConfigError:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        # Threads are neither copied nor pickled. The copy starts as many threads.
        state: dict[str, Any] = super().__getstate__()
        return {**state, "num_threads": self._pool.num_threads, "states": self.states}

    def __setstate__(self, state: dict[str, Any]) -> None:
        num_threads = state.pop("num_threads", None)
        super().__setstate__(state)
        if num_threads is not None:
            self._pool = Pool(num_threads)
        for group in self.param_groups:
            # Groups that torch's optimizers saved lack the keys that torch does not have.
            for name, value in self.defaults.items():
                if name != TORCHS_DEFAULT:
                    group.setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch casts all state to the parameter's dtype. That would round the moments of
        # half-precision parameters and destroy their remainders. So load the saved values again.
        saved_states = state_dict["state"]
        for saved_group, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for saved_id, param in zip(saved_group["params"], group["params"], strict=True):
                if saved_id in saved_states:
                    states = self._states(self._optimizer(group), param)
                    self.state[param] = _loaded_state(param, saved_states[saved_id], states)

    @torch.no_grad()
    def step(self, closure: _Closure | None = None) -> torch.Tensor | float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Returns the closure's value, or None.

        Waits until the kernels are done. ConfigError for the cases of the class's docstring.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work: list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]] = []
        for group in self.param_groups:
            self._check_group(group)
            for param in group["params"]:
                if param.grad is not None:
                    work.append((group, param, param.grad))
        for _, param, _ in work:
            self._check_parameter(param)
        # One native call per kernel and pair of dtypes: many small tensors cost as one large one.
        calls: dict[tuple[str, torch.dtype, torch.dtype], list[UpdateSegment]] = defaultdict(list)
        weights: list[torch.Tensor] = []
        # contiguous copies must live until the calls are done
        grads: list[torch.Tensor] = []
        for group, param, grad in work:
            weight = param if param.is_contiguous() else param.detach().contiguous()
            weights.append(weight)
            grads.append(grad.contiguous())
            optimizer = self._optimizer(group)
            segment = self._segment(optimizer, group, param, weight, grads[-1])
            calls[optimizer.kernel, weight.dtype, grad.dtype].append(segment)
        is_lean = self.states == LEAN
        for (kernel, weight_dtype, grad_dtype), segments in calls.items():
            self._pool.update(kernel, weight_dtype, grad_dtype, segments, lean=is_lean)
        for (_, param, _), weight in zip(work, weights, strict=True):
            if weight is not param:
                param.copy_(weight)
        # Autograd does not see the kernels' writes. A backward that needs the old values must fail.
        torch.autograd.graph.increment_version([param for _, param, _ in work])
        return loss

    def _optimizer(self, group: dict[str, Any]) -> Optimizer:
        return Adam.from_group(self, type(self), group)

    def _states(self, optimizer: Optimizer, param: torch.Tensor) -> States:
        return states_of(param.dtype, self.states, optimizer.moments)

    def _segment(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        param: torch.Tensor,
        weight: torch.Tensor,
        grad: torch.Tensor,
    ) -> UpdateSegment:
        """The next step of one parameter, for the kernel. Makes missing state and counts the step.

        `weight` and `grad` are contiguous, with the parameter's shape.
        """
        states = self._states(optimizer, param)
        state = self.state[param]
        arrays = [array for array in states.dtypes if array != "weights"]
        if any(name not in state for name in ("step", *arrays)):
            for name, value in _initial_state(weight, states).items():
                state.setdefault(name, value)
        state["step"] += 1
        addresses = {array: state[array].data_ptr() for array in arrays}
        addresses["weights"] = weight.data_ptr()
        weight_address, low, *moments = (
            0 if array is None else addresses[array] for array in states.kernel_arrays
        )
        numbers = optimizer.numbers(group)
        unused_numbers = (0.0,) * (MAX_NUMBERS - len(numbers))
        grad_scale = -1.0 if group.get("maximize") else 1.0
        fields = [weight_address, low, grad.data_ptr(), weight.numel()]
        fields += moments
        fields += [*numbers, *unused_numbers]
        fields += [grad_scale, state["step"], optimizer.flags]
        return UpdateSegment._make(fields)

    def _check_defaults(self, defaults: dict[str, Any]) -> None:
        for name, value in defaults.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise ConfigError(
                    f"{type(self).__name__}: Tensor {name} must be 1-element, got the shape "
                    f"{tuple(value.shape)}"
                )
        self._check_group(defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        # Here `maximize` is allowed: `_segment` negates the gradient.
        checked = {key: value for key, value in group.items() if key != "maximize"}
        problems = Adam.problems(checked, type(self).__name__)
        if problems:
            raise ConfigError("\n".join(problems))

    def _check_parameter(self, param: torch.Tensor) -> None:
        grad = param.grad
        problem = None
        if param.device.type != "cpu":
            problem = f"is on {param.device}, expected the CPU"
        elif param.dtype not in LOW_DTYPE or param.layout != torch.strided:
            problem = f"is {param.dtype}, {param.layout}; expected dense {_EXPECTED}"
        elif self.states == LEAN and param.dtype != torch.bfloat16:
            problem = (
                f"is {param.dtype}; lean states are a layout of bfloat16 weights and their 24-bit "
                'masters: make the parameter bfloat16, or give it states="exact"'
            )
        elif not param.is_contiguous() and _overlaps(param):
            problem = "has elements that overlap in memory; pass its .clone()"
        elif grad is not None and (grad.dtype not in LOW_DTYPE or grad.layout != torch.strided):
            problem = (
                f"has a gradient that is {grad.dtype}, {grad.layout}; expected dense {_EXPECTED} "
                "(of an embedding: sparse=False)"
            )
        if problem is not None:
            name, shape = type(self).__name__, tuple(param.shape)
            raise ConfigError(f"{name}: a parameter of shape {shape} {problem}")


def _initial_state(weight: torch.Tensor, states: States) -> dict[str, Any]:
    """The state of a parameter before its first step."""
    state: dict[str, Any] = {"step": 0}
    for array, dtype in states.dtypes.items():
        if array.endswith(SCALE):
            state[array] = torch.zeros(num_items(array, weight.numel()), dtype=dtype)
        elif array == "low" and dtype is torch.float32:  # the master of fp16 weights
            state[array] = weight.float()
        elif array != "weights":
            state[array] = torch.zeros_like(weight, dtype=dtype)
    return state


def _loaded_state(param: torch.Tensor, saved: dict[str, Any], states: States) -> dict[str, Any]:
    """A copy of the saved state, with the dtypes and the kind of `states`.

    Missing values are the initial ones of the parameter. ConfigError for an array of another shape.
    """
    state = _initial_state(param.detach().contiguous(), states)
    for name in (*(moment.name for moment in states.moments), "low"):
        value = saved.get(name)
        if value is not None and value.shape != param.shape:
            raise ConfigError(
                f"saved optimizer state: {name} has shape {tuple(value.shape)}, "
                f"expected the parameter's {tuple(param.shape)}"
            )
    saved_kind = _kind_of(saved)
    if saved_kind is not None and saved_kind != states.kind:
        saved = _converted(saved, states)
    for name, target in state.items():
        value = saved.get(name)
        if value is None:
            continue
        if name == "step":
            state[name] = int(value)  # torch keeps it in a tensor
        else:
            target.copy_(value)
    return state


def _kind_of(saved: Mapping[str, Any]) -> StateKind | None:
    """The kind of a saved state; None if no array of it differs between the kinds."""
    if any(name.endswith(SCALE) for name in saved):
        return LEAN
    low = saved.get("low")
    if low is not None:
        return LEAN if low.dtype is torch.int8 else EXACT
    return EXACT if set(saved) > {"step"} else None


def _converted(saved: dict[str, Any], states: States) -> dict[str, Any]:
    """Convert the saved states of a bf16 parameter, or torch's, to the kind of `states`.

    The weight is not known and does not change. So a remainder that would round the weight up is
    clamped below that.
    """
    converted = {"step": saved.get("step", 0)}
    low = saved.get("low")
    if low is not None and states.kind == LEAN:
        converted["low"] = ((low.to(torch.int32) + 0x80) >> 8).clamp_max(127)
    elif low is not None:
        converted["low"] = low.to(torch.int16) << 8
    lean = states_of(torch.bfloat16, LEAN, states.moments)
    for moment in states.moments:
        if states.kind == EXACT:
            converted[moment.name] = lean.decode(moment, saved)
        elif saved.get(moment.name) is not None:
            converted |= lean.encode(moment, saved[moment.name].detach().float())
    return converted


def _overlaps(param: torch.Tensor) -> bool:
    """True if one element of memory stands at several indices of the parameter."""
    for size, stride in zip(param.shape, param.stride(), strict=True):
        if stride == 0 and size > 1:
            return True
    return False
