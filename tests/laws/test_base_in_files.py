"""Frozen weights that each pass reads from the files of a prepared base.

The bits are those of a run that holds the base in memory. Nothing is written but adapters.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stronghold
from stronghold.checkpoint.base import BaseManifest, LayerRecord, StoredTensorRecord, open_base
from stronghold.checkpoint.prepare import prepare
from stronghold.errors import CheckpointError, ConfigError
from stronghold.plan.homes import FILE
from stronghold.tools.estimate.estimate import estimate
from stronghold.tools.estimate.question import question_from_options
from tests.models import loss_of
from tests.support.bases import write_model
from tests.support.packed import adapted, token_batch
from tests.support.training import Run, assert_identical, config, initialized, train_windowed

STEPS = 3
ALL = {"spill": "weights"}
PLACES: dict[str, dict[str, Any]] = {
    "one slot": {"window": 1, "nvme": ALL},
    "one slot, recomputed": {"window": 1, "activations": "recompute", "nvme": ALL},
    "hostile": {"window": 2, "emulated": {"jitter_s": 1e-3}, "nvme": ALL},
    "one resident": {"window": 1, "resident_layers": 1, "nvme": ALL},
    "one updated on the gpu": {
        "window": 1,
        "resident_layers": 1,
        "resident_updates": "gpu",
        "nvme": ALL,
    },
    "threads": {"window": 1, "nvme": {**ALL, "engine": "threads"}},
    "moments in files": {"window": 1, "nvme": {"spill": "moments"}},
}
QUICK = ("one slot", "hostile")
# "own": fp32 adapters. The fp32 scales come first then, in another order than in the base.
PRECISIONS = ("bf16", "lean", "own")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer takes several pieces."""
    monkeypatch.setattr("stronghold.plan.host_memory.PIECE_BYTES", 4096 * 24)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


@pytest.fixture(scope="module")
def base(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for each layer."""
    path = tmp_path_factory.mktemp("bases") / "base"
    prepare(directory, path, frozen="nf4", max_file_bytes=1)
    return path


def adapted_from(directory: Path) -> tuple[nn.Module, Any]:
    """Adapters on a model whose values are in files."""
    model = stronghold.from_pretrained(directory, use_cache=False)
    torch.manual_seed(0)
    with stronghold.placeholders(model):
        return adapted(model, ["q_proj", "v_proj", "down_proj"]), token_batch


def section_of(place: str, base: Path, folder: Path) -> dict[str, Any]:
    section = {**PLACES[place], "base": str(base)}
    section["nvme"] = {**section["nvme"], "path": str(folder)}
    return section


def run_over(
    directory: Path,
    section: dict[str, Any],
    *,
    precision: str = "bf16",
    accumulation: int = 1,
    inspect: Any = None,
) -> Run:
    if precision == "own":
        precision, section = "bf16", {**section, "dtypes": "own"}
    settings = config(accumulation=accumulation, clipping=0.5, precision=precision, section=section)
    factory = functools.partial(adapted_from, directory)
    return train_windowed(factory, steps=STEPS, settings=settings, inspect=inspect)


@functools.cache
def in_memory(directory: Path, base: Path, precision: str = "bf16", accumulation: int = 1) -> Run:
    section = {"window": 2, "base": str(base)}
    return run_over(directory, section, precision=precision, accumulation=accumulation)


def engine_of(directory: Path, base: Path, folder: Path, place: str = "one slot") -> Any:
    torch.manual_seed(0)
    model, _ = adapted_from(directory)
    section = section_of(place, base, folder)
    return initialized(model, config(clipping=0.5, precision="bf16", section=section))


def train(engine: Any, steps: range) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        torch.manual_seed(1)
        loss = loss_of(engine(**token_batch(step)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    return losses


def layers_in_files(now: Any) -> list[int]:
    """The blocks whose weights lie in files."""
    return [k for k in now.layout.streamed if now.layers[k].homes.get("weights") is FILE]


def marks(base: Path) -> dict[str, tuple[int, int, int]]:
    """By file of a base: its checksum, its bytes, and the time of its last change."""
    return {
        path.name: (zlib.crc32(path.read_bytes()), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(base.iterdir())
    }


# -- bits ------------------------------------------------------------------------------------------
CASES = [
    pytest.param(
        *(place, precision, accumulation),
        marks=()
        if (place in QUICK and precision == "bf16" and accumulation == 1)
        or (place == "one slot" and precision != "bf16" and accumulation == 2)
        else pytest.mark.slow,
    )
    for place in PLACES
    for precision in PRECISIONS
    for accumulation in (1, 2)
]


@pytest.mark.parametrize(("place", "precision", "accumulation"), CASES)
def test_a_base_in_files_has_the_bits_of_a_base_in_memory(
    place: str,
    precision: str,
    accumulation: int,
    directory: Path,
    base: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Lean states pad ranges otherwise than the base does: they are read range by range."""
    before = marks(base)
    seen: list[Any] = []
    with caplog.at_level(logging.WARNING, "stronghold"):
        run = run_over(
            directory,
            section_of(place, base, tmp_path),
            precision=precision,
            accumulation=accumulation,
            inspect=lambda engine: seen.append(engine.inspect()),
        )
    expected = in_memory(directory, base, precision, accumulation)
    assert run.norms == expected.norms
    assert_identical(run, expected)
    (now,) = seen
    num_in_files = {"moments in files": 0, "one updated on the gpu": 2}.get(place, 3)
    assert len(layers_in_files(now)) == num_in_files
    assert now.demand.base_in_file == (num_in_files > 0)
    assert now.bytes.host_peak == now.bytes.host_planned
    assert now.bytes.gpu_peak == now.bytes.gpu_planned
    assert now.bytes.nvme_peak == now.bytes.nvme_planned
    assert marks(base) == before
    assert "in another order" not in caplog.text


def test_two_runs_read_one_base_at_once(directory: Path, base: Path, tmp_path: Path) -> None:
    before = marks(base)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    engines = [engine_of(directory, base, folder) for folder in folders]
    losses: list[list[torch.Tensor]] = [[], []]
    for step in range(STEPS):
        for engine, of_engine in zip(engines, losses, strict=True):
            of_engine += train(engine, range(step, step + 1))
    weights = []
    for engine in engines:
        state = engine.module_state_dict()
        weights.append({name: value.clone() for name, value in state.items()})
        engine.destroy()
    alone = engine_of(directory, base, folders[0])
    losses.append(train(alone, range(STEPS)))
    weights.append({name: value.clone() for name, value in alone.module_state_dict().items()})
    alone.destroy()
    for other, names in zip(losses[1:], weights[1:], strict=True):
        assert all(map(torch.equal, losses[0], other))
        assert names.keys() == weights[0].keys()
        assert all(torch.equal(value, weights[0][name]) for name, value in names.items())
    assert marks(base) == before


def test_the_model_is_given_back_with_its_decoded_weights(
    directory: Path, base: Path, tmp_path: Path
) -> None:
    given: list[dict[str, torch.Tensor]] = []
    for place in ("one slot", None):
        torch.manual_seed(0)
        model, _ = adapted_from(directory)
        section = {"window": 1, "base": str(base)}
        if place is not None:
            section = section_of(place, base, tmp_path)
        engine = initialized(model, config(clipping=0.5, precision="bf16", section=section))
        train(engine, range(1))
        engine.destroy()
        given.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert given[0].keys() == given[1].keys()
    assert all(torch.equal(value, given[1][name]) for name, value in given[0].items())


def test_a_forward_only_engine_reads_the_base(directory: Path, base: Path, tmp_path: Path) -> None:
    """Nothing trains: a layer has no byte in memory."""
    logits: list[torch.Tensor] = []
    for place in ("one slot", None):
        model = stronghold.from_pretrained(directory, use_cache=False).requires_grad_(False)
        section: dict[str, Any] = {"device": "emulated", "window": 1, "base": str(base)}
        if place is not None:
            section |= section_of(place, base, tmp_path)
        settings = {"train_batch_size": 2, "bf16": {"enabled": True}, "stronghold": section}
        engine = stronghold.initialize(model=model, config=settings)[0]
        for step in range(2):
            logits.append(engine(**token_batch(step)).logits.detach().clone())
        in_files = layers_in_files(engine.inspect())
        assert len(in_files) == (3 if place else 0)
        engine.destroy()
    assert all(map(torch.equal, logits[:2], logits[2:]))


# -- bytes -----------------------------------------------------------------------------------------
def test_a_run_writes_no_weight_of_a_block(directory: Path, base: Path, tmp_path: Path) -> None:
    """Taking the model over writes the layers that are no blocks. A step writes states of adapters,
    as the plan counts them."""
    engine = engine_of(directory, base, tmp_path)
    now = engine.inspect()
    page = now.layout.page_numel
    written = 0
    # by frozen range of a block: its bytes, whole pages
    stored: dict[tuple[int, int], int] = {}
    for layer in now.layout.layers:
        for part in layer.slices:
            item_bytes = now.formats[part.format].dtype.itemsize
            end = part.offset + part.numel
            if not layer.streamed:  # whole pages: two tensors may share one
                first, last = part.offset // page, -(-end // page)
                written += (last - first) * page * item_bytes
            elif not part.trainable:
                num_pages = -(-(end - layer.ranges[part.range].begin) * item_bytes // 4096)
                stored[layer.index, part.range] = num_pages * 4096
    assert now.traffic.written_bytes == written
    moved = []
    for step in range(3):
        train(engine, range(step, step + 1))
        engine.inspect().device.finish()  # fetches for the next step are under way
        traffic = engine.inspect().traffic
        moved.append((traffic.read_bytes, traffic.written_bytes))
    plan = engine.plan
    of_step = [late - early for early, late in zip(moved[1], moved[2], strict=True)]
    trained = sum(layer.trainable_numel for layer in now.layout.layers)
    assert of_step[1] == plan.traffic.nvme_written_bytes == (4 + 4 + 2 + 2) * trained
    # Of three equal blocks forward fetches three, and backward two: the turn keeps the last one.
    assert of_step[0] == of_step[1] + 5 * sum(stored.values()) // 3
    assert of_step[0] <= plan.traffic.nvme_read_bytes
    assert any("of 3 layers" in reason and "never written" in reason for reason in plan.reasons)
    assert engine.memory_report().nvme_peak == plan.nvme_total_bytes
    engine.destroy()


@pytest.mark.parametrize("has_nvme", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_memory_cannot_hold_is_read_in_each_pass(
    has_nvme: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory is the base's cache. A run without a directory for files writes nothing at
    all."""
    monkeypatch.setattr("stronghold.plan.host_memory.PIECE_BYTES", 4096)
    directory, base, folder = (tmp_path / name for name in ("model", "base", "files"))
    folder.mkdir()
    write_model(directory, num_layers=8)
    prepare(directory, base, frozen="nf4")
    before = marks(base)
    seen: list[Any] = []
    section: dict[str, Any] = {"window": 1, "base": str(base)}
    if has_nvme:
        section["nvme"] = {"path": str(folder)}

    def look(engine: Any) -> None:
        seen.append(engine.inspect())

    expected = run_over(directory, section, inspect=look)
    need_bytes = seen[0].plan.host_total_bytes
    assert any("read once" in reason for reason in seen[0].plan.reasons)
    assert layers_in_files(seen[0]) == []
    # The staging ring takes room, too.
    less = {**section, "host_memory": need_bytes - (64 << 10)}
    run = run_over(directory, less, inspect=look)
    assert_identical(run, expected)
    now = seen[1]
    in_files = layers_in_files(now)
    assert 0 < len(in_files) < 8
    assert all(set(layer.homes) <= {"weights"} for layer in now.layers)
    assert now.bytes.host_peak == now.bytes.host_planned <= less["host_memory"]
    assert now.bytes.nvme_peak == now.bytes.nvme_planned == 0
    assert now.traffic.written_bytes == 0
    assert now.traffic.read_bytes > 0
    assert marks(base) == before
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_the_config_of_a_plan_runs_as_it_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stronghold plan --base-on nvme` has the engine's places and bytes."""
    monkeypatch.setattr("stronghold.plan.host_memory.PIECE_BYTES", 4096)
    directory, base = tmp_path / "model", tmp_path / "base"
    write_model(directory, num_layers=8)
    prepare(directory, base, frozen="nf4")
    asked = question_from_options(
        model=directory,
        machine="rtx4090",
        lora=4,
        lora_targets=["q_proj", "v_proj", "down_proj"],
        frozen="nf4",
        base_on="nvme",
        gpu="4MiB",
        host="100MB",
        batch=2,
        seq=8,
    )
    asked = replace(asked, resident_layers=0)
    whole = estimate(asked)
    need_bytes = sum(whole.tiers["host"][1].values())
    short = estimate(replace(asked, host_bytes=need_bytes - (64 << 10)))
    assert short.plan is not None
    settings = json.loads(json.dumps(short.config))
    settings["stronghold"] |= {"base": str(base), "device": "emulated"}
    model, _ = adapted_from(directory)
    engine = initialized(model, settings)
    train(engine, range(2))
    now = engine.inspect()
    engine.destroy()
    assert 0 < len(layers_in_files(now)) < 8
    assert now.plan.homes == short.plan.homes
    assert now.plan.host_bytes == short.plan.host_bytes
    assert now.plan.nvme_bytes == short.plan.nvme_bytes
    assert now.bytes.host_peak == now.bytes.host_planned
    assert now.traffic.written_bytes == short.plan.traffic.nvme_written_bytes == 0


# -- another layout --------------------------------------------------------------------------------
def reordered(base: Path, out: Path) -> None:
    """A copy of a base in which the first two tensors of one dtype have changed places."""
    shutil.copytree(base, out)
    with open_base(base) as opened:
        manifest = opened.manifest
        layers: list[LayerRecord] = []
        for number, record in enumerate(manifest.layers):
            memory = torch.empty(record.num_bytes, dtype=torch.uint8)
            opened.read_into(number, memory)
            first, second = [t for t in record.tensors if t.dtype is torch.uint8][:2]
            moved = _exchanged(record, first, second)
            written = torch.zeros_like(memory)
            for before, after in moved:
                place, to = before.place, after.place
                written[to.offset : to.end] = memory[place.offset : place.end]
            with open(out / record.file, "r+b") as file:
                file.seek(record.offset)
                file.write(written.numpy().tobytes())
            tensors = tuple(sorted((after for _, after in moved), key=lambda t: t.offset))
            layers.append(record.model_copy(update={"tensors": tensors}))
    (out / "base.json").unlink()
    BaseManifest(**{**dict(manifest), "layers": tuple(layers)}).write(out)


def _exchanged(
    record: LayerRecord, first: StoredTensorRecord, second: StoredTensorRecord
) -> list[tuple[StoredTensorRecord, StoredTensorRecord]]:
    """Each record, and the record with its new offset. The two tensors are neighbours."""
    new = {first.name: first.offset + second.place.end - second.offset, second.name: first.offset}
    new[first.name] = -(-new[first.name] // 128) * 128
    return [
        (tensor, tensor.model_copy(update={"offset": new.get(tensor.name, tensor.offset)}))
        for tensor in record.tensors
    ]


def test_a_base_in_another_order_is_copied_with_a_warning(
    directory: Path, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reordered(base, tmp_path / "reordered")
    seen: list[Any] = []
    run = run_over(
        directory,
        section_of("one slot", tmp_path / "reordered", tmp_path),
        inspect=lambda engine: seen.append(engine.inspect()),
    )
    assert_identical(run, in_memory(directory, base))
    (now,) = seen
    assert not now.demand.base_in_file
    assert len(layers_in_files(now)) == len(now.layout.streamed)
    assert now.bytes.nvme_peak == now.bytes.nvme_planned
    assert len([r for r in caplog.records if "in another order" in r.message]) == 1


# -- programs that write ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    "place", ["one slot", pytest.param("one resident", marks=pytest.mark.slow)]
)
def test_a_write_into_a_weight_of_the_base_is_refused(
    place: str, directory: Path, base: Path, tmp_path: Path
) -> None:
    """A norm as it came. Equal values are harmless."""
    before = marks(base)
    engine = engine_of(directory, base, tmp_path, place)
    train(engine, range(1))
    name = "base_model.model.model.layers.2.input_layernorm.weight"
    norm = engine.module.get_parameter(name)
    values = norm.detach().clone()
    with torch.no_grad():
        norm.copy_(values)
    train(engine, range(1, 2))
    with torch.no_grad():
        norm.mul_(2.0)
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} was written.*frozen"):
        train(engine, range(2, 3))
    assert marks(base) == before
    assert torch.equal(norm.detach().cpu(), values.cpu())
    after = train(engine, range(2, 4))
    engine.destroy()
    engine = engine_of(directory, base, tmp_path, place)
    assert all(map(torch.equal, after, train(engine, range(4))[2:]))
    engine.destroy()


def test_what_a_program_writes_into_an_adapter_is_trained_on(
    directory: Path, base: Path, tmp_path: Path
) -> None:
    """In place, and by load_state_dict."""
    losses: list[list[torch.Tensor]] = []
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.default.weight"
    for place in ("one slot", None):
        torch.manual_seed(0)
        model, _ = adapted_from(directory)
        section: dict[str, Any] = {"window": 1, "base": str(base)}
        if place is not None:
            section = section_of(place, base, tmp_path)
        engine = initialized(model, config(clipping=0.5, precision="bf16", section=section))
        before = train(engine, range(1))
        with torch.no_grad():
            model.get_parameter(name).mul_(3.0)
        after = train(engine, range(1, 2))
        adapters = {key: 0.5 * p.detach() for key, p in model.named_parameters() if "lora" in key}
        model.load_state_dict(adapters, strict=False)
        losses.append(before + after + train(engine, range(2, 4)))
        engine.destroy()
    assert all(map(torch.equal, *losses))


# -- checkpoints -----------------------------------------------------------------------------------
@pytest.mark.parametrize("exclude", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_checkpoint_goes_from_memory_to_files_and_back(
    exclude: bool, directory: Path, base: Path, tmp_path: Path
) -> None:
    before = marks(base)
    expected: list[torch.Tensor] = []
    for place in ("one slot", None):
        torch.manual_seed(0)
        model, _ = adapted_from(directory)
        section: dict[str, Any] = {"window": 1, "base": str(base)}
        if place is not None:
            section = section_of(place, base, tmp_path)
        engine = initialized(model, config(clipping=0.5, precision="bf16", section=section))
        train(engine, range(1))
        saved = str(tmp_path / f"saved {place}")
        engine.save_checkpoint(saved, exclude_frozen_parameters=exclude)
        expected = train(engine, range(1, 3))
        engine.destroy()
    for place, saved in (("one slot", "saved None"), (None, "saved one slot")):
        torch.manual_seed(0)
        model, _ = adapted_from(directory)
        section = {"window": 1, "base": str(base)}
        if place is not None:
            section = section_of(place, base, tmp_path)
        engine = initialized(model, config(clipping=0.5, precision="bf16", section=section))
        engine.load_checkpoint(str(tmp_path / saved))
        assert all(map(torch.equal, train(engine, range(1, 3)), expected))
        engine.destroy()
    assert marks(base) == before


def test_a_checkpoint_over_another_base_is_refused(
    directory: Path, base: Path, tmp_path: Path
) -> None:
    other_model, other_base, folder = (tmp_path / name for name in ("model", "base", "files"))
    folder.mkdir()
    write_model(other_model, scale=2.0)
    prepare(other_model, other_base, frozen="nf4")
    engine = engine_of(directory, base, folder)
    engine.save_checkpoint(str(tmp_path / "saved"))
    engine.destroy()
    engine = engine_of(other_model, other_base, folder)
    losses = train(engine, range(1))
    with pytest.raises(CheckpointError, match=r"other values than the prepared base"):
        engine.load_checkpoint(str(tmp_path / "saved"))
    # the refused load has changed nothing
    again = engine_of(other_model, other_base, folder)
    assert all(map(torch.equal, losses, train(again, range(1))))
    assert all(map(torch.equal, train(engine, range(1, 2)), train(again, range(1, 2))))
    engine.destroy()
    again.destroy()
