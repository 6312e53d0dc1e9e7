"""What came of it, as tables."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.fuzz.canaries import Canaries
from benchmarks.fuzz.sending import Answer, error_of
from benchmarks.fuzz.shots import Shot

_SHOWN = 1500  # characters of a body


@dataclass
class Fault:
    """Answers that went wrong in the same way."""

    operation: str
    what: str
    shot: Shot  # the first of them
    answer: Answer
    count: int = 1
    body: Any = None  # minimised, where it could be
    trace: str = ""  # from the server's log


@dataclass
class Report:
    """`statuses` by operation: "200", "4xx", "504" (a deadline that was asked for), "fault", "left"."""

    statuses: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    codes: Counter[str] = field(default_factory=Counter)
    faults: dict[tuple[str, str], Fault] = field(default_factory=dict)
    refusals: dict[str, Counter[str]] = field(
        default_factory=lambda: defaultdict(Counter)
    )  # of bodies meant to be good

    def count(self, shot: Shot, answer: Answer) -> Fault | None:
        """The fault, if it is the first of its kind."""
        self.statuses[shot.operation][_column(answer)] += 1
        self.codes[f"{answer.status} {answer.code}".strip()] += 1
        if not shot.spoilt and 400 <= answer.status < 500:
            self.refusals[shot.operation][_message_of(answer)[:110]] += 1
        if not answer.fault:
            return None
        kind = (shot.operation, answer.fault)
        if kind in self.faults:
            self.faults[kind].count += 1
            return None
        self.faults[kind] = Fault(*kind, shot, answer)
        return self.faults[kind]

    @property
    def num_faults(self) -> int:
        return sum(fault.count for fault in self.faults.values())

    @property
    def share_ok(self) -> float:
        total = sum((counts for counts in self.statuses.values()), Counter[str]())
        return total["200"] / max(1, total.total())

    def show(self, canaries: Canaries, seconds: float) -> None:
        columns = ["200", "4xx", "504", "left", "fault"]
        print(f"{'operation':42}" + "".join(f"{name:>9}" for name in ["sent", *columns]))
        for operation, counts in sorted(self.statuses.items()):
            print(f"{operation:42}{counts.total():9}" + "".join(f"{counts[name]:9}" for name in columns))
        sent = sum(counts.total() for counts in self.statuses.values())
        print(f"{sent} requests in {seconds:.0f} s, {self.share_ok:.0%} answered with 200, {self.num_faults} faults")
        _show_waits(canaries)
        for fault in self.faults.values():
            _show_fault(fault)

    def figures(self, canaries: Canaries, seconds: float) -> dict[str, Any]:
        return {
            "seconds": seconds,
            "share_ok": self.share_ok,
            "statuses": self.statuses,
            "codes": self.codes,
            "canaries": _waits(canaries),
            "refusals": {operation: counts.most_common(5) for operation, counts in self.refusals.items()},
            "faults": [asdict(fault) for fault in self.faults.values()],
        }


def _column(answer: Answer) -> str:
    if answer.fault:
        return "fault"
    if answer.code == "left":
        return "left"
    return "200" if answer.status < 400 else "4xx" if answer.status < 500 else str(answer.status)


def _waits(canaries: Canaries) -> dict[str, dict[str, float]]:
    told: dict[str, dict[str, float]] = {}
    for name in ("health", "one-token stream"):
        waits = sorted(wait.seconds for wait in canaries.waits if wait.canary == name) or [0.0]
        lost = sum(wait.status != 200 for wait in canaries.waits if wait.canary == name)
        told[name] = {"asked": len(waits), "refused": lost, "median_ms": 1e3 * waits[len(waits) // 2]}
        told[name] |= {"p99_ms": 1e3 * waits[int(0.99 * (len(waits) - 1))], "worst_ms": 1e3 * waits[-1]}
    return told


def _show_waits(canaries: Canaries) -> None:
    print(f"\n{'canary':20}" + "".join(f"{name:>11}" for name in ["asked", "refused", "median", "p99", "worst"]))
    for name, told in _waits(canaries).items():
        counts = f"{told['asked']:11.0f}{told['refused']:11.0f}"
        print(f"{name:20}{counts}" + "".join(f"{told[k + '_ms']:8.1f} ms" for k in ("median", "p99", "worst")))
    print(f"{canaries.num_left_out} waits are left out: the machine itself stood still meanwhile")


def _show_fault(fault: Fault) -> None:
    body = fault.shot.body if fault.body is None else fault.body
    shown = json.dumps(body) if body is not None else repr(fault.shot.data)
    print(f"\nFAULT {fault.what} ({fault.count} times)\n  {fault.shot.method} {fault.shot.path}")
    print(f"  {fault.shot.headers}\n  {shown[:_SHOWN]}\n  → {fault.answer.content[:300]!r}")
    if fault.trace:
        print("  " + fault.trace.strip().replace("\n", "\n  "))


def _message_of(answer: Answer) -> str:
    error = error_of(answer.content)
    return "an error without its object" if error is None else str(error["message"])
