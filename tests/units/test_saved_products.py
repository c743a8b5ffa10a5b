"""Products with quantised weights under saved-tensor hooks: backward gets every tensor from them.

What an engine does is done here by hand: after forward the weights' memory holds other numbers, as
a slot does when another layer is in it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn

from stronghold.model.inner_tensors import inner_tensors, settle
from stronghold.private import Replacements
from stronghold.train.quantised import FUNCTIONS, itself_if_there, replace_quantised
from tests.support.quantised_bases import LINEARS

PATCHED = ["nf4", "nf4 double", "nf4 in bf16", "fp4", "int8", "torchao nf4"]
OTHERS = ["torchao int8", "torchao int4", "torchao float8"]


@contextmanager
def replaced(*parameters: nn.Parameter) -> Iterator[None]:
    """As for an engine with these parameters: it passes on what moves, their inner tensors."""
    replacements = Replacements()
    moving = [inner.tensor for weight in parameters for inner in inner_tensors(weight)]
    replace_quantised(replacements, moving)
    try:
        yield
    finally:
        replacements.undo()


def linear(kind: str, *, bias: bool = False) -> Any:
    torch.manual_seed(0)
    module = LINEARS[kind](nn.Linear(64, 32, bias=bias).bfloat16()).requires_grad_(False)
    settle(module)
    return module


def rows(shape: tuple[int, ...] = (3, 5, 64), dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape, dtype=dtype).requires_grad_()


def product(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The product, and the gradient of `x`."""
    y = module(x)
    y.backward(torch.linspace(-1, 1, y.numel()).to(y.dtype).view(y.shape))
    return y.detach(), x.grad


def product_of_a_slot(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `product`. Between forward and backward the weight's memory holds other bytes; saved
    tensors come from copies that hooks made."""
    settle(module)
    copied: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        copied.append(tensor.detach().clone())
        return len(copied) - 1

    inner = inner_tensors(module.weight)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda number: copied[number]):
        y = module(x)
        for tensor in inner:
            for pointed in (tensor.tensor, *tensor.aliases):
                pointed.data = torch.zeros_like(pointed.detach())
        y.backward(torch.linspace(-1, 1, y.numel()).to(y.dtype).view(y.shape))
    return y.detach(), x.grad


def same(one: Any, two: Any) -> bool:
    return all(map(torch.equal, one, two))


@pytest.mark.parametrize("kind", [*PATCHED, *OTHERS])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_backward_reads_saved_tensors_and_has_the_library_s_bits(kind: str, bias: bool) -> None:
    expected = product(linear(kind, bias=bias), rows())
    module = linear(kind, bias=bias)
    with replaced(module.weight):
        assert same(product(module, rows()), expected)
        assert same(product_of_a_slot(module, rows()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("is_training", [True, False])
def test_int8_products_in_both_modes(
    dtype: torch.dtype, threshold: float, is_training: bool
) -> None:
    """On CPUs the library has one Function for training and one for evaluation."""

    def module() -> Any:
        made = linear("int8").train(is_training)
        made.state.threshold = threshold
        return made

    expected = product(module(), rows(dtype=dtype))
    found = module()
    with replaced(found.weight):
        assert same(product_of_a_slot(found, rows(dtype=dtype)), expected)


@pytest.mark.parametrize("kind", PATCHED)
@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 0, 64), (2, 3, 4, 64)], ids=str)
def test_products_of_odd_shapes(kind: str, shape: tuple[int, ...]) -> None:
    def outcome(module: nn.Module, run: Any) -> Any:
        try:
            return run(module, rows(shape))
        # the library's own, if any
        except (RuntimeError, IndexError, AttributeError) as error:
            return type(error)

    expected = outcome(linear(kind), product)
    module = linear(kind)
    with replaced(module.weight):
        found = outcome(module, product_of_a_slot)
    assert found == expected if isinstance(expected, type) else same(found, expected)


def test_evaluation_leaves_the_weight_as_it_is() -> None:
    """On CPUs with AVX512-BF16 the library would lay it out anew."""
    module = linear("nf4 double").eval()
    module.support_avx512bf16_for_cpu = True  # as on such a CPU
    tensors = [inner.tensor for inner in inner_tensors(module.weight)]
    before = [tensor.clone() for tensor in tensors]
    x = rows().detach()
    expected = module.train()(x)
    with replaced(module.weight), torch.no_grad():
        assert torch.equal(module.eval()(x), expected)
    now = [inner.tensor for inner in inner_tensors(module.weight)]
    assert all(one is two for one, two in zip(now, tensors, strict=True))
    assert all(map(torch.equal, now, before))


def test_names_are_replaced_for_quantised_weights_alone_and_given_back() -> None:
    linear("torchao nf4")  # so that its module is imported

    def now() -> list[Any]:
        return [getattr(sys.modules[module], name) for module, name in FUNCTIONS]

    before = now()
    with replaced(nn.Parameter(torch.zeros(3))):
        assert now() == before
    with replaced(linear("nf4").weight):
        assert all(one is not two for one, two in zip(now(), before, strict=True))
    assert now() == before


def test_weights_that_are_there() -> None:
    """They return another object for the device where they are. Without `to` they quantise."""
    for linear in (
        bitsandbytes.nn.Linear4bit(64, 8),
        bitsandbytes.nn.Linear8bitLt(64, 8, has_fp16_weights=False),
    ):
        weight = linear.to("cpu").weight
        there = itself_if_there
        assert weight.to("cpu") is not weight
        assert there(type(weight).to, weight, "cpu") is weight
        assert there(type(weight).to, weight, "meta").is_meta
    unquantised = bitsandbytes.nn.Linear4bit(64, 8).weight
    assert there(type(unquantised).to, unquantised, "cpu").quant_state is not None
