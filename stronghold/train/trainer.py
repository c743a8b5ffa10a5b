"""The trainer: one model in training.

It makes the nouns in order (layers, arrays, weights, gradients, updates, order, hooks), and closes
them in reverse.

[Note: interrupts] Ctrl-C, or an exception in a hook of the program, may end a step at any
bytecode.
1. It may leave a layer in two states at once, an operation on a lane whose fence was lost,
   gradients anywhere, and a pass open.
2. Nothing of this is repaired one by one. The lanes end all queued operations. Then every slot is
   empty, every gradient is dropped, every parameter points at the host, and no pass is open.
3. The arrays are whole, for lanes alone write them.
4. If updates were being queued, some layers may be a step ahead of others. Then nothing goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from stronghold import native
from stronghold.devices.base import Device
from stronghold.errors import ConfigError
from stronghold.model.inner_tensors import follow_device, wrappers
from stronghold.model.partition import Partition
from stronghold.plan.plan import Plan
from stronghold.train.arrays import Arrays
from stronghold.train.gradients import Gradients
from stronghold.train.hooks import Hooks
from stronghold.train.layer import Groups, Layer, Level
from stronghold.train.order import Order
from stronghold.train.updates import StepResult, Updates
from stronghold.train.weights import Weights


class Trainer:
    """Trains a partition's model by `plan` on `device`.

    layers   of the partition, in its order (`layers_of`)
    groups   the hyper-parameters of each trained parameter, live, and their optimizer
    kernels  run on the update lane
    folders  for the arrays that the plan puts in files
    """

    def __init__(
        self,
        partition: Partition,
        layers: list[Layer],
        groups: Groups,
        *,
        plan: Plan,
        device: Device,
        kernels: native.Kernels,
        folders: Sequence[Path] = (),
    ) -> None:
        self.model, self.layers = partition.model, layers
        self._device = device
        for layer in layers:
            layer.is_resident = layer.index in plan.resident
            layer.is_on_gpu = layer.index in plan.updated_on_gpu
            layer.level = Level(plan.activations[layer.index])
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(device.torch_device)
        accumulates = plan.accumulates
        self.arrays = Arrays(
            device,
            layers,
            accumulates=accumulates,
            in_files={layer: plan.homes.staged(layer.index) for layer in layers},
            staging=plan.staging,
            folders=folders,
        )
        follow_device(wrappers(self.model))
        self.weights = Weights(device, self.arrays, layers, plan.window)
        self.gradients = Gradients(
            device, self.arrays, kernels, layers, plan.gradient_slots, accumulates=accumulates
        )
        self.updates = Updates(device, self.arrays, kernels, layers, groups)
        self._order = Order(self.weights)
        modules = {layer: partition.layers[layer.index].modules for layer in layers}
        self._hooks = Hooks(self.model, modules, self._order, self.weights, self.gradients)

    # -- the step ---------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. If it raises, the gradients of earlier micro-batches stay."""
        self._begin("a forward")
        try:
            return self.model(*args, **kwargs)
        except Exception:
            raise  # the hooks have ended the pass
        except BaseException:
            self._hooks.forget()
            raise

    def backward(self, loss: Tensor, *, ends_step: bool = True, retain_graph: bool = False) -> None:
        """Run autograd. Gradients leave for the host layer by layer meanwhile.

        `ends_step`: `step` follows. If autograd raises, the step's gradients are dropped.
        """
        self._begin("a backward")
        self._hooks.take_gradients_last()
        self.gradients.ends_step = ends_step
        try:
            loss.backward(retain_graph=retain_graph)
        except BaseException:
            self.forget()
            raise

    def step(
        self, *, clipping: float = 0.0, loss_scale: float = 1.0, skips_overflow: bool = False
    ) -> StepResult:
        """Queue the updates of all layers with gradients (`Updates.step`)."""
        self._begin("a step")
        try:
            return self.updates.step(
                self.weights,
                self.gradients,
                clipping=clipping,
                loss_scale=loss_scale,
                skips_overflow=skips_overflow,
            )
        except BaseException:
            self.forget()
            raise

    def _begin(self, operation: str) -> None:
        """Raise what has failed. End a pass that an exception of the program left open."""
        self._device.check()
        self._hooks.forget_interrupted()
        if self.updates.is_broken:
            raise ConfigError(
                f"{operation}: an earlier step was interrupted while layers were updated, so some "
                "are a step ahead. Load a checkpoint"
            )

    # -- between steps ----------------------------------------------------------------------------
    def forget(self) -> None:
        """After an exception: drop the step's gradients, and end every pass ([Note:
        interrupts])."""
        self._hooks.forget()
        self.gradients.forget()

    def synchronize(self) -> None:
        """Wait until every parameter has its newest value. The program may read and write them now,
        between two passes; the next pass uses what it finds."""
        self._hooks.forget_interrupted()
        for layer in self.layers:
            layer.weight_record.wait()
        self.weights.outdate_all()
        self._device.check()

    def close(self) -> None:
        """Finish the lanes, and give the model back: every parameter is a CPU tensor with its
        newest value. The caller closes the device and the kernels."""
        self._device.finish()
        self._hooks.close()
        self.gradients.close()
        self.weights.close()
        self.arrays.close()
        follow_device(wrappers(self.model))
        for buffer in self.model.buffers():
            buffer.data = buffer.data.cpu()
