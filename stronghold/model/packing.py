"""Chooses the frozen weights that `stronghold.frozen` packs. Reads names, shapes and dtypes, never
values.

A weight is packed if it is frozen, belongs to one block, and is the matrix of a linear layer or the
fused weights of experts. Norms, biases, embeddings and the head stay as they came. So do the
matrices of adapters, also of frozen ones: a reference, or a random projection.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import torch
from torch import nn

from stronghold.errors import ConfigError
from stronghold.model.inner_tensors import has_codes
from stronghold.model.packed_formats import PackedFormat, PackingError
from stronghold.model.packed_weight import packable
from stronghold.model.partition import Partition
from stronghold.model.stored_tensors import PackedParameter, pack

KEY = "stronghold.frozen"


def choose_packed(
    partitioned: Partition,
    packed_format: PackedFormat,
    dtype_of: Callable[[torch.Tensor], torch.dtype],
) -> dict[nn.Parameter, PackedParameter]:
    """Describe each parameter that will be packed.

    `dtype_of`: the dtype in which a parameter computes. ConfigError if there is none to pack.
    """
    chosen: dict[nn.Parameter, PackedParameter] = {}
    for layer in partitioned.streamed:
        names = {named.parameter: named.name for named in layer.parameters}
        for module, name in packable(layer.modules):
            parameter = getattr(module, name)
            dtype = dtype_of(parameter)
            is_of_block = parameter in names and not parameter.requires_grad
            if is_of_block and packed_format.can_pack(tuple(parameter.shape), dtype):
                chosen[parameter] = pack(names[parameter], parameter, packed_format, dtype)
    if not chosen:
        if _is_quantised(partitioned):
            raise ConfigError(
                f'{KEY}: got "{packed_format.name}", but a library has quantised the weights of '
                "the blocks already. Leave the key out: they stream as they are. Or load the model "
                "unquantised"
            )
        raise ConfigError(
            f'{KEY}: got "{packed_format.name}", but no block has a frozen weight of a linear '
            "layer or of fused experts. Freeze the base (requires_grad_(False)) and add adapters, "
            "or leave the key out"
        )
    return chosen


def _is_quantised(partitioned: Partition) -> bool:
    """True if a block has a weight that a library has quantised."""
    return any(
        has_codes(module)
        for layer in partitioned.streamed
        for block in layer.modules
        for module in block.modules()
    )


def kind_of_weight(block: str, name: str) -> str:
    """The name of a weight in its block, without numbers of experts. For people."""
    within = name.removeprefix(f"{block}.").removesuffix(".weight")
    return re.sub(r"\.\d+\.", ".*.", within)


def sum_of_errors(errors: Sequence[PackingError]) -> PackingError:
    """The error of several weights together."""
    return PackingError(
        square_sum=math.fsum(error.square_sum for error in errors),
        numel=sum(error.numel for error in errors),
        largest=max(error.largest for error in errors),
    )
