"""`stronghold test`: trains a small model with the window and in a plain loop, and compares them.

Owns the model, both loops and the sentence of each check. It downloads and writes nothing, and it
prints nothing: the command does. The calling thread trains; lanes end before `run` returns.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from stronghold.devices import cuda
from stronghold.devices.cuda import CudaDevice
from stronghold.engine.dispatch import initialize
from stronghold.limits import host_limits
from stronghold.optim.cpu_adam import CPUAdam
from stronghold.tools import Answer
from stronghold.train.job import MemoryReport
from stronghold.train.rates import START_S, link_rates

MIB = 1 << 20
WIDTH, HIDDEN, NUM_BLOCKS, BATCH_SIZE, NUM_STEPS = 256, 1024, 8, 32, 8
BUDGET_BYTES = 6 * MIB  # less than the 8 MiB of weights
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

Tensors = dict[str, torch.Tensor]  # a loss or a weight by its name, on the CPU
Progress = Callable[[str], None]


class Check(NamedTuple):
    """The result of one check. `text` is a sentence for the user."""

    name: str
    passed: bool
    text: str

    def __str__(self) -> str:
        return f"{self.name + ':':<8}{'ok' if self.passed else 'FAILED'}, {self.text}"


class SmallModel(nn.Module):
    """Residual blocks in a ModuleList. It returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
            )
            for _ in range(NUM_BLOCKS)
        )

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return (hidden - target).float().square().mean()


def command(_: argparse.Namespace, progress: Progress) -> Answer:
    """Run the checks for the command. The status is 1 if one fails."""
    checks = run(progress)
    advice = "To report a problem, send this output and that of: stronghold version"
    text = "\n".join([*map(str, checks), advice])
    return Answer(text=text, status=0 if all(check.passed for check in checks) else 1)


def run(progress: Progress) -> list[Check]:
    """Run the checks of bits, memory and the link, in this order.

    `progress` gets the name of each check that begins.
    """
    # Without this variable cuBLAS may add in another order in each run. CUDA reads it at its start.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device("cuda", 0) if cuda.available() else torch.device("cpu")
    deterministic: Any = torch.utils.deterministic
    before = deterministic.fill_uninitialized_memory
    mode = torch.get_deterministic_debug_mode()
    # its writes would race with the lanes
    deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        progress("training in a plain PyTorch loop")
        plain = _train_plain(device)
        progress("training with the window")
        windowed, report = _train_windowed(device)
    finally:
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = before
    progress("measuring the link")
    return [compare(windowed, plain, device), check_memory(report), _check_link(device)]


def compare(windowed: Tensors, plain: Tensors, device: torch.device) -> Check:
    """Check that every loss and every weight has the same bits in both trainings."""
    where = "the GPU" if device.type == "cuda" else "the emulated device"
    different = [name for name in plain if not torch.equal(windowed[name], plain[name])]
    if different:
        text = f"{len(different)} of {len(plain)} losses and weights differ on {where}"
        return Check("bits", False, f"{text}, the first is {different[0]}")
    text = f"{NUM_STEPS} losses and all weights equal those of a plain loop on {where}"
    return Check("bits", True, text)


def check_memory(report: MemoryReport) -> Check:
    """Check that the peak bytes of both tiers are those of the plan, and within the budget."""
    tiers = (
        ("GPU", report.gpu_peak, report.gpu_planned),
        ("host", report.host_peak, report.host_planned),
    )
    passed = report.gpu_peak <= BUDGET_BYTES and all(peak == plan for _, peak, plan in tiers)
    parts = [f"{name} {peak / MIB:.2f} of {plan / MIB:.2f} MiB" for name, peak, plan in tiers]
    return Check("memory", passed, f"peak of planned: {', '.join(parts)}")


def _check_link(device: torch.device) -> Check:
    if device.type != "cuda":
        return Check("link", True, "none to measure: there is no GPU")
    opened = CudaDevice()
    try:
        rates, pin_error = link_rates(opened, host_limits(), START_S, lambda _: None)
    finally:
        opened.close()
    text = f"{rates['fetch_gbps']:.1f} GB/s to the GPU, {rates['offload_gbps']:.1f} GB/s back"
    return Check("link", not pin_error, f"{text} {pin_error}".rstrip())


def _model() -> SmallModel:
    torch.manual_seed(0)
    return SmallModel().to(torch.bfloat16)


def _batches(device: torch.device) -> Iterator[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        pair = torch.randn(2, BATCH_SIZE, WIDTH, generator=generator).to(torch.bfloat16)
        yield tuple(pair.to(device))


def _train_plain(device: torch.device) -> Tensors:
    """Train with the whole model on `device`. CPUAdam updates copies on the host."""
    model, losses = _model().to(device), []
    weights = list(model.parameters())
    masters = [nn.Parameter(weight.detach().to("cpu", copy=True)) for weight in weights]
    optimizer = CPUAdam(masters, **ADAM)
    for batch in _batches(device):
        loss = model(*batch)
        loss.backward()
        for weight, master in zip(weights, masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.cpu(), None
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.data.copy_(master)
        losses.append(loss.detach())
    return _tensors(losses, model)


def _train_windowed(device: torch.device) -> tuple[Tensors, MemoryReport]:
    """Train through the engine, with a budget that is smaller than the weights."""
    kind = "cuda" if device.type == "cuda" else "emulated"
    config = {
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "gradient_clipping": 0.0,  # DeepSpeed clips at 1.0 where the key is absent
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAM},
        "stronghold": {"gpu_memory": BUDGET_BYTES, "device": kind},
    }
    model, losses = _model(), []
    engine, *_ = initialize(model=model, config=config, model_parameters=model.parameters())
    try:
        for batch in _batches(device):
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        report = engine.memory_report()
    finally:
        engine.destroy()
    return _tensors(losses, model), report


def _tensors(losses: list[torch.Tensor], model: SmallModel) -> Tensors:
    tensors = {f"loss {step}": loss.cpu() for step, loss in enumerate(losses, 1)}
    for name, weight in model.state_dict().items():
        tensors[name] = weight.cpu()
    return tensors
