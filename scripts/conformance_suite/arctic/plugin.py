"""A pytest plugin under which ArcticTraining's tests meet stronghold's engine.

Owns what is different in the process of the tests: `deepspeed.initialize` adds a "stronghold"
section to every config; DeepSpeed's CPU Adam, which would be compiled first, is ours; configs,
tokenizer and data sets are in a cache of this process, made here, and processed data stay in it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from conformance_suite import hub

_cache = tempfile.TemporaryDirectory()
# read when Transformers is imported
os.environ.update(hub.environment(Path(_cache.name)))

import deepspeed  # noqa: E402
import pytest  # noqa: E402

import stronghold  # noqa: E402
from conformance_suite.arctic import models  # noqa: E402
from stronghold.config import read_config  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    models.build(Path(_cache.name))
    _keep_data_in_cache()
    deepspeed.initialize = initialize
    deepspeed.ops.adam.DeepSpeedCPUAdam = stronghold.CPUAdam


def initialize(config: Any = None, args: Any = None, **rest: Any) -> Any:
    """`stronghold.initialize` of the same config with our section in it."""
    settings = read_config(config, None)
    settings.setdefault("stronghold", {"device": "emulated", "window": 1})
    return stronghold.initialize(config=settings, **rest)


def _keep_data_in_cache() -> None:
    """Keep processed data in this process's folder. In /tmp another run would find them."""
    # Not imported before: its configs read the environment of the tests, which pytest makes.
    from arctic_training.data.factory import DataFactory
    from arctic_training.data.source import DataSource

    folder = Path(_cache.name) / "processed"
    of_factory, of_source = DataFactory.cache_path, DataSource.cache_path.func
    DataFactory.cache_path = lambda self, sources: folder / of_factory(self, sources).name
    DataSource.cache_path = property(lambda self: folder / of_source(self).name)
