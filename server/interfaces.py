"""What the HTTP front needs of the engine and of the text side. The tests' fakes and the real ones implement it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, Protocol

from engine.types import ModelInfo, Request, Sink

EngineState = Literal["loading", "ready", "draining", "dead"]


class EngineLike(Protocol):
    @property
    def info(self) -> ModelInfo: ...

    @property
    def state(self) -> EngineState: ...

    def submit(self, request: Request, sink: Sink) -> None:
        """Raises an EngineError if the request cannot be taken; otherwise the sink hears of it until its last Delta."""

    def abort(self, request_id: str) -> None:
        """Stops a request wherever it stands; no Delta follows. A request that has ended is left alone."""

    async def drain(self, timeout: float) -> bool:  # noqa: ASYNC109 - the engine's to enforce
        """Takes no new work; True if everything that ran finished in time."""

    async def stop(self) -> None: ...

    async def wait_dead(self) -> BaseException:
        """Returns when the engine has died, with what killed it."""


class TokenizerLike(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> Collection[int]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class ChatTemplateLike(Protocol):
    @property
    def source(self) -> str: ...

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Raises InvalidRequest where the template refuses the conversation."""


class TextLike(Protocol):
    @property
    def tokenizer(self) -> TokenizerLike: ...

    @property
    def chat_template(self) -> ChatTemplateLike | None: ...
