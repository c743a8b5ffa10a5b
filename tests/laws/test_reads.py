"""Whoever asks a module for its parameters reads the newest weights, knowing nothing of engines."""

from __future__ import annotations

import copy
import ctypes
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from stronghold.train.fragments import ATTRIBUTES
from tests.models import HIDDEN, MODELS, VOCAB, loss_of
from tests.support.children import run
from tests.support.pairs import pairs
from tests.support.quiet import law_of_time, on_time
from tests.support.twin import Twin, twin

# Some 20 ms an update of each layer: what does not wait reads weights of two steps.
SLOW = {"emulated": {"update_gbps": 0.02}}
# Some 200 ms: the thread that looks may be late by many of the scheduler's turns.
VERY_SLOW = {"emulated": {"update_gbps": 0.002}}
KINDS: dict[str, dict[str, Any]] = {
    "streamed": SLOW,
    "resident": {**SLOW, "resident_layers": 1},
    "on the device": {**SLOW, "resident_layers": 1, "resident_updates": "gpu"},
}
PLACES: dict[str, dict[str, Any]] = {
    **KINDS,
    "all resident": {**SLOW, "resident_layers": "all", "resident_updates": "host"},
    "whole": {"resident_layers": "all", "resident_updates": "gpu"},
    "on disk": {**SLOW, "nvme": {"path": "", "spill": "weights"}},
}


def section_of(place: str, folder: Path) -> dict[str, Any]:
    section = dict(PLACES[place])
    if "nvme" in section:
        section["nvme"] = {**section["nvme"], "path": str(folder)}
    return section


class Program:
    """What a program has of a model: itself, the optimizer's groups, and a list that it made before
    the first step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model: Any = model
        self.groups = optimizer.param_groups
        self.listed = list(model.parameters())
        self.weak = [weakref.ref(parameter) for parameter in self.listed]
        self.named = dict(model.named_parameters())
        self.hidden_in_closure = (lambda weight: lambda: weight)(self.model.head.weight)


def through_pickle(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(p: Program) -> list[torch.Tensor]:
    average = AveragedModel(p.model)
    average.update_parameters(p.model)
    return list(average.module.parameters())


Way = Callable[[Program], Any]
# Every way to come by a parameter, and to look at what it holds, that a program has.
READS: dict[str, Way] = {
    "module.weight": lambda p: p.model.blocks[1].mlp.up.weight.clone(),
    "module.weight of the head": lambda p: p.model.head.weight * 2.0,
    "module._parameters": lambda p: p.model.blocks[2].norm1._parameters["weight"].sum(),
    "getattr": lambda p: getattr(p.model.blocks[0].attention.out, "bias").clone(),  # noqa: B009
    "get_parameter": lambda p: p.model.get_parameter("blocks.0.mlp.up.weight").norm(),
    "parameters()": lambda p: [w.abs().max() for w in p.model.parameters()],
    "named_parameters()": lambda p: [w.clone() for _, w in p.model.named_parameters()],
    "parameters() of a part": lambda p: [w.clone() for w in p.model.blocks[2].parameters()],
    "param_groups": lambda p: [w.clone() for g in p.groups for w in g["params"]],
    "a list that was kept": lambda p: [w.clone() for w in p.listed],
    "a dict that was kept": lambda p: [w.mean() for w in p.named.values()],
    "weak references": lambda p: [ref().clone() for ref in p.weak],
    "a closure": lambda p: p.hidden_in_closure().clone(),
    "state_dict()": lambda p: [w.clone() for w in p.model.state_dict().values()],
    "state_dict() of a part": lambda p: [w.clone() for w in p.model.head.state_dict().values()],
    "state_dict(keep_vars)": lambda p: [w + 0 for w in p.model.state_dict(keep_vars=True).values()],
    ".data": lambda p: [w.data.clone() for w in p.listed],
    ".detach()": lambda p: [w.detach().clone() for w in p.listed],
    "NumPy": lambda p: [torch.tensor(w.detach().numpy()) for w in p.listed],
    "np.asarray": lambda p: torch.tensor(np.array(p.listed[0].detach())),
    "DLPack": lambda p: torch.from_dlpack(p.listed[1].detach()).clone(),
    "its storage": lambda p: bytes_of(p.listed[1]),
    "an element": lambda p: [w.flatten()[0].item() for w in p.listed],
    "a row": lambda p: p.model.embedding.weight[3].clone(),
    "tolist()": lambda p: p.listed[-1].tolist(),
    "repr": lambda p: repr(p.model.blocks[1].norm2.bias).replace("Hidden", ""),
    "F.linear": lambda p: F.linear(torch.ones(2, HIDDEN), p.model.head.weight.float()),
    "torch._foreach": lambda p: nn.utils.get_total_norm(p.listed, foreach=True),
    "torch.stack": lambda p: torch.stack([b.norm1.weight for b in p.model.blocks]),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector(p.listed),
    "an average": lambda p: torch.zeros(()).lerp(p.listed[0].detach().float().sum(), 0.5),
    "AveragedModel": averaged,
    "copy.deepcopy": lambda p: copy.deepcopy(p.listed[0]),
    "copy.copy": lambda p: copy.copy(p.listed[-1]),
    "copy.deepcopy of a part": lambda p: list(copy.deepcopy(p.model.blocks[1]).parameters()),
    "torch.save": lambda p: through_pickle(p.listed[2]),
    "torch.save of a part": lambda p: list(through_pickle(p.model.blocks[0]).parameters()),
    "functional_call": lambda p: functional_call(
        nn.Linear(HIDDEN, VOCAB, bias=False),
        {"weight": p.model.head.weight.float()},
        torch.ones(1, HIDDEN),
    ),
    "torch.ops": lambda p: torch.ops.aten.mul.Tensor(p.listed[0], p.listed[0]),
    "nn.Parameter.data.__get__": lambda p: torch.Tensor.data.__get__(p.listed[1]).clone(),
}


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory at its address, as code in C reads it."""
    size = tensor.numel() * tensor.element_size()
    return torch.tensor(list((ctypes.c_ubyte * size).from_address(tensor.data_ptr())))


def assert_equal(found: Any, expected: Any, what: str) -> None:
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), what
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other, what)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found.detach().cpu(), expected.detach()), f"{what}: of another step"
        assert type(found) is type(expected), what
    else:
        assert found == expected, what


def pending(both: Twin) -> bool:
    """Whether an update of the last step is still on its way."""
    layers = both.engine.inspect().layers
    return any(not layer.writers["weights"].done for layer in layers)


@law_of_time
@pytest.mark.parametrize(
    ("place", "precision"),
    [(place, "fp32") for place in PLACES]
    + [pytest.param(place, "bf16", marks=pytest.mark.slow) for place in PLACES],
)
def test_every_way_to_come_by_a_parameter_shows_the_last_step(
    place: str, precision: str, tmp_path: Path
) -> None:
    section = section_of(place, tmp_path)
    with twin("gpt", precision=precision, section=section) as both:
        ours = Program(both.model, both.engine.optimizer)
        plain = Program(both.plain, both.shown)
        waited = 0
        ways = list(READS.items())
        # what one reads is not all that is under way
        at_once = 1 if place == "streamed" else 3
        steps = [ways[first : first + at_once] for first in range(0, len(ways), at_once)]
        for step, some in enumerate(steps):
            both.train(step)
            waited += pending(both)
            for way, read in some:
                # it has no bf16
                if precision == "fp32" or way not in ("NumPy", "np.asarray"):
                    assert_equal(read(ours), read(plain), way)
    on_time(place == "whole" or waited > len(steps) // 4, "updates were done before the reads")


UPDATES: dict[str, dict[str, Any]] = {
    "early updates": {"clipping": 0.0, "early": "all"},
    "gated updates": {"clipping": 1.0},
}


@pytest.mark.parametrize("updates", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize("place", ["streamed", "all resident", "on the device", "whole"])
def test_weights_between_backward_and_step_are_of_the_step_before(
    place: str, updates: dict[str, Any]
) -> None:
    with twin("gpt", section=PLACES[place], **updates) as both:
        for step in range(3):
            both.backward(both.on(step))
            now = both.engine.inspect()
            assert any(layer.is_updated_early for layer in now.layers) == bool(now.plan.early)
            assert_same(both.model, both.plain)
            with torch.no_grad():
                assert torch.equal(both.on(9)(both.engine), both.on(9)(both.plain))
            both.step()


# What shows the memory itself: whoever has kept it asks nobody.
KEPT: dict[str, Callable[[nn.Parameter], Any]] = {
    ".data": lambda weight: weight.data,
    ".detach()": lambda weight: weight.detach(),
    "a view": lambda weight: weight.detach().view(-1)[1:],
    "NumPy": lambda weight: weight.detach().numpy(),
    "a row": lambda weight: weight.detach()[0],
}


@pytest.mark.parametrize(("place", "keep", "updates"), pairs(list(PLACES), list(KEPT), UPDATES))
def test_an_alias_that_was_kept_shows_the_last_step(
    place: str, keep: str, updates: dict[str, Any], tmp_path: Path
) -> None:
    """After `synchronize`; and what is written through it counts."""

    def kept(model: nn.Module) -> list[Any]:
        return [KEPT[keep](parameter) for parameter in model.parameters()]

    def values(aliases: list[Any]) -> list[Any]:
        return [torch.as_tensor(alias).clone() for alias in aliases]

    with twin("gpt", section=section_of(place, tmp_path), **updates) as both:
        ours, plain = kept(both.model), kept(both.plain)
        for step in range(4):
            both.train(step)
            both.engine.synchronize()
            assert_equal(values(ours), values(plain), keep)
            for alias in (*ours, *plain):
                alias *= 0.5
            with torch.no_grad():
                assert torch.equal(both.on(9)(both.engine), both.on(9)(both.plain))


def test_nothing_waits_for_a_program_that_keeps_no_alias(caplog: pytest.LogCaptureFixture) -> None:
    """A step that waits says so."""
    with twin("gpt", section=SLOW) as both:
        for step in range(3):
            both.train(step)
            assert "keeps aliases" not in caplog.text
            for parameter in both.model.parameters():
                parameter.data.sum(), parameter.detach().numpy().sum()
            both.model.state_dict()


@law_of_time
def test_what_needs_no_value_does_not_wait() -> None:
    with twin("gpt", section=VERY_SLOW) as both:
        both.train(0)
        both.train(1)
        before = pending(both)
        last = both.model.blocks[2].mlp.down.weight
        fence = both.engine.inspect().layers[3].writers["weights"]
        assert (last.shape, last.dtype, last.grad) == ((HIDDEN, 4 * HIDDEN), torch.float32, None)
        assert (last.requires_grad, last.is_leaf, last.numel()) == (True, True, 4 * HIDDEN**2)
        assert isinstance(last, nn.Parameter)
        assert {last} == {both.model.get_parameter("blocks.2.mlp.down.weight")}
        nn.utils.clip_grad_norm_(both.model.parameters(), 1.0)
        both.model.zero_grad()
        waiting = not fence.done
    on_time(before and waiting, "the updates were done before anybody asked")


def assert_same(ours: nn.Module, plain: nn.Module) -> None:
    pairs = zip(ours.named_parameters(), plain.named_parameters(), strict=True)
    for (name, parameter), (_, expected) in pairs:
        assert torch.equal(parameter.cpu(), expected), f"{name} is of another step"


@law_of_time
def test_a_part_of_the_model_waits_for_its_own_updates_alone() -> None:
    with twin("gpt", section=VERY_SLOW) as both:
        both.train(0)
        fences = [both.engine.inspect().layers[i].writers["weights"] for i in range(3)]
        next(both.model.parameters()).sum()
        late = not fences[-1].done
        both.model.state_dict()
        assert all(fence.done for fence in fences)
    on_time(late, "the last update was done before anybody waited for it")


def test_torch_is_as_it_was_when_the_last_engine_is_gone() -> None:
    before = dict(vars(nn.Parameter))
    one, other = Twin("gpt"), Twin("llama")
    names = {"data", "set_", *ATTRIBUTES}
    assert vars(nn.Parameter).keys() - before.keys() == names
    one.engine.destroy()
    assert vars(nn.Parameter).keys() - before.keys() == names
    other.train(0)
    assert_same(other.model, other.plain)
    other.engine.destroy()
    assert dict(vars(nn.Parameter)) == before


SCRIPT = """
import sys, torch, stronghold
from tests.models import MODELS, loss_of
from tests.support.training import config
folder = sys.argv[1]
model, make_batch = MODELS["gpt"]()
section = {"window": 1, "trace": folder + "/trace.json", "async_checkpoint": True}
if sys.argv[2:]:
    section["nvme"] = {"path": folder, "spill": "weights"}
engine, *_ = stronghold.initialize(
    model=model, config=config(section=section), model_parameters=model.parameters()
)
engine.backward(loss_of(engine(**make_batch(0))))
engine.step()
engine.save_checkpoint(folder + "/saved")
engine.itself = engine
"""


@pytest.mark.parametrize("options", [[], ["in files"]], ids=["in memory", "in files"])
def test_what_a_program_owes_the_disk_is_there_when_it_ends(
    options: list[str], tmp_path: Path
) -> None:
    """It never destroys its engine, as programs of frameworks do not; and is not disturbed."""
    status, said = run(SCRIPT, tmp_path, *options, folder=tmp_path)
    assert status == 0, said
    assert "Exception" not in said
    assert (tmp_path / "trace.json").stat().st_size > 0
    assert (tmp_path / "saved" / "latest").read_text().strip() == "global_step1"


BUSY = """
import torch, stronghold
from tests.models import MODELS
from tests.support.training import config
model, _ = MODELS["gpt"]()
engine, *_ = stronghold.initialize(
    model=model, config=config(), model_parameters=model.parameters()
)
here, there = torch.ones(40_000_000), torch.empty(40_000_000)
device = engine.inspect().device
done = device.fetch.submit("fetch 0", lambda: [there.copy_(here) for _ in range(20)])
device.update.submit("update 0", lambda: 1 / 0)
engine.itself = engine, done
"""


def test_a_program_that_ends_while_a_lane_computes_is_not_aborted(tmp_path: Path) -> None:
    """The interpreter ends threads that are in torch's code by aborting the process."""
    status, said = run(BUSY, folder=tmp_path)
    assert (status, "terminate" in said) == (0, False), said
    assert "update 0 failed" in said  # nobody else has told of it


# -- torch.compile ---------------------------------------------------------------------------------


def compiled_blocks(model: Any, batch: Any) -> Any:
    for block in model.blocks:
        block.compile(backend="eager")
    loss_of(model(**batch)).backward()
    model.zero_grad()
    return model


@pytest.mark.parametrize("clipping", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_blocks_that_were_compiled_and_called_before_train_the_newest_weights(
    clipping: float,
) -> None:
    torch.compiler.reset()
    model, make_batch = MODELS["gpt"]()
    called = compiled_blocks(model, make_batch(0))
    section = {**SLOW, "activations": "keep"}
    with twin("gpt", of=model, section=section, clipping=clipping) as both:
        for step in range(4):
            loss, expected = both.on(step)(called), both.plain_backward(both.on(step))
            both.engine.backward(loss)
            assert torch.equal(loss, expected)
            both.step()
            if step == 1:
                assert_same(both.model, both.plain)
