"""What the command lines of all benchmarks share."""

from __future__ import annotations

import argparse
import os


def add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url", metavar="URL", default="http://127.0.0.1:8000", help="with or without /v1 (default: %(default)s)"
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("BEQUEST_API_KEY"),
        help="default: BEQUEST_API_KEY of the environment, if set",
    )
    group.add_argument("--model", metavar="NAME", help="default: the first that the server lists")


def add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", help="write the settings and the figures to this file")
    group.add_argument("--plot", metavar="FILE.png", help="draw the figures (needs matplotlib)")


class Integer:
    """An integer of at least `least`; its repr is what argparse calls it."""

    def __init__(self, least: int) -> None:
        self._least = least

    def __call__(self, text: str) -> int:
        value = int(text)
        if value < self._least:
            raise argparse.ArgumentTypeError(f"must be at least {self._least}, not {value}")
        return value

    def __repr__(self) -> str:
        return "integer"


def levels(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between, such as 1,8,64, not {text!r}") from None
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {min(found)}")
    return found


def rates(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between, such as 0.5,1, not {text!r}") from None
    if not all(0 < rate < 1e6 for rate in found):
        raise argparse.ArgumentTypeError(f"must be over 0, not {text}")
    return found


def not_negative(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"must not be negative, not {text}")
    return value
