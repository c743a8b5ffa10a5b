"""Fine-tunes a Hugging Face model of a local directory on a JSONL or text file, in full precision,
or adapters of it (LoRA, with --lora).

JSONL has one object on each line: {"prompt", "completion"} and {"messages"} train on what the
assistant says, {"text"} on everything. Any other file is plain text.

Runs as `scripts/finetune ...`, which is plain python, or with `deepspeed --num_gpus 1
scripts/finetune.py ...`. Here are the arguments and what the user sees of an error; the work is in
`finetune_data`, `finetune_output`, `finetune_adapters` and `finetune_training`, which are imported
when the arguments are right.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCHEDULES = ("cosine", "linear", "constant")
STORAGE_FORMATS = ("nf4",)  # of stronghold.frozen


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Checked as far as no file must be read."""
    parser = argparse.ArgumentParser(
        prog="finetune",
        description="\n\n".join(__doc__.split("\n\n")[:2]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_files(parser.add_argument_group("files"))
    _add_data(parser.add_argument_group("data"))
    _add_training(parser.add_argument_group("training; without them, what the config says"))
    _add_adapters(parser.add_argument_group("adapters; without --lora all weights train"))
    _add_logging(parser.add_argument_group("evaluation, checkpoints, logging"))
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    _check_adapters(args, parser)
    args.config = _config_path(args.config, parser)
    if args.max_steps is None and args.epochs is None:
        args.epochs = 1.0
    return args


def _add_files(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", type=Path, required=True, metavar="DIR", help="model directory")
    group.add_argument("--data", type=Path, required=True, metavar="FILE", help="JSONL or text")
    group.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help='DeepSpeed JSON with a "stronghold" section, or the name of one in configs/',
    )
    group.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="the trained model, checkpoints"
    )
    group.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --output"
    )


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sequence",
        type=_whole,
        metavar="N",
        help="tokens in a row (default: 2048, or the model's if that is less)",
    )
    group.add_argument(
        "--no-packing",
        dest="packing",
        action="store_false",
        help="one example in each row, instead of as many as fit",
    )
    group.add_argument(
        "--validation",
        type=_fraction,
        default=0.05,
        metavar="FRACTION",
        help="of the examples, held out at random, at most 256 (default: 0.05; 0: none)",
    )
    group.add_argument(
        "--validation-data", type=Path, metavar="FILE", help="held-out examples, instead"
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--batch", type=_whole, metavar="N", help="rows in a forward")
    group.add_argument("--accumulation", type=_whole, metavar="N", help="forwards in a step")
    group.add_argument("--learning-rate", type=_positive, metavar="LR", help="the highest")
    group.add_argument(
        "--schedule", choices=SCHEDULES, default="cosine", help="after warmup (default: cosine)"
    )
    group.add_argument(
        "--warmup",
        type=_fraction,
        default=0.03,
        metavar="FRACTION",
        help="of the steps, with a rising rate (default: 0.03)",
    )
    length = group.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=_positive, metavar="N", help="over the data (default: 1)")
    length.add_argument("--max-steps", type=_whole, metavar="N", help="stop after so many steps")
    group.add_argument("--seed", type=int, default=0, help="of order and split (default: 0)")


def _add_adapters(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--lora", type=_whole, metavar="RANK", help="train LoRA adapters of this rank alone"
    )
    group.add_argument(
        "--lora-alpha", type=_positive, metavar="A", help="scale of the adapters (default: 2 RANK)"
    )
    group.add_argument(
        "--lora-targets",
        nargs="+",
        metavar="NAME",
        help="ends of the names of linear modules, or of parameters such as fused experts "
        "(default: all linear modules but the head)",
    )
    group.add_argument(
        "--frozen",
        choices=STORAGE_FORMATS,
        help="storage format of the base's weights (default: as they came)",
    )


def _check_adapters(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse arguments of adapters without adapters."""
    for option in ("lora_alpha", "lora_targets", "frozen"):
        if args.lora is None and getattr(args, option) is not None:
            name = option.replace("_", "-")
            parser.error(f"--{name}: needs --lora RANK, because without adapters all weights train")


def _add_logging(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--eval-every", type=_whole, default=100, metavar="N", help="steps (default: 100)"
    )
    group.add_argument(
        "--save-every", type=_whole, default=500, metavar="N", help="steps (default: 500)"
    )
    group.add_argument(
        "--keep", type=_whole, default=2, metavar="N", help="newest checkpoints (default: 2)"
    )
    group.add_argument(
        "--log-every", type=_whole, default=10, metavar="N", help="steps (default: 10)"
    )
    group.add_argument(
        "--report", nargs="*", default=[], metavar="TO", help="tensorboard, wandb, ..."
    )


def _number(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        whole = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {whole}") from None


def _whole(text: str) -> int:
    value = _number(text, int)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected at least 1")
    return value


def _positive(text: str) -> float:
    value = _number(text, float)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"got {text}, expected a number above 0")
    return value


def _fraction(text: str) -> float:
    value = _number(text, float)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a fraction from 0 to below 1")
    return value


def _config_path(given: str, parser: argparse.ArgumentParser) -> Path:
    """The file, or the one of that name in configs/."""
    folder = ROOT / "configs"
    candidates = (Path(given), folder / given, folder / f"{given}.json")
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        names = ", ".join(sorted(path.stem for path in folder.glob("*.json")))
        parser.error(f"--config: there is no file {given}; in configs/ are {names}")
    return found


def prepare_environment() -> None:
    """What a launcher would set, and DeepSpeed's accelerator where there is no GPU; before
    deepspeed is imported, which reads both."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(listener.getsockname()[1])


def main(given: list[str] | None = None) -> int:
    """The exit status: 2 for what the user can put right, which one line on stderr says."""
    args = parse_arguments(given)
    print("finetune: loading torch, deepspeed and transformers", flush=True)
    prepare_environment()
    from finetune_training import UserError, end_processes, finetune

    try:
        finetune(args)
    except UserError as error:
        print(f"finetune: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk; checkpoints that are whole stay
        print(f"finetune: {error}; when that is put right, --resume goes on", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nfinetune: stopped; --resume goes on from the newest checkpoint", file=sys.stderr)
        return 130
    end_processes()
    return 0


if __name__ == "__main__":
    sys.exit(main())
