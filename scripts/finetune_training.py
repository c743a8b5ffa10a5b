"""The training of `finetune`: a config, a model directory and rows of tokens in the Trainer.

`import stronghold.plugin` is what makes the Trainer use stronghold's engine; without a "stronghold"
section in the config DeepSpeed's own trains.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from finetune_adapters import add_adapters, describe_adapters, has_adapters
from finetune_data import Collator, DataError, Encoder, Example, Examples, Rows, split
from finetune_output import RECORD, NotPossible, checkpoint_to_resume, open_output
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.integrations import get_available_reporting_integrations

import stronghold
import stronghold.plugin
from stronghold.config import check_keys, read_config, section_enabled, settings_from_config
from stronghold.engine import StrongholdEngine
from stronghold.errors import BudgetError, CheckpointError, ConfigError
from stronghold.optim.adam import Adam

DEFAULT_SEQUENCE = 2048
DEFAULT_LEARNING_RATE = 1e-5
MOST_VALIDATION_EXAMPLES = 256
LOG = "log.json"
# Schedules by transformers' names; a fine-tuning's rate ends at a tenth, not at 0.
SCHEDULES: dict[str, tuple[str, dict[str, float]]] = {
    "cosine": ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    "linear": ("linear", {}),
    "constant": ("constant_with_warmup", {}),
}


UserError = (NotPossible, DataError, ConfigError, BudgetError, CheckpointError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the config and the arguments come to: the DeepSpeed config for the Trainer, in full, and
    the Trainer's own arguments that must agree with it."""

    config: dict[str, Any]
    streamed: bool  # by stronghold's engine, not DeepSpeed's
    dtype: torch.dtype
    trainer: dict[str, Any]

    @property
    def rows_per_step(self) -> int:
        return int(self.config["train_micro_batch_size_per_gpu"]) * int(
            self.config["gradient_accumulation_steps"]
        )


def read_setup(args: argparse.Namespace) -> Setup:
    """Arguments win over the config. Without a GPU training is in fp32, all that the Trainer does
    there."""
    config = {k: v for k, v in read_config(args.config).items() if not k.startswith("_")}
    if config.get("scheduler"):
        raise NotPossible(f'{args.config}: remove "scheduler": --schedule and --warmup set it')
    streamed = section_enabled(config)
    if streamed:
        if args.lora is not None:
            config["stronghold"] = _section_for_adapters(config["stronghold"], args.frozen)
        check_keys(config)  # before the Trainer acts on them
    elif args.frozen is not None:
        raise NotPossible(
            f'--frozen: {args.config} has no enabled "stronghold" section, and DeepSpeed\'s engine '
            "has no storage formats"
        )
    config.pop("train_batch_size", None)  # follows from these two
    batch = args.batch or _number(config, "train_micro_batch_size_per_gpu", 1)
    accumulation = args.accumulation or _number(config, "gradient_accumulation_steps", 1)
    clipping = _number(config, "gradient_clipping", 1.0)
    precision = next((p for p in ("bf16", "fp16") if config.get(p, {}).get("enabled")), "fp32")
    if precision != "fp32" and not torch.cuda.is_available():
        print(f"finetune: no GPU: fp32 instead of {precision}, on an emulated device", flush=True)
        precision = "fp32"
    for name in ("bf16", "fp16"):
        config[name] = {**config.get(name, {}), "enabled": name == precision}
    config["train_micro_batch_size_per_gpu"] = batch
    config["gradient_accumulation_steps"] = accumulation
    config["gradient_clipping"] = clipping
    config.setdefault("zero_optimization", {"stage": 0})  # Accelerate insists on it
    # The Trainer makes the optimizer, because it exempts norms and biases from weight decay; with
    # these two Accelerate leaves it alone.
    optimizer = _optimizer_arguments(config.pop("optimizer", None), args)
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    return Setup(
        config=config,
        streamed=streamed,
        dtype={"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision],
        trainer={
            "per_device_train_batch_size": batch,
            "per_device_eval_batch_size": batch,
            "gradient_accumulation_steps": accumulation,
            "max_grad_norm": clipping,
            "bf16": precision == "bf16",
            "fp16": precision == "fp16",
            **optimizer,
        },
    )


def _section_for_adapters(section: Any, frozen: str | None) -> Any:
    """The section with the storage format of the base. Adapters keep their dtype, fp32."""
    if not isinstance(section, dict):
        return section  # check_keys refuses it
    section = {**section}
    section.setdefault("dtypes", "own")
    if frozen is not None:
        section["frozen"] = frozen
    return section


def _number(config: dict[str, Any], key: str, default: float) -> Any:
    value = config.get(key)
    return default if value is None or value == "auto" else value


def _optimizer_arguments(section: Any, args: argparse.Namespace) -> dict[str, Any]:
    if isinstance(section, dict):
        params = section.get("params") or {}
        params = {key: value for key, value in params.items() if value != "auto"}
        section = {**section, "params": params}
        rate = params.get("lr", DEFAULT_LEARNING_RATE)
    else:
        rate = DEFAULT_LEARNING_RATE
    found = settings_from_config(section or {"type": "AdamW"})
    assert found is not None
    if found.optimizer != Adam():
        raise NotPossible(
            f"{args.config}: optimizer: only AdamW with bias correction; remove what changes that"
        )
    return {
        "learning_rate": args.learning_rate or rate,
        "adam_beta1": found.hyperparameters["betas"][0],
        "adam_beta2": found.hyperparameters["betas"][1],
        "adam_epsilon": found.hyperparameters["eps"],
        "weight_decay": found.hyperparameters["weight_decay"],
        "optim": "adamw_torch",  # the fused one refuses parameters without memory
    }


# -- the model's directory ------------------------------------------------------------------------
def open_tokenizer(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model's configuration and its tokenizer."""
    if not args.model.is_dir():
        raise NotPossible(f"--model: there is no directory {args.model}")
    if not (args.model / "config.json").is_file():
        raise NotPossible(
            f"--model: {args.model} has no config.json; expected what save_pretrained writes"
        )
    try:
        config = AutoConfig.from_pretrained(args.model)
    except (ValueError, OSError, KeyError) as error:
        raise NotPossible(f"--model: {args.model}: {error}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    # transformers raises many kinds, few of which name the reason
    except Exception as error:
        raise NotPossible(
            f"--model: {args.model} has no tokenizer that transformers can open: put "
            "tokenizer.json and tokenizer_config.json there"
        ) from error
    if not tokenizer.is_fast:
        raise NotPossible(f"--model: {args.model} needs a fast tokenizer (tokenizer.json)")
    return config, tokenizer


def sequence_length(args: argparse.Namespace, config: Any) -> int:
    """Tokens in a row: never more than the model has positions for."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if args.sequence is None:
        return min(DEFAULT_SEQUENCE, most or DEFAULT_SEQUENCE)
    if most is not None and args.sequence > most:
        raise NotPossible(f"--sequence: got {args.sequence}, but the model has {most} positions")
    return int(args.sequence)


def load_model(directory: Path, setup: Setup) -> Any:
    """Streamed: no weight is read before the engine's slabs are there. Where names must be
    converted transformers loads it whole."""
    if setup.streamed:
        try:
            return stronghold.from_pretrained(directory, dtype=setup.dtype, use_cache=False)
        except ConfigError as error:
            print(f"finetune: loading with transformers, because {error}", flush=True)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=setup.dtype, use_cache=False)


# -- data -----------------------------------------------------------------------------------------
def read_rows(
    args: argparse.Namespace, tokenizer: Any, sequence: int, vocabulary: int
) -> tuple[Rows, Rows | None]:
    """Rows to train on and rows to evaluate on."""
    encoder = Encoder(tokenizer, sequence)
    found = _read(encoder, args.data)
    if args.validation_data is not None:
        training, held_out = found.kept, _read(encoder, args.validation_data).kept
    else:
        training, held_out = split(found.kept, args.validation, MOST_VALIDATION_EXAMPLES, args.seed)
    _check_vocabulary(training + held_out, vocabulary, args.model)
    rows = Rows(training, sequence, packed=args.packing)
    evaluated = Rows(held_out, sequence, packed=args.packing) if held_out else None
    print(
        f"finetune: {len(training)} examples in {len(rows)} rows of up to {sequence} tokens, "
        f"{rows.num_tokens} tokens, of which {found.num_trained / _num_tokens(found.kept):.0%} "
        f"are trained; {len(held_out)} examples held out",
        flush=True,
    )
    return rows, evaluated


def _read(encoder: Encoder, path: Path) -> Examples:
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    with tqdm(
        total=path.stat().st_size,
        desc="tokens",
        unit="B",
        unit_scale=True,
        leave=False,
        delay=1.0,
        disable=None,
    ) as bar:
        found = encoder.read(path, bar.update)
    if found.num_cut:
        print(f"finetune: {path}: {found.num_cut} examples were cut at the end of a row")
    if found.num_untrained:
        print(f"finetune: {path}: {found.num_untrained} examples have nothing to train on")
    return found


def _num_tokens(examples: list[Example]) -> int:
    return sum(len(example) for example in examples)


def _check_vocabulary(examples: list[Example], vocabulary: int, model: Path) -> None:
    largest = max(int(example.tokens.max()) for example in examples)
    if largest >= vocabulary:
        raise NotPossible(
            f"--model: {model}: its tokenizer gives the token {largest}, but the model has "
            f"embeddings for {vocabulary}: they do not belong together"
        )


# -- training -------------------------------------------------------------------------------------
class StreamedTrainer(Trainer):
    """Saves the weights from where they are, without a second copy of the model in memory, and only
    at the end: a checkpoint holds them in the engine's own files. Adapters are small: each
    checkpoint has them in PEFT's format, too."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        engine = self.model_wrapped
        folder = output_dir or self.args.output_dir
        if not isinstance(engine, StrongholdEngine):
            super().save_model(output_dir, _internal_call)
        elif has_adapters(self.model):
            weights = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
            self._save(folder, state_dict=weights)
        elif _internal_call:
            Path(folder).mkdir(parents=True, exist_ok=True)
        else:
            self._save(folder, state_dict=engine._zero3_consolidated_16bit_state_dict())


def check_reporters(names: list[str]) -> None:
    """What the Trainer would find out after the model is loaded."""
    here = get_available_reporting_integrations()
    for name in names:
        if name not in {*here, "all", "none"}:
            raise NotPossible(
                f"--report: got {name}, which is not installed, or not known to transformers; "
                f"expected one of: {', '.join(sorted(here)) or 'none is installed'}"
            )


def training_arguments(
    args: argparse.Namespace, setup: Setup, *, evaluated: bool
) -> TrainingArguments:
    """The Trainer's arguments; they start torch.distributed for one rank."""
    if not torch.cuda.is_available():
        # One rank needs no shared-memory kernel, and DeepSpeed would compile one for half a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    schedule, schedule_arguments = SCHEDULES[args.schedule]
    return TrainingArguments(
        str(args.output),
        **setup.trainer,
        num_train_epochs=args.epochs or 1.0,
        max_steps=args.max_steps or -1,
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs=schedule_arguments,
        warmup_steps=args.warmup,
        logging_steps=args.log_every,
        eval_strategy="steps" if evaluated else "no",
        eval_steps=args.eval_every,
        eval_on_start=evaluated and not args.resume,
        prediction_loss_only=True,  # logits of a vocabulary are gigabytes
        save_strategy="steps",
        save_steps=args.save_every,
        save_total_limit=args.keep,
        report_to=args.report,
        seed=args.seed,
        dataloader_pin_memory=torch.cuda.is_available(),
        # a log file gets the lines of --log-every alone
        disable_tqdm=not sys.stderr.isatty(),
        deepspeed=setup.config,
    )


def describe(args: argparse.Namespace, setup: Setup, rows: Rows) -> dict[str, Any]:
    """What decides which rows are in which step, and what trains."""
    return {
        "rows": len(rows),
        "tokens": rows.num_tokens,
        "batch": setup.config["train_micro_batch_size_per_gpu"],
        "accumulation": setup.config["gradient_accumulation_steps"],
        "packing": args.packing,
        "seed": args.seed,
        "adapters": describe_adapters(args),
    }


def finetune(args: argparse.Namespace) -> Trainer:
    """All of it; the trained model is in `args.output`. Returns the Trainer, its engine closed."""
    setup = read_setup(args)
    config, tokenizer = open_tokenizer(args)
    sequence = sequence_length(args, config)
    rows, evaluated = read_rows(args, tokenizer, sequence, config.get_text_config().vocab_size)
    record = describe(args, setup, rows)
    num_steps = args.max_steps or math.ceil(
        args.epochs * math.ceil(len(rows) / setup.rows_per_step)
    )
    checkpoint = checkpoint_to_resume(args, record, num_steps)
    check_reporters(args.report)
    open_output(args.output)
    arguments = training_arguments(args, setup, evaluated=evaluated is not None)
    pad = tokenizer.pad_token_id
    trainer = StreamedTrainer(
        model=add_adapters(args, load_model(args.model, setup)),
        args=arguments,
        train_dataset=rows,
        eval_dataset=evaluated,
        data_collator=Collator(pad if pad is not None else tokenizer.eos_token_id or 0),
        processing_class=tokenizer,
    )
    print(f"finetune: {num_steps} steps of {setup.rows_per_step} rows, {setup.dtype}", flush=True)
    (args.output / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.model.config.use_cache = getattr(config, "use_cache", True)
        trainer.save_model()
        _report(trainer, args.output)
    finally:
        trainer.accelerator.free_memory()  # closes the engine
    return trainer


def end_processes() -> None:
    """Leave the process group together: gloo aborts now and then when a process just ends."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _report(trainer: Trainer, output: Path) -> None:
    log = trainer.state.log_history
    (output / LOG).write_text(json.dumps(log, indent=1) + "\n")
    adapters = has_adapters(trainer.model)
    held_out = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
    if held_out:
        print(f"finetune: loss on held-out examples {held_out[0]:.4f} -> {held_out[-1]:.4f}")
    if adapters:
        print(
            f"finetune: the trained adapters are in {output}; docs/adapters.md shows how to merge "
            "them",
            flush=True,
        )
    else:
        print(f"finetune: the trained model is in {output}", flush=True)
