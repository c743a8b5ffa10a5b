"""Unmodified QLoRA programs: `load_in_4bit`, PEFT's preparation, the Trainer, TRL's SFT and DPO.

The plain run is the same program without DeepSpeed. What may differ is rounding, as in
`test_trainer`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer

from tests.border.test_trainer import CLIENT, VOCABULARY, samples
from tests.border.test_trl import GIVEN, NUM_SAMPLES, tiny, tokenizer
from tests.models.families import llama_of
from tests.support.frameworks import LOSS_BOUND, fresh_accelerate, plugin, trainer_arguments

pytestmark = [pytest.mark.usefixtures("fresh_accelerate", "plugin"), pytest.mark.slow]

__all__ = ["fresh_accelerate", "plugin"]

# TRL makes adapters of a quantised base bf16. torch's AdamW then rounds each update to 8 bits, and
# the engine has fp32 masters. The losses of the first two steps are equal, then they differ by
# 8.1e-5 (SFT) and 3.5e-5 (DPO). Weights differ by 0.075 of a step of each weight.
WITHOUT_MASTERS = {"bound": 3e-4, "share": 0.15}
SECTION = {**CLIENT, "stronghold": {"device": "emulated", "window": 1}}
LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@pytest.fixture(autouse=True)
def without_evaluation_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CPUs without AVX512-BF16. With it an evaluation of the plain model rounds its scales,
    and takes the gradient from its products."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


def quantised(folder: Path, *, bits: int = 4, bias: bool = False, stored: bool = False) -> Any:
    """A tiny checkpoint, loaded as a user does. `stored`: from a directory that is quantised."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        sizes = (64, 128, 3, 2, 1, VOCABULARY)
        llama_of(*sizes, attention_bias=bias).save_pretrained(folder)
    options: dict[str, Any] = {"load_in_8bit": True}
    if bits == 4:
        options = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": torch.float32,
        }
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**options), dtype=torch.float32
    )
    if stored:
        model.save_pretrained(folder / "stored")
        model = AutoModelForCausalLM.from_pretrained(folder / "stored", dtype=torch.float32)
    return model


def adapted(base: Any, *, checkpointing: bool = False) -> Any:
    model = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=checkpointing)
    torch.manual_seed(5)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA))


def by_trainer(folder: Path, settings: Any, **options: Any) -> Trainer:
    arguments = trainer_arguments(folder / "out", settings, learning_rate=1e-3, adam_beta2=0.999)
    checkpointing = options.pop("checkpointing", False)
    model = adapted(quantised(folder / "base", **options), checkpointing=checkpointing)
    return Trainer(
        model=model, args=arguments, train_dataset=samples(1), eval_dataset=samples(2, 4)
    )


TRAINED: dict[str, Callable[[Path, Any], Trainer]] = {
    "4 bits": by_trainer,
    "4 bits, biases": lambda folder, settings: by_trainer(folder, settings, bias=True),
    "4 bits, checkpointed": lambda folder, settings: by_trainer(
        folder, settings, checkpointing=True
    ),
    "4 bits, stored": lambda folder, settings: by_trainer(folder, settings, stored=True),
    "8 bits": lambda folder, settings: by_trainer(folder, settings, bits=8),
}


def outcome(trainer: Trainer) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    """The log, and the adapters."""
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]
    weights = [
        parameter.detach().clone()
        for parameter in trainer.model.parameters()
        if parameter.requires_grad
    ]
    trainer.accelerator.free_memory()
    return log, weights


def assert_close(ours: Any, plain: Any, *, bound: float = LOSS_BOUND, share: float = 0.05) -> None:
    """`bound`: of losses after the first. `share`: of the way that weights can have moved."""
    (log, weights), (expected_log, expected) = ours, plain
    assert len(log) == len(expected_log) > 3
    assert log[0]["loss"] == pytest.approx(expected_log[0]["loss"], abs=LOSS_BOUND)
    for entry, of_plain in zip(log, expected_log, strict=True):
        for key in ("loss", "eval_loss"):
            if key in of_plain:
                assert entry[key] == pytest.approx(of_plain[key], abs=bound)
    far = sum((a - b).abs().sum().item() for a, b in zip(weights, expected, strict=True))
    moved = 1e-3 * sum(weight.numel() for weight in weights)
    assert far < share * moved, "adapters of another step"


@pytest.mark.parametrize("case", TRAINED)
def test_a_trainer_over_a_quantised_base_trains_as_on_plain_pytorch(
    case: str, tmp_path: Path
) -> None:
    plain = outcome(TRAINED[case](tmp_path, None))
    assert_close(outcome(TRAINED[case](tmp_path, SECTION)), plain)


# -- TRL -------------------------------------------------------------------------------------------
def supervised(trl: Any, dataset: Any, base: Any, given: dict[str, Any], tokens: Any) -> Trainer:
    texts = [f"{i} comes after {i - 1}, and {i + 1} is next" for i in range(NUM_SAMPLES)]
    torch.manual_seed(5)
    return trl.SFTTrainer(
        model=base,
        args=trl.SFTConfig(max_length=64, **given),
        train_dataset=dataset.from_dict({"text": texts}),
        processing_class=tokens,
        peft_config=peft.LoraConfig(**LORA),
    )


def preferences(trl: Any, dataset: Any, base: Any, given: dict[str, Any], tokens: Any) -> Trainer:
    """Without a reference model: it is the base, without adapters."""
    numbers = range(NUM_SAMPLES)
    columns = {
        "prompt": [f"count {i}: " for i in numbers],
        "chosen": [f"{i} {i + 1}" for i in numbers],
        "rejected": [f"{i} {i - 1} no" for i in numbers],
    }
    torch.manual_seed(5)
    return trl.DPOTrainer(
        model=base,
        args=trl.DPOConfig(max_length=64, **given),
        train_dataset=dataset.from_dict(columns),
        processing_class=tokens,
        peft_config=peft.LoraConfig(**LORA),
    )


@pytest.mark.parametrize("made", [supervised, preferences])
def test_trainers_of_trl_over_a_4_bit_base_train_as_on_plain_pytorch(
    made: Callable[..., Trainer], tmp_path: Path
) -> None:
    import datasets
    import trl

    runs = []
    for settings in (None, SECTION):
        shared = trainer_arguments(tmp_path / "out", settings)  # sets the process up
        given = {**GIVEN, "output_dir": str(tmp_path / "out"), "max_steps": 5}
        given |= {"use_cpu": shared.use_cpu, "deepspeed": settings}
        tokens = tokenizer()
        tiny(tmp_path / "base", tokens)
        base = quantised(tmp_path / "base")
        runs.append(outcome(made(trl, datasets.Dataset, base, given, tokens)))
    plain, ours = runs
    assert_close(ours, plain, **WITHOUT_MASTERS)
