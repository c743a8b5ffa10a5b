"""What a method is: one way of training the task's model, and the words for not being able to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from methods.model import Model, build
from methods.task import Batch, Task

NORM_PIECE = 1 << 16
CLIPPING_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


class Unavailable(Exception):
    """This method cannot run here; the message says what it needs."""


class Method(ABC):
    """Trains the task's model. Made and driven by `child`, in a process of its own.

    `activations` is what the method really does, whatever the task asks; `link_bytes` are what the
    last step moved between host and device, None where nobody counts. On CUDA torch's allocator
    refuses what passes the cap.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.activations: str = task.activations
        self.link_bytes: int | None = None
        self.num_parameters = 0
        if task.machine == "cuda":
            total = torch.cuda.get_device_properties(task.device).total_memory
            if task.gpu_memory is not None and task.gpu_memory < total:
                fraction = task.gpu_memory / total
                torch.cuda.set_per_process_memory_fraction(fraction, task.device)
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats(task.device)

    def build(self, *, recompute: bool) -> Model:
        """The task's model on the CPU, counted."""
        model = build(self.task, recompute=recompute)
        # tied ones once
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        return model

    @abstractmethod
    def step(self, batches: list[Batch]) -> torch.Tensor:
        """One optimizer step over micro-batches of equal size; the mean of their losses, which may
        still be on its way on the device."""

    def synchronize(self) -> None:  # noqa: B027 - most have nothing beside the device's queue
        """Wait until everything that `step` began is done, updates included."""

    def close(self) -> None:  # noqa: B027
        """Leave nothing behind."""

    def report(self) -> dict[str, object]:
        """What else the row should hold; called before `close`."""
        return {}

    def device_peak_bytes(self) -> int | None:
        """What torch's allocator has given out at most; None on the emulated device."""
        on_cuda = self.task.machine == "cuda"
        return torch.cuda.max_memory_allocated(self.task.device) if on_cuda else None

    def device_reserved_peak_bytes(self) -> int | None:
        """What torch's allocator has taken at most, its fragments included; None as above."""
        on_cuda = self.task.machine == "cuda"
        return torch.cuda.max_memory_reserved(self.task.device) if on_cuda else None

    def needs_policy(self, *offered: str) -> None:
        """Unavailable when the task asks for another activation policy than those offered."""
        if self.task.activations not in offered:
            raise Unavailable(
                f"--activations {self.task.activations}: not offered, use {' or '.join(offered)}"
            )


def accumulate(model: nn.Module, batches: Sequence[Batch]) -> torch.Tensor:
    """Gradients of the mean loss of micro-batches; that mean, detached."""
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def engine_step(engine: Any, batches: Sequence[Batch]) -> torch.Tensor:
    """A step of an engine of DeepSpeed's kind; the mean loss of its micro-batches, detached."""
    losses = []
    for batch in batches:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def clip(gradients: Sequence[torch.Tensor], largest: float) -> None:
    """Scale fp32 gradients in place to a global norm of `largest`, as torch.nn.utils does; 0: not
    at all.

    The norm is taken in pieces: on a CPU torch adds a whole tensor's squares in fp32, one after the
    other, and for 64 M elements its norm is 0.5 % too small. In pieces it is as fast, and right.
    """
    if largest <= 0.0 or not gradients:
        return
    if gradients[0].is_cuda:
        norms = torch.stack(torch._foreach_norm(list(gradients)))
    else:
        norms = torch.cat([norms_of_pieces(g.reshape(-1)) for g in gradients])
    coefficient = largest / (torch.linalg.vector_norm(norms.double()) + CLIPPING_EPSILON)
    torch._foreach_mul_(list(gradients), coefficient.clamp(max=1.0).float())


def norms_of_pieces(flat: torch.Tensor) -> torch.Tensor:
    """Norms of NORM_PIECE elements each, and of the rest."""
    whole = flat.numel() // NORM_PIECE * NORM_PIECE
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_PIECE), dim=1)
    return torch.cat([rows, torch.linalg.vector_norm(flat[whole:]).reshape(1)])


def end_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
