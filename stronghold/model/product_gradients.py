"""Product gradients: the FLOPs that backward needs for the products of a forward pass.

Owns the rule of [Note: gradients of a product], for one call of an operator. Reads no value and
keeps no tensor. The thread that traces the model enters it.

[Note: gradients of a product]

1. A product has two factors. Backward computes the gradient of each factor that needs one. Each
   takes as many FLOPs as the product itself.
2. So full training has two products in backward for each one in forward. A frozen weight has one:
   its input's. A frozen weight whose input needs no gradient, as in a first block, has none.
3. Under `no_grad` a factor does not show whether it needs a gradient: a function with a backward of
   its own, or the model's own checkpointing, computes there. Such a product counts two.
4. Attention's kernels count nothing here: their backward has its own rate (`plan.cost`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stronghold.model.gpu_operators import ATTENTION_KERNELS

aten = torch.ops.aten
# the first argument is added to the product
ADDED_FIRST = frozenset({aten.addmm, aten.baddbmm})
NO_PRODUCTS = frozenset(kernel.overloadpacket for kernel in ATTENTION_KERNELS)


class ProductGradients(TorchDispatchMode):
    """Context manager that adds up the FLOPs of the products' gradients: `total`.

    Arguments:
        flops_of: by operator, the function that counts its FLOPs (`FlopCounterMode.flop_registry`).
    """

    def __init__(self, flops_of: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flops_of = flops_of
        self.total = 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in self._flops_of and packet not in NO_PRODUCTS:
            flops = self._flops_of[packet](*args, **(kwargs or {}), out_val=result)
            self.total += flops * num_gradients(packet, args)
        return result


def num_gradients(packet: Any, args: Sequence[Any]) -> int:
    """The number of factors of a product that need a gradient: 0, 1 or 2."""
    if not torch.is_grad_enabled():
        return 2
    first = 1 if packet in ADDED_FIRST else 0
    return sum(factor.requires_grad for factor in args[first : first + 2])
