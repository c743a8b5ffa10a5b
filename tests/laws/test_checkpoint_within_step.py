"""Law 4 between the micro-batches of a step: the sums of their gradients are in the checkpoint."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_grad

import stronghold
from stronghold.checkpoint import save
from stronghold.checkpoint.manifest import MANIFEST, SUMS, VERSION, VERSION_WITH_SUMS
from stronghold.errors import ConfigError
from tests.models import loss_of
from tests.support.checkpoints import (
    assert_same,
    make_batch,
    make_model,
    masters_of,
    resume,
    session,
    settings_of,
    snapshot,
    stored_tensors,
    train,
    two_groups,
)
from tests.support.places import on_gpu
from tests.support.rank_models import choosy
from tests.support.training import on

MICRO_BATCHES = 3  # of a step
SMALLEST_PIECE = 2048 * 24  # bytes: a page of each array
LAST = 2 * MICRO_BATCHES
SLOW = pytest.mark.slow
# (micro-batch, call after which the run is saved). The last one is between backward and step.
FIRST_STEP = [(0, "step"), (1, "step")]
SECOND_STEP = [(3, "step"), (4, "step"), (5, "backward")]
Visit = Callable[[Any, int, str], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run: `options` of the config, and sections of the run that saves and of one that loads.

    model  "gpt", or "choosy": every micro-batch uses other parameters
    extra  goes into the config
    """

    model: str = "gpt"
    options: dict[str, Any] = field(default_factory=dict)
    section: dict[str, Any] = field(default_factory=dict)
    elsewhere: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def batch(self, number: int) -> dict[str, Any]:
        return make_batch(number) if self.model == "gpt" else CHOOSY_BATCH(number)

    @contextmanager
    def engine(self, section: dict[str, Any] | None = None, *, seed: int = 0) -> Iterator[Any]:
        """An engine over a fresh model, destroyed at the end."""
        section = self.section if section is None else section
        options = {"precision": "bf16", "clipping": 0.5, **self.options}
        settings = settings_of(accumulation=MICRO_BATCHES, section=section, **options)
        torch.manual_seed(1)
        model: Any = make_model(seed=seed)
        if self.model == "choosy":
            model, _ = choosy(alike=1)
            torch.nn.init.constant_(model.first.bias, float(seed))
        engine, *_ = stronghold.initialize(
            model=model, config={**settings, **self.extra}, model_parameters=two_groups(model)
        )
        try:
            yield engine
        finally:
            engine.destroy()


RECOMPUTE = {"window": 1, "activations": "recompute"}
_, CHOOSY_BATCH = choosy(alike=1)
CASES = {
    "keep": Case(section={"window": 2}, elsewhere=RECOMPUTE),
    "recompute": Case(options={"precision": "fp32"}, section=RECOMPUTE, elsewhere={"window": 3}),
    "chunks": Case(section={"chunk": 1}, elsewhere={"chunk": 1, "window": 1}),
    "residents": Case(section={"resident_layers": 2}, elsewhere=on_gpu("half")),
    "updated on the gpu": Case(section=on_gpu("half"), elsewhere=on_gpu("whole")),
    "whole": Case(options={"clipping": 0.0}, section=on_gpu("whole"), elsewhere={"window": 2}),
    "early": Case(options={"clipping": 0.0}, section={"early_layers": "all"}, elsewhere={}),
    "lean": Case(options={"precision": "lean"}, elsewhere=RECOMPUTE),
    "fp16": Case(
        options={"precision": "fp16"},
        elsewhere=on_gpu("half"),
        # the scale of the second step is another one than the config's
        extra={
            "fp16": {
                "enabled": True,
                "initial_scale_power": 8,
                "loss_scale_window": 1,
                "hysteresis": 1,
            }
        },
    ),
    "other parameters": Case(model="choosy", section={"window": 2}, elsewhere=on_gpu("half")),
    "momentum": Case(options={"optimizer": "nesterov"}, elsewhere=RECOMPUTE),
}


def walk(
    case: Case,
    engine: Any,
    last: int = LAST,
    visit: Visit | None = None,
    *,
    ran_backward: bool = False,
) -> dict[tuple[int, str], Any]:
    """Train up to micro-batch `last`. Returns losses, norms and reported losses by micro-batch.

    `visit` is called after each backward and each step. `ran_backward`: the next call is `step`.
    """
    seen: dict[tuple[int, str], Any] = {}
    while engine.micro_steps < last:
        number = engine.micro_steps
        if not ran_backward:
            loss = loss_of(engine(**on(engine.device, case.batch(number))))
            engine.backward(loss)
            seen[number, "loss"] = loss.detach().cpu().clone()
            if visit is not None:
                visit(engine, number, "backward")
        ran_backward = False
        engine.step()
        if engine.global_steps * MICRO_BATCHES == engine.micro_steps:
            seen[number, "norm"] = torch.tensor(engine.get_global_grad_norm())
            seen[number, "mean"] = torch.as_tensor(engine.last_record.loss).cpu()
        if visit is not None:
            visit(engine, number, "step")
    return seen


def assert_resumes(
    case: Case, stops: list[tuple[int, str]], folder: Path, *, elsewhere: bool = True
) -> None:
    """A run that is saved at each of `stops`, and the runs that resume there, have the bits of one
    that does neither."""
    with case.engine() as engine:
        seen, end = walk(case, engine), state_of(engine)

    def save_at_stop(engine: Any, number: int, call: str) -> None:
        if (number, call) in stops:
            engine.save_checkpoint(folder, tag=f"{number} {call}")

    with case.engine() as engine:
        assert_same_events(walk(case, engine, LAST, save_at_stop), seen)
        assert_same(state_of(engine), end)
    section = case.elsewhere if elsewhere else case.section
    for number, call in stops:
        with case.engine(section, seed=9) as engine:
            resume(engine, folder, tag=f"{number} {call}")
            ran_backward = call == "backward"
            resumed = walk(case, engine, ran_backward=ran_backward)
            first = number if ran_backward else number + 1
            missing = (number, "loss") if ran_backward else None
            expected = {
                key: value for key, value in seen.items() if key[0] >= first and key != missing
            }
            assert_same_events(resumed, expected)
            assert_same(state_of(engine), end)


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """Everything that a load may change, by name, wherever it lies."""
    state = {
        name: value
        for name, value in snapshot(engine).items()
        if not name.startswith("low ")  # by layer, in memory alone
    }
    masters = masters_of(engine).items()
    return state | {f"master {name}": value for name, value in masters}


def assert_same_events(found: dict[Any, Any], expected: dict[Any, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize(
    ("name", "stop"), [("keep", (5, "backward")), ("other parameters", (4, "step"))]
)
def test_a_run_resumes_within_a_step(name: str, stop: tuple[int, str], tmp_path: Path) -> None:
    assert_resumes(CASES[name], [stop], tmp_path)


@SLOW
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_run_resumes_after_every_micro_batch(name: str, elsewhere: bool, tmp_path: Path) -> None:
    stops = FIRST_STEP + SECOND_STEP
    assert_resumes(CASES[name], stops, tmp_path, elsewhere=elsewhere)


@SLOW
@pytest.mark.parametrize("spill", ["moments", "masters", "weights"])
def test_sums_on_nvme_resume_in_memory_and_back(
    spill: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "weights" the sums lie in files too. Every layer takes several pieces."""
    monkeypatch.setattr("stronghold.plan.host_memory.PIECE_BYTES", SMALLEST_PIECE)
    on_nvme = {"nvme": {"path": str(tmp_path), "spill": spill}, "window": 2}
    for section, elsewhere in ((on_nvme, {"window": 1}), ({}, on_nvme)):
        case = Case(section=section, elsewhere=elsewhere)
        assert_resumes(case, FIRST_STEP + SECOND_STEP, tmp_path / str(bool(section)))


@SLOW
def test_a_step_of_any_number_of_backwards_resumes(tmp_path: Path) -> None:
    """Every `engine.step` ends a step, and samples are counted by backwards."""
    case = Case(extra={"managed_gradient_accumulation": False})

    def backwards(engine: Any, numbers: range) -> list[torch.Tensor]:
        losses = []
        for number in numbers:
            loss = loss_of(engine(**case.batch(number)))
            engine.backward(loss)
            losses.append(loss.detach().clone())
        return losses

    with case.engine() as engine:
        backwards(engine, range(3))
        engine.step()
        backwards(engine, range(3, 5))
        engine.save_checkpoint(tmp_path)
        losses = backwards(engine, range(5, 9))
        engine.step()
        end = state_of(engine)
        assert engine.global_samples == 9 * engine.train_micro_batch_size_per_gpu()
    with case.engine(RECOMPUTE, seed=9) as engine:
        resume(engine, tmp_path)
        assert all(map(torch.equal, backwards(engine, range(5, 9)), losses))
        engine.step()
        assert_same(state_of(engine), end)


# -- the save --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "section", [pytest.param({}, marks=SLOW), {"early_layers": "all"}], ids=str
)
def test_a_save_beside_the_next_micro_batches_writes_the_same_files(
    section: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums and the layers change at once: each waits for its file."""
    stopped, beside = tmp_path / "stopped", tmp_path / "beside"
    case = Case(options={"clipping": 0.0}, section=section)
    tags = ["4 step", "5 backward"]

    def save_at_stop(engine: Any, number: int, call: str) -> None:
        if f"{number} {call}" in tags:
            engine.save_checkpoint(folder, tag=f"{number} {call}")

    folder = stopped
    with case.engine() as engine:
        seen = walk(case, engine, LAST + MICRO_BATCHES, save_at_stop)
    write = save.write_tensors

    def slow(*file: Any, **options: Any) -> Any:
        time.sleep(0.005)
        return write(*file, **options)

    monkeypatch.setattr(save, "write_tensors", slow)
    folder = beside
    case = replace(case, section={**section, "async_checkpoint": True})
    with case.engine() as engine:
        assert_same_events(walk(case, engine, LAST + MICRO_BATCHES, save_at_stop), seen)
    for tag in tags:
        assert list((stopped / tag).glob("sums-*"))
        for file in (stopped / tag).glob("*.safetensors"):
            same = (beside / tag / file.name).read_bytes()
            assert file.read_bytes() == same, file


def test_only_a_tag_with_sums_has_the_version_that_older_releases_refuse(tmp_path: Path) -> None:
    """The sums are those that DeepSpeed's accessors read. A parameter without a gradient has
    none."""
    case = CASES["other parameters"]

    def save_always(engine: Any, number: int, call: str) -> None:
        if call == "step":
            engine.save_checkpoint(tmp_path, tag=str(number))

    with case.engine() as engine:
        walk(case, engine, 1, save_always)
        sums = {
            f"{SUMS} {SUMS}.{name}": safe_get_full_grad(parameter).flatten()
            for name, parameter in engine.module.named_parameters()
        }
        walk(case, engine, MICRO_BATCHES, save_always)
    versions = []
    for number in range(MICRO_BATCHES):
        manifest = json.loads((tmp_path / str(number) / MANIFEST).read_text())
        versions.append(manifest["manifest"]["version"])
    assert versions == [VERSION_WITH_SUMS, VERSION_WITH_SUMS, VERSION]
    stored = stored_tensors(tmp_path / "0")
    saved = {name: value for name, value in stored.items() if name.startswith(SUMS)}
    without = {f"{SUMS} {SUMS}.{name}" for name in ("never", "sometimes")}
    assert not without & saved.keys()
    assert len(saved) > 10
    assert_same(saved, {name: sums[name] for name in saved})
    assert not any(sums[name].any() for name in sums.keys() - saved.keys())
    assert not any(name.startswith(SUMS) for name in stored_tensors(tmp_path / "2"))


def test_gradients_that_are_in_no_sum_are_refused_by_name(tmp_path: Path) -> None:
    with session(precision="bf16") as engine:
        engine.backward(engine(**make_batch(0)).loss)
        with pytest.raises(ConfigError, match=r"wait for engine\.step: call that first"):
            engine.save_checkpoint(tmp_path)
        engine.step()
        engine.save_checkpoint(tmp_path)
    with session(precision="bf16", accumulation=2) as engine:
        train(engine, 1)
        engine.backward(engine(**make_batch(0)).loss)
        engine.step()
        loss = engine(**make_batch(0)).loss
        loss.register_hook(lambda _: engine.save_checkpoint(tmp_path))
        with pytest.raises(ConfigError, match="within a forward or a backward"):
            engine.backward(loss)


# -- the load --------------------------------------------------------------------------------------
def saved_within_step(folder: Path, case: Case = CASES["keep"]) -> None:
    """Tag "boundary" after one step, and tag "within" two micro-batches later."""

    def save_at_stop(engine: Any, number: int, call: str) -> None:
        if (number, call) == (MICRO_BATCHES - 1, "step"):
            engine.save_checkpoint(folder, tag="boundary")

    with case.engine() as engine:
        walk(case, engine, MICRO_BATCHES + 2, save_at_stop)
        engine.save_checkpoint(folder, tag="within")


@pytest.mark.parametrize("tag", [pytest.param("boundary", marks=SLOW), "within"])
def test_a_load_within_a_step_drops_the_sums_of_the_engine(tag: str, tmp_path: Path) -> None:
    case = CASES["keep"]
    saved_within_step(tmp_path)
    with case.engine(seed=9) as engine:
        resume(engine, tmp_path, tag=tag)
        seen, end = walk(case, engine), state_of(engine)
    with case.engine(seed=9) as engine:
        walk(case, engine, 1)
        resume(engine, tmp_path, tag=tag)
        assert_same_events(walk(case, engine), seen)
        assert_same(state_of(engine), end)


@pytest.mark.parametrize("tag", [pytest.param("boundary", marks=SLOW), "within"])
@pytest.mark.parametrize(
    "options",
    [pytest.param({"load_module_only": True}, marks=SLOW), {"load_optimizer_states": False}],
    ids=str,
)
def test_a_load_without_the_optimizers_state_begins_a_step(
    options: dict[str, bool], tag: str, tmp_path: Path, caplog: Any
) -> None:
    """A warning says that the checkpoint has gradients of an unfinished step."""
    case = CASES["keep"]
    saved_within_step(tmp_path)
    with case.engine() as engine, caplog.at_level(logging.WARNING):
        walk(case, engine, 1)
        engine.load_checkpoint(tmp_path, tag=tag, **options)
        assert engine.micro_steps % MICRO_BATCHES == 0
        assert not engine.inspect().is_in_step
        steps = engine.global_steps
        for number in range(MICRO_BATCHES):
            assert engine.global_steps == steps
            engine.backward(loss_of(engine(**case.batch(number))))
            engine.step()
        assert engine.global_steps == steps + 1
    assert ("between the micro-batches of a step" in caplog.text) == (tag == "within")


def test_sums_of_another_share_or_scale_are_refused_by_name(tmp_path: Path) -> None:
    saved_within_step(tmp_path)
    refusals = [
        ("bf16", 2, "steps 3, and this engine's is 2"),
        ("fp16", MICRO_BATCHES, "loss scale 1, and this run's is 256"),
    ]
    for precision, accumulation, message in refusals:
        with session(precision=precision, accumulation=accumulation) as engine:
            before = snapshot(engine)
            with pytest.raises(ConfigError, match=message):
                engine.load_checkpoint(tmp_path, tag="within")
            assert_same(snapshot(engine), before)
            engine.load_checkpoint(tmp_path, tag="boundary")
            assert engine.micro_steps == accumulation


@SLOW
def test_sums_are_the_same_numbers_in_bf16_and_fp32(tmp_path: Path) -> None:
    saved_within_step(tmp_path)
    with session(precision="fp32", accumulation=MICRO_BATCHES) as engine:
        resume(engine, tmp_path, tag="within")
        engine.save_checkpoint(tmp_path, tag="again")
    sums, again = (
        {k: v for k, v in stored_tensors(tmp_path / tag).items() if k.startswith(SUMS)}
        for tag in ("within", "again")
    )
    assert_same(again, sums)
