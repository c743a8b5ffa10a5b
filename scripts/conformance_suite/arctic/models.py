"""Configs, a tokenizer and data sets under the names that ArcticTraining's tests load.

The tests make models of random weights from a config: no weights are needed.
"""

from __future__ import annotations

from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, Olmo2Config, PreTrainedTokenizerFast

from conformance_suite.hub import add_dataset, snapshot

CONFIGS = {
    "hf-internal-testing/tiny-random-Olmo2ForCausalLM": Olmo2Config,
    "hf-internal-testing/tiny-random-LlamaForCausalLM": LlamaConfig,
}
NUM_ROWS = 40  # the tests take the first 20
SENTENCES = (
    "The engine streams layers of a model through a window on the device.",
    "Gradients leave the device while the next layer still computes.",
    "A checkpoint has weights, masters, moments and the state of the program.",
    "What is the answer to a question about the state of a program?",
)
CHAT = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def build(hub: Path) -> None:
    """Write everything into the folder `hub`."""
    tokenizer = _tokenizer()
    for name, config_class in CONFIGS.items():
        files = snapshot(hub, name)
        tokenizer.save_pretrained(files)
        config = config_class(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        config.save_pretrained(files)
    _data_sets(hub)


def _tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that was trained on the sentences, with a template for chats."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    made.chat_template = CHAT
    return made


def _data_sets(hub: Path) -> None:
    chats, pairs, texts = [], [], []
    for number in range(NUM_ROWS):
        question = {"role": "user", "content": f"{number}: {SENTENCES[3]}"}
        answers = [
            {"role": "assistant", "content": f"{number}: {sentence}"} for sentence in SENTENCES[:2]
        ]
        chats.append({"messages": [question, answers[0]]})
        pairs.append({"chosen": [question, answers[0]], "rejected": [question, answers[1]]})
        texts.append({"text": " ".join([f"Text {number}.", *SENTENCES * 200])})
    sets = {
        "HuggingFaceH4/ultrachat_200k": {"train": chats, "train_sft": chats},
        "HuggingFaceH4/ultrafeedback_binarized": {"train": pairs, "train_prefs": pairs},
        "stas/gutenberg-100": {"train": texts},
    }
    for name, splits in sets.items():
        rows = {split: Dataset.from_list(of_split) for split, of_split in splits.items()}
        add_dataset(hub, name, "default", rows)
