"""Batches that are larger than those by which the plan was refined: on a device whose memory ends,
activations included, they train with the bits of a plain loop, or the plan makes room for the next.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn

import stronghold
from stronghold.predict.refine import GPU_SHARE, TRACED_STEPS, WARM_UP_STEPS
from tests.models import MODELS, loss_of, token_batch
from tests.support.counted import of_bytes
from tests.support.pairs import each
from tests.support.quiet import law_of_time, on_time
from tests.support.ranks import run_ranks
from tests.support.training import (
    Run,
    assert_identical,
    config,
    initialized,
    moments_of,
    train_plain,
)

REFINED = WARM_UP_STEPS + TRACED_STEPS  # steps
# so that whatever stays on the device pays
SLOW = {"link_gbps": 0.003, "update_gbps": 0.015}
SHORT, LONG = 64, 512  # tokens of a sequence, of which a batch has two
# What the model takes with everything on the device: 1.3 MB with short batches, 7.2 with long ones.
# With long ones the least is 2.6 MB, and less than 0.5 of it are the model's.
SMALL_BYTES, MIDDLE_BYTES, LARGE_BYTES = 3_300_000, 4_400_000, 7_150_000
SUM_BYTES = 4 * 25632  # of fp32 sums
MODES: dict[str, dict[str, Any]] = {
    "gated": {"clipping": 1.0, "accumulation": 1},
    "as they come": {"clipping": 0.0, "accumulation": 1},
    "accumulated": {"clipping": 1.0, "accumulation": 2},
}


def llama(lengths: Any) -> Any:
    """Makes a model, and micro-batches of `lengths(micro)` tokens a sequence."""

    def factory() -> Any:
        model, _ = MODELS["llama"]()
        return model, lambda micro: token_batch(micro, length=lengths(micro))

    return factory


def section_of(total_bytes: int) -> dict[str, Any]:
    return {"gpu_memory": total_bytes, "cpu_threads": 1, "emulated": dict(SLOW)}


def attempt(engine: Any, batch: dict[str, Any], plain_backward: bool) -> torch.Tensor:
    loss = loss_of(engine(**batch))
    if plain_backward:
        loss.backward()
    else:
        engine.backward(loss)
    return loss.detach().clone()


def trained(
    factory: Any, steps: int, settings: dict[str, Any], look: Any, *, plain_backward: bool = False
) -> tuple[Run, list[str]]:
    """The run of the engine, in which what ran out of memory is tried again, from the beginning of
    its step where that was given up; and the words of these errors. `look` is called with the
    engine after each step; `plain_backward`: as `loss.backward()`."""
    torch.manual_seed(0)
    model, make_batch = factory()
    engine, run, errors = initialized(model, settings), Run(), list[str]()
    torch.manual_seed(1)
    with engine.inspect().device.counted():
        while (micro := engine.micro_steps) < steps * engine.gradient_accumulation_steps():
            assert len(errors) < 8, errors
            del run.losses[micro:]
            try:
                loss = attempt(engine, make_batch(micro), plain_backward)
            except torch.OutOfMemoryError as error:
                ours = isinstance(error, stronghold.OutOfMemoryError)
                # to Accelerate, and so to the Trainer
                known = should_reduce_batch_size(error)
                errors.append(f"{ours} {known} {error}")
                if not ours:  # the engine hears of it when it is called next
                    engine.zero_grad()
                continue
            engine.step()
            run.losses.append(loss)
            look(engine)
    run.weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    run.moments = moments_of(engine)
    engine.destroy()
    return run, errors


@pytest.mark.parametrize(("mode", "total_bytes"), each(list(MODES), [SMALL_BYTES, MIDDLE_BYTES]))
@law_of_time
def test_a_run_whose_batches_grow_trains_with_the_same_bits(
    mode: str, total_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 steps of 128 tokens, then 1024: with accumulation from the middle of a step on."""
    of_bytes(total_bytes, monkeypatch)
    first = 10 * MODES[mode]["accumulation"] + MODES[mode]["accumulation"] // 2
    factory, steps = llama(lambda micro: SHORT if micro < first else LONG), 13
    plans: list[Any] = []
    run, errors = trained(
        factory,
        steps,
        config(section=section_of(total_bytes), **MODES[mode]),
        lambda engine: plans.append(engine.plan),
    )
    assert not errors
    assert_identical(run, train_plain(factory, steps=steps, **MODES[mode]))
    short, long = plans[first - 1], plans[-1]
    on_time(short.whole, "the search did not take the model whole")
    assert long is not short
    assert "keep" not in long.activations[1:3]


class Hiding(nn.Module):
    """Takes its batch in an object: nobody sees from outside how large it is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: SimpleNamespace) -> torch.Tensor:
        return loss_of(self.model(**vars(batch)))


def hidden(factory: Any) -> Any:
    def made() -> Any:
        model, make_batch = factory()
        return Hiding(model), lambda micro: {"batch": SimpleNamespace(**make_batch(micro))}

    return made


RUNS_OUT_IN = {
    "forward, small": ("engine.forward", SMALL_BYTES),
    "forward, middle": ("engine.forward", MIDDLE_BYTES),
    "backward": ("engine.backward", LARGE_BYTES),
    "loss.backward": ("loss.backward", LARGE_BYTES),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("place", "mode"), each(list(RUNS_OUT_IN), ["gated", "accumulated"]))
@law_of_time
def test_what_runs_out_of_memory_is_given_up_and_the_next_plan_has_more_room(
    mode: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step begins again where it ended in a backward; after a forward it goes on."""
    call, total_bytes = RUNS_OUT_IN[place]
    if mode == "accumulated":
        total_bytes += SUM_BYTES
    of_bytes(total_bytes, monkeypatch)
    first = 5 * MODES[mode]["accumulation"] + MODES[mode]["accumulation"] // 2
    factory, steps = hidden(llama(lambda micro: SHORT if micro < first else LONG)), 8
    plans: list[Any] = []
    run, errors = trained(
        factory,
        steps,
        config(section=section_of(total_bytes), **MODES[mode]),
        lambda engine: plans.append(engine.plan),
        plain_backward=call == "loss.backward",
    )
    assert_identical(run, train_plain(factory, steps=steps, **MODES[mode]))
    on_time(plans[first - 1].whole, "the search did not take the model whole")
    (error,) = errors
    assert error.startswith("False True" if call == "loss.backward" else "True True")
    if call != "loss.backward":
        assert f"It was in {call}" in error
        assert "the plan changes to one that leaves more room before the next forward" in error
    assert plans[-1] is not plans[first - 1]


def logged(
    lengths: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    **model: Any,
) -> str:
    """What the log says of the refined plan after steps of these lengths."""
    of_bytes(50_000_000, monkeypatch)
    # whatever is predicted
    monkeypatch.setattr("stronghold.predict.refine.CHANGE_SHARE", 1e9)
    made, _ = MODELS["llama"](**model)
    engine = initialized(made, config(section=section_of(50_000_000)))
    with caplog.at_level("INFO", logger="stronghold"), engine.inspect().device.counted():
        for step, length in enumerate(lengths):
            attempt(engine, token_batch(step, length=length), False)
            engine.step()
    engine.destroy()
    return next(m for m in caplog.messages if m.startswith(f"refined after {REFINED} steps"))


@pytest.mark.parametrize(
    ("longest", "others", "expected"),
    [
        (32, SHORT, "128 tokens ("),
        (131072, SHORT, "128 tokens ("),
        (131072, 24, "192 tokens, since they differ: up to 128 so far"),
        (80, 24, "160 tokens, since they differ: up to 128 so far"),
        (64, 24, "128 tokens, since they differ: up to 128 so far"),
    ],
)
def test_batches_that_differ_have_headroom_up_to_the_models_longest(
    longest: int,
    others: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where the largest of them came before steps were measured. Batches of one size have all
    of the device, however long a sequence the model could take."""
    lengths = [SHORT, *[others] * (REFINED - 1)]
    said = logged(lengths, monkeypatch, caplog, max_position_embeddings=longest)
    assert f"with room for batches of {expected}" in said


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_fragments_are_left_out_and_many_of_them_get_a_hint(
    share: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    total_bytes = 10_000_000
    of_bytes(total_bytes, monkeypatch)
    fragments = int(share * total_bytes)
    monkeypatch.setattr("tests.support.counted.CountedMemory.fragment_bytes", lambda _: fragments)
    made, _ = MODELS["llama"]()
    engine = initialized(made, config(section=section_of(total_bytes)))
    with caplog.at_level("INFO", logger="stronghold"), engine.inspect().device.counted():
        for step in range(REFINED):
            attempt(engine, token_batch(step, length=SHORT), False)
            engine.step()
    plan = engine.plan
    engine.destroy()
    usable = int((total_bytes - fragments) * GPU_SHARE)
    assert plan.demand.gpu_budget_bytes == usable
    hints = [m for m in caplog.messages if "expandable_segments:True" in m]
    assert len(hints) == (share > 0)


def two_graphs(engine: Any, batches: list[Any]) -> list[torch.Tensor]:
    """Two forwards, then two backwards, in each step."""
    losses = [loss_of(engine(**batch)) for batch in batches]
    found = [loss.detach().clone() for loss in losses]
    for loss in losses:
        engine.backward(loss)
        engine.step()
    return found


@pytest.mark.slow
@law_of_time
def test_while_a_graph_waits_a_larger_batch_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan cannot change then: that forward is computed again in backward. It changes when the
    graph is gone."""
    total_bytes = 5_600_000
    of_bytes(total_bytes, monkeypatch)
    settings = config(accumulation=2, section={**section_of(total_bytes), "resident_layers": 0})
    model, _ = MODELS["llama"]()
    engine, plans = initialized(model, settings), []
    found: list[torch.Tensor] = []
    lengths = [(SHORT, SHORT)] * REFINED + [(SHORT, LONG)] + [(LONG, SHORT)] * 2
    batches = [
        [token_batch(2 * step + k, length=pair[k]) for k in range(2)]
        for step, pair in enumerate(lengths)
    ]
    with engine.inspect().device.counted():
        for pair in batches:
            found += two_graphs(engine, pair)
            plans.append(engine.plan)
    run = Run(losses=found, weights={k: v.clone() for k, v in engine.module_state_dict().items()})
    engine.destroy()
    plain, _ = llama(lambda _: SHORT)()
    expected = train_plain(
        lambda: (plain, lambda micro: batches[micro // 2][micro % 2]),
        steps=len(lengths),
        accumulation=2,
    )
    expected.moments = {}
    assert_identical(run, expected)
    on_time("keep" in plans[REFINED].activations[1:3], "the search kept nothing")
    assert plans[REFINED] is plans[REFINED - 1]
    assert plans[-1] is not plans[REFINED]


def test_aliases_of_weights_never_stay_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """They show the newest values: so the plan stays, whatever the batch takes."""
    of_bytes(SMALL_BYTES, monkeypatch)
    # whatever is predicted
    monkeypatch.setattr("stronghold.predict.refine.CHANGE_SHARE", 1e9)
    model, _ = MODELS["llama"]()
    engine = initialized(model, config(section=section_of(SMALL_BYTES)))
    with engine.inspect().device.counted():
        for step in range(REFINED + 1):
            attempt(engine, token_batch(step, length=SHORT), False)
            engine.step()
        plan = engine.plan
        aliases = [parameter.data for parameter in model.parameters()]
        with contextlib.suppress(torch.OutOfMemoryError):
            attempt(engine, token_batch(9, length=LONG), False)
        engine.zero_grad()
        assert engine.plan is plan
        attempt(engine, token_batch(10, length=SHORT), False)
        engine.step()
        engine.synchronize()
        for alias, parameter in zip(aliases, model.parameters(), strict=True):
            assert torch.equal(alias, parameter)
        del aliases, alias
        attempt(engine, token_batch(11, length=LONG), False)
        engine.step()
        assert engine.plan is not plan
    engine.destroy()


@pytest.mark.slow
def test_ranks_make_room_together_at_the_end_of_the_step(tmp_path: Path) -> None:
    """The batches of one rank grow: it trains on, and all change to one plan."""
    found = run_ranks("tests.support.rank_programs:larger", 2, tmp_path)
    losses = [loss for pair in zip(*(f["losses"] for f in found), strict=True) for loss in pair]
    lengths = found[1]["lengths"]

    def factory() -> Any:
        model, _ = MODELS["llama"]()
        return model, lambda micro: token_batch(
            micro, length=lengths[micro // 2] if micro % 2 else SHORT
        )

    one = train_plain(factory, steps=len(lengths), accumulation=2, clipping=0.0)
    for of_rank in found:
        assert of_rank["plans"] == found[0]["plans"]
        assert_identical(
            Run(losses=losses, weights=of_rank["weights"]),
            Run(losses=one.losses, weights=one.weights),
        )
    first = lengths.index(LONG)
    plans = found[0]["plans"]
    assert "keep" in plans[first]  # that step ran by it
    assert plans[first + 1] != plans[first]
