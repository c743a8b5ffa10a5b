"""torch's own: fully_shard around every block with CPUOffloadPolicy, fused AdamW on the CPU."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from methods.base import Method, accumulate, clip, end_process_group
from methods.task import Batch, Task


class Fsdp2Offload(Method):
    """fp32 weights, gradients and moments in host memory; blocks are cast and gathered on the
    device."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.needs_policy("keep", "recompute")
        cuda = task.machine == "cuda"
        if cuda:
            torch.cuda.set_device(task.device)
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        mesh = init_device_mesh("cuda" if cuda else "cpu", (1,))
        model = self.build(recompute=task.recomputes)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = parameter.data.float()
        precision = MixedPrecisionPolicy(param_dtype=task.dtype, reduce_dtype=torch.float32)
        options = {
            "mesh": mesh,
            "mp_policy": precision,
            "offload_policy": CPUOffloadPolicy(pin_memory=cuda),
        }
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(task.device)
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), fused=True, **task.adam)

    def step(self, batches: list[Batch]) -> torch.Tensor:
        loss = accumulate(self._model, batches)
        # One rank: the local shards are the whole gradients.
        found = [p.grad for p in self._model.parameters() if p.grad is not None]
        clip([g.to_local() for g in found], self.task.clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def close(self) -> None:
        end_process_group()
