"""The saves and loads of one engine.

Owns the save that is running, and the order in which a load changes state. It keeps no reference to
the engine, which owns counters, schedule and data loader: the engine is an argument of each call.
The training thread alone enters.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stronghold.checkpoint import directory
from stronghold.checkpoint.directory import CheckpointRanks
from stronghold.checkpoint.export import live_weights, write_weights
from stronghold.checkpoint.format import COUNTERS, GAS, STATE
from stronghold.checkpoint.loading import Load
from stronghold.checkpoint.saving import Save
from stronghold.checkpoint.state import ClientState, random_states, restore_random_states
from stronghold.errors import ConfigError
from stronghold.train.job import Job
from stronghold.train.optimizer import EngineOptimizer, restore_scaler, scaler_state

logger = logging.getLogger("stronghold")


class Checkpoints:
    """Saves and loads the model of `job`, with the state of `optimizer`.

    `asynchronous`: saves run on the io lane while the next steps compute.
    """

    def __init__(self, job: Job, optimizer: EngineOptimizer | None, *, asynchronous: bool) -> None:
        self._job = job
        self._optimizer = optimizer
        self._asynchronous = asynchronous
        self._team = CheckpointRanks(job.ranks)
        self._running: Save | None = None
        self._warns_of_gradients = True
        self._has_loaded = False  # a checkpoint with its state
        self._random: dict[str, Any] | None = None  # its random states for this rank

    # -- saving -----------------------------------------------------------------------------------
    def save(
        self,
        engine: Any,
        save_dir: str | Path,
        tag: object,
        *,
        client: dict[str, Any],
        exclude_frozen: bool,
        latest: bool,
    ) -> None:
        """Save everything as `save_dir/tag`.

        client          state of the program
        exclude_frozen  leave frozen parameters out
        latest          make the file `latest` name the tag

        Gradients of a step that has not ended are not saved, as in DeepSpeed: a run that loads the
        tag begins that step again.

        Waits for the running save, and (unless asynchronous) for pending updates and the disk.
        Raises ConfigError within a forward or a backward, and for tags that differ between ranks if
        the config's `checkpoint.tag_validation` is "Fail". Raises OSError of the disk, and
        LaneError, once, if an asynchronous save has failed.
        """
        if not save_dir:
            raise ConfigError(f"save_checkpoint: save_dir is {save_dir!r}, expected a directory")
        self._job.check_process("save_checkpoint")
        self.wait()
        self._job.begin_save()
        optimizer = self._optimizer
        random = random_states(self._job.device)
        of_ranks = self._team.exchange((str(tag), random), "states of the ranks")
        _check_tags(engine, [tag for tag, _ in of_ranks])
        state = ClientState(
            scheduler=_state_of(engine.lr_scheduler),
            loader=_state_of(engine.training_dataloader),
            client=client,
            loss_scale=None if optimizer is None else scaler_state(optimizer.loss_scaler),
            random=random,
            random_of_ranks=[random for _, random in of_ranks] if len(of_ranks) > 1 else None,
        )
        save = Save(
            self._job,
            optimizer,
            # the program may change its working directory meanwhile
            Path(save_dir).absolute() / directory.check_tag(tag),
            client=state,
            counters=self._counters(engine),
            exclude_frozen=exclude_frozen,
            team=self._team,
            latest=latest,
        )
        if self._asynchronous:
            save.start()
            self._running = save
        else:
            save.run()

    def _counters(self, engine: Any) -> dict[str, int]:
        """The engine's counters at the begin of the step. Warns once of gradients that are left."""
        gas = int(engine.gradient_accumulation_steps())
        counters = {name: getattr(engine, name) for name in COUNTERS} | {GAS: gas}
        if self._job.trainer.is_in_step:
            if engine.managed_gradient_accumulation():
                counters["micro_steps"] -= counters["micro_steps"] % gas
            if self._warns_of_gradients:
                self._warns_of_gradients = False
                logger.warning(
                    "save_checkpoint: the gradients of the step so far are not saved: a run that "
                    "loads the checkpoint begins the step again. Save after engine.step"
                )
        return counters

    def wait(self) -> None:
        """Wait until an asynchronous save is complete. Raises LaneError, once, if it failed."""
        self._job.check_process("a checkpoint", any_thread=True)
        running = self._running
        if running is not None:
            try:
                running.wait()
            finally:
                if running.ended and self._running is running:  # no Ctrl-C, no later save
                    self._running = None

    def raise_failure(self) -> None:
        """Raise the error of an asynchronous save that has failed meanwhile, once. Waits for
        nothing."""
        if self._running is not None and self._running.ended:
            self.wait()

    # -- loading ----------------------------------------------------------------------------------
    def load(
        self,
        engine: Any,
        load_dir: str | Path,
        tag: object,
        *,
        strict: bool,
        states: bool,
        schedule: bool,
        weights_only: bool,
        custom: Callable[..., Any] | None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load `load_dir/tag`, or without a tag the one that `latest` names.

        strict        raise ConfigError if names of model and checkpoint differ
        states        load masters and moments too
        schedule      load the schedule of learning rates too
        weights_only  load the weights alone, whatever `states` and `schedule` are
        custom        called as `custom(src=state_dict, dst=module)` to place the weights

        Returns the path of the state file, and the client state with DeepSpeed's version. Returns
        (None, None) without a tag and without a file `latest`. Waits for the running save. Raises
        CheckpointError for damaged files and ConfigError for a checkpoint of another model, before
        memory changes.
        """
        self._job.check_here("load_checkpoint")
        self.wait()
        root, team, job = Path(load_dir), self._team, self._job
        if tag is None:
            latest = team.all_or_raise(directory.read_latest, root)
            tag = team.exchange(latest, "latest")[0]
        if tag is None:
            logger.warning("load_checkpoint: no file named latest in %s; nothing is loaded", root)
            return None, None
        name = directory.check_tag(tag)
        path = team.all_or_raise(directory.resolve, root, name)
        load = team.all_or_raise(
            Load,
            path,
            job,
            self._optimizer if states and not weights_only else None,
            team=team,
            names_must_match=strict,
            trusted=not weights_only,
        )
        with contextlib.closing(load):
            team.check_opened(path, load.mark)
            state = load.state
            if state is not None and schedule and not weights_only:
                scheduler, saved = engine.lr_scheduler, state.scheduler
                team.all_or_raise(_restore_scheduler, scheduler, saved, path)
            is_in_step = job.trainer.is_in_step
            with job.trainer.changing(f"load_checkpoint({str(path)!r})"):
                if is_in_step:
                    engine._begin_step_again()
                load.apply(custom)
                if state is not None and not weights_only:
                    self._restore(engine, state, load)
        client = None if state is None else _with_version(state.client, load.manifest.versions)
        return str(path / STATE), client

    def _restore(self, engine: Any, saved: ClientState, load: Load) -> None:
        """Restore counters, data loader and loss scale. Keep the random states for the program."""
        self._has_loaded = True
        counters = load.manifest.counters
        for name in COUNTERS:
            setattr(engine, name, counters[name])
        gas = int(engine.gradient_accumulation_steps())
        if counters[GAS] != gas:
            engine.micro_steps = engine.global_steps * gas
        if saved.loader is not None and hasattr(engine.training_dataloader, "load_state_dict"):
            engine.training_dataloader.load_state_dict(saved.loader)
        if self._optimizer is not None and saved.loss_scale is not None:
            restore_scaler(self._optimizer.loss_scaler, saved.loss_scale)
        # If as many ranks load as saved, each takes its random states again. Otherwise the first
        # rank takes those of the first rank that saved, and the others keep theirs.
        team, self._random = self._team, saved.random
        of_ranks = saved.random_of_ranks or [saved.random]
        if len(of_ranks) == team.num_ranks:
            self._random = of_ranks[team.rank]
        elif team.rank > 0:
            self._random = None

    def restore_random_states(self) -> None:
        """Set the random generators to the states of the newest load, if it has any for this rank.

        Raises ConfigError if no checkpoint was loaded.
        """
        if not self._has_loaded:
            raise ConfigError("restore_random_states: call load_checkpoint first")
        restore_random_states(self._random, self._job.device)

    # -- weights alone ----------------------------------------------------------------------------
    def save_weights(self, save_dir: str | Path, filename: str, *, exclude_frozen: bool) -> None:
        """Write the state dict in the compute dtype to one file, on the first rank.

        Waits for pending updates and for the running save. Raises OSError of the disk.
        """
        self._job.trainer.check()
        self._job.settle()
        self.wait()
        self._team.all_or_raise(self._write_weights, Path(save_dir), filename, exclude_frozen)

    def _write_weights(self, save_dir: Path, filename: str, exclude_frozen: bool) -> None:
        if self._team.leader:
            weights = live_weights(self._job.partition.model, exclude_frozen=exclude_frozen)
            write_weights(weights, save_dir, filename)

    def weights(self, *, exclude_frozen: bool) -> dict[str, torch.Tensor]:
        """Return the state dict on the CPU without a copy: values change with the next step.

        Waits for pending updates.
        """
        self._job.settle()
        return live_weights(self._job.partition.model, exclude_frozen=exclude_frozen)


def _restore_scheduler(scheduler: Any, saved: dict[str, Any] | None, path: Path) -> None:
    """Load a schedule of learning rates. It comes first: if its code raises, nothing has changed.

    Raises ConfigError, with the old schedule restored.
    """
    if scheduler is None or saved is None:
        return
    before = scheduler.state_dict()
    try:
        scheduler.load_state_dict(saved)
    except Exception as error:
        scheduler.load_state_dict(before)
        raise ConfigError(
            f"{path}: its schedule of learning rates cannot be loaded into this "
            f"{type(scheduler).__name__}: {error!r}; pass load_lr_scheduler_states=False to go on "
            "with this one"
        ) from error


def _with_version(client: dict[str, Any], versions: dict[str, str]) -> dict[str, Any]:
    """Return the caller's state with DeepSpeed's version, as DeepSpeed's own engine returns it.

    `versions`: of the packages that wrote the checkpoint. An entry of the caller's stays.
    """
    return {"ds_version": versions.get("deepspeed"), **client}


def _state_of(stateful: Any) -> dict[str, Any] | None:
    """The state dict of a schedule or a data loader, or None if it has none."""
    return stateful.state_dict() if hasattr(stateful, "state_dict") else None


def _check_tags(engine: Any, tags: list[str]) -> None:
    """Obey `checkpoint.tag_validation` of the config. `tags`: of every rank; the first counts.

    Raises ConfigError on every rank if they differ and the key is "Fail". With "Warn", DeepSpeed's
    default, rank 0 logs a warning.
    """
    if len(set(tags)) == 1 or not engine.checkpoint_tag_validation_enabled():
        return
    message = (
        f"save_checkpoint: the ranks give different tags: {', '.join(sorted(set(tags)))}. Give one "
        "tag on every rank"
    )
    if engine.checkpoint_tag_validation_fail():
        raise ConfigError(f'{message}, or set checkpoint.tag_validation to "Warn"')
    logger.warning("%s. The checkpoint is saved as %s", message, tags[0])
