"""Trains a Llama-style model on real text through a window smaller than the model.

The training itself is `train`, and is what any DeepSpeed user writes. Before it comes what shows
that the window costs nothing: the same losses as a plain PyTorch loop, the bytes against the plan,
the time of a step. A step is measured first, and every part is fitted to the time (`pace`).

Runs as `scripts/quickstart ...`, which is plain python, or with `deepspeed --num_gpus 1
scripts/quickstart.py --deepspeed_config configs/quickstart.json ...`.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any

if __name__ == "__main__":
    BEGUN_S = time.perf_counter()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports end without a traceback
    if not {"-h", "--help"} & set(sys.argv):
        print("loading torch, deepspeed and transformers", flush=True)
    logging.disable(logging.WARNING)  # of packages that transformers imports: torchao's

import deepspeed
import torch
from corpus import NUM_HELD_OUT_BATCHES, Corpus, read_text
from pace import (
    COMPARED_SHARE,
    FEW,
    MOST_TRAINED,
    Fit,
    Training,
    Watch,
    fit,
    fit_training,
    in_words,
    steps_in_chunks,
)
from plain import PlainLoop, compare_times, operators_in_one_order
from progress import progress
from report import compare_losses, compare_memory, count, device_name, leave, say, times_in_words
from transformers import LlamaConfig, LlamaForCausalLM

import stronghold
from stronghold.config.section import parse_bytes

logging.disable(logging.NOTSET)

MIB = float(1 << 20)
# by default
CONFIG = Path(__file__).resolve().parent.parent / "configs" / "quickstart.json"
VOCABULARY = 256
DEFAULT_MINUTES = 2.5  # with the set-up's own work it stays below 4
WARMUP_SHARE = 0.2  # of the steps, where the config's warm-up is longer than that
CHUNKED = {"batch": 16, "chunk": 4}  # of the run in chunks
PROMPT, WRITTEN_BYTES, TEMPERATURE = b"def ", 160, 0.7
WRITING_S = 6.0  # at most
MEASURED_STEPS = 3  # of the plain loop
NO_TIME = "it does not fit into the time (--minutes sets it)"
INTERRUPTED = 130  # the exit status of a command that Ctrl-C ended


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama with bytes as tokens, and the text it sees in a step."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    context: int

    def build(self, dtype: torch.dtype, seed: int = 0) -> LlamaForCausalLM:
        """The same weights on every call."""
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=self.context,
            use_cache=False,
        )
        return LlamaForCausalLM(config).to(dtype)

    def num_parameters(self) -> int:
        """Of what `build` makes."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + 2 * VOCABULARY * self.hidden + self.hidden


FULL = Size(hidden=384, intermediate=1024, layers=14, heads=6, context=128)
TINY = Size(hidden=64, intermediate=192, layers=12, heads=2, context=64)


def train(
    engine: Any, data: Corpus, training: Training, ends_early: Callable[[], bool]
) -> tuple[list[float], list[tuple[float, float]]]:
    """Losses of all steps, and (step, loss on the held-out text) now and then, of the last step in
    any case. `ends_early` is asked after each step."""
    losses: list[torch.Tensor] = []
    held_out = [(0.0, evaluate(engine, data, training.held_out_batches))]
    # to show a loss is to wait for the step
    shown_every = math.ceil(training.steps / 25)
    with progress(training.steps, "training") as bar:
        for step in range(1, training.steps + 1):
            loss = engine(**data.batch()).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
            ends = step == training.steps or ends_early()
            if ends or step in training.evaluated_after:
                held_out.append((float(step), evaluate(engine, data, training.held_out_batches)))
            if step % shown_every == 0:
                bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            bar.update()
            if ends:
                break
    return [loss.item() for loss in losses], held_out


@torch.no_grad()
def evaluate(engine: Any, data: Corpus, num_batches: int = NUM_HELD_OUT_BATCHES) -> float:
    """Mean loss over the held-out text, in nats per byte."""
    engine.eval()
    losses = [engine(**batch).loss.item() for batch in data.held_out_batches(num_batches)]
    engine.train()
    return sum(losses) / len(losses)


@torch.no_grad()
def write_text(engine: Any, prompt: bytes, context: int, num_bytes: int, watch: Watch) -> str:
    """Continue `prompt` byte by byte, through the window: by `num_bytes`, or by what it writes in
    `WRITING_S` seconds."""
    end_s = watch.elapsed_s() + WRITING_S
    engine.eval()
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor([list(prompt)])
    for _ in range(num_bytes):
        logits = engine(input_ids=text[:, -context:].to(engine.device)).logits[:, -1].float().cpu()
        following = torch.multinomial(
            torch.softmax(logits / TEMPERATURE, -1), 1, generator=generator
        )
        text = torch.cat([text, following], dim=1)
        if watch.elapsed_s() > end_s:
            break
    engine.train()
    # An untrained model writes control characters, which a terminal would obey.
    shown = bytes(text[0].tolist()).decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in shown)


def fast_bf16() -> bool:
    """Whether bf16 is the natural precision: on a GPU, or on a CPU with instructions for it."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"amx_bf16", "avx512_bf16", "bf16"})


def adapt(path: str, args: argparse.Namespace, size: Size) -> tuple[dict[str, Any], torch.dtype]:
    """The config file with what it cannot know: precision, and where output goes.

    Without fast bf16 training is in fp32. The GPU budget keeps its share of the model's weights.
    """
    config = json.loads(Path(path).read_text())
    dtype = torch.bfloat16 if fast_bf16() else torch.float32
    config["bf16"]["enabled"] = dtype is torch.bfloat16
    section = config["stronghold"]
    share = parse_bytes(section["gpu_memory"]) / (FULL.num_parameters() * 2)
    section["gpu_memory"] = int(share * size.num_parameters() * dtype.itemsize)
    section["trace"] = str(args.output / "trace.json")
    return config, dtype


def scheduled(config: dict[str, Any], steps: int) -> dict[str, Any]:
    """The config for so many steps; a short training has a short warm-up."""
    config = copy.deepcopy(config)
    schedule = config["scheduler"]["params"]
    warmup_steps = min(schedule["warmup_num_steps"], math.ceil(WARMUP_SHARE * steps))
    schedule.update(total_num_steps=max(steps, 2), warmup_num_steps=warmup_steps)
    return config


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--text", help="train on this file (default: the standard library's sources)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="train exactly so many steps, however long it takes (default: what fits, at most "
        f"{MOST_TRAINED})",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=DEFAULT_MINUTES,
        metavar="M",
        help="fit everything into so many minutes (default: %(default)s)",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a model of 0.7 M parameters, to see it run"
    )
    parser.add_argument(
        "--compare-steps",
        type=int,
        metavar="N",
        help="compare the losses of exactly so many steps (default: what fits, at most 20)",
    )
    parser.add_argument(
        "--no-timing", action="store_true", help="leave out the comparison of step times"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/quickstart"), help="folder for what is left"
    )
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    args = deepspeed.add_config_arguments(parser).parse_args(given)
    for option in ("steps", "compare_steps"):
        value = getattr(args, option)
        if value is not None and value < 1:
            parser.error(f"--{option.replace('_', '-')}: got {value}, expected at least 1")
    if not 0 < args.minutes < math.inf:
        parser.error(f"--minutes: got {args.minutes}, expected a number above 0")
    return args


def end_processes() -> None:
    """Leave the process group together: gloo aborts now and then when a process just ends."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, on what, with which config, and in which time."""

    size: Size
    dtype: torch.dtype
    config: dict[str, Any]
    text: bytes
    data: Corpus
    watch: Watch

    @property
    def weight_bytes(self) -> int:
        return self.size.num_parameters() * self.dtype.itemsize

    @property
    def budget_bytes(self) -> int:
        return int(self.config["stronghold"]["gpu_memory"])

    def build(self) -> LlamaForCausalLM:
        return self.size.build(self.dtype)


def prepare(args: argparse.Namespace, watch: Watch) -> Task:
    """The task that the arguments ask for."""
    size = TINY if args.tiny else FULL
    config, dtype = adapt(args.deepspeed_config or CONFIG, args, size)
    text = read_text(args.text)
    batch_size = config["train_micro_batch_size_per_gpu"]
    data = Corpus(text, batch_size=batch_size, context=size.context)
    data.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.output.mkdir(parents=True, exist_ok=True)
    task = Task(size=size, dtype=dtype, config=config, text=text, data=data, watch=watch)
    say(
        f"a Llama of {size.num_parameters() / 1e6:.1f} M parameters, {str(dtype)[6:]}: "
        f"{task.weight_bytes / MIB:.1f} MiB of weights, "
        f"GPU memory for {task.budget_bytes / MIB:.1f} MiB"
    )
    say(f"on {device_name()}; {data.num_bytes / MIB:.1f} MiB of text")
    return task


# -- the same losses ------------------------------------------------------------------------------
def compare(args: argparse.Namespace, task: Task) -> tuple[Fit, dict[str, Any]]:
    """The first steps in a plain loop and with the window. What fits, and numbers of both runs."""
    with operators_in_one_order():
        fitted, plain = run_without_window(args, task)
        windowed, memory, step_s = run_with_window(task, fitted.compared_steps)
        again = plain if windowed == plain else repeat_without_window(task, len(plain))
    print("\n1. the same training, with the window and in a plain PyTorch loop:")
    equal = compare_losses(windowed, plain, again)
    planned = compare_memory(memory, task.budget_bytes)
    return fitted, {
        "losses_equal": equal,
        "bytes_as_planned": planned,
        "plain_losses": plain,
        "windowed_losses": windowed,
        "memory": memory,
        "window_step_s": step_s,
    }


def run_without_window(args: argparse.Namespace, task: Task) -> tuple[Fit, list[float]]:
    """Losses with the engine's arithmetic and nothing else of stronghold's; a step is measured, and
    what fits decides how many there are."""
    clock, data = task.watch.clock, task.data
    loop = PlainLoop(task.build().to(data.device), task.config, exact=True)
    losses: list[float] = []
    seconds: list[float] = []
    # Three, for the first one warms up, and one may be slow by chance; fewer where three take long.
    most = min(MEASURED_STEPS, args.compare_steps or MEASURED_STEPS)
    while len(losses) < most and sum(seconds) < COMPARED_SHARE * task.watch.budget_s:
        begun_s = clock()
        losses.append(loop.step(data.batch()).item())
        seconds.append(clock() - begun_s)
    fitted = fit(
        median_low(seconds),
        task.watch,
        compared_steps=args.compare_steps,
        trained_steps=args.steps,
        timed=not args.no_timing,
        measured_steps=len(losses),
    )
    announce(args, task, fitted)
    with progress(fitted.compared_steps, "without the window", done=len(losses)) as bar:
        while len(losses) < fitted.compared_steps:
            losses.append(loop.step(data.batch()).item())
            bar.update()
    return fitted, losses


def repeat_without_window(task: Task, steps: int) -> list[float]:
    """Losses of a second plain loop: they tell a bug from a machine that does not repeat itself."""
    task.data.restart()
    loop = PlainLoop(task.build().to(task.data.device), task.config, exact=True)
    return [loop.step(task.data.batch()).item() for _ in range(steps)]


def announce(args: argparse.Namespace, task: Task, fitted: Fit) -> None:
    """Say what comes and how long it takes."""
    parts = [f"{count(fitted.compared_steps, 'step')} compared with a plain loop"]
    if fitted.timed_s:
        parts.append("the time of a step")
    if fitted.chunked_steps:
        parts.append(f"{count(fitted.chunked_steps, 'step')} in chunks")
    parts.append(f"{count(fitted.training.steps, 'step')} of training")
    seconds = task.watch.elapsed_s() + fitted.seconds()
    text = (
        f"a step takes {fitted.step_s:.2g} s here. To come: {', '.join(parts)}; in all about "
        f"{in_words(seconds)}"
    )
    if args.steps is None and fitted.training.steps < MOST_TRAINED:
        text += f" (--minutes sets it; the whole training has {MOST_TRAINED} steps)"
    say(text)
    if args.steps is None and fitted.training.steps < FEW:
        smaller = "" if args.tiny else ", --tiny takes a smaller model"
        say(
            f"this machine is too slow for more steps in {in_words(task.watch.budget_s)}: these "
            f"show that it runs, and hardly that it learns; --minutes 20 takes more{smaller}"
        )


def run_with_window(task: Task, steps: int) -> tuple[list[float], dict[str, int], float]:
    """Losses of the first steps, the bytes of the run, and median seconds of a step."""
    config = copy.deepcopy(task.config)
    del config["stronghold"]["trace"]
    task.data.restart()
    model, clock = task.build(), task.watch.clock
    engine, *_ = stronghold.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    losses, seconds = [], []
    with progress(steps, "with the window") as bar:
        for _ in range(steps):
            begun_s = clock()
            loss = engine(**task.data.batch()).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            seconds.append(clock() - begun_s)
            bar.update()
    memory = asdict(engine.memory_report())
    engine.destroy()
    return losses, memory, median(seconds[1:] or seconds)  # the first step warms up


# -- a larger batch, in chunks --------------------------------------------------------------------
def run_in_chunks(task: Task, steps: int) -> dict[str, Any]:
    """Twice the batch goes through each block a few sequences at a time, while its weights are
    there. The numbers of the run."""
    config = copy.deepcopy(task.config)
    config["train_micro_batch_size_per_gpu"] = CHUNKED["batch"]
    config["stronghold"]["chunk"] = CHUNKED["chunk"]
    # Beside the slots for gradients are their sums over chunks, in fp32.
    config["stronghold"]["gpu_memory"] = int(1.5 * task.budget_bytes)
    del config["stronghold"]["trace"]
    data = Corpus(task.text, batch_size=CHUNKED["batch"], context=task.size.context)
    model, clock = task.build(), task.watch.clock
    engine, *_ = stronghold.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    data.device = engine.device
    begun_s, losses = clock(), []
    with progress(steps, "in chunks") as bar:
        for _ in range(steps):
            loss = engine(**data.batch()).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            bar.update()
    train_s = clock() - begun_s
    report = engine.memory_report()
    engine.destroy()
    verdict = "as planned" if report.gpu_peak == report.gpu_planned else "NOT AS PLANNED: a bug"
    say(
        f"3. a batch of {CHUNKED['batch']} in chunks of {CHUNKED['chunk']}: "
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {count(steps, 'step')}; "
        f"GPU memory {report.gpu_peak / MIB:.2f} MiB, {verdict}"
    )
    return {"losses": losses, "memory": asdict(report), "train_s": train_s, **CHUNKED}


# -- the training ---------------------------------------------------------------------------------
def run_training(args: argparse.Namespace, task: Task, training: Training) -> dict[str, Any]:
    """Train, and show what was learned; the numbers of the run."""
    watch, data = task.watch, task.data
    args.deepspeed_config = str(args.output / "config.json")
    config = json.dumps(scheduled(task.config, training.steps), indent=2)
    Path(args.deepspeed_config).write_text(config + "\n")
    data.restart()
    model = task.build()
    engine, _, _, _ = stronghold.initialize(
        args=args, model=model, model_parameters=model.parameters()
    )
    data.device = engine.device
    begun_s = watch.clock()
    with finishing_step() as interrupted:

        def ends_early() -> bool:
            return interrupted() or (args.steps is None and watch.is_overrun())

        losses, held_out = train(engine, data, training, ends_early)
        was_interrupted = interrupted()
    engine.synchronize()
    train_s = watch.clock() - begun_s
    if len(losses) < training.steps:
        reason = "Ctrl-C" if was_interrupted else "steps became slower than they were measured"
        say(f"   ended after {len(losses)} of {training.steps} steps: {reason}")
    before, after = held_out[0][1], held_out[-1][1]
    say(
        f"   loss on held-out text {before:.3f} -> {after:.3f} nats per byte, after "
        f"{count(len(losses), 'step')} in {in_words(train_s)}"
    )
    if not was_interrupted:
        # A tiny model knows no words.
        num_bytes = WRITTEN_BYTES if task.size is FULL else WRITTEN_BYTES // 8
        text = write_text(engine, PROMPT, task.size.context, num_bytes, watch)
        unwise = " (words take some hundred steps)" if len(losses) < MOST_TRAINED else ""
        say(f"   it writes{unwise}: {text}")
    memory = asdict(engine.memory_report())
    engine.destroy()  # writes the trace
    return {
        "losses": losses,
        "held_out": held_out,
        "memory": memory,
        "train_s": train_s,
        "interrupted": was_interrupted,
    }


@contextmanager
def finishing_step() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted, and the caller asks for it when a step is over. A second one raises."""
    noted = False
    before = signal.getsignal(signal.SIGINT)

    def note(*_: Any) -> None:
        nonlocal noted
        noted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, before)


# -- all of it ------------------------------------------------------------------------------------
@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """What the engines log goes to a file: plans, a line for some steps. Warnings are shown too."""
    logger = logging.getLogger("stronghold")
    shown, kept = logging.StreamHandler(), logging.FileHandler(path, mode="w")
    shown.setLevel(logging.WARNING)
    shown.setFormatter(logging.Formatter("[stronghold] %(message)s"))
    before = logger.level
    for handler in (shown, kept):
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        for handler in (shown, kept):
            logger.removeHandler(handler)
            handler.close()


def run(args: argparse.Namespace, task: Task) -> int:
    """All parts, in order; the exit status."""
    watch = task.watch
    fitted, numbers = compare(args, task)
    step_s = numbers["window_step_s"]
    times = {}
    if fitted.timed_s:
        times = compare_times(task.build, task.config, task.data, fitted.timed_s, watch.clock)
    if times:
        overheads = "; of a tiny model mostly overheads" if args.tiny else ""
        say(f"2. time of a step: {times_in_words(times)}{overheads}")
    else:
        say(f"2. time of a step: left out, {'--no-timing' if args.no_timing else NO_TIME}")
    num_chunked = steps_in_chunks(step_s, watch, args.steps)
    chunked = run_in_chunks(task, num_chunked) if num_chunked else None
    if chunked is None:
        say(f"3. a larger batch in chunks: left out, {NO_TIME}")
    numbers |= {"step_s": times, "chunked": chunked}
    training = fit_training(step_s, watch.left_s(), args.steps)
    say(
        f"4. training: {count(training.steps, 'step')} of {step_s:.2g} s, about "
        f"{in_words(training.seconds(step_s))} (Ctrl-C ends it early)"
    )
    numbers |= run_training(args, task, training)
    share = task.budget_bytes / task.weight_bytes
    title = f"{task.size.num_parameters() / 1e6:.1f} M parameters, GPU memory for {share:.0%}"
    numbers = {
        "num_parameters": task.size.num_parameters(),
        "dtype": str(task.dtype),
        "weight_bytes": task.weight_bytes,
        "gpu_budget_bytes": task.budget_bytes,
        **numbers,
        "seconds": watch.elapsed_s(),
    }
    leave(args.output, f"{title} of the weights", numbers)
    print(f"done in {in_words(watch.elapsed_s())}; next:")
    show_next(args, numbers)
    if numbers["interrupted"]:
        return INTERRUPTED
    kept = chunked is None or chunked["memory"]["gpu_peak"] == chunked["memory"]["gpu_planned"]
    return 0 if numbers["losses_equal"] and numbers["bytes_as_planned"] and kept else 1


def show_next(args: argparse.Namespace, numbers: dict[str, Any]) -> None:
    """What to do now."""
    trained = len(numbers["losses"])
    if trained < MOST_TRAINED:
        whole_s = MOST_TRAINED * numbers["train_s"] / trained
        print(
            f"   scripts/quickstart {'--tiny ' if args.tiny else ''}--steps {MOST_TRAINED}: the "
            f"whole training, about {in_words(whole_s)} here"
        )
    print(
        "   scripts/quickstart --text FILE: the same on your own text\n"
        '   README.md, "Use": the engine in your own program',
        flush=True,
    )


def main(
    given: Sequence[str] | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    begun_s: float | None = None,
) -> int:
    args = parse_arguments(given)
    # The launcher's accelerator notice and the schedule's first step are no news to anybody here.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        task = prepare(args, Watch(60 * args.minutes, clock=clock, begun_s=begun_s))
    except (OSError, ValueError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    try:
        with log_to(args.output / "log.txt"):
            status = run(args, task)
    except KeyboardInterrupt:
        print("\nquickstart: interrupted: no results were kept", file=sys.stderr)
        return INTERRUPTED
    end_processes()
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(begun_s=BEGUN_S))
