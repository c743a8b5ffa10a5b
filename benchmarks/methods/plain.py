"""Plain PyTorch: the whole model on the device, fused AdamW on fp32 masters. The reference.

What Megatron-LM does on one GPU: bf16 weights, fp32 gradients, masters and moments, 18 bytes per
parameter; 16 in fp32. Gradients of micro-batches are added in fp32, clipping is by the global norm.
"""

from __future__ import annotations

import torch
from torch import nn

from methods.base import Method, accumulate, clip
from methods.task import Batch, Task


class Masters:
    """fp32 masters of parameters that are on the device, with fp32 gradients; the parameter itself
    where it is fp32.

    `step` clips, updates with torch's fused AdamW and refreshes the weights.
    """

    def __init__(self, parameters: list[nn.Parameter], task: Task) -> None:
        self._clipping = task.clipping
        self._pairs = [(weight, self._master(weight)) for weight in parameters]
        self.masters = [master for _, master in self._pairs]
        self._optimizer = torch.optim.AdamW(self.masters, fused=True, **task.adam)

    def _master(self, weight: nn.Parameter) -> nn.Parameter:
        if weight.dtype is torch.float32:
            return weight
        master = nn.Parameter(weight.detach().float())

        def take(ready: torch.Tensor) -> None:
            assert ready.grad is not None
            if master.grad is None:
                master.grad = ready.grad.float()
            else:
                master.grad.add_(ready.grad)
            ready.grad = None

        weight.register_post_accumulate_grad_hook(take)
        return master

    def clip(self) -> None:
        """By the global norm of all masters' gradients."""
        clip([m.grad for m in self.masters if m.grad is not None], self._clipping)

    def update(self) -> None:
        """AdamW, then the weights; gradients are dropped."""
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in self._pairs:
                if master is not weight:
                    weight.copy_(master)


class Plain(Method):
    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.needs_policy("keep", "recompute")
        self.link_bytes = 0
        self._model = self.build(recompute=task.recomputes).to(task.device)
        self._masters = Masters(list(self._model.parameters()), task)

    def step(self, batches: list[Batch]) -> torch.Tensor:
        loss = accumulate(self._model, batches)
        self._masters.clip()
        self._masters.update()
        return loss
