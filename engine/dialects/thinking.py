"""What a model thinks before it answers: between marks, at the beginning of its answer.

A chat template may write the first mark itself, so that an answer begins inside the thoughts, or both of them, so that
there are none. `ThinkingReader.prime` takes what the prompt holds of the answer's turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bequest.engine.dialects.events import AnswerEvent, Content, Thought
from bequest.engine.dialects.marks import partial

_BLANK = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    name: str
    begin: str
    end: str
    # Around the answer that follows; "": nothing.
    answer_begin: str = ""
    answer_end: str = ""

    def opening(self, prompt: str) -> str:
        """What a prompt's text says of the answer's thoughts: that they have begun, that they are over, or nothing."""
        text = prompt.rstrip(_BLANK)
        if text.endswith(self.begin.rstrip(_BLANK)):
            return self.begin
        return self.begin + self.end if text.endswith(self.end) else ""


State = Literal["before", "inside", "after", "answering"]


class ThinkingReader:
    """One answer. What `feed` and `finish` return, put together, does not depend on how the text was cut.

    Blanks around the thoughts, and before the answer that follows them, are left out. Marks count at the beginning
    alone: an answer may speak of them later.
    """

    def __init__(self, format: ThinkingFormat) -> None:
        self._format = format
        self._rest = ""  # not read yet: it may be the beginning of a mark
        self._held = ""  # blanks, which are part of a thought if more of it follows
        self._thought = False  # something of it was told
        self._wrapped = False  # the answer is between marks of its own
        self.state: State = "before"
        self.num_chars = 0  # of the answer, up to the end of the thoughts, marks included

    def prime(self, text: str) -> None:
        """Takes a beginning of the answer that its prompt has; it is not told again."""
        self.feed(text)
        if self.state in ("after", "answering"):
            self._rest = ""
        self._held, self.num_chars = "", 0

    def feed(self, text: str) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        if self.state in ("before", "inside"):
            self.num_chars += len(text)
        self._rest += text
        while self._rest and self._read(events):
            pass
        return events

    def finish(self) -> list[AnswerEvent]:
        """The answer has ended, maybe inside the thoughts."""
        rest, self._rest = self._rest, ""
        if self.state == "inside":
            return self._think(rest, last=True)
        if self.state == "before":
            self.num_chars = 0
        elif self.state == "after":
            rest = rest.lstrip(_BLANK)
        if self._wrapped and rest.rstrip(_BLANK).endswith(self._format.answer_end):
            rest = rest.rstrip(_BLANK).removesuffix(self._format.answer_end)
        return [Content(rest)] if rest else []

    def _read(self, events: list[AnswerEvent]) -> bool:
        """Whether there is more to read now."""
        if self.state == "before":
            return self._before()
        if self.state == "inside":
            return self._inside(events)
        if self.state == "after":
            return self._after()
        return self._answer(events)

    def _before(self) -> bool:
        text, begin = self._rest.lstrip(_BLANK), self._format.begin
        if text.startswith(begin):
            self._rest, self.state = text[len(begin) :], "inside"
            return True
        if begin.startswith(text):
            return False
        wrapper = self._format.answer_begin
        if wrapper and wrapper.startswith(text):
            return False
        self.num_chars = 0
        self._begin_answer(text if wrapper and text.startswith(wrapper) else self._rest)
        return True

    def _inside(self, events: list[AnswerEvent]) -> bool:
        before, end, after = self._rest.partition(self._format.end)
        if end:
            events += self._think(before, last=True)
            self.num_chars -= len(after)
            self._rest, self.state = after, "after"
            return True
        kept = partial(before, (self._format.end,))
        events += self._think(before[: len(before) - kept], last=False)
        self._rest = before[len(before) - kept :]
        return False

    def _after(self) -> bool:
        """Blanks before the answer, and the mark that may begin it."""
        text = self._rest.lstrip(_BLANK)
        if not text or (self._format.answer_begin.startswith(text) and text != self._format.answer_begin):
            self._rest = text
            return False
        self._begin_answer(text)
        return True

    def _begin_answer(self, text: str) -> None:
        mark = self._format.answer_begin
        self._wrapped = bool(mark) and text.startswith(mark)
        self._rest, self.state = text.removeprefix(mark) if self._wrapped else text, "answering"

    def _answer(self, events: list[AnswerEvent]) -> bool:
        text, end, kept = self._rest, self._format.answer_end, 0
        if self._wrapped:
            said = text.rstrip(_BLANK)
            # The mark counts if nothing follows it.
            whole = len(text) - len(said) + len(end) if said.endswith(end) else 0
            kept = whole or partial(text, (end,))
        if len(text) > kept:
            events.append(Content(text[: len(text) - kept]))
        self._rest = text[len(text) - kept :]
        return False

    def _think(self, text: str, last: bool) -> list[AnswerEvent]:
        whole = self._held + text
        if not self._thought:
            whole = whole.lstrip(_BLANK)
        said = whole.rstrip(_BLANK)
        self._held = "" if last else whole[len(said) :]
        self._thought = self._thought or bool(said)
        return [Thought(said)] if said else []


def _same_marks(begin: str, end: str, *names: str) -> dict[str, ThinkingFormat]:
    return {name: ThinkingFormat(name, begin, end) for name in names}


# By the names that vLLM has for its parsers, where it has one.
THINKING: dict[str, ThinkingFormat] = {
    **_same_marks("<think>", "</think>", "qwen3", "deepseek_r1", "deepseek_v3", "glm45", "olmo3", "minimax_m2"),
    **_same_marks("<think>", "</think>", "smollm3", "nemotron_v3", "kimi_k2", "ernie45", "step3"),
    "granite": ThinkingFormat("granite", "<think>", "</think>", "<response>", "</response>"),
    "mistral": ThinkingFormat("mistral", "[THINK]", "[/THINK]"),
    "cohere_command3": ThinkingFormat(
        "cohere_command3", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"
    ),
    "cohere_command4": ThinkingFormat(
        "cohere_command4", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>"
    ),
    "gemma4": ThinkingFormat("gemma4", "<|channel>thought", "<channel|>"),
    "seed_oss": ThinkingFormat("seed_oss", "<seed:think>", "</seed:think>"),
}
