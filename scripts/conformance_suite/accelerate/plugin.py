"""A pytest plugin for Accelerate's DeepSpeed tests. `process` has what all their processes share.

Owns what is different in the process of the tests alone: scripts that tests launch are those of the
sources; tests of several GPUs launch their ranks, each with a pretended GPU; tests that make no
engine read their configs without the section.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.test_utils import testing

from conformance_suite.accelerate import process

execute = testing.execute_subprocess_async
PACKAGE = Path("src") / "accelerate"  # of the sources, where pytest runs
# Tests that read configs and make no engine.
CONFIG_TESTS = ("test_deepspeed_plugin_", "test_ds_config_zero", "test_init_zero3")


def path_in_sources(*parts: str) -> Path:
    """Replace `path_in_accelerate_package`: scripts read files of tests beside their package."""
    return PACKAGE.resolve().joinpath(*parts)


def execute_on_gpus(command: list[Any], *arguments: Any, **options: Any) -> Any:
    """Replace `execute_subprocess_async`: a launcher counts no GPUs, so it is told of them."""
    if "--num_processes=2" in command and "--use_deepspeed" not in command:
        command = [*command[:2], "--multi_gpu", *command[2:]]
    return execute(command, *arguments, **options)


def pytest_configure(config: pytest.Config) -> None:
    process.build_hub()
    testing.device_count = 2
    testing.execute_subprocess_async = execute_on_gpus
    testing.path_in_accelerate_package = path_in_sources


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    process.section.enabled = not item.name.startswith(CONFIG_TESTS)
    yield
