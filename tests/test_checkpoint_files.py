"""What is wrong with a checkpoint is said, with the file, before anything in memory changes."""

from __future__ import annotations

import json
import resource
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from stronghold.checkpoint import tensorfile
from stronghold.checkpoint.held import HeldFile
from stronghold.checkpoint.manifest import MANIFEST, STATE, Manifest
from stronghold.checkpoint.tensorfile import (
    TensorFile,
    entry_of,
    write_durably,
    write_tensors,
)
from stronghold.errors import CheckpointError, ConfigError
from tests.checkpoints import assert_same, make_model, session, snapshot, train

TAG = "global_step3"
FILES = [
    "weights-00001.safetensors",
    "masters-00002.safetensors",
    "moments-00003.safetensors",
    "buffers.safetensors",
    STATE,
    MANIFEST,
]
Damage = Callable[[Path], None]


class WithBuffer(nn.Module):
    """GPT-2 has no buffer in its state dict: this one has."""

    def __init__(self, seed: int = 0, num_layers: int = 3, width: int = 24) -> None:
        super().__init__()
        self.body = make_model(seed=seed, num_layers=num_layers, width=width)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, **batch: Any) -> Any:
        self.seen += 1
        return self.body(**batch)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("saved")
    with session(WithBuffer(), precision="bf16") as engine:
        train(engine, 3)
        engine.save_checkpoint(where)
    return where


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """One engine for every refusal: nothing may change it."""
    with session(WithBuffer(seed=9), precision="bf16") as engine:
        train(engine, 5)
        yield engine


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def refused(engine: Any, where: Path, error: type[Exception], match: str, **options: Any) -> None:
    before = snapshot(engine)
    with pytest.raises(error, match=match):
        engine.load_checkpoint(where, **options)
    assert_same(snapshot(engine), before)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_to_nothing(path: Path) -> None:
    path.write_bytes(b"")


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [cut, cut_to_nothing, longer, flip_a_bit, remove])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_nothing_changes(
    name: str, damage: Damage, engine: Any, copy: Path
) -> None:
    damage(copy / TAG / name)
    match = f"{copy / TAG}.*manifest" if name == MANIFEST else f"{copy / TAG / name}: "
    refused(engine, copy, CheckpointError, match)


def test_the_undamaged_copy_loads(engine: Any, copy: Path) -> None:
    engine.load_checkpoint(copy)
    assert engine.global_steps == 3
    assert engine.module.seen.tolist() == [3.0, 3.0, 3.0]


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as somebody would who also makes its checksum right."""
    body = json.loads((path / MANIFEST).read_text())["manifest"]
    change(body)
    crc32 = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (path / MANIFEST).write_text(json.dumps({"crc32": crc32, "manifest": body}))


def test_another_version_is_refused(engine: Any, copy: Path) -> None:
    rewrite(copy / TAG, lambda body: body.update(version=7))
    refused(engine, copy, CheckpointError, "version 7, expected stronghold checkpoint version 1")


def test_a_file_that_says_other_than_the_manifest_is_refused(engine: Any, copy: Path) -> None:
    tensors = load_file(copy / TAG / FILES[0])
    name = sorted(tensors)[0]
    tensors[name] = tensors[name][:1].clone()
    save_file(tensors, copy / TAG / FILES[0])
    data = (copy / TAG / FILES[0]).read_bytes()
    record = {"num_bytes": len(data), "crc32": zlib.crc32(data)}
    rewrite(copy / TAG, lambda body: body["files"].update({FILES[0]: record}))
    refused(engine, copy, CheckpointError, f"{FILES[0]}: {name} is .* and the manifest says")


def test_a_missing_tag_is_answered_with_those_that_are_there(engine: Any, copy: Path) -> None:
    refused(
        engine,
        copy,
        CheckpointError,
        r"tags there are global_step3\. Did you mean",
        tag="global_stp3",
    )
    (copy / "latest").write_text("global_step9")
    refused(engine, copy, CheckpointError, "global_step9: no such checkpoint")
    refused(engine, copy, ConfigError, "the name of one directory", tag="../global_step3")


def test_foreign_directories_are_told_apart(engine: Any, tmp_path: Path) -> None:
    for name, match in (
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "stronghold import"),
        (STATE, "stronghold import"),
        ("model.safetensors", "from_pretrained"),
        ("notes.txt", "not a checkpoint of stronghold's"),
    ):
        tag = tmp_path / name.replace(".", "-")
        tag.mkdir()
        (tag / name).write_bytes(b"?")
        refused(engine, tmp_path, CheckpointError, match, tag=tag.name)


def test_a_checkpoint_of_another_model_is_refused(engine: Any, saved: Path) -> None:
    for other, match in (
        (WithBuffer(num_layers=2), r"this model has no body\.transformer\.h\.2\..* and 7 more"),
        (WithBuffer(num_layers=4), r"it has no body\.transformer\.h\.3\..*Did you mean|it has no"),
        (WithBuffer(width=32), r"has the shape \[61, 24\] there, and \[61, 32\] in this model"),
        (make_model(), r"it has no transformer\.wte\.weight.*Did you mean \"body\.transformer"),
    ):
        with session(other, precision="bf16") as stranger:
            train(stranger, 1)
            refused(stranger, saved, ConfigError, match)


def test_names_need_not_match_on_request(saved: Path) -> None:
    with session(WithBuffer(num_layers=2, seed=9), precision="bf16") as smaller:
        refused(smaller, saved, ConfigError, "parameter groups", load_module_strict=False)
        smaller.load_checkpoint(saved, load_module_strict=False, load_optimizer_states=False)
        weights = load_file(saved / TAG / "weights-00001.safetensors")
        name = sorted(weights)[0]
        assert torch.equal(smaller.module_state_dict()[name], weights[name])


def test_a_checkpoint_without_an_optimizer_says_so(saved: Path, copy: Path, engine: Any) -> None:
    rewrite(copy / TAG, lambda body: body.update(groups=None))
    refused(engine, copy, ConfigError, "saved by an engine without an optimizer")
    rewrite(copy / TAG, lambda body: body.update(groups=[]))
    refused(engine, copy, ConfigError, "load_optimizer_states=False")


# -- the files themselves ------------------------------------------------------------------------
SHAPES = [(), (1,), (15,), (17, 3), (0, 4), (4097,), (3, 700_001)]


@pytest.mark.parametrize("dtype", list(tensorfile.DTYPES.values()), ids=str)
def test_the_library_reads_what_is_written_and_we_read_what_it_writes(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors = {
        f"t{k}": (torch.arange(torch.Size(shape).numel()) % 127).view(shape).to(dtype)
        for k, shape in enumerate(SHAPES)
    }
    record = write_tensors(tmp_path / "ours", [entry_of(*item) for item in tensors.items()])
    HeldFile(tmp_path / "ours").check(record)
    save_file(tensors, tmp_path / "theirs")
    read, file = load_file(tmp_path / "ours"), TensorFile(tmp_path / "theirs")
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor)
        assert torch.equal(file.read(name), tensor)
        assert torch.equal(file.mapped(name), tensor)
        pieces = [piece.clone() for piece in file.pieces(name)]
        assert torch.equal(torch.cat([torch.empty(0, dtype=dtype), *pieces]), tensor.view(-1))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        b"\xff" * 64,
        (5).to_bytes(8, "little") + b"[1,2]",
        (30).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}}         ',
        (64).to_bytes(8, "little")
        + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(64)
        + b"1234",
    ],
)
def test_what_is_no_safetensors_file_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(CheckpointError, match=str(tmp_path / "file")):
        TensorFile(tmp_path / "file")


def test_the_manifest_is_what_was_written(saved: Path) -> None:
    manifest = Manifest.read(saved / TAG)
    names = {record.name for record in manifest.tensors}
    assert "body.transformer.wte.weight" in names
    tied = next(r for r in manifest.tensors if r.name == "body.transformer.wte.weight")
    assert tied.aliases == ("body.transformer.wte.weight", "body.lm_head.weight")
    assert manifest.buffers == {"seen": (3,)}
    assert {record.step for record in manifest.tensors} == {3}
    listed = set(manifest.files) | {MANIFEST}
    assert listed == {path.name for path in (saved / TAG).iterdir()}


def test_a_disk_that_takes_no_more_is_told_with_the_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"a\.safetensors"):
            write_durably(tmp_path / "a.safetensors", [bytes(4096)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
