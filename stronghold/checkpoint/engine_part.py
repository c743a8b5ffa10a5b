"""The engine's methods that save and load.

Owns the save that is running. `StrongholdEngine` inherits it: what a method here needs of the
engine is declared at the top of the class. The training thread alone enters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stronghold.checkpoint import directory, shared_folder, state
from stronghold.checkpoint.load import Load
from stronghold.checkpoint.manifest import MANIFEST, Slices
from stronghold.checkpoint.save import Contents, Save
from stronghold.checkpoint.shared_save import SharedSave, alike, together
from stronghold.checkpoint.weights import live_weights, write_weights
from stronghold.config import Settings
from stronghold.errors import ConfigError
from stronghold.runtime.loss_scale import restore_scaler, scaler_state
from stronghold.runtime.optimizer import EngineOptimizer
from stronghold.runtime.stack import Stack

logger = logging.getLogger("stronghold")

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
GAS = "gradient_accumulation_steps"


class Checkpoints:
    """`save_checkpoint`, `load_checkpoint` and their kin, as DeepSpeed's engine has them."""

    _stack: Stack
    module: nn.Module
    settings: Settings
    optimizer: EngineOptimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    global_steps: int
    micro_steps: int
    _loss_sum: torch.Tensor | None
    gradient_accumulation_steps: Callable[[], int]
    synchronize: Callable[[], None]

    _saving: Save | None = None

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that the next step depends on as `save_dir/tag` (`global_step{N}` without
        one); True.

        The tag appears complete or not at all, then `latest` names it. With
        stronghold.async_checkpoint the files are written while the next steps compute, and a
        failure is raised once, as LaneError, by the next forward, save, load or
        wait_for_checkpoint; else OSError is raised here. Either way training can go on.
        ConfigError between the micro-batches of one step.
        """
        if not save_dir:
            raise ConfigError(f"save_checkpoint: save_dir is {save_dir!r}, expected a directory")
        self.wait_for_checkpoint()
        self._stack.runtime.ledger.check()
        if self._stack.runtime.ledger.pending:
            raise ConfigError(
                "save_checkpoint: gradients of a step that has not ended are waiting; call it "
                f"after the engine.step that ends the step ({GAS} is "
                f"{self.gradient_accumulation_steps()})"
            )
        ranks = self._stack.ranks
        make = Save if ranks is None else partial(SharedSave, ranks=ranks)
        save = make(
            self._stack,
            self.optimizer,
            Path(save_dir),
            directory.check_tag(f"global_step{self.global_steps}" if tag is None else tag),
            Contents(
                client=self._client_state(client_state or {}),
                counters={**{name: getattr(self, name) for name in COUNTERS}, GAS: self._gas()},
                exclude_frozen=exclude_frozen_parameters,
                slices=self._slices(),
            ),
            latest=save_latest,
        )
        if self.settings.stronghold.async_checkpoint:
            save.beside()
            self._saving = save
        else:
            save.now()
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until a save that runs beside training is complete; raise its error if it failed."""
        self._stack.check_process("a checkpoint")
        saving = self._saving
        if saving is None:
            return
        try:
            saving.wait()
        except Exception:  # told once
            self._saving = None
            raise
        self._saving = None

    def _hear_of_checkpoint(self) -> None:
        """Raise the error of a save beside training that has failed meanwhile, once."""
        if self._saving is not None and self._saving.ended:
            self.wait_for_checkpoint()

    def _gas(self) -> int:
        return int(self.gradient_accumulation_steps())

    def _client_state(self, client: dict[str, Any]) -> state.ClientState:
        return state.ClientState(
            scheduler=_state_of(self.lr_scheduler),
            loader=_state_of(self.training_dataloader),
            client=client,
            loss_scale=_scale_of(self.optimizer),
            random=state.random_states(self._stack.device),
            random_of_ranks=self._random_of_ranks(),
        )

    def _random_of_ranks(self) -> list[Any] | None:
        ranks = self._stack.ranks
        if ranks is None:
            return None
        found = ranks.files.objects(state.random_states(self._stack.device), "random states")
        return [found[ranks.company.index(member)] for member in ranks.members]

    def _slices(self) -> Slices:
        ranks = self._stack.ranks
        if ranks is None:
            return Slices()
        return Slices(rank=ranks.model_parallel_rank, size=ranks.model_parallel_size)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load `load_dir/tag` (the tag that `latest` names, without one) and return the path of
        its state file, as DeepSpeed does, and the client state that was saved; (None, None) when
        there is no `latest`.

        Everything is verified before anything in memory changes: CheckpointError for files that are
        missing, cut off, changed or foreign, ConfigError for a checkpoint of another model.
        `load_module_only` loads the weights alone: masters become these weights, moments, counters
        and random states stay. No code of the checkpoint's runs for them: where the client state
        has objects that need it, it is None.
        """
        self.wait_for_checkpoint()
        root, ranks = Path(load_dir), self._stack.ranks
        if tag is None:
            tag = directory.read_latest(root)
            if ranks is not None:
                tag = shared_folder.first_tag(ranks, tag)
            if tag is None:
                logger.warning(
                    "load_checkpoint: no file named latest in %s; nothing is loaded", root
                )
                return None, None
        wanted = load_optimizer_states and not load_module_only
        tag, slices = directory.check_tag(tag), self._slices()
        if ranks is not None:
            name = Slices(size=slices.size).name(MANIFEST)
            shared_folder.check_same(ranks, root / tag, name)
        path = alike(ranks, lambda: directory.resolve(root, tag))
        load = alike(
            ranks,
            lambda: Load(
                path,
                self._stack,
                self.optimizer if wanted else None,
                names_must_match=load_module_strict,
                slices=slices,
                trusted=not load_module_only,
            ),
        )
        with load:
            if ranks is not None:
                shared_folder.check_opened(ranks, path, load.mark)
            if not load_module_only:
                alike(ranks, lambda: self._restore_client(load, path, load_lr_scheduler_states))
            with self._stack.runtime.ledger.changing(f"load_checkpoint({str(path)!r})"):
                load.into_slabs(custom_load_fn)
                if not load_module_only:
                    self._restore(load)
        return str(path / slices.state), None if load.state is None else load.state.client

    def _restore_client(self, load: Load, path: Path, scheduler: bool) -> None:
        """What code that is not ours takes over, before anything of ours changes: it may refuse."""
        assert load.state is not None
        if scheduler and load.state.scheduler is not None and self.lr_scheduler is not None:
            before = self.lr_scheduler.state_dict()
            try:
                self.lr_scheduler.load_state_dict(load.state.scheduler)
            except Exception as error:
                self.lr_scheduler.load_state_dict(before)
                raise ConfigError(
                    f"{path}: its schedule of learning rates cannot be loaded into this "
                    f"{type(self.lr_scheduler).__name__}: {error!r}; pass "
                    "load_lr_scheduler_states=False to go on with this one"
                ) from error

    def _restore(self, load: Load) -> None:
        saved, counters = load.state, load.manifest.counters
        assert saved is not None
        for name in COUNTERS:
            setattr(self, name, counters[name])
        self._loss_sum = None
        if counters[GAS] != self._gas():  # saves are at boundaries: this one is the next step's
            self.micro_steps = self.global_steps * self._gas()
        if saved.loader is not None and hasattr(self.training_dataloader, "load_state_dict"):
            self.training_dataloader.load_state_dict(saved.loader)
        if self.optimizer is not None and saved.loss_scale is not None:
            restore_scaler(self.optimizer.loss_scaler, saved.loss_scale)
        state.restore_random_states(self._own_random(saved), self._stack.device)

    def _own_random(self, saved: state.ClientState) -> dict[str, Any] | None:
        """Of as many ranks each its own again; of another number the first goes on with the
        first's, and the others with what they have."""
        ranks = self._stack.ranks
        if ranks is None or saved.random is None:
            return saved.random
        of_ranks = saved.random_of_ranks or []
        if len(of_ranks) == ranks.num_ranks:
            found: dict[str, Any] = of_ranks[ranks.rank]
            return found
        return saved.random if ranks.rank == 0 else None

    # -- weights alone --------------------------------------------------------------------------
    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the model's state dict in the compute dtype to one file: safetensors by its suffix,
        else torch's own format. True. Tied parameters are stored once.
        """
        self._stack.runtime.ledger.check()
        self.synchronize()
        ranks = self._stack.ranks
        if ranks is not None and ranks.norms is not None:
            raise ConfigError(
                f"save_16bit_model: the model is split over {ranks.model_parallel_size} "
                "model-parallel ranks, and one file would have the slices of one of them: put its "
                "parts together from every rank's state_dict, or use save_checkpoint"
            )
        if ranks is None:
            self._write_weights(save_dir, save_filename, exclude_frozen_parameters)
            return True

        def write() -> None:
            if ranks.rank == 0:
                self._write_weights(save_dir, save_filename, exclude_frozen_parameters)

        self.wait_for_checkpoint()
        together(ranks, write)
        return True

    def _write_weights(self, save_dir: str | Path, filename: str, exclude_frozen: bool) -> None:
        weights = live_weights(self._stack, exclude_frozen=exclude_frozen)
        write_weights(weights, Path(save_dir), filename)

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor]:
        """The state dict on the CPU without a copy: values change with the next step."""
        self.synchronize()
        return live_weights(self._stack, exclude_frozen=exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict


def _state_of(part: Any) -> dict[str, Any] | None:
    return part.state_dict() if hasattr(part, "state_dict") else None


def _scale_of(optimizer: EngineOptimizer | None) -> dict[str, Any] | None:
    return None if optimizer is None else scaler_state(optimizer.loss_scaler)
