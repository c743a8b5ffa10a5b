"""An unmodified Transformers Trainer: with a "stronghold" section in its DeepSpeed config it trains
as plain PyTorch does.

The plain run is the same Trainer with the same arguments and no DeepSpeed: autograd, torch's fused
AdamW, its clipping. What may differ is rounding, by the bound that test_torch_reference states.
Under DeepSpeed the Trainer runs on a CPU in fp32 alone.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, Trainer

from stronghold.engine import StrongholdEngine
from tests.models.families import llama_of
from tests.support.frameworks import BOUND, LOSS_BOUND, fresh_accelerate, plugin
from tests.support.frameworks import trainer_arguments as arguments

pytestmark = pytest.mark.usefixtures("fresh_accelerate", "plugin")

__all__ = ["fresh_accelerate", "plugin"]

LEARNING_RATE = 1e-2
NUM_SAMPLES = 14  # 7 batches of 2: with 3 per step the last step of an epoch has one
VOCABULARY = 61
# the Trainer brings optimizer, parameter groups and schedule
CLIENT: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 0},
    "zero_allow_untested_optimizer": True,
    "stronghold": {"device": "emulated", "window": 1},
}
# the config names the optimizer, the Trainer fills it in
CONFIGURED: dict[str, Any] = {
    **CLIENT,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
}


def tiny_llama(*, tied: bool = False, **changed: Any) -> nn.Module:
    torch.manual_seed(0)
    options = {"tie_word_embeddings": tied, "use_cache": True, **changed}
    return llama_of(24, 52, 3, 2, 1, VOCABULARY, **options)


def samples(seed: int, number: int = NUM_SAMPLES) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randint(VOCABULARY, (number, 11), generator=random)
    return [{"input_ids": tokens, "labels": tokens} for tokens in drawn]


def train(
    folder: Path,
    settings: dict[str, Any] | None,
    model: nn.Module | None = None,
    *,
    resume: Path | None = None,
    train_dataset: Any = None,
    **changed: Any,
) -> Trainer:
    """A Trainer after `train()`; its engine is alive."""
    trainer = Trainer(
        model=tiny_llama() if model is None else model,
        args=arguments(folder, settings, **changed),
        train_dataset=train_dataset or samples(1),
        eval_dataset=samples(2, 4),
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Any]:
    """`train` whose engines are destroyed after the test."""
    made: list[Trainer] = []

    def run(*given: Any, **changed: Any) -> Any:
        made.append(train(tmp_path / str(len(made)), *given, **changed))
        return made[-1]

    yield run
    for trainer in made:
        trainer.accelerator.free_memory()


@dataclasses.dataclass(kw_only=True)
class Curve:
    """What a Trainer logged, in order."""

    losses: list[float]
    eval_losses: list[float]
    norms: list[float]
    rates: list[float]


def curve(trainer: Trainer) -> Curve:
    log = trainer.state.log_history
    return Curve(
        losses=[entry["loss"] for entry in log if "loss" in entry],
        eval_losses=[entry["eval_loss"] for entry in log if "eval_loss" in entry],
        norms=[entry["grad_norm"] for entry in log if "grad_norm" in entry],
        rates=[entry["learning_rate"] for entry in log if "learning_rate" in entry],
    )


def assert_same_training(streamed: Trainer, plain: Trainer) -> None:
    assert isinstance(streamed.model_wrapped, StrongholdEngine)
    assert plain.model_wrapped is plain.model
    ours, theirs = curve(streamed), curve(plain)
    assert len(theirs.losses) == plain.state.global_step
    assert ours.losses == pytest.approx(theirs.losses, abs=LOSS_BOUND)
    assert ours.eval_losses == pytest.approx(theirs.eval_losses, abs=LOSS_BOUND)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)
    streamed.model_wrapped.synchronize()
    expected = dict(plain.model.named_parameters())
    total = sum(
        (weight - expected[name]).abs().sum().item()
        for name, weight in streamed.model.named_parameters()
    )
    mean = total / sum(weight.numel() for weight in expected.values())
    assert mean <= BOUND * plain.state.global_step * LEARNING_RATE


@pytest.mark.parametrize("kept", ["activations kept", "reentrant", "not reentrant"])
def test_the_trainer_trains_as_without_deepspeed(trained: Any, kept: str) -> None:
    changed: dict[str, Any] = {}
    if kept != "activations kept":
        reentrant = {"use_reentrant": kept == "reentrant"}
        changed = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": reentrant}
    streamed, plain = trained(CLIENT, **changed), trained(None, **changed)
    assert_same_training(streamed, plain)
    assert curve(streamed).rates == curve(plain).rates
    assert max(curve(plain).norms) > 0.5, "no step was clipped: the test would not see clipping"
    weight_decays = {group["weight_decay"] for group in streamed.optimizer.param_groups}
    assert weight_decays == {0.1, 0.0}, "the Trainer's decay and no-decay groups"


def test_a_batch_in_chunks_trains_as_the_whole_one(trained: Any) -> None:
    """A larger per-device batch and the key are all that a user changes."""
    settings = {**CLIENT, "stronghold": {**CLIENT["stronghold"], "chunk": 1}}
    changed = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    streamed = trained(settings, **changed)
    assert streamed.model_wrapped.plan.demand.chunk == 1
    assert_same_training(streamed, trained(None, **changed))


def test_early_updates_train_as_without_deepspeed(trained: Any) -> None:
    changed = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1}
    settings = {**CLIENT, "stronghold": {**CLIENT["stronghold"], "early_layers": "all"}}
    streamed = trained(settings, **changed)
    assert streamed.model_wrapped.plan.early
    assert_same_training(streamed, trained(None, **changed))


def test_deepspeed_itself_trains_the_same_without_the_section(trained: Any) -> None:
    stock = trained({key: value for key, value in CLIENT.items() if key != "stronghold"})
    assert type(stock.model_wrapped) is deepspeed.DeepSpeedEngine
    streamed = trained(CLIENT)
    assert isinstance(streamed.model_wrapped, StrongholdEngine)
    bound = pytest.approx(curve(stock).losses, abs=LOSS_BOUND)
    assert curve(streamed).losses == bound
    assert curve(streamed).rates == curve(stock).rates
    assert streamed.state.global_step == stock.state.global_step


def test_auto_values_are_the_trainers(trained: Any) -> None:
    # With the optimizer in the config every parameter decays: equal to the plain run without decay.
    streamed, plain = (trained(CONFIGURED, weight_decay=0.0), trained(None, weight_decay=0.0))
    assert_same_training(streamed, plain)
    engine = streamed.model_wrapped
    assert "auto" not in str(engine.config)
    assert engine.gradient_accumulation_steps() == 3
    assert engine.train_batch_size() == 6
    assert engine.gradient_clipping() == 0.5
    assert engine.config["optimizer"]["params"]["betas"] == [0.9, 0.99]
    # The engine advances the schedule inside its step, so that the Trainer logs the next rate.
    assert curve(streamed).rates[:-1] == curve(plain).rates[1:]


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_has_equal_weights_and_predictions(
    trained: Any, tmp_path: Path, tied: bool
) -> None:
    trainer = trained(CLIENT, tiny_llama(tied=tied))
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").exists()
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    state = trainer.model.state_dict()
    assert opened.state_dict().keys() == state.keys()
    for name, weight in opened.state_dict().items():
        assert torch.equal(weight, state[name]), name
    predicted = trainer.predict(samples(3, 4))
    for row, sample in zip(predicted.predictions, samples(3, 4), strict=True):
        with torch.no_grad():
            logits = opened(input_ids=sample["input_ids"][None]).logits[0]
        assert torch.allclose(torch.from_numpy(row), logits, atol=1e-6)


class Greedy(nn.Module):
    """Runs out of memory on a batch of more than two."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_llama()
        self.sizes: list[int] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        if self.training:
            self.sizes.append(len(input_ids))
        if self.training and len(input_ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.inner(input_ids=input_ids, labels=labels)


def test_a_smaller_batch_is_found_with_a_new_engine(trained: Any) -> None:
    changed = {"auto_find_batch_size": True, "per_device_train_batch_size": 3}
    greedy = Greedy()
    streamed = trained(CLIENT, greedy, **changed)
    assert greedy.sizes[0] == 3
    assert greedy.sizes[-1] == 2
    assert_same_training(streamed, trained(None, Greedy(), **changed))


def test_a_second_trainer_takes_the_model_over(trained: Any) -> None:
    # One Trainer trains once under DeepSpeed, whatever its engine: Accelerate forgets the engine.
    models = {}
    for name, settings in (("streamed", CLIENT), ("plain", None)):
        first = trained(settings)
        models[name] = trained(settings, first.model)
    assert_same_training(models["streamed"], models["plain"])


# --- checkpoints ----------------------------------------------------------------------------------

SAVING = {"save_strategy": "steps", "save_steps": 2}


class Shuffled(IterableDataset):  # type: ignore[type-arg]
    """Samples in an order that Python's global generator draws."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        drawn = samples(1)
        random.shuffle(drawn)
        return iter(drawn)


@pytest.mark.parametrize(
    ("settings", "step", "changed"),
    [
        (CLIENT, 4, {}),
        # the global generators draw these orders, in the second epoch after dropout of the first
        (CONFIGURED, 2, {"train_sampling_strategy": "group_by_length"}),
        (CLIENT, 2, {"train_dataset": Shuffled(), "max_steps": 6}),
    ],
    ids=["random order", "by length", "iterable"],
)
def test_a_resumed_training_is_the_uninterrupted_one(
    trained: Any, tmp_path: Path, settings: dict[str, Any], step: int, changed: dict[str, Any]
) -> None:
    """In the middle of an epoch, with dropout. `changed`: how the order of samples is drawn."""
    changed = {**SAVING, **changed}
    whole = trained(settings, tiny_llama(attention_dropout=0.3), **changed)
    checkpoint = tmp_path / "0" / f"checkpoint-{step}"
    assert (checkpoint / "latest").read_text() == f"global_step{step}"
    elsewhere = {**settings, "stronghold": {"device": "emulated", "window": 2}}
    other = tiny_llama(attention_dropout=0.3)
    resumed = trained(elsewhere, other, resume=checkpoint, **changed)
    assert curve(resumed) == curve(whole)
    assert len(curve(whole).losses) == 6
    expected = whole.model.state_dict()
    for name, weight in resumed.model.state_dict().items():
        assert torch.equal(weight, expected[name]), name


def test_the_best_model_comes_back_at_the_end(trained: Any, tmp_path: Path) -> None:
    # The loss rises on samples that training never sees: the first checkpoint is the best.
    trainer = trained(CLIENT, load_best_model_at_end=True, **SAVING)
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name == "checkpoint-2"
    opened = AutoModelForCausalLM.from_pretrained(best).state_dict()
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, opened[name]), name
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric


def test_adapters_train_and_resume_in_the_trainer(trained: Any, tmp_path: Path) -> None:
    import peft

    def adapted() -> nn.Module:
        settings = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(tiny_llama(), settings)

    changed = {**SAVING, "gradient_checkpointing": True}
    whole = trained(CLIENT, adapted(), **changed)
    assert_same_training(whole, trained(None, adapted(), **changed))
    resumed = trained(CLIENT, adapted(), resume=tmp_path / "0" / "checkpoint-4", **changed)
    assert curve(resumed) == curve(whole)
    resumed.save_model(str(tmp_path / "saved"))
    opened = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path / "saved").state_dict()
    for name, weight in resumed.model.state_dict().items():
        assert torch.equal(weight, opened[name]), name
