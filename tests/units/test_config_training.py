"""DeepSpeed's part of the config: its defaults and arithmetic, its keys, its schedules."""

from __future__ import annotations

import itertools
import logging
from typing import Any, ClassVar

import pytest
import torch
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime import lr_schedules

from stronghold import config as configs
from stronghold.config import keys, source
from stronghold.config.keys import HONOURED, REFUSED
from stronghold.errors import ConfigError
from tests.support.settings import BASE, LOGGER, load, refusal


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b"."""
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return value


def test_defaults_are_deepspeeds() -> None:
    training = load()
    theirs = deepspeed_config.DeepSpeedConfig(dict(BASE))
    assert training.gradient_clipping == theirs.gradient_clipping == 1.0
    assert (training.precision, training.skip_on_overflow) == ("fp32", True)
    assert (training.optimizer, training.scheduler, training.steps_per_print) == (None, None, None)


GIVEN = [None, 1, 2, 3, 8, 12]


def test_batch_arithmetic_is_deepspeeds() -> None:
    agreed = 0
    for sizes in itertools.product(GIVEN, repeat=3):
        config = {
            key: size
            for key, size in zip(configs.training.BATCH_KEYS, sizes, strict=True)
            if size is not None
        }
        try:
            theirs = deepspeed_config.DeepSpeedConfig(config)
        except AssertionError:
            assert "batch size" in refusal(config)
            continue
        ours = configs.load(config).deepspeed
        for key in configs.training.BATCH_KEYS:
            assert getattr(ours, key) == getattr(theirs, key), config
            assert ours._param_dict[key] == getattr(theirs, key)  # what it prints
        agreed += 1
    assert 10 < agreed < len(GIVEN) ** 3


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_multiply_the_batch(ranks: int) -> None:
    settings = configs.load({**BASE, "gradient_accumulation_steps": 4}, world_size=ranks)
    assert settings.deepspeed.train_batch_size == 8 * ranks
    assert settings.deepspeed.world_size == ranks
    settings = configs.load({**BASE, "train_batch_size": 12}, world_size=ranks)
    assert settings.gradient_accumulation_steps == 6 // ranks


def test_ranks_are_those_that_run_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_config.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(deepspeed_config.dist, "get_world_size", lambda *_: 6)
    assert configs.load(BASE).deepspeed.train_batch_size == 12
    assert configs.load(BASE, world_size=1).deepspeed.train_batch_size == 2


def test_a_batch_size_may_be_a_whole_float() -> None:
    """DeepSpeed takes it: programs compute batch sizes by division, as ArcticTraining does."""
    sizes = {"train_batch_size": 6.0, "train_micro_batch_size_per_gpu": 2.0}
    settings = configs.load({**BASE, **sizes}, world_size=1)
    read = settings.deepspeed
    found = (
        read.train_batch_size,
        read.train_micro_batch_size_per_gpu,
        read.gradient_accumulation_steps,
    )
    assert found == (6, 2, 3)
    assert all(isinstance(size, int) for size in found)
    with pytest.raises(ConfigError, match=r"train_batch_size: got 1\.5"):
        configs.load({**BASE, "train_batch_size": 1.5}, world_size=1)


def test_a_batch_mismatch_gives_the_numbers_and_the_edit() -> None:
    sizes = {**BASE, "train_batch_size": 7, "gradient_accumulation_steps": 3}
    message = refusal(sizes)
    assert message.startswith("batch sizes do not multiply out: train_batch_size 7, ")
    assert "7 != 2 * 3 * 1" in message
    assert configs.load({**sizes, "train_batch_size": 6}).deepspeed.train_batch_size == 6
    assert "on 2 ranks" in refusal({"train_batch_size": 3}, world_size=2)
    assert "train_micro_batch_size_per_gpu" in refusal({})


@pytest.mark.parametrize("key", configs.training.BATCH_KEYS)
@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True, "auto"])
def test_a_batch_size_is_a_positive_integer(key: str, value: Any) -> None:
    assert refusal({**BASE, key: value}).startswith(f"{key}: got ")


@pytest.mark.parametrize(
    ("sections", "precision", "checked"),
    [
        ({}, "fp32", True),
        ({"bf16": {"enabled": True}}, "bf16", True),
        ({"bfloat16": {"enabled": True}}, "bf16", True),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, "bf16", False),
        ({"fp16": {"enabled": True}}, "fp16", True),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, "bf16", True),
        ({"bf16": {"enabled": True}, "data_types": {"param_dtype": "bfloat16"}}, "bf16", True),
    ],
)
def test_precision_follows_the_enabled_section(
    sections: dict[str, Any], precision: str, checked: bool
) -> None:
    training = load(**sections)
    assert (training.precision, training.skip_on_overflow) == (precision, checked)


def test_two_precisions_are_refused() -> None:
    both = {"bf16": {"enabled": True}, "fp16": {"enabled": True}}
    assert "fp16.enabled and bf16.enabled are both true" in refusal({**BASE, **both})
    message = refusal({**BASE, "data_types": {"param_dtype": "bf16"}})
    assert message.startswith("data_types.param_dtype: got 'bf16', but the config trains in fp32")


@pytest.mark.parametrize("value", [-1, "1.0", True, float("nan"), float("inf"), "auto"])
def test_gradient_clipping_is_a_norm(value: Any) -> None:
    assert refusal({**BASE, "gradient_clipping": value}).startswith("gradient_clipping: got")
    assert load(gradient_clipping=0).gradient_clipping == 0.0
    assert load(gradient_clipping=None).gradient_clipping == 1.0


@pytest.mark.parametrize(
    ("value", "steps"), [(10, 10), (float("inf"), None), (None, None), (0, None)]
)
def test_steps_per_print_may_be_never(value: Any, steps: int | None) -> None:
    assert load(steps_per_print=value).steps_per_print == steps


def test_a_key_of_deepspeeds_sections_is_checked_with_its_dotted_name() -> None:
    for section, wrong in [
        ("fp16", "loss_scal"),
        ("bf16", "check_grad_overflo"),
        ("zero_optimization", "overlap_com"),
    ]:
        message, _ = refusal({**BASE, section: {wrong: 1}}).splitlines()
        assert message == f"{section}.{wrong}: unknown key. Remove it: DeepSpeed does not know it."
    assert refusal({**BASE, "fp16": {"loss_scale": "x"}}).startswith("fp16.loss_scale: got 'x'")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer", "AdamW"),
        ("optimizer", 3),
        ("optimizer", {"params": {"lr": 1.0}}),
        ("optimizer", {"type": "Adam", "params": []}),
        ("scheduler", "WarmupLR"),
        ("scheduler", "auto"),
        ("fp16", "auto"),
        ("scheduler", {"params": {}}),
        ("scheduler", {"type": "WarmupLR", "params": 3}),
        ("bf16", True),
        ("bfloat16", True),
        ("fp16", "on"),
        ("bf16", {"enabled": "true"}),
        ("zero_optimization", 3),
        ("tensorboard", True),
        ("checkpoint", True),
        ("data_types", True),
        ("steps_per_print", "often"),
        ("log_level", "loud"),
        ("torch_autocast", True),
        ("communication_data_type", 3),
    ],
)
def test_no_malformed_section_escapes_as_another_exception(key: str, value: Any) -> None:
    refusal({**BASE, key: value})


# -- the table of keys ----------------------------------------------------------------------------


class Recorder(dict[str, Any]):
    """A config that remembers which of its top-level keys were looked up."""

    asked: ClassVar[set[str]] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self


def test_every_key_that_deepspeed_reads_has_a_row() -> None:
    Recorder.asked.clear()
    deepspeed_config.DeepSpeedConfig(Recorder(BASE))
    assert len(Recorder.asked) > 40, "the recorder sees nothing"
    assert Recorder.asked - keys.KNOWN == set()


@pytest.mark.parametrize("key", REFUSED)
def test_a_refused_key_says_why_and_its_harmless_values_pass(key: str) -> None:
    harmless, note = REFUSED[key]
    message = refusal({**BASE, **nested(key, "something else")})
    assert message == f"{key}: got 'something else'. {note}"
    for value in harmless:
        assert not keys.refusals(nested(key, value))
    with_default = [value for value in harmless if value is not None]
    if with_default:
        load(**nested(key, with_default[0]))


def test_zero_stages_are_accepted() -> None:
    for stage in (0, 1, 2, 3):
        assert load(zero_optimization={"stage": stage}).deepspeed.zero_optimization_stage == stage
    message = refusal({**BASE, "zero_optimization": {"stage": 4}})
    assert message.startswith("zero_optimization.stage: got 4.")


@pytest.mark.parametrize("key", HONOURED)
def test_an_auto_that_nothing_filled_in_is_refused(key: str) -> None:
    message = refusal({**BASE, **nested(key, "auto")})
    assert key in message
    deeper = refusal({**BASE, **nested(f"{key}.lr", "auto")})
    assert f'{key}.lr: got "auto"' in deeper


def test_auto_is_harmless_where_nothing_is_read() -> None:
    settings = load(zero_optimization={"reduce_bucket_size": "auto"}, memory_breakdown="auto")
    assert settings.deepspeed.memory_breakdown is False


def test_keys_without_effect_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    source.warn_once.cache_clear()
    config = {"zero_optimization": {"stage": 2, "overlap_comm": True}, "memory_breakdown": True}
    with caplog.at_level(logging.WARNING, LOGGER):
        for _ in range(2):
            misspelt = {"gradient_cliping": 1.0, "my_own_key": 1, "_comment": "close to comet"}
            load(**config, **misspelt).warn_of_ignored()
    assert [record.message for record in caplog.records] == [
        'config key "gradient_cliping" is unknown and ignored. Did you mean "gradient_clipping"?',
        "config keys without effect under stronghold: "
        "memory_breakdown, zero_optimization.overlap_comm",
    ]


def test_a_plain_config_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    source.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, LOGGER):
        load(
            stronghold={"window": 2},
            bf16={"enabled": True},
            gradient_clipping=0.5,
            optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
            zero_optimization={"stage": 0},
        ).warn_of_ignored()
    assert caplog.records == []


# -- schedules ------------------------------------------------------------------------------------


SCHEDULES = {
    "LRRangeTest": {},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
    "WarmupLR": {"warmup_num_steps": 4, "warmup_max_lr": 0.5},
    "WarmupDecayLR": {"total_num_steps": 8, "warmup_num_steps": 4},
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 4},
    "CosineAnnealingLR": {"T_max": 8},
}


def test_every_schedule_of_deepspeeds_is_tried() -> None:
    assert set(lr_schedules.VALID_LR_SCHEDULES) <= set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_built_from_the_config(name: str) -> None:
    scheduler = load(scheduler={"type": name, "params": SCHEDULES[name]}).scheduler
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.25)
    built = scheduler.build(optimizer)
    assert type(built).__name__ == name
    optimizer.step()
    built.step()


def test_a_schedules_params_are_checked_before_it_is_built() -> None:
    def message(name: str, **params: Any) -> str:
        return refusal({**BASE, "scheduler": {"type": name, "params": params}})

    assert (
        message("WarmpLR") == 'scheduler.type: unknown schedule "WarmpLR". Did you mean "WarmupLR"?'
    )
    wrong = message("WarmupLR", warmup_num_step=4)
    assert wrong.startswith("scheduler.params.warmup_num_step: unknown parameter of WarmupLR.")
    assert 'Did you mean "warmup_num_steps"?' in wrong
    assert (
        message("WarmupDecayLR")
        == "scheduler.params.total_num_steps: missing, and WarmupDecayLR needs it."
    )
    assert "optimizer: unknown" in message("WarmupLR", optimizer=1)


def test_a_schedule_that_refuses_its_params_says_so() -> None:
    scheduler = load(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 0}}).scheduler
    with pytest.raises(ConfigError, match="WarmupLR: warmup_num_steps must be a positive integer"):
        scheduler.build(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]))


@pytest.mark.parametrize("power", [128, 2147483648, -127, "2147483648"])
def test_a_loss_scale_that_no_number_has_is_refused_at_once(power: object) -> None:
    message = refusal({**BASE, "fp16": {"enabled": True, "initial_scale_power": power}})
    assert f"fp16.initial_scale_power: got {power}, expected -126 to 127" in message


def test_the_largest_loss_scale_is_a_number() -> None:
    settings = load(fp16={"enabled": True, "initial_scale_power": 127})
    scale = float(settings.deepspeed.float16_config.initial_dynamic_scale())
    assert torch.tensor(scale, dtype=torch.float32).isfinite()
