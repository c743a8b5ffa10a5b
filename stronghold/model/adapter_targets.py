"""The modules and parameters on which LoRA is put, by the ends of their names.

Pure: it reads names, and imports no PEFT.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from stronghold.errors import ConfigError

EVERY_LINEAR = "all-linear"  # PEFT's word for all linear modules but the head
NUM_SHOWN = 12  # names in an error


def split_targets(
    names: Sequence[str] | None, model: nn.Module
) -> tuple[list[str] | str, list[str] | None]:
    """PEFT's `target_modules` and `target_parameters` for the option `--lora-targets`.

    names  ends of full names, in whole steps: "q_proj", "mlp.experts.gate_up_proj". None: all
           linear modules but the head

    A name is a module's if a module without children has it, and otherwise a parameter's. Raises
    ConfigError for a name that neither has.
    """
    if names is None:
        return EVERY_LINEAR, None
    leaves = [name for name, module in model.named_modules() if not list(module.children())]
    tensors = [name for name, _ in model.named_parameters()]
    modules: list[str] = []
    parameters: list[str] = []
    for target in names:
        if _is_end(target, leaves):
            modules.append(target)
        elif _is_end(target, tensors):
            parameters.append(target)
        else:
            ends = sorted({name.rpartition(".")[2] for name in leaves})
            raise ConfigError(
                f"--lora-targets: got {target!r}, which is the end of no module's name and of no "
                f"parameter's; modules end with {', '.join(ends[:NUM_SHOWN])}"
            )
    return modules, parameters or None


def _is_end(target: str, names: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)
