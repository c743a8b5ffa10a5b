"""Laws of weights that a program writes by hand between two steps: in place they count, as in plain
PyTorch; what cannot count is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stronghold
from stronghold.errors import ConfigError
from tests.models import MODELS
from tests.support.pairs import pairs
from tests.support.training import config, initialized
from tests.support.twin import Twin, twin

SLOW = {"emulated": {"update_gbps": 0.05}}  # else a write finds nothing under way
SECTIONS: dict[str, dict[str, Any]] = {
    "streamed": {"window": 2, **SLOW},
    "resident": {"resident_layers": "all", "resident_updates": "host", **SLOW},
    "updated on the gpu": {"resident_layers": 1, "resident_updates": "gpu", "window": 1},
    "whole": {"resident_layers": "all", "resident_updates": "gpu"},
}


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.05, 0.05)


@torch.no_grad()
def renew_the_head(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    nn.init.normal_(model.head.weight, std=0.1, generator=generator)


def renew_by_its_own_method(model: nn.Module) -> None:
    torch.manual_seed(4)
    for module in (model.head, model.blocks[1].mlp.up, model.blocks[2].norm1):
        module.reset_parameters()


def clip_data(model: nn.Module) -> None:
    for parameter in KEPT[id(model)]:
        parameter.data.clamp_(-0.05, 0.05)


def scale_in_a_batch(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(KEPT[id(model)], 0.7)


def assign_elements(model: nn.Module) -> None:
    with torch.no_grad():
        model.blocks[0].mlp.up.weight[0] = 0.125
        model.embedding.weight[:, 1] = 0.25
        model.blocks[2].attention.out.bias.data[...] = 0.5


def merge(model: nn.Module) -> None:
    """As adapters are merged: added to an alias, which is assigned."""
    for block in model.blocks:
        merged = block.mlp.up.weight.data
        merged += 0.01 * block.mlp.down.weight.data.T
        block.mlp.up.weight.data = merged


def halve_by_a_foreign_kernel(model: nn.Module) -> None:
    """Torch sees nothing of it but what it is told."""
    for parameter in model.parameters():
        parameter.detach().numpy()[...] *= 0.5
        torch.autograd.graph.increment_version(parameter)


def assign(model: nn.Module) -> None:
    for parameter in KEPT[id(model)]:
        parameter.data = 0.5 * parameter.data


KEPT: dict[int, list[nn.Parameter]] = {}  # of each model, from before the first step


def same_outputs(both: Twin) -> None:
    with torch.no_grad():
        assert torch.equal(both.on(9)(both.engine), both.on(9)(both.plain))


UPDATES: dict[str, dict[str, Any]] = {
    "early updates": {"clipping": 0.0, "early": "all"},
    "gated updates": {"clipping": 1.0},
}
WRITES = [
    assign,
    clamp,
    renew_the_head,
    renew_by_its_own_method,
    clip_data,
    scale_in_a_batch,
    assign_elements,
    merge,
    halve_by_a_foreign_kernel,
]


@pytest.mark.parametrize(("section", "updates", "write"), pairs(list(SECTIONS), UPDATES, WRITES))
def test_what_is_written_in_place_is_used_and_trained(
    section: str, updates: dict[str, Any], write: Callable[[nn.Module], None]
) -> None:
    with twin(section=SECTIONS[section], **updates) as both:
        KEPT.update({id(model): list(model.parameters()) for model in (both.model, both.plain)})
        for step in range(4):
            both.train(step)
            write(both.model)
            write(both.plain)
            if step == 1:
                same_outputs(both)
            # nothing is under way, and slots hold what the pass has left in them
            if step == 2:
                write(both.model)
                write(both.plain)
        same_outputs(both)
        KEPT.clear()


def halve_in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def halve_by_assignment(weight: nn.Parameter) -> None:
    weight.data = 0.5 * weight.data


@pytest.mark.parametrize("halve", [halve_in_place, halve_by_assignment])
@pytest.mark.parametrize("name", ["head", "blocks.0.mlp.up"])
@pytest.mark.parametrize("section", SECTIONS)
def test_what_a_hook_writes_into_weights_that_backward_reads_counts_or_is_refused(
    section: str, name: str, halve: Callable[[nn.Parameter], None]
) -> None:
    with twin(section=SECTIONS[section], clipping=1.0) as both:
        both.train(0)
        handles = []
        for model in (both.model, both.plain):
            weight = model.get_submodule(name).weight
            last = model.embedding.weight  # whose gradient is the last one
            handles.append(last.register_hook(lambda _, weight=weight: halve(weight)))
        if halve is halve_in_place and section in ("updated on the gpu", "whole"):
            both.train(1)
        else:
            with pytest.raises(ConfigError, match=rf"a hook in backward .* {name[:8]}"):
                both.engine.backward(both.on(1)(both.engine))
        for handle in handles:
            handle.remove()
        both.train(2)
        both.train(3)


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_full_backward_hook"])
@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("section", SECTIONS)
def test_what_is_written_before_a_pass_that_does_not_end_is_kept(
    section: str, raised: type[BaseException], hook: str
) -> None:
    def fail(*_: Any) -> None:
        raise raised

    with twin(section=SECTIONS[section]) as both:
        KEPT.update({id(model): list(model.parameters()) for model in (both.model, both.plain)})
        both.train(0)
        for model in (both.model, both.plain):
            clip_data(model)
            scale_in_a_batch(model)
        handle = getattr(both.model.blocks[2], hook)(fail)
        with pytest.raises(raised):
            both.engine.backward(both.on(1)(both.engine))
        handle.remove()
        same_outputs(both)
        both.train(2)
        KEPT.clear()


def test_what_is_written_last_is_in_the_model_that_is_given_back() -> None:
    model, _ = MODELS["gpt"]()
    engine = initialized(model, config(section={"window": 1}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    engine.destroy()
    assert all(bool((parameter == 0.25).all()) for parameter in model.parameters())


def resize(model: nn.Module) -> None:
    weight = next(model.parameters())
    weight.data = torch.cat([weight.data, weight.data])


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "model.half()": (nn.Module.half, "has the dtype .*before stronghold"),
    "resized": (resize, "has the shape .*before stronghold"),
}


@pytest.mark.parametrize("how", REFUSED)
@pytest.mark.parametrize("section", SECTIONS)
def test_a_parameter_that_points_at_other_values_is_refused(section: str, how: str) -> None:
    point, match = REFUSED[how]
    both = Twin(section=SECTIONS[section])
    both.train(0)

    def go_on() -> None:
        point(both.model)
        both.engine.backward(both.on(1)(both.engine))

    with pytest.raises(ConfigError, match=match):
        go_on()
    both.engine.destroy()


@pytest.mark.parametrize("section", SECTIONS)
def test_a_parameter_that_points_at_a_copy_of_itself_is_taken_back(section: str) -> None:
    """`model.to(device)` makes one where the model rests elsewhere."""
    with twin(section=SECTIONS[section]) as both:
        both.train(0)
        for parameter in both.model.parameters():
            parameter.data = parameter.data.clone()
        both.train(1)
        both.train(2)


def swap(model: Any) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def renew_a_bias(model: Any) -> None:
    model.norm.bias = nn.Parameter(torch.ones_like(model.norm.bias))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "head.weight is another parameter": lambda model: setattr(
        model, "head", copy.deepcopy(model.head)
    ),
    "norm.bias is another parameter": renew_a_bias,
    "blocks.0.norm1.weight is another parameter": swap,
    "blocks.3.norm1.weight is new": lambda model: model.blocks.append(
        copy.deepcopy(model.blocks[0])
    ),
    "blocks.2.norm1.weight is gone": lambda model: model.blocks.pop(2),
    "blocks.1.adapter.weight is new": lambda model: model.blocks[1].add_module(
        "adapter", nn.Linear(2, 2)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("section", ["streamed", "whole"])
def test_a_model_that_was_changed_is_neither_trained_nor_saved(
    section: str, change: str, tmp_path: Path
) -> None:
    both = Twin(section=SECTIONS[section])
    both.train(0)
    CHANGES[change](both.model)
    refused = pytest.raises(ConfigError, match=f"^{change}: the model was changed after")
    with refused:
        both.engine(**both.make_batch(1))
    with refused:
        both.engine.save_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []
    if CHANGES[change] is swap:
        swap(both.model)
        both.train(1)
    both.engine.destroy()


def test_a_buffer_that_is_new_is_saved(tmp_path: Path) -> None:
    both = Twin()
    both.model.blocks[1].register_buffer("extra", torch.full((3,), 7.0))
    both.engine.save_checkpoint(tmp_path)
    both.model.blocks[1].extra.zero_()
    both.engine.load_checkpoint(tmp_path)
    assert torch.equal(both.model.blocks[1].extra, torch.full((3,), 7.0))
    both.engine.destroy()


def test_what_the_graph_keeps_of_a_resident_layer_is_no_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head's product saves an alias, W.t(): between forward and backward it tells nothing, and
    the layer is not brought to the host for it in every step."""
    torch.manual_seed(0)
    model, make_batch = MODELS["llama"]()
    engine = stronghold.initialize(
        model=model, config=config(clipping=0.5, section=SECTIONS["resident"])
    )[0]
    submitted: list[str] = []
    lane = engine.inspect().device.offload

    def noted(name: str, *args: Any, submit: Any = lane.submit, **kwargs: Any) -> Any:
        submitted.append(name)
        return submit(name, *args, **kwargs)

    monkeypatch.setattr(lane, "submit", noted)
    for seed in range(3):
        engine.backward(engine(**make_batch(seed)).loss)
        engine.step()
    engine.destroy()
    assert submitted
    assert not [name for name in submitted if name.startswith("save")]
