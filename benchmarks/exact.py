"""The first steps of a model of real size have the bits of plain torch.

    python benchmarks/exact.py --family llama --layers 28 --hidden 3072 --gpu-memory 24GB ...

The plain loop holds the whole model on the device, in the task's dtype, with torch's checkpoint
around each block. Its gradients are copied to the host, clipped by their global norm, and applied
by the same CPU kernel over each whole tensor. Operators add in one order in both runs. Prints both
runs and the first difference. Ends with status 1 if there is one.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from compare import add_task_arguments, task_of, title
from harness import provenance, write
from methods.model import build
from methods.ours import Stronghold
from methods.task import Data, Task

import tests.conftest  # noqa: F401 - the environment of one rank, and cuBLAS in one order
from stronghold import native
from tests.support.training import KernelOptimizer, Run, assert_identical, flash_in_one_order


def steps_of_plain_torch(task: Task) -> Run:
    """Losses, norms, and the weights at the end, on the host."""
    model = build(task, recompute=True).to(task.device)
    names = {parameter: name for name, parameter in model.named_parameters()}
    mirrors = {p: torch.nn.Parameter(p.detach().cpu().clone()) for p in names}
    groups = torch.optim.AdamW(list(mirrors.values()), **task.adam)
    optimizer = KernelOptimizer(groups, num_threads=native.available_cores())
    data, run = Data(task), Run()
    for step in range(task.steps):
        loss = model(**data.step(step)[0]).loss
        loss.backward()
        run.losses.append(loss.detach().cpu())
        gradients = {mirrors[p]: p.grad.cpu() for p in names if p.grad is not None}
        model.zero_grad(set_to_none=True)
        run.norms.append(optimizer.step(gradients, task.clipping))
        with torch.no_grad():
            for parameter, mirror in mirrors.items():
                parameter.copy_(mirror)
    run.weights = {name: mirrors[p].detach() for p, name in names.items()}
    return run


def steps_of_ours(task: Task) -> tuple[Run, dict[str, Any]]:
    """The same through the engine, and what it reports of its plan."""
    method, run = Stronghold(task), Run()
    engine, data = method.engine, Data(task)
    for step in range(task.steps):
        run.losses.append(method.step(data.step(step)).cpu())
        run.norms.append(engine.get_global_grad_norm())
    run.weights = {name: value.cpu() for name, value in engine.module_state_dict().items()}
    report = {**method.report(), "device_peak_bytes": method.device_peak_bytes()}
    return run, report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_task_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    arguments = parser.parse_args()
    task = replace(task_of(arguments), warmup=0)
    begun = time.perf_counter()
    with flash_in_one_order():
        expected = steps_of_plain_torch(replace(task, gpu_memory=None))
        plain_s = time.perf_counter() - begun
        gc.collect()
        if task.machine == "cuda":
            torch.cuda.empty_cache()
        run, report = steps_of_ours(task)
    found: dict[str, Any] = {
        "task": title(task),
        "losses": [loss.item() for loss in run.losses],
        "losses of plain torch": [loss.item() for loss in expected.losses],
        "norms": run.norms,
        "norms of plain torch": expected.norms,
        "parameters": sum(weight.numel() for weight in run.weights.values()),
        "seconds": {"plain torch": plain_s, "both": time.perf_counter() - begun},
        **report,
    }
    try:
        assert_identical(run, expected)
        assert run.norms == expected.norms, "norms differ"
        found["equal"] = True
    except AssertionError as error:
        found |= {"equal": False, "first difference": str(error)}
    for key, value in found.items():
        print(f"{key}: {value}")
    if arguments.json is not None:
        write(arguments.json, {**provenance(), **found})
    return 0 if found["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
