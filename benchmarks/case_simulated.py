"""A machine that is a profile: stronghold's own planner and executor, on virtual clocks.

Only stronghold is predicted; what other systems would do there is not ours to say. A prediction has
no losses, and its row says "simulated" where a measured one has a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from case_machine import Machine, Row
from compare import rates
from methods.task import DTYPES, Task

from stronghold.errors import BudgetError
from stronghold.limits import update_cores
from stronghold.optim import DEFAULT
from stronghold.optim.states import EXACT, states_of
from stronghold.plan.cost import Demand, workload_of
from stronghold.plan.machine import MachineProfile, rates_of
from stronghold.plan.plan import make_plan
from stronghold.predict.simulate import fastest_plan, simulate
from stronghold.tools.estimate.model import from_sizes

OURS = "stronghold"


class Simulated(Machine):
    """The machine of a profile, by name or file. Caps of the task replace its sizes of memory.

    Without a window the plan is the fastest that fits, as with `stronghold plan`.
    """

    simulated = True

    def __init__(self, name: str) -> None:
        self._profile = MachineProfile.load(name)
        self.word = f"simulated {Path(name).stem}"
        self.description = (
            "**Predicted**, not measured: stronghold's planner and executor on virtual clocks, for "
            f"{self._profile.name}. Compute is taken at that profile's rate of large matrix "
            "products, which real layers do not quite reach."
        )

    def methods(self) -> list[str]:
        return [OURS]

    def compare(self, names: Sequence[str], task: Task) -> list[Row]:
        return [self.run(name, task) for name in names]

    def run(self, method: str, task: Task) -> Row:
        if method != OURS:
            return {
                "method": method,
                "status": "not here",
                "reason": "stronghold alone is simulated",
            }
        model = from_sizes(task.layers, task.hidden, task.heads, task.vocab, task.seq)
        sizes, costs = (model.layout, model.costs_of(task.batch, task.seq, task.precision))
        dtype = DTYPES[task.precision]
        demand = Demand(
            states=states_of(dtype, EXACT, DEFAULT.moments),
            accumulate=task.accumulation > 1,
            gpu_budget_bytes=task.gpu_memory or self._profile.gpu_memory_bytes,
            host_budget_bytes=task.host_memory or self._profile.host_memory_bytes,
            window=task.window,
            prefetch=task.prefetch,
            activations=task.activations,
            work=workload_of(costs, self._profile).layers,
            num_cores=task.threads or update_cores(self._profile.num_cores, compute_threads=1),
        )
        work = workload_of(costs, self._profile, micro_batches=task.accumulation)
        lanes = rates_of(self._profile, demand.num_cores)
        try:
            if task.window is None:
                plan = fastest_plan(sizes, demand, work, lanes).plan
            else:
                plan = make_plan(sizes, demand)
        except BudgetError as error:
            return {"method": method, "status": "out of memory", "reason": str(error)}
        predicted = simulate(sizes, plan, work, lanes)
        row = {
            "method": method,
            "status": "ok",
            "verdict": "simulated",
            "loss_difference": None,
            "wall_s": predicted.step_s * task.steps,
            "step_s": [predicted.step_s] * task.steps,
            "num_parameters": sizes.num_parameters,
            "activations": task.activations,
            "device_peak_bytes": plan.gpu_total_bytes + plan.activation_bytes,
            "host_anonymous_peak_bytes": plan.host_total_bytes,
            "link_bytes": None,
            "window": plan.window,
            "bound": predicted.bound,
            "critical_s": dict(predicted.critical),
        }
        return row | rates(row, task)
