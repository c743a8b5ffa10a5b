"""What is wrong with a checkpoint is said, with the file, before anything in memory changes; also
where another hand has changed it, before a load or while it runs.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from stronghold.checkpoint import directory, files, loading
from stronghold.checkpoint.files import HeldFile, TensorFile, write_durably
from stronghold.checkpoint.format import MANIFEST, STATE, VERSION, Manifest
from stronghold.errors import CheckpointError, ConfigError
from stronghold.tools.cli import main
from tests.support.checkpoints import (
    WithBuffer,
    assert_same,
    command,
    make_model,
    resume,
    session,
    snapshot,
    stored_weights,
    train,
    without_exchange,
)

TAG = "global_step3"


def file_of(layer: int) -> str:
    return f"layer-{layer:05d}.safetensors"


FILES = [*map(file_of, (1, 2, 3)), "buffers.safetensors", STATE, MANIFEST]


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """TimeoutError in what would wait for ever."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tag after three steps, and under `five` after five."""
    where = tmp_path_factory.mktemp("saved")
    with session(WithBuffer(), precision="bf16") as engine:
        train(engine, 3)
        engine.save_checkpoint(where, client_state={"epoch": 1})
        train(engine, 2)
        engine.save_checkpoint(where, tag="five", save_latest=False)
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
    with at_most(20), pytest.raises(error, match=match):
        engine.load_checkpoint(where, **options)
    assert_same(snapshot(engine), before)


def write_manifest(path: Path, body: Any) -> None:
    """With a checksum that is right."""
    crc32 = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (path / MANIFEST).write_text(json.dumps({"crc32": crc32, "manifest": body}))


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest as somebody would who also makes its checksum right."""
    body = json.loads((path / MANIFEST).read_text())["manifest"]
    change(body)
    write_manifest(path, body)


def flipped(data: bytes) -> bytes:
    at = len(data) * 2 // 3
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-1],
    "cut to nothing": lambda data: b"",
    "longer": lambda data: data + b"\0",
    "a bit flipped": flipped,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("damage", [*DAMAGES, "removed"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_nothing_changes(
    name: str, damage: str, engine: Any, copy: Path
) -> None:
    path = copy / TAG / name
    path.unlink() if damage == "removed" else path.write_bytes(DAMAGES[damage](path.read_bytes()))
    match = f"{copy / TAG}.*manifest" if name == MANIFEST else f"{path}: "
    refused(engine, copy, CheckpointError, match)


def test_the_undamaged_copy_loads(engine: Any, copy: Path) -> None:
    engine.load_checkpoint(copy)
    assert engine.global_steps == 3
    assert engine.module.seen.tolist() == [3.0, 3.0, 3.0]


def test_another_version_is_refused(engine: Any, copy: Path) -> None:
    rewrite(copy / TAG, lambda body: body.update(version=7))
    refused(
        engine,
        copy,
        CheckpointError,
        f"version 7, expected stronghold checkpoint version {VERSION}",
    )


def test_a_missing_tag_is_answered_with_those_that_are_there(engine: Any, copy: Path) -> None:
    refused(
        engine,
        copy,
        CheckpointError,
        r"tags there are five, global_step3\. Did you mean",
        tag="global_stp3",
    )
    (copy / "latest").write_text("global_step9")
    refused(engine, copy, CheckpointError, "global_step9: no such checkpoint")
    refused(engine, copy, ConfigError, "the name of one directory", tag="../global_step3")


def test_foreign_directories_are_told_apart(engine: Any, tmp_path: Path) -> None:
    for name, match in (
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_to_fp32.py"),
        (STATE, "zero_to_fp32.py"),
        ("model.safetensors", "own loader"),
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
        weights = stored_weights(saved / TAG / file_of(1))
        name = sorted(weights)[0]
        assert torch.equal(smaller.module_state_dict()[name], weights[name])


def test_a_checkpoint_without_an_optimizer_says_so(saved: Path, copy: Path, engine: Any) -> None:
    rewrite(copy / TAG, lambda body: body.update(groups=None))
    refused(engine, copy, ConfigError, "saved by an engine without an optimizer")
    rewrite(copy / TAG, lambda body: body.update(groups=[]))
    refused(engine, copy, ConfigError, "load_optimizer_states=False")


# -- the files themselves ------------------------------------------------------------------------
SHAPES = [(), (1,), (15,), (17, 3), (0, 4), (4097,), (3, 700_001)]


@pytest.mark.parametrize("dtype", list(files.DTYPES.values()), ids=str)
def test_we_read_what_the_library_writes(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        f"t{k}": (torch.arange(torch.Size(shape).numel()) % 127).view(shape).to(dtype)
        for k, shape in enumerate(SHAPES)
    }
    save_file(tensors, tmp_path / "theirs")
    file = TensorFile(HeldFile(tmp_path / "theirs"))
    for name, tensor in tensors.items():
        assert torch.equal(file.read(name), tensor)
        middle = tensor.view(-1)[tensor.numel() // 3 : tensor.numel() // 2]
        target = torch.empty_like(middle)
        file.read_into(name, tensor.numel() // 3, target)
        assert torch.equal(target, middle)


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
        TensorFile(HeldFile(tmp_path / "file"))


def test_the_manifest_is_what_was_written(saved: Path) -> None:
    within = os.open(saved / TAG, os.O_RDONLY)
    manifest = Manifest.read(saved / TAG, within)
    os.close(within)
    names = {record.name for record in manifest.parameters}
    assert "body.transformer.wte.weight" in names
    tied = next(r for r in manifest.parameters if r.name == "body.transformer.wte.weight")
    assert tied.names == ("body.transformer.wte.weight", "body.lm_head.weight")
    assert manifest.buffers == {"seen": (3,)}
    assert {record.step for record in manifest.parameters} == {3}
    listed = set(manifest.files) | {MANIFEST}
    assert listed == {path.name for path in (saved / TAG).iterdir()}


def test_a_disk_that_takes_no_more_is_told_with_the_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"a\.safetensors"):
            write_durably(tmp_path / "a.safetensors", bytes(4096))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# -- a tag that is replaced while it is loaded ----------------------------------------------------
def state_of(engine: Any, where: Path, tag: str) -> dict[str, torch.Tensor]:
    engine.load_checkpoint(where, tag=tag)
    return snapshot(engine)


def replace(save_dir: Path, tag: str, source: Path) -> None:
    """As a save does: a hidden directory takes the tag's name, and the old one is removed."""
    with directory.appearing(save_dir / tag) as hidden:
        shutil.copytree(source, hidden, dirs_exist_ok=True)


def before_read(
    number: int, prefix: str, work: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`work` is done once, before a load reads the tensor of this number, from 1 on, whose name
    begins with `prefix`."""
    read, num_seen = TensorFile.read_into, 0

    def working(file: TensorFile, name: str, begin: int, target: torch.Tensor) -> None:
        nonlocal num_seen
        num_seen += name.startswith(prefix)
        if num_seen == number and name.startswith(prefix):
            work()
        read(file, name, begin, target)

    monkeypatch.setattr(TensorFile, "read_into", working)


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize(
    ("number", "prefix"),
    [(0, ""), (1, ""), (2, ""), (1, "exp_avg/"), (1, "exp_avg_sq/")],
    ids=["begin", "a weight", "the second read", "a moment", "another moment"],
)
def test_a_load_is_of_the_save_that_it_verified(
    number: int,
    prefix: str,
    exchange: bool,
    engine: Any,
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tag is replaced between verification and the last read: all that is read is the old."""
    if not exchange:
        without_exchange(monkeypatch)
    expected, later = state_of(engine, copy, TAG), state_of(engine, copy, "five")
    apply, replaced = loading.Load.apply, list[None]()

    def replace_once() -> None:
        if not replaced:
            replaced.append(replace(copy, TAG, copy / "five"))

    def replacing(*args: Any, **options: Any) -> None:
        replace_once()
        apply(*args, **options)

    if number == 0:
        monkeypatch.setattr(loading.Load, "apply", replacing)
    else:
        before_read(number, prefix, replace_once, monkeypatch)
    assert_same(state_of(engine, copy, TAG), expected)
    assert replaced
    assert_same(state_of(engine, copy, TAG), later)


def test_loads_beside_a_writer_are_each_of_one_save(engine: Any, copy: Path) -> None:
    states = [state_of(engine, copy, TAG), state_of(engine, copy, "five")]
    shutil.copytree(copy / TAG, copy / "three")
    stop, turns, num_refused = threading.Event(), 0, 0

    def write() -> None:
        nonlocal turns
        while not stop.is_set():
            replace(copy, TAG, copy / ("five", "three")[turns % 2])
            turns += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(25):
            try:
                found = state_of(engine, copy, TAG)
            except (CheckpointError, FileNotFoundError):  # it was replaced while it was opened
                num_refused += 1
                continue
            step = engine.global_steps
            assert_same(found, states[step == 5])
    finally:
        stop.set()
        writer.join()
    assert turns >= 10, "the writer hardly ran: the test shows little"
    assert num_refused < 20


def test_no_file_is_held_after_a_load_or_a_refusal(engine: Any, copy: Path) -> None:
    def held() -> list[str]:
        links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return [os.readlink(link) for link in links if link.is_symlink()]

    engine.load_checkpoint(copy)
    assert not [name for name in held() if str(copy) in name]
    (copy / TAG / file_of(3)).unlink()
    refused(engine, copy, CheckpointError, file_of(3))
    (copy / "five" / file_of(2)).write_bytes(b"?")
    refused(engine, copy, CheckpointError, file_of(2), tag="five")
    assert not [name for name in held() if str(copy) in name]


# -- names ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", b"../elsewhere", b"a\0b"])
def test_a_latest_that_names_no_tag_is_refused(content: bytes, engine: Any, copy: Path) -> None:
    (copy / "latest").write_bytes(content)
    refused(engine, copy, CheckpointError, f"{copy / 'latest'}: ")
    assert main(["export", str(copy), str(copy / "out")]) == 2


@pytest.mark.parametrize("tag", ["a\0b", "a ", " a", "a\nb", "latest", ".a", "a/b", ""])
def test_a_tag_is_the_name_of_a_directory(tag: str, engine: Any, copy: Path) -> None:
    refused(engine, copy, ConfigError, "the name of one directory", tag=tag)
    with pytest.raises(ConfigError, match="the name of one directory"):
        engine.save_checkpoint(copy, tag=tag)


class Underscored(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.body = make_model()
        self.register_parameter(name, nn.Parameter(torch.ones(5)))
        self._name = name

    def forward(self, **batch: Any) -> Any:
        output = self.body(**batch)
        output.loss = output.loss + getattr(self, self._name).square().sum()
        return output


@pytest.mark.parametrize("name", ["__scale", "__metadata__"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_name_may_begin_with_two_underscores(precision: str, name: str, tmp_path: Path) -> None:
    with session(Underscored(name), precision=precision) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        expected = snapshot(engine)
        train(engine, 1)
        resume(engine, tmp_path)
        assert_same(snapshot(engine), expected)
        engine.save_16bit_model(tmp_path, "model.bin")
    assert name in torch.load(tmp_path / "model.bin")


# -- pickles --------------------------------------------------------------------------------------
class Bomb:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self._trace,)


@pytest.fixture
def bomb(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint whose client state runs code, and what that makes."""
    with session(precision="bf16") as engine:
        train(engine, 2)
        client = {"epoch": 1, "bomb": Bomb(tmp_path / "went off")}
        engine.save_checkpoint(tmp_path / "saved", client_state=client)
    return tmp_path / "saved", tmp_path / "went off"


def test_weights_alone_run_no_code_of_the_checkpoints(
    bomb: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    saved, trace = bomb
    with session(make_model(seed=9), precision="bf16") as engine:
        path, client = engine.load_checkpoint(saved, load_module_only=True)
        assert client is None
        assert path == str(saved / "global_step2" / STATE)
        weights = stored_weights(saved / "global_step2" / file_of(1))
        live = engine.module_state_dict()
        assert all(torch.equal(live[name], value) for name, value in weights.items())
        assert not trace.exists()
        assert "is not read: code of its own would run" in caplog.text
        engine.load_checkpoint(saved)  # the client asks for all of it
        assert trace.exists()


def test_an_export_runs_no_code_of_the_checkpoints(bomb: tuple[Path, Path], tmp_path: Path) -> None:
    saved, trace = bomb
    command("export", saved, tmp_path / "out")
    assert any((tmp_path / "out").iterdir())
    assert not trace.exists()


def test_torchs_safe_reader_is_enough_for_plain_client_states(
    engine: Any, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, asked = torch.load, []

    def asking(*args: Any, **options: Any) -> Any:
        asked.append(options["weights_only"])
        return original(*args, **options)

    monkeypatch.setattr(torch, "load", asking)
    for options in ({}, {"load_module_only": True}):
        _, client = engine.load_checkpoint(copy, **options)
        assert client["epoch"] == 1
    assert asked == [True, True]
