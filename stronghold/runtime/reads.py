"""What the user's own code asks parameters for, true though an engine has their values elsewhere.

Owns replacements, in this process's memory and only while an engine lives: that of
`torch.nn.Module.named_parameters`, which `parameters` calls, and those of how a parameter is copied
and pickled. They give a parameter that an engine trains once that one's newest weights are where it
points. So code that knows nothing of the engine (a copy of the weights for generation, a moving
average, a sum of norms) never reads weights of two steps. Other modules are given as they are;
nothing is written on any module. The training thread enables, closes and iterates, and autograd's
in backward. Gradients wait for the step elsewhere, too: `zero_grad` of a model or an optimizer
throws those away.

[Note: DeepSpeed's attributes] `deepspeed.utils.safe_get_full_fp32_param` and its kin look for
attributes of the parameter, and where there are none they return None, or do nothing. So a
parameter that is trained has these while the engine lives, and they raise. They are the only ones
that this package ever sets on a parameter, and no copy or pickle has them.

[Note: one at a time] A parameter waits for its own layer when it is reached: what asks for a device
or a dtype, `next(parameters())`, waits for no more than the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from stronghold.errors import ConfigError

Named = Iterator[tuple[str, nn.Parameter]]


class _Replacement:
    """What stands at `nn.Module.named_parameters`, what stood there before, and whom to wait for:
    by a parameter's identity, what returns when it holds its newest values.
    """

    def __init__(self) -> None:
        self.waits: dict[int, Callable[[], None]] = {}
        self.drops: dict[int, Callable[[set[int]], None]] = {}  # given what else is dropped
        # By class and name: what stood there, and what stands there now.
        self._replaced: dict[tuple[type, str], tuple[Any, Any]] = {}

    def enable(self) -> None:
        self._replace(nn.Module, "named_parameters", self._waiting)
        for name in ("__deepcopy__", "__reduce_ex__"):
            self._replace(nn.Parameter, name, self._waiting_for_itself)
        for owner in (nn.Module, torch.optim.Optimizer):
            self._replace(owner, "zero_grad", self._dropping)

    def _replace(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        if (owner, name) not in self._replaced:  # else: another wrapper kept ours inside
            original = getattr(owner, name)
            self._replaced[owner, name] = (original, make(original))
            setattr(owner, name, self._replaced[owner, name][1])

    def disable(self) -> None:
        for (owner, name), (original, installed) in list(self._replaced.items()):
            if getattr(owner, name) is installed:
                setattr(owner, name, original)
                del self._replaced[owner, name]

    def _wait(self, parameter: Any) -> None:
        wait = self.waits.get(id(parameter))
        if wait is not None:
            wait()

    def _waiting(self, original: Callable[..., Named]) -> Callable[..., Named]:
        @functools.wraps(original)
        def named_parameters(module: nn.Module, *args: Any, **kwargs: Any) -> Named:
            for name, parameter in original(module, *args, **kwargs):
                self._wait(parameter)
                yield name, parameter

        return named_parameters

    def _waiting_for_itself(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def copied(parameter: nn.Parameter, *args: Any) -> Any:
            self._wait(parameter)
            names = FRAGMENT if _is_ours(parameter) else ()
            ours = {name: vars(parameter).pop(name) for name in names}
            try:
                return original(parameter, *args)
            finally:
                vars(parameter).update(ours)

        return copied

    def _dropping(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> None:
            original(owner, *args, **kwargs)
            found = {id(parameter) for parameter in _parameters_of(owner)}
            for drop in {self.drops[identity] for identity in found & self.drops.keys()}:
                drop(found)

        return zero_grad


def _parameters_of(owner: nn.Module | torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Without a wait."""
    if isinstance(owner, torch.optim.Optimizer):
        for group in owner.param_groups:
            yield from group["params"]
        return
    for module in owner.modules():
        yield from (p for p in module._parameters.values() if p is not None)


def _refuse(name: str, functions: str, *_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        f"{name}: {functions} cannot be used in this release, for an engine keeps masters, moments "
        "and gradients of its own. Weights: the parameter itself, or engine.module_state_dict(); "
        "to write them, with torch.no_grad(): p.copy_(values) after engine.synchronize(), or "
        "engine.load_module_state_dict. Masters and moments: engine.save_checkpoint, and "
        "`stronghold export`"
    )


FRAGMENT = {  # what DeepSpeed looks for, and the functions that then call it
    "_hp_mapping": "",
    "get_full_hp_param": "safe_get_full_fp32_param and safe_get_full_optimizer_state",
    "set_full_hp_param": "safe_set_full_fp32_param and safe_set_full_optimizer_state",
    "get_full_hp_grad": "safe_get_full_grad",
    "set_full_hp_grad": "safe_set_full_grad",
}


def _is_ours(parameter: nn.Parameter) -> bool:
    made = vars(parameter).get("get_full_hp_param")
    return isinstance(made, functools.partial) and made.func is _refuse


_replacement = _Replacement()


class ParameterReads:
    """Of one engine. `places` have each parameter's layer and name; `settle` returns when the
    newest weights of the layers that it is given are where their parameters point, `drop` throws
    the gradients away that wait for the step; it is given the name of one that shall stay, if one
    shall.
    """

    def __init__(
        self,
        places: Mapping[nn.Parameter, tuple[int, str]],
        *,
        settle: Callable[[Sequence[int]], None],
        drop: Callable[[str | None], None],
    ) -> None:
        self._drop_gradients = drop
        self._waits = {
            id(parameter): functools.partial(settle, (layer,))
            for parameter, (layer, _) in places.items()
        }
        self._trained = {p: name for p, (_, name) in places.items() if p.requires_grad}
        for parameter, name in self._trained.items():
            for attribute, functions in FRAGMENT.items():
                refuse = functools.partial(_refuse, name, functions) if functions else None
                setattr(parameter, attribute, refuse)
        _replacement.waits |= self._waits
        _replacement.drops |= {id(parameter): self._drop for parameter in self._trained}
        _replacement.enable()

    def _drop(self, found: set[int]) -> None:
        """Somebody throws the gradients of these parameters away."""
        others = (name for p, name in self._trained.items() if id(p) not in found)
        self._drop_gradients(next(others, None))

    def close(self) -> None:
        """The parameters are the user's alone again. Safe to call twice."""
        for identity, wait in self._waits.items():
            if _replacement.waits.get(identity) is wait:
                del _replacement.waits[identity]
        for parameter in self._trained:
            if _replacement.drops.get(id(parameter)) == self._drop:
                del _replacement.drops[id(parameter)]
                for attribute in FRAGMENT if _is_ours(parameter) else ():
                    delattr(parameter, attribute)
        self._waits.clear()
        self._trained.clear()
        if not _replacement.waits:
            _replacement.disable()
