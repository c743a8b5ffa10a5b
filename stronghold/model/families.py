"""Families: where known models keep their blocks.

Owns the two tables, by `config.model_type` (Hugging Face) and by class name (Megatron, PyTorch,
research code), and nothing that looks at parameters. A path names the container of the blocks. What
is not listed here is found by structure (`blocks.py`): an entry is needed only where structure
would choose wrongly or where a model of one block must work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

# Paths of block containers by `config.model_type`, as suffixes of module names: "h" is
# "transformer.h" in GPT2LMHeadModel and "h" in GPT2Model. Several paths: several stacks, or several
# versions of the library.
_SUFFIXES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("h",): (
        "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj",
    ),
    ("blocks",): ("mpt",),
    ("layers",): (
        "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "exaone4", "gemma", "gemma2",
        "gemma3", "gemma3_text", "glm", "glm4", "gpt_neox", "gpt_oss", "granite",
        "granitemoe", "internlm2", "llama", "llama4_text", "mamba", "mamba2", "ministral",
        "mistral", "mixtral", "modernbert", "nemotron", "olmo", "olmo2", "olmo3", "olmoe",
        "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
        "qwen3_moe", "qwen3_next", "smollm3", "stablelm", "starcoder2",
    ),
    ("encoder.layer",): (
        "bert", "camembert", "deberta", "deberta-v2", "electra", "esm", "mpnet", "roberta",
        "xlm-roberta",
    ),
    ("transformer.layer",): ("distilbert",),
    # Groups, not the layers in them: a group is called num_hidden_layers / num_hidden_groups times
    # per forward.
    ("encoder.albert_layer_groups",): ("albert",),
    ("layers", "encoder.layer"): ("deit", "dinov2", "vit", "vit_mae"),
    ("encoder.block", "decoder.block"): ("longt5", "mt5", "switch_transformers", "t5", "umt5"),
    ("encoder.layers", "decoder.layers"): (
        "bart", "blenderbot", "m2m_100", "marian", "mbart", "pegasus", "whisper",
    ),
}  # fmt: skip

MODEL_TYPES: dict[str, tuple[str, ...]] = {
    model_type: paths for paths, types in _SUFFIXES.items() for model_type in types
}

# Paths by class name, exactly as they are below that module: class names are not unique, so nothing
# is guessed.
CLASS_NAMES: dict[str, tuple[str, ...]] = {
    # Megatron: the legacy models, then Megatron core's.
    "GPTModel": ("language_model.encoder.layers", "decoder.layers"),
    "BertModel": ("language_model.encoder.layers", "encoder.layers"),
    "T5Model": (
        "language_model.encoder.layers",
        "language_model.decoder.layers",
        "encoder.layers",
        "decoder.layers",
    ),
    "TransformerLanguageModel": ("encoder.layers", "decoder.layers"),
    "ParallelTransformer": ("layers",),
    "TransformerBlock": ("layers",),
    # Other layouts of the same: a model that holds `transformer.layers` with embedding and head
    # beside it.
    "GPT2Model": ("transformer.layers",),
    # minGPT, nanoGPT.
    "GPT": ("transformer.h", "transformer.layers"),
    # torch.nn, and the reference code of Llama.
    "Transformer": ("layers", "encoder.layers", "decoder.layers"),
    "TransformerEncoder": ("layers",),
    "TransformerDecoder": ("layers",),
}


def unwrapped(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`model` and what it merely wraps, outermost first, with their names: every only child in turn
    (PEFT, DDP, an outer module that adds a loss)."""
    name, module = "", model
    yield name, module
    while len(children := list(module.named_children())) == 1:
        child, module = children[0]
        name = f"{name}.{child}" if name else child
        yield name, module


def family_paths(model: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(suffixes, exact paths) of the block containers of a known model, both empty for an unknown
    one.

    The outermost module that has a `config.model_type` or a listed class name decides; `model_type`
    wins, because it is unique and class names (BertModel) are not.
    """
    for name, module in unwrapped(model):
        config: Any = getattr(module, "config", None)
        model_type = getattr(config, "model_type", None)
        if isinstance(model_type, str):
            return MODEL_TYPES.get(model_type, ()), ()
        paths = CLASS_NAMES.get(type(module).__name__)
        if paths is not None:
            return (), tuple(f"{name}.{path}" if name else path for path in paths)
    return (), ()
