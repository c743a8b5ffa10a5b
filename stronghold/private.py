"""Names of other packages that stronghold replaces (monkey patches), or uses though private.

Owns the table below, `Replacements`, and the functions around private names that several files
share. A test fails when a file uses a private name that the table does not have. Changes nothing on
disk. The training thread enters, and autograd's thread in backward.

[Note: names]

Replaced, while the plugin is enabled (`plugin`):
1. deepspeed.initialize, deepspeed.zero.Init.__init__, deepspeed.utils.zero_to_fp32: a config with
   the section gets this engine, an unpartitioned model, and a reader of its checkpoints.
2. accelerate: HfDeepSpeedConfig.set_stage_and_offload, Accelerator.get_state_dict,
   PartialState.__init__: stage 3 partitions nothing, a save copies nothing, CPUs use gloo.
Replaced, while an engine lives:
3. nn.Parameter.data, set_ and device (`train.visible`): torch does not count writes through
   `.data`; `p.set_(p)` is no write; a parameter outside of the blocks says where it computes.
4. nn.Module.zero_grad, Optimizer.zero_grad, nn.utils.clip_grad._clip_grads_with_norm_
   (`train.fragments`): gradients wait on the host. They are thrown away with the program's, and
   clipping by hand is refused.
5. F.scaled_dot_product_attention (`train.activations`): its results are kept for a second run.
6. bitsandbytes' and torchao's autograd Functions, Params4bit.to, Int8Params.to,
   _convert_weight_packed_for_cpu (`train.quantised`): weights pass saved-tensor hooks.
Replaced, during one call, on tensors without memory:
7. F.multi_head_attention_forward's attention (`model.operators`); torch.autocast, which refuses
   the meta device (`tools.estimate.model`).

Written on the program's objects, while an engine lives:
8. Parameter.__class__: a hidden parameter waits for its values. _hp_mapping, get_full_hp_param and
   the like: DeepSpeed's safe_get_full_fp32_param looks for them.
9. Module.forward; Transformers' _loss_function: blocks, and the head in parts.
10. Module._parameters, _buffers, _modules: a chunk sees views; PEFT's modules take weights out.
11. _compiled_call_impl: the engine's call stands around a compiled block's. _orig_mod and
    OptimizedModule tell that a whole model is compiled.
12. _forward_hooks, _forward_pre_hooks, _backward_hooks, _backward_pre_hooks,
    _post_accumulate_grad_hooks, and torch.nn.modules.module's _global_backward_hooks,
    _global_backward_pre_hooks: chunks join or refuse what hooks see, the engine's hook on a
    gradient runs last, and a head with hooks on its gradient gives real logits.
13. Optimizer._opt_called: torch's schedules warn where no optimizer has stepped.

Used:
14. torch._C._current_graph_task_id, _current_autograd_node, _will_engine_execute_node,
    Variable._execution_engine: which backward runs, whether it trains a parameter, its end.
15. torch._C._autograd._top_saved_tensors_default_hooks, _pop_saved_tensors_default_hooks: the
    program's hooks are called inside ours, and Ctrl-C can skip an exit.
16. torch._C._functorch: torch.func refuses hooks for saved tensors in the middle of a block.
17. torch.utils._python_dispatch, torch._C._disabled_torch_function_impl, _make_wrapper_subclass,
    aten._to_copy, OpOverload._schema: modes and subclasses below autograd.
18. torch.utils._pytree: tensors in nested arguments, also in Transformers' outputs.
19. Tensor._version, torch._C._storage_Use_Count, UntypedStorage._cdata, dlpack: writes and aliases.
    `untyped_storage()` of one memory is one Python object. _indices and _values of a sparse tensor
    that may hold an index twice.
20. torch._C._nn's and aten's attention kernels (_scaled_dot_product_flash_attention,
    _scaled_dot_product_efficient_attention, ...), _grouped_mm, _unsafe_view: their FLOPs and bytes.
21. torch._C._cuda_getCurrentRawStream: `torch.cuda.current_stream` makes an object at each call.
    torch.distributed.distributed_c10d._get_default_store: a rank that fails says why there.
22. _save_to_state_dict, _non_persistent_buffers_set, _register_state_dict_hook,
    _state_dict_pre_hooks: what a state dict holds. numpy._core.multiarray._reconstruct: generator
    states in checkpoints. DeepSpeedConfig._configure_train_batch_size: ranks may not have met when
    the config is read. Transformers' PreTrainedModel._from_config, and its classes' names, since
    it need not be installed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]
Hooks = tuple[Pack, Unpack]

# The oldest and the newest version of each package with which the tests have passed.
TRIED = {
    "torch": ("2.13.0", "2.13.0"),
    "deepspeed": ("0.19.6", "0.19.8"),
    "transformers": ("5.20.2", "5.24.0"),
    "accelerate": ("1.14.0", "1.15.0"),
    "numpy": ("2.4.6", "2.4.6"),
    "bitsandbytes": ("0.50.2", "0.50.2"),
    "torchao": ("0.18.0", "0.18.0"),
}

logger = logging.getLogger("stronghold")

# -- autograd -------------------------------------------------------------------------------------
NO_BACKWARD = -1
# Returns the number of the backward that runs on this thread, NO_BACKWARD outside of one.
backward_number: Callable[[], int] = torch._C._current_graph_task_id
# Returns the node of the graph that autograd runs on this thread.
running_node: Callable[[], Any] = torch._C._current_autograd_node
# True if the running backward will execute a node. RuntimeError for a leaf of torch.autograd.grad.
will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
# Context manager: inside, no `__torch_function__` of a subclass is called.
without_torch_function: Callable[[], AbstractContextManager[None]] = (
    torch._C.DisableTorchFunctionSubclass
)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward has ended. Raises RuntimeError outside of one."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_transformed() -> bool:
    """True inside torch.func's grad, vjp, jacrev, hessian and vmap (function transforms)."""
    return torch._C._functorch.maybe_current_level() is not None


def saved_tensor_hooks() -> Hooks | None:
    """Return the innermost pair of saved-tensor hooks of this thread. None without one."""
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def pop_saved_tensor_hooks_above(outer: Hooks | None) -> None:
    """Remove the pairs of this thread inside of `outer`. None: all. An interrupt may come in a
    context manager between the push of a pair and its pop."""
    while saved_tensor_hooks() not in (None, outer):
        torch._C._autograd._pop_saved_tensors_default_hooks()


# -- tensors and modules --------------------------------------------------------------------------
def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory, in a new storage of exactly its bytes.

    References to it are counted apart, and `torch.save` saves no more. `tensor` is contiguous and
    needs no gradient. Its storage lives as long as the result's.
    """
    view: torch.Tensor = from_dlpack(to_dlpack(tensor))
    return view


def hooks_after_gradient(parameter: torch.Tensor) -> dict[int, Any]:
    """Return the hooks of `register_post_accumulate_grad_hook` by number.

    Autograd calls them in the order of the dict. An entry that is taken out and put back is called
    last.
    """
    hooks: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return {} if hooks is None else hooks


def has_gradient_hooks(module: nn.Module) -> bool:
    """True with a hook of `register_full_backward_hook` or `register_full_backward_pre_hook`."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


# -- replacements ---------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class _Replaced:
    """A name that was replaced. `is_inherited`: the owner had the name from a base class."""

    original: Any
    replacement: Any
    is_inherited: bool


class Replacements:
    """Names of other packages that are replaced in this process. Start with none."""

    def __init__(self) -> None:
        self._replaced: dict[tuple[Any, str], _Replaced] = {}

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by what `make(original)` returns. Does nothing to a name that is
        replaced already: another wrapper around ours would be wrapped again, in a circle."""
        if (owner, name) in self._replaced:
            return
        original = getattr(owner, name)
        replacement = make(original)
        is_inherited = name not in vars(owner)
        self._replaced[owner, name] = _Replaced(
            original=original, replacement=replacement, is_inherited=is_inherited
        )
        setattr(owner, name, replacement)

    def wrap(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Replace the function `owner.name` by one that returns `call(original, *args, **kwargs)`.
        Does nothing to a name that is replaced already."""
        self.put(owner, name, functools.partial(_wrapper, call))

    def undo(self) -> None:
        """Put the originals back.

        Another package may have put a wrapper around a replacement. Then both stay, and the
        replacement calls the original.
        """
        for (owner, name), replaced in list(self._replaced.items()):
            if getattr(owner, name) is not replaced.replacement:
                continue
            if replaced.is_inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, replaced.original)
            del self._replaced[owner, name]


def _wrapper(call: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function. A class binds it to its instances, as it does with `original`."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    return replacement


# -- versions -------------------------------------------------------------------------------------
@functools.cache
def report_untried() -> None:
    """Log one line, once in this process, if an imported package has an untried version. Such a
    release may work."""
    untried = untried_versions(filter(sys.modules.__contains__, TRIED), importlib.metadata.version)
    if untried:
        logger.warning(
            "untried versions: %s. stronghold replaces names in these packages "
            "(stronghold/private.py): before you trust a run, run the tests",
            "; ".join(untried),
        )


def untried_versions(packages: Iterable[str], version_of: Callable[[str], str]) -> list[str]:
    """Return a phrase for each package whose version is not between those of `TRIED`. Patch
    releases of one minor version count as one."""
    untried = []
    for package in packages:
        version, (oldest, newest) = version_of(package), TRIED[package]
        if not _minor(oldest) <= _minor(version) <= _minor(newest):
            tried = oldest if oldest == newest else f"{oldest} to {newest}"
            untried.append(f"{package} {version} (tried: {tried})")
    return untried


def _minor(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version. A missing number is 0."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return (*numbers, 0, 0)[:2]
