"""How models write tool calls, and how to read them out of an answer, whole or piece by piece.

| format    | a call                                                               | of                   |
|-----------|----------------------------------------------------------------------|----------------------|
| `hermes`  | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, or a list      | Hermes, Qwen, SmolLM |
| `llama3`  | `{"name": …, "parameters": {…}}`, after `<|python_tag|>` or alone        | Llama 3.1 and later  |
| `mistral` | `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`                        | Mistral              |
"""

from __future__ import annotations

from dataclasses import dataclass

from bequest.engine.text.json_scan import CallScanner


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    begin: str  # before the calls; a special token in some vocabularies
    end: str  # after them; "": nothing
    arguments_key: str
    separator: str  # between calls inside begin and end; "": each call has its own
    bare: bool = False  # an answer that begins with "{" is a call, without `begin`

    def written(self, calls: list[tuple[str, str]]) -> str:
        """Calls as the model would have written them: (name, arguments as JSON)."""
        objects = [f'{{"name": "{name}", "{self.arguments_key}": {arguments}}}' for name, arguments in calls]
        if self.name == "mistral":
            return f"{self.begin} [{', '.join(objects)}]"
        if self.name == "llama3":
            return "; ".join(objects)
        return "\n".join(f"{self.begin}\n{call}\n{self.end}" for call in objects)


FORMATS = {
    format.name: format
    for format in (
        ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments", ""),
        ToolFormat("llama3", "<|python_tag|>", "", "parameters", "; ", bare=True),
        ToolFormat("mistral", "[TOOL_CALLS]", "", "arguments", ", "),
    )
}


def format_of_template(source: str | None) -> ToolFormat:
    """The format that a chat template writes earlier calls in, which is the one its model was trained on."""
    text = source or ""
    for name, mark in (("mistral", "[TOOL_CALLS]"), ("hermes", "<tool_call>"), ("llama3", "<|python_tag|>")):
        if mark in text:
            return FORMATS[name]
    if "<|start_header_id|>" in text and "tools" in text:  # Llama's, which writes calls as plain JSON
        return FORMATS["llama3"]
    return FORMATS["hermes"]


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str


ToolEvent = Content | CallBegun | CallArguments


class ToolCallReader:
    """One answer. What `feed` and `finish` return, put together, does not depend on how the text was cut.

    `most_calls`: those after them are left out. `only_calls`: the answer was held to calls, so that what is no whole
    call at its end is a part of one, not content. Blanks before and between calls are not content.
    """

    def __init__(self, format: ToolFormat, most_calls: int | None = None, only_calls: bool = False) -> None:
        self._format = format
        self._most_calls = most_calls
        self._only_calls = only_calls
        self._rest = ""  # not read yet: it may be the beginning of a mark
        self._blanks = ""  # content if more follows, nothing before a call
        self._said_something = False
        self._in_region = False
        self._bare = False  # the region began without its mark
        self._scanner: CallScanner | None = None
        self._begun = False  # the scanner's call was told of
        self.num_calls = 0

    def feed(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        self._rest += text
        while self._rest and (self._read_call(events) if self._in_region else self._read_content(events)):
            pass
        return _joined(events)

    def finish(self) -> list[ToolEvent]:
        """The answer has ended, maybe in the middle of a call."""
        events: list[ToolEvent] = []
        if self._scanner is not None:
            self._end_call(events)
        elif not self._in_region and self._rest:
            self._say(events, self._rest)
        if self._blanks and not self.num_calls and not self._in_region:
            events.append(Content(self._blanks))
        self._rest = ""
        return _joined(events)

    # Both return whether there is more to read: the rest may have to wait for what follows.

    def _read_content(self, events: list[ToolEvent]) -> bool:
        begin, rest = self._format.begin, self._rest
        if self._format.bare and not self._said_something and not self.num_calls:
            stripped = rest.lstrip()
            if stripped.startswith("{"):
                self._rest, self._in_region, self._bare = stripped, True, True
                return True
        at = rest.find(begin)
        if at >= 0:
            self._say(events, rest[:at])
            self._rest, self._in_region, self._bare = rest[at + len(begin) :], True, False
            return True
        kept = _partial(rest, begin)
        self._say(events, rest[: len(rest) - kept])
        self._rest = rest[len(rest) - kept :]
        return False

    def _read_call(self, events: list[ToolEvent]) -> bool:
        if self._scanner is None:
            return self._between_calls()
        self._rest = self._rest[self._scanner.feed(self._rest) :]
        self._tell(events)
        if self._scanner.ended:
            self._end_call(events)
        return bool(self._rest)

    def _between_calls(self) -> bool:
        end = self._format.end
        text = self._rest.lstrip(" \t\r\n,;[")
        if text.startswith("{"):
            self._scanner, self._begun, self._rest = CallScanner(), False, text
            return True
        if end and text.lstrip("] \r\n").startswith(end):
            self._rest, self._in_region = text.lstrip("] \r\n")[len(end) :], False
            return True
        waits = not text or text in "]" or (bool(end) and end.startswith(text.lstrip("] \r\n")))
        if waits:
            self._rest = text
            return False
        if self._bare or not end:
            # Nothing that could be a call follows: the rest of the answer is as it is.
            text = text.lstrip("] \r\n") if not self._bare else text
        self._rest, self._in_region = text, False
        self._said_something = True
        return True

    def _tell(self, events: list[ToolEvent]) -> None:
        """What is known of the call by now."""
        scanner = self._scanner
        assert scanner is not None
        if scanner.name is None or (self._most_calls is not None and self.num_calls >= self._most_calls):
            return
        if not self._begun:
            self._begun = True
            self._blanks = ""
            events.append(CallBegun(self.num_calls, scanner.name))
        if text := scanner.take_arguments():
            events.append(CallArguments(self.num_calls, text))

    def _end_call(self, events: list[ToolEvent]) -> None:
        scanner, self._scanner = self._scanner, None
        assert scanner is not None
        if self._begun:
            if scanner.ended and not scanner.has_arguments:
                events.append(CallArguments(self.num_calls, "{}"))
            self.num_calls += 1
        elif self._most_calls is None or self.num_calls < self._most_calls:
            self._say(events, "".join(scanner.raw))  # an object without a name is no call

    def _say(self, events: list[ToolEvent], text: str) -> None:
        whole = "" if self._only_calls else self._blanks + text
        said = whole.rstrip()
        self._blanks = whole[len(said) :]
        if said:
            self._said_something = True
            events.append(Content(said))


def _partial(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def _joined(events: list[ToolEvent]) -> list[ToolEvent]:
    """Neighbours of the same kind as one."""
    joined: list[ToolEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            joined[-1] = CallArguments(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined
