"""Trains a Llama-style model on real text through a window smaller than the model.

The training itself is `train`, and is what any DeepSpeed user writes. The rest checks what it did:
the same losses without the window, the bytes against the plan, the time against a plain loop.
Started by `scripts/quickstart` through the `deepspeed` launcher.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not {"-h", "--help"} & set(sys.argv):
    print("loading torch, deepspeed and transformers", flush=True)

import deepspeed
import torch
from corpus import Corpus, read_text
from plain import compare_times, plain_losses
from report import compare_losses, compare_memory, leave, print_times
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import stronghold
from stronghold.config.section import parse_bytes

MIB = float(1 << 20)
VOCABULARY = 256
EVALUATED_AT = (0.04, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the steps; denser where the loss falls
CHUNKED = {"batch": 16, "chunk": 4, "steps": 40}  # of the second run
PROMPT, WRITTEN_BYTES, TEMPERATURE = b"def ", 160, 0.7


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


def train(engine: Any, data: Corpus, steps: int) -> tuple[list[float], list[tuple[float, float]]]:
    """Losses of all steps, and (step, loss on the held-out text) now and then."""
    losses: list[torch.Tensor] = []
    held_out = [(0.0, evaluate(engine, data))]
    evaluations = {round(steps * part) for part in EVALUATED_AT}
    interval = 0.2 if sys.stderr.isatty() else 15.0  # a log file does not want many lines
    with tqdm(total=steps, unit="step", mininterval=interval, dynamic_ncols=True) as bar:
        for step in range(1, steps + 1):
            loss = engine(**data.batch()).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
            if step in evaluations:
                held_out.append((float(step), evaluate(engine, data)))
            if step % 10 == 0:
                bar.set_postfix(loss=f"{losses[-1]:.3f}", held_out=f"{held_out[-1][1]:.3f}")
            bar.update()
    return [loss.item() for loss in losses], held_out


@torch.no_grad()
def evaluate(engine: Any, data: Corpus) -> float:
    """Mean loss over the held-out text, in nats per byte."""
    engine.eval()
    losses = [engine(**batch).loss.item() for batch in data.held_out_batches()]
    engine.train()
    return sum(losses) / len(losses)


@torch.no_grad()
def write_text(engine: Any, prompt: bytes, context: int, num_bytes: int) -> str:
    """Continue `prompt` byte by byte, through the window."""
    engine.eval()
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor([list(prompt)])
    for _ in range(num_bytes):
        logits = engine(input_ids=text[:, -context:].to(engine.device)).logits[:, -1].float().cpu()
        following = torch.multinomial(
            torch.softmax(logits / TEMPERATURE, -1), 1, generator=generator
        )
        text = torch.cat([text, following], dim=1)
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
    """The config file with what it cannot know: precision, number of steps, where output goes.

    Without fast bf16 training is in fp32. The GPU budget keeps its share of the model's weights.
    """
    config = json.loads(Path(path).read_text())
    dtype = torch.bfloat16 if fast_bf16() else torch.float32
    config["bf16"]["enabled"] = dtype is torch.bfloat16
    config["scheduler"]["params"]["total_num_steps"] = max(args.steps, 2)
    section = config["stronghold"]
    share = parse_bytes(section["gpu_memory"]) / (FULL.num_parameters() * 2)
    section["gpu_memory"] = int(share * size.num_parameters() * dtype.itemsize)
    section["trace"] = str(args.output / "trace.json")
    return config, dtype


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--text", help="train on this file (default: the standard library's sources)"
    )
    parser.add_argument("--steps", type=int, default=250, help="training steps (default: 250)")
    parser.add_argument(
        "--tiny", action="store_true", help="a model of 0.7 M parameters, to see it run"
    )
    parser.add_argument(
        "--compare-steps",
        type=int,
        default=20,
        metavar="N",
        help="repeat so many steps without the window",
    )
    parser.add_argument(
        "--no-timing", action="store_true", help="leave out the comparison of step times"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/quickstart"), help="folder for what is left"
    )
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    args = deepspeed.add_config_arguments(parser).parse_args()
    if args.steps < 1 or args.compare_steps < 1:
        parser.error("--steps and --compare-steps: expected at least 1")
    return args


def end_processes() -> None:
    """Leave the process group together: gloo aborts now and then when a process just ends."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, on what, and with which config."""

    size: Size
    dtype: torch.dtype
    config: dict[str, Any]
    data: Corpus
    steps: int

    @property
    def weight_bytes(self) -> int:
        return self.size.num_parameters() * self.dtype.itemsize

    @property
    def budget_bytes(self) -> int:
        return int(self.config["stronghold"]["gpu_memory"])


def prepare(args: argparse.Namespace) -> Task:
    """The task that the arguments ask for; `args.deepspeed_config` becomes the adapted config."""
    size = TINY if args.tiny else FULL
    config, dtype = adapt(args.deepspeed_config, args, size)
    batch_size = config["train_micro_batch_size_per_gpu"]
    data = Corpus(read_text(args.text), batch_size=batch_size, context=size.context)
    args.output.mkdir(parents=True, exist_ok=True)
    args.deepspeed_config = str(args.output / "config.json")
    Path(args.deepspeed_config).write_text(json.dumps(config, indent=2) + "\n")
    task = Task(size=size, dtype=dtype, config=config, data=data, steps=args.steps)
    print(
        f"{size.num_parameters() / 1e6:.1f} M parameters in {dtype}, {task.weight_bytes / MIB:.1f} "
        f"MiB of weights for {task.budget_bytes / MIB:.1f} MiB of GPU memory; "
        f"{data.num_bytes / MIB:.1f} MiB of text",
        flush=True,
    )
    return task


def run_with_window(args: argparse.Namespace, task: Task) -> dict[str, Any]:
    """Train, and show what was learned; the numbers of the run."""
    model = task.size.build(task.dtype)
    engine, _, _, _ = stronghold.initialize(
        args=args, model=model, model_parameters=model.parameters()
    )
    task.data.device = engine.device
    begun = time.perf_counter()
    with logging_redirect_tqdm([logging.getLogger("stronghold")]):
        losses, held_out = train(engine, task.data, task.steps)
    engine.synchronize()
    train_s = time.perf_counter() - begun
    before, after = held_out[0][1], held_out[-1][1]
    print(f"held-out text: {before:.3f} -> {after:.3f} nats per byte, {train_s:.0f} s")
    # A tiny model knows no words.
    num_bytes = WRITTEN_BYTES if task.size is FULL else WRITTEN_BYTES // 8
    print(f"\nit writes:\n{write_text(engine, PROMPT, task.size.context, num_bytes)}")
    memory = asdict(engine.memory_report())
    engine.destroy()  # writes the trace
    return {"losses": losses, "held_out": held_out, "memory": memory, "train_s": train_s}


def run_in_chunks(task: Task, text: bytes) -> dict[str, Any]:
    """A second run: twice the batch goes through each block a few sequences at a time, while its
    weights are there. The numbers of the run."""
    config = copy.deepcopy(task.config)
    config["train_micro_batch_size_per_gpu"] = CHUNKED["batch"]
    config["stronghold"]["chunk"] = CHUNKED["chunk"]
    # Beside the slots for gradients are their sums over chunks, in fp32.
    config["stronghold"]["gpu_memory"] = int(1.5 * task.budget_bytes)
    del config["stronghold"]["trace"]
    data = Corpus(text, batch_size=CHUNKED["batch"], context=task.size.context)
    model = task.size.build(task.dtype)
    engine, *_ = stronghold.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    data.device = engine.device
    begun = time.perf_counter()
    batches = iter(data.batch, None)
    steps = range(min(CHUNKED["steps"], task.steps))
    losses = [engine.train_batch(batches).item() for _ in steps]
    train_s = time.perf_counter() - begun
    report = engine.memory_report()
    engine.destroy()
    print(
        f"\na batch of {CHUNKED['batch']} in chunks of {CHUNKED['chunk']}: loss {losses[0]:.3f} -> "
        f"{losses[-1]:.3f} in {len(losses)} steps, {train_s:.0f} s; {report.gpu_peak / MIB:.2f} of "
        f"{report.gpu_planned / MIB:.2f} MiB of GPU memory"
    )
    return {"losses": losses, "memory": asdict(report), "train_s": train_s, **CHUNKED}


def run_without_window(args: argparse.Namespace, task: Task) -> dict[str, Any]:
    """The first steps again in a plain loop, and the time of a step of both kinds."""

    def build() -> LlamaForCausalLM:
        return task.size.build(task.dtype)

    task.data.restart()
    model = build().to(task.data.device)
    steps = min(args.compare_steps, task.steps)
    numbers: dict[str, Any] = {"plain_losses": plain_losses(model, task.config, task.data, steps)}
    numbers["step_s"] = {} if args.no_timing else compare_times(build, task.config, task.data)
    return numbers


def main() -> int:
    args = parse_arguments()
    # The launcher's accelerator notice and the schedule's first step are no news to anybody here.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if torch.cuda.is_available():  # attention's backward adds in another order on every run
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        task = prepare(args)
    except (OSError, ValueError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    windowed = run_with_window(args, task)
    kept = compare_memory(windowed["memory"], task.weight_bytes, task.budget_bytes)
    logging.getLogger("stronghold").setLevel(logging.WARNING)
    chunked = run_in_chunks(task, read_text(args.text))
    kept = kept and chunked["memory"]["gpu_peak"] == chunked["memory"]["gpu_planned"]
    plain = run_without_window(args, task)
    equal = compare_losses(windowed["losses"], plain["plain_losses"])
    if plain["step_s"]:
        print_times(plain["step_s"])
    share = task.budget_bytes / task.weight_bytes
    numbers = {
        "num_parameters": task.size.num_parameters(),
        "dtype": str(task.dtype),
        "weight_bytes": task.weight_bytes,
        "gpu_budget_bytes": task.budget_bytes,
        "losses_equal": equal,
        "chunked": chunked,
        **plain,
        **windowed,
    }
    count = f"{task.size.num_parameters() / 1e6:.1f} M parameters"
    leave(args.output, f"{count}, GPU memory for {share:.0%} of the weights", numbers)
    end_processes()
    return 0 if equal and kept else 1


if __name__ == "__main__":
    sys.exit(main())
