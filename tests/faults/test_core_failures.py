"""Operations of `stronghold.train` that fail, and disks that break: an error within one step that
says what and where, and weights of one step or the next. Nothing hangs."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.errors import LaneError
from tests.faults.test_lane_failures import fail_in, in_time
from tests.models import MODELS, loss_of
from tests.support.core import Core, opened

# What every transfer of a broken disk reaches, and the error that it gives.
DEVICES = {"write": ("/dev/full", errno.ENOSPC), "read": ("/proc/self/mem", errno.EIO)}
MODES: dict[str, tuple[float, int]] = {
    "no norm": (0.0, 1),
    "clipped": (0.5, 1),
    "accumulated": (0.5, 2),
}
VERBS = ["fetch", "offload", "norm", "update", "load", "stage", "spill"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stronghold.plan.memory.PIECE_BYTES", 1)  # a page of each array


class Session:
    """Steps of a model with arrays in files."""

    def __init__(self, core: Core, make_batch: Any, mode: str) -> None:
        self.core, self._make_batch = core, make_batch
        self._clipping, self._accumulation = MODES[mode]
        self._num_micros = 0
        self.layer = next(layer for layer in core.layers if layer.name == "blocks.1")

    def steps(self, count: int) -> None:
        for _ in range(count):
            for micro in range(self._accumulation):
                loss = loss_of(self.core.trainer.forward(**self._make_batch(self._num_micros)))
                self._num_micros += 1
                ends_step = micro + 1 == self._accumulation
                self.core.trainer.backward(loss, ends_step=ends_step)
            self.core.trainer.step(clipping=self._clipping)

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in self.core.partition.model.named_parameters()}


@contextmanager
def session(folder: Path, spill: str, mode: str) -> Iterator[Session]:
    torch.manual_seed(0)
    model, make_batch = MODELS["gpt"](num_layers=4)
    accumulates = {"accumulate": MODES[mode][1] > 1, "micro_batches": MODES[mode][1]}
    with opened(
        model, precision="bf16", folders=[folder], spill=spill, window=2, **accumulates
    ) as core:
        yield Session(core, make_batch, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verb", VERBS)
def test_a_failing_operation_names_itself_within_one_step(
    verb: str, mode: str, tmp_path: Path
) -> None:
    with session(tmp_path, "weights", mode) as mine:
        mine.steps(2)
        operation = f"{verb} {mine.layer.index}"
        with pytest.MonkeyPatch.context() as patch:
            fail_in(mine.core.device, patch, operation)
            error = in_time(lambda: mine.steps(2))
        assert isinstance(error, LaneError)
        assert re.search(rf"{operation} failed on the \w+ lane: OSError: injected", str(error))
        assert isinstance(in_time(mine.core.trainer.synchronize), LaneError)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spill", ["moments", "weights"])
@pytest.mark.parametrize("verb", DEVICES)
def test_a_disk_that_fails_is_an_error_within_one_step(
    verb: str, spill: str, mode: str, tmp_path: Path
) -> None:
    with session(tmp_path, spill, mode) as mine:
        mine.steps(2)
        device, number = DEVICES[verb]
        broken = os.open(device, os.O_RDONLY if verb == "read" else os.O_WRONLY)
        name = "preadv" if verb == "read" else "pwritev"
        transfer = getattr(os, name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, name, lambda _, *of: transfer(broken, *of))
            error = in_time(lambda: mine.steps(2))
        os.close(broken)
        assert isinstance(error, LaneError)
        cause = error.__cause__
        assert isinstance(cause, OSError)
        assert cause.errno == number
        assert re.match(r"(load|stage|spill) \d+ failed on the (load|stage|spill) lane", str(error))
        assert re.search(rf"{verb} of \d+ bytes at offset \d+", str(error))
        assert str(tmp_path) in str(error)


@pytest.mark.parametrize("mode", MODES)
def test_after_a_failure_every_weight_is_of_one_step_or_the_next(mode: str, tmp_path: Path) -> None:
    """Moments lie in files. A layer takes several pieces: those before the one that failed are
    new."""
    found = []
    for count in (2, 3):
        with session(tmp_path, "moments", mode) as mine:
            mine.steps(count)
        found.append(mine.weights())
    for verb in ("load", "update", "spill"):
        with session(tmp_path, "moments", mode) as mine:
            mine.steps(2)
            with pytest.MonkeyPatch.context() as patch:
                fail_in(mine.core.device, patch, f"{verb} {mine.layer.index}")
                assert in_time(lambda mine=mine: mine.steps(1)) is None
                assert isinstance(in_time(mine.core.trainer.synchronize), LaneError)
        for name, value in mine.weights().items():
            is_whole = any(torch.equal(value, of_step[name]) for of_step in found)
            assert is_whole or name in mine.layer.names, (verb, name)


@pytest.mark.parametrize("verb", ["load", "update", "spill"])
def test_a_piece_that_fails_fails_its_layer(verb: str, tmp_path: Path) -> None:
    """Later pieces must not make the layer's fence look well."""
    with session(tmp_path, "weights", "clipped") as mine:
        mine.steps(1)
        with pytest.MonkeyPatch.context() as patch:
            fail_in(mine.core.device, patch, f"{verb} {mine.layer.index}", only=1)
            mine.steps(1)
        with pytest.raises(LaneError, match=f"{verb} {mine.layer.index} failed"):
            mine.layer.weight_record.wait()
