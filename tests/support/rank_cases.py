"""Trainings that give several ranks the bits of one, or nearly; every rank enters them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed import utils

from stronghold.errors import BudgetError
from tests.models import MODELS, TOYS
from tests.support.rank_models import num_ranks, rank, train
from tests.support.training import Run, assert_identical, config


def retried() -> Run:
    """The backward of one rank raises before a layer is ready, and its program begins the
    micro-batch again."""
    if num_ranks() == 1:
        return CASES["gpt"]()
    fails = [rank() == 1 and step in (0, 2) for step in range(3)]

    def backward(engine: Any, make_loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        last = [*engine.module.parameters()][-1]
        if fails.pop(0):
            hook = last.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.backward(make_loss())
            hook.remove()
        loss = make_loss()
        engine.backward(loss)
        return loss

    return train("gpt", config(clipping=0.0), backward=backward)


def states_read() -> Run:
    """Between steps masters and moments are read through DeepSpeed's functions."""

    def each_step(engine: Any, _: int) -> None:
        for parameter in engine.module.parameters():
            assert torch.equal(utils.safe_get_full_fp32_param(parameter), parameter)
            assert utils.safe_get_full_optimizer_state(parameter, "exp_avg").any()

    return train("gpt", config(clipping=0.0), each_step=each_step)


def written(precision: str) -> Run:
    """Between steps one of several ranks writes the weights in place, as one rank alone may at any
    time."""

    def each_step(engine: Any, _: int) -> None:
        place = torch.no_grad() if num_ranks() == 1 else engine.write()
        with place as writes:
            for parameter in engine.module.parameters() if writes is not False else ():
                parameter.mul_(0.9)

    settings = config(clipping=0.0, precision=precision, section={"window": 2})
    return train("gpt", settings, each_step=each_step, same=True)


def failed_and_alone() -> Run:
    """Between steps a forward fails on every rank, and an evaluation on rank 0, which evaluates
    again."""

    def fail(*_: Any) -> None:
        raise ArithmeticError

    def each_step(engine: Any, step: int) -> None:
        batch = MODELS["gpt"]()[1](1000 + step)
        hook = engine.module.blocks[0].register_forward_hook(fail)
        with pytest.raises(ArithmeticError):
            engine(**batch)
        if engine.global_rank == 0:
            engine.eval()
            with torch.no_grad():
                with pytest.raises(ArithmeticError):
                    engine(**batch)
                hook.remove()
                engine(**batch)
            engine.train()
        hook.remove()

    section = {"window": 2, "activations": "keep"}
    return train("gpt", config(clipping=0.0, section=section), each_step=each_step)


EVERYTHING = {"fp32": {"exp_avg", "exp_avg_sq"}, "bf16": {"exp_avg", "exp_avg_sq", "low"}}


def files(spill: str | None = None, **more: Any) -> dict[str, Any]:
    """A section whose state lies in files of each rank, on one path."""
    nvme = {"path": tempfile.gettempdir()} | ({"spill": spill} if spill else {})
    return {"nvme": nvme, **more}


def least_memory(name: str, settings: dict[str, Any], **more: Any) -> int:
    """What the plan needs on the host when all that can spill does, as its error says."""
    section = {**settings["stronghold"], "host_memory": 4096}
    with pytest.raises(BudgetError) as caught:
        train(name, {**settings, "stronghold": section}, **more)
    assert caught.value.need_bytes is not None
    return caught.value.need_bytes


def on_files(
    name: str,
    *,
    clipping: float,
    spill: str | None = None,
    precision: str = "fp32",
    batches_per_step: int = 2,
    in_memory: bool = False,
) -> Run:
    """Several ranks spill, everything but weights if `spill` does not say what; one, and what is
    to stay `in_memory`, does not. Layers of choosy take several pieces."""
    more: dict[str, Any] = {"steps": 4, "batches_per_step": batches_per_step}
    if name == "choosy":
        more["options"] = {"width": 96}
    settings = config(clipping=clipping, precision=precision, section={"window": 2})
    if in_memory or num_ranks() == 1:
        return train(name, settings, **more)
    spilled: set[str] = set()
    section = files(spill, window=2, emulated={"jitter_s": 3e-4})
    with pytest.MonkeyPatch.context() as patch:
        # so as few as hold a page
        patch.setattr("stronghold.plan.memory.PIECE_BYTES", 1)
        settings["stronghold"] |= section
        if spill is None:
            settings["stronghold"]["host_memory"] = least_memory(name, settings, **more)

        def note(engine: Any, _: int) -> None:
            spilled.update(*engine.plan.in_files)

        run = train(name, settings, each_step=note, **more)
    assert spilled >= ({"exp_avg", "exp_avg_sq"} if spill else EVERYTHING[precision]), spilled
    return run


# Frozen and tied parameters, blocks called twice, unused ones, experts chosen by the data.
ZOO = "gpt gpt_tied frozen unused tied_blocks called_twice experts adapters uneven"


CASES: dict[str, Callable[[], Run]] = {
    **{name: partial(train, name, config(clipping=0.0)) for name in ZOO.split()},
    "choosy": partial(train, "choosy", config(clipping=0.0), steps=5),
    "choosy, one slot": partial(
        train, "choosy", config(clipping=0.0, section={"window": 1}), steps=5
    ),
    **{
        f"{ways}, {window} slots, {activations}": partial(
            train,
            "choosy",
            config(clipping=0.0, section={"window": window, "activations": activations}),
            steps=5,
            options={"ways": ways},
        )
        for ways, window, activations in (
            ("exit", 1, "keep"),
            ("exit deep", 2, "recompute"),
            ("skips penalty", 1, "keep"),
            ("skips held", 2, "keep"),
            ("exit held", 1, "recompute"),
            ("order", 2, "keep"),
        )
    },
    **{f"no blocks, {name}": partial(train, name, config(clipping=0.0)) for name in TOYS},
    "weird sizes": partial(train, "weird_model", config(clipping=0.0)),
    "recomputed": partial(train, "gpt", config(clipping=0.0, section={"activations": "recompute"})),
    "chunks": partial(train, "gpt", config(clipping=0.0, section={"chunk": 1})),
    "chunks, recomputed": partial(
        train,
        "gpt",
        config(clipping=0.5, section={"chunk": 1, "window": 1, "activations": "recompute"}),
    ),
    "hostile": partial(
        train, "gpt", config(clipping=0.0, section={"window": 2, "emulated": {"jitter_s": 2e-3}})
    ),
    # A norm above which nothing is clipped.
    "experts, clipped at a large norm": partial(train, "experts", config(clipping=1e9)),
    # Has no effect: updates wait for the clip barrier.
    "early layers": partial(
        train,
        "choosy",
        config(clipping=0.0, section={"early_layers": 3, "emulated": {"jitter_s": 1e-3}}),
    ),
    "retried": retried,
    "failed and alone": failed_and_alone,
    "states read": states_read,
    "written": partial(written, "fp32"),
    "written, bf16": partial(written, "bf16"),
    "loss.backward()": partial(train, "choosy", config(clipping=0.0), by_user=True),
    # The ranks' ranges are cut within parameters.
    "lean": partial(
        train, "choosy", config(clipping=0.0, precision="lean"), options={"width": 384}, same=True
    ),
    # One rank alone takes the same steps in memory.
    "moments in files": lambda: on_files("experts", clipping=0.0, spill="moments"),
    "moments in files, choosy": lambda: on_files("choosy", clipping=0.0, spill="moments"),
    "all in files": lambda: on_files("choosy", clipping=1e9),
}


# With files, beside the same in memory.
FILES: dict[str, Callable[..., Run]] = {
    "held": partial(on_files, "choosy", clipping=0.5, precision="bf16"),
    "accumulated": partial(on_files, "choosy", clipping=0.5, precision="bf16", batches_per_step=4),
    "lean": partial(on_files, "choosy", clipping=0.5, precision="lean", spill="masters"),
}


CLOSE: dict[str, Callable[[], Run]] = {
    "clipped": partial(train, "gpt", config(clipping=0.1), batches_per_step=4),
    "bf16": partial(train, "gpt", config(precision="bf16"), batches_per_step=4),
}


def assert_trained_as_one(found: list[Any]) -> None:
    """One rank evaluated alone between steps; both ended with the weights of one that trained, and
    evaluated to the same bits."""
    expected = CASES["gpt"]()
    for of_rank in found:
        weights = of_rank["alone"].weights
        assert_identical(Run(losses=[], weights=weights), Run(weights=expected.weights))
    assert torch.equal(*(of_rank["alone loss"] for of_rank in found))


def planned() -> dict[str, Any]:
    """The plan for the first batch, whose layers stay on the device as the rules say."""
    plans: list[Any] = []

    def each_step(engine: Any, _: int) -> None:
        plans.append(engine.plan)

    section = {"gpu_memory": 400 << 10}
    run = train("gpt", config(clipping=0.0, section=section), steps=3, each_step=each_step)
    first, last = plans[0], plans[-1]
    return {
        "run": run,
        "stays": last is first,
        "resident": len(last.resident),
        "plan": (last.window, sorted(last.resident), sorted(last.early), last.activations),
    }
