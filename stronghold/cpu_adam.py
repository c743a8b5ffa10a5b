"""`CPUAdam`: the kernels' Adam and AdamW as an ordinary `torch.optim.Optimizer`.

Owns a thread pool and, in `self.state`, the moments and what half-precision parameters lack to
their exact fp32 masters. It never writes gradients. One thread at a time may call `step`.

State of a parameter, in the order of its elements and contiguous: `step` (int), `exp_avg` and
`exp_avg_sq` (fp32), and `low`: for bf16 the signed 16-bit remainder, with
bits(master) = (bits(weight) << 16) + low; for fp16 the fp32 master itself; none for fp32.
With lean states (bf16 alone) the arrays are those of `stronghold.states`: `low` and `exp_avg` int8,
`exp_avg_sq` uint8, and the flat `exp_avg_scale` and `exp_avg_sq_scale`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from stronghold.errors import ConfigError, did_you_mean
from stronghold.native import AdamSegment, Pool, available_cores
from stronghold.states import (
    EXACT,
    LEAN,
    LOW_DTYPE,
    MOMENT_DTYPES,
    MOMENTS,
    SCALES,
    Kind,
    num_items,
    states_of,
)

_LEAN = states_of(torch.bfloat16, LEAN)
_EXPECTED = "float32, bfloat16 or float16"
_Closure = Callable[[], "torch.Tensor | float"]


class CPUAdam(torch.optim.Optimizer):
    """AdamW, or Adam with L2 decay (`adamw_mode=False`), on CPU parameters.

    Parameters and gradients are fp32, bf16 or fp16, independently of each other. Arithmetic is
    fp32 on exact fp32 masters; formula and order are in `kernels/include/stronghold.h`. The bits
    depend neither on `num_threads` nor on the instruction set. Every hyperparameter may differ
    between parameter groups. Parameters without a gradient are skipped. `num_threads` includes the
    calling thread; by default it is the number of this process's cores.

    `states="lean"` keeps 5.1 bytes per bf16 parameter instead of 12, weight included: masters of 24
    bits and 8-bit moments. That changes rounding, by what `stronghold.states` promises, and is as
    deterministic as exact states.

    `load_state_dict` also takes the state of `torch.optim.Adam` and `AdamW`, and of a `CPUAdam`
    with the other kind of states: lean ones are decoded, exact ones encoded.

    Raises `ConfigError`, before anything is updated, for what it cannot do exactly: `amsgrad`,
    sparse gradients, parameters that are not on the CPU, of another dtype, or whose elements
    overlap in memory.
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
        states: Kind = EXACT,
        num_threads: int | None = None,
    ) -> None:
        if states not in MOMENT_DTYPES:
            raise ConfigError(
                f'states: got {states!r}, expected "exact" or "lean".'
                f"{did_you_mean(str(states), MOMENT_DTYPES)}"
            )
        self.states: Kind = states
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
        self._pool = Pool(available_cores() if num_threads is None else num_threads)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
            for param in self.param_groups[-1]["params"]:
                _check_parameter(param, self.states)
        except ConfigError:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        # Threads are not copied or pickled; the copy starts as many of its own.
        mine = {"num_threads": self._pool.num_threads, "states": self.states}
        return {**super().__getstate__(), **mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        num_threads = state.pop("num_threads", None)
        super().__setstate__(state)
        if num_threads is not None:
            self._pool = Pool(num_threads)
        for group in self.param_groups:
            # Groups that torch.optim.Adam or AdamW saved lack what only we have.
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch casts all state to the parameter's dtype, which would round the moments of
        # half-precision parameters and destroy their remainders: take the saved values as they are.
        params = [param for group in self.param_groups for param in group["params"]]
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        for saved_id, param in zip(saved_ids, params, strict=True):
            if saved_id in state_dict["state"]:
                saved = state_dict["state"][saved_id]
                self.state[param] = _adopted(param, saved, self.states)

    @torch.no_grad()
    def step(self, closure: _Closure | None = None) -> torch.Tensor | float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient; returns the closure's value, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [
            (group, param, param.grad)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        for group in self.param_groups:
            _check_group(group)
        for _, param, _ in work:
            _check_parameter(param, self.states)
        # One native call per pair of dtypes: hundreds of small tensors cost as one large one.
        calls = defaultdict(list)
        kept = []  # contiguous copies must live until the native calls are done
        for group, param, grad in work:
            weight = param if param.is_contiguous() else param.detach().contiguous()
            grad = grad if grad.is_contiguous() else grad.contiguous()
            kept.append((weight, grad))
            calls[weight.dtype, grad.dtype].append(self._segment(group, param, weight, grad))
        for (weight_dtype, grad_dtype), segments in calls.items():
            self._pool.adam(weight_dtype, grad_dtype, segments, lean=self.states == LEAN)
        for (_, param, _), (weight, _) in zip(work, kept, strict=True):
            if weight is not param:
                param.copy_(weight)
        # The kernels write behind autograd's back: a backward that needs the old values must fail.
        torch.autograd.graph.increment_version([param for _, param, _ in work])
        return loss

    def _segment(
        self, group: dict[str, Any], param: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor
    ) -> AdamSegment:
        state = self.state[param]
        if not state:
            state.update(_initial_state(weight, self.states))
        state["step"] += 1
        addresses = {array: state[array].data_ptr() for array in state if array != "step"}
        beta1, beta2 = group["betas"]
        return AdamSegment(
            weight=weight.data_ptr(),
            **{"low": 0, **addresses},
            grad=grad.data_ptr(),
            numel=weight.numel(),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            grad_scale=-1.0 if group["maximize"] else 1.0,
            step=state["step"],
            adamw=group["adamw_mode"],
            bias_correction=group["bias_correction"],
        )


def _initial_state(weight: torch.Tensor, kind: Kind) -> dict[str, Any]:
    state: dict[str, Any] = {"step": 0}
    for array, dtype in states_of(weight.dtype, kind).dtypes.items():
        if array in SCALES:
            state[array] = torch.zeros(num_items(array, weight.numel()), dtype=dtype)
        elif array == "low" and dtype is torch.float32:  # the master of fp16 weights
            state[array] = weight.float()
        elif array != "weights":
            state[array] = torch.zeros_like(weight, dtype=dtype)
    return state


def _adopted(param: torch.Tensor, saved: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """Saved state as ours: own copies, our dtypes and kind of states, what is missing made from the
    parameter."""
    state = _initial_state(param.detach().contiguous(), kind)
    for name in ("exp_avg", "exp_avg_sq", "low"):
        value = saved.get(name)
        if value is not None and value.shape != param.shape:
            raise ConfigError(
                f"saved optimizer state: {name} has shape {tuple(value.shape)}, "
                f"expected the parameter's {tuple(param.shape)}"
            )
    if (kind == LEAN) != ("exp_avg_scale" in saved):
        saved = _converted(saved, kind)
    for name, own in state.items():
        value = saved.get(name)
        if value is None:
            continue
        if name == "step":
            state[name] = int(value)  # torch keeps it in a tensor
        else:
            own.copy_(value)
    return state


def _converted(saved: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """States of a bf16 parameter, or torch's, as those of the other kind. The parameter is not
    known here, and stays: a remainder that would round its weight up stops short of that."""
    found, low = {"step": saved["step"]}, saved.get("low")
    if low is not None and kind == LEAN:
        found["low"] = ((low.to(torch.int32) + 0x80) >> 8).clamp_max(127)
    elif low is not None:
        found["low"] = low.to(torch.int16) << 8
    for moment in MOMENTS:
        if kind == EXACT:
            found[moment] = _LEAN.decode(moment, saved)
        elif saved.get(moment) is not None:
            found |= _LEAN.encode(moment, saved[moment].detach().float())
    return found


def _check_group(group: dict[str, Any]) -> None:
    if group["amsgrad"]:
        raise ConfigError("CPUAdam does not do amsgrad=True; use torch.optim.AdamW(amsgrad=True)")
    for beta in group["betas"]:
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"betas: got {group['betas']}, expected two numbers in [0, 1)")
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0.0:
            raise ConfigError(f"{name}: got {group[name]}, expected a number >= 0")


def _check_parameter(param: torch.Tensor, kind: Kind) -> None:
    grad = param.grad
    problem = None
    if param.device.type != "cpu":
        problem = f"is on {param.device}, expected the CPU"
    elif param.dtype not in LOW_DTYPE or param.layout != torch.strided:
        problem = f"is {param.dtype}, {param.layout}; expected dense {_EXPECTED}"
    elif kind == LEAN and param.dtype != torch.bfloat16:
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
        raise ConfigError(f"CPUAdam: a parameter of shape {tuple(param.shape)} {problem}")


def _overlaps(param: torch.Tensor) -> bool:
    shape_and_stride = zip(param.shape, param.stride(), strict=True)
    return any(stride == 0 and size > 1 for size, stride in shape_and_stride)
