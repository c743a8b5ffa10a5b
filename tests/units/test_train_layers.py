"""Layers of `stronghold.train`: where their parameters lie, and the arrays that they move into."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from stronghold.devices.device import Device
from stronghold.devices.emulated import EmulatedDevice
from stronghold.errors import ConfigError
from stronghold.model.partition import partition
from stronghold.optim.adam import Adam
from stronghold.optim.sgd import SGD
from stronghold.optim.states import EXACT, LEAN, PAGE_BYTES, StateKind
from stronghold.plan.memory import Staging
from stronghold.train.arrays import Arrays
from stronghold.train.layer import ALIGN_BYTES, Groups, Layer, WeightState, layers_of
from tests.models import MODELS
from tests.support.core import opened

WEIRD = [(), (1,), (15,), (17,), (4097,), (3, 5), (0,)]


class Weird(nn.Module):
    """Parameters of weird sizes; the last three are frozen, one of them a number of bytes."""

    def __init__(self) -> None:
        super().__init__()
        for number, shape in enumerate(WEIRD):
            self.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape)))
        codes = torch.arange(7, dtype=torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.p1.requires_grad_(False)
        self.p5.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def in_ram(device: Device, layers: list[Layer], *, accumulates: bool) -> Arrays:
    """Arrays of which none lies in files."""
    in_files: dict[Layer, Sequence[str]] = dict.fromkeys(layers, ())
    return Arrays(
        device, layers, accumulates=accumulates, in_files=in_files, staging=Staging(), folders=()
    )


def layers_of_model(
    model: nn.Module,
    *,
    precision: torch.dtype = torch.float32,
    kind: StateKind = EXACT,
    own: bool = False,
) -> list[Layer]:
    def dtype_of(tensor: torch.Tensor) -> torch.dtype:
        return tensor.dtype if own or not tensor.is_floating_point() else precision

    groups: Groups = {p: ({"lr": 0.1}, Adam()) for p in model.parameters() if p.requires_grad}
    parts = partition(
        model, trains_in=lambda tensor: dtype_of(tensor) if tensor in groups else None
    )
    return layers_of(parts, groups, dtype_of=dtype_of, kind=kind)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16])
def test_trained_parameters_come_first_and_every_one_is_aligned(precision: torch.dtype) -> None:
    (layer,) = layers_of_model(Weird(), precision=precision)
    assert layer.names == ["p0", "p2", "p3", "p4", "p6", "p1", "p5", "codes"]
    assert layer.num_trained == 5
    assert all(offset % ALIGN_BYTES == 0 for offset in layer.offsets)
    assert layer.offsets[5] == layer.trained_bytes
    views = layer.views(torch.zeros(layer.num_bytes, dtype=torch.uint8))
    assert [view.shape for view in views] == [p.shape for p in layer.parameters]
    assert {view.dtype for view in views[:-1]} == {precision}
    assert views[-1].dtype is torch.uint8
    for number, view in enumerate(views):
        view.fill_(number)
    for number, view in enumerate(views):  # no view lies over another
        assert (view == number).all()
    trained = layer.views(torch.zeros(layer.trained_bytes, dtype=torch.uint8))
    assert len(trained) == layer.num_trained


class TwoDtypes(nn.Module):
    """A block whose gate and offset train in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 1)
        self.product = nn.Linear(3, 9, dtype=torch.bfloat16)
        self.gain = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.offset = nn.Parameter(torch.zeros(1))
        self.fixed = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_of_several_dtypes_in_a_block_the_one_with_the_most_bytes_moves() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(TwoDtypes() for _ in range(2))
    fp32, bf16 = torch.float32, torch.bfloat16
    assert [
        (layer.is_block, layer.names, layer.dtypes) for layer in layers_of_model(model, own=True)
    ] == [
        (is_block, [f"blocks.{k}.{name}" for name in names], dtypes)
        for k in range(2)
        for is_block, names, dtypes in [
            (False, ["offset"], (fp32,)),
            (True, ["gain", "product.weight", "product.bias", "fixed"], (bf16, bf16, bf16, fp32)),
            (False, ["gate.weight", "gate.bias"], (fp32, fp32)),
        ]
    ]


def test_a_module_outside_of_the_blocks_is_a_layer_for_each_trained_dtype() -> None:
    layers = layers_of_model(TwoDtypes(), own=True)
    fp32, bf16 = torch.float32, torch.bfloat16
    assert [(layer.names, layer.dtypes) for layer in layers] == [
        (["gain", "fixed"], (bf16, fp32)),
        (["offset"], (fp32,)),
        (["gate.weight", "gate.bias"], (fp32, fp32)),
        (["product.weight", "product.bias"], (bf16, bf16)),
    ]


def test_fp32_adapters_keep_their_dtype_over_a_base_of_16_bits() -> None:
    model = nn.Linear(3, 3)
    model.weight.data = model.weight.data.bfloat16()
    model.weight.requires_grad_(False)
    (layer,) = layers_of_model(model, own=True, precision=torch.bfloat16)
    assert layer.dtypes == (torch.float32, torch.bfloat16)
    assert layer.trained_bytes == PAGE_BYTES


def test_groups_without_momentum_share_the_arrays_of_groups_with_momentum() -> None:
    model = nn.Linear(3, 3)
    groups: Groups = {
        model.weight: ({"lr": 0.1}, SGD()),
        model.bias: ({"lr": 0.1}, SGD(has_momentum=True)),
    }
    (layer,) = layers_of(partition(model), groups, dtype_of=lambda tensor: tensor.dtype, kind=EXACT)
    assert layer.states is not None
    assert set(layer.states.dtypes) == {"weights", "momentum_buffer"}


def test_a_move_that_cannot_be_is_an_error() -> None:
    (layer,) = layers_of_model(nn.Linear(3, 3))
    layer.move(WeightState.COMING)
    with pytest.raises(AssertionError, match=r"layer 0 .*weights coming.* cannot become coming"):
        layer.move(WeightState.COMING)


def test_its_version_changes_with_each_write() -> None:
    model = nn.Linear(3, 3)
    (layer,) = layers_of_model(model)
    before = layer.version
    with torch.no_grad():
        model.bias.mul_(2)
    assert layer.version != before


@pytest.mark.parametrize("kind", [EXACT, LEAN])
def test_arrays_have_the_states_items_and_the_parameters_values(kind: StateKind) -> None:
    model = Weird()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    (layer,) = layers = layers_of_model(model, precision=torch.bfloat16, kind=kind)
    device = EmulatedDevice()
    arrays = in_ram(device, layers, accumulates=False)
    assert layer.states is not None
    for array, dtype in layer.states.dtypes.items():
        assert arrays.of(layer, array).dtype is dtype
    assert arrays.of(layer, "exp_avg").numel() == layer.trained_numel
    assert not arrays.of(layer, "low").any()  # masters are the rounded weights, as DeepSpeed's
    for name, p in model.named_parameters():
        expected = values[name] if name == "codes" else values[name].bfloat16()
        assert torch.equal(p, expected)
    arrays.close()
    assert torch.equal(model.codes, values["codes"])
    device.close()


def test_in_fp16_the_master_begins_as_the_weight() -> None:
    model = nn.Linear(5, 3)
    model.bias.data.fill_(-0.0)
    (layer,) = layers = layers_of_model(model, precision=torch.float16)
    device = EmulatedDevice()
    arrays = in_ram(device, layers, accumulates=True)
    assert torch.equal(arrays.of(layer, "low"), arrays.of(layer, "weights").float())
    assert arrays.of(layer, "low").signbit()[layer.element(1)]
    assert arrays.of(layer, "gradients").dtype is torch.float32
    arrays.close()
    device.close()


def test_a_parameter_that_was_pointed_elsewhere_is_taken_over() -> None:
    model = nn.Linear(5, 3)
    (layer,) = layers = layers_of_model(model)
    device = EmulatedDevice()
    arrays = in_ram(device, layers, accumulates=False)
    assert arrays.moved(layer) == []
    model.bias.data = torch.full((3,), 7.0)
    assert arrays.moved(layer) == [1]
    arrays.adopt_moved(layer)
    assert arrays.moved(layer) == []
    assert model.bias.data_ptr() == arrays.at_rest(layer)[1].data_ptr()
    assert model.bias.tolist() == [7.0] * 3
    model.bias.data = torch.ones(1)  # it would be broadcast
    with pytest.raises(ConfigError, match=r"bias.data has the shape \[1\] now, expected \[3\]"):
        arrays.adopt_moved(layer)
    model.bias.data = torch.ones(3, dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"bias.data has the dtype torch.float16 now, expected"):
        arrays.adopt_moved(layer)
    arrays.close()
    assert model.bias.dtype is torch.float16  # the program's own
    device.close()


@pytest.mark.parametrize("updates", ["host", "gpu"])
def test_closing_gives_the_model_back_and_frees_the_device(updates: str) -> None:
    model, make_batch = MODELS["gpt"]()
    before = model.forward
    with opened(model, window=2, resident_layers=1, resident_updates=updates) as core:
        core.trainer.backward(core.trainer.forward(**make_batch(0)))
        core.trainer.step()
        core.trainer.synchronize()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        memory = core.device.memory
        assert memory.allocated_bytes > 0
    assert memory.allocated_bytes == 0
    assert model.forward == before
    assert all("forward" not in vars(module) for module in model.modules())
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name])
        assert p.grad is None
    model(**make_batch(1)).backward()  # by autograd alone
    assert all(p.grad is not None for p in model.parameters())
