"""`initialize`: which engine a config asks for, and what it is made of.

Owns the choice between DeepSpeed's engine and ours, and the optimizer that ours shows. The training
thread alone enters.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from stronghold import config as configs
from stronghold.devices import cuda
from stronghold.distributed.process_groups import (
    data_parallel_size,
    join,
    joining,
    local_rank_of,
)
from stronghold.engine import StrongholdEngine
from stronghold.errors import ConfigError
from stronghold.optim.cpu_optimizer import CPUOptimizer
from stronghold.streaming.optimizer import EngineOptimizer
from stronghold.telemetry import show_log

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
    """`deepspeed.initialize` with the choice of stronghold's engine.

    Same arguments, same tuple (engine, optimizer, data loader, LR scheduler). Without a
    "stronghold" section, or with "enabled": false, DeepSpeed itself runs. Without an optimizer,
    here or in the config, the engine only runs forward, and so does that of a model of which
    nothing trains where no model_parameters are given. Raises ConfigError or BudgetError, saying
    what to change, before anything is allocated.
    """
    given = dict(locals())
    source = config if config is not None else config_params
    if not configs.section_enabled(configs.read_config(source, args)):
        show_log()
        logger.info('the config has no enabled "stronghold" section: DeepSpeed\'s own engine')
        return deepspeed.initialize(**given)  # type: ignore[no-any-return]
    if model is None:
        raise ConfigError("stronghold.initialize: model is missing")
    _check_model(model)
    show_log()
    num_ranks = data_parallel_size(mpu)
    settings = configs.load(source, args=args, world_size=num_ranks, mpu=mpu)
    shown = make_optimizer(model, optimizer, model_parameters, settings)
    section = settings.stronghold
    on_gpu = (section.device or "cuda") == "cuda" and cuda.available()
    timeout = deepspeed.constants.default_pg_timeout
    if section.rank_timeout_s is not None:
        timeout = timedelta(seconds=section.rank_timeout_s)
    _init_distributed(settings, timeout, distributed_port, dist_init_required, on_gpu=on_gpu)
    device = cuda.device_of(local_rank_of(args)) if on_gpu else None
    ranks = join(mpu, device=device, timeout=timeout)
    try:
        engine = StrongholdEngine(
            args=args,
            model=model,
            settings=settings,
            optimizer=shown,
            lr_scheduler=make_scheduler(lr_scheduler, shown, settings),
            training_data=training_data,
            collate_fn=collate_fn,
            mpu=mpu,
            ranks=ranks,
        )
    except BaseException:
        ranks.close()
        raise
    logger.info("stronghold engine active on %s", engine.device)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


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
    of_zero_init: list[tuple[str, Any, torch.Tensor | None]] = [
        (name, parameter, _partition_of(parameter))
        for name, parameter in model.named_parameters()
        if hasattr(parameter, "ds_id")
    ]
    for name, _, values in of_zero_init:
        if values is None:
            raise ConfigError(
                f"{name} was partitioned by deepspeed.zero.Init among several ranks, or to NVMe: "
                "import stronghold before the model is built, and pass this config to "
                "deepspeed.zero.Init (Transformers does), which then leaves the model whole"
            )
    for _, parameter, values in of_zero_init:  # a view of its partition, not a copy
        for name in [n for n in vars(parameter) if n.startswith("ds_") or n in _OF_ZERO_INIT]:
            delattr(parameter, name)
        parameter.data = values


# What deepspeed.zero.Init sets on a parameter, beside names that begin with ds_.
_GATHERS = "all_gather all_gather_coalesced partition partition_gradients"
_SIZES = "aligned_size padding_size partition_numel convert_to_zero_parameters"
_OTHERS = "is_external_param item nvme_swapper reduce_gradients_at_owner"
_OF_ZERO_INIT = frozenset(f"{_GATHERS} {_SIZES} {_OTHERS}".split())


def _partition_of(parameter: Any) -> torch.Tensor | None:
    """The values of a parameter that deepspeed.zero.Init has made: its partition, where one rank
    has all of it in memory."""
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
    """The optimizer that the engine shows: the client's, or the config's of `model_parameters`."""
    if optimizer is not None:
        groups = _groups(model, model_parameters)
        client = optimizer
        if not isinstance(client, torch.optim.Optimizer):
            client = client(groups if len(groups) > 1 else list(groups[0]["params"]))
        found = configs.settings_from_client_optimizer(client)
        if client.state:
            raise ConfigError(
                "optimizer: it has taken steps already, and its moments cannot be taken over: pass "
                "a new one"
            )
        kept = settings.stronghold.states
        if isinstance(client, CPUOptimizer) and client.states != kept == "exact":
            raise ConfigError(
                f'optimizer: a {type(client).__name__} with states="lean", but the engine keeps '
                'the states, and stronghold.states is "exact": set that to "lean"'
            )
        _check_owned(model, client.param_groups, "optimizer")
        optimizers = [of_group.optimizer for of_group in found]
        copies = [{"params": list(group["params"])} for group in client.param_groups]
        return EngineOptimizer(copies, dict(client.defaults), optimizers, client=client)
    configured = settings.optimizer
    frozen = not any(parameter.requires_grad for parameter in model.parameters())
    if configured is None or (model_parameters is None and frozen):
        return None  # a reference model, which gets the config of the model that trains
    groups = _groups(model, model_parameters)
    _check_owned(model, groups, "model_parameters")
    of_groups = [
        configs.settings_of_group(group, configured, f"model_parameters[{index}]")
        for index, group in enumerate(groups)
    ]
    filled = [
        {**settings.hyperparameters, **{k: v for k, v in group.items() if k != "optimizer"}}
        for group, settings in zip(groups, of_groups, strict=True)
    ]
    optimizers = [settings.optimizer for settings in of_groups]
    return EngineOptimizer(filled, dict(configured.hyperparameters), optimizers)


def make_scheduler(
    client: Any, optimizer: EngineOptimizer | None, settings: configs.Settings
) -> Any:
    """The learning rate's schedule: the client's, what its callable makes, or the config's."""
    if client is not None:
        is_scheduler = hasattr(client, "step")
        return client if is_scheduler or not callable(client) else client(optimizer)
    configured = settings.scheduler
    return configured.build(optimizer) if configured and optimizer is not None else None


def _groups(model: nn.Module, model_parameters: Any) -> list[dict[str, Any]]:
    """Parameter groups; frozen parameters stay out, since nothing updates them."""
    listed: list[Any] = list(model.parameters() if model_parameters is None else model_parameters)
    if not listed or not isinstance(listed[0], dict):
        listed = [{"params": listed}]
    groups = [
        {**group, "params": [p for p in _parameters(group["params"]) if p.requires_grad]}
        for group in listed
    ]
    if not any(group["params"] for group in groups):
        raise ConfigError(
            "model_parameters: no parameter has requires_grad; nothing would be trained"
        )
    return groups


def _parameters(given: Any) -> list[Any]:
    """In the forms that torch's optimizers take: one tensor, tensors, or (name, tensor) pairs."""
    if isinstance(given, torch.Tensor):
        return [given]
    return [one[1] if isinstance(one, tuple) else one for one in given]


def _check_owned(model: nn.Module, groups: Iterable[dict[str, Any]], what: str) -> None:
    own = set(model.parameters())
    foreign = sum(parameter not in own for group in groups for parameter in group["params"])
    if foreign:
        raise ConfigError(
            f"{what}: {foreign} of its parameters are not the model's, and would never be updated: "
            "pass model.parameters() of the very model that initialize gets"
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
    """Whether Accelerate, and with it the Trainer, takes this process for one of DeepSpeed's, whose
    losses and metrics it gathers over a process group, launcher or not."""
    accelerate: Any = sys.modules.get("accelerate.state")
    if accelerate is None or not accelerate.is_initialized():
        return False
    found = accelerate.AcceleratorState().distributed_type
    return bool(found == accelerate.DistributedType.DEEPSPEED)
