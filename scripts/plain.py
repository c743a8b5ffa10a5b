"""The same training in plain PyTorch, without a window: what the quickstart compares with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from corpus import Corpus
from deepspeed.runtime.lr_schedules import WarmupCosineLR
from tqdm import tqdm
from transformers import PreTrainedModel

import stronghold

CLIPPING_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s
TIMED_BLOCKS, STEPS_PER_BLOCK = 5, 4


class PlainLoop:
    """The same training without stronghold's window: the whole model on the device, torch alone.

    `exact` takes the engine's arithmetic, `stronghold.CPUAdam` on the host (with `states` of either
    kind) and a norm in double precision, to compare bits; otherwise it is the fast loop that
    everybody writes, fused AdamW on fp32 masters on the device.
    """

    def __init__(
        self, model: PreTrainedModel, config: dict[str, Any], exact: bool, states: str = "exact"
    ) -> None:
        self._model = model
        self._exact = exact
        self._clipping = config["gradient_clipping"]
        place = torch.device("cpu") if exact else next(model.parameters()).device
        dtype = model.dtype if exact else torch.float32
        self._pairs = [(p, self._master(p, place, dtype)) for p in model.parameters()]
        masters = [master for _, master in self._pairs]
        hyper = {
            **config["optimizer"]["params"],
            "betas": tuple(config["optimizer"]["params"]["betas"]),
        }
        adam = (
            stronghold.CPUAdam(masters, states=states, **hyper)
            if exact
            else torch.optim.AdamW(masters, fused=True, **hyper)
        )
        self._optimizer = adam
        self._schedule = WarmupCosineLR(adam, **config["scheduler"]["params"])

    @staticmethod
    def _master(
        weight: torch.nn.Parameter, place: torch.device, dtype: torch.dtype
    ) -> torch.nn.Parameter:
        if weight.device == place and weight.dtype == dtype:
            master = weight
        else:
            master = torch.nn.Parameter(weight.detach().to(place, dtype))
        master.grad_dtype = torch.float32
        return master

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """One step; returns the loss."""
        loss = self._model(**batch).loss
        loss.backward()
        for weight, master in self._pairs:
            if master is not weight:
                master.grad = weight.grad.to(master.device, torch.float32)
                weight.grad = None
        self._clip([master.grad for _, master in self._pairs])
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in self._pairs:
                if master is not weight:
                    weight.copy_(master)
        return loss.detach()

    def _clip(self, gradients: list[torch.Tensor]) -> None:
        if not self._clipping:
            return
        if not self._exact:
            torch.nn.utils.clip_grad_norm_([master for _, master in self._pairs], self._clipping)
            return
        squares = math.fsum(float(g.double().square().sum()) for g in gradients)
        coefficient = min(1.0, self._clipping / (math.sqrt(squares) + CLIPPING_EPSILON))
        for gradient in gradients:
            gradient.mul_(coefficient)


def plain_losses(
    model: PreTrainedModel, config: dict[str, Any], data: Corpus, steps: int
) -> list[float]:
    """Losses of the first steps, with the engine's arithmetic and nothing else of stronghold's."""
    loop = PlainLoop(model, config, exact=True)
    bar = tqdm(range(steps), desc="without the window", unit="step", leave=False, disable=None)
    return [loop.step(data.batch()).item() for _ in bar]


def compare_times(
    build: Callable[[], PreTrainedModel], config: dict[str, Any], data: Corpus
) -> dict[str, float]:
    """Median seconds of a step with the window and of the fast plain loop, one torch thread each.

    They take turns in blocks of steps. A block with the window ends with its last update, which
    would otherwise run beside the other's steps.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    section = {key: value for key, value in config["stronghold"].items() if key != "trace"}
    if data.device.type == "cpu":
        section["emulated"] = {**section["emulated"], "poison": False, "jitter_s": 0.0}
    model = build()
    engine, *_ = stronghold.initialize(
        model=model, model_parameters=model.parameters(), config={**config, "stronghold": section}
    )
    plain = PlainLoop(build().to(data.device), config, exact=False)

    def window_block() -> None:
        for _ in range(STEPS_PER_BLOCK):
            loss = engine(**data.batch()).loss
            engine.backward(loss)
            engine.step()
        engine.synchronize()
        loss.item()

    def plain_block() -> None:
        for _ in range(STEPS_PER_BLOCK):
            loss = plain.step(data.batch())
        loss.item()

    seconds = alternate({"window": window_block, "plain": plain_block})
    engine.destroy()
    torch.set_num_threads(threads)
    return {name: value / STEPS_PER_BLOCK for name, value in seconds.items()}


def alternate(blocks: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median seconds of each block; they take turns, so that a noisy machine is noisy for both."""
    taken: dict[str, list[float]] = {name: [] for name in blocks}
    for turn in tqdm(range(TIMED_BLOCKS + 1), desc="timing", leave=False, disable=None):
        for name, block in blocks.items():
            begun = time.perf_counter()
            block()
            if turn > 0:  # the first warms up
                taken[name].append(time.perf_counter() - begun)
    return {name: median(values) for name, values in taken.items()}
