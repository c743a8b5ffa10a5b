"""Measure a GPU machine in pieces, one after the other, until a deadline.

    python benchmarks/gpu.py OUT [PIECE...] [--seconds 400] [--rehearse]

Each piece is a command in a process of its own. It writes OUT/NAME.log and, if it measures,
OUT/NAME.json. Everything is packed in OUT/results.tgz after each piece, so that a run which is cut
off loses one piece. A piece that fails does not stop the next.

A machine without a network needs two things beside this repository: .gpu/site, which `pip install
--target` fills with DeepSpeed and its requirements, and .gpu/libstronghold.so, the compiled
kernels. They are used if DeepSpeed is not installed. STRONGHOLD_COMMIT names the commit in the
results where the tree comes without its history.

`--rehearse` takes tiny models, on the emulated device if there is no GPU. It finds mistakes of this
script, and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNPACKED = ROOT / ".gpu"
LEAST_S = 20.0  # a piece that has less is not begun
# Of 126 GiB. The memory of some virtual machines grows as it is used, so the plan cannot read it.
HOST_BYTES = 116 * 10**9

TINY = "--layers 6 --hidden 64 --heads 4 --kv-heads 2 --intermediate 128 --vocab 256"
LLAMA_3B = "--layers 28 --hidden 3072 --heads 24 --kv-heads 8 --intermediate 8192 --vocab 32768"
QWEN_8B = "--layers 36 --hidden 4096 --heads 32 --kv-heads 8 --intermediate 12288 --vocab 151936"
STEP = "--family llama --precision bf16 --lr 1e-4 --activations recompute --seq 2048"
CAP_24, CAP_80 = ("--gpu-memory", "24GB"), ("--gpu-memory", "80GB")
# Plans that are given whole.
PLAN_3B = '{"resident_layers": 9, "resident_updates": "gpu", "window": 3, "gpu_memory": "19GB"}'
PLAN_8B = (
    '{"resident_layers": 14, "resident_updates": "gpu", "window": 3, "early_layers": 0, '
    '"activations": "recompute", "gpu_memory": "62GB"}'
)
CORE_TESTS = ("core", "activations", "memory", "checkpoint", "logits")


@dataclass(frozen=True, slots=True)
class Piece:
    """A command, and the seconds that it may take. {out} is the folder, {name} the piece."""

    about: str
    limit_s: float
    command: tuple[str, ...]


def command(about: str, limit_s: float, text: str, *words: str) -> Piece:
    return Piece(about, limit_s, (*text.split(), *words))


def compare(
    about: str,
    limit_s: float,
    method: str,
    model: str,
    *words: str,
    batch: int = 8,
    warmup: int = 5,
) -> Piece:
    """A method on a model. Memory is touched for the first time in the first steps."""
    text = f"benchmarks/compare.py --method {method} {model} {STEP} --batch {batch} --steps 5"
    text += f" --warmup {warmup} --host-memory 124GB --no-reference"
    text += f" --timeout {limit_s - 5:.0f} --json {{out}}/{{name}}.json"
    return command(about, limit_s, text, *words)


OURS, PINNED = "stronghold", ("--section", PLAN_8B)
PIECES = {  # in the order of what shows most
    "smoke": command(
        "each feature has the bits of a plain loop", 150, "benchmarks/smoke.py --logs {out}/smoke"
    ),
    "3b": compare(
        "3.0 B in 24 GB", 100, OURS, LLAMA_3B, *CAP_24, "--trace", "{out}/{name}-trace.json"
    ),
    "3b-plain": compare("3.0 B, all of it on the GPU", 70, "plain", LLAMA_3B),
    "exact-3b": command(
        "losses, norms and weights of 3.0 B are plain torch's, to the bit",
        170,
        f"benchmarks/exact.py {LLAMA_3B} {STEP} --batch 8 --steps 3 --json {{out}}/{{name}}.json",
        *CAP_24,
        "--section",
        PLAN_3B,
    ),
    "8b-32k": compare("Qwen3-8B's shape", 170, OURS, QWEN_8B, *CAP_80, batch=16),
    "8b-16k": compare("half the tokens", 160, OURS, QWEN_8B, *CAP_80),
    "3b-unclipped": compare(
        "clipping off: early updates", 90, OURS, LLAMA_3B, *CAP_24, "--clipping", "0"
    ),
    "8b-compiled": compare(
        "torch.compile around each block",
        240,
        "methods.ours:Compiled",
        QWEN_8B,
        *CAP_80,
        *PINNED,
        batch=16,
        warmup=2,
    ),
    "deepspeed-adam": command(
        "DeepSpeed compiles its CPU Adam, before it is measured",
        300,
        "-c",
        "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()",
    ),
    "3b-zero-offload": compare("ZeRO-2", 150, "zero-offload", LLAMA_3B, *CAP_24, warmup=2),
    "3b-superoffload": compare(
        "SuperOffload", 200, "superoffload-param", LLAMA_3B, *CAP_24, warmup=2
    ),
    "3b-fsdp2": compare("FSDP2", 300, "fsdp2-offload", LLAMA_3B, *CAP_24, warmup=2),
    "core-tests": command(
        "tests of the CUDA path of the core",
        200,
        # -v names a test as it ends: a run that is cut off has shown what failed
        "-m pytest -v -p no:cacheprovider -n 8 -m gpu --tb short -p no:benchmark",
        *(f"tests/gpu/test_{name}_cuda.py" for name in CORE_TESTS),
    ),
    "tests": command(
        "tests of the CUDA path", 400, "-m pytest -q -p no:cacheprovider -n 4 tests/gpu"
    ),
}


def environment() -> dict[str, str]:
    """The environment of each piece. Where DeepSpeed is not installed, .gpu/site is imported, and
    the compiled kernels are copied beside the sources."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if importlib.util.find_spec("deepspeed") is None:
        paths.insert(1, str(UNPACKED / "site"))
        native = ROOT / "stronghold" / "_native"
        native.mkdir(exist_ok=True)
        shutil.copy(UNPACKED / "libstronghold.so", native)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "DS_SKIP_CUDA_CHECK": "1",
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "STRONGHOLD_HOST_MEMORY": str(HOST_BYTES),
    }


def rehearsed(words: tuple[str, ...]) -> tuple[str, ...]:
    """The same command with a tiny model."""
    text = "\n".join(words)
    tiny = {"\n".join(model.split()): "\n".join(TINY.split()) for model in (LLAMA_3B, QWEN_8B)}
    tiny |= {"--seq\n2048": "--seq\n32", "\n124GB": "\n8GB", "\n24GB": "\n1GB", "\n80GB": "\n1GB"}
    tiny |= {'"resident_layers": 9,': '"resident_layers": 2,'}
    tiny |= {'"resident_layers": 14,': '"resident_layers": 2,'}
    for size, small in tiny.items():
        text = text.replace(size, small)
    return tuple(text.split("\n"))


def run(words: Sequence[str], log: Path, limit_s: float, env: dict[str, str]) -> int | None:
    """The status of a Python program, which prints into `log`; None: it was cut off."""
    with log.open("w") as file:
        print(shlex.join(["python", *words]), file=file, flush=True)
        process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=env,
            start_new_session=True,
        )
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(limit_s)
        # Its children may hold memory of the GPU.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return status


def pack(out: Path) -> None:
    """Pack the folder. The archive of the piece before stays until the new one is complete."""
    aside = out / "results.tgz.part"
    with tarfile.open(aside, "w:gz") as archive:
        for path in sorted(out.rglob("*")):
            if path.is_file() and path != aside and path.suffix != ".tgz":
                archive.add(path, path.relative_to(out))
    aside.replace(out / "results.tgz")


def main() -> int:
    listed = "\n".join(f"  {n:17} {p.limit_s:4.0f} s: {p.about}" for n, p in PIECES.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"pieces, and the most seconds that each takes:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help="default: all, in order")
    parser.add_argument("--seconds", type=float, default=3600.0, help="until the deadline")
    parser.add_argument("--rehearse", action="store_true", help="tiny models")
    arguments = parser.parse_args()
    names: list[str] = arguments.pieces or list(PIECES)
    if unknown := [name for name in names if name not in PIECES]:
        parser.error(f"no piece {', '.join(unknown)}; expected {', '.join(PIECES)}")
    deadline, out = time.monotonic() + arguments.seconds, arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    env = environment()
    for name in names:
        piece, left = PIECES[name], deadline - time.monotonic()
        if left < LEAST_S:
            print(f"{name:17} not begun: {left:.0f} s are left", flush=True)
            continue
        words = rehearsed(piece.command) if arguments.rehearse else piece.command
        words = tuple(w.replace("{out}", str(out)).replace("{name}", name) for w in words)
        begun = time.monotonic()
        status = run(words, out / f"{name}.log", min(piece.limit_s, left), env)
        ended = "cut off" if status is None else f"status {status}"
        took_s = time.monotonic() - begun
        print(f"{name:17} {ended:10} {took_s:6.1f} s  {piece.about}", flush=True)
        pack(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
