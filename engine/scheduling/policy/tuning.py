"""Every constant of the scheduler's policy: its unit, what it does, and the benchmark that shows it.

`python -m benchmarks.policy` switches each mechanism off by these values and prints what it earns; docs/policy.md has
the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

OFF = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    # --- when a step is planned (clock.py); benchmarks/overload.py, first tokens on a CPU
    late_from: float = 0.0125  # seconds of a step, from which the one behind it is planned late; OFF: never
    late_margin: float = 0.003  # seconds before its end: planning, and the way to the device
    durations_kept: int = 16  # steps of a size
    sizes_per_doubling: int = 4  # steps whose sizes differ by less than a fifth are expected to take as long
    delay_forgotten: float = 1 / 8  # of the longest delay of the event loop, with each that is shorter

    # --- slots that tenants leave each other (shares.py); benchmarks/simulated_load.py, a light tenant's first token
    reserved_part: int = 8  # one slot of so many is for tenants that have less than their share,
    reserved_from: int = 4  # and one at least of so many: of fewer it would be too large a part; 0: none is
    prompt_part: int = 5  # one of so many tokens of a step is for the prompts of tenants that have their share; 1: all

    # --- prompts in a crowd (flow.py); benchmarks/simulated_load.py, between tokens at twice the capacity
    flow_weight: float = 1 / 128  # of the latest step in the averages
    flow_least_part: int = 16  # one of so many tokens of a step: fewer would hardly make it shorter; 1: no limit

    # --- pieces of prompts beside streams (pieces.py); benchmarks/bursts.py, first tokens and between tokens
    piece_cost: float = 1.75  # steps without prompts, that one with prompts may take the time of; OFF: any
    piece_least: float = 0.008  # seconds, that nobody minds
    piece_crowd: float = 1.0  # that wait for their first token for each that streams: from then on all is for them
    piece_tokens: int = 10  # of prompts, for each open request
    piece_steps: int = 24  # that a backlog of prompts is computed in

    # --- what steps of a size take (costs.py)
    average_weight: float = 0.3  # of the newest in the average of steps without prompts
    costs_kept: int = 4  # steps of a size, the shortest of which counts
    retry_factor: float = 0.995  # for each step since: a size that was too long is tried again, hundreds of them later
    whole_part: float = 0.75  # of a size's tokens, that a step has which tells what the size takes

    # --- extractions beside generations (clock.py); benchmarks/hidden_states.py, first tokens of generations
    present_for: float = 5.0  # seconds that a generation counts as there after its last step
    extraction_steps: float = 2.0  # steps of generations, that one of extractions may take the time of; OFF: any
    extraction_least: float = 0.002  # seconds, that nobody minds

    # --- drafts (engine/drafting); benchmarks/speculation.py, tokens per second of one stream
    draft_rows: int | None = None  # of a step that checks drafts; None: as the device's costs say

    # --- what a full queue tells those that it refuses (pace.py)
    departures_kept: int = 64
    retry_part: int = 4  # a refused client should find one of so many places free
    longest_wait: float = 60.0  # seconds


DEFAULT = Tuning()
