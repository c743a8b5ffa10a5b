"""A folder that stands for the model hub: tiny models and data sets under the names that tests use.

Owns the layout of the caches of huggingface_hub, datasets and evaluate, as far as these libraries
read them with HF_HUB_OFFLINE=1. A suite says which models and data sets it needs; nothing is
downloaded, and nothing of the named models is here but their names.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

REVISION = "0" * 40  # the commit of every model in the cache
MODULE_HASH = "0" * 64  # the hash of every metric's module


def environment(hub: Path) -> dict[str, str]:
    """Variables with which every Hugging Face library reads `hub`, and asks no server."""
    return {
        "HF_HOME": str(hub),
        "HF_HUB_CACHE": str(hub / "hub"),
        "HF_DATASETS_CACHE": str(hub / "datasets"),
        "HF_MODULES_CACHE": str(hub / "modules"),
        "HF_EVALUATE_CACHE": str(hub / "evaluate"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def snapshot(hub: Path, name: str, revision: str = REVISION, kind: str = "models") -> Path:
    """An empty folder for the files of a repository; `name` is "owner/name" or "name"."""
    repository = hub / "hub" / "--".join([kind, *name.split("/")])
    files = repository / "snapshots" / revision
    shutil.rmtree(repository, ignore_errors=True)
    files.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision, encoding="utf-8")
    return files


def add_model(
    hub: Path, name: str, model: Any, tokenizer: Any = None, revision: str = REVISION
) -> None:
    """Write a Transformers model, and its tokenizer if it has one."""
    files = snapshot(hub, name, revision)
    model.save_pretrained(files)
    if tokenizer is not None:
        tokenizer.save_pretrained(files)


def add_config(hub: Path, name: str, config: Any) -> None:
    """Write a configuration without weights."""
    config.save_pretrained(snapshot(hub, name))


def add_dataset(hub: Path, name: str, config: str, splits: Mapping[str, Any]) -> None:
    """Write a prepared data set, as `datasets.load_dataset(name, config)` finds it.

    splits  the rows of each split: a `datasets.Dataset`
    """
    from datasets import DatasetDict, DatasetInfo, SplitDict, SplitInfo
    from datasets.naming import camelcase_to_snakecase

    owner, _, short = name.rpartition("/")
    short = camelcase_to_snakecase(short)
    root = hub / "datasets" / (f"{owner}___{short}" if owner else short)
    shutil.rmtree(root, ignore_errors=True)
    folder = root / config / "0.0.0" / REVISION
    folder.mkdir(parents=True)
    described = SplitDict(dataset_name=short)
    for split, rows in DatasetDict(splits).items():
        _write_arrow(rows, folder / f"{short}-{split}.arrow")
        described[split] = SplitInfo(name=split, num_examples=len(rows), dataset_name=short)
    info = DatasetInfo(
        features=next(iter(splits.values())).features,
        splits=described,
        builder_name="parquet",
        dataset_name=short,
        config_name=config,
        version="0.0.0",
    )
    info.write_to_directory(str(folder))


def _write_arrow(rows: Any, path: Path) -> None:
    from datasets.arrow_writer import ArrowWriter

    with ArrowWriter(features=rows.features, path=str(path)) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()


def add_metric(hub: Path, name: str, source: Path) -> None:
    """Write the module of a metric, as `evaluate.load(name)` finds it in its cache."""
    modules = hub / "modules" / "evaluate_modules"
    folder = modules / "metrics" / f"evaluate-metric--{name}" / MODULE_HASH
    folder.mkdir(parents=True, exist_ok=True)
    for level in (folder, *folder.parents[:3]):
        (level / "__init__.py").touch()
    shutil.copy(source, folder / f"{name}.py")


def word_tokenizer(texts: Iterable[str], inputs: Sequence[str], lower: bool = False) -> Any:
    """A tokenizer of the words in `texts`, with BERT's special tokens.

    inputs  the arguments that the model takes: "input_ids", "attention_mask", ...
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    if lower:
        words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.train_from_iterator(
        texts, trainers.WordLevelTrainer(special_tokens=list(special.values()))
    )
    numbers = {word: words.token_to_id(word) for word in ("[SEP]", "[CLS]")}
    words.post_processor = processors.BertProcessing(
        ("[SEP]", numbers["[SEP]"]), ("[CLS]", numbers["[CLS]"])
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=128, model_input_names=list(inputs), **special
    )
