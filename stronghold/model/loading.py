"""Models that RAM does not hold: Transformers packs each weight, or writes it to a file, as soon as
it has the weight.

    AutoModelForCausalLM.from_pretrained(folder, quantization_config=NF4Config())
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=MappedConfig("/nvme"))

Transformers calls this quantisation. It hands over each weight when its name, its dtype and its
fused experts are final. So RAM never has the whole model in 16 bits. The peak is what is packed,
and two to three copies of the largest fused weight.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from stronghold.errors import ConfigError
from stronghold.model.packed_weight import PackedWeight, packable
from stronghold.model.partition import find_blocks

NF4, MAPPED = "stronghold_nf4", "stronghold_mapped"


def mapped(tensor: Tensor, folder: str) -> Tensor:
    """Copy a tensor to a new file in `folder`, and map the file. It has no name, and ends with the
    copy. OSError if the disk is full."""
    number, path = tempfile.mkstemp(prefix="stronghold-", dir=folder)
    try:
        # A page of a sparse file that the disk has no room for would end the process (SIGBUS).
        os.posix_fallocate(number, 0, tensor.nbytes)
        copy = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    except OSError as error:
        what = f"{error.strerror}, for a weight of {tensor.nbytes} bytes"
        raise OSError(error.errno, what, str(folder)) from error
    finally:
        os.close(number)
        os.unlink(path)
    return copy.view(tensor.shape).copy_(tensor)


@register_quantization_config(NF4)
class NF4Config(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of `from_pretrained`: the linear layers and the fused experts of the
    blocks are loaded as frozen `PackedWeight`s. All else is loaded as it is, and may train.

    folder  on a local disk, for packed weights that RAM does not hold
    """

    def __init__(self, folder: str | None = None, **_: Any) -> None:
        self.quant_method = NF4
        self.folder = folder


@register_quantization_config(MAPPED)
class MappedConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of `from_pretrained`: the weights are loaded to files in `folder`, on a
    local disk, and mapped. The model is an ordinary one, and may train."""

    def __init__(self, folder: str, **_: Any) -> None:
        self.quant_method = MAPPED
        self.folder = folder


class Convert(ConversionOps):  # type: ignore[misc]
    """Converts the weights that Transformers has loaded, one by one."""

    def __init__(self, converted: Callable[[Tensor], Tensor]) -> None:
        self._converted = converted

    def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Tensor]:
        return {
            name: self._converted(value[0] if isinstance(value, list) else value)
            for name, value in input_dict.items()
        }


class Quantizer(HfQuantizer):  # type: ignore[misc]
    """What both configs share. `_names`: the parameters that are converted."""

    requires_calibration = False

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self._folder: Any = config.folder
        self._names: set[str] = set()
        self._dtype: torch.dtype | None = None
        if self._folder is not None and not Path(self._folder).is_dir():
            raise ConfigError(
                f"{type(config).__name__}: {self._folder!r} is no folder: give one on a local disk"
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self._dtype = dtype
        return dtype

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        return param_name in self._names

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


@register_quantizer(NF4)
class NF4Quantizer(Quantizer):
    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        names = {module: name for name, module in model.named_modules()}
        blocks = find_blocks(model)
        self._names = {f"{names[module]}.{name}" for module, name in packable(blocks)}
        if not self._names:
            raise ConfigError(
                f"NF4Config: {type(model).__name__} has no repeated blocks with linear layers or "
                "fused experts to pack: load it without NF4Config"
            )

    def get_quantize_ops(self) -> ConversionOps:
        return Convert(self._packed)

    def _packed(self, weight: Tensor) -> Tensor:
        packed = PackedWeight.pack(weight)
        if self._folder is not None:
            packed = packed.changed(lambda inner: mapped(inner, self._folder))
        return nn.Parameter(packed, requires_grad=False)


@register_quantizer(MAPPED)
class MappedQuantizer(Quantizer):
    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        # Transformers casts a converted parameter to the model's dtype, and to no other.
        self._names = {name for name, p in model.named_parameters() if p.dtype is self._dtype}

    def get_quantize_ops(self) -> ConversionOps:
        return Convert(partial(mapped, folder=self._folder))

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> None:
        self.remove_quantization_config(model)
