"""Adapters over quantised bases on the room of one rank: where a base lies and how it moves changes
no bit, and the bits are those of plain torch with the same parameters."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.errors import ConfigError
from stronghold.model.packed_weight import PackedWeight
from stronghold.plan.cost import LEVELS
from stronghold.train.layer import ALIGN_BYTES
from stronghold.train.visible import Hidden
from tests.laws.test_core import at_home, lanes
from tests.models import loss_of
from tests.support import nf4
from tests.support.core import opened, train_core
from tests.support.insides import offload_small
from tests.support.pairs import Case, covering
from tests.support.quantised_bases import BASES, blocks_of, fp8_on_cpus
from tests.support.training import Run, assert_identical, cast, dense_copies, same_bits, train_plain

STEPS = 3
PLACES: dict[str, dict[str, Any]] = {
    "one slot": {"window": 1},
    # In the first step backward brings the first layer to another slot than forward did.
    "two slots": {"window": 2},
    "three slots": {"window": 3},
    "one resident": {"window": 1, "resident_layers": 1},
    "all on the device": {"resident_layers": "all", "resident_updates": "gpu"},
}
ALL: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, Any]]] = {
    **{kind: (make, make, {}) for kind, make in BASES.items()},
    **{f"loaded {kind}": (make, make, {}) for kind, make in nf4.LOADED.items()},
    "nested": (nf4.over_nested, nf4.over_nested, {}),
    **{f"frozen {kind}": (*makes, {"frozen": "nf4"}) for kind, makes in nf4.FROZEN.items()},
}
"""Of each base: the factory of the core's model, of plain torch's, and settings of the core."""

AXES: dict[str, list[str]] = {
    "base": list(ALL),
    "place": list(PLACES),
    "home": ["ram", "moments", "masters", "weights"],
    "activations": [*LEVELS],
    "micro-batches": ["1", "2"],
    "lanes": ["on time", "late"],
}


def never(one: str, other: str) -> bool:
    """If the device has all arrays, none lies in files."""
    in_files = {"moments", "masters", "weights"}
    return "all on the device" in (one, other) and not in_files.isdisjoint((one, other))


ARRAY = covering(list(AXES.values()), never)
random.Random(0).shuffle(ARRAY)
DEFAULT = ARRAY[:24]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers take several pieces. FP8Linear computes on CPUs."""
    monkeypatch.setattr("stronghold.plan.memory.PIECE_BYTES", 1)
    monkeypatch.setattr("stronghold.train.files.BLOCK_BYTES", 4096)
    monkeypatch.setattr("stronghold.train.files.UNIT_BYTES", 8192)
    offload_small(monkeypatch)
    with fp8_on_cpus():
        yield


@functools.cache
def plain(base: str, micro_batches: int) -> Run:
    with fp8_on_cpus():
        return train_plain(
            ALL[base][1], steps=STEPS, clipping=0.5, accumulation=micro_batches, precision="bf16"
        )


@pytest.mark.parametrize("base", ["nf4 double", "int8", "torchao int8"])
@pytest.mark.parametrize("closes_first", [0, 1])
def test_two_live_models_over_quantised_bases_train_in_turns(base: str, closes_first: int) -> None:
    """As each does alone. One of the two ends before the other."""

    def start(number: int) -> Callable[[int], torch.Tensor]:
        torch.manual_seed(number)
        model, make_batch = ALL[base][0]()
        core = stacks[number].enter_context(opened(model, precision="bf16", window=1))

        def train(seed: int) -> torch.Tensor:
            loss: torch.Tensor = core.trainer.forward(**make_batch(seed)).loss
            core.trainer.backward(loss)
            core.trainer.step()
            return loss.detach().clone()

        return train

    stacks = [contextlib.ExitStack() for _ in range(2)]
    expected = []
    for number, stack in enumerate(stacks):
        with stack:
            expected.append(list(map(start(number), range(3))))
    with stacks[0], stacks[1]:
        trains = [start(number) for number in range(2)]
        losses = [[train(0)] for train in trains]
        for number in (closes_first, 1 - closes_first):
            losses[number] += map(trains[number], (1, 2))
            stacks[number].close()
    for alone, in_turns in zip(expected, losses, strict=True):
        assert all(map(torch.equal, alone, in_turns))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in DEFAULT else pytest.mark.slow) for c in ARRAY],
    ids="-".join,
)
def test_adapters_train_over_a_quantised_base_as_in_plain_torch(case: Case, tmp_path: Path) -> None:
    of = dict(zip(AXES, case, strict=True))
    micro_batches = int(of["micro-batches"])
    expected = plain(of["base"], micro_batches)
    factory, _, settings = ALL[of["base"]]
    run = train_core(
        factory,
        steps=STEPS,
        clipping=0.5,
        accumulation=micro_batches,
        precision="bf16",
        device=lanes(are_late=of["lanes"] == "late"),
        activations=of["activations"],
        **PLACES[of["place"]],
        **at_home(of["home"], tmp_path),
        **settings,
    )
    assert_identical(run, expected)
    assert run.norms == expected.norms


# -- bytes -----------------------------------------------------------------------------------------
INNER = (".codes", ".absmax")


@pytest.mark.parametrize("base", ["loaded experts", "frozen dense"])
def test_a_packed_weight_takes_9_sixteenths_of_a_byte_on_the_host_and_over_the_link(
    base: str,
) -> None:
    factory, _, settings = ALL[base]
    model, make_batch = factory()
    with opened(model, precision="bf16", window=1, **settings) as core:
        numel = sum(p.numel() for p in model.parameters() if isinstance(p, PackedWeight))
        streamed = [layer for layer in core.layers if not layer.is_resident]
        packed_bytes = 0
        for layer in streamed:
            named = zip(layer.names, layer.parameters, strict=True)
            inner = [value.nbytes for name, value in named if name.endswith(INNER)]
            others = [p for p in layer.parameters[layer.num_trained :] if p.dtype is torch.bfloat16]
            assert len(inner) + len(others) == len(layer.parameters) - layer.num_trained
            aligned = sum(-(-n // ALIGN_BYTES) * ALIGN_BYTES for n in inner)
            norms = sum(-(-p.nbytes // ALIGN_BYTES) * ALIGN_BYTES for p in others)
            assert layer.num_bytes == layer.trained_bytes + aligned + norms
            assert core.trainer.arrays.buffer(layer).nbytes == layer.num_bytes
            packed_bytes += sum(inner)
        assert packed_bytes == 0.5625 * numel
        before = 0
        for seed in range(3):
            before = core.trainer.weights.fetched_bytes
            core.trainer.backward(loss_of(core.trainer.forward(**make_batch(seed))))
            core.trainer.step()
        residents = sum(layer.num_bytes for layer in core.layers if layer.is_resident)
        residents *= any(layer.num_trained for layer in core.layers if layer.is_resident)
        twice = 2 * sum(layer.num_bytes for layer in streamed) - streamed[-1].num_bytes
        assert core.trainer.weights.fetched_bytes - before == twice + residents


# -- unusual programs ------------------------------------------------------------------------------
@pytest.mark.parametrize("base", ["nf4", "torchao nf4", "loaded experts", "nested"])
@pytest.mark.parametrize("activations", LEVELS)
def test_one_backward_of_two_forwards_has_the_bits_of_plain_torch(
    base: str, activations: str
) -> None:
    """As preference losses do. The first graph finds its layers in other slots."""
    core_factory, factory, settings = ALL[base]
    torch.manual_seed(0)
    model, make_batch = factory()

    def preference(call: Callable[..., Any]) -> torch.Tensor:
        return loss_of(call(**make_batch(0))) - 2 * loss_of(call(**make_batch(1)))

    preference(model).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(0)
    core_model, _ = core_factory()
    options = {"activations": activations, "window": 2, "accumulate": False, **settings}
    with opened(core_model, precision="bf16", **options) as core:
        core.trainer.backward(preference(core.trainer.forward))
        names = set()
        for layer in core.layers:
            layer.gradient_record.wait()
            for k, name in enumerate(layer.names[: layer.num_trained]):
                gradient = core.trainer.arrays.gradient(layer, k).view(layer.parameters[k].shape)
                assert torch.equal(gradient, expected[name]), name
                names.add(name)
    assert names == expected.keys()


def test_an_evaluation_and_a_reference_without_adapters_have_the_bits_of_the_model() -> None:
    for base in ("loaded experts", "torchao int8"):
        factory, _, settings = ALL[base]
        torch.manual_seed(0)
        model, make_batch = factory()
        plain_one: Any = copy.deepcopy(model).eval()
        with opened(model, precision="bf16", window=1, **settings) as core, torch.no_grad():
            model.eval()
            for context in (contextlib.nullcontext, lambda m: m.disable_adapter()):
                with context(model), context(plain_one):
                    expected = plain_one(**make_batch(7)).logits
                    assert torch.equal(core.trainer.forward(**make_batch(7)).logits, expected)


def weight_of(model: Any) -> Any:
    """One weight of 4 bits, in a block."""
    found = [m.weight for n, m in model.named_modules() if n.endswith("1.mlp.up_proj")]
    return getattr(found[0], "base_layer", found[0])


@pytest.mark.parametrize("place", PLACES)
def test_other_codes_that_are_assigned_to_a_weight_of_4_bits_count(place: str) -> None:
    """Also after an evaluation, which has left the codes of before in the slots of residents."""

    torch.manual_seed(0)
    model, make_batch = BASES["nf4"]()
    torch.manual_seed(0)
    plain, _ = BASES["nf4"]()
    cast(plain, torch.bfloat16)
    with opened(model, precision="bf16", **PLACES[place]) as core, torch.no_grad():
        before = loss_of(core.trainer.forward(**make_batch(0)))
        for weight in (weight_of(model), weight_of(plain)):
            weight.data = weight.data.flip(0)
        found = loss_of(core.trainer.forward(**make_batch(0)))
        assert torch.equal(found, loss_of(plain(**make_batch(0))))
        assert not torch.equal(found, before)


def through_pickle(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, through_pickle])
def test_a_copy_of_a_hidden_weight_is_of_the_librarys_class(copied: Any) -> None:
    model, make_batch = BASES["nf4"]()
    weight = weight_of(model)
    kind, expected = type(weight), copied(weight)
    with opened(model, precision="bf16", window=1) as core:
        core.trainer.forward(**make_batch(0))
        assert isinstance(weight, Hidden)
        assert type(weight).__name__ == kind.__name__
        found = copied(weight)
        assert type(found) is type(expected)
        assert torch.equal(found, expected)


def test_a_base_that_is_no_longer_frozen_is_refused_by_name() -> None:
    factory, _, settings = ALL["loaded dense"]
    model, make_batch = factory()
    with opened(model, precision="bf16", window=1, **settings) as core:
        name, weight = next((n, p) for n, p in model.named_parameters() if "up_proj" in n)
        weight.requires_grad_(True)
        with pytest.raises(ConfigError, match=re.escape(name) + " was frozen"):
            core.trainer.forward(**make_batch(0))


@pytest.mark.parametrize("base", ["nf4", "torchao int8", "loaded dense"])
def test_a_forward_that_writes_a_quantised_weight_is_refused_by_name(base: str) -> None:
    def write(module: Any, *_: Any) -> None:
        weight = module.weight
        scale = {"nf4": lambda: weight.quant_state.absmax, "torchao int8": lambda: weight.scale}
        with torch.no_grad():
            scale.get(base, lambda: weight.absmax)().mul_(2)

    factory, _, settings = ALL[base]
    model, make_batch = factory()
    blocks_of(model)[1].self_attn.q_proj.base_layer.register_forward_pre_hook(write)
    with (
        opened(model, precision="bf16", window=1, **settings) as core,
        pytest.raises(ConfigError, match=r"wrote into the parameters of .*layers\.1 in place"),
    ):
        core.trainer.forward(**make_batch(0))


@pytest.mark.parametrize("base", ["nf4 double", "torchao int8", "loaded dense"])
def test_close_gives_the_base_back(base: str) -> None:
    """The same parameters compute alone, in memory of their own, with the trained adapters."""
    factory, _, settings = ALL[base]
    model, make_batch = factory()
    before = dense_copies(model.state_dict())
    parameters = dict(model.named_parameters())
    with opened(model, precision="bf16", window=1, **settings) as core:
        core.trainer.backward(loss_of(core.trainer.forward(**make_batch(0))))
        core.trainer.step()
        expected = core.trainer.forward(**make_batch(1))["loss"].detach()
    assert all(model.get_parameter(name) is value for name, value in parameters.items())
    assert torch.equal(loss_of(model(**make_batch(1))), expected)
    for name, value in dense_copies(model.state_dict()).items():
        if "lora_" not in name:
            assert same_bits(value, before[name]), name
    loss_of(model(**make_batch(0))).backward()
    assert any(p.grad is not None for p in model.parameters() if p.requires_grad)
