"""Laws of the plan: its bytes are the bytes that are taken, its errors say what would fit."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from typing import Any

import pytest
import torch

from stronghold.devices.emulated import EmulatedDevice
from stronghold.errors import BudgetError, ConfigError
from stronghold.memory.host import DeviceStore, HostStore
from stronghold.memory.tiers import Tiers
from stronghold.memory.window import Window
from stronghold.model.layout import ModelLayout, ParameterShape, layer_layout
from stronghold.optim.states import LOW_DTYPE
from stronghold.plan.cost import Demand, LayerWork
from stronghold.plan.host_memory import RING_ENTRIES, spread
from stronghold.plan.places import levels_of
from stronghold.plan.plan import Plan, make_plan
from tests.support.sizes import named_size
from tests.support.spread import middles
from tests.support.states import adam_states

# Per layer: padded numel, padded trainable numel, and whether it is a block.
Sizes = tuple[tuple[int, int, bool], ...]
MODELS: dict[str, Sizes] = {
    "even": ((4096, 4096, False), *((2048, 2048, True),) * 6, (4096, 4096, False)),
    "unlike": (
        (6144, 2048, False),
        (2048, 2048, True),
        (8192, 4096, True),
        (4096, 0, True),
        (6144, 6144, True),
        (2048, 2048, False),
    ),
    "largest last": ((2048, 2048, True), (2048, 2048, True), (8192, 8192, True)),
    "one layer": ((2048, 2048, True),),
    "one block": ((4096, 4096, False), (6144, 2048, True)),
    "frozen blocks": ((2048, 2048, False), (4096, 0, True), (4096, 0, True)),
    "all frozen": ((2048, 0, False), (4096, 0, True), (2048, 0, True)),
    "small blocks": ((65536, 65536, False), *((2048, 2048, True),) * 3),
}


def _parameters(numel: int, trainable: int) -> list[tuple[int, bool]]:
    """Sizes of a trainable and a frozen parameter whose layer has `numel` elements, 7 less than
    these without padding."""
    frozen = numel - trainable
    return [(trainable - 7, True), (frozen, False)] if trainable else [(frozen - 7, False)]


def layout_of(sizes: Sizes) -> ModelLayout:
    return ModelLayout(
        layers=tuple(
            layer_layout(
                [
                    ParameterShape(name=f"p{trains}", shape=(size,), trainable=trains)
                    for size, trains in _parameters(numel, trainable)
                    if size
                ],
                index=index,
                name=f"layer{index}",
                streamed=streamed,
            )
            for index, (numel, trainable, streamed) in enumerate(sizes)
        )
    )


def demand(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Demand:
    return Demand(**{"states": adam_states(dtype), "accumulate": False, **changes})


def taken(layout: ModelLayout, plan: Plan, dtype: torch.dtype, *, training: bool) -> list[int]:
    """Bytes on the device and on the host that the plan's window and slabs really take."""
    # The planned bytes are the device's budget: one more would raise.
    device = EmulatedDevice(budget_bytes=plan.gpu_total_bytes)
    try:
        store = HostStore(
            layout,
            device,
            held=plan.pending,
            early=plan.early,
            accumulate=plan.accumulates,
            ring_entries=plan.ring_entries,
            tiers=Tiers(layout, plan.demand.formats, plan.homes),
        )
        for state in store.layers:
            zero = torch.zeros(())
            state.parameters = [zero.expand(part.shape) for part in state.layout.slices]
        window = Window(
            device,
            store.layers,
            resident=plan.resident,
            num_slots=plan.window,
            num_gradient_slots=plan.gradient_slots,
            own_gradients=plan.own_gradients,
            sums=plan.demand.chunk is not None,
        )
        there = DeviceStore(store, device)
        for layer in layout.layers:
            (there if layer.index in plan.updated_on_gpu else store).adopt(layer.index)
        if training:
            window.prepare_training()
            store.prepare_training()
            there.prepare_training()
        # Autograd makes and keeps the gradients of a model that is whole, without padding.
        kept = plan.whole and training and sum(layer.num_trainable for layer in layout.layers)
        return [device.memory.peak_bytes + kept * dtype.itemsize, store.allocated_bytes]
    finally:
        device.close()


def need_of(error: pytest.ExceptionInfo[BudgetError], before: str) -> int:
    """The exact bytes that are needed; the size in the message is that, or hardly more."""
    need = error.value.need_bytes
    assert need is not None
    assert need <= named_size(str(error.value), before) <= 1.01 * need
    return need


def named_number(error: pytest.ExceptionInfo[BaseException], pattern: str) -> int:
    found = re.search(pattern, str(error.value))
    assert found, str(error.value)
    return int(found[1])


# -- the formula -------------------------------------------------------------------------------
WAYS: list[dict[str, Any]] = [
    {},
    {"accumulate": True},
    {"training": False},
    {"chunk": 2},
    {"early_layers": 1},
    {"accumulate": True, "early_layers": 1},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "pinned",
    [
        {},
        {"window": 1},
        {"window": 3},
        {"window": 99},
        {"window": 2},
        {"resident_layers": 1},
        {"resident_layers": "all"},
        {"resident_updates": "gpu"},
        {"resident_layers": 1, "resident_updates": "gpu"},
        {"resident_layers": "all", "resident_updates": "gpu", "whole": False},
        {"resident_layers": "all", "resident_updates": "gpu"},
    ],
    ids=str,
)
def test_the_plans_bytes_are_the_bytes_that_are_taken(model: str, pinned: dict[str, Any]) -> None:
    layout = layout_of(MODELS[model])
    if pinned.get("resident_layers") == "all":
        pinned = {**pinned, "resident_layers": len(layout.streamed)}
    for dtype, mode in itertools.product(LOW_DTYPE, WAYS):
        plan = make_plan(layout, demand(dtype, **mode, **pinned))
        planned = [plan.gpu_total_bytes, plan.host_total_bytes]
        assert (plan.window > 0) == (len(plan.resident) < len(layout.layers))
        training = mode.get("training", True)
        assert taken(layout, plan, dtype, training=training) == planned, (dtype, mode)


def test_bf16_on_the_gpu_takes_fourteen_bytes_a_parameter() -> None:
    layout = layout_of(MODELS["even"])
    pinned = {"resident_layers": len(layout.streamed), "resident_updates": "gpu"}
    numel = sum(layer.numel for layer in layout.layers)
    plain = make_plan(layout, demand(whole=False, **pinned))
    assert plain.gpu_total_bytes == 14 * numel
    summed = make_plan(layout, demand(accumulate=True, **pinned))
    assert summed.gpu_total_bytes == 16 * numel + 2 * layout.num_trainable
    assert plain.host_total_bytes == summed.host_total_bytes == 0


@pytest.mark.parametrize(
    "pinned",
    [
        {"resident_updates": "gpu"},
        {"resident_layers": 6},
        {"resident_layers": 6, "resident_updates": "gpu", "activations": "recompute"},
    ],
    ids=str,
)
def test_a_model_is_whole_when_all_of_it_stays_and_is_updated_there(pinned: Any) -> None:
    layout = layout_of(MODELS["even"])
    assert not make_plan(layout, demand(**pinned)).whole
    with pytest.raises(ConfigError, match=r'resident_layers to "all", stronghold\.resident_upd'):
        make_plan(layout, demand(whole=True, **pinned))
    everything = {**pinned, "resident_layers": 6, "resident_updates": "gpu", "activations": "keep"}
    assert make_plan(layout, demand(**everything)).whole
    assert not make_plan(layout, demand(whole=False, **everything)).whole


WITHOUT_BLOCKS = layout_of(((4096, 4096, False), (6144, 2048, False), (2048, 0, False)))


@pytest.mark.parametrize("mode", WAYS, ids=str)
@pytest.mark.parametrize("dtype", LOW_DTYPE, ids=str)
def test_a_model_without_blocks_is_whole_unless_its_state_has_no_room(
    dtype: torch.dtype, mode: dict[str, Any]
) -> None:
    training = mode.get("training", True)
    wish = demand(dtype, **mode)
    plan = make_plan(WITHOUT_BLOCKS, wish)
    assert plan.whole
    assert (plan.window, plan.host_total_bytes) == (0, 0)
    need = plan.gpu_total_bytes
    assert taken(WITHOUT_BLOCKS, plan, dtype, training=training) == [need, 0]
    on_host = make_plan(WITHOUT_BLOCKS, dataclasses.replace(wish, resident_updates="host"))
    assert not on_host.updated_on_gpu
    least = on_host.gpu_total_bytes
    assert taken(WITHOUT_BLOCKS, on_host, dtype, training=training) == [
        least,
        on_host.host_total_bytes,
    ]
    assert make_plan(WITHOUT_BLOCKS, dataclasses.replace(wish, gpu_budget_bytes=need)).whole
    for budget in {least, max(least, need - 1)} - {need}:
        within = make_plan(WITHOUT_BLOCKS, dataclasses.replace(wish, gpu_budget_bytes=budget))
        assert dataclasses.replace(within, demand=on_host.demand, reasons=()) == (
            dataclasses.replace(on_host, reasons=())
        )
    for pinned in (None, "gpu", "host"):
        short = dataclasses.replace(
            wish, resident_updates=pinned, gpu_budget_bytes=least - 1, window=1
        )
        with pytest.raises(BudgetError, match="has no repeated blocks") as error:
            make_plan(WITHOUT_BLOCKS, short)
        ways = 'resident_updates to "host"' in str(error.value)
        assert ways == (pinned == "gpu")


# -- the gpu's budget --------------------------------------------------------------------------
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("training", [True, False])
def test_the_budget_is_never_passed_and_too_little_is_refused_with_what_fits(
    model: str, kept: int, training: bool
) -> None:
    layout = layout_of(MODELS[model])
    wish = demand(resident_layers=kept, training=training)
    most = make_plan(layout, dataclasses.replace(wish, window=99)).gpu_total_bytes
    with pytest.raises(BudgetError, match=r"stronghold\.gpu_memory: got 1 ") as error:
        make_plan(layout, dataclasses.replace(wish, gpu_budget_bytes=1))
    least = need_of(error, "gpu_memory to at least")
    widest = 0
    for budget in [*range(least, most, 2048), most, most * 2]:
        plan = make_plan(layout, dataclasses.replace(wish, gpu_budget_bytes=budget))
        assert plan.gpu_total_bytes <= budget
        if training and any(layer.trainable_numel for layer in layout.layers if layer.streamed):
            assert plan.gradient_slots >= 1
        widest = max(widest, plan.window)
        taken(layout, plan, torch.bfloat16, training=training)
    assert make_plan(layout, dataclasses.replace(wish, gpu_budget_bytes=least)).window <= 1
    assert widest == plan.window == len(layout.streamed) - kept
    with pytest.raises(BudgetError, match=r"stronghold\.gpu_memory") as error:
        make_plan(layout, dataclasses.replace(wish, gpu_budget_bytes=least - 1))
    assert need_of(error, "gpu_memory to at least") == least
    assert ("resident_layers" in str(error.value)) == bool(kept)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("window", [1, 2, 3, 99])
def test_a_pinned_window_is_kept_or_refused_with_what_fits(model: str, window: int) -> None:
    layout = layout_of(MODELS[model])
    kept = min(window, len(layout.streamed))
    with pytest.raises(BudgetError, match=rf"stronghold\.window of {kept} ") as error:
        make_plan(layout, demand(window=window, gpu_budget_bytes=1))
    need = need_of(error, "raise gpu_memory to at least")
    plan = make_plan(layout, demand(window=window, gpu_budget_bytes=need))
    assert plan.window == kept
    assert plan.gpu_total_bytes == need
    # the least that trains, or `need` was not the least
    assert plan.gradient_slots <= 1
    with pytest.raises(BudgetError):
        make_plan(layout, demand(window=window, gpu_budget_bytes=need - 1))
    # The other remedy of the message.
    if window > 1 and kept > 1:
        smallest = named_size(str(error.value), "leave window out, with which")
        assert make_plan(layout, demand(gpu_budget_bytes=smallest)).window == 1


def test_more_budget_never_means_fewer_slots() -> None:
    layout = layout_of(MODELS["even"])
    slots = []
    for budget in range(50_000, 90_000, 512):
        plan = make_plan(layout, demand(gpu_budget_bytes=budget))
        slots.append(plan.window + plan.gradient_slots)
    assert slots == sorted(slots)


# -- what is pinned ----------------------------------------------------------------------------
def test_without_a_budget_the_window_is_a_few_layers() -> None:
    layout = layout_of(MODELS["even"])
    plan = make_plan(layout, demand())
    assert (plan.window, plan.prefetch, plan.gradient_slots) == (4, 3, 2)
    assert make_plan(layout_of(MODELS["one layer"]), demand()).window == 1
    # A pinned prefetch depth needs its slots.
    assert make_plan(layout, demand(prefetch=5)).window == 6


def test_window_and_prefetch_that_contradict_each_other_are_refused() -> None:
    layout = layout_of(MODELS["even"])
    with pytest.raises(ConfigError, match=r"stronghold\.prefetch: got 3, .* window of 2 ") as error:
        make_plan(layout, demand(window=2, prefetch=3))
    assert named_number(error, r"lower prefetch to (\d+)") == 1
    assert named_number(error, r"stronghold\.window to (\d+)") == 4
    assert make_plan(layout, demand(window=2, prefetch=1)).prefetch == 1
    assert make_plan(layout, demand(window=4, prefetch=3)).window == 4


def test_a_prefetch_that_the_budget_cannot_hold_is_refused_with_the_bytes() -> None:
    layout = layout_of(MODELS["even"])
    least = make_plan(layout, demand(window=1)).gpu_total_bytes
    with pytest.raises(ConfigError, match=r"stronghold\.prefetch: got 3") as error:
        make_plan(layout, demand(prefetch=3, gpu_budget_bytes=least))
    need = named_size(str(error.value), r"stronghold\.gpu_memory to")
    assert make_plan(layout, demand(prefetch=3, gpu_budget_bytes=need)).prefetch == 3


def test_depth_beyond_the_models_layers_is_no_contradiction() -> None:
    """window 8 and prefetch 5 agree; a model of one block has neither, and nothing to fetch."""
    plan = make_plan(layout_of(MODELS["one block"]), demand(window=8, prefetch=5))
    assert (plan.window, plan.prefetch) == (1, 0)


def test_more_resident_layers_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"stronghold\.resident_layers: got 7, .* 6 blocks"):
        make_plan(layout_of(MODELS["even"]), demand(resident_layers=7))


@pytest.mark.parametrize(
    ("number", "blocks"),
    [
        (0, set()),
        (1, {1}),
        (2, {1, 4}),
        (4, {1, 2, 4, 5}),
        (5, {1, 2, 3, 4, 5}),
        (6, {1, 2, 3, 4, 5, 6}),
    ],
)
def test_resident_blocks_are_spread_evenly(number: int, blocks: set[int]) -> None:
    """Their compute hides the updates of the streamed blocks between them. The first block is one
    of them: nothing hides its update."""
    plan = make_plan(layout_of(MODELS["even"]), demand(resident_layers=number))
    assert plan.resident == frozenset({0, 7} | blocks)


def test_gradients_wait_where_the_config_needs_them() -> None:
    layout = layout_of(MODELS["even"])
    plan = make_plan(layout, demand())
    assert (plan.accumulates, plan.pending, plan.ring_entries) == (False, set(range(8)), 0)
    summed = make_plan(layout, demand(accumulate=True))
    assert (summed.accumulates, summed.pending) == (True, frozenset())
    assert summed.ring_entries == RING_ENTRIES


@pytest.mark.parametrize("model", MODELS)
def test_early_layers_train_as_a_whole_and_are_spread_by_their_bytes(model: str) -> None:
    """Each has its weights, the rest of its masters and its moments twice."""
    layout = layout_of(MODELS[model])
    able = [i for i, (numel, trainable, _) in enumerate(MODELS[model]) if trainable == numel]
    for count in range(len(layout.layers) + 1):
        plan = make_plan(layout, demand(early_layers=count))
        positions = middles([MODELS[model][i][0] for i in able], count) if able else []
        assert sorted(plan.early) == [able[position] for position in positions]
        second = 12 * sum(layout.layers[index].numel for index in plan.early)
        assert plan.host_bytes["second arrays of early updates"] == second
        plan_without = make_plan(layout, demand(early_layers=0))
        assert plan.host_total_bytes == plan_without.host_total_bytes + second


@pytest.mark.parametrize(
    ("model", "changes", "reasons"),
    [
        ("even", {"num_ranks": 2}, ["several ranks share the layers"]),
        ("even", {"nvme": True, "spill": "moments"}, ["8 layers have arrays in files"]),
        ("all frozen", {}, ["3 layers have frozen parameters"]),
        (
            "frozen blocks",
            {"nvme": True, "spill": "moments"},
            ["2 layers have frozen parameters", "1 layers have arrays in files"],
        ),
        (
            "even",
            {"resident_layers": 6, "resident_updates": "gpu"},
            ["8 layers are updated on the gpu"],
        ),
    ],
)
def test_the_plan_says_why_no_layer_is_early(
    model: str, changes: dict[str, Any], reasons: list[str]
) -> None:
    plan = make_plan(layout_of(MODELS[model]), demand(early_layers=2, **changes))
    start = "no layer is updated before the norm is known (stronghold.early_layers): "
    found = [reason.removeprefix(start) for reason in plan.reasons if "the norm" in reason]
    assert not plan.early
    assert len(found) == len(reasons)
    assert all(map(str.startswith, found, reasons))
    none_asked = make_plan(layout_of(MODELS[model]), demand(early_layers=0, **changes))
    assert not any("the norm" in reason for reason in none_asked.reasons)


@pytest.mark.parametrize("num_layers", [1, 2, 7, 16, 33])
def test_equal_layers_are_spread_evenly(num_layers: int) -> None:
    layers = layout_of(((2048, 2048, True),) * num_layers).layers
    for count in range(num_layers + 3):
        found = sorted(spread(layers, count))
        assert len(found) == min(count, num_layers)
        assert set(found) <= set(range(num_layers))
        if not count:
            continue
        widest = -(-num_layers // count) + 1
        ends = [-1, *found, num_layers]
        assert all(right - left - 1 <= widest for left, right in itertools.pairwise(ends))
        assert found == middles([1] * num_layers, count)
    # Halves, quarters: the middle of each.
    if num_layers == 16:
        assert sorted(spread(layers, 1)) == [7]
        assert sorted(spread(layers, 2)) == [3, 11]
        assert sorted(spread(layers, 4)) == [1, 5, 9, 13]


@pytest.mark.parametrize("seed", range(20))
def test_uneven_layers_are_spread_by_their_bytes(seed: int) -> None:
    """Also where one layer has most bytes, and where a layer is many times longer than a part."""
    chance = random.Random(seed)
    sizes = [2048 * chance.choice([1, 1, 2, 5, 40]) for _ in range(chance.randint(1, 24))]
    layers = layout_of(tuple((size, size, True) for size in sizes)).layers
    for count in range(len(sizes) + 2):
        found = spread(layers, count)
        assert len(found) == min(count, len(sizes))
        assert sorted(found) == middles(sizes, count)


def test_layers_that_cannot_be_early_are_no_places() -> None:
    """Indices are of the model, whichever layers are there to choose from."""
    layers = [e for e in layout_of(((2048, 2048, True),) * 9).layers if e.index % 2]
    assert spread(layers, 4) == {1, 3, 5, 7}
    assert spread(layers, 2) == {1, 5}
    assert spread([], 3) == spread(layers, 0) == frozenset()


# -- the host's budget -------------------------------------------------------------------------
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", [{}, {"accumulate": True}], ids=str)
def test_too_little_host_memory_is_refused_with_what_fits(model: str, mode: dict[str, Any]) -> None:
    layout = layout_of(MODELS[model])
    with pytest.raises(BudgetError, match=r"stronghold\.host_memory") as error:
        make_plan(layout, demand(**mode, host_budget_bytes=1))
    need = need_of(error, "add RAM to at least")
    plan = make_plan(layout, demand(**mode, host_budget_bytes=need))
    assert plan.host_total_bytes == need
    with pytest.raises(BudgetError):
        make_plan(layout, demand(**mode, host_budget_bytes=need - 1))
    assert "gradient_clipping" not in str(error.value)


# -- what a person reads -----------------------------------------------------------------------
def test_the_plan_prints_its_reasons_and_every_byte() -> None:
    layout = layout_of(MODELS["even"])
    plan = make_plan(layout, demand(resident_layers=1, gpu_budget_bytes=80_000))
    text = str(plan)
    assert text.startswith("stronghold plan\n")
    for reason in plan.reasons:
        assert f"  {reason}\n" in text
    assert "stronghold.resident_layers" in text
    assert "stronghold.gpu_memory" in text
    for name, size in (plan.gpu_bytes | plan.host_bytes).items():
        assert (f" {name} " in text) == (size > 0)
    printed = [float(number) for number in re.findall(r"= ([\d.]+) bytes/parameter", text)]
    assert printed == [
        pytest.approx(total / plan.num_parameters, abs=0.006)
        for total in (plan.gpu_total_bytes, plan.host_total_bytes)
    ]


def test_the_same_question_has_the_same_answer() -> None:
    layout = layout_of(MODELS["unlike"])
    wish = demand(gpu_budget_bytes=10**5, cpu_threads=3, activations="offload")
    plan = make_plan(layout, wish)
    assert plan == make_plan(layout, wish)
    assert plan.cpu_threads == 3
    assert [plan.activations[layer.index] for layer in layout.layers] == [
        "offload" if layer.streamed else "keep" for layer in layout.layers
    ]
    assert make_plan(layout, demand(num_cores=5)).cpu_threads == 5


def test_activations_by_level_are_what_waits_and_what_passes() -> None:
    layout = layout_of(MODELS["even"])
    blocks = layout.streamed
    outside = len(layout.layers) - len(blocks)
    saved, inputs, attended, chunks = 1000, 100, 30, 4
    block = LayerWork(
        forward_s=0.0,
        backward_s=0.0,
        saved_bytes=saved,
        boundary_bytes=inputs,
        attention_bytes=attended,
    )
    other = dataclasses.replace(block, saved_bytes=7)
    known = demand(work=tuple(block if e.streamed else other for e in layout.layers), chunks=chunks)
    n = len(blocks)
    for level, (on_gpu, on_host, passing) in {
        "keep": (saved, 0, 7 * outside),
        "offload": (0, saved, 2 * saved),
        "recompute": (inputs, 0, saved // chunks),
        "attention": (inputs + attended, 0, -(-(saved - attended) // chunks)),
        "recompute_offload": (0, inputs, saved // chunks + 2 * inputs),
        "attention_offload": (
            0,
            inputs + attended,
            -(-(saved - attended) // chunks) + 2 * (inputs + attended),
        ),
    }.items():
        plan = make_plan(layout, dataclasses.replace(known, activations=level))
        assert plan.activation_bytes == n * on_gpu + passing, level
        # they lie where gradients will
        lent = inputs if level.endswith("_offload") else 0
        assert plan.offloaded_bytes == n * (on_host - lent), level
        # Each stream keeps its memory for itself: of so many chunks, and beside the head's.
        several = make_plan(layout, dataclasses.replace(known, activations=level, streams=3))
        anew = saved - attended if "attention" in level else saved if "recompute" in level else 0
        waiting = 2 * on_host  # two layers' on their way
        beside = -(-anew * 3 // chunks) + waiting + 7 * outside
        assert several.activation_bytes == n * on_gpu + beside, level
    mixed = levels_of(layout, {"recompute": 1, "keep": n - 1})
    assert [mixed[index] for index in blocks] == ["recompute"] + ["keep"] * (n - 1)
    assert make_plan(layout, dataclasses.replace(known, activations=mixed)).activation_bytes == (
        inputs + (n - 1) * saved + saved // chunks
    )
    # Inputs lie where gradients that are pending will, as many chunks' as there is room for.
    chunk = 2 * layout.layers[blocks[0]].trainable_numel // 3
    large = dataclasses.replace(block, boundary_bytes=chunks * chunk)
    wish = dataclasses.replace(known, work=(large,) * len(layout.layers))
    for level, else_where in {"recompute_offload": 0, "attention_offload": attended}.items():
        for accumulate, waiting in ((False, 1), (True, 4)):
            asked = {"activations": level, "accumulate": accumulate}
            plan = make_plan(layout, dataclasses.replace(wish, **asked))
            assert plan.offloaded_bytes == n * (waiting * chunk + else_where), asked
            assert plan.traffic.offloaded_bytes == n * (chunks * chunk + else_where)
    with pytest.raises(ConfigError, match=f"expected {n}, as many as the model has"):
        levels_of(layout, {"recompute": n + 1})
