"""`PackedWeight`: a frozen weight in nf4 that is a tensor of its own shape and dtype."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from stronghold.errors import ConfigError
from stronghold.model import packed_weight
from stronghold.model.packed_weight import PackedWeight, pack_frozen, packable
from stronghold.model.partition import find_blocks
from tests.support import nf4

# Odd sizes, less than a block, whole blocks, an edge of a block; experts with and without an edge.
SHAPES = [(1, 1), (3, 5), (1, 63), (2, 128), (130, 257), (4, 32, 64), (3, 5, 7)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def weight_of(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.02 * torch.randn(shape, generator=generator)).to(dtype)


def packed_parameter(*shape: int, **options: Any) -> Any:
    return nn.Parameter(PackedWeight.pack(weight_of(*shape, **options)), requires_grad=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_weight_decodes_to_what_bitsandbytes_decodes(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = weight_of(*shape, dtype=dtype)
    expected = dequantize_4bit(*quantize_4bit(weight, quant_type="nf4", blocksize=64))
    packed = PackedWeight.pack(weight)
    assert (packed.shape, packed.dtype) == (weight.shape, dtype)
    assert torch.equal(packed.decode(), expected)
    assert torch.equal(packed.mT.decode(), expected.mT)
    assert packed.mT.decode().stride() == expected.mT.stride()


def test_a_packed_weight_takes_9_sixteenths_of_a_byte_per_element() -> None:
    packed = packed_parameter(8, 128, 64)
    assert packed.codes.nbytes + packed.absmax.nbytes == 0.5625 * packed.numel()


def test_a_weight_with_nan_or_infinity_is_refused() -> None:
    for value in (float("nan"), float("inf")):
        weight = weight_of(4, 64)
        weight[2, 3] = value
        with pytest.raises(ConfigError, match="NaN or infinity"):
            PackedWeight.pack(weight)


def test_packing_without_bitsandbytes_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    packed_weight._bitsandbytes.cache_clear()
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        PackedWeight.pack(weight_of(2, 64))


# -- operators -------------------------------------------------------------------------------------
STAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda w: w.detach(),
    "clone": lambda w: w.clone(),
    "t": lambda w: w[1].t(),
    "transposed twice": lambda w: w.transpose(-1, -2).mT,
    "transposed": lambda w: w.transpose(1, 2),
    "an expert": lambda w: w[2],
    "the last expert": lambda w: w[-1],
    "the last expert by number": lambda w: w.select(0, -1),
    "an expert of the transposed": lambda w: w.mT[1],
    "another dtype": lambda w: w.to(torch.float32),
    "the same dtype, copied": lambda w: torch.ops.aten._to_copy(w, dtype=None),
    "a copy of the object": copy.copy,
    "a deep copy": copy.deepcopy,
    "a view of all": lambda w: w.data,
}
DECODED: dict[str, Callable[[Tensor], Tensor]] = {
    "other dimensions exchanged": lambda w: w.transpose(0, 1),
    "a row of each expert": lambda w: w.select(1, 3),
    "some experts": lambda w: w[1:3],
    "in a dtype without a kernel": lambda w: w.double(),
    "flat": lambda w: w.reshape(-1),
    "sum": lambda w: w.sum(),
    "times": lambda w: w * 2,
    "as the other operand": lambda w: torch.ones(4, 32, 64).bfloat16() - w,
    "added to another tensor": lambda w: torch.ones(4, 32, 64).bfloat16().add_(w),
    "in a list": lambda w: torch.cat([w, w]),
}


@pytest.mark.parametrize("name", [*STAYS, *DECODED])
def test_an_operator_has_the_values_of_the_decoded_weight(name: str) -> None:
    packed = packed_parameter(4, 32, 64)
    operator = (STAYS | DECODED)[name]
    result = operator(packed)
    assert isinstance(result, PackedWeight) == (name in STAYS)
    expected = operator(packed.decode())
    value = result.decode() if isinstance(result, PackedWeight) else result
    assert (value.shape, value.dtype) == (expected.shape, expected.dtype)
    if name != "another dtype":  # decoded to fp32, values are not rounded to bf16 before
        assert torch.equal(value, expected)
    assert torch.allclose(value, expected, rtol=2**-8)


def test_an_expert_whose_block_crosses_to_another_is_decoded() -> None:
    packed = packed_parameter(3, 5, 7)
    assert not isinstance(packed[1], PackedWeight)
    assert torch.equal(packed[1], packed.decode()[1])


def linear(x: Tensor, weight: Any) -> Tensor:
    return F.linear(x, weight)


def with_bias(x: Tensor, weight: Any) -> Tensor:
    return F.linear(x, weight, torch.ones(len(weight)).to(x))


def conv1d(x: Tensor, weight: Any) -> Tensor:
    return torch.addmm(torch.ones(len(weight)).to(x), x.flatten(0, -2), weight.t())


@pytest.mark.parametrize("shape", [(6, 64), (2, 3, 64)])
@pytest.mark.parametrize("product", [linear, with_bias, conv1d])
def test_a_product_and_its_gradient_have_the_bits_of_the_decoded_weight(
    product: Callable[..., Tensor], shape: tuple[int, ...]
) -> None:
    packed = packed_parameter(48, 64)
    results = []
    for weight in (packed, packed.decode()):
        x = weight_of(*shape, seed=1).requires_grad_()
        y = product(x, weight)
        y.float().square().sum().backward()
        results.append((y, x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_experts_in_one_product_have_the_bits_of_the_decoded_weights() -> None:
    packed = packed_parameter(4, 32, 64)
    ends = torch.tensor([2, 2, 5, 8], dtype=torch.int32)
    results = []
    for weight in (packed, packed.decode()):
        x = weight_of(8, 64, seed=1).requires_grad_()
        y = torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends)
        y.float().square().sum().backward()
        results.append((y, x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_autograd_saves_the_packed_weight() -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    packed, x = packed_parameter(48, 64), weight_of(6, 64).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.linear(x, packed)
    assert [type(tensor) for tensor in saved] == [PackedWeight]


@pytest.mark.parametrize(
    "change", [lambda w: w.mul_(2), lambda w: w.zero_(), lambda w: w[1].neg_()]
)
def test_a_write_in_place_is_refused_with_the_way(change: Callable[[Tensor], Any]) -> None:
    with torch.no_grad(), pytest.raises(ConfigError, match=r"would write .*copy_"):
        change(packed_parameter(4, 32, 64))


# -- as a parameter --------------------------------------------------------------------------------
def packed_linear(seed: int) -> nn.Linear:
    module = nn.Linear(64, 48, bias=False)
    module.weight = packed_parameter(48, 64, seed=seed)
    return module


def test_a_state_dict_and_dense_values_can_be_loaded() -> None:
    source, target = packed_linear(0), packed_linear(1)
    assert not torch.equal(source.weight.codes, target.weight.codes)
    parameter = target.weight
    target.load_state_dict(source.state_dict())
    assert target.weight is parameter
    assert torch.equal(source.weight.decode(), target.weight.decode())
    dense = weight_of(48, 64, seed=2)
    target.load_state_dict({"weight": dense})
    assert torch.equal(target.weight.decode(), PackedWeight.pack(dense).decode())
    with torch.no_grad(), pytest.raises(ConfigError, match=r"shape \[64\]"):
        target.weight.copy_(dense[0])


def test_a_saved_parameter_comes_back() -> None:
    file = io.BytesIO()
    torch.save(packed_linear(0).state_dict(), file)
    file.seek(0)
    weight = torch.load(file, weights_only=False)["weight"]
    assert isinstance(weight, PackedWeight)
    assert torch.equal(weight.decode(), packed_linear(0).weight.decode())


def test_a_parameter_moves_and_is_cast_with_its_module() -> None:
    module = packed_linear(0).to("meta")
    assert isinstance(module.weight, PackedWeight)
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.codes.is_meta
    cast = packed_linear(0).half().weight
    assert isinstance(cast, PackedWeight)
    assert cast.decode().dtype is torch.float16
    before = packed_linear(0).weight
    assert torch.equal(cast.codes, before.codes)


# -- the weights of a model ------------------------------------------------------------------------
def names_of(model: nn.Module) -> set[str]:
    modules = {module: name for name, module in model.named_modules()}
    return {f"{modules[m]}.{name}" for m, name in packable(find_blocks(model))}


def test_linear_layers_and_fused_experts_of_blocks_are_packed_and_nothing_else() -> None:
    dense = names_of(nf4.base("dense"))
    of_block = {name.partition("layers.1.")[2] for name in dense if "layers.1." in name}
    assert of_block == {
        *(f"self_attn.{p}_proj.weight" for p in "qkvo"),
        *(f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
    }
    assert len(dense) == 3 * len(of_block)
    experts = names_of(nf4.base("experts"))
    of_block = {name.partition("layers.1.")[2] for name in experts if "layers.1.mlp" in name}
    assert of_block == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


def test_the_matrices_of_adapters_stay_as_they_are() -> None:
    for kind in ("dense", "experts"):
        model, _ = nf4.over_bf16(kind)
        model.requires_grad_(False)  # a reference
        assert not [name for name in names_of(model) if "lora_" in name]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), Conv1D(8, 8)
        self.convolution = nn.Conv1d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def blocks_of(*, is_tied: bool = False) -> nn.Sequential:
    model = nn.Sequential(Block(), Block(), Block()).requires_grad_(False)
    if is_tied:
        model[2].first.weight = model[0].first.weight
    return model


def packed_names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if isinstance(p, PackedWeight)]


def test_frozen_weights_are_packed_in_place_of_the_dense_ones() -> None:
    model = blocks_of()
    model[1].second.weight.requires_grad_(True)
    dense = {name: value.clone() for name, value in model.state_dict().items()}
    pack_frozen(model, list(model), torch.bfloat16)
    expected = ["0.first.weight", "0.second.weight", "1.first.weight"]
    assert packed_names(model) == [*expected, "2.first.weight", "2.second.weight"]
    weight = model[0].first.weight
    assert weight.dtype is torch.bfloat16
    assert not weight.requires_grad
    assert torch.equal(
        weight.decode(), PackedWeight.pack(dense["0.first.weight"].bfloat16()).decode()
    )


def test_a_weight_that_two_blocks_share_stays_as_it_is() -> None:
    model = blocks_of(is_tied=True)
    pack_frozen(model, list(model))
    assert model[2].first.weight is model[0].first.weight
    assert "0.first.weight" not in packed_names(model)
    assert "1.first.weight" in packed_names(model)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_model_with_nothing_to_pack_is_refused(is_packed: bool) -> None:
    model = blocks_of()
    if is_packed:
        pack_frozen(model, list(model))
    else:
        model.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"stronghold\.frozen.*Freeze the base.*already"):
        pack_frozen(model, list(model))


def test_torch_saves_a_state_dict_and_safetensors_saves_the_decoded_values() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    model[0].weight = packed_parameter(64, 64)
    state = model.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    (loaded,) = torch.load(file, weights_only=True).values()
    assert type(loaded) is PackedWeight
    assert torch.equal(loaded.decode(), model[0].weight.decode())
    decoded = {name: value.decode() for name, value in state.items()}
    (loaded,) = safetensors.torch.load(safetensors.torch.save(decoded)).values()
    assert torch.equal(loaded, model[0].weight.decode())
