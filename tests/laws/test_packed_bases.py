"""`stronghold.frozen`: frozen weights are packed on the host, and decoded where the layer computes.

The bits are those of the plain loop over the decoded weights, wherever the packed weights lie.
"""

from __future__ import annotations

import functools
import io
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.model.packed_formats import FORMATS
from tests.models import loss_of
from tests.support.checkpoints import assert_same
from tests.support.packed import (
    MODELS,
    decoded,
    llama,
    mixed,
    packed_names,
    token_batch,
    with_decoded_weights,
)
from tests.support.room import offload_small
from tests.support.training import (
    Run,
    assert_identical,
    config,
    initialized,
    moments_of,
    train_plain,
    train_windowed,
)

STEPS = 3
PLACES: dict[str, dict[str, Any]] = {
    "one slot": {"window": 1},
    "one slot, recomputed": {"window": 1, "activations": "recompute"},
    "two slots": {"window": 2},
    "hostile": {"window": 2, "emulated": {"jitter_s": 1e-3}},
    "offloaded": {"window": 2, "activations": "offload"},
    "one resident": {"window": 1, "resident_layers": 1},
    "updated on the gpu": {"window": 1, "resident_layers": 1, "resident_updates": "gpu"},
    "all resident": {"resident_layers": "all"},
    "all on the gpu": {"resident_layers": "all", "resident_updates": "gpu"},
    "moments in files": {"window": 1, "nvme": {"spill": "moments"}},
    "all in files": {"window": 1, "nvme": {"spill": "weights"}},
}
# The default run has the places that differ most.
QUICK = [
    *((place, "llama", "nf4") for place in ("one slot", "hostile", "all on the gpu")),
    ("all in files", "llama", "nf4"),
    ("two slots", "llama", "nf4"),
    ("one slot, recomputed", "experts", "nf4"),
]


def placed(place: str, folder: Path, **more: Any) -> dict[str, Any]:
    section = {**PLACES[place], **more}
    if "nvme" in section:
        section["nvme"] = {**section["nvme"], "path": str(folder)}
    return section


@functools.cache
def plain(model: str, name: str, precision: str, accumulation: int = 1) -> Run:
    factory = with_decoded_weights(MODELS[model], name, precision)
    return train_plain(
        factory, steps=STEPS, clipping=0.5, precision=precision, accumulation=accumulation
    )


CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product(PLACES, MODELS, FORMATS)
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("place", "model", "name"), CASES)
def test_a_packed_base_has_the_bits_of_its_decoded_weights(
    place: str, model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stronghold.plan.host_memory.PIECE_BYTES", 4096 * 24)
    offload_small(monkeypatch)
    reports: list[Any] = []
    section = placed(place, tmp_path, frozen=name)
    run = train_windowed(
        MODELS[model],
        steps=STEPS,
        settings=config(clipping=0.5, precision="bf16", section=section),
        inspect=lambda engine: reports.append(engine.memory_report()),
    )
    expected = plain(model, name, "bf16")
    assert run.norms == expected.norms
    assert_identical(run, expected)
    (report,) = reports
    assert report.host_peak == report.host_planned
    assert report.gpu_peak == report.gpu_planned
    assert report.nvme_peak == report.nvme_planned


@pytest.mark.parametrize(
    ("place", "streams"),
    [
        ("one slot", 2),
        pytest.param("one slot", 1, marks=pytest.mark.slow),
        pytest.param("all on the gpu", 1, marks=pytest.mark.slow),
        pytest.param("all on the gpu", 2, marks=pytest.mark.slow),
    ],
)
def test_chunks_have_the_bits_of_the_decoded_weights_in_chunks(place: str, streams: int) -> None:
    """A chunk changes bits: both sides have it."""
    section = {**PLACES[place], "chunk": 1, "streams": streams}
    run = train_windowed(
        llama,
        steps=STEPS,
        settings=config(clipping=0.5, precision="bf16", section={**section, "frozen": "nf4"}),
    )
    expected = train_windowed(
        with_decoded_weights(llama, "nf4", "bf16"),
        steps=STEPS,
        settings=config(clipping=0.5, precision="bf16", section=section),
    )
    assert_identical(run, expected)


# -- what a program sees ---------------------------------------------------------------------------
def engine_of(place: str = "one slot", folder: Path = Path(), name: str = "nf4") -> Any:
    torch.manual_seed(0)
    model, _ = llama()
    return initialized(
        model, config(clipping=0.5, precision="bf16", section=placed(place, folder, frozen=name))
    )


def train(engine: Any, steps: int) -> list[torch.Tensor]:
    losses = []
    for _ in range(steps):
        loss = loss_of(engine(**token_batch(engine.micro_steps)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    return losses


def expected_weights(name: str = "nf4") -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, _ = llama()
    parameters = dict(model.named_parameters())
    names = packed_names(model, name, torch.bfloat16)
    return {each: decoded(parameters[each].detach().bfloat16(), name) for each in names}


@pytest.mark.parametrize(
    "place",
    [
        "one slot",
        "all on the gpu",
        pytest.param("one resident", marks=pytest.mark.slow),
        pytest.param("all in files", marks=pytest.mark.slow),
    ],
)
def test_a_program_reads_the_decoded_weights_at_any_time(place: str, tmp_path: Path) -> None:
    engine = engine_of(place, tmp_path)
    expected = expected_weights()
    model = engine.module
    parameters = dict(model.named_parameters())
    for steps in (0, 2):
        train(engine, steps)
        for name, values in expected.items():
            parameter = parameters[name]
            assert (parameter.shape, parameter.dtype) == (values.shape, torch.bfloat16)
            assert torch.equal(parameter.detach().cpu(), values)
            assert torch.equal(model.state_dict()[name].cpu(), values)
    train(engine, 1)
    engine.destroy()
    for name, values in expected.items():
        assert parameters[name] is model.get_parameter(name)
        assert type(parameters[name]) is nn.Parameter
        assert torch.equal(parameters[name], values)
    loss_of(model(**token_batch(9))).backward()


@pytest.mark.parametrize("place", ["one slot", "all on the gpu"])
def test_what_a_program_writes_into_a_packed_weight_is_refused(place: str) -> None:
    engine = engine_of(place)
    train(engine, 1)
    name = next(iter(expected_weights()))
    with torch.no_grad():
        engine.module.get_parameter(name).mul_(2.0)
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} was written.*frozen"):
        train(engine, 1)
    engine.destroy()


@pytest.mark.parametrize("place", ["one slot", "all on the gpu"])
def test_after_a_refused_write_the_weight_is_the_packed_one(place: str) -> None:
    """One block alone is packed. So no other layer takes the buffer in which the program wrote."""

    def make_engine() -> Any:
        torch.manual_seed(0)
        model, _ = llama()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.3" not in name or "lora_" in name)
        section = {**PLACES[place], "frozen": "nf4"}
        return initialized(model, config(precision="bf16", section=section))

    def write(module: nn.Module, args: Any) -> None:
        module.weight.data.mul_(2.0)

    engine, untouched = make_engine(), make_engine()
    for each in (engine, untouched):
        train(each, 1)
    linear = engine.module.get_submodule("base_model.model.model.layers.3.mlp.up_proj")
    hook = linear.register_forward_pre_hook(write)
    with torch.no_grad(), pytest.raises(ConfigError, match=r"up_proj.* was written"):
        engine(**token_batch(9))
    hook.remove()
    with torch.no_grad():
        loss, expected = (loss_of(each(**token_batch(9))) for each in (engine, untouched))
    assert torch.equal(loss, expected)
    assert torch.equal(train(engine, 1)[0], train(untouched, 1)[0])
    engine.destroy()
    untouched.destroy()


def test_a_state_dict_with_the_same_packed_weights_is_loaded() -> None:
    """A program keeps its best weights, and loads them again: adapters are others, the base is
    not."""
    engine = engine_of()
    train(engine, 1)
    best = {name: value.clone() for name, value in engine.module.state_dict().items()}
    with torch.no_grad():
        expected = loss_of(engine(**token_batch(9)))
    train(engine, 2)
    engine.module.load_state_dict(best)
    with torch.no_grad():
        assert torch.equal(loss_of(engine(**token_batch(9))), expected)
    name = next(iter(expected_weights()))
    engine.module.load_state_dict({**best, name: best[name] * 2.0})
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} was written"):
        train(engine, 1)
    engine.destroy()


def test_a_packed_weight_that_is_to_train_now_is_refused() -> None:
    engine = engine_of()
    name = next(iter(expected_weights()))
    engine.module.get_parameter(name).requires_grad_(True)
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} was frozen in"):
        train(engine, 1)
    engine.destroy()


def test_a_model_is_saved_whole_and_a_parameter_alone() -> None:
    """Layers have tensors of several dtypes side by side. torch.save refuses one storage of two
    dtypes, and saves all of a storage for any part of it."""
    torch.manual_seed(0)
    model, make_batch = mixed()
    section = {"window": 1, "frozen": "nf4", "dtypes": "own"}
    engine = initialized(model, config(precision="bf16", section=section))
    train(engine, 2)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        expected = loss_of(engine(**make_batch(9)))
        assert torch.equal(loss_of(loaded(**make_batch(9))), expected)
    for parameter in model.parameters():
        for value in (parameter, parameter.data, parameter.detach()):
            file = io.BytesIO()
            torch.save(value, file)
            assert parameter.nbytes <= file.tell() < parameter.nbytes + 8192
    engine.destroy()


def test_a_view_of_a_decoded_weight_that_a_program_keeps_is_refused() -> None:
    engine = engine_of()
    kept: list[torch.Tensor] = []
    block = engine.module.get_submodule("base_model.model.model.layers.1.mlp")

    def keep(module: nn.Module, args: Any) -> None:
        kept.append(module.up_proj.weight.detach())

    block.register_forward_pre_hook(keep)
    with pytest.raises(ConfigError, match=r"view of a packed weight.*still held"):
        train(engine, 1)
    kept.clear()
    engine.destroy()


def test_nothing_to_pack_is_refused_before_anything_is_taken() -> None:
    torch.manual_seed(0)
    model, _ = llama()
    model.requires_grad_(True)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with pytest.raises(ConfigError, match=r'stronghold\.frozen: got "nf4", but no block has'):
        initialized(model, config(precision="bf16", section={"frozen": "nf4"}))
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


# -- checkpoints -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("place", "then", "exclude"),
    [
        ("one slot", "all on the gpu", True),
        ("all in files", "two slots", False),
        pytest.param("one slot", "all on the gpu", False, marks=pytest.mark.slow),
        pytest.param("all in files", "two slots", True, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_resumes_in_another_place(
    place: str, then: str, exclude: bool, tmp_path: Path
) -> None:
    engine = engine_of(place, tmp_path)
    train(engine, 2)
    engine.save_checkpoint(str(tmp_path / "saved"), exclude_frozen_parameters=exclude)
    losses = train(engine, 2)
    moments = moments_of(engine)
    engine.destroy()
    resumed = engine_of(then, tmp_path)
    resumed.load_checkpoint(str(tmp_path / "saved"))
    for loss, other in zip(train(resumed, 2), losses, strict=True):
        assert torch.equal(loss.cpu(), other.cpu())
    assert_same(
        {f"{k} {i}": m for k, v in moments_of(resumed).items() for i, m in enumerate(v)},
        {f"{k} {i}": m for k, v in moments.items() for i, m in enumerate(v)},
    )
    resumed.destroy()


# -- bytes -----------------------------------------------------------------------------------------
def test_a_packed_weight_costs_its_format_on_the_host_and_on_the_link() -> None:
    """At the sizes of real layers the padding of ranges is small."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(3))
    model = Stacked(blocks)
    engine = initialized(
        model, config(precision="bf16", section={"window": 1, "frozen": "nf4", "layers": "blocks"})
    )
    x = torch.randn(2, 1024, dtype=torch.bfloat16)
    before = 0
    for _ in range(3):
        before = engine.inspect().traffic.fetched_bytes
        engine.backward(engine(x).float().square().mean())
        engine.step()
    now = engine.inspect()
    num_frozen = 3 * 1024 * 1024
    on_host = sum(now.layers[k].arrays["weights"].nbytes for k in now.layout.streamed)
    assert on_host <= 0.56 * num_frozen
    per_step = now.traffic.fetched_bytes - before
    # Forward fetches 3 layers. Backward begins with the one that is there.
    assert per_step <= 5 / 3 * 0.56 * num_frozen + 1e5
    assert now.layout.num_parameters >= num_frozen
    engine.destroy()


class Stacked(nn.Module):
    """Frozen blocks behind a scale that trains."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))
        self.blocks = blocks.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x
