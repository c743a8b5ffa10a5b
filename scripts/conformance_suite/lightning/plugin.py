"""A pytest plugin under which Lightning's DeepSpeed tests meet stronghold's engine.

Owns what is different in the process of the tests. The config of a DeepSpeedStrategy gets a
"stronghold" section. Tests for two GPUs run on one rank. Tests that Lightning runs each in a
process of its own run in this one: after each, the engines that it made end, and DeepSpeed forgets
its process group.
"""

from __future__ import annotations

import functools
import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

os.environ["PL_RUN_STANDALONE_TESTS"] = "1"  # read when a test is marked

import deepspeed
import lightning.fabric
import lightning.pytorch
import pytest
from deepspeed.utils import groups
from lightning.fabric.utilities.testing import _runif

import stronghold.plugin
from stronghold.engine import StrongholdEngine, dispatch

_engines: weakref.WeakSet[StrongholdEngine] = weakref.WeakSet()


def pytest_configure(config: pytest.Config) -> None:
    # A strategy sets these, and tests look whether it did.
    os.environ.pop("MASTER_ADDR", None)
    os.environ.pop("MASTER_PORT", None)
    stronghold.plugin.enable()
    _runif.num_cuda_devices = lambda: 2
    for framework in (lightning.fabric, lightning.pytorch):
        framework.accelerators.CUDAAccelerator.parse_devices = staticmethod(lambda devices: [0])
        strategy = framework.strategies.DeepSpeedStrategy
        strategy.setup_environment = with_section(strategy.setup_environment)
    dispatch.initialize = remembered(dispatch.initialize)


def with_section(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Add our section to a strategy's config when its process begins."""

    @functools.wraps(original)
    def setup_environment(strategy: Any) -> None:
        if isinstance(strategy.config, dict):
            strategy.config.setdefault("stronghold", {})
        original(strategy)

    return setup_environment


def remembered(original: Callable[..., Any]) -> Callable[..., Any]:
    """Remember the engines that a test makes."""

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if isinstance(made[0], StrongholdEngine):
            _engines.add(made[0])
        return made

    return initialize


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems() -> None:
    # Tests are marked by now. With the variable, Lightning would leave all others out.
    os.environ.pop("PL_RUN_STANDALONE_TESTS", None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    for engine in list(_engines):
        engine.destroy()
    _engines.clear()
    gc.collect()
    deepspeed.comm.comm.cdb = None
    groups._WORLD_GROUP = None
