"""`bequest chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bequest.cli.connection import Connection, Failure, connected
from bequest.cli.conversation import Conversation
from bequest.cli.parser import Parser
from bequest.cli.shown import ShownAnswer, dimmed

_HELP = """\
/help                this list
/system TEXT         a system message; without a text, none
/set NAME VALUE      a parameter of every answer, as temperature 0.2 or max_tokens 500; /set shows them
/retry               the last question again, as a branch
/undo                back behind the last question
/branches            all answers with their numbers; * is the way to here
/branch N            go on from answer N; 0 is the beginning
/clear               a new conversation
/save FILE           write the conversation as JSON
/exit                end, as Ctrl-D does; Ctrl-C stops an answer
A line that ends with a backslash goes on in the next one."""
_MOST_HISTORY = 1000
_OWN = ("messages", "model", "n", "stream", "stream_options")  # what the chat's requests say


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        "bequest chat",
        description="A conversation in the terminal; /help lists commands.",
        elsewhere=dict.fromkeys(("--model", "-m"), "name the model without a flag: bequest chat MODEL"),
        spare="the first message is typed when the chat has begun; `bequest run` takes one here",
    )
    parser.add_argument(
        "model",
        metavar="MODEL|URL",
        nargs="?",
        help="a server's URL, or what `bequest serve` takes; default: the server on port 8000, else the embedded model",
    )
    parser.add_argument("--system", metavar="TEXT", default="", help="a system message")
    parser.add_argument("--model-name", metavar="NAME", help="which model of the server; default: its first")
    parser.add_argument("--api-key", metavar="KEY", help="default: BEQUEST_API_KEY")
    given = parser.read(arguments)
    try:
        with connected(given.model, given.api_key) as connection:
            name = given.model_name or next(iter(connection.models()), "")
            chat = Chat(connection, name)
            chat.conversation.system = given.system
            print(f"{name}; /help lists commands", file=sys.stderr)
            return chat.run()
    except Failure as error:
        print(f"bequest chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


class Chat:
    def __init__(self, connection: Connection, model: str) -> None:
        self._connection = connection
        self._model = model
        self._settings: dict[str, Any] = {}
        self._ended = False
        self.conversation = Conversation()

    def run(self) -> int:
        """Until the end of the input."""
        with _History():
            while not self._ended:
                try:
                    line = _read_line()
                except EOFError:
                    break
                except KeyboardInterrupt:
                    print("\n(Ctrl-D or /exit ends)", file=sys.stderr)
                    continue
                self.take(line)
        return 0

    def take(self, line: str) -> None:
        """One line: a command or a question."""
        if not line.strip():
            return
        try:
            if line.startswith("/"):
                self._command(*line[1:].partition(" ")[::2])
            else:
                self._ask(line)
        except Failure as error:
            print(error, file=sys.stderr)

    def _ask(self, question: str) -> None:
        body = {"model": self._model, "messages": self.conversation.messages(question), **self._settings}
        events = self._connection.stream("/v1/chat/completions", body)
        answer, usage, began = ShownAnswer(), None, time.monotonic()
        try:
            for event in events:
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    answer.take(choice["delta"])
        except KeyboardInterrupt:
            print(" …", end="")
        except Failure:
            answer.break_off()
            raise
        finally:
            events.close()
        print()
        turn = self.conversation.add(question, answer.text)
        if sys.stderr.isatty() and usage is not None:
            seconds = time.monotonic() - began
            told = (
                f"{usage['completion_tokens']} tokens, {usage['completion_tokens'] / max(seconds, 1e-9):.1f} tokens/s"
            )
            print(dimmed(f"[{turn.number}] {told}"), file=sys.stderr)

    def _command(self, name: str, rest: str) -> None:
        rest = rest.strip()
        match name:
            case "help" | "?":
                print(_HELP)
            case "exit" | "quit" | "bye":
                self._ended = True
            case "system":
                self.conversation.system = rest
            case "clear":
                system, self.conversation = self.conversation.system, Conversation()
                self.conversation.system = system
            case "set":
                self._set(rest)
            case "undo":
                self._back()
            case "retry":
                if (turn := self._back()) is not None:
                    self._ask(turn)
            case "branches":
                print(self.conversation.outline() or "no answers yet")
            case "branch":
                self._go(rest)
            case "save":
                self._save(rest)
            case _:
                raise Failure(f"there is no command /{name}; /help lists them")

    def _back(self) -> str | None:
        turn = self.conversation.drop_last()
        if turn is None:
            raise Failure("there is no question before this")
        return turn.question

    def _go(self, rest: str) -> None:
        try:
            self.conversation.go(int(rest))
        except (ValueError, KeyError):
            raise Failure(f"there is no answer {rest or '(no number)'}; /branches lists them") from None

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if name in _OWN:
            raise Failure(f"/set {name}: the chat says that itself, and shows one answer at a time")
        if not name:
            print("\n".join(f"{key} {json.dumps(each)}" for key, each in self._settings.items()) or "nothing is set")
        elif not value:
            self._settings.pop(name, None)
        else:
            try:
                self._settings[name] = json.loads(value)
            except ValueError:
                self._settings[name] = value

    def _save(self, rest: str) -> None:
        if not rest:
            raise Failure("/save needs the name of a file")
        try:
            messages = self.conversation.messages("")[:-1]
            Path(rest).expanduser().write_text(json.dumps(messages, indent=2, ensure_ascii=False), encoding="utf-8")
        except OSError as error:
            raise Failure(f"/save {rest}: {error.strerror}") from None


def _read_line() -> str:
    """A line and those that follow a backslash."""
    prompt = "> " if sys.stdin.isatty() else ""
    line = input(prompt)
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input("… " if prompt else "")
    return line


class _History:
    """Lines of earlier chats, where the terminal's library can keep them."""

    def __init__(self) -> None:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        self._file = Path(state) / "bequest" / "chat_history"

    def __enter__(self) -> None:
        if not sys.stdin.isatty():
            return
        try:
            import readline

            readline.set_history_length(_MOST_HISTORY)
            readline.read_history_file(self._file)
        except (ImportError, OSError):
            pass  # an interpreter without it, or the first chat

    def __exit__(self, *_: object) -> None:
        if not sys.stdin.isatty():
            return
        try:
            import readline

            self._file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(self._file)
            self._file.chmod(0o600)
        except (ImportError, OSError):
            pass  # a home that cannot be written to keeps no history
