"""How fast the simulation runs: whole storms on 3 controllers and 50 nodes, in virtual seconds a second of one core.

Everything in it is what ships, but the machines and the store; the same seeds each time. `--nodes 5` for a small fleet.
The figure is by processor time, so that what else runs on the machine hardly matters.
"""

import argparse
import time
from collections import Counter

from llmgw.testing.sim_fleet import Sizes
from llmgw.testing.simulation import simulate

SEEDS = (0, 1, 2, 3, 4)
NODES = 50


def main() -> None:
    """The program."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--nodes", type=int, default=NODES, help=f"nodes of the fleet [{NODES}]")
    options.add_argument("--seeds", type=int, default=len(SEEDS), help=f"how many seeds, from 0 on [{len(SEEDS)}]")
    asked = options.parse_args()
    simulate(0, sizes=Sizes(nodes=3))  # what is imported and compiled once is no part of it
    totals, virtual_s, cpu_s = Counter[str](), 0.0, 0.0
    print(f"3 controllers, {asked.nodes} nodes\n\n  seed  virtual s    cpu s  virtual/cpu  engines started  revisions")
    for seed in range(asked.seeds):
        began_s = time.process_time()
        outcome = simulate(seed, sizes=Sizes(nodes=asked.nodes, hardware=True))
        took_s = time.process_time() - began_s
        virtual_s, cpu_s, totals = virtual_s + outcome.virtual_s, cpu_s + took_s, totals + outcome.totals
        speed, engines = outcome.virtual_s / took_s, outcome.totals["engine started"]
        print(
            f"{seed:6}  {outcome.virtual_s:9.0f}  {took_s:7.2f}  {speed:11.0f}  {engines:15}"
            f"  {outcome.totals['revisions']:9}"
        )
    faults = sum(count for name, count in totals.items() if name.startswith("fault "))
    print(f"\n{faults} faults, {totals['engine started']} engines started, {totals['revisions']} revisions judged")
    print(f"virtual_s_per_s={virtual_s / cpu_s:.0f}")


if __name__ == "__main__":
    main()
