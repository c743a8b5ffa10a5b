"""The model and the two data sets of TRL's invariants, under the names that its configs use."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch

from conformance_suite import hub

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
CONVERSATIONS, PREFERENCES = "trl-lib/Capybara", "trl-lib/ultrafeedback_binarized"
ROWS = 64
WORDS = 100
TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message.role }} {{ message.content }} <|im_end|> "
    "{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def sentence(draw: random.Random, longest: int) -> str:
    words = (f"word{draw.randrange(WORDS)}" for _ in range(draw.randrange(3, longest)))
    return " ".join(words)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def conversations(draw: random.Random) -> list[dict[str, Any]]:
    """Rows of one to three turns: their lengths differ, so batches are padded."""
    rows = []
    for _ in range(ROWS):
        messages = []
        for _ in range(draw.randrange(1, 4)):
            messages.append(message("user", sentence(draw, 12)))
            messages.append(message("assistant", sentence(draw, 20)))
        rows.append({"messages": messages})
    return rows


def preferences(draw: random.Random) -> list[dict[str, Any]]:
    rows = []
    for _ in range(ROWS):
        question = message("user", sentence(draw, 12))
        answers = [[question, message("assistant", sentence(draw, 20))] for _ in range(2)]
        rows.append({"chosen": answers[0], "rejected": answers[1]})
    return rows


def tokenizer() -> Any:
    """Qwen's kind of tokenizer, trained on the words of the data sets, with a template."""
    from transformers import Qwen2Tokenizer

    words = " ".join(f"word{number}" for number in range(WORDS))
    texts = [f"<|im_start|> user {words} <|im_end|> <|im_start|> assistant {words} <|im_end|>"]
    made = Qwen2Tokenizer().train_new_from_iterator(texts, vocab_size=512)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    made.chat_template = TEMPLATE
    return made


def build(folder: Path, revision: str) -> None:
    """Fill the hub in `folder`.

    revision  commit of the model that TRL's configs name
    """
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    words = tokenizer()
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        tie_word_embeddings=True,
    )
    hub.add_model(folder, MODEL, Qwen2ForCausalLM(config), words, revision)
    draw = random.Random(0)
    for name, rows in ((CONVERSATIONS, conversations), (PREFERENCES, preferences)):
        splits = {split: Dataset.from_list(rows(draw)) for split in ("train", "test")}
        hub.add_dataset(folder, name, "default", splits)


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2])
