"""Checkpoints of one rank: one file of tensors for each layer, in blocks of any size."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import stronghold
from stronghold.checkpoint import files as checkpoint_files
from stronghold.checkpoint import loading
from stronghold.checkpoint.export import export_hf, fp32_state
from stronghold.checkpoint.files import (
    DTYPES,
    HeldFile,
    TensorHeader,
    bytes_of,
    check_file,
    small_record,
    write_tensors,
)
from stronghold.checkpoint.tag import Tag
from stronghold.devices.fences import LaneName
from stronghold.devices.threads import Workers
from stronghold.errors import CheckpointError, ConfigError
from stronghold.train import arrays
from tests.models import loss_of
from tests.support import nf4
from tests.support.checkpoints import (
    WithBuffer,
    assert_same,
    held_saves,
    make_batch,
    make_model,
    masters_of,
    resume,
    session,
    snapshot,
    train,
)
from tests.support.quantised_bases import BASES, fp8_on_cpus
from tests.support.training import config, initialized

PLACES: dict[str, dict[str, Any]] = {
    "ram": {"window": 1},
    "moments in files": {"window": 1, "nvme": {"spill": "moments"}},
    "all in files": {"window": 1, "nvme": {"spill": "weights"}},
    "on the device": {"resident_layers": "all", "resident_updates": "gpu"},
}
SMALL = 2 * 4096
QUANTISED: dict[str, tuple[Any, dict[str, Any]]] = {
    **{kind: (make, {}) for kind, make in BASES.items()},
    **{f"loaded {kind}": (make, {}) for kind, make in nf4.LOADED.items()},
    "nested": (nf4.over_nested, {}),
    **{f"frozen {kind}": (makes[0], {"frozen": "nf4"}) for kind, makes in nf4.FROZEN.items()},
}
TAG = "global_step4"


@contextmanager
def placed(place: str, folder: Path, model: Any = None, **options: Any) -> Iterator[Any]:
    section = {**PLACES[place], **options.pop("section", {})}
    if "nvme" in section:
        section["nvme"] = {**section["nvme"], "path": str(folder)}
    with session(model, section=section, **options) as engine:
        yield engine


def small_blocks(patched: pytest.MonkeyPatch) -> None:
    """Every array of a layer takes several blocks, and several conversions."""
    patched.setattr(arrays, "BLOCK_BYTES", SMALL)
    patched.setattr(checkpoint_files, "BLOCK_BYTES", SMALL)
    patched.setattr(loading, "PIECE_NUMEL", 256)
    patched.setattr("stronghold.checkpoint.tag.PIECE_NUMEL", 256)


def contents(tag: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(tag.glob("*.safetensors"))}


@pytest.fixture
def threads() -> Iterator[Executor]:
    with Workers("test", checkpoint_files.NUM_THREADS) as workers:
        yield workers


# -- engines --------------------------------------------------------------------------------------
@pytest.mark.sampled(6)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "lean", "fp16", "fp32"])
@pytest.mark.parametrize("place", PLACES)
def test_places_and_blocks_change_no_byte(
    place: str, precision: str, asynchronous: bool, tmp_path: Path
) -> None:
    with placed("ram", tmp_path, precision=precision) as engine:
        train(engine, 4)
        engine.save_checkpoint(tmp_path / "ram")
        saved, expected = snapshot(engine), train(engine, 2)
    section = {"async_checkpoint": asynchronous}
    with pytest.MonkeyPatch.context() as patched:
        small_blocks(patched)
        with placed(place, tmp_path, precision=precision, section=section) as engine:
            train(engine, 4)
            engine.save_checkpoint(tmp_path / "other")
            train(engine, 4)
        assert contents(tmp_path / "other" / TAG) == contents(tmp_path / "ram" / TAG)
        other = make_model(seed=9)
        with placed(place, tmp_path, other, precision=precision) as engine:
            train(engine, 1)
            resume(engine, tmp_path / "other")
            assert_same(snapshot(engine), saved)
            assert all(map(torch.equal, train(engine, 2), expected))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *[("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "bf16")],
        *[("bf16", "lean"), ("lean", "bf16"), ("lean", "fp32")],
    ],
)
def test_another_precision_takes_the_masters_and_moments(
    place: str, before: str, after: str, tmp_path: Path
) -> None:
    """In blocks of any size the same. Exact states have all bits of a master."""
    found = []
    for is_small in (False, True):
        with pytest.MonkeyPatch.context() as patched:
            if is_small:
                small_blocks(patched)
            with placed("ram", tmp_path, precision=before) as engine:
                train(engine, 4)
                engine.save_checkpoint(tmp_path / "saved")
                masters = masters_of(engine)
            with placed(place, tmp_path, make_model(seed=9), precision=after) as engine:
                resume(engine, tmp_path / "saved")
                assert engine.inspect().has_trained
                found_masters = masters_of(engine)
                for name, master in masters.items():
                    close = 2**-16 if after == "lean" else 0.0  # of 24 bits
                    assert torch.allclose(found_masters[name], master, rtol=close, atol=0.0), name
                found.append(snapshot(engine))
                assert all(loss.isfinite() for loss in train(engine, 1))
    assert_same(*found)


def test_the_library_reads_every_array(tmp_path: Path) -> None:
    with placed("ram", tmp_path, precision="lean") as engine:
        train(engine, 4)
        engine.save_checkpoint(tmp_path)
        live = {k: v.clone() for k, v in engine.module_state_dict().items()}
        masters = masters_of(engine)
    with Tag(tmp_path / TAG) as tag:
        files = {name: load_file(tmp_path / TAG / name) for name in contents(tmp_path / TAG)}
        for saved in tag.manifest.parameters:
            tensors = files[saved.file]
            assert torch.equal(tensors.pop(f"weights/{saved.name}"), live[saved.name])
            for array in saved.arrays[1:]:
                header = saved.header(array, "lean")
                value = tensors.pop(header.name)
                assert (value.dtype, tuple(value.shape)) == (header.dtype, header.shape)
        assert not any(files.values()), "tensors that the manifest does not list"
    state = fp32_state(tmp_path / TAG)
    assert_same({name: state[name] for name in masters}, masters)
    export_hf(tmp_path / TAG, tmp_path / "out", max_shard_bytes=20_000)
    exported: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        exported |= load_file(file)
    assert_same(exported, {name: live[name] for name in exported})
    assert exported.keys() == live.keys() - {"lm_head.weight"}


def test_weights_alone_need_only_the_blocks_that_they_lie_in(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        small_blocks(patched)
        with placed("ram", tmp_path, precision="bf16") as engine:
            train(engine, 4)
            engine.save_checkpoint(tmp_path / "saved")
            live = {k: v.clone() for k, v in engine.module_state_dict().items()}
        files = (tmp_path / "saved" / TAG).glob("layer-*.safetensors")
        file = max(files, key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1  # in a moment
        file.write_bytes(data)
        with placed("ram", tmp_path, make_model(seed=9), precision="bf16") as engine:
            with pytest.raises(CheckpointError, match=f"{file}: checksum .* from byte"):
                engine.load_checkpoint(tmp_path / "saved")
            engine.load_checkpoint(tmp_path / "saved", load_optimizer_states=False)
            assert_same(engine.module_state_dict(), live)
        data[SMALL + 7] ^= 1  # in a weight
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=f"{file}: checksum .* from byte {SMALL} on"):
            export_hf(tmp_path / "saved" / TAG, tmp_path / "out", max_shard_bytes=10**9)


# -- files ----------------------------------------------------------------------------------------
SHAPES = [(), (1,), (15,), (17, 3), (0, 4), (4097,), (3, 70_001)]


@pytest.mark.parametrize("block_bytes", [4096, 8192, 16 << 20])
@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
def test_the_library_reads_what_is_written(
    dtype: torch.dtype,
    block_bytes: int,
    threads: Executor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint_files, "BLOCK_BYTES", block_bytes)
    tensors = {
        f"t{k}": (torch.arange(torch.Size(shape).numel()) % 127).view(shape).to(dtype)
        for k, shape in enumerate(SHAPES)
    }
    headers = [TensorHeader(name, dtype, tuple(value.shape)) for name, value in tensors.items()]
    file = tmp_path / "file"
    record = write_tensors(file, headers, map(bytes_of, tensors.values()), threads)
    assert record == small_record(file.read_bytes())
    check_file(HeldFile(file), record, threads)
    read = load_file(file)
    assert list(read) == list(tensors)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_a_disk_that_takes_no_more_is_told_with_the_file(
    threads: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "BLOCK_BYTES", 4096)
    header = TensorHeader("a", torch.uint8, (100_000,))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 * 4096, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*a\.safetensors"):
            write_tensors(
                tmp_path / "a.safetensors",
                [header],
                [torch.zeros(100_000, dtype=torch.uint8)],
                threads,
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    open_files = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            open_files.append(os.readlink(descriptor))
    assert not [name for name in open_files if "a.safetensors" in name]


@pytest.mark.parametrize(
    ("name", "dtype", "match"),
    [
        ("__metadata__", torch.float32, "__metadata__: safetensors keeps this name"),
        ("a", torch.complex32, "a: safetensors has no type for torch.complex32"),
    ],
)
def test_what_no_file_can_have_is_refused(
    name: str, dtype: torch.dtype, match: str, threads: Executor, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=match):
        write_tensors(tmp_path / "a", [TensorHeader(name, dtype, (0,))], [], threads)
    assert not list(tmp_path.iterdir())
    model = make_model()
    model.register_buffer(name, torch.zeros(3, dtype=dtype))
    with placed("ram", tmp_path, model) as engine:
        train(engine, 1)
        with pytest.raises(CheckpointError, match=match):
            engine.save_checkpoint(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()


def test_a_failing_source_leaves_no_thread_at_the_file(threads: Executor, tmp_path: Path) -> None:
    def data() -> Iterator[torch.Tensor]:
        yield torch.zeros(40 << 20, dtype=torch.uint8)
        raise OSError(5, "Input/output error")

    header = TensorHeader("a", torch.uint8, (50 << 20,))
    with pytest.raises(OSError, match="Input/output error"):
        write_tensors(tmp_path / "a", [header], data(), threads)


@pytest.mark.parametrize("place", ["ram", "moments in files"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_waits_for_the_updates(asynchronous: bool, place: str, tmp_path: Path) -> None:
    """Of each layer: those that were queued before, and what they write to files."""
    section = {"async_checkpoint": asynchronous}
    tags = []
    for name, late_s in {"on time": 0.0, "late": 0.02}.items():
        section["emulated"] = {"jitter_s": late_s}
        with placed(place, tmp_path, section=section, precision="bf16") as engine:
            train(engine, 4)
            if late_s:
                spill = engine.inspect().device.lane(LaneName.SPILL)
                spill.submit("stand still", lambda: time.sleep(0.3))
            train(engine, 1)
            engine.save_checkpoint(tmp_path / name, tag=TAG)
        tags.append(contents(tmp_path / name / TAG))
    assert tags[0] == tags[1]


def test_a_save_beside_training_has_the_buffers_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = held_saves(monkeypatch)
    section = {"async_checkpoint": True}
    with placed("ram", tmp_path, WithBuffer(), section=section) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        engine(**make_batch(7))
        trained.set()
        engine.wait_for_checkpoint()
        assert engine.module.seen.tolist() == [3.0] * 3
        engine.load_checkpoint(tmp_path)
        assert engine.module.seen.tolist() == [2.0] * 3


@pytest.mark.parametrize("precision", ["bf16", "lean", "fp32"])
def test_optimizers_of_one_layer_share_its_arrays(precision: str, tmp_path: Path) -> None:
    """Each has its own names for them in the file."""

    def opened() -> Any:
        model = make_model()
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        sgd = {"params": vectors, "optimizer": "SGD", "momentum": 0.9, "lr": 0.1}
        engine, *_ = stronghold.initialize(
            model=model,
            config=config(section={"window": 1}, precision=precision),
            model_parameters=[{"params": matrices}, sgd],
        )
        return engine

    engine = opened()
    train(engine, 3)
    engine.save_checkpoint(tmp_path, tag="saved")
    expected = train(engine, 3)
    engine.destroy()
    with Tag(tmp_path / "saved") as tag:
        arrays_of = {saved.name: saved.arrays for saved in tag.manifest.parameters}
        assert "momentum_buffer" in arrays_of["transformer.h.0.ln_1.weight"]
        assert "exp_avg_sq" not in arrays_of["transformer.h.0.ln_1.weight"]
        assert "exp_avg_sq" in arrays_of["transformer.h.0.attn.c_attn.weight"]
    engine = opened()
    engine.load_checkpoint(tmp_path, tag="saved")
    engine.restore_random_states()
    assert all(map(torch.equal, train(engine, 3), expected))
    engine.destroy()


def test_a_load_within_a_pass_is_refused(tmp_path: Path) -> None:
    """A hook of the program saves or loads where weights come and go."""
    with placed("ram", tmp_path) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path)
        expected = train(engine, 1)
        resume(engine, tmp_path)
        handle = engine.module.transformer.h[1].register_forward_hook(
            lambda *_: engine.load_checkpoint(tmp_path)
        )
        with pytest.raises(ConfigError, match="within a forward or a backward"):
            engine(**make_batch(1))
        handle.remove()
        resume(engine, tmp_path)
        assert all(map(torch.equal, train(engine, 1), expected))


# -- quantised bases ------------------------------------------------------------------------------
@pytest.mark.sampled(6)
@pytest.mark.parametrize("without_base", [False, True])
@pytest.mark.parametrize("base", QUANTISED)
def test_adapters_resume_over_a_quantised_base(
    base: str, without_base: bool, tmp_path: Path
) -> None:
    """The quantised tensors are in the checkpoint as they are, or left out on request."""

    def steps(engine: Any, batches: Any, numbers: range) -> list[torch.Tensor]:
        losses = []
        for number in numbers:
            loss = loss_of(engine(**batches(number)))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().clone())
        return losses

    section = {"window": 1, **QUANTISED[base][1]}

    @contextmanager
    def opened() -> Iterator[tuple[Any, Any]]:
        torch.manual_seed(1)
        model, batches = QUANTISED[base][0]()
        engine = initialized(model, config(section=section, precision="bf16"))
        try:
            yield engine, batches
        finally:
            engine.destroy()

    with fp8_on_cpus():
        with opened() as (engine, batches):
            steps(engine, batches, range(2))
            engine.save_checkpoint(tmp_path, exclude_frozen_parameters=without_base)
            expected = steps(engine, batches, range(2, 4))
        with opened() as (engine, batches):
            steps(engine, batches, range(3))
            engine.load_checkpoint(tmp_path)
            assert all(map(torch.equal, steps(engine, batches, range(2, 4)), expected))
            engine.save_16bit_model(tmp_path / "adapters", exclude_frozen_parameters=True)
            parameters = dict(engine.module.named_parameters())
            saved = torch.load(tmp_path / "adapters" / "pytorch_model.bin")
            trained = {name for name, value in parameters.items() if value.requires_grad}
            assert trained
            assert trained == saved.keys() & parameters.keys()
            assert all(torch.equal(saved[name], parameters[name]) for name in trained)
