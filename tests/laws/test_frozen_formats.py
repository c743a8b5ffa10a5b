"""Frozen int8, uint8 and float8 parameters: they keep their bytes under every rule of dtypes, and
cost one byte each on the link, on the host, in files and in checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from stronghold.errors import ConfigError
from tests.models import loss_of
from tests.support.checkpoints import command
from tests.support.insides import offload_small
from tests.support.mixed import token_batch
from tests.support.quantised import BYTES, quantised, quantised_model, raw
from tests.support.training import (
    DTYPES,
    Run,
    assert_identical,
    config,
    initialized,
    train_plain,
    train_windowed,
)

STEPS = 3
PLACES: dict[str, dict[str, Any]] = {
    "one slot": {"window": 1},
    "recomputed": {"window": 2, "activations": "recompute"},
    "offloaded": {"window": 1, "activations": "offload"},
    "one resident": {"window": 1, "resident_layers": 1},
    "updated on the gpu": {"resident_layers": 1, "resident_updates": "gpu", "window": 1},
    "whole": {"resident_layers": "all", "resident_updates": "gpu"},
    "moments in files": {"window": 1, "nvme": {"spill": "moments"}},
    "all in files": {"window": 1, "nvme": {"spill": "weights"}},
}


@functools.cache
def plain(stored: torch.dtype, precision: str, rule: str, accumulation: int) -> Run:
    return train_plain(
        quantised(stored, DTYPES[precision]),
        steps=STEPS,
        clipping=0.5,
        accumulation=accumulation,
        precision=precision,
        dtypes=rule,
    )


def placed(place: str, folder: Path) -> dict[str, Any]:
    section = dict(PLACES[place])
    if "nvme" in section:
        section["nvme"] = {**section["nvme"], "path": str(folder)}
    return section


def same_bytes(run: Run, expected: Run) -> None:
    """As `assert_identical`; torch cannot compare float8 numbers everywhere."""
    for each in (run, expected):
        for name, value in each.weights.items():
            each.weights[name] = raw(value) if value.itemsize == 1 else value
    assert_identical(run, expected)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rule", ["own", "cast"])
@pytest.mark.parametrize("stored", BYTES, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_frozen_bytes_train_what_is_beside_them_as_in_a_plain_loop(
    place: str, stored: torch.dtype, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stronghold.plan.memory.PIECE_BYTES", 4096 * 24)
    offload_small(monkeypatch)
    # Every second case accumulates, or has lean states.
    odd = (list(PLACES).index(place) + BYTES.index(stored)) % 2
    accumulation, precision = (3, "bf16") if odd else (1, "lean")
    settings = config(
        section={**placed(place, tmp_path), "dtypes": rule},
        clipping=0.5,
        accumulation=accumulation,
        precision=precision,
    )
    reports: list[Any] = []
    run = train_windowed(
        quantised(stored),
        steps=STEPS,
        settings=settings,
        inspect=lambda engine: reports.append(engine.memory_report()),
    )
    expected = plain(stored, precision, rule, accumulation)
    assert run.norms == expected.norms
    assert run.weights["blocks.0.inner.weight"].dtype is not torch.bfloat16
    same_bytes(run, expected)
    (report,) = reports
    assert report.host_peak == report.host_planned
    assert report.nvme_peak == report.nvme_planned
    assert (report.nvme_peak > 0) == ("files" in place)
    if place != "whole":
        assert report.gpu_peak == report.gpu_planned


# -- bytes -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("place", ["one slot", "all in files"])
def test_a_frozen_number_costs_one_byte_on_the_host_and_on_the_link(
    stored: torch.dtype, place: str, tmp_path: Path
) -> None:
    engine = initialized(
        quantised_model(stored, num_layers=4),
        config(precision="bf16", clipping=0.5, section=placed(place, tmp_path)),
    )
    moved = []
    for step in range(4):
        engine.backward(loss_of(engine(**token_batch(step))))
        engine.step()
        moved.append(engine.inspect().traffic)
    engine.synchronize()
    now, report = engine.inspect(), engine.memory_report()
    of_layer, changed = [], 0
    for layer in now.layers:
        of_layer.append(layer.weights.nbytes)
        if layer.trained:
            # a gradient that waits, the lower half of a 16-bit weight's master, two moments
            numel, states = layer.layout.trained_numel, layer.layout.states
            itemsize = states.dtype.itemsize
            changed += numel * (itemsize + {2: 2, 4: 0}[itemsize] + 8)
        if layer.layout.streamed:
            assert stored in layer.layout.frozen_dtypes
    streamed = sum(of_layer[k] for k in now.layout.streamed)
    resident = sum(of_layer[k] for k in now.layout.resident if now.layers[k].trained)
    # One slot: backward begins with the layer that forward ended with. What was updated and is
    # resident comes anew.
    per_step = 2 * streamed - of_layer[now.layout.streamed[-1]] + resident
    assert moved[3].fetched_bytes - moved[2].fetched_bytes == per_step
    assert place != "one slot" or report.host_peak == sum(of_layer) + changed
    engine.destroy()


# -- checkpoints -----------------------------------------------------------------------------------
@pytest.mark.parametrize("stored", BYTES, ids=str)
def test_checkpoints_have_frozen_bytes_and_resume_in_another_place(
    stored: torch.dtype, tmp_path: Path
) -> None:
    losses: dict[str, list[torch.Tensor]] = {}
    for place in ("one slot", "all in files", "updated on the gpu"):
        model = quantised_model(stored, seed=0 if not losses else 1)
        settings = config(precision="bf16", clipping=0.5, section=placed(place, tmp_path))
        engine = initialized(model, settings)
        if losses:
            engine.load_checkpoint(tmp_path / "saved")
        else:
            engine.backward(loss_of(engine(**token_batch(0))))
            engine.step()
            engine.save_checkpoint(tmp_path / "saved")
        losses[place] = []
        for step in range(1, 4):
            loss = loss_of(engine(**token_batch(step)))
            engine.backward(loss)
            engine.step()
            losses[place].append(loss.detach().clone())
        engine.destroy()
    first, *others = losses.values()
    for other in others:
        assert all(map(torch.equal, first, other))
    command("export", tmp_path / "saved", tmp_path / "hf")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    original = dict(quantised_model(stored).named_parameters())
    for name in (name for name, p in original.items() if p.dtype is stored):
        assert exported[name].dtype is stored
        assert torch.equal(raw(exported[name]), raw(original[name]))


def test_numbers_of_another_format_are_refused(tmp_path: Path) -> None:
    settings = config(precision="bf16", section={"window": 1})
    engine = initialized(quantised_model(torch.int8), settings)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    engine = initialized(quantised_model(torch.float8_e4m3fn), settings)
    with pytest.raises(ConfigError, match=r"is torch\.int8 there, and torch\.float8_e4m3fn"):
        engine.load_checkpoint(tmp_path)
    engine.destroy()


# -- further dtypes --------------------------------------------------------------------------------
FURTHER = [
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.bool),
    *(torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.complex64, torch.float4_e2m1fn_x2),
]


class Beside(nn.Module):
    """A layer that trains beside numbers that it does not use."""

    def __init__(self, stored: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        numbers = torch.arange(4 * stored.itemsize, dtype=torch.uint8)
        numbers = numbers % 2 if stored is torch.bool else numbers
        self.stored = nn.Parameter(numbers.view(stored), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Stacked(nn.Module):
    def __init__(self, stored: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Beside(stored) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("place", ["one slot", "all in files", "whole"])
@pytest.mark.parametrize("stored", [*BYTES, *FURTHER], ids=str)
def test_numbers_of_every_dtype_move_as_bytes_and_are_saved_where_files_have_the_dtype(
    stored: torch.dtype, place: str, tmp_path: Path
) -> None:
    model = Stacked(stored)
    before = raw(model.blocks[0].stored)
    engine = initialized(model, config(section=placed(place, tmp_path)))
    engine.backward(engine(torch.ones(2, 8)))
    engine.step()
    if stored is torch.float4_e2m1fn_x2:
        with pytest.raises(ConfigError, match=r"blocks\.0\.stored is torch\.float4.*torch\.uint8"):
            engine.save_checkpoint(tmp_path / "saved")
        engine.save_checkpoint(tmp_path / "saved", exclude_frozen_parameters=True)
    else:
        engine.save_checkpoint(tmp_path / "saved")
        raw(engine.module.blocks[0].stored.data).zero_()
    engine.load_checkpoint(tmp_path / "saved")
    engine.destroy()
    assert model.blocks[0].stored.dtype is stored
    assert torch.equal(raw(model.blocks[0].stored), before)
