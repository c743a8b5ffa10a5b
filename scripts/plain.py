"""The same training in plain PyTorch, without a window: what the quickstart compares with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from corpus import Corpus
from deepspeed.runtime.lr_schedules import WarmupCosineLR
from pace import Turns, fit_turns
from progress import progress
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

import stronghold

CLIPPING_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


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


@contextmanager
def operators_in_one_order() -> Iterator[None]:
    """Operators add in the same order in every run, with a warning where torch has none that do.

    Attention is written out: with `warn_only` the backward of the fused kernels adds in any order.
    """
    before = torch.utils.deterministic.fill_uninitialized_memory
    # it would write beside the lanes
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


def compare_times(
    build: Callable[[], PreTrainedModel],
    config: dict[str, Any],
    data: Corpus,
    limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of a step with the window and of the fast plain loop, one torch thread each,
    and of how many blocks of how many steps. Empty when too few fit into `limit_s` seconds.

    They take turns in blocks of steps. A block with the window ends with its last update, which
    would otherwise run beside the other's steps.
    """
    begun_s = clock()
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

    def window_block(num_steps: int) -> None:
        for _ in range(num_steps):
            loss = engine(**data.batch()).loss
            engine.backward(loss)
            engine.step()
        engine.synchronize()
        loss.item()

    def plain_block(num_steps: int) -> None:
        for _ in range(num_steps):
            loss = plain.step(data.batch())
        loss.item()

    blocks = {"window": window_block, "plain": plain_block}
    try:
        # The first step of each warms up, and is the slowest: what fits by it does fit.
        pair_s = sum(_seconds(block, 1, clock) for block in blocks.values())
        turns = fit_turns(pair_s, limit_s - (clock() - begun_s))
        return {} if turns is None else alternate(blocks, turns, clock)
    finally:
        engine.destroy()
        torch.set_num_threads(threads)


def alternate(
    blocks: dict[str, Callable[[int], None]], turns: Turns, clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds of a step in each block; they take turns, so that a noisy machine is noisy for
    both."""
    taken: dict[str, list[float]] = {name: [] for name in blocks}
    with progress(turns.count, "timing a step, by turns") as bar:
        for _ in range(turns.count):
            for name, block in blocks.items():
                taken[name].append(_seconds(block, turns.block_steps, clock))
            bar.update()
    medians = {name: median(values) / turns.block_steps for name, values in taken.items()}
    return {**medians, "turns": turns.count, "steps_per_turn": turns.block_steps}


def _seconds(block: Callable[[int], None], num_steps: int, clock: Callable[[], float]) -> float:
    begun_s = clock()
    block(num_steps)
    return clock() - begun_s
