"""How much memory `stronghold prepare` takes, and how near it is to its packing kernel's rate.

    python benchmarks/prepare.py [--frozen nf4] [--layers 28] [--limit-gb 4] [--folder DIR] [--save]

It writes a random bf16 model of Llama 3.2 3B's shape in shards, then runs the command in a process
whose data (RLIMIT_DATA) is limited. The peak is the process's own high-water mark of resident
memory (VmHWM), looked at every 10 ms, with Python and torch. The limit of the rate is packing: the
seconds in `encode`, beside the seconds from the first read to the last fsync. The disk is measured
by a write and fsync of as many bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, describe, provenance, save, slug
from transformers import LlamaConfig, LlamaForCausalLM

from stronghold.checkpoint.base import open_base
from stronghold.checkpoint.files import Entry, write_tensors
from stronghold.checkpoint.pretrained import INDEX

SHARD_BYTES = 2 << 30
BLOCK_NUMEL = 1 << 22  # random numbers are drawn once, and written again and again
GIB = 1 << 30


def write_model(out: Path, num_layers: int) -> dict[str, int]:
    """Write a random model in shards. Returns its parameters, and the bytes of one block."""
    config = LlamaConfig(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=num_layers,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    out.mkdir(parents=True)
    config.save_pretrained(out)
    numbers = (torch.randn(BLOCK_NUMEL) * 0.02).to(torch.bfloat16)
    shards: list[list[Entry]] = [[]]
    size = 0
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        entry = Entry(
            name=name,
            dtype=torch.bfloat16,
            shape=shape,
            pieces=partial(repeated, numbers, parameter.numel()),
        )
        if size and size + entry.num_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.num_bytes
    weight_map = {}
    for number, entries in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(out / file, entries)
        weight_map.update({entry.name: file for entry in entries})
    (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    block = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": total, "block_bytes": 2 * block}


def repeated(numbers: torch.Tensor, numel: int) -> Iterator[torch.Tensor]:
    while numel:
        piece = numbers[: min(numel, numbers.numel())]
        yield piece
        numel -= piece.numel()


def limited(limit_bytes: int) -> Callable[[], None]:
    """Limits the data of the process that calls it."""
    return partial(resource.setrlimit, resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def peak_bytes(pid: int) -> int:
    """The most resident memory that a process ever had. 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0


def run_command(model: Path, base: Path, frozen: str, limit_bytes: int) -> dict[str, Any]:
    """Run `stronghold prepare`. Returns its peak, its seconds and the times of its first lines."""
    command = [sys.executable, "-m", "stronghold.tools.cli", "prepare", str(model)]
    command += ["--frozen", frozen, "-o", str(base)]
    log = base.with_suffix(".log")
    peak = 0
    first_line_s = None
    with log.open("w") as out:
        begun = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=ROOT, preexec_fn=limited(limit_bytes)
        )
        while process.poll() is None:
            peak = max(peak, peak_bytes(process.pid))
            if first_line_s is None and log.stat().st_size:
                first_line_s = time.perf_counter() - begun
            time.sleep(0.01)
    text = log.read_text()
    assert process.returncode == 0, text[-3000:]
    match = re.search(r"([\d.]+) s, of these ([\d.]+) s packing and ([\d.]+) s waiting", text)
    assert match is not None, text
    seconds, packing_s, waiting_s = map(float, match.groups())
    return {
        "peak_bytes": peak,
        "first_line_s": first_line_s,
        "seconds": seconds,
        "packing_s": packing_s,
        "waiting_s": waiting_s,
        "lines": [line for line in text.splitlines() if "torch" not in line],
    }


def disk_seconds(folder: Path, num_bytes: int) -> float:
    """Seconds to write and fsync as many bytes of one file, past the page cache's delay."""
    block = os.urandom(16 << 20)
    begun = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(-(-num_bytes // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - begun


def markdown(figures: dict[str, Any], record: dict[str, Any]) -> str:
    bound = figures["block_bytes"] * 2 + GIB
    return "\n".join(
        [
            "# `stronghold prepare`: memory and rate",
            "",
            f"A random bf16 model of {figures['parameters'] / 1e9:.2f} billion parameters, packed "
            f"to {figures['frozen']}, with {figures['limit_gb']} GB of data at most (RLIMIT_DATA).",
            "",
            "| | |",
            "|---|---|",
            f"| peak of resident memory | {figures['peak_bytes'] / GIB:.2f} GiB |",
            f"| two layers and 1 GiB | {bound / GIB:.2f} GiB |",
            f"| first line after | {figures['first_line_s']:.2f} s |",
            f"| seconds of work | {figures['seconds']:.1f} |",
            f"| of these in the packing kernel | {figures['packing_s']:.1f} "
            f"({100 * figures['packing_s'] / figures['seconds']:.1f} %) |",
            f"| waiting for reads and writes | {figures['waiting_s']:.1f} |",
            f"| disk alone, as many bytes | {figures['disk_s']:.1f} |",
            f"| bytes per parameter of a block | {figures['bytes_per_parameter']:.3f} |",
            "",
            describe(record),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--frozen", default="nf4")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--limit-gb", type=float, default=4.0, metavar="GB")
    parser.add_argument("--folder", type=Path, help="on the disk in question")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    arguments = parser.parse_args()
    record = provenance()
    if arguments.folder is not None:  # a path of one machine means nothing to others
        record["command"] = record["command"].replace(str(arguments.folder), "DIR")
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        sizes = write_model(folder / "model", arguments.layers)
        limit = int(arguments.limit_gb * 1e9)
        figures = run_command(folder / "model", folder / "base", arguments.frozen, limit)
        with open_base(folder / "base", frozen=arguments.frozen) as base:
            base.check_contents()
            num_bytes = sum(base.manifest.files.values())
        figures |= sizes | {
            "frozen": arguments.frozen,
            "limit_gb": arguments.limit_gb,
            "base_bytes": num_bytes,
            "bytes_per_parameter": 2 * num_bytes / (sizes["block_bytes"] * arguments.layers),
            "disk_s": disk_seconds(folder, num_bytes),
        }
    finally:
        shutil.rmtree(folder)
    text = markdown(figures, record)
    print(text)
    print("\n".join(figures.pop("lines")))
    if arguments.save:
        name = f"prepare-{arguments.frozen}_{slug(record['machine']['cpu'])}"
        print(*save(name, text, {**record, "figures": figures}), sep="\n")
    within = figures["peak_bytes"] < 2 * figures["block_bytes"] + GIB
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
