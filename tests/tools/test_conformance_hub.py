"""The folder that stands for the model hub in foreign tests: libraries find what was put there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FILL = """
from datasets import Dataset
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from conformance_suite import hub

folder = Path(sys.argv[1])
texts = ["the first words", "other words"]
tokenizer = hub.word_tokenizer(texts, ("input_ids", "attention_mask"), lower=True)
sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=2, **sizes)
hub.add_model(folder, "owner/Name", LlamaForCausalLM(config), tokenizer, "f" * 40)
splits = {"train": Dataset.from_list([{"text": text} for text in texts])}
hub.add_dataset(folder, "owner/CamelCase", "default", splits)
"""

READ = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

for revision in ("main", "f" * 40):
    model = AutoModelForCausalLM.from_pretrained("owner/Name", revision=revision)
    assert model.config.hidden_size == 8
numbers = AutoTokenizer.from_pretrained("owner/Name")("The WORDS", "words").input_ids
assert len(numbers) == 6 and numbers[2] == numbers[4], numbers  # [CLS] the words [SEP] words [SEP]
assert load_dataset("owner/CamelCase")["train"]["text"][0] == "the first words"
try:
    AutoTokenizer.from_pretrained("owner/absent")
except OSError:
    pass
else:
    raise AssertionError("a model that is not there was found")
"""


@pytest.mark.slow
def test_libraries_find_models_and_data_sets_without_a_network(tmp_path: Path) -> None:
    prepare = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]); "
        "from conformance_suite import hub; os.environ.update(hub.environment(Path(sys.argv[1])))"
    )
    for program in (FILL, READ):
        done = subprocess.run(
            [sys.executable, "-c", prepare + program, str(tmp_path), str(ROOT / "scripts")],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
