"""Prints the Python that `make` builds the environment with: the fastest of those that are here.

Builds of one version differ. One without profiles and link-time optimisation, as pyenv makes it unless it is told
otherwise, takes 5 to 8 % more time for the host code. How it was built is not always told: Debian's names
the flags of another build. So each runs the same loop. The python3 of the path is kept where no other one of its
version is clearly faster, and where the others cannot make environments or compile extensions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NamedTuple

OLDEST = (3, 11)
GAIN = 0.96  # of the time of python3: the best of the rounds differs by a hundredth from itself
ROUNDS = 15  # by turns: where others use the machine, few rounds are undisturbed

# Prints the version, seconds of what the host code consists of (calls, attributes, dictionaries, lists), and what
# runs: a path may lead to a script that starts another one.
LOOP = """
import ensurepip, os, sys, sysconfig, time, venv
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))

class Sequence:
    def __init__(self, number):
        self.number, self.tokens, self.seen = number, [], {}

    def append(self, token):
        self.tokens.append(token)
        self.seen[token] = self.seen.get(token, 0) + 1
        return len(self.tokens) > 20

def work():
    done = 0
    for number in range(2000):
        sequence = Sequence(number)
        for token in range(24):
            if sequence.append(token ^ number & 7):
                done += 1
    return sorted(str(number) for number in range(done // 8))

work()
begin = time.process_time()
work()
print(*sys.version_info[:2], time.process_time() - begin, os.path.realpath(sys.executable))
"""


class Run(NamedTuple):
    version: tuple[int, int]
    seconds: float
    what: str


def tried(python: str) -> Run | None:
    """A run of the loop; None where it is missing something or is not there."""
    try:
        run = subprocess.run([python, "-c", LOOP], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if run.returncode:
        return None
    major, minor, seconds, what = run.stdout.split(maxsplit=3)
    return Run((int(major), int(minor)), float(seconds), what.strip())


def fastest(first: str, others: list[str]) -> str:
    """`first`, unless another one of its version takes clearly less time, or it cannot be taken itself."""
    begun: dict[str, Run] = {}
    for python in (first, *others):
        found = tried(python)
        if found and found.version >= OLDEST and all(found.what != other.what for other in begun.values()):
            begun[python] = found
    if not begun:
        return first  # and pip says what is wrong with it
    kept = next(iter(begun))
    best = {python: found.seconds for python, found in begun.items() if found.version == begun[kept].version}
    for _ in range(ROUNDS if len(best) > 1 else 0):
        for python in best:
            if found := tried(python):
                best[python] = min(found.seconds, best[python])
    quickest = min(best, key=lambda python: best[python])
    return quickest if best[quickest] < GAIN * best[kept] else kept


def candidates() -> list[str]:
    """By the names that the path knows; the distribution's own is often behind another one there."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/local/bin", "/usr/bin"]
    names = ["python3", *(f"python3.{minor}" for minor in range(OLDEST[1], OLDEST[1] + 5))]
    found: dict[str, str] = {}
    for path in (os.path.join(folder, name) for folder in folders for name in names):
        if os.access(path, os.X_OK):
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def main() -> None:
    first = os.path.realpath(sys.executable)
    print(fastest(first, [python for python in candidates() if os.path.realpath(python) != first]))


if __name__ == "__main__":
    main()
