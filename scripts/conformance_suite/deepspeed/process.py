"""What is different in a process that runs DeepSpeed's tests.

The process of pytest calls `adapt`, and so does the process of each rank. It writes nothing to
disk. Seven things differ:

1. `deepspeed.initialize` adds a "stronghold" section to every config. DeepSpeed's own engine runs
   without it.
2. The CPU accelerator says that it computes in half precision: the emulated device does.
3. torch's DistributedDataParallel, the reference of many tests, runs on the CPU.
4. An all-gather takes tensors without dimensions, as NCCL's does.
5. DeepSpeed compiles no operator for the all-reduce of CPU tensors.
6. DeepSpeed's operator for NVMe counts as there, though it is not: this engine has another one.
7. Helpers of the tests that assert which parameters stage 3 has partitioned are left out. Here no
   parameter is partitioned. The tests that call them compare gradients, too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

import stronghold
from conformance_suite.recorder import is_reference_engine
from stronghold.config import read_config
from stronghold.errors import ConfigError
from stronghold.model.partition import partition

SECTION = {"device": "emulated"}
PARTITION_CHECKS = ("assert_all_partitioned", "assert_persistent_resident")


def adapt() -> None:
    """Make this process ready for DeepSpeed's tests."""
    torch.set_num_threads(1)
    if not is_reference_engine():
        deepspeed.initialize = initialize
        deepspeed.ops.__compatible_ops__["async_io"] = True
    parallel = torch.nn.parallel.DistributedDataParallel
    parallel.__init__ = functools.partialmethod(  # type: ignore[method-assign]
        without_device_ids, parallel.__init__
    )
    gather = torch.distributed.all_gather_into_tensor
    torch.distributed.all_gather_into_tensor = functools.partial(of_scalars, gather)
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    accelerator = type(get_accelerator())
    accelerator.current_device = accelerator.current_device_name  # "cpu", not "0"
    accelerator.is_fp16_supported = lambda self: True
    importlib.import_module("unit.util").bf16_required_version_check = lambda *_, **__: True


def adapt_init() -> None:
    """Let `deepspeed.zero.Init` see our section in every config that it is given."""
    if is_reference_engine():
        return
    init: Any = deepspeed.zero.Init
    init.__init__ = functools.partialmethod(with_section, init.__init__)


def leave_out_partition_checks(tests: Any) -> None:
    """Replace the helpers of a module of tests that assert what stage 3 has partitioned."""
    for name in PARTITION_CHECKS:
        if hasattr(tests, name) and not is_reference_engine():
            setattr(tests, name, lambda *_, **__: None)


def with_section(self: Any, init: Any, *args: Any, **kwargs: Any) -> None:
    """`deepspeed.zero.Init` of the same config with our section in it."""
    for name in ("config_dict_or_path", "config"):
        if isinstance(kwargs.get(name), dict):
            kwargs[name] = {**kwargs[name], "stronghold": SECTION}
    init(self, *args, **kwargs)


def initialize(
    args: Any = None, model: Any = None, config: Any = None, config_params: Any = None, **rest: Any
) -> Any:
    """`stronghold.initialize` of the same config with our section in it."""
    settings = read_config(config if config is not None else config_params, args)
    settings.setdefault("stronghold", {**SECTION, **blocks_of(model)})
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


def without_device_ids(self: Any, init: Any, *args: Any, **kwargs: Any) -> None:
    """torch's DistributedDataParallel of a module on the CPU."""
    init(self, *args, **{**kwargs, "device_ids": None, "output_device": None})


def of_scalars(gather: Any, output_tensor: Any, input_tensor: Any, *rest: Any, **more: Any) -> Any:
    """gloo's all_gather takes no tensor without dimensions; NCCL's does."""
    return gather(output_tensor.view(-1), input_tensor.reshape(-1), *rest, **more)
