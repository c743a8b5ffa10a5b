"""The room of one rank (`stronghold.train`) on a GPU: the bodies of tests/laws/test_core.py with
another device, against a plain loop on the same GPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold.devices.cuda import CudaDevice
from stronghold.plan.cost import LEVELS
from stronghold.plan.plan import make_plan
from stronghold.train.arrays import Arrays
from stronghold.train.layer import Layer
from tests.border.test_user_backward import Forces
from tests.gpu.test_training_cuda import CYCLES, train_plain_on_gpu
from tests.laws import test_core_quantised as quantised
from tests.laws.test_bits import never
from tests.laws.test_core import AXES, PLACES, at_home
from tests.models import MODELS, loss_of
from tests.support.core import Core, opened, train_core
from tests.support.pairs import Case, covering
from tests.support.sleeping import sleep_on_stream
from tests.support.training import Run, assert_identical, on, operators_in_one_order

pytestmark = pytest.mark.gpu

STEPS = 3
LEFT_OUT = {"optimizer", "lanes"}
AXES_ON_GPU = {name: values for name, values in AXES.items() if name not in LEFT_OUT}
AXES_ON_GPU["precision"] = ["fp32", "bf16", "lean"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stronghold.plan.memory.PIECE_BYTES", 1)  # a page of each


@functools.cache
def plain(name: str, **options: Any) -> Run:
    with operators_in_one_order():
        return train_plain_on_gpu(MODELS[name], steps=STEPS, **options)


def impossible(*values: str) -> bool:
    """Lean states have no program for a GPU."""
    is_on_gpu = not {"half on the gpu", "updated on the gpu"}.isdisjoint(values)
    return never(*values) or (is_on_gpu and "lean" in values)


@pytest.mark.parametrize("case", covering(list(AXES_ON_GPU.values()), impossible), ids="-".join)
def test_no_configuration_changes_a_bit_on_a_gpu(case: Case, tmp_path: Path) -> None:
    of = dict(zip(AXES_ON_GPU, case, strict=True))
    options: Any = {
        "clipping": float(of["clipping"]),
        "accumulation": int(of["micro-batches"]),
        "precision": of["precision"],
    }
    expected = plain(of["model"], **options)
    with operators_in_one_order():
        run = train_core(
            MODELS[of["model"]],
            steps=STEPS,
            device=CudaDevice,
            activations=of["activations"],
            **PLACES[of["place"]],
            **at_home(of["home"], tmp_path),
            **options,
        )
    assert_identical(run, expected)


QUANTISED = ["nf4", "nf4 double", "torchao int8", "torchao nf4"]
QUANTISED += [kind for kind in quantised.ALL if kind.startswith(("loaded", "frozen"))]


@functools.cache
def plain_quantised(base: str) -> Run:
    factory = quantised.ALL[base][1]
    with operators_in_one_order():
        return train_plain_on_gpu(
            factory, steps=STEPS, clipping=0.5, precision="bf16", accumulation=1
        )


@pytest.mark.parametrize("place", quantised.PLACES)
@pytest.mark.parametrize("base", QUANTISED)
def test_adapters_train_over_a_quantised_base_as_on_a_gpu(
    base: str, place: str, tmp_path: Path
) -> None:
    expected = plain_quantised(base)
    number = QUANTISED.index(base) + list(quantised.PLACES).index(place)
    is_on_gpu = place == "all on the device"
    homes = ["ram", "ram" if is_on_gpu else "weights"]
    factory, _, settings = quantised.ALL[base]
    with operators_in_one_order():
        run = train_core(
            factory,
            steps=STEPS,
            clipping=0.5,
            precision="bf16",
            device=CudaDevice,
            activations=LEVELS[number % len(LEVELS)],
            **quantised.PLACES[place],
            **at_home(homes[number // 2 % 2], tmp_path),
            **settings,
        )
    assert_identical(run, expected)


def test_second_tensors_over_the_codes_are_on_the_device_with_them() -> None:
    """bitsandbytes' 8-bit layers compute with such a tensor. Plain torch cannot move a layer after
    its first forward, so the windows are compared with each other."""
    factory, _, settings = quantised.ALL["int8"]
    runs = []
    with operators_in_one_order():
        for place in ("all on the device", "one slot", "two slots"):
            options = {**quantised.PLACES[place], **settings}
            runs.append(
                train_core(factory, steps=STEPS, precision="bf16", device=CudaDevice, **options)
            )
    assert len({float(loss) for loss in runs[0].losses}) == STEPS
    for run in runs[1:]:
        assert_identical(run, runs[0])


@pytest.mark.parametrize("updates", ["host", "gpu"])
@pytest.mark.parametrize("base", ["torchao int8", "loaded dense"])
def test_a_base_that_came_on_the_gpu_comes_back_on_the_host(base: str, updates: str) -> None:
    model, make_batch = quantised.ALL[base][0]()
    model.cuda()
    batch = make_batch(0)
    device = torch.device("cuda")
    settings = {"resident_layers": 1, "resident_updates": updates, "window": 1}
    with opened(model, precision="bf16", device=CudaDevice, **settings) as core:
        core.trainer.backward(core.trainer.forward(**on(device, batch)).loss)
        core.trainer.step()
        expected = core.trainer.forward(**on(device, batch)).loss.cpu()
        core.trainer.synchronize()
        for name, value in model.state_dict().items():
            inner = getattr(value, "__tensor_flatten__", lambda: ([], None))()[0]
            assert all(getattr(value, each).device == value.device for each in inner), name
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert torch.equal(model.cuda()(**on(device, batch)).loss.cpu(), expected)


@pytest.mark.parametrize("base", ["torchao int8", "loaded dense"])
def test_a_base_moves_to_the_gpu_with_its_layers(base: str) -> None:
    model, make_batch = quantised.ALL[base][0]()
    batch = on(torch.device("cuda"), make_batch(0))
    with opened(model, precision="bf16", device=CudaDevice, window=1) as core:
        expected = core.trainer.forward(**batch).loss.detach().clone()
        pinned_bytes = core.device.pinning.pinned_bytes
        demand = replace(core.plan.demand, resident_layers=1, resident_updates="gpu")
        core.trainer.take_plan(make_plan(core.layout, demand))
        moved = [layer for layer in core.layers if layer.is_on_gpu]
        slabs = (of_layer for x in moved for of_layer in (x.num_bytes, x.trained_bytes))
        assert moved
        assert core.device.pinning.pinned_bytes == pinned_bytes - sum(slabs)
        for value in model.state_dict().values():
            inner = getattr(value, "__tensor_flatten__", lambda: ([], None))()[0]
            assert all(getattr(value, each).device == value.device for each in inner)
        assert torch.equal(core.trainer.forward(**batch).loss, expected)


@pytest.mark.parametrize("base", ["torchao int8", "loaded dense"])
@pytest.mark.parametrize("keeps_weights", [True, False])
def test_a_model_that_has_left_the_gpu_trains_on_with_the_same_bits(
    keeps_weights: bool, base: str
) -> None:
    device, losses = torch.device("cuda"), {}
    for leaves in (False, True):
        torch.manual_seed(0)
        model, make_batch = quantised.ALL[base][0]()
        settings = {"resident_layers": 1, "resident_updates": "gpu", "window": 1}
        with opened(model, precision="bf16", device=CudaDevice, **settings) as core:
            trainer, memory, batch = core.trainer, core.device.memory, on(device, make_batch(0))
            trainer.backward(trainer.forward(**batch).loss)
            trainer.step()
            before, losses[leaves] = memory.allocated_bytes, []
            if leaves and keeps_weights:
                trainer.keep_weights(core.plan)
                assert 0 < memory.allocated_bytes < before
            elif leaves:
                trainer.leave_device()
                assert memory.allocated_bytes == 0
                tensors = [*model.parameters(), *model.buffers()]
                assert {tensor.device.type for tensor in tensors} == {"cpu"}
            with torch.no_grad():
                is_on_host = leaves and not keeps_weights
                place = torch.device("cpu") if is_on_host else device
                losses[leaves].append(model(**on(place, make_batch(1))).loss.cpu())
            if leaves:
                trainer.take_plan(core.plan)
                assert memory.allocated_bytes == before
            for number in (2, 3):
                loss = trainer.forward(**on(device, make_batch(number))).loss
                trainer.backward(loss)
                trainer.step()
                losses[leaves].append(loss.detach().cpu())
    away, *trained = losses[True]
    evaluated, *expected = losses[False]
    assert all(map(torch.equal, trained, expected))
    assert torch.equal(away, evaluated) or not keeps_weights  # a CPU rounds otherwise


def load_zeros(core: Core) -> None:
    with core.trainer.changing("a load"):
        for layer in core.layers:
            for _, block in core.trainer.arrays.blocks(layer, "weights", writes=True):
                block.zero_()


@pytest.mark.parametrize(
    "take",
    [
        lambda core: core.trainer.leave_device(),
        lambda core: core.trainer.take_plan(core.plan),
        lambda core: None,  # the end
        load_zeros,
    ],
    ids=["leave", "move", "close", "load"],
)
def test_what_takes_or_writes_weights_on_the_device_waits_for_their_update(
    take: Callable[[Core], None],
) -> None:
    """The host runs ahead: the device has not begun the update."""
    device, states = torch.device("cuda"), []
    for waits in (True, False):
        model, make_batch = MODELS["gpt"]()
        with opened(model, device=CudaDevice, resident_layers=2, resident_updates="gpu") as core:
            core.trainer.backward(loss_of(core.trainer.forward(**on(device, make_batch(0)))))
            sleep_on_stream(100 * CYCLES)
            core.trainer.step()
            if waits:
                torch.cuda.synchronize()
            take(core)
        states.append(model.state_dict())
    assert all(torch.equal(value, states[0][name]) for name, value in states[1].items())


def test_a_take_over_that_fails_leaves_the_model_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, make_batch = MODELS["buffers"]()
    expected = model(**make_batch(0))
    layers: list[Layer] = []

    def fail(arrays: Arrays, layer: Layer) -> None:
        layers.append(layer)
        if len(layers) == 3:
            raise OSError("no memory")
        take_over(arrays, layer)

    take_over = Arrays._take_over
    monkeypatch.setattr(Arrays, "_take_over", fail)
    device = CudaDevice()
    with pytest.raises(OSError, match="no memory"):
        Core(model, device=lambda: device)
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert device.pinning.pinned_bytes == 0
    device.close()
    assert torch.equal(model(**make_batch(0)), expected)


def test_new_weights_wait_for_the_forward_that_reads_the_old_ones() -> None:
    """The host runs ahead: it writes weights while the device computes with the old ones."""
    model, make_batch = MODELS["gpt"]()
    batch = on(torch.device("cuda"), make_batch(0))
    with opened(model, device=CudaDevice, window=1, resident_layers="all") as core, torch.no_grad():
        original = {p: p.clone() for p in model.parameters()}
        expected = core.trainer.forward(**batch).cpu()
        losses = []
        for _ in range(3):
            losses.append(core.trainer.forward(**batch))
            core.trainer.synchronize()
            for p in model.parameters():
                p.mul_(0.0)
            core.trainer.forward(**batch)
            core.trainer.synchronize()
            for p in model.parameters():
                p.copy_(original[p])
        assert all(torch.equal(loss.cpu(), expected) for loss in losses)


@pytest.mark.parametrize("trains", [False, True])
def test_a_forward_may_take_gradients_inside(trains: bool) -> None:
    """Autograd's thread brings weights back, and the forward goes on with those that it had."""
    torch.manual_seed(0)
    model = Forces()
    plain, x = copy.deepcopy(model).cuda(), torch.linspace(-1, 1, 32, device="cuda").view(4, 8)
    with opened(model, device=CudaDevice, window=1) as core, torch.set_grad_enabled(trains):
        for _ in range(2):
            found, expected = core.trainer.forward(x), plain(x)
            assert all(map(torch.equal, found, expected))
