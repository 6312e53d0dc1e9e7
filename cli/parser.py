"""A parser of command lines whose errors are one line, with what was probably meant; --help has the rest."""

from __future__ import annotations

import argparse
import difflib
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A flag is written out: what is short for one today is short for two tomorrow.

    `elsewhere` has flags of other programs and what does the same here; `spare` is said of a word too many."""

    def __init__(
        self, *args: Any, elsewhere: Mapping[str, str] | None = None, spare: str | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **{**options, "allow_abbrev": False})
        self._elsewhere = elsewhere or {}
        self._spare = spare

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """What was given; ends the process with a message for a wrong line."""
        # What stands behind a flag may be positional still, as a prompt behind --json-schema FILE.
        parse = self.parse_known_args if self._subparsers else self.parse_known_intermixed_args
        given, unknown = parse(arguments)
        if unknown:
            self.refuse(unknown)
        return given

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """A flag of another program comes first: argparse would take -hf for -h, and the rest for its value."""
        for word in itertools.takewhile(lambda word: word != "--", args or ()):
            if word.partition("=")[0] in self._elsewhere:
                self.refuse([word])
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Ends the process. The usage of dozens of flags would push the message off the screen."""
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` lists what there is.\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """The arguments that nobody knows, the first of which is named."""
        word = unknown[0]
        self.error(f"unknown argument {word}{self._hint(word.partition('=')[0])}")

    def _hint(self, word: str) -> str:
        if word in self._elsewhere:
            return f": {self._elsewhere[word]}"
        if not word.startswith("-"):
            return f": {self._spare}" if self._spare else ""
        return _meant(word, self._option_string_actions)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Argparse calls it for every value; its own message does not say what was probably meant."""
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(action, f"{value!r} is not one of {', '.join(known)}{_meant(value, known)}")


def _meant(word: str, known: Collection[str]) -> str:
    """The one that a word begins, as in --temp, or else the nearest."""
    begun = [name for name in known if len(word) > 3 and name.startswith(word)]
    near = begun if len(begun) == 1 else difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""
