"""Where the installed accelerate and transformers touch DeepSpeed's engine and its optimizer."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

# Under these names the engine, or its optimizer, goes through a file; `model` is the engine in the
# functions that are listed, and the raw model elsewhere.
ENGINE_NAMES = {
    "engine",
    "self.engine",
    "self.deepspeed_engine_wrapped.engine",
    "deepspeed_engine",
    "self.deepspeed",
    "self.model_wrapped",
}
MODEL_IS_ENGINE = {
    "accelerate/accelerator.py": {"no_sync", "save_state", "load_state", "get_state_dict"}
    | {"save_model"},
    "accelerate/utils/other.py": {"extract_model_from_parallel"},
    "transformers/trainer.py": {"_inner_training_loop", "_run_epoch", "training_step"}
    | {"_clip_grad_norm", "_get_grad_norm", "_has_mixed_mesh_grads", "_mixed_mesh_grad_norm"}
    | {"evaluation_loop"},
    "transformers/trainer_pt_utils.py": {"get_model_param_count"},
    "transformers/integrations/deepspeed.py": set(),
    "accelerate/utils/deepspeed.py": set(),
}
OPTIMIZER_FILES = {
    "accelerate/optimizer.py",
    "accelerate/utils/deepspeed.py",
    "transformers/trainer.py",
}
Use = tuple[str, str]  # member, "file:function"


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def accesses(tree: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, str, str]]:
    """(function, receiver, member) of every attribute, also through getattr and hasattr."""
    for node in ast.iter_child_nodes(tree):
        scope = inside
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            scope = (*inside, node.name)
        if isinstance(node, ast.Attribute):
            yield ".".join(scope), dotted(node.value), node.attr
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr"):
            receiver, member, *_ = node.args
            if isinstance(member, ast.Constant):
                yield ".".join(scope), dotted(receiver), str(member.value)
        yield from accesses(node, scope)


def source_root(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    return Path(spec.submodule_search_locations[0]).parent


def uses_of_engine() -> set[Use]:
    found = set()
    for file, functions in MODEL_IS_ENGINE.items():
        tree = ast.parse((source_root(file.split("/")[0]) / file).read_text(encoding="utf-8"))
        for function, receiver, member in accesses(tree):
            is_model = receiver == "model" and function.split(".")[-1] in functions
            if is_model or receiver in ENGINE_NAMES:
                found.add((member, f"{file}:{function}"))
    return found


def uses_of_optimizer() -> set[Use]:
    found = set()
    for file in OPTIMIZER_FILES:
        tree = ast.parse((source_root(file.split("/")[0]) / file).read_text(encoding="utf-8"))
        for function, receiver, member in accesses(tree):
            if receiver == "self.optimizer":
                found.add((member, f"{file}:{function}"))
    return found
