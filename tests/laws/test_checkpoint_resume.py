"""Law 4: stop after any step, resume anywhere, and the next losses are the uninterrupted run's."""

from __future__ import annotations

import importlib.metadata
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import stronghold
from stronghold.checkpoint import directory, saving
from stronghold.checkpoint.files import TensorFile
from stronghold.errors import ConfigError, LaneError
from tests.faults.test_lane_failures import fail_in
from tests.support.checkpoints import (
    BESIDE_TAGS,
    assert_same,
    held_saves,
    make_batch,
    make_model,
    masters_of,
    resume,
    session,
    snapshot,
    stored_tensors,
    train,
)
from tests.support.places import on_gpu


def test_counters_tags_client_state_and_generators_return(tmp_path: Path) -> None:
    with session() as engine:
        assert engine.load_checkpoint(tmp_path) == (None, None)
        train(engine, 3)
        random.seed(5), np.random.seed(5)
        engine.save_checkpoint(tmp_path, client_state={"epoch": 2, "best": [0.5, None]})
        engine.save_checkpoint(tmp_path, tag="other", save_latest=False)
        expected = random.random(), np.random.random(), torch.rand(1)
    assert (tmp_path / "latest").read_text() == "global_step3"
    assert (tmp_path / "other" / "mp_rank_00_model_states.pt").exists()
    with session() as engine:
        path, client = resume(engine, tmp_path)
        assert path == str(tmp_path / "global_step3" / "mp_rank_00_model_states.pt")
        version = importlib.metadata.version("deepspeed")
        assert client == {"epoch": 2, "best": [0.5, None], "ds_version": version}
        assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 3, 6)
        assert (random.random(), np.random.random(), torch.rand(1)) == expected


def epoch(engine: Any, folder: Path, num_done: int = 0) -> tuple[list[int], list[Any]]:
    """A loop over an epoch of eight samples in random order, with a checkpoint after three.

    `num_done`: the run begins after a checkpoint at this sample. Returns its samples and losses,
    each with the next draws of Python and NumPy.
    """
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    if num_done:
        engine.load_checkpoint(folder)
    seen: list[int] = []
    losses: list[Any] = []
    for number, sample in enumerate(DataLoader(range(8), shuffle=True, batch_size=None)):
        if number < num_done:
            continue
        if number == num_done > 0:
            engine.restore_random_states()
        loss = engine(**make_batch(sample)).loss
        engine.backward(loss)
        engine.step()
        seen.append(sample)
        losses.append((loss.item(), random.random(), np.random.random()))
        if number == 2:
            engine.save_checkpoint(folder)
    return seen, losses


def test_a_loop_that_resumes_within_an_epoch_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path,
) -> None:
    with session(precision="bf16") as engine:
        with pytest.raises(ConfigError, match="restore_random_states: call load_checkpoint first"):
            engine.restore_random_states()
        seen, losses = epoch(engine, tmp_path)
    with session(make_model(seed=9), precision="bf16") as engine:
        assert epoch(engine, tmp_path, num_done=3) == (seen[3:], losses[3:])
    assert sorted(seen) == list(range(8))


def test_another_number_of_accumulation_steps_starts_at_a_boundary(tmp_path: Path) -> None:
    with session(accumulation=2) as engine:
        train(engine, 3)
        engine.save_checkpoint(tmp_path)
    with session(accumulation=5) as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.micro_steps == 15
        train(engine, 1)
        assert engine.global_steps == 4


def test_weights_alone_leave_everything_else(tmp_path: Path) -> None:
    with session(precision="bf16") as engine:
        train(engine, 3)
        engine.save_checkpoint(tmp_path)
        saved = {name: value.clone() for name, value in engine.module_state_dict().items()}
    for name in ("masters", "moments"):
        for path in (tmp_path / "global_step3").glob(f"{name}-*"):
            path.unlink()  # they are not needed
    with session(make_model(seed=9), precision="bf16") as engine:
        train(engine, 5)
        before = snapshot(engine)
        engine.load_checkpoint(tmp_path, load_module_only=True)
        after = snapshot(engine)
        for name, value in engine.module_state_dict().items():
            assert torch.equal(value, saved[name])
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert {name.split()[0] for name in changed} == {"weight", "low"}
        assert all(not after[name].any() for name in after if name.startswith("low"))
        train(engine, 2)


def test_weights_load_into_an_engine_that_only_runs_forward(tmp_path: Path) -> None:
    with session(precision="bf16") as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        saved = {name: value.clone() for name, value in engine.module_state_dict().items()}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "stronghold": {"device": "emulated"},
    }
    reader, *_ = stronghold.initialize(model=make_model(seed=9), config=settings)
    try:
        reader.load_checkpoint(tmp_path)
        for name, value in reader.module_state_dict().items():
            assert torch.equal(value, saved[name])
        assert not reader.inspect().has_trained
    finally:
        reader.destroy()


@pytest.mark.parametrize(
    ("source", "target"), [("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "bf16")]
)
def test_masters_are_the_same_numbers_in_every_precision(
    source: str, target: str, tmp_path: Path
) -> None:
    with session(precision=source) as engine:
        train(engine, 3)
        engine.save_checkpoint(tmp_path)
        expected = masters_of(engine)
    with session(make_model(seed=9), precision=target) as engine:
        resume(engine, tmp_path)
        assert_same(masters_of(engine), expected)
        train(engine, 1)


def slow_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each file of a layer take a hundredth of a second longer."""
    write = saving.write_tensors

    def slow(*file: Any, **options: Any) -> Any:
        time.sleep(0.01)
        return write(*file, **options)

    monkeypatch.setattr(saving, "write_tensors", slow)


@pytest.mark.parametrize(
    "options",
    [
        *({"clipping": clipping} for clipping in (0.5, 0.0)),
        {"accumulation": 2},
        {"section": {"window": 1, "nvme": {}}},
        *({"clipping": 0.5, "section": on_gpu(place)} for place in ("half", "whole")),
        *({"clipping": 0.0, "section": on_gpu(place)} for place in ("half", "whole")),
        {"clipping": 0.0, "section": {"early_layers": "all"}},
    ],
    ids=str,
)
def test_a_save_beside_training_equals_one_that_stops_it(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"precision": "bf16", "section": {}, **options}
    if "nvme" in options["section"]:
        options["section"] = {**options["section"], "nvme": {"path": str(tmp_path)}}
    stopped, beside = tmp_path / "stopped", tmp_path / "beside"
    with session(**options) as engine:
        train(engine, 2)
        engine.save_checkpoint(stopped)
        losses = train(engine, 3)
    # training has time to overtake a save that nothing holds back
    slow_saves(monkeypatch)
    options["section"] = {**options["section"], "async_checkpoint": True}
    with session(**options) as engine:
        train(engine, 2)
        engine.save_checkpoint(beside)
        assert not (beside / "latest").exists()
        assert all(map(torch.equal, train(engine, 3), losses))
    assert (beside / "latest").read_text() == "global_step2"
    files = sorted((stopped / "global_step2").glob("*.safetensors"))
    assert len(files) >= 6
    for file in files:
        assert file.read_bytes() == (beside / "global_step2" / file.name).read_bytes(), file


@pytest.mark.parametrize("told_by", ["wait", "forward", "save", "load"])
def test_after_a_failed_save_beside_training_is_told_of_once_everything_goes_on(
    told_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = saving.write_tensors
    errors = [OSError(28, "No space left on device")]

    def full_once(*file: Any, **options: Any) -> Any:
        for error in [errors.pop() for _ in errors[:1]]:
            raise error
        return write(*file, **options)

    with session() as engine:
        losses = train(engine, 6)
    with session(section={"async_checkpoint": True}) as engine:
        assert all(map(torch.equal, train(engine, 2), losses[:2]))
        engine.save_checkpoint(tmp_path, tag="good")
        engine.wait_for_checkpoint()
        with monkeypatch.context() as patched:
            patched.setattr(saving, "write_tensors", full_once)
            engine.save_checkpoint(tmp_path, tag="bad")
            engine.inspect().device.finish()
            call = {
                "wait": engine.wait_for_checkpoint,
                "forward": lambda: engine(**make_batch(0)),
                "save": lambda: engine.save_checkpoint(tmp_path, tag="next"),
                "load": lambda: engine.load_checkpoint(tmp_path),
            }[told_by]
            with pytest.raises(LaneError, match=r"publish bad .*No space left"):
                call()
            resume(engine, tmp_path, tag="good")
            assert all(map(torch.equal, train(engine, 2), losses[2:4]))
            engine.save_checkpoint(tmp_path, tag="next")
            assert all(map(torch.equal, train(engine, 2), losses[4:]))
    assert {path.name for path in tmp_path.iterdir()} == {"good", "next", *BESIDE_TAGS}
    with session() as engine:
        resume(engine, tmp_path)
        assert all(map(torch.equal, train(engine, 2), losses[4:]))


@pytest.mark.parametrize("place", ["streamed", "whole"])
def test_after_a_load_that_failed_halfway_nothing_goes_on_before_one_that_succeeds(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {"resident_layers": "all", "resident_updates": "gpu"}
    section = whole if place == "whole" else {"window": 1}
    # Every read of the second pass fails once; those of the first, of checksums, change nothing.
    read, countdown = TensorFile.read_into, [0]

    def failing(self: Any, name: str, begin: int, into: torch.Tensor) -> None:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise OSError(5, "Input/output error", name)
        read(self, name, begin, into)

    with session(section=section, precision="bf16") as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        expected = train(engine, 2)
        monkeypatch.setattr(TensorFile, "read_into", failing)
        for number in (1, 2, 11, 29):
            countdown[0] = number
            with pytest.raises(OSError, match="Input/output error"):
                engine.load_checkpoint(tmp_path)
            countdown[0] = 0
            with pytest.raises(ConfigError, match=r"load_checkpoint\(.* did not end"):
                engine(**make_batch(0))
            with pytest.raises(ConfigError, match=r"load_checkpoint\(.* did not end"):
                engine.save_checkpoint(tmp_path / "torn")
            with pytest.raises(ConfigError, match=r"load_checkpoint\(.* did not end"):
                engine.save_16bit_model(tmp_path / "torn")
            resume(engine, tmp_path)
            assert all(map(torch.equal, train(engine, 2), expected)), number


@pytest.mark.parametrize("custom", [False, True])
def test_weights_that_are_loaded_beside_a_save_are_not_in_it(
    custom: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
        for name, parameter in dst.named_parameters():
            parameter.data.copy_(src[name])

    slow_saves(monkeypatch)
    with session(section={"async_checkpoint": True}) as engine:
        train(engine, 1)
        saved = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.save_checkpoint(tmp_path)
        zeros = {name: torch.zeros_like(value) for name, value in saved.items()}
        engine.load_module_state_dict(zeros, custom_load_fn=place if custom else None)
        assert not any(value.any() for value in engine.module.state_dict().values())
        engine.load_checkpoint(tmp_path, load_module_only=True)
        assert_same(engine.module.state_dict(), saved)


def test_a_write_in_place_waits_for_the_save_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one into a parameter that the program has looked at before the save."""
    goes_on = held_saves(monkeypatch)
    with session(section={"async_checkpoint": True}) as engine:
        train(engine, 1)
        saved = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.save_checkpoint(tmp_path)
        timer = threading.Timer(0.1, goes_on.set)
        timer.start()
        for parameter in engine.module.parameters():
            parameter.data.mul_(0.9)
            assert goes_on.is_set()
        timer.join()
        engine.wait_for_checkpoint()
        engine.load_checkpoint(tmp_path, load_module_only=True)
        assert_same(engine.module.state_dict(), saved)


def test_a_save_of_which_a_layer_failed_to_update_does_not_take_the_place_of_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session(section={"async_checkpoint": True}) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path, tag="best")
        engine.wait_for_checkpoint()
        update = f"update {engine.inspect().layout.streamed[1]}"
        fail_in(engine.inspect().device, monkeypatch, update)
        train(engine, 1)

        def save() -> None:
            engine.save_checkpoint(tmp_path, tag="best")  # raises it if it has come before
            engine.wait_for_checkpoint()

        with pytest.raises(LaneError, match=f"{update} failed .*injected"):
            save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", *BESIDE_TAGS]
    with session() as engine:
        losses = train(engine, 2)
    with session() as engine:
        resume(engine, tmp_path)
        assert all(map(torch.equal, train(engine, 1), losses[1:]))


def test_a_failed_save_leaves_training_and_the_disk_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session() as engine:
        losses = train(engine, 4)
    with session() as engine:
        resumed = train(engine, 2)
        with monkeypatch.context() as patched:
            patched.setattr(directory, "publish", lambda *_: (_ for _ in ()).throw(OSError(28)))
            with pytest.raises(OSError):
                engine.save_checkpoint(tmp_path)
        assert list(tmp_path.iterdir()) == []
        assert all(map(torch.equal, resumed + train(engine, 2), losses))


def test_between_micro_batches_a_load_starts_the_step_again(tmp_path: Path) -> None:
    with session(accumulation=2) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path)
        expected = train(engine, 2)
        engine.backward(engine(**make_batch(7)).loss)
        engine.step()
        assert engine.inspect().is_in_step
        resume(engine, tmp_path)
        assert not engine.inspect().is_in_step
        assert all(map(torch.equal, train(engine, 2), expected))


@pytest.mark.parametrize("place", ["half", "whole"])
def test_a_graph_of_before_a_load_is_refused(place: str, tmp_path: Path) -> None:
    with session(section=on_gpu(place)) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path)
        expected = train(engine, 1)
        loss = engine(**make_batch(7)).loss
        resume(engine, tmp_path)
        with pytest.raises((RuntimeError, ConfigError)):
            engine.backward(loss)
        resume(engine, tmp_path)
        assert all(map(torch.equal, train(engine, 1), expected))


@pytest.mark.parametrize(
    ("accumulation", "stop", "asynchronous"),
    [(2, "step", False), (2, "backward", True), (1, "backward", False)],
)
def test_a_save_within_a_step_is_one_of_its_begin_and_says_so_once(
    accumulation: int, stop: str, asynchronous: bool, tmp_path: Path, caplog: Any
) -> None:
    """The run goes on with the gradients that it has. The run that loads begins the step again."""
    section = {"async_checkpoint": asynchronous}
    options: dict[str, Any] = {"precision": "bf16", "accumulation": accumulation}
    with session(section=section, **options) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path, tag="boundary")
        torch.manual_seed(3)
        engine.backward(engine(**make_batch(7)).loss)
        if stop == "step":
            engine.step()
        for tag in ("within", "again"):
            engine.save_checkpoint(tmp_path, tag=tag)
        assert caplog.text.count("the gradients of the step so far are not saved") == 1
        if stop == "backward":
            engine.step()
        while engine.micro_steps % accumulation:
            engine.backward(engine(**make_batch(8)).loss)
            engine.step()
        expected = train(engine, 1)
        engine.wait_for_checkpoint()
    assert_same(stored_tensors(tmp_path / "within"), stored_tensors(tmp_path / "boundary"))
    with session(make_model(seed=9), section={"window": 1}, **options) as engine:
        engine.load_checkpoint(tmp_path, tag="within")
        torch.manual_seed(3)
        for number in (7, 8)[:accumulation]:
            engine.backward(engine(**make_batch(number)).loss)
            engine.step()
        assert engine.global_steps == 3
        assert all(map(torch.equal, train(engine, 1), expected))


def test_weights_can_be_placed_by_the_caller(tmp_path: Path) -> None:
    def place(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
        for name, parameter in dst.named_parameters():
            parameter.data.copy_(src[name] * 2)

    with session(precision="bf16") as engine:
        train(engine, 3)
        engine.save_checkpoint(tmp_path)
        expected = snapshot(engine)
    with session(make_model(seed=9), precision="bf16") as engine:
        resume(engine, tmp_path, custom_load_fn=place)
        for name, value in snapshot(engine).items():
            kind = name.split()[0]
            wanted = {"weight": expected[name] * 2, "low": torch.zeros_like(expected[name])}
            assert torch.equal(value, wanted.get(kind, expected[name])), name
        train(engine, 1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_weights_alone_that_are_in_part_there_change_the_masters_of_these_alone(
    precision: str, tmp_path: Path
) -> None:
    class Part(torch.nn.Module):
        """The first blocks of the model, by their own names."""

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.transformer = torch.nn.Module()
            self.transformer.h = torch.nn.ModuleList(model.transformer.h[:2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.transformer.h[0](x)[0]

    with session(Part(make_model(seed=5)), precision=precision) as engine:
        engine.save_checkpoint(tmp_path)
    with session(precision=precision) as engine:
        train(engine, 4)
        before = masters_of(engine)
        engine.load_checkpoint(tmp_path, load_module_only=True, load_module_strict=False)
        weights, after = engine.module_state_dict(), masters_of(engine)
        for name, master in after.items():
            loaded = name.startswith(("transformer.h.0.", "transformer.h.1."))
            assert torch.equal(master, weights[name].float() if loaded else before[name]), name
            assert loaded or not torch.equal(master, weights[name].float()), name


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    def partly_frozen(seed: int) -> Any:
        model = make_model(seed=seed)
        for parameter in model.transformer.h[1].parameters():
            parameter.requires_grad = False
        return model

    model = partly_frozen(0)
    with session(model, precision="bf16") as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "all")
        engine.save_checkpoint(tmp_path / "trained", exclude_frozen_parameters=True)
        losses = train(engine, 2)
    for where in ("all", "trained"):
        with session(partly_frozen(0), precision="bf16") as engine:
            resume(engine, tmp_path / where)
            assert all(map(torch.equal, train(engine, 2), losses))
    missing = pytest.raises(ConfigError, match=r"it has no transformer\.h\.1\.")
    with session(precision="bf16") as engine, missing:  # here they are trained
        engine.load_checkpoint(tmp_path / "trained")
