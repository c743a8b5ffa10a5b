"""The `stronghold` command: its arguments, and all that reaches the terminal.

It parses a call, runs one command and prints the answer. A command's module loads torch, which
takes seconds, so it is imported when the command runs: help and a wrong call load none. A mistake
of the user ends with one line and status 2, without a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from stronghold.errors import StrongholdError
from stronghold.tools import Answer

PACKAGES = ("torch", "triton", "deepspeed", "transformers", "accelerate", "peft", "trl", "numpy")
# Commands and options that a version had, and what takes their place.
REMOVED = {
    ("prepare",): '"frozen": "nf4" in the section packs the weights at each start.',
    ("plan", "--base-on"): "--nvme SIZE says what files may hold, frozen weights as well.",
    ("plan", "-o"): "--sweep prints its table; with --json a plot can read its figures.",
    ("plan", "--wire"): "The plan takes the rate of the link for ranks of a node.",
    ("plan", "--nvme-path"): 'The config names the directory: "nvme": {"path": DIR}.',
    ("plan", "--streams"): 'It changed no figure but bytes; "streams" in the section stays.',
    ("plan", "--no-overflow-check"): 'Write "bf16": {"check_grad_overflow": false} in the config.',
    ("plan", "--early"): 'With --clipping 0 the plan has them; else try "early_layers" in a run.',
    ("trace", "--from"): "ui.perfetto.dev opens the file and shows any extent of it.",
    ("trace", "--to"): "ui.perfetto.dev opens the file and shows any extent of it.",
    ("import",): "The weights of DeepSpeed's checkpoints: DeepSpeed's zero_to_fp32.py writes them "
    "in fp32; load them into the model before initialize. Moments begin anew.",
    ("doctor", "--quick"): "It takes some seconds: delete it.",
    ("doctor", "--report"): "Send what stronghold version, stronghold doctor and "
    "print(engine.inspect()) print.",
    ("export", "--to"): "It writes a model directory. For fp32 weights run the zero_to_fp32.py "
    "that lies beside the checkpoint's tags.",
    ("export", "--merge"): "PEFT merges adapters: "
    "AutoPeftModelForCausalLM.from_pretrained(ADAPTERS).merge_and_unload().save_pretrained(OUT).",
}


class LateCommand:
    """A command whose module is imported when it runs.

    Arguments:
        target: "module:function"; the function takes the arguments and a function for progress.
        loads: the packages that take so long to load that the user is shown their names first.
    """

    def __init__(self, target: str, loads: str = "") -> None:
        self._target = target
        self._loads = loads

    def __call__(self, arguments: argparse.Namespace) -> Answer:
        report = partial(_report, arguments.command_name)
        if self._loads:
            report(f"loading {self._loads}")
        answer: Answer = resolve_name(self._target)(arguments, report)
        return answer


def _report(command: str, text: str) -> None:
    """Write a line of progress."""
    print(f"stronghold {command}: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns the status of the process: 0; 1 if the answer is that nothing fits or that a check
    failed; 2 for a mistake in the call, or a file that cannot be read or written.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for removed, instead in REMOVED.items():
        if words[:1] == [removed[0]] and {*removed} <= {*words}:
            print(f"stronghold {' '.join(removed)} was removed. {instead}", file=sys.stderr)
            return 2
    arguments = command_parser().parse_args(words)
    if not any(Path(f"/dev/{name}").exists() for name in ("nvidiactl", "dxg")):  # dxg: in WSL
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it chose that
    try:
        # DeepSpeed logs on stdout when it is imported. Only the answer belongs there.
        with contextlib.redirect_stdout(sys.stderr):
            answer: Answer = arguments.run(arguments)
    except (StrongholdError, OSError) as error:
        print(f"stronghold: {error}", file=sys.stderr)
        return 2
    print(answer.text)
    return answer.status


def command_parser() -> argparse.ArgumentParser:
    """The arguments of all commands. The documentation is made from it, too."""
    parser = argparse.ArgumentParser(
        prog="stronghold", description="Train models that do not fit the GPU."
    )
    parser.add_argument("--version", action="version", version=_version_text())
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, dest="command_name"
    )

    versions = commands.add_parser("version", help="print the versions that a bug report needs")
    versions.set_defaults(run=_version)

    trace = commands.add_parser(
        "trace",
        help="draw a trace as a PNG timeline",
        description='Draw a trace that the key "trace" of the "stronghold" section wrote: the last '
        "step by default. The file itself opens in ui.perfetto.dev.",
    )
    trace.add_argument("file", type=Path, help="the trace, JSON")
    trace.add_argument("-o", "--output", type=Path, help="the picture (default: FILE.png)")
    trace.add_argument("--step", type=int, help="draw this step")
    trace.set_defaults(run=LateCommand("stronghold.tools.timeline:run"))
    commands.add_parser(
        "test",
        help="check in ten seconds that training on this machine is exact",
        description="Train a small model with the window and in a plain PyTorch loop, on the GPU "
        "or, without one, on the emulated device. Print three lines: whether all bits are equal, "
        "whether the peak bytes are those of the plan, and the rate of the link to the GPU. Exit "
        "with 1 if a check fails.",
    ).set_defaults(
        run=LateCommand("stronghold.tools.doctor.selftest:command", "torch and DeepSpeed")
    )
    _add_doctor(commands)
    _add_plan(commands)
    _add_export(commands)
    return parser


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="measure this machine and say what is wrong with it",
        description="Measure the link to the GPU, memory, updates on the CPU, matrix products and "
        "a disk, in less than a minute. Print the figures, the problems and their remedies, and "
        "write the profile from which plans are made. Without a GPU the emulated device is "
        "measured, which is CPU memory.",
    )
    doctor.add_argument("--json", type=Path, metavar="PATH", help="write the profile there")
    doctor.add_argument(
        "--path",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="measure this directory's disk with a temporary file (default: the current one's)",
    )
    doctor.add_argument("--device", choices=["cuda", "emulated"], help="default: a GPU if any")
    doctor.set_defaults(run=LateCommand("stronghold.tools.doctor.page:run", "torch"))


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="say what fits, how fast it will train, and what bounds it",
        description="Plan a model on a machine without running it: memory on every tier, the "
        "predicted step, what bounds it, the physical limit, what more would buy, and a config "
        "that runs. Needs neither a GPU nor the model's weights. Exits with 1 if nothing fits.",
    )
    model = plan.add_argument_group("model")
    model.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face model's, or file")
    for name in ("layers", "hidden", "heads", "vocab"):
        model.add_argument(f"--{name}", type=int, metavar="N", help="a GPT's, without --model")
    adapters = plan.add_argument_group("adapters; without --lora all weights train")
    adapters.add_argument("--lora", type=int, metavar="RANK", help="LoRA over frozen weights")
    adapters.add_argument(
        "--lora-targets",
        nargs="+",
        metavar="NAME",
        help="ends of the names of linear modules, or of parameters such as fused experts "
        "(default: all linear modules but the head)",
    )
    adapters.add_argument(
        "--frozen",
        choices=["nf4"],
        help="storage format of the frozen weights (default: as they came)",
    )
    machine = plan.add_argument_group("machine")
    machine.add_argument(
        "--machine", metavar="PROFILE", help="a name or a file (default: what doctor wrote here)"
    )
    machine.add_argument("--gpu", metavar="SIZE", help="GPU memory, such as 24GiB")
    machine.add_argument("--gpus", type=int, default=1, metavar="N", help="ranks on each node")
    machine.add_argument("--nodes", type=int, default=1, metavar="N", help="of such GPUs and hosts")
    machine.add_argument(
        "--network", type=float, metavar="GBPS", help="1e9 bytes/s between nodes, per GPU"
    )
    machine.add_argument("--host", metavar="SIZE", help="host memory")
    machine.add_argument("--nvme", metavar="SIZE", help="files on NVMe (default: none)")
    training = plan.add_argument_group("training")
    training.add_argument(
        "--batch",
        type=_batch,
        default=1,
        metavar="N",
        help="sequences of a micro-batch; max: the most that fit",
    )
    training.add_argument("--seq", type=int, metavar="N", help="tokens of a sequence")
    training.add_argument("--accumulation", type=int, default=1, metavar="N", help="micro-batches")
    training.add_argument(
        "--chunk", type=int, metavar="N", help="sequences that go through a block together"
    )
    training.add_argument("--precision", choices=["bf16", "fp16", "fp32"], default="bf16")
    training.add_argument(
        "--optimizer",
        default="AdamW",
        metavar="TYPE",
        help="AdamW, Lion or SGD (with momentum): its moments decide a parameter's bytes",
    )
    training.add_argument(
        "--states",
        choices=["exact", "lean"],
        default="exact",
        help="lean: bf16 with 8-bit moments, with two of them 5.1 bytes per parameter instead of "
        "12; rounds otherwise",
    )
    training.add_argument("--clipping", type=float, default=1.0, metavar="NORM", help="0: none")
    output = plan.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the figures as JSON")
    several = output.add_mutually_exclusive_group()
    several.add_argument("--write", type=Path, metavar="FILE", help="write the config there")
    several.add_argument(
        "--sweep",
        choices=["batch", "chunk", "seq"],
        help="one line for each of several values, each twice the one before it",
    )
    plan.set_defaults(
        run=LateCommand("stronghold.tools.estimate.command:run", "torch and transformers")
    )


def _batch(text: str) -> int | None:
    """A number of sequences; None for the most that fit."""
    try:
        return None if text == "max" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'got {text!r}, expected a number or "max"') from None


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="turn a checkpoint into what other tools open",
        description="Write a checkpoint's weights as a model directory for from_pretrained.",
    )
    export.add_argument("checkpoint", type=Path, help="what save_checkpoint was given, or a tag")
    export.add_argument("out", type=Path, help="a new directory")
    export.add_argument("--tag", help="the tag (default: the one that the file latest names)")
    export.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file")
    export.add_argument(
        "--model-dir",
        type=Path,
        metavar="DIR",
        help="take configuration and tokenizer from here (default: the checkpoint's config)",
    )
    export.set_defaults(run=LateCommand("stronghold.tools.export:run"))


def _version(_: argparse.Namespace) -> Answer:
    """The versions that a bug report needs."""
    lines = [_version_text(), f"python {platform.python_version()}, {platform.platform()}"]
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            lines.append(f"{package} {version(package)}")
    return Answer(text="\n".join(lines))


def _version_text() -> str:
    return f"stronghold {version('stronghold')}"


if __name__ == "__main__":
    sys.exit(main())
