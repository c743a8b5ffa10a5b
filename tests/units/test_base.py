"""Prepared bases: what is written, what is read back, and what is refused by name."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stronghold
from stronghold.checkpoint.base import MANIFEST, Base, StoredPlace, open_base, source_mark, view_of
from stronghold.checkpoint.prepare import Prepared, prepare
from stronghold.checkpoint.pretrained import DirectorySource
from stronghold.errors import CheckpointError, ConfigError, StateError
from stronghold.model.packed_formats import FORMATS
from stronghold.model.partition import source_of
from stronghold.tools.cli import main
from tests.support.bases import NUM_LAYERS, write_model
from tests.support.stored_weights import fp8_settings, fp8_tensors, rewrite

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


@pytest.fixture(scope="module")
def bases(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Prepared]:
    """A base in each format. nf4: one file for each layer."""
    folder = tmp_path_factory.mktemp("bases")
    return {
        frozen: prepare(
            model_dir,
            folder / frozen,
            frozen=frozen,
            max_file_bytes=1 if frozen == "nf4" else 1 << 30,
        )
        for frozen in FORMATS
    }


@pytest.fixture
def base_dir(bases: dict[str, Prepared], tmp_path: Path) -> Path:
    """A copy of the nf4 base, which the test may damage."""
    shutil.copytree(bases["nf4"].path, tmp_path / "base")
    return tmp_path / "base"


def weights_of(model_dir: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    model: nn.Module = stronghold.from_pretrained(model_dir)
    values = {}
    for name, parameter in model.named_parameters():
        values[name] = torch.empty(parameter.shape, dtype=dtype)
        source_of(model).read_into(parameter, values[name])
    return values


def read(base: Base, layer: int) -> dict[str, torch.Tensor]:
    """The stored tensors of a layer by name."""
    record = base.layers[layer]
    memory = torch.full((record.num_bytes,), 0xA5, dtype=torch.uint8)
    base.read_into(layer, memory)
    return {tensor.name: view_of(memory, tensor.place) for tensor in record.tensors}


def places_of(base: Base) -> list[list[StoredPlace]]:
    return [[tensor.place for tensor in record.tensors] for record in base.layers]


# -- contents --------------------------------------------------------------------------------------
@pytest.mark.parametrize("frozen", FORMATS)
def test_a_base_has_what_the_format_makes_of_each_weight(
    frozen: str, bases: dict[str, Prepared], model_dir: Path
) -> None:
    weights = weights_of(model_dir)
    packed_format = FORMATS[frozen]
    with open_base(bases[frozen].path, frozen=frozen, source=source_mark(model_dir)) as base:
        assert [record.name for record in base.layers] == [
            f"model.layers.{number}" for number in range(NUM_LAYERS)
        ]
        for number, record in enumerate(base.layers):
            stored = read(base, number)
            for name, weight in weights.items():
                if not name.startswith(f"{record.name}."):
                    continue
                if not any(part in name for part in LINEAR):
                    assert torch.equal(stored.pop(name), weight)
                    continue
                inner = {
                    described.name: torch.empty(described.shape, dtype=described.dtype)
                    for described in packed_format.inner(weight.shape)
                }
                packed_format.encode(weight, inner)
                for key, expected in inner.items():
                    found = stored.pop(f"{name}.{key}")
                    assert found.dtype is expected.dtype
                    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
            assert not stored


def test_files_follow_the_order_of_the_model(bases: dict[str, Prepared]) -> None:
    with open_base(bases["nf4"].path) as base:
        files = [(record.file, record.offset) for record in base.layers]
    assert files == [(f"layers-{number:05d}.bin", 0) for number in range(NUM_LAYERS)]
    with open_base(bases["int8"].path) as base:
        ends = [record.offset + record.num_bytes for record in base.layers]
        assert {record.file for record in base.layers} == {"layers-00000.bin"}
        assert [record.offset for record in base.layers] == [0, *ends[:-1]]


def test_bytes_between_tensors_are_zeros(bases: dict[str, Prepared]) -> None:
    with open_base(bases["fp8"].path) as base:
        for number, record in enumerate(base.layers):
            memory = torch.full((record.num_bytes,), 0xA5, dtype=torch.uint8)
            base.read_into(number, memory)
            for tensor in record.tensors:
                view_of(memory, tensor.place).view(torch.uint8).zero_()
            assert not memory.any()


def test_weights_are_cast_before_they_are_packed(model_dir: Path, tmp_path: Path) -> None:
    prepare(model_dir, tmp_path / "base", frozen="int8", dtype=torch.float32)
    with open_base(tmp_path / "base") as base:
        assert base.manifest.dtype is torch.float32
        stored = read(base, 0)
    weights = weights_of(model_dir, torch.float32)
    name = "model.layers.0.input_layernorm.weight"
    assert torch.equal(stored[name], weights[name])


def test_a_directory_in_fp8_becomes_a_base_of_the_decoded_weights(
    model_dir: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    source = tmp_path / "fp8"
    write_model(source, num_layers=1)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(source.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (source / "model.safetensors.index.json").unlink(missing_ok=True)
    rewrite(source, fp8_tensors(tensors, (8, 8), ("embed", "lm_head")), fp8_settings((8, 8)))
    prepare(source, tmp_path / "base", frozen="int8")
    name = "model.layers.0.mlp.up_proj.weight"
    weight = weights_of(source)[name]
    inner = {"CB": torch.empty_like(weight, dtype=torch.int8), "SCB": torch.empty(len(weight))}
    FORMATS["int8"].encode(weight, inner)
    with open_base(tmp_path / "base") as base:
        stored = read(base, 0)
    assert all(torch.equal(stored[f"{name}.{key}"], value) for key, value in inner.items())


# -- reading ---------------------------------------------------------------------------------------
def test_a_layer_is_read_to_other_places(bases: dict[str, Prepared]) -> None:
    """As a run with another order of formats, or another padding, has them."""
    with open_base(bases["nf4"].path) as base:
        expected = read(base, 1)
        places = places_of(base)[1]
        assert base.has_layout(1, places)
        moved, end = [], 8192
        for place in reversed(places):
            moved.append(replace(place, offset=end))
            end += (place.end - place.offset + 511) // 256 * 256
        assert not base.has_layout(1, moved)
        memory = torch.zeros(end, dtype=torch.uint8)
        base.read_into(1, memory, moved)
        for place in moved:
            found = view_of(memory, place)
            assert torch.equal(found.view(torch.uint8), expected[place.name].view(torch.uint8))
        with pytest.raises(StateError, match=r"layers\.1: got .* expected at least"):
            base.read_into(1, memory[:-4096], moved)


def test_names_that_adapters_change_are_the_same_tensors(bases: dict[str, Prepared]) -> None:
    with open_base(bases["nf4"].path) as base:
        layers = [
            [
                replace(
                    place,
                    name="base_model.model." + place.name.replace("q_proj.", "q_proj.base_layer."),
                )
                for place in places
            ]
            for places in places_of(base)
        ]
    open_base(bases["nf4"].path, layers=layers).close()


def test_many_may_read_while_none_can_write(bases: dict[str, Prepared]) -> None:
    with open_base(bases["nf4"].path) as one, open_base(bases["nf4"].path) as two:
        first, second = read(one, 0), read(two, 0)
        one.check_contents()
    assert all(torch.equal(first[name], second[name]) for name in first)


# -- refusals --------------------------------------------------------------------------------------
def test_a_directory_that_is_no_base(model_dir: Path, tmp_path: Path) -> None:
    for path in (model_dir, tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match=r"is no prepared base\. Make one with"):
            open_base(path)


def test_a_file_that_is_missing(base_dir: Path) -> None:
    (base_dir / "layers-00001.bin").unlink()
    with pytest.raises(CheckpointError, match=r"layers-00001\.bin: the file is missing"):
        open_base(base_dir)


def test_a_file_that_is_cut_off(base_dir: Path) -> None:
    path = base_dir / "layers-00002.bin"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4096)
    with pytest.raises(CheckpointError, match=r"layers-00002\.bin: .* bytes, expected .*cut off"):
        open_base(base_dir)


def test_a_file_that_is_cut_off_after_it_was_opened(base_dir: Path) -> None:
    with open_base(base_dir) as base:
        (base_dir / "layers-00001.bin").open("r+b").truncate(8192)
        with pytest.raises(CheckpointError, match=r"layers-00001\.bin: cut off inside model\.lay"):
            read(base, 1)


def test_a_byte_that_changed(base_dir: Path) -> None:
    with open_base(base_dir) as base:
        tensor = next(t for t in base.layers[1].tensors if t.name.endswith("up_proj.weight.codes"))
        path = base_dir / base.layers[1].file
        with path.open("r+b") as file:
            file.seek(tensor.offset + 7)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
        read(base, 0)
        with pytest.raises(
            CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight\.codes: its che"
        ):
            read(base, 1)
        with pytest.raises(CheckpointError, match="Prepare it again"):
            base.check_contents()


def test_a_pipe_in_the_place_of_a_file(base_dir: Path) -> None:
    import os

    (base_dir / "layers-00000.bin").unlink()
    os.mkfifo(base_dir / "layers-00000.bin")
    with pytest.raises(CheckpointError, match="it is no regular file"):
        open_base(base_dir)


def change(base_dir: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, with a checksum that is right."""
    path = base_dir / MANIFEST
    body = json.loads(path.read_text())["base"]
    edit(body)
    crc32 = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    path.write_text(json.dumps({"crc32": crc32, "base": body}))


def test_a_manifest_that_is_damaged(base_dir: Path) -> None:
    path = base_dir / MANIFEST
    text = path.read_text()
    for broken in (text[:-40], "", "[]", "{}", text.replace('"nf4"', '"fp8"', 1)):
        path.write_text(broken)
        with pytest.raises(CheckpointError, match=r"base\.json: (not a readable|its checksum)"):
            open_base(base_dir)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda body: body.update(version=2), "stronghold base version 2, expected .* version 1"),
        (lambda body: body.update(format="other"), "other version 1, expected stronghold base"),
        (lambda body: body.update(frozen="nf5"), "got .nf5., expected one of nf4.*[Dd]id you mean"),
        (lambda body: body.update(color="red"), "color"),
        (lambda body: body["layers"][0].update(file="../x"), "name of a file in this directory"),
        (lambda body: body["layers"][1].update(offset=4096), "begins at 4096 of layers-00001"),
        (lambda body: body["layers"][1].update(num_bytes=4096), "num_bytes: got 4096, and its te"),
        (
            lambda body: body["layers"][1].update(num_bytes=1 << 20),
            "layers-00001.bin has .* its la",
        ),
        (lambda body: body["layers"][0].update(offset=5), "multiples of 4096"),
        (lambda body: body["layers"][0]["tensors"][1].update(offset=2), "at least"),
        (lambda body: body["files"].pop("layers-00000.bin"), "layers-00000.bin is missing"),
    ],
)
def test_a_manifest_that_contradicts_itself(
    edit: Callable[[dict[str, Any]], object], problem: str, base_dir: Path
) -> None:
    change(base_dir, edit)
    with pytest.raises(CheckpointError, match=problem):
        open_base(base_dir)


def test_a_base_in_another_format(base_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r'is a base in nf4, and stronghold\.frozen is "int8"'):
        open_base(base_dir, frozen="int8")


def test_a_base_of_another_model(base_dir: Path, tmp_path: Path) -> None:
    """Of the same shapes, names and sizes: only the values differ."""
    write_model(tmp_path / "other", scale=1.25)
    with pytest.raises(ConfigError, match=r"is a base of another model.*Prepare a base"):
        open_base(base_dir, source=source_mark(tmp_path / "other"))


def test_the_mark_of_a_model_does_not_depend_on_its_place(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "copy")
    assert source_mark(tmp_path / "copy") == source_mark(model_dir)


def test_a_base_of_another_depth(base_dir: Path, bases: dict[str, Prepared]) -> None:
    with open_base(base_dir) as base:
        layers = places_of(base)
    with pytest.raises(ConfigError, match=r"has 3 layers, and the model has 2 blocks"):
        open_base(base_dir, layers=layers[:2])


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda places: [replace(places[0], shape=(71,)), *places[1:]], r"shape \[72\], expected"),
        (lambda places: [replace(places[0], dtype=torch.float16), *places[1:]], "bfloat16 of"),
        (lambda places: [replace(places[0], name="model.layers.1.norm"), *places[1:]], "has no mo"),
        (lambda places: places[1:], r"has \d+ stored tensors, expected \d+"),
    ],
)
def test_a_base_of_other_stored_tensors(
    edit: Callable[[list[StoredPlace]], list[StoredPlace]], problem: str, base_dir: Path
) -> None:
    with open_base(base_dir) as base:
        layers = places_of(base)
    layers[1] = edit(layers[1])
    with pytest.raises(ConfigError, match=rf"layer model\.layers\.1 .*{problem}"):
        open_base(base_dir, layers=layers)


# -- three threads ---------------------------------------------------------------------------------
def test_a_weight_is_read_while_another_is_packed(
    model_dir: Path, bases: dict[str, Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing waits until the next weight is read. The files stay the same."""
    num_read = num_packed = 0
    progress = threading.Condition()
    read_into, encode = DirectorySource.read_into, FORMATS["nf4"].encode

    def reading(source: Any, parameter: torch.Tensor, target: torch.Tensor) -> None:
        nonlocal num_read
        read_into(source, parameter, target)
        with progress:
            num_read += parameter.dim() == 2
            progress.notify_all()

    def packing(*args: Any) -> Any:
        nonlocal num_packed
        num_packed += 1
        if num_packed % len(LINEAR):  # the next part is a weight of the same layer
            with progress:
                assert progress.wait_for(lambda: num_read > num_packed, timeout=60)
        return encode(*args)

    monkeypatch.setattr(DirectorySource, "read_into", reading)
    monkeypatch.setattr(FORMATS["nf4"], "encode", packing)
    made = prepare(model_dir, tmp_path / "base", frozen="nf4", max_file_bytes=1)
    assert num_packed == num_read == NUM_LAYERS * len(LINEAR)
    for file in sorted(made.path.glob("*.bin")):
        assert file.read_bytes() == (bases["nf4"].path / file.name).read_bytes()


def test_an_error_of_the_reading_thread_is_the_callers(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(source: Any, parameter: torch.Tensor, target: torch.Tensor) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "a shard")

    monkeypatch.setattr(DirectorySource, "read_into", failing)
    with pytest.raises(OSError, match="a shard"):
        prepare(model_dir, tmp_path / "bases" / "one", frozen="nf4")
    assert list((tmp_path / "bases").iterdir()) == []


# -- the command -----------------------------------------------------------------------------------
def test_the_command_prints_the_error_of_each_kind_of_layer(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["prepare", str(model_dir), "--frozen", "int8", "-o", str(tmp_path / "base")]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "3 layers in int8" in captured.out
    for kind in LINEAR:
        assert kind in captured.out
    assert "3 of 3 layers" in captured.err
    weights = weights_of(model_dir)
    decoded_error = 0.0
    for number in range(NUM_LAYERS):
        weight = weights[f"model.layers.{number}.mlp.up_proj.weight"]
        inner = {"CB": torch.empty_like(weight, dtype=torch.int8), "SCB": torch.empty(len(weight))}
        FORMATS["int8"].encode(weight, inner)
        decoded = torch.empty_like(weight)
        FORMATS["int8"].decode(inner, decoded)
        decoded_error = max(decoded_error, float((decoded.float() - weight.float()).abs().max()))
    line = next(line for line in captured.out.splitlines() if line.startswith("mlp.up_proj"))
    assert float(line.split()[-1]) == pytest.approx(decoded_error, rel=0.01)
    assert main(arguments) == 2
    assert "exists and is not empty" in capsys.readouterr().err


def test_weights_that_cannot_be_packed_leave_nothing(tmp_path: Path) -> None:
    write_model(tmp_path / "model", scale=float("inf"))
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.q_proj\.weight: nf4: .* NaN or"):
        prepare(tmp_path / "model", tmp_path / "bases" / "one", frozen="nf4")
    assert list((tmp_path / "bases").iterdir()) == []


def test_a_format_that_nobody_knows(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got 'nf5', expected one of nf4"):
        prepare(model_dir, tmp_path / "base", frozen="nf5")
