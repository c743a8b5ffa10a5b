"""Parameters of the room `train` as a program sees them between calls: a read waits, and a write
counts."""

from __future__ import annotations

import copy
import io
import os
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from stronghold.errors import ConfigError, LaneError
from stronghold.plan.plan import make_plan
from stronghold.train.visible import Hidden
from tests.models import MODELS, loss_of
from tests.support.core import Core, opened

PLACES: dict[str, dict[str, Any]] = {
    "streamed": {"resident_layers": 0},
    "resident": {"resident_layers": 3},
    "updated there": {"resident_layers": 3, "resident_updates": "gpu"},
}


def step(core: Core, make_batch: Any, number: int) -> None:
    core.trainer.backward(loss_of(core.trainer.forward(**make_batch(number))))
    core.trainer.step()


def held(core: Core) -> threading.Event:
    """Updates wait from now on, until it is set."""
    goes_on = threading.Event()
    core.device.update.submit("a wait of the test", goes_on.wait)
    return goes_on


def test_what_needs_no_values_does_not_wait_and_what_does_waits_for_its_layer() -> None:
    model, make_batch = MODELS["gpt"]()
    with opened(model) as core:
        step(core, make_batch, 0)
        last = model.blocks[2].mlp.down.weight
        goes_on = held(core)
        try:
            core.trainer.backward(loss_of(core.trainer.forward(**make_batch(1))))
            core.trainer.step()
            assert (last.shape, last.dtype, last.device.type) == ((16, 64), torch.float32, "cpu")
            assert (last.grad, last.is_contiguous(), last.stride()) == (None, True, (64, 1))
            assert last.register_hook(lambda _: None) is not None
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            model.requires_grad_(True)
            assert isinstance(last, nn.Parameter)
            assert isinstance(last, Hidden)
            threading.Timer(0.05, goes_on.set).start()
            last.sum()
            assert goes_on.is_set()
            of_last = list(model.blocks[2].parameters())
            hidden = [p for p in model.parameters() if isinstance(p, Hidden)]
            assert not any(isinstance(p, Hidden) for p in of_last)
            assert len(hidden) == len(list(model.parameters())) - len(of_last)
        finally:
            goes_on.set()
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert "data" not in vars(nn.Parameter)


@pytest.mark.parametrize("way", [".data", "NumPy", "an assignment"])
@pytest.mark.parametrize("place", PLACES)
def test_what_no_version_shows_counts_also_after_an_evaluation(place: str, way: str) -> None:
    """The evaluation has left what was written first in the slots of residents."""

    def write(p: nn.Parameter, factor: float) -> None:
        if way == "an assignment":
            p.data = p.data * factor
        elif way == "NumPy":
            p.detach().numpy()[...] *= factor
        else:
            torch.Tensor.data.__get__(p).mul_(factor)

    model, make_batch = MODELS["gpt"]()
    plain = copy.deepcopy(model)
    with opened(model, **PLACES[place]) as core:
        for factor in (0.5, 2.0, 0.25):
            for p in model.parameters():
                write(p, factor)
            for p in plain.parameters():
                p.data.mul_(factor)
            with torch.no_grad():
                found = loss_of(core.trainer.forward(**make_batch(0)))
                assert torch.equal(found, loss_of(plain(**make_batch(0)))), factor
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("place", PLACES)
def test_what_is_written_through_a_kept_alias_after_synchronize_counts(place: str) -> None:
    model, make_batch = MODELS["gpt"]()
    plain = copy.deepcopy(model)
    with opened(model, **PLACES[place]) as core:
        kept = [p.detach().numpy() for p in model.parameters()]
        with torch.no_grad():
            core.trainer.forward(**make_batch(0))
        core.trainer.synchronize()
        for alias, p in zip(kept, plain.parameters(), strict=True):
            alias *= 0.5
            p.data.mul_(0.5)
        with torch.no_grad():
            found = loss_of(core.trainer.forward(**make_batch(0)))
            assert torch.equal(found, loss_of(plain(**make_batch(0))))


@pytest.mark.parametrize("place", PLACES)
def test_what_is_assigned_between_backward_and_step_is_stepped_from(place: str) -> None:
    def after(ways: Any) -> list[torch.Tensor]:
        model, make_batch = MODELS["gpt"]()
        with opened(model, **PLACES[place]) as core:
            core.trainer.backward(loss_of(core.trainer.forward(**make_batch(0))))
            for p in model.parameters():
                ways(p)
            core.trainer.step()
            return [p.detach().clone() for p in model.parameters()]

    def assign(p: nn.Parameter) -> None:
        p.data = p.data * 0.5

    assigned, written = after(assign), after(lambda p: p.data.mul_(0.5))
    untouched = after(lambda _: None)
    assert all(map(torch.equal, assigned, written))
    assert not torch.equal(assigned[0], untouched[0])


@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_assigned_before_a_pass_that_fails_is_kept(place: str, raised: Any) -> None:
    def fail(*_: Any) -> None:
        raise raised

    model, make_batch = MODELS["gpt"]()
    with opened(model, **PLACES[place]) as core:
        step(core, make_batch, 0)
        expected = [p.detach() * 0.5 for p in model.parameters()]
        for p, value in zip(model.parameters(), expected, strict=True):
            p.data = value.clone()
        hook = model.blocks[1].mlp.up.register_forward_hook(fail)
        with pytest.raises(raised):
            core.trainer.forward(**make_batch(1))
        hook.remove()
        core.trainer.check()
        assert all(map(torch.equal, model.parameters(), expected))
        step(core, make_batch, 2)
        assert not any(map(torch.equal, model.parameters(), expected))


def test_what_is_assigned_before_another_plan_is_trained_from() -> None:
    """The plan for the first batch moves layers to the device."""

    def after(move: bool) -> list[torch.Tensor]:
        model, make_batch = MODELS["gpt"]()
        with opened(model) as core:
            for p in model.parameters():
                p.data = p.data * 0.5
            if move:
                there = {"resident_layers": 3, "resident_updates": "gpu"}
                demand = replace(core.plan.demand, **there)
                core.trainer.take_plan(make_plan(core.layout, demand))
                assert all(layer.is_on_gpu for layer in core.layers)
                assert all(isinstance(p, Hidden) for p in model.parameters())
            step(core, make_batch, 0)
            return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, after(False), after(True)))


def test_a_load_takes_the_place_of_what_was_assigned() -> None:
    model, _ = MODELS["gpt"]()
    with opened(model) as core:
        for p in model.parameters():
            p.data = torch.zeros_like(p)
        with core.trainer.changing("a load"):
            for layer in core.layers:
                core.trainer.arrays.buffer(layer).view(torch.float32).fill_(0.25)
        assert all(bool((p == 0.25).all()) for p in model.parameters())


@pytest.mark.parametrize("place", PLACES)
def test_what_is_assigned_last_is_in_the_model_that_is_given_back(place: str) -> None:
    model, make_batch = MODELS["gpt"]()
    with opened(model, **PLACES[place]) as core:
        step(core, make_batch, 0)
        halves = {k: p.detach() * 0.5 for k, p in list(model.named_parameters())[::2]}
        others = {k: p.detach().clone() for k, p in list(model.named_parameters())[1::2]}
        for name, value in halves.items():
            model.get_parameter(name).data = value
    for name, p in model.named_parameters():
        assert torch.equal(p, (halves | others)[name]), name


def test_a_failed_update_is_raised_by_the_read_and_by_the_next() -> None:
    model, make_batch = MODELS["gpt"]()
    core = Core(model)
    core.trainer.backward(loss_of(core.trainer.forward(**make_batch(0))))

    def broken(*_: Any) -> None:
        raise OSError("injected")

    layer = core.layers[1]
    core.device.update.submit("a bad update", broken, writes=(layer.weight_record,))
    core.trainer.refresh()
    for _ in range(2):
        with pytest.raises(LaneError, match="a bad update failed"):
            layer.parameters[0].sum()
    with pytest.raises(LaneError, match="a bad update failed"):
        core.trainer.step()
    core.close()


@pytest.mark.parametrize("place", PLACES)
def test_a_parameter_takes_no_other_along_into_a_file(place: str) -> None:
    model, make_batch = MODELS["gpt"]()
    with opened(model, **PLACES[place]) as core:
        step(core, make_batch, 0)
        weight = model.blocks[1].norm1.weight
        file = io.BytesIO()
        torch.save(weight, file)
        assert file.tell() < 4096
        for value in model.state_dict().values():
            assert value.untyped_storage().nbytes() == value.nbytes


def test_another_thread_may_not_look_while_one_trains() -> None:
    model, make_batch = MODELS["gpt"]()
    errors: list[Exception] = []

    def look() -> None:
        try:
            model.head.weight.sum()
        except ConfigError as error:
            errors.append(error)

    with opened(model) as core:
        with core.trainer.forward_pass():
            model(**make_batch(0))  # this thread trains
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert isinstance(model.head.weight, Hidden)
    with pytest.raises(ConfigError, match=r"reading head in thread .*MainThread' trains"):
        raise errors[0]


def test_a_forked_child_may_not_look() -> None:
    model, make_batch = MODELS["gpt"]()
    with opened(model) as core:
        step(core, make_batch, 0)
        child = os.fork()
        if not child:
            signal.alarm(20)  # a wait would never end
            try:
                model.head.weight.sum()
            except ConfigError as error:
                os._exit(0 if "reading head: this engine belongs to" in str(error) else 2)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


def test_parameters_of_other_models_keep_their_own_data() -> None:
    other = nn.Linear(2, 2)
    model, _ = MODELS["gpt"]()
    with opened(model):
        before = other.weight._version
        other.weight.data.mul_(2.0)
        assert other.weight._version == before
        counted = model.head.weight._version
        model.head.weight.data.mul_(2.0)
        assert model.head.weight._version > counted
    counted = model.head.weight._version
    model.head.weight.data.mul_(2.0)
    assert model.head.weight._version == counted


def test_a_parameter_that_is_set_to_itself_is_not_written() -> None:
    """As `torch.nn.utils.parametrize` does."""
    own, other = nn.Parameter.set_, nn.Parameter(torch.zeros(2))
    model, make_batch = MODELS["gpt"]()
    with opened(model, resident_layers=3) as core:
        step(core, make_batch, 0)
        weight = model.head.weight
        before = weight._version
        with torch.no_grad():
            assert weight.set_(weight) is weight
            assert isinstance(weight, Hidden)
            assert weight._version == before
            other.set_(other)
            assert other._version == 1
            other.set_(torch.ones(3))
        assert torch.equal(other, torch.ones(3))
    assert nn.Parameter.set_ is own


@pytest.mark.parametrize("level", ["keep", "recompute"])
@pytest.mark.parametrize("place", PLACES)
def test_an_assignment_in_a_forward_is_refused_with_the_name(place: str, level: str) -> None:
    model, make_batch = MODELS["gpt"]()
    module = model.blocks[1].mlp.down

    def assign(*_: Any) -> None:
        module.weight.data = module.weight.data * 0.5

    with opened(model, activations=level, **PLACES[place]) as core:
        step(core, make_batch, 0)
        handle = module.register_forward_pre_hook(assign)
        with pytest.raises(ConfigError, match=r"blocks\.1\.mlp\.down\.weight to other memory"):
            core.trainer.forward(**make_batch(1))
        handle.remove()
        step(core, make_batch, 1)


@pytest.mark.parametrize("level", ["keep", "recompute"])
@pytest.mark.parametrize("place", PLACES)
def test_an_assignment_between_forward_and_backward_is_refused(place: str, level: str) -> None:
    """The backward would find the new values where the old ones were."""
    model, make_batch = MODELS["gpt"]()
    weight = model.blocks[1].mlp.down.weight
    with opened(model, activations=level, **PLACES[place]) as core:
        step(core, make_batch, 0)
        loss = loss_of(core.trainer.forward(**make_batch(1)))
        weight.data = weight.data * 0.5
        with pytest.raises((ConfigError, RuntimeError), match=r"written since|modified"):
            core.trainer.backward(loss)
        step(core, make_batch, 1)
