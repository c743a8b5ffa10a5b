"""A pytest plugin under which DeepSpeed's own unit tests meet stronghold's engine, on one rank.

`process` has what is different in the process of the tests. Distributed tests run in this process.
The tests of DeepSpeed's CPU Adam get ours.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from typing import Any

import deepspeed
import pytest
import torch

import stronghold
from conformance_suite.deepspeed.process import adapt, leave_out_partition_checks
from conformance_suite.recorder import is_reference_engine

pytest_plugins = ("conformance_suite.deepspeed.fixtures",)

ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
CPU_ADAM_TESTS = "test_cpu_adam.py"


def on_one_rank(test: Any, request: Any, world_size: Any) -> None:
    """Run a distributed test or fixture here, instead of in `world_size` processes."""
    test.world_size = 1
    if test.init_distributed and not deepspeed.comm.is_initialized():
        if not torch.distributed.is_initialized():
            store = tempfile.mkstemp()[1]
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{store}", rank=0, world_size=1
            )
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    test.run(**test._fixture_kwargs)


def pytest_configure(config: pytest.Config) -> None:
    os.environ.update(ONE_RANK)
    adapt()
    importlib.import_module("unit.common").DistributedExec._launch_with_file_store = on_one_rank


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of CPU Adam get ours, and no test asks what is partitioned."""
    for tests in {item.module for item in items}:
        leave_out_partition_checks(tests)
    for item in items:
        if item.path.name == CPU_ADAM_TESTS and not is_reference_engine():
            deepspeed.ops.adam.DeepSpeedCPUAdam = stronghold.CPUAdam
