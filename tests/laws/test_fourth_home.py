"""Laws of homes: one that the package does not know keeps every bit, with a class for its store and
an entry in one table."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.memory.stores import Extent
from stronghold.model.layout import ModelLayout
from stronghold.plan.cost import Demand
from stronghold.plan.homes import FILE, Homes
from stronghold.plan.plan import Plan, make_plan
from stronghold.streaming import stack
from tests.models import MODELS, loss_of
from tests.support.compressed import COMPRESSED, CompressedStore
from tests.support.pairs import pairs
from tests.support.training import (
    Run,
    assert_identical,
    config,
    initialized,
    moments_of,
    train_plain,
    train_windowed,
)

STEPS = 3
SMALLEST_PIECE = 2048 * 24  # a page of each array: every layer takes several pieces

Chosen = Callable[[int, str], bool]
"""Of the arrays in files: whether this one of this layer is compressed instead."""

# By name: what spills, and which of it is compressed. Weights stay in files, whose pages parameters
# show at rest.
HOMES: dict[str, tuple[str, Chosen]] = {
    "moments": ("moments", lambda layer, array: True),
    "masters": ("masters", lambda layer, array: True),
    "all but weights": ("weights", lambda layer, array: array != "weights"),
    "mixed": ("weights", lambda layer, array: array in ("exp_avg", "accumulated", "low")),
    "every other layer": ("weights", lambda layer, array: array != "weights" and layer % 2 == 0),
}
UPDATES: dict[str, tuple[float, dict[str, Any]]] = {  # where in the step
    "gate": (0.5, {}),
    "no norm": (0.0, {}),
}


def compressed(homes: Homes, chosen: Chosen) -> Homes:
    rows = enumerate(homes.rows)
    which = {(layer, array) for layer, row in rows for array, _ in row if chosen(layer, array)}
    return homes.replaced(FILE, COMPRESSED, which)


def compress(monkeypatch: pytest.MonkeyPatch, chosen: Chosen) -> None:
    """From now on an engine's plan has a fourth home."""

    def with_a_fourth(layout: ModelLayout, demand: Demand) -> Plan:
        homes = make_plan(layout, demand).homes
        return make_plan(layout, replace(demand, homes=compressed(homes, chosen)))

    monkeypatch.setattr(stack, "make_plan", with_a_fourth)
    monkeypatch.setitem(stack.STORES, COMPRESSED, CompressedStore)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stronghold.plan.host_memory.PIECE_BYTES", SMALLEST_PIECE)


def section_of(path: Path, spill: str, more: dict[str, Any]) -> dict[str, Any]:
    nvme = {"path": str(path), "spill": spill}
    return {"window": 2, "nvme": nvme, "emulated": {"jitter_s": 0.0002, "seed": 1}, **more}


@functools.cache
def plain(name: str, clipping: float, accumulation: int, precision: str, steps: int) -> Run:
    return train_plain(
        MODELS[name], steps=steps, clipping=clipping, accumulation=accumulation, precision=precision
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "where", "update", "accumulation", "precision"),
    pairs(
        ["gpt", "frozen", "weird_model", "llama"],
        list(HOMES),
        list(UPDATES),
        [1, 3],
        ["fp32", "bf16", "fp16", "lean"],
    ),
)
def test_a_fourth_home_never_changes_a_bit(
    name: str,
    where: str,
    update: str,
    accumulation: int,
    precision: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Losses, norms, weights, and the moments after every step."""
    spill, chosen = HOMES[where]
    compress(monkeypatch, chosen)
    clipping, more = UPDATES[update]
    moments: list[dict[str, tuple[torch.Tensor, ...]]] = []

    def between(engine: Any, micro: int) -> None:
        if (micro + 1) % accumulation == 0:
            moments.append(moments_of(engine))

    def inspect(engine: Any) -> None:
        check_homes(engine, chosen, tmp_path)

    options = {"clipping": clipping, "accumulation": accumulation, "precision": precision}
    run = train_windowed(
        MODELS[name],
        steps=STEPS,
        settings=config(section=section_of(tmp_path, spill, more), **options),
        after=between,
        inspect=inspect,
    )
    expected = plain(name, clipping, accumulation, precision, STEPS)
    assert_identical(run, expected)
    assert run.norms == expected.norms
    for step in range(STEPS):
        there = plain(name, clipping, accumulation, precision, step + 1).moments
        for parameter, arrays in there.items():
            for found, array in zip(moments[step][parameter], arrays, strict=True):
                assert torch.equal(found, array), (step, parameter)


def check_homes(engine: Any, chosen: Chosen, path: Path) -> None:
    """Arrays lie where the plan says, no memory has a copy, and transfers passed the store."""
    now = engine.inspect()
    homes, num_compressed = engine.plan.homes, 0
    for layer in now.layers:
        for array in layer.writers:
            home = homes[layer.index, array]
            assert layer.homes.get(array) == (home if home.is_staged else None)
            if home == COMPRESSED:
                assert chosen(layer.index, array)
                assert array not in layer.arrays
                num_compressed += 1
    assert num_compressed > 0
    report = engine.memory_report()
    assert report.host_peak <= report.host_planned
    assert report.nvme_peak == report.nvme_planned > 0
    assert now.traffic.read_bytes > 0
    assert now.traffic.written_bytes > 0
    has_files = FILE in homes.staged_homes
    assert bool(now.files.file_bytes) == has_files


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("first", "then"), [("mixed", "mixed"), ("masters", None), (None, "mixed")]
)
@pytest.mark.parametrize("precision", ["bf16", "lean"])
def test_a_run_resumes_in_a_fourth_home_and_from_one(
    first: str | None,
    then: str | None,
    precision: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None: everything lies in host memory."""
    run = Run()
    torch.manual_seed(1)
    for steps, where in ((range(1), first), (range(1, STEPS), then)):
        section: dict[str, Any] = {"window": 2}
        with monkeypatch.context() as patch:
            if where is not None:
                spill, chosen = HOMES[where]
                compress(patch, chosen)
                section = section_of(tmp_path, spill, {})
            model, make_batch = MODELS["gpt"](seed=steps.start)
            settings = config(clipping=0.5, precision=precision, section=section)
            engine = initialized(model, settings)
            if steps.start:
                engine.load_checkpoint(tmp_path / "saved")
            for step in steps:
                loss = loss_of(engine(**make_batch(step)))
                engine.backward(loss)
                engine.step()
                run.losses.append(loss.detach().clone())
            assert (COMPRESSED in engine.plan.homes.staged_homes) == (where is not None)
            engine.save_checkpoint(tmp_path / "saved")
            run.weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
            run.moments = moments_of(engine)
            engine.destroy()
    assert_identical(run, plain("gpt", 0.5, 1, precision, STEPS))


class Forgetful(CompressedStore):
    """The second write of a page is lost."""

    def write(self, extent: Extent, begin: int, data: memoryview) -> None:
        if (extent.layer, extent.array, begin) not in self.pages:
            super().write(extent, begin, data)


def test_the_laws_see_a_store_that_loses_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill, chosen = HOMES["masters"]
    compress(monkeypatch, chosen)
    settings = config(clipping=0.5, precision="bf16", section=section_of(tmp_path, spill, {}))
    expected = plain("gpt", 0.5, 1, "bf16", STEPS)
    assert_identical(train_windowed(MODELS["gpt"], steps=STEPS, settings=settings), expected)
    monkeypatch.setitem(stack.STORES, COMPRESSED, Forgetful)
    run = train_windowed(MODELS["gpt"], steps=STEPS, settings=settings)
    with pytest.raises(AssertionError, match="differs"):
        assert_identical(replace(run, losses=expected.losses), expected)


def test_homes_are_a_value() -> None:
    rows = ((("exp_avg", FILE), ("weights", FILE)), ())
    homes = Homes(rows)
    assert homes == Homes(rows)
    assert hash(homes) == hash(Homes(rows))
    moved = homes.replaced(FILE, COMPRESSED, {(0, "exp_avg")})
    assert moved != homes
    assert (moved[0, "exp_avg"], moved[0, "weights"]) == (COMPRESSED, FILE)
    assert moved.staged(0) == homes.staged(0) == ("exp_avg", "weights")
    assert moved.staged_homes == (COMPRESSED, FILE)
    assert moved.replaced(COMPRESSED, FILE) == homes
    assert repr(moved) == "<homes: exp_avg compressed [0], weights file [0]>"
