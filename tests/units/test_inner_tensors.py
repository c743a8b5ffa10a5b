"""The dense tensors that quantised parameters consist of: all of them, under the libraries' names,
and each can be pointed at other memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes
import pytest
import torch
import torchao.quantization as torchao
from torch import nn

from stronghold.errors import ConfigError
from stronghold.model.inner_tensors import (
    InnerTensor,
    follow_device,
    inner_tensors,
    settle,
    wrappers,
)
from stronghold.model.stored_tensors import stored_tensors
from tests.support.quantised_bases import BASES, LINEARS, blocks_of, fp8_on_cpus

ALIGNMENT = 512


@pytest.fixture(autouse=True)
def with_fp8() -> Iterator[None]:
    with fp8_on_cpus():
        yield


def linear(kind: str, *, bias: bool = False) -> Any:
    torch.manual_seed(0)
    return LINEARS[kind](nn.Linear(64, 32, bias=bias).bfloat16()).requires_grad_(False)


def inner_of(model: nn.Module) -> list[InnerTensor]:
    """Each inner tensor of each parameter, and each buffer of a block."""
    settle(model)
    tensors = [
        inner
        for name, parameter in model.named_parameters()
        for inner in inner_tensors(parameter, name)
    ]
    buffers = [b for block in blocks_of(model) for b in block.buffers()]
    return tensors + [InnerTensor(name="", tensor=buffer) for buffer in buffers]


def move(tensors: list[InnerTensor]) -> torch.Tensor:
    """Point every tensor at its place in one new array, as a fetch does. Fill the old memory."""
    sizes = [-(-inner.tensor.nbytes // ALIGNMENT) * ALIGNMENT for inner in tensors]
    slot = torch.zeros(sum(sizes), dtype=torch.uint8)
    begin = 0
    for inner, size in zip(tensors, sizes, strict=True):
        tensor = inner.tensor
        old = tensor.detach()
        view = slot[begin : begin + old.nbytes].view(old.dtype).view(old.shape)
        view.copy_(old)
        for pointed in (tensor, *inner.aliases):
            pointed.data = view
        poison = torch.full((old.nbytes,), 255, dtype=torch.uint8)
        old.copy_(poison.view(old.dtype).view(old.shape))
        begin += size
    return slot


def loss_and_gradients(model: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    loss = model(**batch).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    return [loss.detach(), *gradients]


@pytest.mark.parametrize("kind", BASES)
def test_pointing_the_inner_tensors_is_all_that_a_move_needs(kind: str) -> None:
    torch.manual_seed(0)
    model, make_batch = BASES[kind]()
    expected = loss_and_gradients(model, make_batch(0))
    # the first forward of a library's module may change its objects
    for moves in range(2):
        tensors = inner_of(model)
        before = [tensor.tensor.data_ptr() for tensor in tensors]
        move(tensors)
        assert not set(before) & {tensor.tensor.data_ptr() for tensor in tensors}
        found = loss_and_gradients(model, make_batch(0))
        assert all(map(torch.equal, found, expected)), f"after {moves} moves"


def test_names_are_those_of_state_dicts() -> None:
    for kind in ("nf4", "nf4 double"):
        module = linear(kind)
        names = {inner.name for inner in inner_tensors(module.weight, "weight")}
        saved = {key.removeprefix("weight").removeprefix(".") for key in module.state_dict()}
        assert names - saved <= {"nested_offset"}  # a number in their state dict
        assert saved - names == {"quant_state.bitsandbytes__nf4"}
    module = linear("int8")
    assert [inner.name for inner in inner_tensors(module.weight, "weight")] == ["", "SCB"]
    assert set(module.state_dict()) == {"weight", "SCB", "weight_format"}


# -- before an engine ------------------------------------------------------------------------------
def test_a_bias_is_cast_as_the_first_forward_of_its_module_casts_it() -> None:
    module, other = linear("nf4", bias=True), linear("nf4", bias=True)
    for each in (module, other):
        each.bias.data = each.bias.data.float() + 1e-4
    other(torch.zeros(1, 64))
    settle(module)
    assert module.bias.dtype is torch.bfloat16
    assert torch.equal(module.bias, other.bias)
    address = module.bias.data_ptr()
    module(torch.zeros(1, 64))
    assert module.bias.data_ptr() == address


def test_an_int8_weight_that_has_computed_shows_its_scales_again() -> None:
    module = linear("int8")
    scales = module.weight.SCB
    module(torch.zeros(1, 64))
    assert module.weight.SCB is None
    settle(module)
    inner = inner_tensors(module.weight)
    assert inner[1].tensor is scales
    assert inner[0].aliases[0] is module.state.CB


def test_quantised_weights_in_buffers_are_refused_by_name() -> None:
    """As GPTQ's and AWQ's modules have them."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Module())
    model[1].register_buffer("qweight", torch.zeros(8, 8, dtype=torch.int32))
    with pytest.raises(ConfigError, match=r"1 is a Module.*\(qweight\).*bitsandbytes, torchao"):
        stored_tensors(model)


WRAPPERS = [kind for kind in LINEARS if "torchao" in kind]


def on_meta(wrapper: Any) -> nn.Parameter:
    """A wrapper whose device is meta, around the inner tensors of `wrapper`."""
    names, context = wrapper.__tensor_flatten__()
    inner = {name: getattr(wrapper, name) for name in names}
    elsewhere = {name: value.to("meta") for name, value in inner.items()}
    for key, value in context.items():
        if dataclasses.is_dataclass(value) and hasattr(value, "device"):
            context[key] = dataclasses.replace(value, device=torch.device("meta"))  # type: ignore[type-var]
    made = type(wrapper).__tensor_unflatten__(elsewhere, context, wrapper.size(), wrapper.stride())
    parameter = nn.Parameter(made, requires_grad=False)
    for name, value in inner.items():
        setattr(parameter, name, value)
    return parameter


@pytest.mark.parametrize("kind", WRAPPERS)
def test_operators_read_the_inner_tensors_and_not_the_wrapper_s_device(kind: str) -> None:
    """`.data` of inner tensors moves the weight to a GPU, and leaves the wrapper's device."""
    module = linear(kind)
    x = torch.randn(2, 64, dtype=torch.bfloat16, requires_grad=True)
    expected = module(x)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    module.weight = on_meta(module.weight)
    assert module.weight.device.type == "meta"
    found = module(x)
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0], gradient)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapper_follows_the_device_of_its_inner_tensors(kind: str) -> None:
    """A state dict detaches. Classes of torchao refuse that while the devices differ, all but
    NF4Tensor."""
    module = linear(kind)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    expected = module(x)
    weight = module.weight = on_meta(module.weight)
    inner = [each.tensor for each in inner_tensors(weight)]
    if kind != "torchao nf4":
        with pytest.raises(RuntimeError, match="devices must match"):
            module.state_dict()
    follow_device(wrappers(module))
    assert module.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.device.type == "cpu"
    now = [each.tensor for each in inner_tensors(weight)]
    assert all(one is two for one, two in zip(now, inner, strict=True))
    assert list(module.state_dict()) == ["weight"]
    assert torch.equal(module(x), expected)


# -- what is refused -------------------------------------------------------------------------------
class Other(torch.Tensor):
    """A class that names no inner tensors."""


class WithScale(nn.Parameter):
    """A parameter that keeps its scale beside it."""

    scale: torch.Tensor


def with_scale() -> nn.Parameter:
    parameter = WithScale(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    parameter.scale = torch.ones(4)
    return parameter


def trained() -> nn.Parameter:
    module = nn.Linear(64, 32).bfloat16()
    torchao.quantize_(module, torchao.Int8WeightOnlyConfig())
    module.weight.requires_grad_(True)
    return module.weight


def packed_for_evaluation() -> nn.Parameter:
    weight = linear("nf4").weight
    weight.quant_state.packing_format_for_cpu = True
    parameter: nn.Parameter = weight
    return parameter


def not_contiguous() -> nn.Parameter:
    module = linear("torchao int8")
    module.weight.qdata.data = module.weight.qdata.data.t().contiguous().t()
    parameter: nn.Parameter = module.weight
    return parameter


REFUSED: dict[str, tuple[Callable[[], nn.Parameter], str]] = {
    "unknown": (
        lambda: nn.Parameter(torch.zeros(3).as_subclass(Other), requires_grad=False),
        r"Other: its tensors are not known.*Known are plain tensors, bitsandbytes 4-bit.*Wrap",
    ),
    "tensors beside": (with_scale, r"WithScale, a class that no storage.*\(scale\).*Load the"),
    "requires grad": (trained, r"Int8Tensor.*requires grad.*requires_grad_\(False\).*adapters"),
    "4 bits, not yet": (
        lambda: bitsandbytes.nn.Linear4bit(64, 32).weight,
        r"Params4bit whose values are not quantised yet.*model\.to",
    ),
    "8 bits, not yet": (
        lambda: bitsandbytes.nn.Linear8bitLt(64, 32, has_fp16_weights=False).weight,
        r"Int8Params that keeps its values in floating point.*has_fp16_weights=False",
    ),
    "evaluated": (packed_for_evaluation, r"layout for evaluation.*Load the model again"),
    "strided": (not_contiguous, r"its qdata is not contiguous.*contiguous weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_move_is_refused_with_its_name_the_reason_and_the_way(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ConfigError, match=r'"block\.weight"' + r".*" + message):
        inner_tensors(make(), "block.weight")


def test_a_sharded_weight_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(2), requires_grad=False)
    sharded = type("DTensor", (torch.Tensor,), {"__module__": "torch.distributed.tensor"})
    for name in ("__tensor_flatten__", "__tensor_unflatten__"):
        setattr(sharded, name, lambda *_: ([], None))
    parameter = parameter.as_subclass(sharded)
    with pytest.raises(ConfigError, match=r'"w" is a DTensor: sharded weights'):
        inner_tensors(parameter, "w")
