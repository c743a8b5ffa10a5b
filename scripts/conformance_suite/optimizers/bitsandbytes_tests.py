"""bitsandbytes' `tests/test_optim.py` with stronghold's CPU optimizers in place of its own.

Its tables name, for each optimizer, the reference, the optimizer under test, and the states that
are compared. `test_optimizer32bit` and `test_lion32bit_weight_decay` read them.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import stronghold

# Settings of the references: bitsandbytes' own defaults and torch's.
LION = {"lr": 1e-4, "betas": (0.9, 0.99)}
OURS = re.compile(r"test_optimizer32bit\[.*opt=(adam|momentum|lion)[\]-].*|test_lion32bit_.*")


def is_ours(test: str) -> bool:
    """True if the test's optimizer has a counterpart here."""
    return OURS.fullmatch(test) is not None


def replace_optimizers(module: Any) -> None:
    """Change the tables of the module of tests."""
    optimizers, states = module.str2optimizers, module.str2statenames
    optimizers["adam"] = (optimizers["adam"][0], stronghold.CPUAdam)
    optimizers["lion"] = (optimizers["lion"][0], lion)
    optimizers["momentum"] = (optimizers["momentum"][0], momentum)
    states["adam"] = [("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")]
    states["lion"] = [("exp_avg", "exp_avg")]
    states["momentum"] = [("momentum_buffer", "momentum_buffer")]
    module.bnb = SimpleNamespace(optim=SimpleNamespace(Lion=lion))


def lion(parameters: Any, **settings: Any) -> Any:
    return stronghold.CPULion(parameters, **{**LION, **settings})


def momentum(parameters: Any) -> Any:
    return stronghold.CPUSGD(parameters, lr=0.01, momentum=0.9)
