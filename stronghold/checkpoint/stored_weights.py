"""How the weights of a Hugging Face directory are stored: as floats, or in a library's format.

Owns the table of formats that `from_pretrained` reads, and the use of Transformers' quantisers. It
reads no tensor. The training thread alone enters.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stronghold.errors import ConfigError


class Reading(Enum):
    """The way in which the weights of a format are opened."""

    DECODED = "decoded"  # into floats, layer by layer: the model trains as any other
    KEPT = "kept"  # as they are, in the library's modules: they are frozen


# By `quant_method` of config.json.
READINGS = {
    "fp8": Reading.DECODED,
    "mxfp8": Reading.DECODED,
    "mxfp4": Reading.DECODED,
    "bitsandbytes": Reading.KEPT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """The format of a directory's weights.

    quantiser   Transformers' object for the format. None: the weights are floats
    reading     None: the weights are floats
    block_rows  rows of a weight that share one row of scales. 0: the format has no such blocks
    """

    quantiser: Any = None
    reading: Reading | None = None
    block_rows: int = 0

    @property
    def is_decoded(self) -> bool:
        """True if Transformers' rules decode the weights into floats."""
        return self.reading is Reading.DECODED

    def prepare(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Replace modules of `model` by the library's modules, if the format is kept."""
        if self.reading is Reading.KEPT:
            self.quantiser.preprocess_model(model=model, dtype=dtype, device_map={"": "cpu"})

    def finish(self, model: Any) -> None:
        """Mark `model` as quantised, as Transformers does, if the format is kept."""
        if self.reading is Reading.KEPT:
            model.hf_quantizer = self.quantiser
            self.quantiser.postprocess_model(model)


def stored_weights(config: Any, path: Path) -> StoredWeights:
    """The format of the weights in the directory `path`.

    `config`: its Transformers configuration. Its `quantization_config` is removed if the weights
    are decoded. Raises ConfigError for a format that `from_pretrained` cannot read.
    """
    owner = _owner(config)
    method = quantised_as(config)
    if owner is None or method is None:
        return StoredWeights()
    settings = owner.quantization_config
    reading = READINGS.get(method)
    if reading is None:
        raise ConfigError(
            f"{path}: its weights are quantised as {method!r}, and from_pretrained reads "
            f"{', '.join(READINGS)}. Load the model with transformers' from_pretrained, and give "
            "it to stronghold.initialize"
        )
    try:
        quantiser = _quantiser(settings, reading)
    # ImportError, ValueError, RuntimeError: each library has its reason
    except Exception as error:
        raise ConfigError(f"{path}: quantization_config: {error}") from error
    block = getattr(quantiser.quantization_config, "weight_block_size", None)
    if reading is Reading.DECODED:
        del owner.quantization_config
    return StoredWeights(quantiser=quantiser, reading=reading, block_rows=block[0] if block else 0)


def quantised_as(config: Any) -> str | None:
    """The `quant_method` of a Transformers configuration. None: the weights are floats."""
    owner = _owner(config)
    if owner is None:
        return None
    settings = owner.quantization_config
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return str(getattr(method, "value", method))


def _owner(config: Any) -> Any:
    """The configuration that has a `quantization_config`: the model's or its text part's."""
    for candidate in (config, config.get_text_config(decoder=True)):
        if getattr(candidate, "quantization_config", None) is not None:
            return candidate
    return None


def _quantiser(settings: dict[str, Any], reading: Reading) -> Any:
    """Transformers' quantiser for a directory's `quantization_config`."""
    from transformers.quantizers.auto import AutoHfQuantizer

    quantiser = AutoHfQuantizer.from_config(settings, pre_quantized=True)
    if reading is Reading.DECODED:
        quantiser.quantization_config.dequantize = True
    quantiser.validate_environment(device_map={"": "cpu"})
    return quantiser
