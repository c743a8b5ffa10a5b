"""DeepSpeed as installed: ZeRO-Offload, ZeRO-Infinity on RAM and NVMe, SuperOffload.

Each with its own CPU Adam and the settings that its documentation recommends for one GPU; see
deepspeed.ai/tutorials/zero-offload and DeepSpeedExamples/training/DeepSpeed-SuperOffload.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Any

import torch

from methods.base import Method, Unavailable, end_process_group, engine_step
from methods.ours import deepspeed_config
from methods.task import Batch, Task

CPU: dict[str, Any] = {"device": "cpu", "pin_memory": True}
STAGE_3: dict[str, Any] = {"stage": 3, "contiguous_gradients": True, "overlap_comm": True}
# What DeepSpeed's own SuperOffload scripts set; 4e8 elements are several GB of buffers, so that a
# small card takes its defaults instead.
SUPER_BUCKETS: dict[str, Any] = {"reduce_bucket_size": 4e8, "sub_group_size": 4e8}
LARGE_CARD_BYTES = 64 << 30


class DeepSpeedMethod(Method):
    """A DeepSpeed engine under some `zero_optimization`."""

    needs_cuda: str | None = None
    needs_nvme = False

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.needs_policy("keep", "recompute")
        if self.needs_cuda is not None and task.machine != "cuda":
            raise Unavailable(f"needs a GPU: {self.needs_cuda}")
        try:
            import deepspeed
        except ImportError as error:
            raise Unavailable(f"not installed: {error}") from error
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # Of no use to one rank, and leaves a buffer in /dev/shm.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if self.needs_nvme:
            self._check_nvme(deepspeed)
        model = self.build(recompute=task.recomputes)
        settings = deepspeed_config(task)
        settings["zero_optimization"] = self.zero()
        if self.needs_nvme:
            settings["aio"] = {"block_size": 1 << 20, "queue_depth": 8, "overlap_events": True}
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings
        )

    @abstractmethod
    def zero(self) -> dict[str, Any]:
        """The section `zero_optimization`."""

    def _check_nvme(self, deepspeed: Any) -> None:
        if self.task.nvme_dir is None:
            raise Unavailable("needs --nvme-dir, a folder on an NVMe drive")
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible(verbose=False):
            raise Unavailable("needs libaio's headers (libaio-dev) to compile DeepSpeed's async_io")

    def step(self, batches: list[Batch]) -> torch.Tensor:
        return engine_step(self._engine, batches)

    def close(self) -> None:
        self._engine.destroy()
        end_process_group()


class ZeroOffload(DeepSpeedMethod):
    """ZeRO-2: weights on the GPU, gradients and optimizer on the CPU."""

    def zero(self) -> dict[str, Any]:
        return {
            "stage": 2,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "offload_optimizer": CPU,
        }


class ZeroInfinity(DeepSpeedMethod):
    """ZeRO-3: weights, gradients and optimizer in RAM."""

    def zero(self) -> dict[str, Any]:
        return {**STAGE_3, "offload_optimizer": CPU, "offload_param": CPU}


class ZeroInfinityNvme(DeepSpeedMethod):
    """ZeRO-3: weights and optimizer on NVMe."""

    needs_nvme = True

    def zero(self) -> dict[str, Any]:
        nvme = {"device": "nvme", "nvme_path": self.task.nvme_dir, "pin_memory": True}
        pipelined = {"pipeline_read": True, "pipeline_write": True}
        return {**STAGE_3, "offload_optimizer": {**nvme, **pipelined}, "offload_param": nvme}


class SuperOffload(DeepSpeedMethod):
    """ZeRO-3 with weights on the GPU; nine tenths of the optimizer on the CPU, in a process of its
    own."""

    needs_cuda = "DeepSpeed's SuperOffload refuses other accelerators"

    def zero(self) -> dict[str, Any]:
        offload = {**CPU, "super_offload": True, "cpuadam_cores_perc": 0.9, "ratio": 0.9}
        cap = self.task.gpu_memory
        buckets = SUPER_BUCKETS if cap is None or cap >= LARGE_CARD_BYTES else {}
        return {"stage": 3, "overlap_comm": False, **buckets, "offload_optimizer": offload}


class SuperOffloadParam(SuperOffload):
    """The same with weights in RAM too, and the whole optimizer: for a card too small for them."""

    def zero(self) -> dict[str, Any]:
        settings = super().zero()
        settings["offload_optimizer"]["ratio"] = 1.0
        return {**settings, "offload_param": CPU}
