"""Laws of homes: one that the package does not know keeps every bit, with a class for its store and
an entry in one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stronghold.model.layout import ModelLayout
from stronghold.plan.cost import Demand
from stronghold.plan.homes import FILE, Homes
from stronghold.plan.plan import Plan, make_plan
from stronghold.streaming import stack
from tests.models import MODELS
from tests.support.compressed import COMPRESSED, CompressedStore
from tests.support.pairs import pairs
from tests.support.training import assert_identical, config, train_plain, train_windowed

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
    spill, chosen = HOMES[where]
    compress(monkeypatch, chosen)
    clipping, more = UPDATES[update]
    options = {"clipping": clipping, "accumulation": accumulation, "precision": precision}
    run = train_windowed(
        MODELS[name],
        steps=STEPS,
        settings=config(section=section_of(tmp_path, spill, more), **options),
        inspect=lambda engine: check_homes(engine, chosen),
    )
    expected = train_plain(MODELS[name], steps=STEPS, **options)
    assert_identical(run, expected)
    assert run.norms == expected.norms


def check_homes(engine: Any, chosen: Chosen) -> None:
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
