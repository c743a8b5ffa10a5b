"""Arrays of `stronghold.train` in files: what a step reads and writes, in which order, and what a
program finds between steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.devices.fences import LaneName
from stronghold.optim.states import PAGE_BYTES, num_items
from stronghold.train.layer import Layer
from tests.laws.test_adapters import lora
from tests.models import MODELS, loss_of
from tests.support.core import Core, opened


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stronghold.plan.memory.PIECE_BYTES", 1)  # a page of each


@contextmanager
def in_files(folder: Path, spill: str, name: str = "gpt", **settings: Any) -> Iterator[Any]:
    torch.manual_seed(0)
    model, make_batch = MODELS[name]()
    with opened(model, precision="bf16", folders=[folder], spill=spill, **settings) as core:
        yield core, make_batch


def step(core: Core, batch: Any) -> None:
    core.trainer.backward(loss_of(core.trainer.forward(**batch)))
    core.trainer.step(clipping=1.0)


def padded(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def bytes_of(layer: Layer, array: str) -> int:
    if layer.states is None or array not in layer.states.dtypes:
        return 0
    return padded(num_items(array, layer.trained_numel) * layer.states.dtypes[array].itemsize)


UPDATED = {
    "moments": ["exp_avg", "exp_avg_sq"],
    "masters": ["low", "exp_avg", "exp_avg_sq"],
    "weights": ["weights", "low", "exp_avg", "exp_avg_sq"],
}


@pytest.mark.parametrize("spill", UPDATED)
def test_a_step_reads_and_writes_what_the_formula_says(spill: str, tmp_path: Path) -> None:
    """What an update changes once in each direction, and weights with each fetch."""
    with in_files(tmp_path, spill, window=1) as (core, make_batch):
        arrays = core.trainer.arrays
        updated = sum(bytes_of(layer, a) for layer in core.layers for a in UPDATED[spill])
        for number in range(3):
            read, written = arrays.read_bytes, arrays.written_bytes
            fetched = core.trainer.weights.fetched_bytes
            step(core, make_batch(number))
            fetched = core.trainer.weights.fetched_bytes - fetched if spill == "weights" else 0
            assert arrays.written_bytes - written == updated
            assert arrays.read_bytes - read == updated + fetched
        pieces = [-(-x.trained_numel // arrays._piece_numel[x]) for x in core.layers]
        assert max(pieces) > 1


def test_frozen_weights_are_never_written_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, make_batch = lora()
    with opened(model, precision="bf16", folders=[tmp_path], spill="weights") as core:
        arrays = core.trainer.arrays
        trained = sum(bytes_of(layer, a) for layer in core.layers for a in UPDATED["weights"])
        assert trained > 0
        frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
        for number in range(2):
            step(core, make_batch(number))
        assert arrays.written_bytes == 2 * trained
        core.trainer.synchronize()
        assert all(torch.equal(dict(model.named_parameters())[n], p) for n, p in frozen.items())


def test_loads_run_ahead_of_updates_by_the_ring(tmp_path: Path) -> None:
    """The first update stands still. Its successors' pieces are loaded, as far as buffers reach."""
    with in_files(tmp_path, "moments") as (core, make_batch):
        step(core, make_batch(0))
        core.trainer.synchronize()
        goes_on, loaded = threading.Event(), threading.Semaphore(0)
        files, update = core.trainer.arrays._files, core.pool.update
        assert files is not None
        read = files.read

        def note(parts: Any) -> None:
            read(parts)
            loaded.release()

        def stand_still(*arguments: Any, **keywords: Any) -> None:
            goes_on.wait()
            update(*arguments, **keywords)

        files.read = note  # type: ignore[method-assign]
        core.pool.update = stand_still  # type: ignore[method-assign]
        step(core, make_batch(1))
        num_loaded = 0
        while loaded.acquire(timeout=1.0):
            num_loaded += 1
        goes_on.set()
        core.trainer.synchronize()
        assert num_loaded == core.plan.staging.update_entries


def test_readers_of_moments_wait_for_their_spill_and_fetches_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stronghold.plan.memory.PIECE_BYTES", 1 << 30)  # one for each layer
    with in_files(tmp_path, "moments") as (core, make_batch):
        goes_on, trainer = threading.Event(), core.trainer
        layer = core.layers[0]
        for number in range(2):  # the second one has loads behind spills
            spill = core.device.lane(LaneName.SPILL)
            standing = spill.submit("stand still", lambda: bool(goes_on.wait(10.0)))
            step(core, make_batch(number))
            layer.weight_record.writer.wait()
            assert not standing.done
            threading.Timer(0.3, goes_on.set).start()
            trainer.settle(layer, "reading moments")
            found = trainer.arrays.of(layer, "exp_avg").clone()
            trainer.synchronize()
            assert found.any()
            assert torch.equal(found, trainer.arrays.of(layer, "exp_avg"))
            goes_on.clear()


@pytest.mark.parametrize(("spill", "lane"), [("moments", "fetch"), ("weights", "stage")])
def test_weights_do_not_change_while_a_fetch_reads_them(
    spill: str, lane: str, tmp_path: Path
) -> None:
    """One that no backward waits for. The weights are in RAM, or in a file."""
    with in_files(tmp_path, spill) as (core, make_batch):
        goes_on, trainer = threading.Event(), core.trainer
        layer = next(layer for layer in core.layers if layer.is_block)
        trainer.backward(trainer.forward(**make_batch(0)))
        core.device.lane(LaneName(lane)).submit("stand still", lambda: bool(goes_on.wait()))
        trainer.weights.fetch(layer)
        before = trainer.arrays.of(layer, "weights").clone()
        trainer.step(clipping=1.0)
        behind = next(other for other in reversed(core.layers) if other.is_block)
        end = threading.Thread(target=behind.weight_record.writer.wait)
        end.start()
        end.join(0.2)
        found = trainer.arrays.of(layer, "weights").clone()
        goes_on.set()
        end.join()
        assert torch.equal(found, before)
        trainer.synchronize()
        assert not torch.equal(trainer.arrays.of(layer, "weights"), before)


def test_a_program_finds_and_writes_weights_between_steps(tmp_path: Path) -> None:
    with in_files(tmp_path, "weights") as (core, make_batch):
        model, trainer = core.partition.model, core.trainer
        plain = MODELS["gpt"]()[0].bfloat16()
        for number in range(3):
            step(core, make_batch(number))
            trainer.synchronize()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.5)
            plain.load_state_dict(model.state_dict())
            for batch in map(make_batch, (8, 9)):
                assert torch.equal(trainer.forward(**batch), plain(**batch))
            for (name, value), expected in zip(
                model.named_parameters(), plain.parameters(), strict=True
            ):
                assert torch.equal(value, expected), name


def test_the_model_keeps_its_weights_after_close(tmp_path: Path) -> None:
    with in_files(tmp_path, "weights") as (core, make_batch):
        step(core, make_batch(0))
        model = core.partition.model
        core.trainer.synchronize()
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        loss = core.trainer.forward(**make_batch(1))
    assert list(tmp_path.iterdir()) == []
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])
    assert torch.equal(model(**make_batch(1)), loss)
