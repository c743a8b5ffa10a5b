"""ColossalAI's tests of its CPU Adam, with stronghold's in its place.

Its package is not imported. The optimizer under test is replaced, and the files of tests take
nothing else from it. `replace_package` makes importable what they name.
"""

from __future__ import annotations

import importlib.machinery
import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch

import stronghold

OURS = re.compile(r"test_cpu_adam_kernel\[.*|test_adam_optim_on_bert\[.*-CPUAdam-device1\]")


def is_ours(test: str) -> bool:
    """True if the test is of a CPU optimizer on CPU parameters."""
    return OURS.fullmatch(test) is not None


class CPUAdamOptimizer:
    """The interface of ColossalAI's kernel, over one `stronghold.CPUAdam`.

    Arguments are those of ColossalAI's class. Our optimizer keeps its states itself, in fp32, and
    shows them in the caller's. `loss_scale` is -1: no scale.
    """

    def __init__(
        self, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, adamw: bool
    ) -> None:
        self._adamw = adamw
        self._optimizer: Any = None

    def step(
        self,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        loss_scale: float,
    ) -> None:
        assert loss_scale == -1
        if self._optimizer is None:
            self._optimizer = stronghold.CPUAdam(
                # a view of the caller's memory, in each step the same
                [parameter.detach()],
                lr=lr,
                betas=(beta1, beta2),
                eps=eps,
                weight_decay=weight_decay,
                adamw_mode=self._adamw,
                bias_correction=bias_correction,
            )
        (target,) = self._optimizer.param_groups[0]["params"]
        assert target.data_ptr() == parameter.data_ptr()
        set_gradient(target, gradient)
        self._optimizer.step()
        state = self._optimizer.state[target]
        assert state["step"] == step
        exp_avg.copy_(state["exp_avg"])
        exp_avg_sq.copy_(state["exp_avg_sq"])


def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Give the parameter a gradient of another dtype, as the tests do it."""
    values = parameter.data
    parameter.data = gradient
    parameter.grad = parameter.data
    parameter.data = values


# Packages that the files of tests import and do not use once their optimizer is replaced.
UNUSED = ("colossalai", "tests.test_shardformer")
# Packages of the checkout whose `__init__` would import every model of the zoo.
ZOO = ("tests.kit.model_zoo", "tests.kit.model_zoo.transformers")


class Unused:
    """Stands for a name of ColossalAI's that no test here uses.

    A call returns it: decorators are called while a file is imported.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


class UnusedModule(ModuleType):
    """A module whose names are all `Unused`."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unused()


class Finder(MetaPathFinder, Loader):
    """Finds the modules of `UNUSED`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == package or name.startswith(f"{package}.") for package in UNUSED):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return UnusedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def replace_package(checkout: Path) -> None:
    """Make importable what the tests name. `checkout`: of ColossalAI."""
    sys.meta_path.insert(0, Finder())
    accelerator: Any = importlib.import_module("colossalai.accelerator")
    cpu = SimpleNamespace(get_current_device=lambda: torch.device("cpu"), empty_cache=lambda: None)
    accelerator.get_accelerator = lambda: cpu
    kernels: Any = importlib.import_module("colossalai.kernel.kernel_loader")
    kernels.CPUAdamLoader = lambda: SimpleNamespace(
        load=lambda: SimpleNamespace(CPUAdamOptimizer=CPUAdamOptimizer)
    )
    optimizers: Any = importlib.import_module("colossalai.nn.optimizer")
    optimizers.CPUAdam = stronghold.CPUAdam
    sys.path.insert(0, str(checkout))
    for name in ZOO:
        package = ModuleType(name)
        package.__path__ = [str(checkout / name.replace(".", "/"))]
        sys.modules[name] = package
    importlib.import_module("tests.kit.model_zoo.transformers.bert")
    zoo: Any = sys.modules["tests.kit.model_zoo"]
    zoo.model_zoo = importlib.import_module("tests.kit.model_zoo.registry").model_zoo
