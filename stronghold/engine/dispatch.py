"""`initialize`: makes the engine that a config asks for.

Owns the choice between DeepSpeed's engine and stronghold's. Makes the optimizer and the schedule
that stronghold's engine shows. The training thread alone enters.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero import partition_parameters
from deepspeed.utils import log_dist
from deepspeed.utils.logging import set_log_level_from_string
from torch import nn

from stronghold import config as configs
from stronghold.devices import cuda
from stronghold.engine import StrongholdEngine
from stronghold.errors import ConfigError, ErrorPage
from stronghold.optim.cpu_adam import CPUAdam
from stronghold.telemetry import show_log
from stronghold.train.optimizer import EngineOptimizer
from stronghold.train.processes import (
    ALONE,
    RankGroup,
    check_initialized,
    joining,
    local_rank_of,
    world_size,
)

logger = logging.getLogger("stronghold")

ClientOptimizer = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: ClientOptimizer = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Make the engine: `deepspeed.initialize`, with the choice of stronghold's engine.

    Arguments are DeepSpeed's:

    * `args`: the program's namespace. `args.deepspeed_config` may name the config.
    * `model`: a plain `torch.nn.Module`, whole.
    * `optimizer`: a torch optimizer that has taken no step, or a callable that makes one from
      parameters. None: the config's optimizer.
    * `model_parameters`: parameters or parameter groups for the config's optimizer. None: all of
      the model's.
    * `training_data`: a dataset for `deepspeed_io`.
    * `lr_scheduler`: a schedule, or a callable that makes one from the optimizer. None: the
      config's schedule.
    * `distributed_port`, `dist_init_required`: for DeepSpeed's process group.
    * `mpu`: refused if its ranks are not all data-parallel.
    * `collate_fn`: of the data loader.
    * `config`, `config_params`: a dict or the path of a JSON file.
    * `mesh_param`: passed to DeepSpeed's engine alone.

    Returns (engine, optimizer, data loader, LR scheduler), as DeepSpeed does. Without a
    "stronghold" section, or with "enabled": false, DeepSpeed's own engine is returned. Without an
    optimizer, here or in the config, the engine only runs forward. It also only runs forward if
    nothing in the model trains and `model_parameters` is None.

    With several ranks it waits until all of them have met. Raises ConfigError or BudgetError, with
    the change to make, before anything is allocated. Raises RankError if a rank is lost.
    """
    arguments = dict(locals())
    source = config if config is not None else config_params
    if not configs.section_enabled(configs.read_config(source, args)):
        show_log()
        logger.info('the config has no enabled "stronghold" section: DeepSpeed\'s own engine')
        return deepspeed.initialize(**arguments)  # type: ignore[no-any-return]
    if model is None:
        raise ConfigError("stronghold.initialize: model is missing")
    _check_model(model)
    show_log()
    # As DeepSpeed's own engine does: programs look for this line in its log.
    log_dist(f"DeepSpeed info: version={deepspeed.__version__}, engine=stronghold", ranks=[0])
    _check_mpu(mpu)
    settings = configs.load(source, args=args, world_size=world_size())
    section = settings.stronghold
    if settings.deepspeed.log_level is not None:
        set_log_level_from_string(settings.deepspeed.log_level)
    if settings.deepspeed.dump_state:
        settings.deepspeed.print("DeepSpeed's reading of the config")
    with _outside_zero_init():
        shown = make_optimizer(model, optimizer, model_parameters, settings)
        on_gpu = (section.device or "cuda") == "cuda" and cuda.available()
        timeout = deepspeed.constants.default_pg_timeout
        if section.rank_timeout_s is not None:
            timeout = timedelta(seconds=section.rank_timeout_s)
        _init_distributed(settings, timeout, distributed_port, dist_init_required, on_gpu=on_gpu)
        device = cuda.device_of(local_rank_of(args)) if on_gpu else None
        ranks = _join(device, timeout)
        try:
            engine = StrongholdEngine(
                args=args,
                model=model,
                settings=settings,
                optimizer=shown,
                lr_scheduler=make_scheduler(lr_scheduler, shown, settings),
                training_data=training_data,
                collate_fn=collate_fn,
                ranks=ranks,
            )
        except BaseException as error:
            ranks.fail(f"{type(error).__name__}: {error}")
            ranks.close()
            raise
    logger.info("stronghold engine active on %s", engine.device)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _join(device: torch.device | None, timeout: timedelta) -> RankGroup:
    """Meet the other ranks. Every rank calls it. RankError if they do not come within `timeout`."""
    if world_size() == 1:
        return ALONE
    check_initialized()
    from stronghold.train import ranks  # one rank never needs it

    return ranks.Ranks(device=device, timeout=timeout)


def _check_mpu(mpu: Any) -> None:
    """Raise ConfigError if a client's unit does not have all ranks in one data-parallel group."""
    if mpu is None or world_size() == 1:
        return
    count = getattr(mpu, "get_data_parallel_world_size", None)
    if count is None or count() != world_size():
        found = "no data-parallel group" if count is None else f"a data-parallel group of {count()}"
        raise ConfigError(
            f"mpu: got {found}, expected one of all {world_size()} ranks: the model is not split "
            "over ranks. Leave mpu out, or set stronghold.enabled to false for DeepSpeed's own "
            "engine"
        )


@contextlib.contextmanager
def _outside_zero_init() -> Iterator[None]:
    """Context manager: `deepspeed.zero.Init` around it does not see what is made in it.

    Inside `Init` torch's functions make tensors of its dtype and partition the parameters of every
    module. DeepSpeed's own `initialize` steps out of it, too.
    """
    partition_parameters.shutdown_init_context()
    try:
        yield
    finally:
        partition_parameters.restore_init_context()


def _check_model(model: nn.Module) -> None:
    if isinstance(model, PipelineModule):
        raise ConfigError(
            "model: a PipelineModule, which is cut for another engine of DeepSpeed's: pass a plain "
            'module, or remove the "stronghold" section'
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "model: wrapped in DistributedDataParallel, which sums up gradients that leave before "
            "it finds them: pass the plain module, the engine is data-parallel itself"
        )
    _undo_zero_init(model)


def _undo_zero_init(model: nn.Module) -> None:
    """Make parameters of a model that `deepspeed.zero.Init` made on one rank ordinary ones.

    Their values become views of their partitions, not copies. Raises ConfigError, before anything
    changes, if a parameter is partitioned among ranks or to NVMe.
    """
    whole_values: list[tuple[Any, torch.Tensor]] = []
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "ds_id"):
            continue
        values = _partition_of(parameter)
        if values is None:
            raise ConfigError(
                f"{name} was partitioned by deepspeed.zero.Init among several ranks, or to NVMe: "
                "import stronghold.plugin before the model is built, and pass this config to "
                "deepspeed.zero.Init (Transformers does), which then leaves the model whole"
            )
        whole_values.append((parameter, values))
    for parameter, values in whole_values:
        for attribute in list(vars(parameter)):
            if attribute.startswith("ds_") or attribute in _ZERO_INIT_ATTRIBUTES:
                delattr(parameter, attribute)
        parameter.data = values


# Attributes that deepspeed.zero.Init sets on a parameter, beside names that begin with ds_.
_GATHERS = "all_gather all_gather_coalesced partition partition_gradients"
_SIZES = "aligned_size padding_size partition_numel convert_to_zero_parameters"
_OTHERS = "is_external_param item nvme_swapper reduce_gradients_at_owner"
_ZERO_INIT_ATTRIBUTES = frozenset(f"{_GATHERS} {_SIZES} {_OTHERS}".split())


def _partition_of(parameter: Any) -> torch.Tensor | None:
    """The values of a parameter that deepspeed.zero.Init has made, in the parameter's shape.

    None if one rank does not have all of its partition in memory.
    """
    if parameter.numel() == parameter.ds_numel and parameter.shape == parameter.ds_shape:
        gathered: torch.Tensor = parameter.detach()
        return gathered
    partition = parameter.ds_tensor
    if partition is None or partition.numel() < parameter.ds_numel:
        return None
    whole: torch.Tensor = partition.detach().view(-1)[: parameter.ds_numel]
    return whole.view(parameter.ds_shape)


def make_optimizer(
    model: nn.Module, optimizer: ClientOptimizer, model_parameters: Any, settings: configs.Settings
) -> EngineOptimizer | None:
    """Make the optimizer that the engine shows.

    It follows `optimizer` (an optimizer, or a callable that makes one), else the config's optimizer
    over `model_parameters`. Returns None for an engine that only runs forward. Raises ConfigError
    for an optimizer that has taken steps, and for parameters that are not the model's.
    """
    if optimizer is not None:
        return _from_client(model, optimizer, model_parameters, settings)
    is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
    if settings.optimizer is None or (model_parameters is None and is_frozen):
        return None  # a reference model, which gets the config of the model that trains
    return _from_config(model, settings.optimizer, model_parameters)


def _from_client(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
    model_parameters: Any,
    settings: configs.Settings,
) -> EngineOptimizer:
    """The engine's optimizer in place of the client's, with copies of the client's groups."""
    groups = _groups(model, model_parameters)
    client = optimizer
    if not isinstance(client, torch.optim.Optimizer):
        client = client(groups if len(groups) > 1 else list(groups[0]["params"]))
    group_settings = configs.settings_from_client_optimizer(client)
    if client.state:
        raise ConfigError(
            "optimizer: it has taken steps already, and its moments cannot be taken over: pass a "
            "new one",
            page=ErrorPage.TWO_OPTIMIZERS,
        )
    kept_states = settings.stronghold.states
    if isinstance(client, CPUAdam) and client.states != kept_states == "exact":
        raise ConfigError(
            'optimizer: a CPUAdam with states="lean", but the engine keeps the '
            'states, and stronghold.states is "exact": set that to "lean"'
        )
    _check_owned(model, client.param_groups, "optimizer")
    optimizers = [one_group.optimizer for one_group in group_settings]
    copies = [{"params": list(group["params"])} for group in client.param_groups]
    return EngineOptimizer(copies, dict(client.defaults), optimizers, client=client)


def _from_config(
    model: nn.Module, configured: configs.OptimizerSettings, model_parameters: Any
) -> EngineOptimizer:
    """The engine's optimizer by the config. A group's hyper-parameters replace the config's."""
    groups = _groups(model, model_parameters)
    _check_owned(model, groups, "model_parameters")
    filled, optimizers = [], []
    for index, group in enumerate(groups):
        where = f"model_parameters[{index}]"
        group_settings = configs.settings_of_group(group, configured, where)
        present = {key: value for key, value in group.items() if key != "optimizer"}
        filled.append({**group_settings.hyperparameters, **present})
        optimizers.append(group_settings.optimizer)
    return EngineOptimizer(filled, dict(configured.hyperparameters), optimizers)


def make_scheduler(
    client: Any, optimizer: EngineOptimizer | None, settings: configs.Settings
) -> Any:
    """Return the schedule of learning rates: the client's, its callable's, or the config's."""
    if client is not None:
        is_scheduler = hasattr(client, "step") or not callable(client)
        return client if is_scheduler else client(optimizer)
    configured = settings.scheduler
    return configured.build(optimizer) if configured and optimizer is not None else None


def _groups(model: nn.Module, model_parameters: Any) -> list[dict[str, Any]]:
    """Parameter groups; frozen parameters stay out, since nothing updates them."""
    listed: list[Any] = list(model.parameters() if model_parameters is None else model_parameters)
    if not listed or not isinstance(listed[0], dict):
        listed = [{"params": listed}]
    groups = []
    for group in listed:
        trained = [p for p in _parameters(group["params"]) if p.requires_grad]
        groups.append({**group, "params": trained})
    if not any(group["params"] for group in groups):
        raise ConfigError(
            "model_parameters: no parameter has requires_grad; nothing would be trained"
        )
    return groups


def _parameters(params: Any) -> list[Any]:
    """Parameters from each form that torch's optimizers take: one tensor, tensors, or (name,
    tensor) pairs."""
    if isinstance(params, torch.Tensor):
        return [params]
    return [item[1] if isinstance(item, tuple) else item for item in params]


def _check_owned(model: nn.Module, groups: Iterable[dict[str, Any]], argument: str) -> None:
    """Raise ConfigError if a group has parameters that are not the model's."""
    owned = set(model.parameters())
    num_foreign = sum(parameter not in owned for group in groups for parameter in group["params"])
    if num_foreign:
        raise ConfigError(
            f"{argument}: {num_foreign} of its parameters are not the model's, and would never be "
            "updated: pass model.parameters() of the very model that initialize gets"
        )


def _init_distributed(
    settings: configs.Settings,
    timeout: timedelta,
    port: int,
    required: bool | None,
    *,
    on_gpu: bool,
) -> None:
    """The process group that scripts expect after `initialize`, when a launcher set the environment
    for one; and one of this process alone, without a launcher, where Accelerate gathers over it.

    On CPU memory torch's own gloo group is made: DeepSpeed's CPU backend would compile a
    shared-memory kernel first, which one rank has no use for. DeepSpeed's monitors insist on
    DeepSpeed's.
    """
    monitors = settings.deepspeed.monitor_config.enabled
    begun = torch.distributed.is_initialized()
    if "RANK" in os.environ and required is not False:
        with joining("stronghold.initialize"):
            if monitors or (on_gpu and not begun):
                deepspeed.init_distributed(distributed_port=port, timeout=timeout)
            elif not begun:
                torch.distributed.init_process_group("gloo", timeout=timeout)
    elif not begun and _accelerate_gathers():
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=torch.distributed.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )
    if monitors and not deepspeed.comm.is_initialized():
        raise ConfigError(
            "DeepSpeed's monitors (tensorboard, wandb, csv_monitor, comet) need a process group: "
            "start with the deepspeed launcher, or call deepspeed.init_distributed() first"
        )


def _accelerate_gathers() -> bool:
    """True if Accelerate takes this process for one of DeepSpeed's. The Trainer then does so too.

    Accelerate gathers losses and metrics of such a process over a process group (all-gather), with
    a launcher or without.
    """
    accelerate: Any = sys.modules.get("accelerate.state")
    if accelerate is None or not accelerate.is_initialized():
        return False
    distributed_type = accelerate.AcceleratorState().distributed_type
    return bool(distributed_type == accelerate.DistributedType.DEEPSPEED)
