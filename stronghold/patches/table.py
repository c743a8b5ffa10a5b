"""The table of everything that stronghold replaces in other packages (monkey patches), and of every
private name that it uses.

Owns the reasons and the versions. `docs/patches.md` is generated from it. Each row has one test in
`tests/border/test_patches.py`, which fails when a release changes what the row relies on. Another
test fails when stronghold uses a private name of another package that no row has. Imports the
standard library alone, and never changes anything. Any thread may enter.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package whose names are replaced or used.

    `tried`: versions with which the rows' tests have passed, from the oldest to the newest.
    """

    name: str
    tried: tuple[str, ...]


class Manner(enum.Enum):
    """How a row touches the other package. The value is a heading of the page."""

    REPLACED = "Names that are replaced in this process"
    WRITTEN = "Attributes that are written on modules, parameters and optimizers"
    USED = "Names that are used, though they are private"


class Lifetime(enum.Enum):
    """How long a row's change lasts. The value completes the sentence "It is there ..."."""

    PLUGIN = "while the plugin is enabled"
    CONFIG = "from the first config with a section until the plugin is disabled"
    IMPORT = "from the import of stronghold on"
    ENGINE = "while an engine lives"
    HIDDEN = "while a parameter's newest values are on their way"
    CALL = "during one call"
    STAYS = "for good"
    NOTHING = "never: nothing is changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One row.

    `key`: names the row; `test_KEY` is its test.
    `names`: dotted names of the package.
    `reason`: why stronghold needs it, and what it relies on.
    `file`: the file of stronghold that does it, below `stronghold/`.
    `beside`: files outside of `patches` that use the same names directly.
    """

    key: str
    package: Package
    manner: Manner
    lifetime: Lifetime = Lifetime.NOTHING
    names: tuple[str, ...]
    reason: str
    file: str
    beside: tuple[str, ...] = ()


TORCH = Package(name="torch", tried=("2.13.0",))
DEEPSPEED = Package(name="deepspeed", tried=("0.19.6", "0.19.8"))
TRANSFORMERS = Package(name="transformers", tried=("5.20.2", "5.23.0", "5.24.0"))
ACCELERATE = Package(name="accelerate", tried=("1.14.0", "1.15.0"))
NUMPY = Package(name="numpy", tried=("2.4.6",))
PYTHON = Package(name="python", tried=("3.11",))
BITSANDBYTES = Package(name="bitsandbytes", tried=("0.50.2",))
TORCHAO = Package(name="torchao", tried=("0.18.0",))
PACKAGES = (TORCH, DEEPSPEED, TRANSFORMERS, ACCELERATE, NUMPY, BITSANDBYTES, TORCHAO)

_FRAMEWORKS = "patches/frameworks.py"
_AUTOGRAD = "patches/autograd.py"
_TENSORS = "patches/tensors.py"
_MODULES = "patches/modules.py"
_ATTENTION = "patches/attention.py"
_IMPORTS = "patches/imports.py"
_QUANTISED = "patches/quantised.py"
_LOGITS = "model/logits.py"
_PACKED = "model/packed_weight.py"
_OPERATORS = "model/gpu_operators.py"

_REPLACED = (
    # -- DeepSpeed and Accelerate ------------------------------------------------------------------
    Patch(
        key="initialize",
        package=DEEPSPEED,
        manner=Manner.REPLACED,
        lifetime=Lifetime.PLUGIN,
        names=("deepspeed.initialize",),
        reason="Frameworks call it themselves. A config with the section gets this engine. "
        "The parameters `args`, `config` and `config_params` are read by name.",
        file=_FRAMEWORKS,
    ),
    Patch(
        key="zero_init",
        package=DEEPSPEED,
        manner=Manner.REPLACED,
        lifetime=Lifetime.PLUGIN,
        names=("deepspeed.zero.Init.__init__",),
        reason="It would partition a model of such a config before the engine sees it. It "
        "leaves the context early where its attribute `enabled` is false.",
        file=_FRAMEWORKS,
    ),
    Patch(
        key="zero_to_fp32",
        package=DEEPSPEED,
        manner=Manner.REPLACED,
        lifetime=Lifetime.PLUGIN,
        names=("deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",),
        reason="It reads this engine's checkpoints too. The function beside it that loads a "
        "model calls it by its global name.",
        file=_FRAMEWORKS,
    ),
    Patch(
        key="accelerate_config",
        package=ACCELERATE,
        manner=Manner.REPLACED,
        lifetime=Lifetime.PLUGIN,
        names=("accelerate.utils.deepspeed.HfDeepSpeedConfig.set_stage_and_offload",),
        reason="Accelerate decides there whether a model is partitioned. In its copy of such"
        " a config stage 3 becomes 2, so that Transformers, PEFT and TRL gather "
        "nothing.",
        file=_FRAMEWORKS,
    ),
    Patch(
        key="accelerate_weights",
        package=ACCELERATE,
        manner=Manner.REPLACED,
        lifetime=Lifetime.CONFIG,
        names=("accelerate.Accelerator.get_state_dict",),
        reason="It copies the whole model in RAM, and decodes a packed base, before a save. Of "
        "this engine it gives the weights where they are.",
        file=_FRAMEWORKS,
    ),
    Patch(
        key="accelerate_state",
        package=ACCELERATE,
        manner=Manner.REPLACED,
        lifetime=Lifetime.CONFIG,
        names=("accelerate.state.PartialState.__init__",),
        reason="On CPUs Accelerate takes each of several ranks for a run of its own, unless "
        "it is given the backend gloo.",
        file=_FRAMEWORKS,
    ),
    Patch(
        key="imports",
        package=PYTHON,
        manner=Manner.REPLACED,
        lifetime=Lifetime.IMPORT,
        names=("sys.meta_path", "importlib.machinery.SourceFileLoader.exec_module"),
        reason="The plugin is enabled when DeepSpeed is imported, and not before: that "
        "import takes seconds. A finder replaces `exec_module` of one loader, which "
        "is an ordinary object.",
        file=_IMPORTS,
    ),
    # -- parameters --------------------------------------------------------------------------------
    Patch(
        key="data",
        package=TORCH,
        manner=Manner.REPLACED,
        lifetime=Lifetime.ENGINE,
        names=("torch.nn.Parameter.data",),
        reason="Torch does not count writes through `.data` in a parameter's version. An "
        "alias made by `detach` is counted, so that the engine sees the write and "
        "trains from it. An assignment of equal values on another device (`model.to`) is "
        "dropped, so that it takes no memory.",
        file="train/visible.py",
    ),
    Patch(
        key="set",
        package=TORCH,
        manner=Manner.REPLACED,
        lifetime=Lifetime.ENGINE,
        names=("torch.nn.Parameter.set_",),
        reason="`torch.nn.utils.parametrize` calls `p.set_(p)` in each forward of some PEFT "
        "adapters. That changes no value and raises the version, like a write.",
        file="train/visible.py",
    ),
    Patch(
        key="device",
        package=TORCH,
        manner=Manner.REPLACED,
        lifetime=Lifetime.ENGINE,
        names=("torch.nn.Parameter.device",),
        reason="Programs send a batch to the device of a model's first parameter. On a GPU a "
        "parameter outside of the blocks says where it computes. Its values rest on the host.",
        file="train/visible.py",
    ),
    Patch(
        key="zero_grad",
        package=TORCH,
        manner=Manner.REPLACED,
        lifetime=Lifetime.ENGINE,
        names=("torch.nn.Module.zero_grad", "torch.optim.Optimizer.zero_grad"),
        reason="Gradients wait for the step on the host. A program that throws gradients "
        "away means these too.",
        file="train/fragments.py",
    ),
    Patch(
        key="clipping",
        package=TORCH,
        manner=Manner.REPLACED,
        lifetime=Lifetime.ENGINE,
        names=("torch.nn.utils.clip_grad._clip_grads_with_norm_",),
        reason="`clip_grad_norm_` calls it with the norm. No parameter has a gradient then, "
        "so clipping by hand would do nothing: it is refused, or warned about.",
        file="train/fragments.py",
    ),
    # -- attention ---------------------------------------------------------------------------------
    Patch(
        key="attention",
        package=TORCH,
        manner=Manner.REPLACED,
        lifetime=Lifetime.ENGINE,
        names=("torch.nn.functional.scaled_dot_product_attention",),
        reason="Results of attention are kept for a block's second run. Models read the "
        "function from the module at each call. A dispatch mode for all of a block "
        "takes too long.",
        file=_ATTENTION,
        beside=("train/activations.py",),
    ),
    Patch(
        key="attention_inside",
        package=TORCH,
        manner=Manner.REPLACED,
        lifetime=Lifetime.CALL,
        names=("torch.nn.functional.multi_head_attention_forward",),
        reason="It reads `scaled_dot_product_attention` from `torch.nn.functional`. On "
        "tensors without memory that one name is replaced during the call, so that a "
        "GPU's kernel is counted.",
        file=_OPERATORS,
    ),
    Patch(
        key="meta_autocast",
        package=TORCH,
        manner=Manner.REPLACED,
        lifetime=Lifetime.CALL,
        names=("torch.autocast",),
        reason="`stronghold plan` counts the costs of PEFT's adapters of fused experts on the meta "
        "device. They ask for autocast there, which torch refuses.",
        file="patches/meta_autocast.py",
    ),
    # -- quantised weights -------------------------------------------------------------------------
    Patch(
        key="products",
        package=BITSANDBYTES,
        manner=Manner.REPLACED,
        lifetime=Lifetime.ENGINE,
        names=(
            "bitsandbytes.autograd._functions.MatMul4Bit",
            "bitsandbytes.autograd._functions.MatMul8bitLt",
            "bitsandbytes.autograd._functions.MatMul8bitFp",
        ),
        reason="They keep the weight and its scales as attributes of `ctx`, past saved-tensor "
        "hooks: backward would read the slot of another layer. The replacement calls "
        "their own forward and backward, and saves each tensor by `save_for_backward`. Only with "
        "an engine that has quantised weights.",
        file=_QUANTISED,
    ),
    Patch(
        key="evaluation_layout",
        package=BITSANDBYTES,
        manner=Manner.REPLACED,
        lifetime=Lifetime.ENGINE,
        names=("bitsandbytes.nn.modules._convert_weight_packed_for_cpu",),
        reason="On CPUs with AVX512-BF16, `Linear4bit` in eval mode without gradients rounds its "
        "scales and lays its weight out anew. `matmul_4bit` then has no backward. Only with an "
        "engine that has quantised weights.",
        file=_QUANTISED,
    ),
    Patch(
        key="weights_that_are_there",
        package=BITSANDBYTES,
        manner=Manner.REPLACED,
        lifetime=Lifetime.ENGINE,
        names=("bitsandbytes.nn.Params4bit.to", "bitsandbytes.nn.Int8Params.to"),
        reason="They return a new object for the device where the weight is, and PEFT's DoRA puts "
        "it into the module. The engine moves the first object. The replacement returns the weight "
        "itself then, as torch does. Only with an engine that has quantised weights.",
        file=_QUANTISED,
    ),
    Patch(
        key="nf4_product",
        package=TORCHAO,
        manner=Manner.REPLACED,
        lifetime=Lifetime.ENGINE,
        names=("torchao.quantization.quantize_.workflows.nf4.nf4_tensor.LinearNF4",),
        reason="It saves the weight as a wrapper, whose memory no saved-tensor hook can see. The "
        "replacement saves the wrapper's inner tensors. Only with an engine that has quantised "
        "weights.",
        file=_QUANTISED,
    ),
)

_WRITTEN = (
    Patch(
        key="hidden_class",
        package=TORCH,
        manner=Manner.WRITTEN,
        lifetime=Lifetime.HIDDEN,
        names=("torch.nn.Parameter.__class__",),
        reason="A parameter becomes an instance of a subclass with `__torch_function__`, so "
        "that the first operation that needs its values waits for them.",
        file="train/visible.py",
    ),
    Patch(
        key="full_functions",
        package=DEEPSPEED,
        manner=Manner.WRITTEN,
        lifetime=Lifetime.ENGINE,
        names=(
            "torch.nn.Parameter._hp_mapping",
            "torch.nn.Parameter.get_full_hp_param",
            "torch.nn.Parameter.set_full_hp_param",
            "torch.nn.Parameter.get_full_hp_grad",
            "torch.nn.Parameter.set_full_hp_grad",
        ),
        reason="`safe_get_full_fp32_param` and the functions beside it look for these "
        "attributes, and return None where there are none.",
        file="train/fragments.py",
    ),
    Patch(
        key="zero_attributes",
        package=DEEPSPEED,
        manner=Manner.WRITTEN,
        lifetime=Lifetime.STAYS,
        names=("torch.nn.Parameter.ds_id", "torch.nn.Parameter.ds_tensor"),
        reason="A model that `deepspeed.zero.Init` made on one rank is taken over whole: the"
        " values of `ds_tensor` become the parameter's, and its `ds_` attributes are "
        "deleted.",
        file="engine/dispatch.py",
    ),
    Patch(
        key="forward",
        package=TORCH,
        manner=Manner.WRITTEN,
        lifetime=Lifetime.ENGINE,
        names=("torch.nn.Module.forward",),
        reason="A block's own call is divided into chunks, or compiled; the head's is lazy. "
        "An entry of the instance comes before the class's method, and hooks stay "
        "around it.",
        file="train/hooks.py",
        beside=(_LOGITS, "model/costs.py"),
    ),
    Patch(
        key="loss_function",
        package=TRANSFORMERS,
        manner=Manner.WRITTEN,
        lifetime=Lifetime.ENGINE,
        names=(
            "transformers.PreTrainedModel._loss_function",
            "transformers.PreTrainedModel.loss_function",
            "transformers.loss.loss_utils.ForCausalLMLoss",
            "transformers.loss.loss_utils.LOSS_MAPPING",
        ),
        reason="Head and loss are computed in parts of the tokens. The property "
        "`loss_function` returns `_loss_function` where an instance has one.",
        file=_LOGITS,
    ),
    Patch(
        key="parameter_table",
        package=TORCH,
        manner=Manner.WRITTEN,
        lifetime=Lifetime.CALL,
        names=(
            "torch.nn.Module._parameters",
            "torch.nn.Module._buffers",
            "torch.nn.Module._modules",
        ),
        reason="Each chunk sees the weights through views of its own. `module.weight` reads "
        "this table, and takes a tensor that is no parameter. Recomputation compares buffers and "
        "submodules before and after a forward.",
        file=_MODULES,
        beside=("model/costs.py", "model/partition.py", _LOGITS),
    ),
    Patch(
        key="opt_called",
        package=TORCH,
        manner=Manner.WRITTEN,
        lifetime=Lifetime.STAYS,
        names=("torch.optim.Optimizer._opt_called",),
        reason="Schedules of `torch.optim.lr_scheduler` warn where no optimizer has stepped "
        "before them; the engine steps.",
        file=_MODULES,
    ),
)

_USED = (
    # -- autograd ----------------------------------------------------------------------------------
    Patch(
        key="backward_number",
        package=TORCH,
        manner=Manner.USED,
        names=("torch._C._current_graph_task_id",),
        reason="Distinguishes one backward from the next, and from none (-1): the user's own"
        " backward, one inside another, and one that raised are noticed by it.",
        file=_AUTOGRAD,
    ),
    Patch(
        key="running_node",
        package=TORCH,
        manner=Manner.USED,
        names=("torch._C._current_autograd_node", "torch._C._will_engine_execute_node"),
        reason="Whether a backward trains a parameter: the nodes behind the running one are "
        "asked whether they will be executed. `torch.autograd.grad` executes no "
        "parameter's node.",
        file=_AUTOGRAD,
    ),
    Patch(
        key="end_of_backward",
        package=TORCH,
        manner=Manner.USED,
        names=("torch.autograd.Variable._execution_engine.queue_callback",),
        reason="The engine has no call at the end of a backward that the user started. Torch"
        " has this callback, which FSDP and DDP use too.",
        file=_AUTOGRAD,
    ),
    Patch(
        key="saved_tensor_hooks",
        package=TORCH,
        manner=Manner.USED,
        names=(
            "torch._C._autograd._top_saved_tensors_default_hooks",
            "torch._C._autograd._pop_saved_tensors_default_hooks",
        ),
        reason="The user's hooks for saved tensors are called inside ours. After Ctrl-C, "
        "which can skip an exit, the hooks from before are made the active ones.",
        file=_AUTOGRAD,
    ),
    Patch(
        key="transforms",
        package=TORCH,
        manner=Manner.USED,
        names=("torch._C._functorch.maybe_current_level",),
        reason="`torch.func` refuses hooks for saved tensors in the middle of a block. The "
        "engine asks before, and also knows torch's own error by its words.",
        file=_AUTOGRAD,
    ),
    Patch(
        key="function_modes",
        package=TORCH,
        manner=Manner.USED,
        names=("torch._C.DisableTorchFunctionSubclass",),
        reason="Reads of hidden parameters that need no values.",
        file=_AUTOGRAD,
    ),
    Patch(
        key="dispatch_mode",
        package=TORCH,
        manner=Manner.USED,
        names=("torch.utils._python_dispatch.TorchDispatchMode",),
        reason="Sees every operator below autograd. The documentation of torch names this "
        "path; there is no public one.",
        file=_AUTOGRAD,
        beside=("model/costs.py", "model/operator_counts.py"),
    ),
    # -- tensors -----------------------------------------------------------------------------------
    Patch(
        key="trees",
        package=TORCH,
        manner=Manner.USED,
        names=(
            "torch.utils._pytree.tree_flatten",
            "torch.utils._pytree.tree_leaves",
            "torch.utils._pytree.tree_map_only",
            "torch.utils._pytree.tree_unflatten",
            "torch.utils._pytree.TreeSpec",
        ),
        reason="Tensors in nested arguments and outputs, also in the outputs of "
        "Transformers, which register themselves there alone.",
        file=_TENSORS,
        beside=("model/costs.py", _LOGITS, "model/operator_counts.py", _PACKED),
    ),
    Patch(
        key="version",
        package=TORCH,
        manner=Manner.USED,
        names=("torch.Tensor._version",),
        reason="A write in place by the user's code is trained, or refused where a saved "
        "tensor is needed as it was. All aliases share the count.",
        file=_TENSORS,
        beside=(_LOGITS,),
    ),
    Patch(
        key="aliases",
        package=TORCH,
        manner=Manner.USED,
        names=("torch._C._storage_Use_Count", "torch.UntypedStorage._cdata"),
        reason="An alias that a program keeps of a weight is one reference more to its "
        "storage. Nothing public counts references.",
        file=_TENSORS,
    ),
    Patch(
        key="own_storage",
        package=TORCH,
        manner=Manner.USED,
        names=("torch.utils.dlpack.to_dlpack", "torch.utils.dlpack.from_dlpack"),
        reason="A second storage of the same memory, of exactly a tensor's bytes: so its "
        "references are counted apart, and `torch.save` saves no more.",
        file=_TENSORS,
    ),
    Patch(
        key="one_storage_object",
        package=TORCH,
        manner=Manner.USED,
        names=("torch.Tensor.untyped_storage",),
        reason="Two tensors of one memory give the same Python object, which lives as long "
        "as the memory does. So its `id` names the memory, and a weak reference "
        "notices its end.",
        file="model/costs.py",
    ),
    Patch(
        key="sparse_parts",
        package=TORCH,
        manner=Manner.USED,
        names=("torch.Tensor._indices", "torch.Tensor._values"),
        reason="The public methods refuse a sparse tensor that may hold an index twice, "
        "which is what autograd saves.",
        file=_TENSORS,
    ),
    Patch(
        key="schema",
        package=TORCH,
        manner=Manner.USED,
        names=("torch._ops.OpOverload._schema",),
        reason="Which arguments an operator writes, and whether its result is a view.",
        file="model/operator_counts.py",
        beside=(_PACKED,),
    ),
    Patch(
        key="attention_kernels",
        package=TORCH,
        manner=Manner.USED,
        names=(
            "torch._C._nn.scaled_dot_product_attention",
            "torch.ops.aten._scaled_dot_product_flash_attention",
            "torch.ops.aten._scaled_dot_product_efficient_attention",
            "torch.ops.aten._scaled_dot_product_cudnn_attention",
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
            "torch.ops.aten._scaled_dot_product_fused_attention_overrideable",
            "torch.ops.aten._grouped_mm",
            "torch.ops.aten._unsafe_view",
        ),
        reason="Operators whose FLOPs and bytes are counted, and whose results are kept for "
        "a second run. The first one is what a function mode sees of attention.",
        file=_OPERATORS,
        beside=("model/operator_counts.py",),
    ),
    Patch(
        key="tensor_subclasses",
        package=TORCH,
        manner=Manner.USED,
        names=(
            "torch._C._disabled_torch_function_impl",
            "torch.Tensor._make_wrapper_subclass",
            "torch.ops.aten._to_copy",
        ),
        reason="Logits that have a shape and no memory, and packed weights: subclasses whose "
        "operators come to `__torch_dispatch__`, below autograd. `to` comes as `_to_copy`.",
        file=_LOGITS,
        beside=(_PACKED,),
    ),
    Patch(
        key="raw_stream",
        package=TORCH,
        manner=Manner.USED,
        names=("torch._C._cuda_getCurrentRawStream",),
        reason="The address of the current stream, asked several times for each "
        "gradient: `torch.cuda.current_stream` makes a new object each time.",
        file="devices/cuda.py",
    ),
    # -- modules and parameters --------------------------------------------------------------------
    Patch(
        key="compiled",
        package=TORCH,
        manner=Manner.USED,
        names=("torch.nn.Module._compiled_call_impl", "torch._dynamo.OptimizedModule._orig_mod"),
        reason="A whole model that is compiled is one graph, and layers come and go inside "
        "of it: it is refused. So is a compiled block that is to be divided. Around a compiled "
        "block's call stands the engine's, uncompiled.",
        file=_MODULES,
        beside=(_LOGITS,),
    ),
    Patch(
        key="transient_buffers",
        package=TORCH,
        manner=Manner.USED,
        names=("torch.nn.Module._non_persistent_buffers_set",),
        reason="A checkpoint holds the buffers that a state dict holds.",
        file=_MODULES,
    ),
    Patch(
        key="state_dict_hooks",
        package=TORCH,
        manner=Manner.USED,
        names=(
            "torch.nn.Module._register_state_dict_hook",
            "torch.nn.Module._state_dict_pre_hooks",
        ),
        reason="The values of a state dict get storages of their own size. A model whose "
        "hooks are another engine's is refused.",
        file=_MODULES,
    ),
    Patch(
        key="gradient_hooks",
        package=TORCH,
        manner=Manner.USED,
        names=("torch.Tensor._backward_hooks", "torch.Tensor._post_accumulate_grad_hooks"),
        reason="The engine's hook runs after the user's, in whatever order they were "
        "registered. Chunks refuse the user's.",
        file=_MODULES,
    ),
    Patch(
        key="module_backward_hooks",
        package=TORCH,
        manner=Manner.USED,
        names=(
            "torch.nn.Module._backward_hooks",
            "torch.nn.Module._backward_pre_hooks",
            "torch.nn.modules.module._global_backward_hooks",
            "torch.nn.modules.module._global_backward_pre_hooks",
        ),
        reason="A head with hooks on its gradient gives real logits: the gradient of lazy "
        "ones never passes there. Chunks refuse such hooks inside a block. While costs are "
        "counted, none runs.",
        file=_MODULES,
        beside=(_LOGITS, "model/costs.py"),
    ),
    Patch(
        key="forward_hooks",
        package=TORCH,
        manner=Manner.WRITTEN,
        lifetime=Lifetime.CALL,
        names=(
            "torch.nn.Module._forward_hooks",
            "torch.nn.Module._forward_pre_hooks",
            "torch.nn.Module._forward_hooks_with_kwargs",
            "torch.nn.modules.module._global_forward_hooks",
            "torch.nn.modules.module._global_forward_pre_hooks",
        ),
        reason="A forward that changes its hooks is kept. A block's second run calls the hooks of "
        "the first, and no others. While chunks run, each hook inside a block is replaced by one "
        "that notes its arguments. While costs are counted, hooks before a forward run alone.",
        file=_MODULES,
        beside=("model/costs.py",),
    ),
    # -- generators --------------------------------------------------------------------------------
    Patch(
        key="default_store",
        package=TORCH,
        manner=Manner.USED,
        names=("torch.distributed.distributed_c10d._get_default_store",),
        reason="A rank that fails writes why to the store of the default process group, which "
        "outlives connections. Torch has no public name for it.",
        file="patches/distributed.py",
    ),
    Patch(
        key="numpy_pickles",
        package=NUMPY,
        manner=Manner.USED,
        names=("numpy._core.multiarray._reconstruct",),
        reason="Generator states in checkpoints are NumPy arrays, which a safe reader of "
        "pickles must be allowed to build, by the name that NumPy has written.",
        file="checkpoint/state.py",
    ),
    # -- Transformers ------------------------------------------------------------------------------
    Patch(
        key="from_config",
        package=TRANSFORMERS,
        manner=Manner.USED,
        names=("transformers.PreTrainedModel._from_config",),
        reason="A model class builds a model of a configuration, with the dtype and the "
        "attention that it asks for.",
        file=_MODULES,
    ),
    Patch(
        key="known_classes",
        package=TRANSFORMERS,
        manner=Manner.USED,
        names=(
            "transformers.PreTrainedModel",
            "transformers.Cache",
            "transformers.cache_utils.CacheLayerMixin",
        ),
        reason="Models and key-value caches are known by these names of classes, since "
        "Transformers need not be installed. `use_cache=False` makes no cache.",
        file="train/key_value_caches.py",
    ),
)

PATCHES = (*_REPLACED, *_WRITTEN, *_USED)
