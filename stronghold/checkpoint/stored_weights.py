"""Weights of a Hugging Face directory that are stored in a library's format.

`from_pretrained` opens floats, and bitsandbytes' weights as they are. Transformers loads all
others. This file reads no tensor. The training thread alone enters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stronghold.errors import ConfigError

KEPT = "bitsandbytes"  # the `quant_method` of config.json


def quantiser_of(config: Any, path: Path) -> Any:
    """Transformers' object for the format of the weights in the directory `path`. None: floats.

    `config`: its Transformers configuration. Raises ConfigError for a format that `from_pretrained`
    cannot open.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    settings = _settings(config)
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    method = str(getattr(method, "value", method))
    if method != KEPT:
        raise ConfigError(
            f"{path}: its weights are quantised as {method!r}, and stronghold.from_pretrained "
            f"opens {KEPT}'s. Load the model with transformers' from_pretrained (for fp8, mxfp8 "
            "and mxfp4 with dequantize=True in its quantization_config), and give it to "
            "stronghold.initialize"
        )
    try:
        quantiser = AutoHfQuantizer.from_config(settings, pre_quantized=True)
        quantiser.validate_environment(device_map={"": "cpu"})
    # ImportError, ValueError, RuntimeError: each library has its reason
    except Exception as error:
        raise ConfigError(f"{path}: quantization_config: {error}") from error
    return quantiser


def _settings(config: Any) -> Any:
    """The `quantization_config` of the model, or of its text part. None: there is none."""
    for candidate in (config, config.get_text_config(decoder=True)):
        settings = getattr(candidate, "quantization_config", None)
        if settings is not None:
            return settings
    return None
