"""What every method is asked to train, as data: the model's sizes, the batches, the caps.

Owns the seeded data, and the formulas that count FLOPs. Never imports a method. A
task travels to a method's process as JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import torch

Precision = Literal["fp32", "bf16"]
Activations = Literal["keep", "recompute", "offload"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One training, the same for all methods.

    family, layers, hidden, heads, vocab   the model's sizes
    kv_heads, intermediate   a Llama's heads of keys and values, and the width of its MLP
    batch, seq, accumulation   samples of `seq` tokens in a micro-batch, and micro-batches in a step
    steps, warmup   measured steps, and those before them
    precision   by default bf16 on CUDA
    activations   what every method does with them, where it can; l2l always recomputes
    machine   where layers compute: "cuda", or "emulated" on the CPU
    gpu_memory, host_memory   caps, as 24GB
    threads   of torch and of the CPU's optimizer
    window, section, trace             stronghold's slots, more of its keys as JSON,
                                       and a file for its trace
    link_gbps   pace of the emulated link, stronghold's
    nvme_dir   for zero-infinity-nvme
    halves   every micro-batch runs as two, which is the same sum in another order
    """

    family: Literal["gpt", "llama"] = "gpt"
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int | None = None
    intermediate: int | None = None
    vocab: int = 50304
    seq: int = 64
    batch: int = 4
    accumulation: int = 1
    steps: int = 10
    warmup: int = 3
    seed: int = 0
    precision: Precision = "fp32"
    clipping: float = 1.0
    activations: Activations = "keep"
    lr: float = 3e-4
    weight_decay: float = 0.1
    machine: Literal["cuda", "emulated"] = "emulated"
    window: int | None = None
    gpu_memory: int | None = None
    host_memory: int | None = None
    link_gbps: float | None = None
    threads: int | None = None
    nvme_dir: str | None = None
    halves: bool = False
    trace: str | None = None
    section: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return DTYPES[self.precision]

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.machine == "cuda" else torch.device("cpu")

    @property
    def num_steps(self) -> int:
        """Warm-up included."""
        return self.warmup + self.steps

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.accumulation * self.seq

    @property
    def recomputes(self) -> bool:
        return self.activations == "recompute"

    @property
    def adam(self) -> dict[str, Any]:
        """The hyper-parameters of AdamW."""
        return {"lr": self.lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": self.weight_decay}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        values: dict[str, Any] = json.loads(text)
        return cls(**{one.name: values[one.name] for one in fields(cls)})


class Data:
    """Synthetic tokens, drawn on the CPU: the same for every method and machine.

    Tokens follow a fixed random walk over a small vocabulary, so that there is something to learn
    and losses move.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._vocab = min(task.vocab, 256)
        generator = torch.Generator().manual_seed(task.seed)
        self._successors = torch.randint(self._vocab, (self._vocab, 4), generator=generator)

    def step(self, index: int) -> list[Batch]:
        """The micro-batches of step `index`, on the task's device."""
        task = self._task
        generator = torch.Generator().manual_seed(task.seed * 1_000_003 + index + 1)
        parts = 2 if task.halves and task.batch % 2 == 0 else 1
        batches = []
        for _ in range(task.accumulation):
            tokens = self._walk(generator)
            for piece in tokens.chunk(parts):
                ids = piece.to(task.device)
                batches.append({"input_ids": ids, "labels": ids})
        return batches

    def _walk(self, generator: torch.Generator) -> torch.Tensor:
        task = self._task
        tokens = torch.empty(task.batch, task.seq, dtype=torch.long)
        tokens[:, 0] = torch.randint(self._vocab, (task.batch,), generator=generator)
        choices = torch.randint(4, (task.batch, task.seq), generator=generator)
        for place in range(1, task.seq):
            tokens[:, place] = self._successors[tokens[:, place - 1], choices[:, place]]
        return tokens


def tflops_megatron(parameters: int, tokens: int, seconds: float, recomputes: bool) -> float:
    """`billions * k * 2 * tokens / (seconds * 1e3)`, k = 4 with recomputation, else 3.

    Counts the recomputed pass as work, as the STRONGHOLD and DeepSpeed papers do.
    """
    return parameters / 1e9 * (4 if recomputes else 3) * 2 * tokens / (seconds * 1e3)


def tflops_useful(
    parameters: int, tokens: int, seconds: float, *, layers: int, hidden: int, seq: int
) -> float:
    """6 P T and causal attention's 6 l h s T; nothing for recomputation, whatever the method does.

    Attention: QK^T and AV are 4 s h per token and layer forward, half of it under a causal mask,
    three times that with backward.
    """
    attention = 6 * layers * hidden * seq * tokens
    return (6 * parameters * tokens + attention) / seconds / 1e12
