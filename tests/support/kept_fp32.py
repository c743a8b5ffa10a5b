"""A tiny model of every family of Transformers that keeps modules in fp32 where it loads in bf16.

`FAMILIES` has, by the folder of the family's code, how its model is made and what one batch is.
"""

from __future__ import annotations

import copy
import functools
import importlib
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING

from tests.support.mixed import of_family, token_batch
from tests.support.tiny import small
from tests.support.training import Batch, Factory

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
ONE = {**SIZES, "num_hidden_layers": 1}
FULL_HEADS = {**SIZES, "num_key_value_heads": 4, "head_dim": 8}
DENSE_THEN_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
IMAGE = {"depth": 1, "num_heads": 4, "image_size": 32, "patch_size": 8, "out_hidden_size": 32}
ROTATED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
Half = torch.bfloat16


def text_of(model_type: str, **own: Any) -> dict[str, Any]:
    """The small configuration of a text model that is a part of another."""
    return {**small(CONFIG_MAPPING[model_type], own, parts=True), "model_type": model_type}


def made(family: str, name: str, config: Any) -> nn.Module:
    """A model of class `name`. `config`: a configuration, or what the family's is made of."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    cls = getattr(module, name)
    return cls(cls.config_class(**config) if isinstance(config, dict) else config)


def loss_alone(model: nn.Module, loss: Callable[[Any], torch.Tensor]) -> nn.Module:
    """The model, which returns the loss alone, where its output has none."""
    forward = model.forward
    vars(model)["forward"] = lambda **batch: loss(forward(**batch))
    return model


# -- batches ---------------------------------------------------------------------------------------
def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _audio(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=_random(seed)).to(Half)


def ctc_batch(seed: int) -> Batch:
    labels = torch.randint(1, 60, (2, 3), generator=_random(seed))
    mask = torch.ones(2, 32, dtype=torch.long)
    return {
        "input_features": _audio(2, 32, 64, seed=seed),
        "attention_mask": mask,
        "labels": labels,
    }


def codes_batch(seed: int) -> Batch:
    tokens = token_batch(seed, rows=2)["labels"]
    codes = torch.randint(0, 16, (2, 9, 2), generator=_random(seed))
    return {"input_ids": torch.cat([tokens[..., None], codes], -1), "labels": tokens}


def spoken_batch(seed: int) -> Batch:
    """Two places of audio before the text."""
    tokens = token_batch(seed, rows=1)["labels"]
    tokens = torch.cat([torch.ones(1, 2, dtype=torch.long), tokens], 1)
    features = _audio(1, 8, 16, seed=seed)
    return {"input_ids": tokens, "labels": tokens, "input_features": features}


def latents_batch(seed: int) -> Batch:
    tokens = torch.tensor([[3, 4, 63, 61, 61, 61]] * 2)
    return {"input_ids": tokens, "labels": _audio(2, 3, 8, seed=seed)}


def pixels_batch(seed: int) -> Batch:
    return {"pixel_values": _audio(2, 3, 64, 64, seed=seed)}


def classes_batch(seed: int) -> Batch:
    tokens = token_batch(seed)["input_ids"]
    return {"input_ids": tokens, "labels": tokens % 2}


# -- models ----------------------------------------------------------------------------------------
def speaking(family: str, name: str, **more: Any) -> nn.Module:
    """Text to speech in latents."""
    flow = {"condition_dim": 32, "latent_dim": 8, "hidden_size": 16}
    tokens = {
        "vocab_size": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "audio_prompt_token_id": 60,
        "audio_latent_token_id": 61,
        "audio_bos_token_id": 63,
    }
    sizes = {**FULL_HEADS, "latent_dim": 8, "flow_head_config": flow}
    return made(family, name, {**sizes, **tokens, **more})


def transcribing() -> nn.Module:
    """Its audio tower is in fp32, and gets no gradient of text."""
    name = "Nemotron3_5TranscribeForConditionalGeneration"
    module = importlib.import_module(
        "transformers.models.nemotron3_5_transcribe.modeling_nemotron3_5_transcribe"
    )
    config = getattr(module, name).config_class
    heard = config().audio_config.diarization_config.to_dict()
    audio = {**ONE, "num_key_value_heads": 4}
    heard["audio_config"] = {
        **audio,
        "num_mel_bins": 16,
        "model_type": heard["audio_config"]["model_type"],
    }
    heard["head_config"] = {**heard["head_config"], "audio_hidden_size": 32, "hidden_size": 16}
    asr = {**audio, "num_mel_bins": 16, "model_type": "nemotron3_5_transcribe_asr_audio"}
    return made(
        "nemotron3_5_transcribe",
        name,
        {
            "audio_config": {
                "model_type": "nemotron3_5_transcribe_audio",
                "asr_config": asr,
                "diarization_config": heard,
            },
            "text_config": text_of("nemotron_h"),
            "word_timestamp_config": {
                **audio,
                "model_type": "nemotron3_5_transcribe_word_timestamp",
            },
            "audio_token_id": 63,
        },
    )


def seeing(family: str, name: str, **parts: dict[str, Any]) -> nn.Module:
    """A model of images and text, which gets text alone: what sees has no gradient."""
    config = CONFIG_MAPPING[family]
    return made(family, name, config(**small(config, parts, parts=True)))


def table_recognition() -> nn.Module:
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "mlp_dim": 48,
        "image_size": 64,
        "patch_size": 16,
        "output_channels": 16,
        "window_size": 2,
        "global_attn_indexes": [1],
        "model_type": "slanext_vision",
    }
    sizes = {"post_conv_in_channels": 16, "post_conv_out_channels": 32, "out_channels": 12}
    more = {"hidden_size": 32, "max_text_length": 4, "vision_config": vision}
    return made("slanext", "SLANeXtForTableRecognition", {**sizes, **more})


def heard_codes() -> nn.Module:
    codec = {
        "hidden_size": 16,
        "num_filters": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "codebook_size": 16,
        "codebook_dim": 8,
        "vector_quantization_hidden_dimension": 8,
        "num_quantizers": 2,
        "num_semantic_quantizers": 1,
        "upsampling_ratios": [2, 2],
        "upsample_groups": 16,
        "model_type": "mimi",
    }
    tokens = {"vocab_size": 64, "codebook_vocab_size": 17, "num_codebooks": 2, "pad_token_id": 0}
    audio = {"audio_bos_token_id": 16, "audio_pad_token_id": 63, "bos_token_id": 1}
    more = {"ffn_dim": 96, "max_position_embeddings": 64, "codec_config": codec}
    sizes = {**FULL_HEADS, **tokens, **audio, **more}
    return made("kyutai_speech_to_text", "KyutaiSpeechToTextForConditionalGeneration", sizes)


def hearing() -> nn.Module:
    audio = {**SIZES, "intermediate_size": 128, "num_mel_bins": 8, "max_source_positions": 8}
    parts = {
        "audio_config": {**audio, "model_type": "voxtral_encoder"},
        "text_config": text_of("llama"),
        "audio_token_id": 1,
    }
    return made("voxtral", "VoxtralForConditionalGeneration", parts)


def of_ctc() -> nn.Module:
    sizes = {**FULL_HEADS, "num_mel_bins": 16, "context_size": 8, "vocab_size": 64}
    encoder = {**sizes, "model_type": "granite_speech5_encoder"}
    return made(
        "granite_speech5", "GraniteSpeech5ForCTC", {"encoder_config": encoder, "vocab_size": 64}
    )


def of_classes() -> nn.Module:
    config = CONFIG_MAPPING["openai_privacy_filter"]
    name = "OpenAIPrivacyFilterForTokenClassification"
    return made("openai_privacy_filter", name, config(**small(config, {}, parts=True)))


def glm5_next() -> nn.Module:
    index = {"index_n_heads": 4, "index_head_dim": 8, "index_topk": 4, "index_kpool": 2}
    text = text_of(
        "glm5_next_text",
        num_key_value_heads=4,
        qk_rope_head_dim=0,
        qk_nope_head_dim=8,
        **{"layer_types": ["linear_attention", "full_attention"], **DENSE_THEN_SPARSE, **index},
        indexer_types=["full", "full"],
        linear_head_dim=8,
        linear_num_heads=4,
    )
    sizes = {"hidden_size": 32, "intermediate_size": 48, "projection_intermediate_size": 48}
    vision = {**IMAGE, **sizes, "model_type": "glm5_next_vision"}
    name = "Glm5NextForConditionalGeneration"
    return seeing("glm5_next", name, text_config=text, vision_config=vision)


def muse_spark() -> nn.Module:
    text = text_of(
        "muse_spark_text",
        moe_hidden_size=32,
        layer_types=["sliding_attention", "full_attention"],
        layer_rope_theta=[1e4, 0],
        mlp_layer_types=["sparse", "sparse"],
    )
    audio = {"out_hidden_size": 32, "hidden_sizes": [8] * 4, "depths": [1] * 4}
    tokens = {"image_token_id": 61, "video_token_id": 62, "audio_token_id": 63}
    vision = {**ONE, "layer_types": ["full_attention"], "model_type": "muse_spark_vision"}
    return made(
        "muse_spark",
        "MuseSparkForConditionalGeneration",
        {
            "text_config": text,
            "audio_config": {**audio, "model_type": "muse_spark_audio"},
            "vision_config": vision,
            "out_hidden_size": 32,
            "projector_hidden_size": 32,
            **tokens,
        },
    )


def mistral_large4() -> nn.Module:
    index = {"index_n_heads": 4, "index_head_dim": 8}
    text = text_of(
        "mistral_large4_text", num_key_value_heads=4, head_dim=4, **index, **DENSE_THEN_SPARSE
    )
    return seeing("mistral_large4", "MistralLarge4ForConditionalGeneration", text_config=text)


def glm4v_moe() -> nn.Module:
    text = text_of("glm4v_moe_text", rope_parameters={**ROTATED, "partial_rotary_factor": 1.0})
    return seeing("glm4v_moe", "Glm4vMoeForConditionalGeneration", text_config=text)


def ernie4_5_vl_moe() -> nn.Module:
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [16, 8]}
    text = text_of("ernie4_5_vl_moe_text", rope_parameters=ROTATED, **experts, **DENSE_THEN_SPARSE)
    return seeing("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration", text_config=text)


# -- all of them -----------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Family:
    """`make` gives the model in fp32, or names a causal family of `tiny`. `mixed`: some parameters
    stay fp32; else buffers alone."""

    make: Callable[[], nn.Module] | str
    mixed: bool
    batch: Callable[[int], Batch] = token_batch
    loss: Callable[[Any], torch.Tensor] | None = field(default=None)


def _causal(*names: str, mixed: bool) -> dict[str, Family]:
    return {name.removesuffix("_text"): Family(make=name, mixed=mixed) for name in names}


FAMILIES: dict[str, Family] = {
    **_causal("bailing_hybrid", "beam", "deepseek_v4", "ernie4_5_moe", "flint", mixed=True),
    **_causal("hy_v4", "inkling_text", "inkling2_text", mixed=True),
    **_causal("axk1", "axk2", "deepseek_v3", "deepseek_v32", "dots1", mixed=False),
    **_causal("dots3_note_text", "exaone_moe", "glm4_moe", "glm4_moe_lite", mixed=False),
    **_causal("glm_moe_dsa", "hy_v3", "kolibri1", "mimo_v2_flash", "nemotron_h", mixed=False),
    **_causal("solar_open", mixed=False),
    "ernie4_5_vl_moe": Family(make=ernie4_5_vl_moe, mixed=True),
    "glm4v_moe": Family(make=glm4v_moe, mixed=False),
    "glm5_next": Family(make=glm5_next, mixed=True),
    "gradium_phonon_tts": Family(
        make=functools.partial(
            speaking,
            "gradium_phonon_tts",
            "GradiumPhononTTSForConditionalGeneration",
            audio_prompt_dim=8,
            duration_delta_embedding_dim=8,
        ),
        mixed=False,
        batch=latents_batch,
    ),
    "granite_speech5": Family(make=of_ctc, mixed=True, batch=ctc_batch),
    "kyutai_speech_to_text": Family(make=heard_codes, mixed=True, batch=codes_batch),
    "mistral_large4": Family(make=mistral_large4, mixed=True),
    "muse_spark": Family(make=muse_spark, mixed=True),
    "nemotron3_5_transcribe": Family(make=transcribing, mixed=True),
    "openai_privacy_filter": Family(make=of_classes, mixed=True, batch=classes_batch),
    "pocket_tts": Family(
        make=functools.partial(
            speaking,
            "pocket_tts",
            "PocketTTSForConditionalGeneration",
            audio_prompt_bos_token_id=62,
        ),
        mixed=False,
        batch=latents_batch,
    ),
    "slanext": Family(
        make=table_recognition,
        mixed=True,
        batch=pixels_batch,
        loss=lambda output: output.last_hidden_state.float().square().mean(),
    ),
    "voxtral": Family(make=hearing, mixed=True, batch=spoken_batch),
}
# Why a family is not among them.
UNTRIED = {"esmfold2": "it gives no loss, and its batch is a structure that its processor makes"}


def strict_folders() -> set[str]:
    """The folders whose code names modules that stay in fp32 in a bf16 model, too."""
    root = Path(transformers.__file__).parent / "models"
    named = re.compile(r"_keep_in_fp32_modules_strict = \[[^\]]*\"")
    return {
        path.parent.name
        for path in root.glob("*/modeling_*.py")
        if named.search(path.read_text(encoding="utf-8"))
    }


@functools.cache
def _loaded(name: str) -> nn.Module:
    make = FAMILIES[name].make
    assert not isinstance(make, str)
    with torch.random.fork_rng(), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model: Any = make()
        model.save_pretrained(folder)
        loaded: nn.Module = type(model).from_pretrained(folder, dtype=Half).train()
        return loaded


def factory_of(name: str) -> Factory:
    """As `from_pretrained` loads the family's model in bf16."""
    family = FAMILIES[name]
    if isinstance(family.make, str):
        return of_family(family.make)

    def factory() -> Any:
        model = copy.deepcopy(_loaded(name))
        return loss_alone(model, family.loss) if family.loss else model, family.batch

    return factory
