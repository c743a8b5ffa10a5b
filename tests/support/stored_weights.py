"""Directories whose weights are stored in fine-grained FP8 or in MXFP4, as their makers publish
them. Each is written from a model of plain weights, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
FP4_LARGEST = 6.0
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_BLOCK = 32  # values that share an exponent


def fp8_blocks(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3's layout: codes of the weight's shape, and an fp32 scale for each block. The last
    block of a row or a column may be smaller."""
    height, width = weight.shape
    scales = torch.zeros(-(-height // rows), -(-width // columns))
    codes = torch.empty(height, width, dtype=FP8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            block = weight[place].float()
            scales[i, j] = block.abs().max() / FP8_LARGEST
            codes[place] = (block / scales[i, j]).to(FP8)
    return codes, scales


def mxfp4_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gpt-oss' layout of experts [expert, input, output]: blocks [expert, output, group, 16] with
    two codes in a byte, the first in the low bits, and scales [expert, output, group], a biased
    exponent for each 32 inputs."""
    grouped = weight.float().transpose(1, 2).unflatten(-1, (-1, FP4_BLOCK))
    largest = grouped.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    exponent = torch.ceil(torch.log2(largest / FP4_LARGEST))
    scaled = grouped / torch.exp2(exponent)
    values = torch.tensor(FP4_VALUES)
    codes = (scaled.abs().unsqueeze(-1) - values).abs().argmin(-1)
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed.contiguous(), (exponent.squeeze(-1) + 127).to(torch.uint8)


def fp8_tensors(
    tensors: dict[str, torch.Tensor], block: tuple[int, int], plain: tuple[str, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an FP8 directory. Matrices are codes, but those with a part of `plain` in
    their names."""
    for name, tensor in tensors.items():
        is_plain = tensor.dim() != 2 or any(word in name for word in plain)
        if is_plain or not name.endswith(".weight"):
            yield name, tensor
            continue
        codes, scales = fp8_blocks(tensor, *block)
        yield name, codes
        yield f"{name}_scale_inv", scales


def mxfp4_tensors(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of gpt-oss: the weights of its experts are blocks and scales."""
    for name, tensor in tensors.items():
        if tensor.dim() != 3:
            yield name, tensor
            continue
        blocks, scales = mxfp4_blocks(tensor)
        yield f"{name}_blocks", blocks
        yield f"{name}_scales", scales


def random_weights(model: nn.Module) -> None:
    """Give the parameters values that differ in size from row to row."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            count = torch.arange(parameter.numel(), dtype=torch.float32)
            values = (count + 0.37 * number).sin() * torch.exp2(count % 7 - 6)
            parameter.copy_(values.view_as(parameter))


def rewrite(
    directory: Path, tensors: Iterator[tuple[str, torch.Tensor]], settings: dict[str, Any]
) -> None:
    """Make a directory of `save_pretrained`, with one file, one of these tensors. `settings`: its
    quantization_config."""
    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": settings}))


def fp8_settings(block: tuple[int, int]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(block),
    }
