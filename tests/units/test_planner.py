"""Laws of the plan: its rules, its bytes, and errors that say what would fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from stronghold.errors import BudgetError, ConfigError
from stronghold.model.layout import ModelLayout
from stronghold.plan.cost import Demand, LayerWork
from stronghold.plan.memory import levels_of
from stronghold.plan.plan import make_plan
from tests.support.layouts import layer_of_sizes
from tests.support.sizes import named_size
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


def layout_of(sizes: Sizes) -> ModelLayout:
    """A trained and a frozen parameter for each layer, 7 elements less than its sizes."""
    layers = []
    for index, (numel, trainable, streamed) in enumerate(sizes):
        frozen = numel - trainable
        trained = trainable - 7 if trainable else 0
        frozen -= 0 if trainable else 7
        layers.append(layer_of_sizes(index, trained, frozen, streamed=streamed))
    return ModelLayout(layers=tuple(layers))


def demand(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Demand:
    return Demand(**{"states": adam_states(dtype), "accumulate": False, **changes})


def need_of(error: pytest.ExceptionInfo[BudgetError], before: str) -> int:
    """The exact bytes that are needed; the size in the message is that, or hardly more."""
    need = error.value.need_bytes
    assert need is not None
    assert need <= named_size(str(error.value), before) <= 1.01 * need
    return need


# -- the formula -------------------------------------------------------------------------------


def test_bf16_on_the_gpu_takes_fourteen_bytes_a_parameter() -> None:
    layout = layout_of(MODELS["even"])
    pinned = {"resident_layers": len(layout.streamed), "resident_updates": "gpu"}
    numel = sum(layer.weight_bytes // 2 for layer in layout.layers)
    plain = make_plan(layout, demand(**pinned))
    assert plain.gpu_total_bytes == 14 * numel
    summed = make_plan(layout, demand(accumulate=True, **pinned))
    outside = sum(layer.weight_bytes // 2 for layer in layout.layers if not layer.streamed)
    slot = max(layer.weight_bytes // 2 for layer in layout.layers if layer.streamed)
    assert summed.gpu_total_bytes == 16 * numel + 2 * (outside + slot)
    assert plain.host_total_bytes == summed.host_total_bytes == 0


def test_a_level_that_waits_for_the_first_batch_is_open() -> None:
    pinned: Any = {"window": 1, "resident_layers": 0, "gpu_budget_bytes": 1 << 30}
    assert not demand(activations="recompute", **pinned).layers_may_move
    waits = frozenset({"activations"})
    assert demand(activations="recompute", by_rule=waits, **pinned).layers_may_move


WITHOUT_BLOCKS = layout_of(((4096, 4096, False), (6144, 2048, False), (2048, 0, False)))


@pytest.mark.parametrize("pinned", [None, "gpu", "host"])
def test_the_gpu_updates_a_model_without_blocks_if_it_has_room(pinned: str | None) -> None:
    wish = demand()
    plan = make_plan(WITHOUT_BLOCKS, wish)
    assert len(plan.updated_on_gpu) == len(WITHOUT_BLOCKS.layers)
    assert (plan.window, plan.host_total_bytes) == (0, 0)
    least = make_plan(WITHOUT_BLOCKS, demand(resident_updates="host")).gpu_total_bytes
    within = make_plan(WITHOUT_BLOCKS, demand(gpu_budget_bytes=plan.gpu_total_bytes - 1))
    assert not within.updated_on_gpu
    assert within.gpu_total_bytes == least
    with pytest.raises(BudgetError, match="has no repeated blocks") as error:
        make_plan(WITHOUT_BLOCKS, demand(resident_updates=pinned, gpu_budget_bytes=least - 1))
    assert ('resident_updates to "host"' in str(error.value)) == (pinned == "gpu")


# -- the gpu's budget --------------------------------------------------------------------------
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize(("training", "nvme"), [(True, False), (True, True), (False, False)])
def test_the_budget_is_never_passed_and_too_little_is_refused_with_what_fits(
    model: str, kept: int, training: bool, nvme: bool
) -> None:
    """Three slots where blocks may stay in what is left, else as many as fit."""
    layout = layout_of(MODELS[model])
    wish = demand(resident_layers=kept, training=training, nvme=nvme)
    most = make_plan(layout, dataclasses.replace(wish, window=99)).gpu_total_bytes
    with pytest.raises(BudgetError, match=r"stronghold\.gpu_memory: got 1 ") as error:
        make_plan(layout, dataclasses.replace(wish, gpu_budget_bytes=1))
    least = need_of(error, "gpu_memory to at least")
    widest = 0
    for budget in [*range(least, most, 2048), most, most * 2]:
        plan = make_plan(layout, dataclasses.replace(wish, gpu_budget_bytes=budget))
        assert plan.gpu_total_bytes <= budget
        if training and any(layer.trained_numel for layer in layout.layers if layer.streamed):
            assert plan.gradient_slots >= 1
        widest = max(widest, plan.window)
    assert make_plan(layout, dataclasses.replace(wish, gpu_budget_bytes=least)).window <= 1
    num_streamed = len(layout.streamed) - kept
    expected = min(3, num_streamed) if training and not nvme else num_streamed
    assert widest == plan.window == expected
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


# -- what is pinned ----------------------------------------------------------------------------
def test_without_a_budget_the_window_is_a_few_layers() -> None:
    layout = layout_of(MODELS["even"])
    plan = make_plan(layout, demand())
    assert (plan.window, plan.gradient_slots) == (4, 2)
    assert make_plan(layout_of(MODELS["one layer"]), demand()).window == 1


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


# -- activations -------------------------------------------------------------------------------


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
        assert plan.offloaded_bytes == n * on_host, level
    mixed = levels_of(layout, {"recompute": 1, "keep": n - 1})
    assert [mixed[index] for index in blocks] == ["recompute"] + ["keep"] * (n - 1)
    assert make_plan(layout, dataclasses.replace(known, activations=mixed)).activation_bytes == (
        inputs + (n - 1) * saved + saved // chunks
    )
    with pytest.raises(ConfigError, match=f"expected {n}, as many as the model has"):
        levels_of(layout, {"recompute": n + 1})


def test_only_layers_that_train_as_a_whole_are_early() -> None:
    """An early update writes a second set of arrays, which a frozen parameter would not be in."""
    layout = layout_of(((4096, 4096, False), (6144, 2048, True), (2048, 2048, True)))
    plan = make_plan(layout, demand(early_layers=3, resident_updates="host", resident_layers=0))
    assert plan.early == {0, 2}
    frozen = make_plan(
        layout_of(((6144, 2048, True),)),
        demand(early_layers=1, resident_updates="host", resident_layers=0),
    )
    assert not frozen.early
    assert any("no layer is updated before the norm is known" in r for r in frozen.reasons)


def test_the_fewest_arrays_spill_of_the_last_layers_first() -> None:
    """Moments before the master remainder, and of each kind no more layers than must."""
    layout = layout_of(((1 << 20, 1 << 20, True),) * 4)
    pinned = {"nvme": True, "window": 1, "resident_layers": 0, "piece_bytes": 1}
    none = make_plan(layout, demand(**pinned))
    assert not any(none.in_files)
    all_moments = make_plan(layout, demand(spill="moments", **pinned))

    def spilled(budget: int) -> list[int]:
        plan = make_plan(layout, demand(host_budget_bytes=budget, **pinned))
        assert plan.host_total_bytes <= budget
        return [len(arrays) for arrays in plan.in_files]

    layer_moments = 8 * layout.layers[0].trained_numel
    assert spilled(none.host_total_bytes) == [0, 0, 0, 0]
    assert spilled(none.host_total_bytes - 1) == [0, 0, 0, 2]
    assert spilled(none.host_total_bytes - layer_moments) == [0, 0, 2, 2]
    assert spilled(all_moments.host_total_bytes) == [2, 2, 2, 2]
    assert spilled(all_moments.host_total_bytes - 1) == [2, 2, 2, 3]
