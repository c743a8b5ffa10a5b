"""What one looks at in an engine that is one of several ranks; every rank enters it."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import utils
from torch import nn

from stronghold.errors import BudgetError, ConfigError, RankError
from stronghold.telemetry.trace import file_of_rank, read
from tests.conftest import lane_threads
from tests.models import MODELS, loss_of
from tests.support.rank_cases import files
from tests.support.rank_models import Wide, engine_of, full, rank, train
from tests.support.sleeping import SleepingModel
from tests.support.training import config


def memory(*, clipping: float, **section: Any) -> dict[str, Any]:
    section |= {"layers": "blocks"}
    settings = config(clipping=clipping, precision="bf16", section=section)
    engine = engine_of(Wide(), settings)
    try:
        engine.backward(engine(torch.ones(2, 512, dtype=torch.bfloat16)).float().mean())
        engine.step()
        engine.synchronize()
        now, report = engine.inspect(), engine.memory_report()
        padded_numel = sum(layer.trained_numel for layer in now.layout.layers)
        torch.distributed.barrier()
        found = {
            "host_peak": report.host_peak,
            "host_planned": report.host_planned,
            "gpu_peak": report.gpu_peak,
            "gpu_planned": report.gpu_planned,
            "padded_numel": padded_numel,
            "plan": str(now.plan),
            "nvme_peak": report.nvme_peak,
            "nvme_planned": report.nvme_planned,
            "staging": now.plan.staging.nbytes,
            "traffic": (now.plan.traffic.nvme_read_bytes, now.plan.traffic.nvme_written_bytes),
            "moved": (now.traffic.read_bytes, now.traffic.written_bytes),
            "weights_bytes": padded_numel * 2,
            "weights_pss": _pss("stronghold weights"),
        }
        torch.distributed.barrier()
        return found
    finally:
        engine.destroy()


def _pss(name: str) -> int:
    """Bytes of the mappings whose file has this name, shared pages counted in parts."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = name in line
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def alone() -> dict[str, Any]:
    """Rank 0 evaluates and reads weights between all steps; the other does after the last."""
    _, make_batch = MODELS["gpt"]()
    loss = torch.zeros(())

    def each_step(engine: Any, step: int) -> None:
        nonlocal loss
        if rank() == 0 or step == 2:
            engine.eval()
            with torch.no_grad():
                for seed in range(step + 2):
                    loss = loss_of(engine.module(**make_batch(1000 + seed)))
            given = {name: tensor.clone() for name, tensor in engine.named_weights()}
            state = engine.module.state_dict()
            assert given.keys() == state.keys()
            for name, tensor in given.items():
                assert torch.equal(tensor, state[name]), name
            engine.train()

    return {"alone": train("gpt", config(clipping=0.0), each_step=each_step), "alone loss": loss}


def halved() -> dict[str, Any]:
    """Weights are loaded that were made of those that are there, by one rank later than by the
    other; and written in place, which memory that both have would take twice."""
    model, make_batch = MODELS["gpt"]()
    expected = {name: value * 0.5 for name, value in model.state_dict().items()}
    engine = engine_of(model, config(clipping=0.0, section={"resident_layers": 1}))
    found: dict[str, Any] = {"refused": []}
    try:
        values = engine.module.state_dict()
        time.sleep(0.2 * rank())
        model.load_state_dict({name: value * 0.5 for name, value in values.items()})
        found["equal"] = [torch.equal(values[name], expected[name]) for name in expected]
        for used in range(2):  # before what stays on the device is there, and after
            if used:
                model.load_state_dict(expected)
                engine.backward(loss_of(engine(**make_batch(rank()))))
                engine.step()
            for name, parameter in model.named_parameters():
                torch.distributed.barrier()
                parameter.data.mul_(1.0)
                try:
                    with torch.no_grad():
                        engine(**make_batch(0))
                except ConfigError as error:
                    found["refused"].append("engine.write()" in str(error))
                else:
                    found["refused"].append(name)
    finally:
        engine.destroy()
    return found


def surface() -> dict[str, Any]:
    model, _ = MODELS["gpt"]()
    args = argparse.Namespace(local_rank=-1)  # what torchrun leaves of the argument
    settings = config(accumulation=3)
    engine = engine_of(model, settings, args=args, training_data=list(range(8)))
    try:
        return {
            "local_rank": engine.local_rank,
            "global_rank": engine.global_rank,
            "world_size": engine.world_size,
            "dp_world_size": engine.dp_world_size,
            "train_batch_size": engine.train_batch_size(),
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            "samples": torch.cat(list(engine.training_dataloader)).tolist(),
        }
    finally:
        engine.destroy()


def gradients(precision: str) -> dict[str, Any]:
    """Read through DeepSpeed's functions, after a backward, and after another one that is like it:
    its gradients are late."""
    model, make_batch = MODELS["gpt"]()
    engine = engine_of(model, config(precision=precision))
    try:
        engine.backward(loss_of(engine(**make_batch(rank()))))
        read = [utils.safe_get_full_grad(p) for p in model.parameters()]
        engine.backward(loss_of(engine(**make_batch(rank()))))
        twice = [utils.safe_get_full_grad(p) for p in model.parameters()]
        engine.step()
        return {"read": read, "twice": twice, "norm": engine.get_global_grad_norm()}
    finally:
        engine.destroy()


def accumulated() -> tuple[dict[str, int], int]:
    """Bytes that two steps of three micro-batches give to collectives, and those of all
    gradients."""
    model, make_batch = MODELS["gpt"]()
    engine = engine_of(model, config(clipping=0.0, accumulation=3))
    try:
        for micro in range(6):
            engine.backward(loss_of(engine(**make_batch(2 * micro + rank()))))
            engine.step()
        engine.synchronize()  # what a rank sends to another owner may still be under way
        now = engine.inspect()
        once = 4 * sum(layer.trained_numel for layer in now.layout.layers)
        return dict(now.ranks.sent_bytes), once
    finally:
        engine.destroy()


def overflow() -> dict[str, Any]:
    """fp16: one rank's loss is NaN."""
    model, make_batch = MODELS["gpt"]()
    engine = engine_of(model, {**config(precision="fp16"), "zero_optimization": {"stage": 0}})
    try:
        before = {k: v.clone() for k, v in engine.module_state_dict().items()}
        loss = loss_of(engine(**make_batch(rank())))
        engine.backward(loss * (float("nan") if rank() == 1 else 1.0))
        engine.step()
        after = engine.module_state_dict()
        return {
            "skipped": engine.skipped_steps,
            "norm": engine.get_global_grad_norm(),
            "scale": engine.optimizer.loss_scale,
            "unchanged": all(torch.equal(after[k], v) for k, v in before.items()),
        }
    finally:
        engine.destroy()


def refused() -> dict[str, str]:
    """What several ranks refuse before they run, and why."""
    cases: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "gpu": (Wide(8, 2), {"resident_updates": "gpu"}),
        "nvme": (Wide(8, 2), files("weights")),
        "model": (Wide(8 + rank(), 2), {}),
        "disk": (Wide(8, 2), files("masters")),
    }
    found = {}
    for name, (model, section) in cases.items():
        with pytest.MonkeyPatch.context() as patch:
            if name == "disk" and rank() == 1:  # rank 0 has looked at the disk for both
                patch.setattr("os.posix_fallocate", full)
            try:
                engine_of(model, config(section={"layers": "blocks", **section})).destroy()
            except (BudgetError, ConfigError, RankError) as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def life() -> dict[str, Any]:
    """What is left after engines that ended, and after one that could not be made."""
    refused()
    wide = Wide(16, 2)
    engine = engine_of(wide, config(section={"layers": "blocks"}))
    groups = [weakref.ref(group) for group in engine._ranks._groups]
    engine.destroy()
    torch.distributed.barrier()
    if rank() == 0:
        with torch.no_grad():
            for parameter in wide.parameters():
                parameter.fill_(7.0)
    torch.distributed.barrier()
    found = {
        "sevens": all(bool((p == 7.0).all()) for p in wide.parameters()),
        "threads": lane_threads(),
        "groups": [group() for group in groups if group() is not None],
        "files": [name for name in os.listdir("/dev/shm") if "stronghold" in name],
    }
    torch.distributed.barrier()
    return found


def traces(folder: Path) -> dict[str, set[int]]:
    """The ranks of which every trace has rows, by the file's name, of a config that names one."""
    model, make_batch = MODELS["gpt"]()
    section = {"trace": str(folder / "traces" / "trace.json")}
    engine = engine_of(model, config(section=section))
    engine.backward(loss_of(engine(**make_batch(rank()))))
    engine.step()
    engine.destroy()
    torch.distributed.barrier()
    found = {}
    for file in (folder / "traces").iterdir():
        events = json.loads(file.read_text())["traceEvents"]
        found[file.name] = {event["pid"] for event in events}
    return found


def overlap(folder: Path) -> dict[str, float]:
    """Seconds of a step, and of what each lane was busy with in it."""
    trace, num_layers, steps = folder / "trace.json", 12, 6
    model = SleepingModel([(1 << 18, 0.02, 0.04)] * num_layers)  # 1 MiB in fp32 each
    # 10 ms for half a layer
    paces = {"poison": False, "link_gbps": 0.05, "wire_gbps": 0.05}
    section = {"trace": str(trace), "window": 4, "cpu_threads": 1, "emulated": paces}
    engine = engine_of(model, config(section=section))
    stamps = []
    for _ in range(steps):
        stamps.append(time.perf_counter())
        engine.backward(engine(torch.ones(1024)))
        engine.step()
    stamps.append(time.perf_counter())
    engine.destroy()
    lanes = ("compute", "fetch", "reduce", "offload", "update")
    spans = read(file_of_rank(trace, rank()))
    busy = {
        lane: sum(span.duration_s for span in spans if span.lane == lane) / steps for lane in lanes
    }
    pairs = itertools.pairwise(stamps)
    return busy | {"step": statistics.median(end - begin for begin, end in pairs)}
