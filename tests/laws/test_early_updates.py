"""Laws of early updates: the bits of a plain loop whatever the gate decides, the bytes of the plan,
and nothing left of a step that fails or is dropped."""

from __future__ import annotations

import functools
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from torch import nn

from stronghold.errors import ConfigError, LaneError
from stronghold.plan.cost import LayerWork, Workload
from stronghold.plan.schedule import Action, Kind
from stronghold.predict.refine import TRACED_STEPS, WARM_UP_STEPS
from stronghold.predict.simulate import simulate
from stronghold.streaming.early_updates import FREE_MISSES
from stronghold.streaming.optimizer import make_scaler
from tests.faults.test_lane_failures import WITHIN_S, fail_backward, fail_in, run_steps
from tests.models import MODELS, loss_of
from tests.support.checkpoints import assert_same, resume, session, snapshot, train
from tests.support.mixed import MIXED, OWN
from tests.support.pairs import each, pairs
from tests.support.places import on_gpu
from tests.support.quiet import law_of_time, on_time
from tests.support.sleeping import SleepingModel, rates
from tests.support.spread import middles
from tests.support.training import (
    Factory,
    Run,
    assert_identical,
    config,
    initialized,
    moments_of,
    train_plain,
    train_windowed,
)
from tests.support.twin import Twin, twin

STEPS = 8
FEW_BYTES = 2048 * 24  # of a piece: a page of each array
SECOND = "second arrays of early updates"
ALL: dict[str, Any] = {"early_layers": "all"}
JITTER: dict[str, Any] = {"emulated": {"jitter_s": 0.0003}}
# updates outlast a backward
SLOW: dict[str, Any] = {"emulated": {"update_gbps": 0.002}}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every input is offloaded, as a large one is."""
    monkeypatch.setattr("stronghold.plan.host_memory.PIECE_BYTES", FEW_BYTES)
    monkeypatch.setattr("stronghold.streaming.activations.offload.MIN_OFFLOAD_BYTES", 1)


def engine_of(
    model: nn.Module, section: dict[str, Any], *, clipping: float = 0.0, precision: str = "fp32"
) -> Any:
    section = {"window": 2, **section}
    return initialized(model, config(clipping=clipping, precision=precision, section=section))


def step(engine: Any, make_batch: Any, seed: int) -> None:
    engine.backward(loss_of(engine(**make_batch(seed))))
    engine.step()


def is_any_early(engine: Any) -> bool:
    return any(layer.is_updated_early for layer in engine.inspect().layers)


def committed(engine: Any) -> list[int]:
    """The layers whose early updates the last gate has committed."""
    performed = engine.inspect().performed
    return [action.layer for action in performed if action.kind is Kind.COMMIT]


# -- bits ------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Case:
    """A training: `section` is the engine's alone, and both loops have the rest. `has_files`: host
    memory has no room for the moments of the last layers. `scale`: of the loss."""

    factory: Factory = MODELS["gpt"]
    section: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    chunk_blocks: Callable[[nn.Module], list[nn.Module]] | None = None
    has_files: bool = False
    scale: dict[str, Any] | None = None


def blocks_of(model: Any) -> list[nn.Module]:
    return list(model.model.layers)


CHUNKED: dict[str, Any] = {"chunk": 1}
SCALE = {"initial_scale_power": 30, "loss_scale_window": 2, "hysteresis": 1}
FP16 = {"precision": "fp16"}
BF16 = {"precision": "bf16"}
CASES = {
    "fp32": Case(),
    "bf16": Case(options=BF16),
    "lean": Case(options={"precision": "lean"}),
    "fp16": Case(options=FP16, scale=SCALE),
    "lion": Case(options={"optimizer": "lion", **BF16}),
    "lean lion": Case(options={"optimizer": "lion", "precision": "lean"}),
    "fp16 lion": Case(options={"optimizer": "lion", **FP16}, scale=SCALE),
    "sgd": Case(options={"optimizer": "sgd", **BF16}),
    "lean sgd": Case(options={"optimizer": "nesterov", "precision": "lean"}),
    "fp16 sgd": Case(options={"optimizer": "nesterov", **FP16}, scale=SCALE),
    "sums": Case(options={"accumulation": 3, **BF16}),
    "chunks": Case(factory=MODELS["llama"], section=CHUNKED, options=BF16, chunk_blocks=blocks_of),
    "files": Case(has_files=True, options=BF16),
    "inputs on the host": Case(section={"activations": "recompute_offload"}, options=BF16),
    "resident": Case(section={"resident_layers": "all", "resident_updates": "host"}, options=BF16),
    "on the gpu": Case(section=on_gpu("half", window=1), options=BF16),
    "own dtypes": Case(
        factory=MIXED["t5"](torch.bfloat16), section=OWN, options={"dtypes": "own", **BF16}
    ),
    "a frozen part": Case(factory=MODELS["frozen"]),
    "blocks left out": Case(factory=MODELS["layer_drop"]),
    "parameters left out": Case(factory=MODELS["structured"]),
}
CLIPS = ["none", "above all norms", "below all norms", "between norms"]


@functools.cache
def plain(name: str, clipping: float) -> Run:
    case = CASES[name]
    scaler = None
    if case.scale is not None:
        scaler = make_scaler(DeepSpeedFP16Config(enabled=True, **case.scale), 0)
    return train_plain(
        case.factory,
        steps=steps_of(case),
        clipping=clipping,
        scaler=scaler,
        chunks=(case.chunk_blocks, 1) if case.chunk_blocks is not None else None,
        **case.options,
    )


def steps_of(case: Case) -> int:
    return 24 if case.scale is not None else STEPS  # the first ones overflow


@functools.cache
def clipping_of(name: str, clip: str) -> float:
    norms = plain(name, 0.0).norms
    return {
        "none": 0.0,
        "above all norms": 4.0 * max(norms),
        "below all norms": 0.25 * min(norms),
        "between norms": statistics.median(norms),
    }[clip]


def trained(name: str, clipping: float, early: Any, path: Path, after: Any = None) -> Run:
    case = CASES[name]
    section = {"window": 2, **case.section, **JITTER, "early_layers": early}
    if case.has_files:
        section |= {"nvme": {"path": str(path)}, "host_memory": 330_000}
    options = {key: value for key, value in case.options.items() if key != "dtypes"}
    settings = config(clipping=clipping, section=section, **options)
    if case.scale is not None:
        settings["fp16"] = {"enabled": True, **case.scale}
    return train_windowed(case.factory, steps=steps_of(case), settings=settings, after=after)


@pytest.mark.parametrize(("name", "clip"), each(list(CASES), CLIPS))
def test_early_updates_have_the_bits_of_a_plain_loop(name: str, clip: str, tmp_path: Path) -> None:
    clipping, commits = clipping_of(name, clip), list[int]()

    def after(engine: Any, micro: int) -> None:
        assert engine.plan.early
        if CASES[name].has_files:
            assert engine.plan.nvme_bytes["moments"] > 0
        commits.append(len(committed(engine)))

    run, expected = (trained(name, clipping, "all", tmp_path, after), plain(name, clipping))
    assert_identical(run, expected)
    assert run.norms == expected.norms
    if clip == "below all norms":
        assert not any(commits)
    elif clip == "between norms":
        assert min(run.norms) < clipping < max(run.norms)
    else:
        assert any(commits)


@pytest.mark.slow  # of the plain loop's bits, which the gate's are in test_bits.py, too
@pytest.mark.parametrize(("name", "clip"), pairs(list(CASES), CLIPS))
def test_updates_behind_the_gate_have_the_bits_of_a_plain_loop(
    name: str, clip: str, tmp_path: Path
) -> None:
    clipping = clipping_of(name, clip)
    run, expected = trained(name, clipping, 0, tmp_path), plain(name, clipping)
    assert_identical(run, expected)
    assert run.norms == expected.norms


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_step_that_is_skipped_leaves_the_values_before_it(bad: float, accumulation: int) -> None:
    """The early updates of such a step have written their second arrays."""
    section = {**ALL, **JITTER}
    with twin(precision="bf16", clipping=1e4, accumulation=accumulation, section=section) as both:
        numbers = range(accumulation)
        for number in (0, 1):
            both.train(*(10 * number + k for k in numbers))
        before = moments_of(both.engine)
        for seed in numbers:
            loss = both.on(seed)(both.engine)
            both.engine.backward(loss * bad if seed == accumulation - 1 else loss)
            early = is_any_early(both.engine)
            both.engine.step()
        assert early
        assert both.engine.skipped_steps == 1
        both.check()
        for name, moments in moments_of(both.engine).items():
            assert all(map(torch.equal, moments, before[name]))
        for number in (3, 4):
            both.train(*(10 * number + k for k in numbers))


# -- what changes between backward and step --------------------------------------------------------
@pytest.mark.parametrize("clipping", [0.0, 1e4])
def test_a_rate_that_is_changed_before_the_gate_is_this_steps(clipping: float) -> None:
    with twin(clipping=clipping, section={**ALL, **JITTER}) as both:
        for number, rate in enumerate((1e-3, 1e-2, 0.0, 5e-4)):
            both.backward(both.on(number))
            assert is_any_early(both.engine)
            for optimizer in (both.engine.optimizer, both.shown):
                optimizer.param_groups[0]["lr"] = rate
            both.step()
            assert not committed(both.engine)
            both.train(10 + number)


@pytest.mark.parametrize("number", ["betas", "weight_decay", "eps"])
def test_any_number_that_is_changed_before_the_gate_is_this_steps(number: str) -> None:
    with twin(section=ALL, clipping=1e4) as both:
        both.train(0)
        both.backward(both.on(1))
        both.engine.synchronize()  # the updates have ended
        for optimizer in (both.engine.optimizer, both.shown):
            optimizer.param_groups[0][number] = (0.5, 0.6) if number == "betas" else 0.25
        both.step()
        assert not committed(both.engine)
        both.train(2)


@pytest.mark.parametrize("ends", [False, True], ids=["not begun", "ended"])
def test_a_late_gradient_cancels_the_early_update(ends: bool) -> None:
    """A second backward adds to gradients that an early update has used, or will use."""
    with twin(section={**ALL, **(JITTER if ends else SLOW)}, clipping=1e4) as both:
        for number in range(3):
            both.backward(both.on(2 * number))
            assert is_any_early(both.engine)
            if ends:
                both.engine.synchronize()
            both.backward(both.on(2 * number + 1))
            both.step()


@pytest.mark.parametrize("ends", [False, True], ids=["under way", "ended"])
def test_weights_between_backward_and_step_are_those_before(ends: bool) -> None:
    with twin(section={**ALL, **({} if ends else SLOW)}, clipping=1e4) as both:
        for number in range(3):
            both.backward(both.on(number))
            assert is_any_early(both.engine)
            if ends:
                both.engine.synchronize()
            ours, plain_ones = both.model.parameters(), both.plain.parameters()
            assert all(map(torch.equal, ours, plain_ones))
            with torch.no_grad():
                assert torch.equal(both.on(9)(both.engine), both.on(9)(both.plain))
            both.step()
            assert all(map(torch.equal, both.model.parameters(), both.plain.parameters()))


@pytest.mark.parametrize("ends", [False, True], ids=["under way", "ended"])
def test_what_is_written_between_backward_and_step_is_stepped_from(ends: bool) -> None:
    with twin(section={**ALL, **({} if ends else SLOW)}, clipping=1e4) as both:
        for number in range(3):
            both.backward(both.on(number))
            assert is_any_early(both.engine)
            if ends:
                both.engine.synchronize()
            with torch.no_grad():
                for model in (both.model, both.plain):
                    model.blocks[1].mlp.up.weight.mul_(0.5)
                    model.embedding.weight[3] = 0.125
            both.step()


def test_an_alias_that_is_kept_shows_the_new_values() -> None:
    """A layer whose memory is seen from outside is not committed: its values change in place."""
    with twin(section={**ALL, **JITTER}, clipping=1e4) as both:
        both.train(0)
        assert committed(both.engine)
        kept = [p.data for p in both.model.parameters()]
        for number in range(1, 4):
            both.train(number)
            assert not committed(both.engine)
            both.engine.synchronize()
            assert all(map(torch.equal, kept, both.plain.parameters()))
        kept.clear()
        both.train(5)
        both.train(6)
        assert committed(both.engine)


def test_an_alias_that_is_made_after_the_early_update_shows_the_new_values() -> None:
    with twin(section=ALL, clipping=1e4) as both:
        both.train(0)
        both.backward(both.on(1))
        assert is_any_early(both.engine)
        both.engine.synchronize()
        kept = [p.data for p in both.model.parameters()]
        both.step()
        both.engine.synchronize()
        assert all(map(torch.equal, kept, both.plain.parameters()))


def when_backward_ends(model: Any, run: Callable[[nn.Parameter], None]) -> None:
    """Run it on a weight of the last block, near the end of backward: the block's gradients have
    come, and its early update is queued or has ended."""
    weight = model.blocks[2].mlp.up.weight
    model.embedding.weight.register_hook(lambda _: run(weight))


@pytest.mark.parametrize("section", [{}, SLOW, {"resident_layers": "all"}], ids=str)
def test_an_alias_that_backward_makes_shows_the_new_values(section: dict[str, Any]) -> None:
    with twin(section={**ALL, "resident_updates": "host", **section}, clipping=1e4) as both:
        kept: list[torch.Tensor] = []
        when_backward_ends(both.model, lambda weight: kept.append(weight.data))
        for number in range(3):
            both.backward(both.on(number))
            assert is_any_early(both.engine)
            both.step()
            both.engine.synchronize()
            assert torch.equal(kept.pop(), both.plain.blocks[2].mlp.up.weight)


@pytest.mark.parametrize("section", [{}, SLOW, {"resident_layers": "all"}], ids=str)
def test_what_is_written_in_backward_is_stepped_from(section: dict[str, Any]) -> None:
    @torch.no_grad()
    def halve(weight: nn.Parameter) -> None:
        weight.mul_(0.5)

    with twin(section={**ALL, "resident_updates": "host", **section}, clipping=1e4) as both:
        for model in (both.model, both.plain):
            when_backward_ends(model, halve)
        for number in range(3):
            both.backward(both.on(number))
            assert is_any_early(both.engine)
            both.step()


class Two(nn.Module):
    """A layer with two weights, of which a batch may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return torch.tanh(self.second(x)) if both else x


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Two() for _ in range(4))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, both)
        return x.square().mean()


def halves() -> Any:
    """Steps 2, 3 and 5 give the half of each layer no gradient."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Stack()

    def make_batch(seed: int) -> dict[str, Any]:
        x = torch.randn(2, 16, generator=torch.Generator().manual_seed(seed))
        return {"x": x, "both": seed not in (2, 3, 5)}

    return model, make_batch


@pytest.mark.parametrize("early", [1, 3, "all"])
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "nesterov"])
def test_parameters_without_a_gradient_keep_their_values(optimizer: str, early: Any) -> None:
    commits: list[int] = []
    settings = config(clipping=0.0, optimizer=optimizer, section={**JITTER, "early_layers": early})

    def after(engine: Any, micro: int) -> None:
        commits.append(len(committed(engine)))

    run = train_windowed(halves, steps=STEPS, settings=settings, after=after)
    assert_identical(run, train_plain(halves, steps=STEPS, clipping=0.0, optimizer=optimizer))
    assert any(commits[step] for step in (2, 3, 5))


# -- bytes -----------------------------------------------------------------------------------------
@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [0, 1, 3, "all"])
@pytest.mark.parametrize("name", ["gpt", "weird_model", "frozen", "uneven"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "lean"])
def test_peaks_equal_the_plan_and_the_simulator(precision: str, name: str, count: Any) -> None:
    model, make_batch = MODELS[name]()
    engine = engine_of(model, {"early_layers": count}, clipping=1e4, precision=precision)
    step(engine, make_batch, 0)
    step(engine, make_batch, 1)
    report, plan, now = engine.memory_report(), engine.plan, engine.inspect()
    second = sum(
        layer.arrays[array].nbytes
        for layer in now.layers
        if layer.index in plan.early
        for array in layer.arrays
        if array not in ("gradients", "accumulated")
    )
    engine.destroy()
    able = [layer for layer in now.layout.layers if layer.trainable_numel == layer.numel > 0]
    wanted = len(able) if count == "all" else count
    positions = middles([layer.numel for layer in able], wanted)
    assert sorted(plan.early) == [able[position].index for position in positions]
    assert plan.host_bytes[SECOND] == second
    assert report.host_peak == report.host_planned == plan.host_total_bytes
    assert report.gpu_peak == report.gpu_planned
    loads = (LayerWork(forward_s=1e-3, backward_s=2e-3),) * len(now.layout.layers)
    work, machine = Workload(layers=loads), rates(1.0, memory_gbps=4.0)
    found = simulate(now.layout, plan, work, machine, asynchronous=False)
    assert (found.gpu_peak_bytes, found.host_peak_bytes) == (report.gpu_peak, report.host_peak)


@pytest.mark.parametrize(("precision", "bytes_each"), [("bf16", 12), ("fp32", 12), ("lean", 5.125)])
def test_an_early_layer_has_its_weights_masters_and_moments_twice(
    precision: str, bytes_each: float
) -> None:
    engine = engine_of(SleepingModel([(1 << 15, 0.0, 0.0)] * 4), ALL, precision=precision)
    plan = engine.plan
    engine.destroy()
    assert plan.host_bytes[SECOND] == bytes_each * 4 * (1 << 15)


@law_of_time
def test_a_refined_plan_updates_early_without_a_change_of_bits() -> None:
    """The link and the CPU's Adam are paced, compute is a sleep."""
    runs, early = [], []
    for count in (None, 0):
        section: dict[str, Any] = {"window": 3, "cpu_threads": 1, "early_layers": count}
        section["emulated"] = {"update_gbps": 0.2, "poison": False}
        section["host_memory"] = 1 << 30
        engine = engine_of(SleepingModel([(1 << 16, 0.002, 0.004)] * 6), section)
        x, losses = torch.ones(64), []
        for _ in range(WARM_UP_STEPS + TRACED_STEPS + 3):
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().clone())
        report, plan = engine.memory_report(), engine.plan
        weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
        runs.append(Run(losses=losses, weights=weights, moments=moments_of(engine)))
        engine.destroy()
        assert report.host_peak == report.host_planned
        early.append(len(plan.early))
    assert_identical(*runs)
    assert not early[1]
    on_time(early[0] > 0, "the search found no early update that is worth its bytes")


def test_more_than_there_are_is_refused_by_name() -> None:
    model, _ = MODELS["gpt"]()
    with pytest.raises(ConfigError, match=r"stronghold\.early_layers: got 99"):
        engine_of(model, {"early_layers": 99})


def test_the_lanes_do_what_the_schedule_has_in_its_order() -> None:
    model = SleepingModel([(4097, 0.0, 0.002)] * 8)
    engine = engine_of(model, {"window": 3, "early_layers": 3})
    engine.inspect().device.record_spans(True)
    engine.backward(engine(torch.ones(64, requires_grad=True)))
    engine.step()
    engine.synchronize()
    now, early = engine.inspect(), sorted(engine.plan.early)
    engine.destroy()
    updates = [s.name for s in now.operations if s.lane == "update"]
    behind = [f"update {layer}" for layer in range(8) if layer not in early]
    assert [name for name in updates if name in behind] == behind
    assert [n for n in updates if n not in behind] == [f"update early {k}" for k in early[::-1]]
    drains = [s.name for s in now.operations if s.name.startswith("offload ")]
    offloads = [action.layer for action in now.schedule if action.kind is Kind.OFFLOAD]
    assert drains == [f"offload {layer}" for layer in offloads]
    gated = [a.layer for a in now.schedule if a.kind in (Kind.COMMIT, Kind.UPDATE)][len(early) :]
    assert gated == list(range(8))


# -- other steps -----------------------------------------------------------------------------------
@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("beside", [False, True], ids=["waiting", "beside training"])
def test_a_run_resumes_with_another_number_of_early_layers(
    beside: bool, clipping: float, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"precision": "bf16", "clipping": clipping}
    section = {**SLOW, "async_checkpoint": beside, "window": 2, "early_layers": 2}
    with session(section=section, **options) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        losses = train(engine, 3)
        expected = snapshot(engine)
    for count in (0, 1, 3, "all"):
        with session(section={"window": 1, "early_layers": count}, **options) as engine:
            resume(engine, tmp_path)
            assert all(map(torch.equal, train(engine, 3), losses))
            assert_same(snapshot(engine), expected)


def test_whoever_looks_sees_the_same_weights_with_any_number_of_early_layers(
    tmp_path: Path,
) -> None:
    """Between backward and step, and between steps: parameters, an evaluation, a checkpoint."""
    found = []
    for count in (0, 2, "all"):
        with made({"early_layers": count, **SLOW}) as (engine, make_batch):
            seen = []
            for number in range(3):
                engine.backward(loss_of(engine(**make_batch(number))))
                seen += [p.detach().clone() for p in engine.module.parameters()]
                engine.step()
                engine.eval()
                with torch.no_grad():
                    seen.append(loss_of(engine(**make_batch(9))))
                engine.train()
                engine.save_checkpoint(tmp_path / str(count))
            found.append((seen, moments_of(engine)))
    for (seen, moments), (other, others) in itertools.pairwise(found):
        assert all(map(torch.equal, seen, other))
        assert all(all(map(torch.equal, moments[name], others[name])) for name in moments)


def test_a_failed_backward_with_every_layer_early_changes_nothing() -> None:
    runs = []
    for fails in (True, False):
        with made({**ALL, **JITTER}) as (engine, make_batch):
            step(engine, make_batch, 0)
            if fails:
                before = {k: v.clone() for k, v in engine.module_state_dict().items()}
                fail_backward(engine, make_batch)
                assert not is_any_early(engine)
                now = engine.module_state_dict()
                assert all(torch.equal(now[name], value) for name, value in before.items())
            step(engine, make_batch, 1)
            weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
            runs.append(Run(weights=weights, moments=moments_of(engine)))
    assert_identical(*runs)


def test_a_step_that_is_dropped_after_backward_changes_nothing() -> None:
    """Another backward, which fails, drops the step whose early updates have ended."""
    with twin(section=ALL, clipping=1e4) as both:
        both.train(0)
        both.backward(both.on(1))
        assert is_any_early(both.engine)
        both.engine.synchronize()
        fail_backward(both.engine, both.make_batch)
        both.drop_plain()
        both.check()
        both.train(2)
        both.train(3)


def test_a_failing_operation_of_an_early_layer_names_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with made({"early_layers": 3}) as (engine, make_batch):
        step(engine, make_batch, 0)
        layer = min(engine.plan.early)
        fail_in(engine, monkeypatch, f"update early {layer}")
        with pytest.raises(LaneError, match=f"update early {layer} failed on the update lane"):
            run_steps(engine, make_batch, range(1, 4))


def test_a_committed_update_that_failed_is_told_by_destroy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, make_batch = MODELS["gpt"]()
    engine = engine_of(model, ALL)
    step(engine, make_batch, 0)
    layer = max(engine.plan.early)
    fail_in(engine, monkeypatch, f"update early {layer}")

    def to_the_end() -> None:
        try:
            step(engine, make_batch, 1)
        finally:
            engine.destroy()

    with pytest.raises(LaneError, match=f"update early {layer} failed"):
        to_the_end()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    loss_of(model(**make_batch(0))).backward()


@pytest.mark.parametrize("section", [{}, SLOW], ids=["ended", "under way"])
def test_an_engine_that_is_closed_before_the_step_gives_the_old_weights_back(
    section: dict[str, Any],
) -> None:
    both = Twin(section={**ALL, **section}, clipping=1e4)
    both.train(0)
    both.engine.backward(both.on(1)(both.engine))
    assert is_any_early(both.engine)
    if not section:
        both.engine.synchronize()
    both.engine.destroy()
    expected = both.plain.state_dict()
    assert all(torch.equal(v, expected[name]) for name, v in both.model.state_dict().items())


def test_a_withdrawn_update_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates that have not begun at the gate run once: behind it, in place."""
    # else the training thread performs short operations
    jitter = {"emulated": {"jitter_s": 1e-6}}
    engine = engine_of(SleepingModel([(1 << 12, 0.0, 0.0)] * 8), {**ALL, **jitter})
    lane, ran = engine.inspect().device.update, list[str]()
    begun, opened = threading.Event(), threading.Event()

    def noted(name: str, work: Callable[[], None], *args: Any, **declared: Any) -> Any:
        def noting() -> None:
            if name == "update early 7":
                begun.set()
                opened.wait(WITHIN_S)
            ran.append(name)
            work()

        return submit(name, noting, *args, **declared)

    submit = lane.submit
    monkeypatch.setattr(lane, "submit", noted)
    engine.backward(engine(torch.ones(64, requires_grad=True)))
    assert all(layer.is_updated_early for layer in engine.inspect().layers)
    assert begun.wait(WITHIN_S)  # else the gate withdraws it, too
    engine.step()
    opened.set()
    engine.synchronize()
    commits = committed(engine)
    engine.destroy()
    assert commits == [7]
    assert ran == ["update early 7", *(f"update {layer}" for layer in range(7))]


@pytest.mark.parametrize("clip", ["never", "always"])
def test_the_record_of_a_step_counts_its_early_updates(clip: str) -> None:
    """Each early layer is committed, or dropped, or left to the gate."""
    counts = []
    with made({**ALL, **JITTER}, clipping=1e6 if clip == "never" else 1e-6) as (engine, make_batch):
        num_early = len(engine.plan.early)
        for number in range(4):
            step(engine, make_batch, number)
            early = engine.last_record.early
            assert early.committed == len(committed(engine))
            assert early.committed + early.left + early.dropped == num_early
            counts.append(early)
    assert any(early.committed for early in counts) == (clip == "never")
    if clip == "always":
        assert counts[FREE_MISSES + 1].left == num_early  # they pause


def test_an_early_update_of_a_skipped_step_is_dropped() -> None:
    with made({**ALL, **JITTER}, clipping=1e6) as (engine, make_batch):
        step(engine, make_batch, 0)
        engine.backward(loss_of(engine(**make_batch(1))) * float("inf"))
        engine.synchronize()
        engine.step()
        early = engine.last_record.early
        assert engine.skipped_steps == 1
        assert (early.committed, early.left) == (0, 0)
        assert early.dropped > 0


def test_an_early_update_that_a_late_gradient_cancels_is_dropped() -> None:
    with made(ALL, clipping=1e6) as (engine, make_batch):
        step(engine, make_batch, 0)
        engine.backward(loss_of(engine(**make_batch(1))))
        engine.synchronize()
        engine.backward(loss_of(engine(**make_batch(2))))
        engine.step()
        assert engine.last_record.early.dropped > 0


@pytest.mark.parametrize("first", ["a read", "a forward", "a checkpoint"])
def test_a_reader_after_the_gate_waits_for_a_committed_update(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update of the layer that the next forward needs first has begun at the gate, and ends
    after it. No later update of the lane makes the reader wait in its place."""
    with twin(section=ALL, clipping=1e4, precision="bf16") as both:
        lane, begun = both.engine.inspect().device.update, threading.Event()

        def late(name: str, work: Callable[[], None], *args: Any, **declared: Any) -> Any:
            def sleeping() -> None:
                begun.set()
                time.sleep(0.05)
                work()

            is_first = name == "update early 0"
            return submit(name, sleeping if is_first else work, *args, **declared)

        submit = lane.submit
        monkeypatch.setattr(lane, "submit", late)
        for number in range(3):
            begun.clear()
            both.backward(both.on(number))
            assert begun.wait(WITHIN_S)
            both.step()
            if first == "a read":
                assert all(map(torch.equal, both.model.parameters(), both.plain.parameters()))
            elif first == "a checkpoint":
                both.engine.save_checkpoint(tmp_path)
            assert Action(kind=Kind.COMMIT, layer=0) in both.engine.inspect().performed


@contextmanager
def made(section: dict[str, Any], clipping: float = 0.0) -> Iterator[Any]:
    torch.manual_seed(0)
    model, make_batch = MODELS["gpt"]()
    engine = engine_of(model, section, clipping=clipping)
    try:
        yield engine, make_batch
    finally:
        engine.destroy()
