"""The DeepSpeed config that runs a plan as it was estimated."""

from __future__ import annotations

from collections import Counter
from typing import Any

from stronghold.optim import examples
from stronghold.optim.states import EXACT
from stronghold.plan.plan import Plan
from stronghold.tools.estimate.question import Question


def config_of(question: Question, plan: Plan) -> dict[str, Any]:
    """The config with every choice of `plan` pinned.

    It runs with `stronghold.initialize`, DeepSpeed's launcher or a trainer.
    """
    blocks = question.model.layout.streamed
    kept = len(plan.resident.intersection(blocks))
    section: dict[str, Any] = {} if question.states == EXACT else {"states": question.states}
    adapters = question.model.adapters
    if adapters is not None and adapters.frozen is not None:
        section["frozen"] = adapters.frozen
    section |= {
        # the key counts no activations
        "gpu_memory": question.gpu_bytes - plan.activation_bytes,
        "host_memory": question.host_bytes // question.gpus,
        "resident_layers": "all" if kept == len(blocks) else kept,
        "resident_updates": "gpu" if plan.updated_on_gpu else "host",
    }
    if kept < len(blocks):
        section["window"] = plan.window
    # in the blocks' order
    counts = Counter(plan.activations[index] for index in blocks)
    section["activations"] = dict(counts) if len(counts) > 1 else next(iter(counts), "keep")
    if plan.demand.chunk is not None:
        section["chunk"] = question.chunk
    section["early_layers"] = len(plan.early)
    if question.nvme_bytes and plan.nvme_bytes:
        path = question.machine.nvme_path or "/path/to/nvme"
        section["nvme"] = {"path": path, "capacity": question.nvme_bytes}
    config: dict[str, Any] = {
        "_plan": f"stronghold plan: {question.model.name}; {question.machine.name}; "
        f"{question.seq} tokens per sequence",
        "train_micro_batch_size_per_gpu": question.batch,
        "gradient_accumulation_steps": question.accumulation,
        "gradient_clipping": question.clipping,
    }
    if question.dtype != "fp32":
        config[question.dtype] = {"enabled": True}
    config["optimizer"] = dict(examples()[question.optimizer])
    return config | {"stronghold": section}
