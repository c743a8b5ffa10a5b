"""A pytest plugin under which DeepSpeed's own unit tests meet stronghold's engine.

Owns what is different in the process of the tests, and nothing on disk: `deepspeed.initialize`
adds a "stronghold" section to every config; distributed tests run in this process, on one rank; the
CPU accelerator says that it computes in half precision, which the emulated device does; torch's
DistributedDataParallel, the reference of many, runs on the CPU; the tests of DeepSpeed's CPU Adam
get ours.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import tempfile
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator

import stronghold
from stronghold.config import read_config
from stronghold.errors import ConfigError
from stronghold.model.partition import partition

ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
CPU_ADAM_TESTS = "test_cpu_adam.py"


def initialize(
    args: Any = None, model: Any = None, config: Any = None, config_params: Any = None, **rest: Any
) -> Any:
    """`stronghold.initialize` of the same config with our section in it."""
    settings = read_config(config if config is not None else config_params, args)
    settings.setdefault("stronghold", {"device": "emulated", **blocks_of(model)})
    for name in ("deepspeed_config", "deepscale_config"):
        if getattr(args, name, None) is not None:
            setattr(args, name, None)
    return stronghold.initialize(args=args, model=model, config=settings, **rest)


def blocks_of(model: Any) -> dict[str, Any]:
    """The names of the parts of a toy without repeated blocks: else nothing of it is streamed."""
    if not isinstance(model, torch.nn.Module):
        return {}
    with contextlib.suppress(ConfigError):
        if partition(model).streamed:
            return {}
    parts = [n for n, part in model.named_children() if any(True for _ in part.parameters())]
    return {"layers": parts} if parts else {}


def on_one_rank(test: Any, num_procs: int, init_method: str) -> None:
    """Run a distributed test here, instead of in `num_procs` processes."""
    if test.init_distributed and not deepspeed.comm.is_initialized():
        if not torch.distributed.is_initialized():
            store = tempfile.mkstemp()[1]
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{store}", rank=0, world_size=1
            )
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    test.run(**test._fixture_kwargs)


def without_device_ids(self: Any, init: Any, *args: Any, **kwargs: Any) -> None:
    """torch's DistributedDataParallel of a module on the CPU."""
    init(self, *args, **{**kwargs, "device_ids": None, "output_device": None})


def of_scalars(gather: Any, output_tensor: Any, input_tensor: Any, *rest: Any, **more: Any) -> Any:
    """gloo's all_gather takes no tensor without dimensions; NCCL's does."""
    return gather(output_tensor.view(-1), input_tensor.reshape(-1), *rest, **more)


def pytest_configure(config: pytest.Config) -> None:
    os.environ.update(ONE_RANK)
    torch.set_num_threads(1)
    deepspeed.initialize = initialize
    parallel = torch.nn.parallel.DistributedDataParallel
    parallel.__init__ = functools.partialmethod(  # type: ignore[method-assign]
        without_device_ids, parallel.__init__
    )
    gather = torch.distributed.all_gather_into_tensor
    torch.distributed.all_gather_into_tensor = functools.partial(of_scalars, gather)
    accelerator = type(get_accelerator())
    accelerator.current_device = accelerator.current_device_name  # "cpu", not "0"
    type(get_accelerator()).is_fp16_supported = lambda self: True
    importlib.import_module("unit.util").bf16_required_version_check = lambda *args: True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One rank for every class of distributed tests. Tests of CPU Adam get ours."""
    for item in items:
        owner = getattr(item, "cls", None)
        if getattr(owner, "is_dist_test", False):
            owner.world_size = 1
            owner._launch_procs = on_one_rank
        if item.path.name == CPU_ADAM_TESTS:
            deepspeed.ops.adam.DeepSpeedCPUAdam = stronghold.CPUAdam
