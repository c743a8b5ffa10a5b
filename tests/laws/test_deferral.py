"""Laws of deferred updates: they come in forward order after backward, cost what is planned,
and leaves nothing behind when a step fails or the engine is closed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stronghold.errors import ConfigError, LaneError
from stronghold.model.partition import partition
from stronghold.plan.cost import LayerLoad, Workload
from stronghold.plan.schedule import Kind
from stronghold.predict.simulate import simulate
from stronghold.refine import TRACED_STEPS, UNTOLD_STEPS
from tests.faults.test_lane_failures import fail_backward, fail_in, run_steps
from tests.models import MODELS, loss_of
from tests.support.checkpoints import assert_same, session, snapshot, train
from tests.support.quiet import law_of_time, on_time
from tests.support.sleeping import SleepingModel, rates
from tests.support.training import Run, assert_identical, config, initialized, moments_of

STEPS = 4
PAGE_NUMEL = 2048
ALL = 99  # of whatever is there


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few bytes as hold a page of each array, so that layers are larger than the ring."""
    monkeypatch.setattr("stronghold.plan.plan.PIECE_BYTES", PAGE_NUMEL * 24)


def section_of(name: str, count: int, **section: Any) -> dict[str, Any]:
    """`count` of the model's blocks deferred."""
    blocks = sum(layer.streamed for layer in partition(MODELS[name]()[0], None).layers)
    return {"window": 2, "deferred_layers": min(count, blocks), **section}


@pytest.mark.parametrize("name", ["gpt", "weird_model", "frozen", "uneven"])
@pytest.mark.parametrize("spill", [None, "moments"])
def test_peaks_equal_the_plan_and_the_simulator(
    spill: str | None, name: str, tmp_path: Path
) -> None:
    model, make_batch = MODELS[name]()
    section = section_of(name, 2)
    if spill is not None:
        section["nvme"] = {"path": str(tmp_path), "spill": spill}
    engine = engine_of(model, section)
    step(engine, make_batch, 0)
    step(engine, make_batch, 1)
    report, plan, found_sizes = engine.memory_report(), engine.plan, engine.inspect().layout
    engine.destroy()
    held = sum(found_sizes.layers[index].trainable_numel for index in plan.deferred)
    assert plan.host_bytes["deferred gradients"] == 2 * held > 0
    assert report.host_peak == report.host_planned == plan.host_total_bytes
    assert report.gpu_peak == report.gpu_planned
    loads = tuple(LayerLoad(forward_s=1e-3, backward_s=2e-3) for _ in found_sizes.layers)
    work = Workload(layers=loads)
    found = simulate(
        found_sizes,
        plan,
        work,
        rates(1.0, memory_gbps=4.0),
        asynchronous=False,
    )
    assert (found.gpu_peak_bytes, found.host_peak_bytes) == (report.gpu_peak, report.host_peak)


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_lanes_do_what_the_schedule_has_in_its_order(clipping: float) -> None:
    """Deferred updates follow backward in forward order, and so do those behind the gate."""
    model = SleepingModel([(4097, 0.0, 0.002)] * 8)
    section = {"window": 3, "deferred_layers": 3}
    engine = engine_of(model, section, precision="fp32", clipping=clipping)
    engine.inspect().device.record_spans(True)
    x = torch.ones(64)
    engine.backward(engine(x))
    assert all(state.is_updated_early != bool(clipping) for state in engine.inspect().layers)
    engine.step()
    engine.synchronize()
    spans = engine.inspect().operations
    plan, actions = engine.plan, engine.inspect().schedule
    engine.destroy()
    for kind in (Kind.DRAIN, Kind.UPDATE):
        done = [s.name for s in spans if s.lane == kind.value and s.name.startswith(kind.value)]
        assert done == [str(action) for action in actions if action.kind is kind]
    deferred = sorted(plan.deferred)
    assert len(deferred) == (0 if clipping else 3)
    backward_ends = max(s.start_s + s.duration_s for s in spans if s.name == "backward 0")
    for layer in deferred:
        begun = next(s.start_s for s in spans if s.name == f"update {layer}")
        assert begun >= backward_ends


@pytest.mark.parametrize("count", [0, 1, ALL])
def test_a_step_reads_and_writes_what_is_planned(count: int, tmp_path: Path) -> None:
    """Also with the first pieces loaded before backward begins."""
    with made("gpt", count, tmp_path, nvme={"path": str(tmp_path), "spill": "moments"}) as both:
        engine, make_batch = both
        for number in range(STEPS):
            step(engine, make_batch, number)
        engine.synchronize()
        store, plan = engine.inspect().files, engine.plan
        assert store.bytes_read == STEPS * plan.traffic.nvme_read_bytes
        assert store.bytes_written == STEPS * plan.traffic.nvme_written_bytes


class Part(nn.Module):
    """Four blocks, of which a batch uses some: gradients come from the last one to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, first: int, last: int) -> torch.Tensor:
        for block in self.blocks[first:last]:
            x = torch.tanh(block(x))
        return x.square().mean()


def test_what_was_loaded_ahead_is_dropped_when_backward_ends(tmp_path: Path) -> None:
    """The third step leaves the first blocks' pieces in the ring; their weights, in files, are
    then written from outside, and the fourth step begins with these blocks."""
    nvme = {"path": str(tmp_path), "spill": "weights"}
    found = []
    for section in ({}, {"nvme": nvme, "emulated": {"jitter_s": 0.0005}}):
        torch.manual_seed(0)
        engine = engine_of(Part(), {"window": 2, "deferred_layers": 0, **section})
        x = torch.randn(2, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
        for first, last in ((0, 4), (0, 4), (2, 4), (0, 2), (0, 4)):
            if last == 2:
                state = {name: 2 * value for name, value in engine.module_state_dict().items()}
                engine.module.load_state_dict(state)
            engine.backward(engine(x, first, last))
            engine.step()
        weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
        found.append(Run(weights=weights, moments=moments_of(engine)))
        engine.destroy()
    assert_identical(*found)


# -- between steps ---------------------------------------------------------------------------------
def test_weights_are_new_for_whoever_waits_for_them(tmp_path: Path) -> None:
    """Between backward and step, and between steps: raw parameters, an evaluation, a checkpoint."""
    found = []
    for count in (0, 2):
        with made("gpt", count, tmp_path / str(count), emulated={"update_gbps": 0.002}) as both:
            engine, make_batch = both
            seen = []
            for number in range(3):
                engine.backward(loss_of(engine(**make_batch(number))))
                engine.synchronize()
                seen += [p.detach().clone() for p in engine.module.parameters()]
                engine.step()
                engine.eval()
                with torch.no_grad():
                    seen.append(loss_of(engine(**make_batch(9))))
                engine.train()
                engine.save_checkpoint(tmp_path / str(count))
            found.append((seen, moments_of(engine)))
    for here, there in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(here, there)
    for name, moments in found[0][1].items():
        assert all(map(torch.equal, moments, found[1][1][name]))


@pytest.mark.parametrize("beside", [False, True], ids=["waiting", "beside training"])
def test_a_run_resumes_with_other_layers_deferred(beside: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "bf16", "clipping": 0.0}
    slow = {"emulated": {"update_gbps": 0.002}, "async_checkpoint": beside, "window": 2}
    with session(section={**slow, "deferred_layers": 2}, **options) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        losses = train(engine, 3)
        expected = snapshot(engine)
    for count in (0, 1, 3):
        with session(section={"window": 1, "deferred_layers": count}, **options) as engine:
            engine.load_checkpoint(tmp_path)
            assert all(map(torch.equal, train(engine, 3), losses))
            assert_same(snapshot(engine), expected)


# -- steps that fail, engines that close -----------------------------------------------------------
def test_a_failed_backward_with_every_update_deferred_changes_nothing() -> None:
    weights = []
    for fails in (True, False):
        model, make_batch = MODELS["sequential"]()
        engine = engine_of(model, section_of("sequential", ALL), precision="fp32")
        assert len(engine.plan.deferred) == sum(n.trainable_numel > 0 for n in layers_of(engine))
        step(engine, make_batch, 0)
        if fails:
            fail_backward(engine, make_batch)
        step(engine, make_batch, 1)
        weights.append({k: v.clone() for k, v in engine.module_state_dict().items()})
        engine.destroy()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.parametrize("verb", ["drain", "norm", "update"])
def test_a_failing_operation_of_a_deferred_layer_names_itself(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And weights whose gradients never came do not change."""
    model, make_batch = MODELS["gpt"]()
    engine = engine_of(model, section_of("gpt", 1))
    step(engine, make_batch, 0)
    engine.synchronize()
    (layer,) = engine.plan.deferred
    state = engine.inspect().layers[layer]
    before = state.weights.clone()
    fail_in(engine, monkeypatch, f"{verb} {layer}")
    with pytest.raises(LaneError, match=f"{verb} {layer} failed"):
        run_steps(engine, make_batch, range(1, 3))
    after = state.weights.clone()
    engine.destroy()
    assert torch.equal(before, after)


def test_an_engine_that_closes_between_backward_and_step_gives_new_weights_back() -> None:
    found = []
    for count in (0, ALL):
        model, make_batch = MODELS["gpt"]()
        section = section_of("gpt", count, emulated={"update_gbps": 0.002})
        engine = engine_of(model, section)
        step(engine, make_batch, 0)
        engine.backward(loss_of(engine(**make_batch(1))))
        engine.destroy()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


# -- what is asked ---------------------------------------------------------------------------------


def test_more_than_there_are_is_refused_by_name() -> None:
    model, _ = MODELS["gpt"]()
    with pytest.raises(ConfigError, match=r"stronghold\.deferred_layers: got 99"):
        engine_of(model, {"deferred_layers": 99})


def layers_of(engine: Any) -> Any:
    return engine.inspect().layout.layers


def engine_of(
    model: torch.nn.Module,
    section: dict[str, Any],
    *,
    clipping: float = 0.0,
    precision: str = "bf16",
) -> Any:
    return initialized(model, config(clipping=clipping, precision=precision, section=section))


@contextmanager
def made(name: str, count: int, path: Path, **section: Any) -> Iterator[Any]:
    torch.manual_seed(0)
    model, make_batch = MODELS[name]()
    engine = engine_of(model, section_of(name, count, **section))
    try:
        yield engine, make_batch
    finally:
        engine.destroy()


def step(engine: Any, make_batch: Any, seed: int) -> None:
    engine.backward(loss_of(engine(**make_batch(seed))))
    engine.step()


# -- what the first steps show ---------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["disk", "adam"])
@law_of_time
def test_refined_plans_defer_without_a_change_of_bits(kind: str, tmp_path: Path) -> None:
    """The link, the disk and the CPU's Adam are paced, compute is a sleep."""
    runs, deferred = [], []
    for count in (None, 0):
        model = SleepingModel([(1 << 16, 0.002, 0.004)] * 6)
        nvme = {"path": str(tmp_path), "spill": "moments"}
        pace = {"nvme_gbps": 0.05} if kind == "disk" else {"update_gbps": 0.2}
        section: dict[str, Any] = {"window": 3, "cpu_threads": 1, "deferred_layers": count}
        section |= {"nvme": nvme} if kind == "disk" else {}
        engine = engine_of(
            model, {**section, "emulated": {**pace, "poison": False}}, precision="fp32"
        )
        x = torch.ones(64)
        losses = []
        for _ in range(UNTOLD_STEPS + TRACED_STEPS + 3):
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().clone())
        report, plan = engine.memory_report(), engine.plan
        weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
        runs.append(Run(losses=losses, weights=weights, moments=moments_of(engine)))
        engine.destroy()
        assert report.host_peak == report.host_planned
        deferred.append(bool(plan.deferred))
    assert_identical(*runs)
    assert not deferred[1]
    on_time(deferred[0], "the search found nothing to defer")
