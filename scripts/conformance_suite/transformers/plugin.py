"""A pytest plugin under which Transformers' DeepSpeed tests meet stronghold's engine.

Owns what is different in the process of the tests: the configs of a Trainer get a "stronghold"
section; the models that the tests load are in a cache of this process, made here; and tests that
Transformers skips, because DeepSpeed fails them or lacks an operator, are run.
"""

from __future__ import annotations

import functools
import os
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance_suite import hub, pretended_gpu

pretended_gpu.share_package(Path.cwd() / "tests")
_cache = tempfile.TemporaryDirectory()
# read when Transformers is imported
os.environ.update(hub.environment(Path(_cache.name)))

import deepspeed  # noqa: E402
import pytest  # noqa: E402
from accelerate.utils.deepspeed import HfDeepSpeedConfig  # noqa: E402
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig  # noqa: E402

import stronghold.plugin  # noqa: E402
from conformance_suite.transformers import models  # noqa: E402
from conformance_suite.transformers.table import RUN_ANYWAY  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    models.build(Path(_cache.name))
    stronghold.plugin.enable()
    HfDeepSpeedConfig.set_stage_and_offload = with_section(HfDeepSpeedConfig.set_stage_and_offload)
    unittest.TestCase.skipTest = skip_test  # type: ignore[method-assign]
    # the engine has file lanes of its own
    deepspeed.ops.__compatible_ops__["async_io"] = True


def with_section(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Add our section to a Trainer's config, before Accelerate and stronghold read it."""

    @functools.wraps(original)
    def set_stage_and_offload(config: Any) -> None:
        if isinstance(config, HfTrainerDeepSpeedConfig):
            config.config.setdefault("stronghold", {})
        original(config)

    return set_stage_and_offload


def skip_test(test: unittest.TestCase, reason: str) -> None:
    """Replace `TestCase.skipTest`: go on with a test that can pass here."""
    if not any(pattern.search(f"{test.id()}: {reason}") for pattern in RUN_ANYWAY):
        raise unittest.SkipTest(reason)
