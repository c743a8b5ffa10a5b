"""stronghold itself: the engine, as any DeepSpeed user writes it."""

from __future__ import annotations

import threading
from typing import Any

import torch

from methods.base import Method, end_process_group, engine_step
from methods.task import Batch, Task

# Of the cap on the emulated device's memory when no window is given; the rest is for activations,
# which the plan does not count there. The same share as the engine takes of free memory.
WINDOW_SHARE = 0.5


class Stronghold(Method):
    def __init__(self, task: Task) -> None:
        super().__init__(task)
        import stronghold

        model = self.build(recompute=False)
        self.engine, *_ = stronghold.initialize(
            model=model, model_parameters=model.parameters(), config=config(task)
        )
        self._count_transfers()

    def step(self, batches: list[Batch]) -> torch.Tensor:
        self._moved = {"fetch": 0, "offload": 0}
        loss = engine_step(self.engine, batches)
        self.link_bytes = sum(self._moved.values())
        return loss

    def synchronize(self) -> None:
        self.engine.synchronize()

    def report(self) -> dict[str, object]:
        plan, memory = self.engine.plan, self.engine.memory_report()
        return {
            "window": plan.window,
            "plan": str(plan),
            "inspection": str(self.engine.inspect()),
            "host_planned_bytes": memory.host_planned,
            "device_planned_bytes": memory.gpu_planned,
        }

    def close(self) -> None:
        self.engine.destroy()
        end_process_group()

    def _count_transfers(self) -> None:
        """Sum the bytes of every copy by the lane that makes it."""
        device = self.engine.inspect().device
        copy, self._moved = device.copy, {"fetch": 0, "offload": 0}

        def counted(target: torch.Tensor, source: torch.Tensor) -> None:
            lane = threading.current_thread().name.rpartition(":")[2]
            self._moved[lane] = self._moved.get(lane, 0) + source.nbytes
            copy(target, source)

        device.copy = counted


class Compiled(Stronghold):
    """With torch.compile around each block: faster operators, other bits."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.engine.compile(compile_kwargs={"dynamic": False})


def config(task: Task) -> dict[str, Any]:
    """The DeepSpeed JSON of a task, with our section."""
    section: dict[str, Any] = {
        "device": task.machine,
        "activations": task.activations,
        "window": task.window,
        "host_memory": task.host_memory,
        "cpu_threads": task.threads,
        "trace": task.trace,
        "batch_tokens": task.batch * task.seq,  # every batch has so many: room for more is lost
    }
    if task.machine == "emulated":
        section["emulated"] = {"poison": False, "link_gbps": task.link_gbps}
        # On a GPU the engine reads the cap from torch's allocator, and plans within all of it.
        if task.gpu_memory is not None and task.window is None:
            section["gpu_memory"] = int(task.gpu_memory * WINDOW_SHARE)
    return {**deepspeed_config(task), "stronghold": section | task.section}


def deepspeed_config(task: Task) -> dict[str, Any]:
    """What all engines with DeepSpeed's interface are told."""
    parts = 2 if task.halves else 1
    return {
        "train_micro_batch_size_per_gpu": task.batch // parts,
        "gradient_accumulation_steps": task.accumulation * parts,
        "gradient_clipping": task.clipping,
        "steps_per_print": 10**9,
        "bf16": {"enabled": task.precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": task.adam},
    }
