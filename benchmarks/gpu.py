"""What a GPU machine is asked: pieces in processes of their own, one after the other, until a
deadline.

    python benchmarks/gpu.py OUT [PIECE...] [--seconds 400] [--rehearse]

Every piece writes OUT/NAME.log and, if it measures, NAME.json. All of it is packed in
OUT/results.tgz after each piece, so that a command which is cut off loses one piece. A piece that
fails does not stop the next. `--rehearse` takes tiny models, and the emulated device where there is
no GPU: it shows mistakes of this script, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEAST_S = 20.0  # a piece that has less is not begun
HOST_BYTES = 116 * 10**9  # of 126 GiB: the machine's memory grows as it is used

TINY = "--layers 6 --hidden 64 --heads 4 --kv-heads 2 --intermediate 128 --vocab 256"
LLAMA_3B = "--layers 28 --hidden 3072 --heads 24 --kv-heads 8 --intermediate 8192 --vocab 32768"
QWEN_8B = "--layers 36 --hidden 4096 --heads 32 --kv-heads 8 --intermediate 12288 --vocab 151936"
STEP = "--family llama --precision bf16 --lr 1e-4 --activations recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A command, in which {out} is the folder and {name} the piece, and the seconds that it may
    take."""

    command: str
    limit_s: float
    about: str


def compare(
    method: str,
    model: str,
    batch: int,
    more: str = "",
    *,
    limit_s: float,
    about: str,
    warmup: int = 5,
) -> Piece:
    """One method on one model. A plan that is refined changes after step 3: five warm-up steps."""
    words = f"benchmarks/compare.py --method {method} {model} {STEP} --seq 2048 --batch {batch}"
    words += f" --steps 5 --warmup {warmup} --host-memory 124GB --no-reference {more}"
    words += f" --timeout {limit_s - 5:.0f} --json {{out}}/{{name}}.json"
    return Piece(command=words, limit_s=limit_s, about=about)


CAP_24, CAP_80 = "--gpu-memory 24GB", "--gpu-memory 80GB"
UNCLIPPED = "--optimizer-clipping 0"
# A plan that is given whole is not made anew after the first steps.
PINNED_8B = (
    CAP_80
    + """ --section '{"resident_layers": 14, "resident_updates": "gpu", "window": 3, """
    + """"activations": "recompute", "early_layers": 0}'"""
)
# Residents are updated on the GPU, four layers early; every step clips, and updates them again.
PINNED_3B = (
    CAP_24
    + """ --section '{"resident_layers": 9, "resident_updates": "gpu", "window": 2, """
    + """"early_layers": 4}'"""
)
PIECES = {
    "smoke": Piece(
        command="benchmarks/smoke.py --logs {out}/smoke",
        limit_s=150,
        about="23 features, a plain loop's bits",
    ),
    "smoke-plan": Piece(
        command="benchmarks/smoke.py resident automatic --logs {out}/smoke",
        limit_s=60,
        about="residents, and a plan of its own",
    ),
    "3b": compare(
        "stronghold",
        LLAMA_3B,
        8,
        f"{CAP_24} --trace {{out}}/{{name}}-trace.json",
        limit_s=90,
        about="3.0 B in 24 GB",
    ),
    "3b-plain": compare(
        "plain", LLAMA_3B, 8, limit_s=70, about="3.0 B, everything on the GPU"
    ),
    "exact-3b": Piece(
        command=f"benchmarks/exact.py {LLAMA_3B} {STEP} --seq 2048 --batch 8 --steps 3 {PINNED_3B} --json {{out}}/{{name}}.json",
        limit_s=170,
        about="3.0 B, three steps: losses, norms and weights are plain torch's",
    ),
    "3b-fsdp2": compare(
        "fsdp2-offload",
        LLAMA_3B,
        8,
        CAP_24,
        limit_s=110,
        warmup=2,
        about="FSDP2, CPUOffloadPolicy",
    ),
    "3b-superoffload": compare(
        "superoffload-param",
        LLAMA_3B,
        8,
        CAP_24,
        limit_s=150,
        warmup=2,
        about="DeepSpeed's SuperOffload",
    ),
    "3b-unclipped": compare(
        "stronghold",
        LLAMA_3B,
        8,
        f"{CAP_24} {UNCLIPPED}",
        limit_s=90,
        about="clipping off: early updates",
    ),
    "8b-32k": compare(
        "stronghold",
        QWEN_8B,
        16,
        PINNED_8B,
        limit_s=170,
        warmup=2,
        about="Qwen3-8B's shape, 32k tokens",
    ),
    "8b-32k-automatic": compare(
        "stronghold",
        QWEN_8B,
        16,
        CAP_80,
        limit_s=190,
        about="Qwen3-8B's shape, 32k tokens, its own plan",
    ),
    "8b-16k": compare(
        "stronghold",
        QWEN_8B,
        8,
        PINNED_8B,
        limit_s=150,
        warmup=2,
        about="Qwen3-8B's shape, 16k tokens",
    ),
    "8b-compiled": compare(
        "methods.ours:Compiled",
        QWEN_8B,
        16,
        PINNED_8B,
        limit_s=190,
        warmup=2,
        about="with torch.compile of blocks",
    ),
    "tests": Piece(
        command="-m pytest -q -p no:cacheprovider tests/gpu -n 4",
        limit_s=400,
        about="the laws of tests/gpu",
    ),
}


def environment() -> dict[str, str]:
    """One rank. Where DeepSpeed is not installed, the packages of .gpu/site are imported."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if importlib.util.find_spec("deepspeed") is None:
        paths.insert(1, str(ROOT / ".gpu/site"))
    given = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "DS_SKIP_CUDA_CHECK": "1",
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "STRONGHOLD_HOST_MEMORY": str(HOST_BYTES),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    return {**os.environ, **given}


def rehearsed(command: str) -> str:
    """The same command with a tiny model."""
    for model in (LLAMA_3B, QWEN_8B):
        command = command.replace(model, TINY)
    tiny_sizes = {
        "--seq 2048": "--seq 32",
        " 24GB": " 1GB",
        "80GB": "1GB",
        " 124GB": " 8GB",
    }
    for number in ("9", "14"):
        tiny_sizes[f'"resident_layers": {number},'] = '"resident_layers": 2,'
    for size, tiny in tiny_sizes.items():
        command = command.replace(size, tiny)
    return command


def run(name: str, piece: Piece, out: Path, seconds: float, *, rehearse: bool) -> str:
    """Run a piece for at most so many seconds; a word about how it ended."""
    command = rehearsed(piece.command) if rehearse else piece.command
    words = [
        word.format(out=out, name=name) if "{out}" in word or "{name}" in word else word
        for word in shlex.split(command)
    ]
    begun = time.monotonic()
    with (out / f"{name}.log").open("w") as log:
        print(shlex.join(["python", *words]), file=log, flush=True)
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(),
            start_new_session=True,
        )
        try:
            ended = f"status {process.wait(min(piece.limit_s, seconds))}"
        except subprocess.TimeoutExpired:
            ended = "cut off"
        with contextlib.suppress(ProcessLookupError):  # and what it left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"{name:18} {ended:10} {time.monotonic() - begun:6.1f} s  {piece.about}"


def pack(out: Path) -> None:
    """Everything in the folder as one archive, which is whole at every moment."""
    aside = out / "results.tgz.part"
    with tarfile.open(aside, "w:gz") as archive:
        for path in sorted(out.rglob("*")):
            if path.is_file() and not path.name.startswith("results.tgz"):
                archive.add(path, path.relative_to(out))
    aside.replace(out / "results.tgz")


def main() -> int:
    listed = "\n".join(
        f"  {name:18} {piece.limit_s:4.0f} s at most: {piece.about}"
        for name, piece in PIECES.items()
    )
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"pieces:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "pieces", nargs="*", metavar="PIECE", help="default: all, in the order below"
    )
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="until the deadline"
    )
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    names: Sequence[str] = arguments.pieces or list(PIECES)
    if unknown := [name for name in names if name not in PIECES]:
        parser.error(f"no piece {', '.join(unknown)}")
    deadline, out = time.monotonic() + arguments.seconds, arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        left = deadline - time.monotonic()
        if left < LEAST_S:
            print(f"{name:18} not begun: {left:.0f} s are left", flush=True)
            continue
        print(
            run(name, PIECES[name], out, left, rehearse=arguments.rehearse), flush=True
        )
        pack(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
