"""Tiny models of the families of the installed Transformers, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

# Given to a family's configuration, and to its parts', where they have the name.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim"), 32),
    **dict.fromkeys(("encoder_hidden_size", "out_hidden_size", "image_size"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "depth"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 4),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_head_dim", "patch_size"), 8),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("entity_vocab_size", "vocab_size_per_layer_input", "codebook_size"), 64),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "bos_token_id"), 1),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "eos_token_id"), 2),
    "hidden_size_per_layer_input": 8,
    "pad_token_id": 0,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
LATENT = {"num_key_value_heads": 4}  # as many as heads
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), LATENT),
    "axk1": {**LATENT, "head_dim": 4},
    "deepseek_v3": {**LATENT, "head_dim": 4},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}},
    "dots3_note_text": {"num_key_value_heads": 4},
    "longcat_flash": {**LATENT, "head_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": MAMBA,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [8, 8],
        "attn_layers": ["local", "lsh"],
    },
    "roc_bert": {"is_decoder": True, "pronunciation_vocab_size": 64, "shape_vocab_size": 64},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
LARGEST = 5_000_000  # parameters


def small(cls: Any, own: dict[str, Any], *, parts: bool) -> dict[str, Any]:
    default = cls()
    names = {*default.to_dict(), *cls.attribute_map}
    made = {name: value for name, value in SMALL.items() if name in names}
    for name in cls.sub_configs if parts else ():
        part = getattr(default, name, None)
        if part is not None:
            made[name] = {**small(type(part), {}, parts=True), "model_type": part.model_type}
    return made | own


def tiny(family: str) -> Any:
    """None for a family that these sizes do not fit."""
    cls = CONFIG_MAPPING[family]
    for parts in (True, False):
        try:
            config = cls(**small(cls, OWN.get(family, {}), parts=parts))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            if sum(p.numel() for p in model.parameters()) < LARGEST:
                return AutoModelForCausalLM.from_config(config)
        except Exception:  # a configuration's, or a constructor's: any
            continue
    return None
