"""Laws of `stronghold export --merge`: the merged model is PEFT's to the bit, with its names, and
no more than one layer of it is in memory."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import stronghold
from stronghold.errors import CheckpointError, ConfigError
from stronghold.tools import merge
from stronghold.tools.cli import main
from tests.models.families import llama_of
from tests.support.stored_weights import fp8_settings, fp8_tensors, mxfp4_tensors, rewrite

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 61
ONE_SHARD = 1 << 30
FP8_BLOCK = (4, 4)
SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
}


def llama(**options: Any) -> nn.Module:
    return llama_of(24, 52, 3, 2, 1, VOCABULARY, **options)


def gpt_oss(**options: Any) -> nn.Module:
    return GptOssForCausalLM(GptOssConfig(num_local_experts=4, **{**SHAPE, **options}))


def qwen3_moe() -> nn.Module:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=4, moe_intermediate_size=16, **SHAPE))


def lora(*targets: str, **options: Any) -> Any:
    names: Any = list(targets) or "all-linear"
    settings = {"target_modules": names, "init_lora_weights": False, **options}
    return peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=5, **settings)


def experts() -> Any:
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return lora("q_proj", target_parameters=parameters)


TIED = functools.partial(llama, tie_word_embeddings=True)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "all linears": (llama, lora),
    "rslora": (llama, functools.partial(lora, "q_proj", "down_proj", use_rslora=True)),
    "dora": (llama, functools.partial(lora, "q_proj", use_dora=True)),
    "embedding": (llama, functools.partial(lora, "embed_tokens", "v_proj")),
    "head and norms": (
        llama,
        functools.partial(lora, "v_proj", modules_to_save=["lm_head", "input_layernorm"]),
    ),
    "tied": (TIED, lora),
    "tied, embedding": (TIED, functools.partial(lora, "embed_tokens")),
    "tied, head kept": (TIED, functools.partial(lora, "v_proj", modules_to_save=["lm_head"])),
    "trained tokens": (TIED, functools.partial(lora, "v_proj", trainable_token_indices=[1, 5])),
    "gpt-oss": (gpt_oss, experts),
    "gpt-oss, attention alone": (gpt_oss, lora),
    "qwen3-moe": (qwen3_moe, experts),
    "loha": (llama, lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"], init_weights=False)),
    "ia3": (
        llama,
        lambda: peft.IA3Config(
            target_modules=["k_proj", "down_proj"],
            feedforward_modules=["down_proj"],
            init_ia3_weights=False,
        ),
    ),
}


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Directories of a base and of adapters on it, whose values are no initial ones."""

    def save(
        make: Callable[[], nn.Module], settings: Any, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[Path, Path]:
        torch.manual_seed(0)
        make().to(dtype).save_pretrained(tmp_path / "base", max_shard_size="6KB")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
        model = peft.get_peft_model(base, settings)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / "adapters")
        return tmp_path / "base", tmp_path / "adapters"

    return save


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    names = [name for file in files for name in file]
    assert len(set(names)) == len(names)
    return {name: value for file in files for name, value in file.items()}


def merged_by_peft(base: Path, adapters: Path, out: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    whole = peft.PeftModel.from_pretrained(model, adapters).merge_and_unload()
    whole.save_pretrained(out)
    return tensors(out)


def merged_from_decoded(base: Path, adapters: Path, out: Path) -> dict[str, torch.Tensor]:
    """As `merged_by_peft`. Transformers would quantise such a model again when it is saved. So a
    model that was never quantised saves the values."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    whole = peft.PeftModel.from_pretrained(model, adapters).merge_and_unload()
    config = AutoConfig.from_pretrained(base)
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(whole.state_dict())
    plain.save_pretrained(out)
    return tensors(out)


DAILY = ("all linears", "dora", "tied, head kept", "qwen3-moe")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(
            *(case, dtype),
            marks=() if case in DAILY and dtype is torch.bfloat16 else pytest.mark.slow,
            id=f"{case}, {dtype}",
        )
        for case in CASES
        for dtype in (torch.bfloat16, torch.float32)
    ],
)
def test_the_merged_model_is_the_one_that_peft_merges(
    case: str, dtype: torch.dtype, saved: Any, tmp_path: Path
) -> None:
    make, settings = CASES[case]
    base, adapters = saved(make, settings(), dtype)
    files = merge.export_merged(adapters, tmp_path / "out", max_shard_bytes=6_000, model_dir=base)
    assert tmp_path / "out" / "model.safetensors.index.json" in files
    merged = tensors(tmp_path / "out")
    expected = merged_by_peft(base, adapters, tmp_path / "whole")
    assert merged.keys() == expected.keys()
    for name, value in merged.items():
        assert value.dtype is expected[name].dtype, name
        assert torch.equal(value, expected[name]), name
    untrained = tensors(base)
    assert any(not torch.equal(value, merged[name]) for name, value in untrained.items())
    described, whole = (
        json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("out", "whole")
    )
    assert described["dtype"] == whole["dtype"]
    assert described.get("tie_word_embeddings") == whole.get("tie_word_embeddings")


@pytest.mark.parametrize(
    "make", [llama, pytest.param(qwen3_moe, marks=pytest.mark.slow)], ids=["llama", "qwen3-moe"]
)
def test_a_base_in_fp8_is_decoded_and_merged(
    make: Callable[[], nn.Module], saved: Any, tmp_path: Path
) -> None:
    """Adapters that were trained on the base as Transformers decodes it."""
    base, adapters = saved(make, experts() if make is qwen3_moe else lora())
    stored = fp8_tensors(tensors(base), FP8_BLOCK, ("embed", "lm_head", "mlp.gate."))
    for path in base.glob("*.safetensors*"):
        path.unlink()
    rewrite(base, stored, fp8_settings(FP8_BLOCK))
    merge.export_merged(adapters, tmp_path / "out", max_shard_bytes=6_000, model_dir=base)
    merged = tensors(tmp_path / "out")
    expected = merged_from_decoded(base, adapters, tmp_path / "whole")
    assert merged.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in merged.items())
    assert not any("scale" in name for name in merged)
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in described


@pytest.mark.slow
def test_a_base_in_mxfp4_is_decoded_and_merged(saved: Any, tmp_path: Path) -> None:
    """gpt-oss as it is published: its experts are adapted, too."""
    base, adapters = saved(
        functools.partial(gpt_oss, hidden_size=32, intermediate_size=32), experts()
    )
    stored = mxfp4_tensors(tensors(base))
    for path in base.glob("*.safetensors*"):
        path.unlink()
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    rewrite(base, stored, settings)
    merge.export_merged(adapters, tmp_path / "out", max_shard_bytes=6_000, model_dir=base)
    merged = tensors(tmp_path / "out")
    expected = merged_from_decoded(base, adapters, tmp_path / "whole")
    assert merged.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in merged.items())


def test_the_merged_model_opens_and_computes_as_peft(saved: Any, tmp_path: Path) -> None:
    base, adapters = saved(qwen3_moe, experts())
    command = ["export", "--merge", adapters, tmp_path / "out", "--model-dir", base]
    assert main([*map(str, command), "--max-shard-size", "6kB"]) == 0
    tokens = torch.arange(12).view(1, 12)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    expected = peft.PeftModel.from_pretrained(whole, adapters).merge_and_unload()(tokens).logits
    for opened in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16),
        stronghold.initialize(
            model=stronghold.from_pretrained(tmp_path / "out"),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "stronghold": {"device": "emulated", "window": 1},
            },
        )[0],
    ):
        with torch.no_grad():
            assert torch.equal(opened(tokens).logits, expected)
    opened.destroy()


# --- memory ---------------------------------------------------------------------------------------


def status(key: str) -> int:
    """A size of /proc/self/status, in bytes: VmRSS is resident memory, VmHWM its peak."""
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{key}:")
    ]
    return int(line.split()[1]) * 1024


def measure(folder: str) -> None:
    """In a process of its own: print the growth of resident memory while a model is merged."""
    torch.set_num_threads(1)
    work = Path(folder)
    make = functools.partial(llama_of, 512, 1536, 16, 8, 8, VOCABULARY)
    make().bfloat16().save_pretrained(work / "base")
    with torch.device("meta"):
        model = peft.get_peft_model(make().bfloat16(), lora())
    adapters = {
        name: torch.randn(value.shape) * 0.01
        for name, value in peft.get_peft_model_state_dict(model).items()
    }
    model.save_pretrained(work / "adapters", state_dict=with_adapter(adapters))
    whole = 2 * sum(p.numel() for name, p in model.named_parameters() if "lora" not in name)
    merge.export_merged(
        work / "adapters", work / "first", max_shard_bytes=ONE_SHARD, model_dir=work / "base"
    )  # imports and caches
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status("VmRSS")
    merge.export_merged(
        work / "adapters", work / "out", max_shard_bytes=ONE_SHARD, model_dir=work / "base"
    )
    print(json.dumps({"grown": status("VmHWM") - before, "whole": whole, "layers": 16}))


def with_adapter(tensors_of_file: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names that a state dict has for the names of a file of adapters."""
    return {
        name.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default."): value
        for name, value in tensors_of_file.items()
    }


@pytest.mark.slow
def test_no_more_than_one_layer_is_in_memory(tmp_path: Path) -> None:
    """A layer, the fp32 product of one adapter, and the pieces that are written."""
    code = "import sys; from tests.tools.test_merge import measure; measure(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    layer = found["whole"] / found["layers"]
    assert found["whole"] > 90e6
    assert found["grown"] < 2 * layer + 8e6, found


# --- what is refused ------------------------------------------------------------------------------


def refused(match: str, adapters: Path, out: Path, **options: Any) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=match):
        merge.export_merged(adapters, out, max_shard_bytes=ONE_SHARD, **options)
    assert not out.exists()


def test_adapters_and_bases_that_do_not_fit_are_refused(saved: Any, tmp_path: Path) -> None:
    base, adapters = saved(llama, lora("q_proj"))
    out = tmp_path / "out"
    refused("has no adapter_config.json", base, out)
    described = json.loads((adapters / "adapter_config.json").read_text())
    (adapters / "adapter_config.json").write_text(
        json.dumps({**described, "base_model_name_or_path": "owner/model"})
    )
    refused(r"'owner/model', which is no directory here.*--model-dir", adapters, out)
    torch.manual_seed(0)
    llama_of(32, 52, 3, 2, 1, VOCABULARY).save_pretrained(tmp_path / "wider")
    refused("size mismatch", adapters, out, model_dir=tmp_path / "wider")
    llama_of(24, 52, 3, 2, 1, VOCABULARY).save_pretrained(tmp_path / "quantised")
    file = tmp_path / "quantised" / "config.json"
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantised}))
    refused(
        "its weights are quantised as 'bitsandbytes', and a merge adds",
        adapters,
        out,
        model_dir=tmp_path / "quantised",
    )
    (adapters / "adapter_config.json").write_text("[]")
    refused("cannot be read as a JSON object", adapters, out)
    (adapters / "adapter_config.json").unlink()
    (adapters / "adapter_model.safetensors").unlink()
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, prompt).save_pretrained(adapters)
    refused("learns a prompt", adapters, out, model_dir=base)


def test_options_of_checkpoints_do_not_belong_to_a_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export", "--merge", str(tmp_path), str(tmp_path / "out")]
    assert main([*command, "--tag", "last"]) == 2
    assert "--tag: is of checkpoints" in capsys.readouterr().err
