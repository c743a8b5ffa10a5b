"""The mutants of scripts/mutants: one line of the core each, made wrong, and what tells."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """`old`, which `file` of the package has exactly once, becomes `new`. `tests` are files or node
    ids of the default run, of which `select` (pytest's -k) chooses."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    select: str = ""


BITS = ("tests/laws/test_bits.py::test_nothing_changes_a_bit",)
CHUNKS = ("tests/laws/test_chunks.py",)
PARTS = ("tests/laws/test_parts.py",)
FENCE = ("tests/units/test_fence.py",)
HOST = ("tests/units/test_host.py",)
ORDER = ("tests/units/test_order.py",)
TEAM = ("tests/units/test_rank_team.py",)
WINDOW = ("tests/units/test_window.py",)
RECOMPUTE = ("tests/laws/test_recompute.py",)
RESIDENTS = ("tests/laws/test_residents.py",)
ENGINE = ("tests/laws/test_engine.py",)
ODD = ("tests/laws/test_engine_odd_steps.py",)
RESUME = ("tests/laws/test_checkpoint_resume.py",)
FP16 = ("tests/laws/test_fp16.py",)
READS = ("tests/laws/test_reads.py",)
DEFERRAL = ("tests/laws/test_deferral.py",)
WEIGHTS_READ = ("tests/laws/test_weights_read.py",)

RECORDS = [
    Mutant(
        "a reader is not noted",
        "device/fence.py",
        "        record.read(fence)\n",
        "        pass\n",
        FENCE,
    ),
    Mutant(
        "a writer is not noted",
        "device/fence.py",
        "        self._writer = fence\n",
        "        pass\n",
        FENCE,
    ),
    Mutant(
        "a writer does not wait for the readers before it",
        "device/fence.py",
        "return (self._writer, *self._readers)",
        "return (self._writer,)",
        FENCE,
    ),
    Mutant(
        "a writer keeps the readers before it",
        "device/fence.py",
        "        self._readers = []\n",
        "        pass\n",
        FENCE,
    ),
    Mutant(
        "what is read is no dependence",
        "device/fence.py",
        "found[record.writer] = None",
        "pass",
        FENCE,
    ),
    Mutant(
        "what is written is no dependence",
        "device/fence.py",
        "found.update(dict.fromkeys(record.users))",
        "pass",
        FENCE,
    ),
    Mutant(
        "what is given beside the records is dropped",
        "device/fence.py",
        "found = dict.fromkeys(after)",
        "found: dict[Fence, None] = {}",
        FENCE,
    ),
    Mutant(
        "a reader on compute stands for those on other streams",
        "device/fence.py",
        'if one.lane == "compute" or one.lane != fence.lane]',
        "if one.lane != fence.lane]",
        FENCE,
    ),
    Mutant(
        "of many readers those that run are forgotten",
        "device/fence.py",
        "if not one.done]",
        "if one.done]",
        FENCE,
    ),
    Mutant(
        "who waits for an operation that failed is not told",
        "device/fence.py",
        "        if self._error is not None:\n",
        "        if False:\n",
        FENCE,
    ),
]

UPDATES = [
    Mutant(
        "the clip coefficient is forgotten",
        "runtime/update.py",
        "self._adam(self._waiting(state), scale)",
        "self._adam(self._waiting(state), 1.0)",
        BITS,
        "gpt_tied and gate",
    ),
    Mutant(
        "the clip coefficient is forgotten on the device",
        "runtime/update.py",
        'rows["grad_scale"] = scale',
        'rows["grad_scale"] = 1.0',
        BITS,
        "whole and gate and (gpt or megatron_gpt)",
    ),
    Mutant(
        "the second part of a gradient takes the first one's place",
        "runtime/update.py",
        "_merge(held[own], new[own], add=k in repeated)",
        "_merge(held[own], new[own], add=False)",
        ENGINE,
        "two_backwards_before or two_forwards_before",
    ),
    Mutant(
        "a layer that waits for the end of backward is not updated",
        "runtime/update.py",
        "                self._adam(self._waiting(state), 1.0)\n",
        "                pass\n",
        BITS,
        "gpt and (deferred-1-fp32 or deferred-1-bf16)",
    ),
    Mutant(
        "a layer that was updated as its gradients came is updated again",
        "runtime/update.py",
        "            if state.arrived and not state.applied:\n                state",
        "            if state.arrived:\n                state",
        PARTS,
    ),
    Mutant(
        "an early update is not noted",
        "runtime/update.py",
        "state.applied = True  # also when it fails halfway",
        "pass",
        ENGINE,
        "early_updates_refuse",
    ),
    Mutant(
        "a step that overflows counts for Adam",
        "runtime/update.py",
        "self._adam_steps.retract(found.state, found.arrived)",
        "pass",
        RESIDENTS,
        "overflow or not_finite",
    ),
    Mutant(
        "sums are begun as if there were some",
        "runtime/update.py",
        "                    k in repeated[piece.found.state.index],\n",
        "                    True,\n",
        BITS,
        "gpt and 3-",
    ),
    Mutant(
        "the norm is the last micro-batch's",
        "runtime/update.py",
        'norms.add(piece, "accumulated")',
        "norms.add(piece)",
        BITS,
        "gpt and 3- and gate",
    ),
    Mutant(
        "a step that overflows is applied",
        "runtime/update.py",
        "            if not gate.overflow:\n",
        "            if True:\n",
        FP16,
        "overflow_skips",
    ),
    Mutant(
        "an update does not wait for the drain",
        "runtime/update.py",
        "                reads=(found.record,),\n                writes=writes,\n",
        "                writes=writes,\n",
        BITS,
        "-ram- and late and (early or deferred)",
    ),
    Mutant(
        "nobody waits for an update",
        "runtime/update.py",
        "                reads=(found.record,),\n                writes=writes,\n",
        "                reads=(found.record,),\n",
        BITS,
    ),
    Mutant(
        "a spill does not wait for its piece's update",
        "runtime/update.py",
        "writes=(entry.record, *writes),",
        "writes=writes,",
        BITS,
        "moments and late",
    ),
    Mutant(
        "what was loaded ahead outlives backward",
        "runtime/update.py",
        "self._adam(self._waiting(state), 1.0)\n        self._drop_expected()\n",
        "self._adam(self._waiting(state), 1.0)\n",
        DEFERRAL,
        "loaded_ahead_is_dropped",
    ),
    Mutant(
        "masters and moments of all parameters are the first one's",
        "runtime/update.py",
        "*(begin + i // of * size for begin, size, of in states),",
        "*(begin for begin, size, of in states),",
        BITS,
        "gpt_tied and bf16",
    ),
    Mutant(
        "autograd is not told of an update on the device",
        "runtime/update.py",
        "torch.autograd.graph.increment_version(",
        "list(",
        RESIDENTS,
        "older_than or detached",
    ),
    Mutant(
        "norms of earlier steps are in this one's",
        "runtime/update.py",
        "        self._device_sums.clear()\n",
        "        pass\n",
        (*RESIDENTS, *FP16, *BITS),
    ),
    Mutant(
        "clipping enlarges small gradients",
        "runtime/ledger.py",
        "(1.0 if clipped > 1.0 else clipped)",
        "clipped",
        ("tests/units/test_gate.py",),
    ),
    Mutant(
        "a gradient that comes twice is not noticed",
        "runtime/ledger.py",
        "repeated = arrived & state.arrived",
        "repeated: frozenset[int] = frozenset()",
        ENGINE,
        "two_backwards_before",
    ),
    Mutant(
        "weights of two steps are trained on",
        "runtime/ledger.py",
        "            raise ConfigError(self._torn)\n",
        "            pass\n",
        DEFERRAL,
        "not_trained_on",
    ),
]

PASSES = [
    Mutant(
        "calls of the step before count",
        "runtime/executor.py",
        "state.calls = state.chunks = 0",
        "state.chunks = 0",
        ("tests/laws/test_memory.py",),
        "12_bytes",
    ),
    Mutant(
        "a fetch does not wait for what is read from its file",
        "runtime/executor.py",
        "                reads=(entry.record,),\n",
        "                reads=(),\n",
        BITS,
        "weights and late",
    ),
    Mutant(
        "a resident layer keeps the weights of before",
        "runtime/executor.py",
        "                self._layers[layer].stale = True\n",
        "                pass\n",
        BITS,
        "one and resident and gpt",
    ),
    Mutant(
        "backward ends without the updates that waited for it",
        "runtime/executor.py",
        "            self._updates.end_backward()\n",
        "            pass\n",
        DEFERRAL,
        "lanes_do",
    ),
    Mutant(
        "who reads a parameter does not wait for its update",
        "runtime/executor.py",
        "            self._layers[layer].wait()\n",
        "            pass\n",
        READS,
        "between_steps or shows_the_last_step",
    ),
    Mutant(
        "a truncated file is read on",
        "runtime/executor.py",
        "        self._host.tiers.check()\n",
        "        pass\n",
        ("tests/faults/test_nvme_training_faults.py",),
        "truncated",
    ),
    Mutant(
        "the second part of a gradient in one backward is the gradient",
        "runtime/drains.py",
        "target.add_(gradient)",
        "target.copy_(gradient)",
        CHUNKS,
        "where_layers_are",
    ),
    Mutant(
        "a layer is drained before its last chunk",
        "runtime/drains.py",
        "if state.chunks == 0 and state.calls <= 1",
        "if state.chunks <= 1 and state.calls <= 1",
        CHUNKS,
        "where_layers_are",
    ),
    Mutant(
        "sums of chunks are not rounded to the gradients",
        "runtime/drains.py",
        "            self._join(layer, slot)\n            slot.round_sums()\n",
        "            self._join(layer, slot)\n",
        CHUNKS,
        "where_layers_are",
    ),
    Mutant(
        "weights that an alias shows are updated in backward",
        "runtime/drains.py",
        "late = not state.on_device and (state.calls > 1 or self._aliased(layer))",
        "late = not state.on_device and state.calls > 1",
        ("tests/laws/test_aliases.py", *READS),
    ),
    Mutant(
        "the drains' boundaries are the layer's, and not the rank's",
        "runtime/drains.py",
        "first, last = state.begin, state.end",
        "first, last = 0, state.end",
        ("tests/laws/test_ranks.py::test_ranks_have_the_bits_of_one_that_accumulates",),
        "gpt",
    ),
]

HOOKS = [
    Mutant(
        "a pass counts the calls of the one before",
        "runtime/hooks.py",
        "        self._called.clear()\n",
        "        pass\n",
        WEIGHTS_READ,
        "read_after_steps or below_python or evaluation_alone",
    ),
    Mutant(
        "what was refused once is refused for good",
        "runtime/hooks.py",
        "        self._missed.clear()\n",
        "        pass\n",
        WEIGHTS_READ,
        "below_python",
    ),
    Mutant(
        "gradients of what is not trained go to the optimizer",
        "runtime/hooks.py",
        "            if not trained:\n",
        "            if False:\n",
        ("tests/laws/test_optimizer.py",),
        "outside_the_optimizer",
    ),
    Mutant(
        "a forward that raises leaves its layer open",
        "runtime/hooks.py",
        "OwnHook(self._after_layer(layer.index)), always_call=True",
        "OwnHook(self._after_layer(layer.index)), always_call=False",
        ENGINE,
        "after_a_failure",
    ),
    Mutant(
        "a graph takes weights that were updated on the device since",
        "runtime/activations.py",
        "if packed.tensor._version != packed.version:",
        "if False:",
        RESIDENTS,
        "older_than or detached",
    ),
    Mutant(
        "a graph of the gradients keeps a slot for a weight",
        "runtime/activations.py",
        "return weight.clone() if torch.is_grad_enabled() else weight",
        "return weight",
        ODD,
        "penalty",
    ),
    Mutant(
        "generators go on from the recomputation",
        "runtime/recompute.py",
        "            _set_states(now)\n",
        "            pass\n",
        RECOMPUTE,
        "generators_go_on",
    ),
    Mutant(
        "a block runs to its end when it runs again",
        "runtime/recompute.py",
        "if index + 1 == len(self._saved):",
        "if index == len(self._saved):",
        RECOMPUTE,
        "as_far_as",
    ),
    Mutant(
        "a recomputation leaves the block as it was before",
        "runtime/recompute.py",
        "for where, held in reversed(outside):",
        "for where, held in ():",
        RECOMPUTE,
        "change_once or generators_go_on",
    ),
    Mutant(
        "a block runs again outside of its autocast",
        "runtime/recompute.py",
        "if arguments != _autocast_of(arguments[0]):",
        "if False:",
        RECOMPUTE,
        "stands_where",
    ),
    Mutant(
        "an argument that was written since is taken",
        "runtime/recompute.py",
        "            if tensor._version != version:\n                raise RuntimeError(",
        "            if False:\n                raise RuntimeError(",
        RECOMPUTE,
        "among_the_arguments",
    ),
    Mutant(
        "the trial of a block leaves it in evaluation",
        "runtime/chunks.py",
        "part.training = mode",
        "pass",
        CHUNKS,
        "where_layers_are",
    ),
    Mutant(
        "a block that mixes its batch is divided",
        "runtime/chunks.py",
        "            if not same:\n",
        "            if False:\n",
        CHUNKS,
        "cannot_be_divided",
    ),
    Mutant(
        "a block keeps the views of its last chunk",
        "runtime/chunks.py",
        "                table[name] = parameter\n",
        "                pass\n",
        CHUNKS,
        "where_layers_are or given_back",
    ),
]

MEMORY = [
    Mutant(
        "who used a slot is forgotten",
        "memory/window.py",
        "            slot.record.read(after)\n",
        "            pass\n",
        WINDOW,
    ),
    Mutant(
        "two layers have one slot",
        "memory/window.py",
        "if slot.layer not in (None, layer):",
        "if False:",
        WINDOW,
    ),
    Mutant(
        "held gradients are given to the next to come",
        "memory/window.py",
        "        slot.held = True\n",
        "        pass\n",
        RESIDENTS,
        "two_backwards",
    ),
    Mutant(
        "a slot has the arrivals of the layer before",
        "memory/window.py",
        "        slot.arrived.clear()\n",
        "        pass\n",
        BITS,
        "gpt_tied and -ram-",
    ),
    Mutant(
        "a slot that was freed is taken first",
        "memory/window.py",
        "self._slots = [*(other for other in self._slots if other is not slot), slot]",
        "self._slots = [slot, *(other for other in self._slots if other is not slot)]",
        WINDOW,
    ),
    Mutant(
        "a transfer begins before what it waits for",
        "memory/tiers.py",
        "return all(fence.done and not fence.failed for fence in self._after)",
        "return True",
        BITS,
        "moments and late",
    ),
    Mutant(
        "a transfer begins behind one that failed",
        "memory/tiers.py",
        "fence.done and not fence.failed for",
        "fence.done for",
        ("tests/units/test_transfers.py",),
    ),
    Mutant(
        "nobody waits for a load",
        "memory/tiers.py",
        "            reads=reads,\n            writes=(entry.record,),\n",
        "            reads=reads,\n            writes=(),\n",
        BITS,
        "moments and late",
    ),
    Mutant(
        "a spill does not hold its entry",
        "memory/tiers.py",
        "            reads=(entry.record,),\n",
        "            reads=(),\n",
        BITS,
        "moments and late",
    ),
    Mutant(
        "weights are cut off, and not rounded from their masters",
        "states.py",
        "upper = (bits + 0x8000) >> 16",
        "upper = bits >> 16",
        ("tests/border/test_checkpoint_deepspeed.py",),
        "master_survives",
    ),
    Mutant(
        "a master has its remainder on the wrong side",
        "states.py",
        "(upper << 16) + low.to(torch.int32)",
        "(upper << 16) - low.to(torch.int32)",
        HOST,
    ),
    Mutant(
        "a weight that was written keeps its old remainder",
        "memory/host.py",
        'found["low"].zero_()',
        "pass",
        HOST,
    ),
    Mutant(
        "masters of fp16 begin at zero",
        "memory/host.py",
        'if array == "low" and dtype is torch.float32:',
        "if False:",
        HOST,
    ),
]

CHECKPOINTS = [
    Mutant(
        "a save beside training holds no update back",
        "checkpoint/save.py",
        "lane.submit(name, work, reads=state.records_of(STATES))",
        "lane.submit(name, work)",
        RESUME,
        "beside_training_equals",
    ),
    Mutant(
        "Adam's step is not saved",
        "checkpoint/save.py",
        "step=stack.host.layers[index].counts[k],",
        "step=0,",
        RESUME,
        "go_back",
    ),
    Mutant(
        "a save that failed leaves its files",
        "checkpoint/save.py",
        "                directory.remove(self._hidden)\n",
        "                pass\n",
        RESUME,
        "as_they_were",
    ),
    Mutant(
        "every tag is the latest",
        "checkpoint/save.py",
        "        if self._latest:\n",
        "        if True:\n",
        RESUME,
        "counters_tags",
    ),
    Mutant(
        "a save whose layer failed to update is published",
        "checkpoint/save.py",
        "            job.wait()\n",
        "            pass\n",
        RESUME,
        "failed_to_update",
    ),
    Mutant(
        "Adam's step is not loaded",
        "checkpoint/load.py",
        "self._stack.host.layers[index].counts[k] = record.step",
        "pass",
        RESUME,
        "go_back",
    ),
    Mutant(
        "second moments are not loaded",
        "checkpoint/load.py",
        "for array in states.moments:",
        "for array in list(states.moments)[:1]:",
        RESUME,
        "go_back",
    ),
    Mutant(
        "weights alone keep the masters of before",
        "checkpoint/load.py",
        "host.restart_master(index, positions)",
        "pass",
        RESUME,
        "weights_alone",
    ),
    Mutant(
        "a file that is written while it is read is trusted",
        "checkpoint/load.py",
        "        self._tag.check_unchanged()\n",
        "        pass\n",
        ("tests/faults/test_checkpoint_files.py",),
        "written_to_while",
    ),
    Mutant(
        "buffers are not loaded",
        "checkpoint/load.py",
        "buffer.data.copy_(self._tag.tensors(self._tag.buffers).read(name))",
        "pass",
        BITS,
        "buffers and resumed",
    ),
    Mutant(
        "a checkpoint of another model is loaded",
        "checkpoint/load.py",
        "if strict and (missing or extra):",
        "if False:",
        ("tests/faults/test_checkpoint_files.py",),
        "another_model",
    ),
]

RANKS = [
    Mutant(
        "a layer is reduced before its turn",
        "team/ranks.py",
        "and self._layers[self._next] in self._closed:",
        "and self._closed:",
        ORDER,
    ),
    Mutant(
        "a layer too few is closed",
        "team/ranks.py",
        "self._layers.index(layer) + 1 - self._num_slots",
        "self._layers.index(layer) - self._num_slots",
        ORDER,
    ),
    Mutant(
        "layers are closed for good",
        "team/ranks.py",
        "        self._closed.clear()\n",
        "        pass\n",
        ORDER,
    ),
    Mutant(
        "another rank's gradients are taken for what lay there",
        "team/ranks.py",
        "return state.trained - slot.arrived",
        "return frozenset()",
        TEAM,
    ),
    Mutant(
        "gradients of the step before have come",
        "team/ranks.py",
        "        self._touched.clear()\n",
        "        pass\n",
        TEAM,
    ),
    Mutant(
        "the gate looks at one rank's gradients",
        "team/ranks.py",
        "(rows[:, PARTS:] > 0).any(dim=0)",
        "(rows[:1, PARTS:] > 0).any(dim=0)",
        TEAM,
    ),
    Mutant(
        "ranks that did not do the same go on",
        "team/ranks.py",
        "        self._check_same(rows[:, 1:3].tolist())\n",
        "        pass\n",
        TEAM,
    ),
    Mutant(
        "reductions are not compared",
        "team/ranks.py",
        'self.note("reduce", state.index)',
        "pass",
        TEAM,
    ),
    Mutant(
        "a step that one rank threw away is taken",
        "team/ranks.py",
        'self.note("reduce", len(self._layers))',
        "pass",
        TEAM,
    ),
    Mutant(
        "what every rank has whole is counted by each",
        "team/ranks.py",
        "if whole or _is_split(state.parameters[k]) or not math.isfinite(value)",
        "if True",
        TEAM,
    ),
    Mutant(
        "a weight is updated while this rank reads it alone",
        "team/ranks.py",
        '            self._layers[layer].records["weights"].wait()\n',
        "            pass\n",
        TEAM,
    ),
    Mutant(
        "an order that one rank saw is adopted",
        "team/ranks.py",
        "if len(set(rows[:, column].tolist())) == 1:",
        "if True:",
        TEAM,
    ),
    Mutant(
        "a mean is rounded after every rank",
        "team/group.py",
        "total = part[order[0]].float()",
        "total = part[order[0]]",
        TEAM,
    ),
    Mutant(
        "a mean is a sum",
        "team/group.py",
        "= total / len(order)",
        "= total",
        TEAM,
    ),
    Mutant(
        "a layer is new when one rank's part is",
        "team/ranks.py",
        "int(versions.min()) < expected",
        "int(versions.max()) < expected",
        TEAM,
    ),
]

# What programs do that a loop does not.
ODDITIES = [
    Mutant(
        "what was written in place is in no copy that was fetched",
        "runtime/executor.py",
        "if ahead and (written or self._bindings.aliased(layer)):",
        "if ahead and self._bindings.aliased(layer):",
        ("tests/laws/test_weights_written.py", "tests/laws/test_aliases.py"),
    ),
    Mutant(
        "a gradient that comes after its update is dropped",
        "runtime/ledger.py",
        "if state.applied and names:",
        "if False:",
        PARTS,
    ),
    Mutant(
        "a second call counts as the first",
        "runtime/executor.py",
        "self._layers[layer].calls += 1",
        "self._layers[layer].calls = 1",
        PARTS,
    ),
    Mutant(
        "a head that is read without its call is not noticed",
        "runtime/hooks.py",
        "self._missed |= (self._expected - self._called).intersection(stale)",
        "pass",
        (*RESIDENTS, *WEIGHTS_READ),
    ),
    Mutant(
        "a part that is called by itself has old weights around it",
        "runtime/hooks.py",
        "if self._depth == 0 and self._executor.phase is Phase.IDLE:",
        "if False:",
        WEIGHTS_READ,
    ),
]

MUTANTS = (*RECORDS, *UPDATES, *PASSES, *HOOKS, *MEMORY, *CHECKPOINTS, *RANKS, *ODDITIES)
