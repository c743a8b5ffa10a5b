"""How the step grows with the number of GPUs, by the simulator: the table of docs/scaling.md.

    python benchmarks/several_gpus.py [--machine a100-80gb] [--exchange GBPS]

Nodes of 8 GPUs; a rank receives NODE_WIRE_GBPS from ranks of its node, and NETWORK_GBPS from other
nodes (one network adapter of 200 Gb/s for each GPU), or of weights what --exchange says: they go
from host memory to host memory over gloo, which may reach less. The real gathers, reductions and
exchanges on clocks, with every rank's share of state, of the wire's bytes and of Adam; no
collective's own latency, and no straggler.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stronghold.model.layout import for_ranks
from stronghold.optim import DEFAULT
from stronghold.optim.states import EXACT, states_of
from stronghold.plan.cost import Demand, workload_of
from stronghold.plan.machine import MachineProfile, rates_of
from stronghold.plan.plan import make_plan
from stronghold.predict.simulate import simulate
from stronghold.tools.estimate.model import from_sizes

MODELS = {"7 B": (32, 4096, 32, 32000), "65 B": (80, 8192, 64, 32000)}
BATCH, SEQ, WINDOW, RANKS_OF_NODE = 4, 2048, 4, 8
NODE_WIRE_GBPS, NETWORK_GBPS = 200.0, 25.0
LANES = ("compute", "gather", "reduce", "exchange", "update")
GIB = 1 << 30


def row(name: str, num_ranks: int, machine: MachineProfile, exchange_gbps: float | None) -> str:
    model = from_sizes(*MODELS[name], SEQ)
    layout = for_ranks(model.layout, num_ranks)
    sharing = min(num_ranks, RANKS_OF_NODE)
    num_nodes = num_ranks // sharing
    threads = max(1, machine.num_cores // sharing)
    demand = Demand(
        states=states_of(torch.bfloat16, EXACT, DEFAULT.moments),
        accumulate=False,
        window=WINDOW,
        activations="recompute",
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        cpu_threads=threads,
    )
    plan = make_plan(layout, demand)
    rates = rates_of(
        machine,
        threads,
        sharing=sharing,
        num_nodes=num_nodes,
        wire_gbps=NODE_WIRE_GBPS,
        network_gbps=NETWORK_GBPS,
    )
    if exchange_gbps is not None:
        rates = replace(rates, exchange_gbps=exchange_gbps)
    found = simulate(layout, plan, workload_of(model.costs_of(BATCH, SEQ, "bf16"), machine), rates)
    busy = [found.busy.get(lane, 0.0) for lane in LANES]
    host = plan.host_total_bytes * sharing / GIB
    cells = [name, num_ranks, f"{host:.0f}", f"{found.step_s:.2f}"]
    cells += [f"{BATCH * SEQ * num_ranks / found.step_s:,.0f}", *(f"{share:.0%}" for share in busy)]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="a100-80gb")
    parser.add_argument("--exchange", type=float, metavar="GBPS", help="weights between nodes")
    options = parser.parse_args()
    machine = MachineProfile.load(options.machine)
    heads = ("model", "GPUs", "host GiB per node", "step, s", "tokens/s", *LANES)
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name in MODELS:
        for num_ranks in (1, 2, 4, 8, 16, 64, 256, 512):
            print(row(name, num_ranks, machine, options.exchange), flush=True)


if __name__ == "__main__":
    main()
