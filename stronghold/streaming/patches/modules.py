"""Tables that torch and Transformers keep on modules, parameters and optimizers.

Owns what is written into them: each function names one private attribute. The table of reasons,
versions and tests is in `table`. The training thread enters, and autograd's in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


# -- modules ---------------------------------------------------------------------------------------
def parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters by attribute, which its `forward` reads: what is written into
    the table is what `module.NAME` gives."""
    return module._parameters


def is_compiled(module: nn.Module) -> bool:
    """True if `torch.compile(module)` made it, or `module.compile()` was called."""
    return hasattr(module, "_orig_mod") or is_call_compiled(module)


def is_call_compiled(module: nn.Module) -> bool:
    """True after `module.compile()`."""
    return module._compiled_call_impl is not None


def is_batch_norm(module: nn.Module) -> bool:
    """True for every kind of batch norm, torch's lazy and synchronised ones too."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def transient_buffers(module: nn.Module) -> set[str]:
    """The names of the module's own buffers that its state dict leaves out."""
    return module._non_persistent_buffers_set


def hooks_before_state_dict(module: nn.Module) -> Iterable[Any]:
    """The hooks that `register_state_dict_pre_hook` has registered."""
    return module._state_dict_pre_hooks.values()


def register_state_dict_hook(module: nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Call `hook(module, state_dict, prefix, local_metadata)` when the module has written its
    entries. The public `register_state_dict_post_hook` would write an attribute on `hook`."""
    handle: RemovableHandle = module._register_state_dict_hook(hook)
    return handle


# -- parameters ------------------------------------------------------------------------------------
def hooks_on_gradient(parameter: torch.Tensor) -> dict[int, Any] | None:
    """The hooks of `register_hook` by number; None or empty without one."""
    hooks: dict[int, Any] | None = parameter._backward_hooks
    return hooks


def hooks_after_gradient(parameter: torch.Tensor) -> dict[int, Any]:
    """The hooks of `register_post_accumulate_grad_hook` by number, in the order in which autograd
    calls them: an entry that is taken out and put back is called last."""
    hooks: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return {} if hooks is None else hooks


# -- optimizers ------------------------------------------------------------------------------------
def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Write `_opt_called`, which torch's schedules read: without it they warn that no optimizer
    stepped before them."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


# -- Transformers ----------------------------------------------------------------------------------
def build_from_config(model_class: Any) -> Callable[..., nn.Module]:
    """The function of a model class that builds a model of a configuration. The classes of
    Transformers' `Auto...` family have a public one."""
    build: Callable[..., nn.Module] = model_class._from_config
    return build


def set_weight_conversions(model: nn.Module, rules: Sequence[Any]) -> None:
    """Write the rules by which names of files became names of `model`. `save_pretrained` applies
    them backwards."""
    setattr(model, "_weight_conversions", rules)  # noqa: B010 - no attribute that mypy knows
