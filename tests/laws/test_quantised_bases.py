"""Adapters over bases that libraries quantised: where the base lies and how it moves never changes
a bit, and the bits are those of a plain loop over the same modules.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch

from stronghold.errors import ConfigError
from tests.models import loss_of
from tests.support import quantised_ranks
from tests.support.insides import offload_small
from tests.support.quantised_bases import BASES, adapted, base, blocks_of, fp8_on_cpus, token_batch
from tests.support.ranks import ranks_once
from tests.support.training import (
    Run,
    assert_identical,
    config,
    dense_copies,
    initialized,
    moments_of,
    same_bits,
    train,
    train_plain,
    train_windowed,
)

STEPS = 3
PLACES: dict[str, dict[str, Any]] = {
    "one slot, recomputed": {"window": 1, "activations": "recompute"},
    "one slot, kept": {"window": 1, "activations": "keep"},
    "two slots, offloaded": {"window": 2, "activations": "offload"},
    "three slots": {"window": 3, "cpu_threads": 2},
    "one resident": {"window": 1, "resident_layers": 1, "activations": "keep"},
    "whole": {"resident_layers": "all", "resident_updates": "gpu"},
    "moments in files": {"window": 1, "nvme": {"spill": "moments"}},
    "all in files": {"window": 2, "activations": "keep", "nvme": {"spill": "weights"}},
    "early updates": {"window": 2, "early_layers": "all", "activations": "keep"},
    "slow lanes": {"window": 2, "activations": "keep", "emulated": {"jitter_s": 5e-4, "seed": 3}},
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FP8Linear computes on CPUs. Files are read in pieces of a few pages, and small tensors are
    offloaded."""
    monkeypatch.setattr("stronghold.plan.memory.PIECE_BYTES", 4096 * 24)
    offload_small(monkeypatch)
    with fp8_on_cpus():
        yield


def placed(place: str, folder: Path) -> dict[str, Any]:
    section = dict(PLACES[place])
    if "nvme" in section:
        section["nvme"] = {**section["nvme"], "path": str(folder)}
    return section


@functools.cache
def plain(kind: str, accumulation: int = 1, chunk: int = 0) -> Run:
    with fp8_on_cpus():
        return train_plain(
            BASES[kind],
            steps=STEPS,
            clipping=0.5,
            accumulation=accumulation,
            precision="bf16",
            chunks=(blocks_of, chunk) if chunk else None,
        )


def trained(kind: str, section: dict[str, Any], accumulation: int = 1, **more: Any) -> Run:
    settings = config(clipping=0.5, precision="bf16", accumulation=accumulation, section=section)
    return train_windowed(BASES[kind], steps=STEPS, settings=settings, **more)


def is_daily(kind: str, place: str) -> bool:
    """Each format in one place, each place with a format."""
    return list(BASES).index(kind) % len(PLACES) == list(PLACES).index(place)


def daily(*kinds: str) -> list[Any]:
    """All formats. Those that are not `kinds` run with the slow tests."""
    return [pytest.param(kind, marks=() if kind in kinds else pytest.mark.slow) for kind in BASES]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        pytest.param(kind, place, marks=() if is_daily(kind, place) else pytest.mark.slow)
        for kind in BASES
        for place in PLACES
    ],
)
def test_adapters_train_over_a_quantised_base_as_in_a_plain_loop(
    kind: str, place: str, tmp_path: Path
) -> None:
    reports: list[Any] = []
    run = trained(
        kind, placed(place, tmp_path), inspect=lambda engine: reports.append(engine.memory_report())
    )
    expected = plain(kind)
    assert_identical(run, expected)
    assert run.norms == expected.norms
    (report,) = reports
    assert report.host_peak == report.host_planned
    assert report.nvme_peak == report.nvme_planned
    assert (report.nvme_peak > 0) == ("files" in place)
    if place != "whole":
        assert report.gpu_peak == report.gpu_planned


@pytest.mark.parametrize("kind", daily("nf4 double", "int8"))
@pytest.mark.parametrize("policy", ["keep", pytest.param("recompute", marks=pytest.mark.slow)])
def test_chunks_over_a_quantised_base_are_those_of_a_plain_loop(kind: str, policy: str) -> None:
    section = {"window": 1, "chunk": 1, "streams": 2, "activations": policy}
    assert_identical(trained(kind, section), plain(kind, chunk=1))


def test_dora_over_a_4_bit_base_trains_as_in_a_plain_loop() -> None:
    """On a CPU PEFT's DoRA puts `weight.to("cpu")` into the module in each forward. With int8 its
    second forward fails in a plain loop."""
    make = functools.partial(adapted, base, "nf4", dora=True)
    settings = config(clipping=0.5, precision="bf16", section={"window": 1})
    run = train_windowed(make, steps=2, settings=settings)
    expected = train_plain(make, steps=2, clipping=0.5, precision="bf16")
    assert_identical(run, expected)


@pytest.mark.parametrize("kind", daily("nf4 double"))
def test_a_run_over_a_quantised_base_resumes_exactly(kind: str, tmp_path: Path) -> None:
    def engine_of(section: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        settings = config(clipping=0.5, precision="bf16", section=section)
        return initialized(BASES[kind]()[0], settings)

    engine = engine_of({"window": 1})
    train(engine, token_batch, range(2))
    engine.save_checkpoint(tmp_path)
    train(engine, token_batch, range(2, 4))
    expected, moments = dense_copies(engine.module_state_dict()), moments_of(engine)
    engine.destroy()
    engine = engine_of({"window": 2, "resident_layers": 1, "activations": "keep"})
    engine.load_checkpoint(tmp_path)
    train(engine, token_batch, range(2, 4))
    found = dense_copies(engine.module_state_dict())
    assert found.keys() == expected.keys()
    assert all(same_bits(value, expected[name]) for name, value in found.items())
    for name, arrays in moments_of(engine).items():
        assert all(map(torch.equal, arrays, moments[name])), name
    engine.destroy()


# -- other uses of the model -----------------------------------------------------------------------
def plain_model(kind: str) -> Any:
    torch.manual_seed(0)
    return BASES[kind]()[0]


@pytest.mark.parametrize("kind", daily("nf4"))
def test_evaluation_and_a_reference_without_adapters_have_the_bits_of_the_model(kind: str) -> None:
    """As TRL's DPO asks: the base is the policy without adapters. Then training goes on."""
    plain_one = plain_model(kind)
    engine = initialized(plain_model(kind), config(precision="bf16", section={"window": 1}))
    # One after the other: while the engine lives, evaluation is that of CPUs without AVX512-BF16.
    for model in (engine, plain_one):
        model.eval()
    with torch.no_grad():
        logits = engine(**token_batch(7)).logits
        assert torch.equal(logits, plain_one(**token_batch(7)).logits)
        with engine.module.disable_adapter(), plain_one.disable_adapter():
            reference = engine(**token_batch(7)).logits
            assert torch.equal(reference, plain_one(**token_batch(7)).logits)
    assert not torch.equal(logits, reference)
    for model in (engine, plain_one):
        model.train()
    loss, expected = (loss_of(engine(**token_batch(0))), loss_of(plain_one(**token_batch(0))))
    assert torch.equal(loss, expected)
    engine.backward(loss)
    engine.step()
    engine.destroy()


@pytest.mark.parametrize("kind", daily("nf4", "torchao int8"))
def test_the_model_is_given_back_whole(kind: str) -> None:
    """After `destroy` it computes alone, in memory of its own, with its trained adapters."""
    model = plain_model(kind)
    before = dense_copies(model.state_dict())
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    engine = initialized(model, config(precision="bf16", section={"window": 1}))
    train(engine, token_batch, range(1))
    # in training mode: in the other one the library may change the weights
    with torch.no_grad():
        expected = engine(**token_batch(3)).logits
    engine.destroy()
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == identities
    with torch.no_grad():
        assert torch.equal(model(**token_batch(3)).logits, expected)
    for name, value in dense_copies(model.state_dict()).items():
        if "lora_" not in name:
            assert same_bits(value, before[name]), name
    loss_of(model(**token_batch(0))).backward()
    assert any(p.grad is not None for p in model.parameters() if p.requires_grad)


# -- bytes -----------------------------------------------------------------------------------------
# Most bytes per weight of a linear, at these small sizes: codes, scales, code books, and each
# tensor's place at a multiple of 512 bytes.
MOST_BYTES = {"nf4": 0.9, "nf4 double": 1.2, "int8": 1.3, "torchao int8": 1.3, "FP8Linear": 1.2}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "nf4 double" else pytest.mark.slow)
        for kind in MOST_BYTES
    ],
)
def test_bytes_cross_the_link_as_they_are_stored(kind: str) -> None:
    model = plain_model(kind)
    engine = initialized(model, config(precision="bf16", section={"window": 1}))
    for step in range(3):
        train(engine, token_batch, range(step, step + 1))
    now = engine.inspect()
    streamed = [state for state in now.layers if state.layout.streamed]
    linear_weights = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64
    for state in streamed:
        assert state.layout.frozen_bytes < MOST_BYTES[kind] * linear_weights + 8 * 4096
    engine.destroy()


# -- ranks -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Run]]:
    return ranks_once("tests.support.quantised_ranks:two_ranks", 2, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*quantised_ranks.KINDS, "in files"])
def test_two_ranks_over_a_quantised_base_have_the_bits_of_one(
    kind: str, two: list[dict[str, Run]]
) -> None:
    one = quantised_ranks.trained(quantised_ranks.KINDS[0] if kind == "in files" else kind)
    runs = [results[kind] for results in two]
    losses = [loss for pair in zip(runs[0].losses, runs[1].losses, strict=True) for loss in pair]
    for run in runs:
        assert_identical(
            Run(losses=losses, weights=run.weights), Run(losses=one.losses, weights=one.weights)
        )


# -- what is refused -------------------------------------------------------------------------------
def layer_of(model: Any) -> Any:
    return blocks_of(model)[1].self_attn.q_proj.base_layer


def merge(model: Any) -> None:
    model.merge_adapter()


def merge_and_unmerge(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def replace_weight(model: Any) -> None:
    layer_of(model).weight = copy.copy(layer_of(model).weight)


def replace_scales(model: Any) -> None:
    weight = layer_of(model).weight
    weight.quant_state.absmax = weight.quant_state.absmax * 2


def replace_wrapped_scales(model: Any) -> None:
    weight = layer_of(model).weight
    weight.scale = weight.scale * 2


REPLACED = {
    "merged 4 bits": ("nf4 double", merge, ""),
    "merged 8 bits": ("int8", merge_and_unmerge, ""),
    "another parameter": (
        "nf4",
        replace_weight,
        r"layers\.1\.self_attn\.q_proj\.base_layer\.weight",
    ),
    "other scales": ("nf4", replace_scales, r"q_proj\.base_layer\.weight \(absmax\)"),
    "a wrapper's scales": ("torchao int8", replace_wrapped_scales, r"weight \(scale\)"),
}


@pytest.mark.parametrize("case", REPLACED)
def test_new_values_in_the_place_of_a_quantised_weight_are_refused_by_name(case: str) -> None:
    kind, write, name = REPLACED[case]
    engine = initialized(plain_model(kind), config(precision="bf16", section={"window": 1}))
    train(engine, token_batch, range(2))
    write(engine.module)
    with pytest.raises(ConfigError, match=name + r".* another .*engine\.destroy\(\)"):
        engine(**token_batch(2))
    engine.destroy()


@pytest.mark.parametrize("kind", ["nf4", "torchao int8"])
def test_a_quantised_weight_that_a_forward_writes_is_refused_by_name(kind: str) -> None:
    def write(module: Any, *_: Any) -> None:
        weight = module.weight
        scale = weight.scale if kind == "torchao int8" else weight.quant_state.absmax
        with torch.no_grad():
            scale.mul_(2)

    model = plain_model(kind)
    layer_of(model).register_forward_pre_hook(write)
    engine = initialized(model, config(precision="bf16", section={"window": 1}))
    with pytest.raises(ConfigError, match=r"wrote into the parameters of .*layers\.1"):
        engine(**token_batch(0))
    engine.destroy()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("FP8Linear", r"q_proj\.base_layer\.weight is torch\.float8_e4m3fn and trains.*freeze it"),
        ("torchao int8", r'q_proj\.base_layer\.weight" is a Int8Tensor .*requires grad'),
    ],
)
def test_a_quantised_weight_that_requires_grad_is_refused_before_training(
    kind: str, message: str
) -> None:
    model = plain_model(kind)
    layer_of(model).weight.requires_grad_(True)
    places = {name: p.data_ptr() for name, p in model.named_parameters() if p.dim() == 1}
    with pytest.raises(ConfigError, match=message):
        initialized(model, config(precision="bf16", section={"window": 1}))
    assert {name: p.data_ptr() for name, p in model.named_parameters() if p.dim() == 1} == places


def test_packing_what_a_library_has_quantised_is_refused_with_the_way() -> None:
    section = {"window": 1, "frozen": "nf4"}
    with pytest.raises(ConfigError, match=r"stronghold\.frozen: .*leave the key out: .*already"):
        initialized(plain_model("nf4"), config(precision="bf16", section=section))


def test_a_weight_that_is_not_quantised_yet_is_refused_before_training() -> None:
    model = plain_model("nf4")
    later = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.bfloat16)
    blocks_of(model)[1].self_attn.o_proj = later
    with pytest.raises(ConfigError, match=r'o_proj\.weight" is a Params4bit.*not quantised yet'):
        initialized(model, config(precision="bf16", section={"window": 1}))


def test_a_second_tensor_of_a_library_over_the_codes_moves_with_them() -> None:
    """bitsandbytes computes with `CB`, another tensor object over the weight's memory."""
    model = plain_model("int8")
    engine = initialized(model, config(precision="bf16", section={"window": 1}))
    layer = layer_of(model)
    for _ in range(2):
        codes = layer.weight.CB if layer.state.CB is None else layer.state.CB
        assert codes.data_ptr() == layer.weight.data_ptr()
        engine.backward(loss_of(engine(**token_batch(0))))
        engine.step()
    engine.destroy()
