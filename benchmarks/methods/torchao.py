"""torchao's CPUOffloadOptimizer, where torchao is installed: weights on the GPU, AdamW on the CPU.

Its moments have the parameters' dtype, so bf16 runs by autocast over fp32 weights. It copies every
gradient to the host as it appears, so there is nothing that could be clipped.
"""

from __future__ import annotations

import torch

from methods.base import Method, Unavailable
from methods.memory import DeviceMemory
from methods.model import build, count_parameters
from methods.task import Batch, Task


class TorchaoOffload(Method):
    def __init__(self, task: Task, device_memory: DeviceMemory) -> None:
        super().__init__(task, device_memory)
        self.needs_policy("keep", "recompute")
        try:
            from torchao.optim import CPUOffloadOptimizer
        except ImportError as error:
            raise Unavailable(f"not installed: {error}") from error
        if task.machine != "cuda":
            raise Unavailable("needs a GPU: it copies on CUDA streams")
        if task.clipping > 0.0:
            raise Unavailable("cannot clip: use --optimizer-clipping 0 to see it")
        model = build(task, recompute=task.recomputes)
        self.num_parameters = count_parameters(model)
        self._model = model.float().to(task.device)
        self._optimizer = CPUOffloadOptimizer(
            self._model.parameters(),
            torch.optim.AdamW,
            offload_gradients=False,
            fused=True,
            lr=task.lr,
            betas=task.betas,
            eps=task.eps,
            weight_decay=task.weight_decay,
        )

    def step(self, batches: list[Batch]) -> torch.Tensor:
        if len(batches) > 1:
            raise Unavailable("accumulation: its copies replace one another")
        low = self.task.dtype is not torch.float32
        with torch.autocast("cuda", self.task.dtype, enabled=low):
            loss = self._model(**batches[0]).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()
