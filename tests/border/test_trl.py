"""TRL's own trainers and Lightning's own strategy: with a "stronghold" section they train as on
plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer

from tests.border.test_trainer import CLIENT
from tests.support.frameworks import LOSS_BOUND, fresh_accelerate, plugin, trainer_arguments

pytestmark = pytest.mark.usefixtures("fresh_accelerate", "plugin")

__all__ = ["fresh_accelerate", "plugin"]

NUM_SAMPLES = 32
SECTION = {**CLIENT, "stronghold": {"device": "emulated", "window": 2}}
# Beside `trainer_arguments`, which are not all of every trainer's.
GIVEN: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "bf16": False,
    "seed": 3,
}


def tokenizer() -> Any:
    """One token a printable character."""
    words = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def tiny(folder: Path, tokens: Any) -> LlamaForCausalLM:
    """From a folder: TRL makes reference models from a model's path."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    made = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokens), pad_token_id=0, eos_token_id=1, **sizes, **heads)
    )
    made.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


def supervised(trl: Any, dataset: Any, base: Any, given: dict[str, Any], tokens: Any) -> Trainer:
    texts = [f"{i} comes after {i - 1}, and {i + 1} is next" for i in range(NUM_SAMPLES)]
    return trl.SFTTrainer(
        model=base,
        args=trl.SFTConfig(max_length=64, **given),
        train_dataset=dataset.from_dict({"text": texts}),
        processing_class=tokens,
    )


def lora() -> Any:
    import peft

    torch.manual_seed(5)
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def adapters(trl: Any, dataset: Any, base: Any, given: dict[str, Any], tokens: Any) -> Trainer:
    texts = [f"{i} comes after {i - 1}" for i in range(NUM_SAMPLES)]
    return trl.SFTTrainer(
        model=base,
        args=trl.SFTConfig(max_length=64, **given),
        train_dataset=dataset.from_dict({"text": texts}),
        processing_class=tokens,
        peft_config=lora(),
    )


def preferences(
    trl: Any, dataset: Any, base: Any, given: dict[str, Any], tokens: Any, **more: Any
) -> Trainer:
    """With a reference model of its own: an engine that only runs forward."""
    numbers = range(NUM_SAMPLES)
    columns = {
        "prompt": [f"count {i}: " for i in numbers],
        "chosen": [f"{i} {i + 1}" for i in numbers],
        "rejected": [f"{i} {i - 1} no" for i in numbers],
    }
    more = more or {"ref_model": LlamaForCausalLM.from_pretrained(base.config.name_or_path)}
    return trl.DPOTrainer(
        model=base,
        args=trl.DPOConfig(max_length=64, **given),
        train_dataset=dataset.from_dict(columns),
        processing_class=tokens,
        **more,
    )


def preferences_of_adapters(*arguments: Any) -> Trainer:
    """The reference is the base, with the adapters disabled: no second model."""
    return preferences(*arguments, peft_config=lora())


def rewards(
    trl: Any, dataset: Any, base: Any, given: dict[str, Any], tokens: Any, **more: Any
) -> Trainer:
    """Generates between steps, with weights that the last step may still be updating."""
    given |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    return trl.GRPOTrainer(
        model=base,
        args=trl.GRPOConfig(num_generations=4, max_completion_length=8, beta=0.04, **given),
        train_dataset=dataset.from_dict({"prompt": [f"{i}: " for i in range(NUM_SAMPLES)]}),
        processing_class=tokens,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        **more,
    )


def rewards_of_adapters(*arguments: Any) -> Trainer:
    """The reference is the base, with the adapters disabled: no second model."""
    return rewards(*arguments, peft_config=lora())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "made",
    [supervised, adapters, preferences, preferences_of_adapters, rewards, rewards_of_adapters],
)
def test_trainers_of_trl_train_as_on_plain_pytorch(
    made: Callable[..., Trainer], tmp_path: Path
) -> None:
    import datasets  # seconds, which no other test needs
    import trl

    runs = []
    for settings in (None, SECTION):
        shared = trainer_arguments(tmp_path / "out", settings)  # sets the process up
        given = {**GIVEN, "output_dir": str(tmp_path / "out")}
        given |= {"use_cpu": shared.use_cpu, "deepspeed": settings}
        tokens = tokenizer()
        trainer = made(trl, datasets.Dataset, tiny(tmp_path / "base", tokens), given, tokens)
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        runs.append((log, weights))
        trainer.accelerator.free_memory()
    (plain, expected), (ours, weights) = runs
    assert len(plain) == GIVEN["max_steps"]
    for entry, of_plain in zip(ours, plain, strict=True):
        assert entry["loss"] == pytest.approx(of_plain["loss"], abs=LOSS_BOUND)
        assert entry["grad_norm"] == pytest.approx(of_plain["grad_norm"], rel=1e-4)
    far = sum((a - b).abs().sum().item() for a, b in zip(weights, expected, strict=True))
    moved = GIVEN["learning_rate"] * sum(weight.numel() for weight in weights)
    assert far < 0.05 * moved, "weights of another step"


def test_lightnings_strategy_trains_as_on_plain_pytorch(tmp_path: Path) -> None:
    """On a CPU, which its DeepSpeed strategy refuses: its two checks of the GPU are left out."""
    import lightning
    from lightning.pytorch.strategies import StrategyRegistry

    from tests.support.lightning_on_cpu import OnCPU, lightning_on_cpu

    engines: list[Any] = []  # of the last fit: Lightning drops it, and destroys nothing

    class Task(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.losses = tiny(tmp_path / "base", tokenizer()), []

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            engines[:] = [self.trainer.strategy.model]
            loss = self.inner(input_ids=batch, labels=batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    batches = list(torch.randint(3, 90, (6, 2, 16), generator=torch.Generator().manual_seed(1)))
    runs = []
    for settings in (None, SECTION):
        trainer_arguments(tmp_path / "out", settings)
        own = {name: SECTION[name] for name in ("zero_allow_untested_optimizer", "stronghold")}
        own["train_micro_batch_size_per_gpu"] = 2
        StrategyRegistry.register("stronghold", OnCPU, override=True, config=own)
        strategy = "auto" if settings is None else "stronghold"
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            use_distributed_sampler=False,
            gradient_clip_val=0.5,
            default_root_dir=tmp_path,
            strategy=strategy,
        )
        task = Task()
        with lightning_on_cpu():
            trainer.fit(task, torch.utils.data.DataLoader(batches, batch_size=None))
        runs.append(task.losses)
    engines.pop().destroy()
    assert len(runs[0]) == len(batches)
    assert runs[1] == pytest.approx(runs[0], abs=LOSS_BOUND)
