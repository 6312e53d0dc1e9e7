"""What each mechanism of the scheduler's policy earns: the same load with all of them, and without one at a time.

    python -m benchmarks.policy [--seconds 40]

On a counted clock, so that it is the same on every machine: the devices and loads of benchmarks/simulated_load.py. A
mechanism is switched off by its value in Tuning. The table shows how much worse a figure is without it, so that 1.00 is
a mechanism that earns nothing there.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from benchmarks.simulated_load import NARROW, WIDE, Device, Figures, measure
from bequest.engine.scheduling.policy.tuning import DEFAULT, OFF, Tuning

WITHOUT = {  # by mechanism
    "late planning": replace(DEFAULT, late_from=OFF),
    "slots kept for others": replace(DEFAULT, reserved_part=1 << 30, reserved_from=1 << 30),
    "a part of a step for prompts": replace(DEFAULT, prompt_part=1),
    "prompts spread in a crowd": replace(DEFAULT, flow_least_part=1),
    "prompts in pieces beside streams": replace(DEFAULT, piece_cost=OFF),
}


@dataclass(frozen=True)
class Earned:
    """Seconds, but for the last."""

    between: float  # p99 at twice the capacity
    first: float  # p99 of a light tenant beside one that sends twice the capacity
    first_half: float  # p99 at half of the capacity
    between_half: float  # likewise
    answered: int  # at twice the capacity


def earned(device: Device, seconds: float, tuning: Tuning) -> Earned:
    seen: dict[str, dict[str, Figures]] = measure(replace(device, tuning=tuning), seconds)
    half, twice = seen["half of capacity"]["one"], seen["twice the capacity"]["one"]
    light = seen["light, overloaded"]["light"]
    return Earned(
        between=twice.p99(twice.between),
        first=light.p99(light.first),
        first_half=half.p99(half.first),
        between_half=half.p99(half.between),
        answered=twice.answered,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40, help="of each load, on the counted clock")
    whole = parser.parse_args().seconds
    print(
        "| without | device | between tokens p99 | light tenant's first token p99 "
        "| first token p99 at half | between tokens p99 at half | answers |"
    )
    print("|---|---|---|---|---|---|---|")
    for label, device, seconds in (("32 slots", WIDE, whole), ("8 slots", NARROW, whole * 10)):
        base = earned(device, seconds, DEFAULT)
        for name, tuning in WITHOUT.items():
            other = earned(device, seconds, tuning)
            shown = [
                f"{other.between / base.between:.2f}",
                f"{other.first / base.first:.2f}",
                f"{other.first_half / base.first_half:.2f}",
                f"{other.between_half / base.between_half:.2f}",
                f"{other.answered / base.answered:.2f}",
            ]
            print(f"| {name} | {label} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
