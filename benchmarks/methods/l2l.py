"""L2L, layer to layer: one block at a time on the device, its optimizer there too.

After Pudipeddi et al. 2020 (arXiv 2002.05645). Everything of the blocks rests in host memory; a
block's weights come to the device once per pass, and all micro-batches of the step run through it
before the next block comes. Only the blocks' inputs are kept, so backward computes each block
again. When the global norm is known, the state of one block after the other is brought to the
device, updated there by torch's fused AdamW, and taken back. Nothing overlaps: that is the method.
Embedding, final norm and head stay on the device.
"""

from __future__ import annotations

import torch
from torch import nn

from methods.base import CLIPPING_EPSILON, Method
from methods.plain import Masters
from methods.task import Batch, Task

STATE = ("master", "exp_avg", "exp_avg_sq")


class LayerStore:
    """One block's state in host memory, pinned on CUDA: bf16 or fp32 weights, fp32 gradient, master
    and moments, flat. In fp32 the weights are the master."""

    def __init__(self, block: nn.Module, task: Task) -> None:
        pinned = task.machine == "cuda"
        weights = [parameter.detach().flatten() for parameter in block.parameters()]
        numel = sum(weight.numel() for weight in weights)

        def room(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(numel, dtype=dtype, pin_memory=pinned)

        self.weights = room(task.dtype)
        torch.cat(weights, out=self.weights)
        self.master = self.weights if task.dtype is torch.float32 else room(torch.float32)
        self.master.copy_(self.weights)
        self.exp_avg, self.exp_avg_sq = room(torch.float32), room(torch.float32)
        self.gradient = room(torch.float32)


class L2L(Method):
    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.activations = "recompute"
        model = self.build(recompute=False)
        block, self._stores = model.blocks[0], []
        for index in range(len(model.blocks)):
            self._stores.append(LayerStore(model.blocks[index], task))
            # its weights are freed before the next are copied
            model.blocks[index] = nn.Identity()
        model.blocks = nn.ModuleList()
        self._model = model.to(task.device)
        self._block = block.to(task.device)  # every layer takes its turn in this one
        self._outside = Masters(list(model.parameters()), task)
        self._taken = 0
        self._num_updates = 0

    def step(self, batches: list[Batch]) -> torch.Tensor:
        self._taken = 0
        embedded = [self._model.embed(batch["input_ids"]) for batch in batches]
        inputs, outputs = self._forward(embedded)
        losses = []
        for x, batch in zip(outputs, batches, strict=True):
            loss = self._model.loss(x.requires_grad_(), batch["labels"])
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        upstream = [x.grad for x in outputs]
        squares = self._backward(inputs, upstream)
        for x, gradient in zip(embedded, upstream, strict=True):
            x.backward(gradient)
        self._update(squares)
        self.link_bytes = self._taken
        return torch.stack(losses).mean()

    def _forward(
        self, embedded: list[torch.Tensor]
    ) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
        """Inputs of every block, and outputs of the last."""
        current, inputs = [x.detach() for x in embedded], []
        with torch.no_grad():
            for store in self._stores:
                self._load(store)
                inputs.append(current)
                current = [self._block(x) for x in current]
        return inputs, current

    def _backward(
        self, inputs: list[list[torch.Tensor]], upstream: list[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Gradients of all layers to the host; sums of their squares. `upstream` is what comes from
        above, then what the first block hands down."""
        squares = []
        for store, layer_inputs in zip(reversed(self._stores), reversed(inputs), strict=True):
            self._load(store)
            sums: torch.Tensor | None = None
            for index, x in enumerate(layer_inputs):
                x.requires_grad_()
                self._block(x).backward(upstream[index])
                upstream[index], x.grad = x.grad, None
                gradient = torch.cat([p.grad.float().flatten() for p in self._block.parameters()])
                self._block.zero_grad()
                sums = gradient if sums is None else sums.add_(gradient)
            assert sums is not None
            squares.append(sums.square().sum())
            self._move(store.gradient, sums)
            layer_inputs.clear()
        return squares

    def _update(self, squares: list[torch.Tensor]) -> None:
        """The part outside of the blocks, then one block after the other."""
        outside = [m.grad for m in self._outside.masters if m.grad is not None]
        norm = torch.stack([*squares, *(g.square().sum() for g in outside)]).sum().sqrt()
        scale = torch.ones_like(norm)
        if self.task.clipping > 0.0:
            scale = (self.task.clipping / (norm + CLIPPING_EPSILON)).clamp(max=1.0)
        torch._foreach_mul_(outside, scale)
        self._outside.update()
        self._num_updates += 1
        for store in self._stores:
            self._update_layer(store, scale)

    def _update_layer(self, store: LayerStore, scale: torch.Tensor) -> None:
        """AdamW on the device, torch's fused one."""
        there = [self._bring(getattr(store, name)) for name in (*STATE, "gradient")]
        master, exp_avg, exp_avg_sq, gradient = there
        gradient.mul_(scale)
        master.grad = gradient
        optimizer = torch.optim.AdamW([master], fused=True, **self.task.adam)
        step = torch.tensor(float(self._num_updates - 1), device=self.task.device)
        optimizer.state[master] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        optimizer.step()
        for name, tensor in zip(STATE, there, strict=False):
            self._move(getattr(store, name), tensor)
        if store.master is not store.weights:
            self._move(store.weights, master.to(store.weights.dtype))

    def _load(self, store: LayerStore) -> None:
        """The one block on the device becomes this layer."""
        flat = self._bring(store.weights)
        offset = 0
        for parameter in self._block.parameters():
            parameter.data = flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        self._taken += tensor.nbytes
        return torch.empty_like(tensor, device=self.task.device, pin_memory=False).copy_(
            tensor, non_blocking=True
        )

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._taken += source.nbytes
        target.copy_(source)
