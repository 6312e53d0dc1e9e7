"""The tokens by which Whisper is told what to do, and by which it tells the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Task = Literal["transcribe", "translate"]


class _Vocabulary(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def id_of(self, token: str) -> int | None: ...

    def token_string(self, token_id: int | None) -> str | None: ...


SECONDS_PER_TIMESTAMP = 0.02
_FIRST_MULTILINGUAL_VOCABULARY = 51_865  # one token more than that of the English models
_NAMES = {
    "end": ["endoftext"],
    "start": ["startoftranscript"],
    "translate": ["translate"],
    "transcribe": ["transcribe"],
    "start_of_lm": ["startoflm"],
    "start_of_previous": ["startofprev"],
    "no_speech": ["nospeech", "nocaptions"],
    "no_timestamps": ["notimestamps"],
}
# What describes sounds instead of writing speech down.
_SYMBOLS = (
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *("<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("', "((", "))", "(((", ")))", "[[", "]]", "{{", "}}"),
    *("♪♪", "♪♪♪"),
)
_NOTES = "♩♪♫♬♭♮♯"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperTokens:
    end: int  # <|endoftext|>
    start: int  # <|startoftranscript|>
    translate: int
    transcribe: int
    start_of_lm: int
    start_of_previous: int
    no_speech: int
    no_timestamps: int
    multilingual: bool
    languages: Mapping[str, int] = field(hash=False)  # code → token; English models have them, but no use for them

    @property
    def first_timestamp(self) -> int:
        """<|0.00|>. It and those that follow it need not be in the vocabulary: they are never text."""
        return self.no_timestamps + 1

    def seconds(self, token_id: int) -> float | None:
        """The time a timestamp says; None of any other token."""
        steps = token_id - self.first_timestamp
        return steps * SECONDS_PER_TIMESTAMP if steps >= 0 else None

    def prompt(
        self, task: Task, language: str, previous: tuple[int, ...] = (), timestamps: bool = True
    ) -> tuple[int, ...]:
        """The decoder's prompt: what was said before, and what to do now."""
        before = (self.start_of_previous, *previous) if previous else ()
        chosen = (self.languages[language], self._task(task)) if self.multilingual else ()
        return (*before, self.start, *chosen, *(() if timestamps else (self.no_timestamps,)))

    def never(self) -> tuple[int, ...]:
        """Tokens that belong into prompts and never into an answer."""
        return (
            self.start,
            self.translate,
            self.transcribe,
            self.start_of_lm,
            self.start_of_previous,
            self.no_speech,
        )

    def _task(self, task: Task) -> int:
        return self.translate if task == "translate" else self.transcribe


def whisper_tokens(tokenizer: _Vocabulary, vocab_size: int) -> WhisperTokens | None:
    """None where the tokenizer is not Whisper's. `vocab_size` is the model's."""

    def find(*names: str) -> int | None:
        return next((found for name in names if (found := tokenizer.id_of(f"<|{name}|>")) is not None), None)

    ids = {name: find(*spellings) for name, spellings in _NAMES.items()}
    known = {name: token_id for name, token_id in ids.items() if token_id is not None}
    if len(known) < len(ids):
        return None
    strings = {tokenizer.token_string(i): i for i in range(known["start"] + 1, known["translate"])}
    languages = {string[2:-2]: token_id for string, token_id in strings.items() if string is not None}
    return WhisperTokens(**known, multilingual=vocab_size >= _FIRST_MULTILINGUAL_VOCABULARY, languages=languages)


def non_speech_tokens(tokenizer: _Vocabulary) -> tuple[int, ...]:
    """Tokens of brackets, notes and the like, in which transcripts of the training data described sounds; ascending.

    Hyphens and quotes are among them only where they begin a word: inside one they are spelling."""
    found = {tokenizer.encode(" -", False)[0], tokenizer.encode(" '", False)[0]}
    for symbol in (*_SYMBOLS, *_NOTES):
        for ids in (tokenizer.encode(symbol, False), tokenizer.encode(" " + symbol, False)):
            if len(ids) == 1 or symbol in _NOTES:
                found.add(ids[0])
    return tuple(sorted(found))
