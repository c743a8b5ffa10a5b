"""A model directory and data for fine-tuning: a tokenizer of bytes, a tiny Llama, JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.models.families import llama_of

POSITIONS = 96
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    characters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", "<user>", "<assistant>"]
    vocabulary = {character: k for k, character in enumerate(characters)}
    bytes_alone = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_alone,
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_llama(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = (32, 48, 3, 2, 1, vocabulary)
    return llama_of(*sizes, max_position_embeddings=POSITIONS, use_cache=True)


def jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
