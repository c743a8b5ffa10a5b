"""The `stronghold` command: parsing and printing only.

Owns the arguments and what reaches the terminal. Never computes: each sub-command calls one room
and prints what it answers. A mistake of the user's ends with one line and status 2, without a
traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from stronghold.errors import StrongholdError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's status: 0, or 2 for a mistake in the call."""
    arguments = _parser().parse_args(argv)
    try:
        print(arguments.run(arguments))
    except StrongholdError as error:
        print(f"stronghold: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stronghold", description="Train models that do not fit the GPU."
    )
    parser.add_argument("--version", action="version", version=_version(None))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    commands.add_parser("version", help="print the version").set_defaults(run=_version)

    trace = commands.add_parser(
        "trace",
        help="draw a trace as a PNG timeline",
        description='Draw a trace that the key "trace" of the "stronghold" section wrote: the last '
        "step, unless told otherwise. The file itself opens in ui.perfetto.dev.",
    )
    trace.add_argument("file", type=Path, help="the trace, JSON")
    trace.add_argument("-o", "--output", type=Path, help="the picture (default: FILE.png)")
    extent = trace.add_argument_group("extent")
    extent.add_argument("--step", type=int, help="draw this step")
    extent.add_argument(
        "--from", type=float, dest="from_s", metavar="S", help="start at this second of the trace"
    )
    extent.add_argument(
        "--to", type=float, dest="to_s", metavar="S", help="end at this second of the trace"
    )
    trace.set_defaults(run=_trace)

    launch = commands.add_parser(
        "launch",
        help="run a command in which deepspeed.initialize obeys the config's section",
        usage="stronghold launch -- COMMAND [ARGS ...]",
        description="Run COMMAND in this process's place. Every Python below it imports "
        'stronghold.plugin when it imports deepspeed, so that a config with a "stronghold" '
        "section gets stronghold's engine.",
    )
    launch.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    launch.set_defaults(run=_launch)
    return parser


def _version(_: argparse.Namespace | None) -> str:
    return f"stronghold {version('stronghold')}"


def _launch(arguments: argparse.Namespace) -> str:
    from stronghold import run

    command = arguments.command
    return run.launch(command[1:] if command[:1] == ["--"] else command)


def _trace(arguments: argparse.Namespace) -> str:
    from stronghold.telemetry import plot, trace  # matplotlib: only for those who draw

    png = arguments.output or arguments.file.with_suffix(".png")
    plot.draw_timeline(
        trace.read(arguments.file),
        png,
        step=arguments.step,
        from_s=arguments.from_s,
        to_s=arguments.to_s,
    )
    return str(png)


if __name__ == "__main__":
    sys.exit(main())
