"""The output directory of `finetune`: whether it can be written, and from where a run goes on."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

RECORD = "finetune.json"  # what a resumed run must have in common


class NotPossible(ValueError):
    """The arguments and the files do not go together; the message says what to change."""


def open_output(folder: Path) -> None:
    """Make the directory, and see that files can be made there: before the training, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise NotPossible(
            f"--output: {folder}: no files can be written there ({error.strerror or error})"
        ) from error


def newest_checkpoint(folder: Path) -> str | None:
    """The newest that is whole: the Trainer writes its state last. One that a run did not finish is
    written again when the training comes there."""
    found = [
        (int(number), path)
        for path in folder.glob("checkpoint-*")
        if (number := path.name.removeprefix("checkpoint-")).isdigit()
    ]
    for _, path in sorted(found, reverse=True):
        try:
            json.loads((path / TRAINER_STATE_NAME).read_text())
        except (OSError, ValueError):
            print(f"finetune: {path} is not used: its writing was interrupted", flush=True)
        else:
            return str(path)
    return None


def checkpoint_to_resume(
    args: argparse.Namespace, record: dict[str, Any], num_steps: int
) -> str | None:
    """The newest checkpoint, when it is of the same data in the same rows, and not the last."""
    newest = newest_checkpoint(args.output)
    if not args.resume:
        if newest is not None:
            raise NotPossible(
                f"--output: {newest} is there: --resume goes on from it; else name a new directory"
            )
        return None
    if newest is None:
        raise NotPossible(f"--resume: there is no checkpoint in {args.output}")
    file = args.output / RECORD
    before = json.loads(file.read_text()) if file.is_file() else {}
    changed = [f"{k} was {before[k]}, is {v}" for k, v in record.items() if before.get(k, v) != v]
    if changed:
        raise NotPossible(
            f"--resume: {newest} was made with other arguments: {'; '.join(changed)}. Give what "
            "was given then, or start anew with another --output"
        )
    writing = (
        f"`stronghold export {newest} DIR --model-dir {args.model}` writes it"
        if args.lora is None
        else f"{newest} has the adapters in PEFT's format"
    )
    taken = json.loads((Path(newest) / TRAINER_STATE_NAME).read_text())["global_step"]
    if taken >= num_steps:  # the Trainer would take one more
        raise NotPossible(
            f"--resume: {newest} has taken {taken} steps, of {num_steps}: the training is over. "
            f"Raise --max-steps or --epochs to go on. Where --output has no model yet, {writing}"
        )
    return newest
