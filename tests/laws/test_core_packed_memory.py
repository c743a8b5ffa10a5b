"""Bases that RAM does not hold in 16 bits, on the room of one rank: Transformers packs or maps them
while it loads them, and some of their weights lie in files. Each measurement has a process."""

from __future__ import annotations

import gc
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.laws.test_checkpoint_memory import grown, in_a_process, status

HIDDEN, STEPS = 1024, 3
TINY: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 64, "num_experts": 2}


def save(folder: Path) -> None:
    """Some 400 MiB in bf16: 8 blocks, with fused experts of 32 and 16 MiB."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        moe_intermediate_size=HIDDEN // 2,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=2,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="64MB")


def adapted(model: Any) -> Any:
    import peft

    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model.requires_grad_(False), settings).train()


def measured(work: Path, times: int, is_packed: int) -> dict[str, int]:
    """Bytes of the model in bf16, of its largest fused weight, of the budget and of the plan; and
    how far the process's own memory rises while the model is loaded, and while the room takes it
    over. Then it trains. The model's files are `work / "model"`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from stronghold.model.loading import MappedConfig, NF4Config
    from tests.support.core import Core

    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(work / "model")
    with torch.device("meta"):
        shapes = list(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).parameters())
    adapted(AutoModelForCausalLM.from_config(type(config)(**TINY)))  # imports
    num_bytes = sum(p.nbytes for p in shapes)
    budget = num_bytes // times
    kept: dict[str, Any] = {}

    def load() -> None:
        kept["model"] = adapted(
            AutoModelForCausalLM.from_pretrained(
                work / "model",
                dtype=torch.bfloat16,
                experts_implementation="eager",
                quantization_config=NF4Config() if is_packed else MappedConfig(str(work)),
            )
        )

    def take_over() -> None:
        kept["core"] = Core(
            kept["model"],
            precision="bf16",
            dtypes="own",
            folders=[work],
            host_budget_bytes=budget,
            piece_bytes=2 << 20,
            window=1,
            activations="recompute",
        )

    gc.collect()
    before = status("RssAnon")
    loading = grown(load)
    loaded = status("RssAnon") - before
    taking_over = loaded + grown(take_over)
    taken_over = status("RssAnon") - before
    core = kept["core"]
    batch = {"input_ids": torch.arange(64).view(1, -1), "labels": torch.arange(64).view(1, -1)}
    losses = []
    for _ in range(STEPS):
        losses.append(core.trainer.forward(**batch).loss)
        core.trainer.backward(losses[-1])
        core.trainer.step()
    core.close()
    assert losses[-1] < losses[0]
    return {
        "model": num_bytes,
        "largest": max(p.nbytes for p in shapes),
        "budget": budget,
        "loading": loading,
        "loaded": loaded,
        "taking over": taking_over,
        "taken over": taken_over,
        "plan": core.plan.host_total_bytes,
        "files": sum(core.plan.nvme_bytes.values()),
        "device": sum(core.plan.gpu_bytes.values()),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("times", "is_packed"), [(4, 1), (2, 0)])
def test_a_model_larger_than_the_budget_is_loaded_taken_over_and_trained(
    times: int, is_packed: int, tmp_path: Path
) -> None:
    """The budget holds a fourth of the model in bf16, or the half."""
    process = multiprocessing.get_context("spawn").Process(target=save, args=(tmp_path / "model",))
    process.start()
    process.join()
    found = in_a_process(measured, tmp_path, times, is_packed)
    assert found["plan"] <= found["budget"]
    assert found["files"] > 0
    assert found["loading"] < found["plan"] + 3 * found["largest"]
    # The emulated device has its memory in RAM, too.
    plan = found["plan"] + found["device"]
    assert found["taking over"] < plan + 3 * found["largest"]
    assert found["taken over"] < plan + found["largest"] / 4
    assert not [path for path in tmp_path.iterdir() if path.name != "model"]
