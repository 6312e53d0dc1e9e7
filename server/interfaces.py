"""What the HTTP front needs of the engine and of the text side. The tests' fakes and the real ones implement it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from bequest.engine.state.contents import Contents
from bequest.engine.types import ModelInfo, Parent, RecordEntry, Request, Sink
from bequest.engine.types.adapter import AdapterRef
from bequest.engine.types.estate import Estate
from bequest.engine.types.image import Image
from bequest.engine.types.listening import CrossHeads, FloatRows
from bequest.engine.watching.observation import EngineLoad
from bequest.engine.watching.snapshot import Snapshot

if TYPE_CHECKING:
    from bequest.engine.scheduling.limits import ExtractionLimits

EngineState = Literal["loading", "ready", "draining", "dead", "stopped"]


class AdaptersLike(Protocol):
    """Those that are loaded."""

    @property
    def refs(self) -> Sequence[AdapterRef]: ...

    def find(self, name: str) -> AdapterRef | None: ...

    async def load(self, name: str, directory: Path, *, replaces: bool = False) -> AdapterRef:
        """`replaces`: in the place of one of this name. Raises InvalidAdapter, or AdapterInUse for that one."""

    def unload(self, name: str) -> None:
        """Raises AdapterNotFound, or AdapterInUse while requests or leases need it."""


class EngineLike(Protocol):
    @property
    def info(self) -> ModelInfo: ...

    @property
    def adapters(self) -> AdaptersLike: ...

    @property
    def extraction_limits(self) -> ExtractionLimits: ...

    @property
    def contents(self) -> Contents:
        """Images and rows that have token ids of their own."""

    @property
    def takes_embeds(self) -> bool:
        """Whether requests may bring rows instead of tokens."""

    @property
    def state(self) -> EngineState: ...

    def submit(self, request: Request, sink: Sink, *, goes_on: bool = False) -> None:
        """Raises an EngineError if the request cannot be taken; otherwise the sink hears of it until its last Delta.
        `goes_on`: with a long answer."""

    def long_answer(self) -> AbstractAsyncContextManager[None]:
        """While an answer is made that takes several requests, one behind the other: the engine neither falls asleep
        nor ends meanwhile, as long as it is given time. Raises EngineDraining, EngineDead, EngineAsleep."""

    def look_ahead(self, image: Image) -> None:
        """A request with this image is about to be submitted."""

    def abort(self, request_id: str) -> None:
        """Stops a request wherever it stands; no Delta follows. A request that has ended is left alone."""

    # What is retained. `reference` is an id or a client's own name; both are looked up under the tenant, so that
    # another tenant's is simply not found. Each raises ParentNotFound or ParentExpired.

    def parent(self, tenant: str, reference: str) -> Parent: ...

    async def parent_ended(self, tenant: str, reference: str, deadline: float | None) -> Parent:
        """Waits until it does not run any more; raises DeadlineExceeded, or ParentFailed if nothing came of it."""

    async def seek(self, tenant: str, reference: str) -> None:
        """A lease that another server has put into the store is known from now on, if there is one."""

    async def reach(self, tenant: str, reference: str, choice: int) -> None:
        """Returns when the bytes of a choice are at hand, if they are in files; raises ParentLost."""

    def record_names(self, tenant: str) -> list[tuple[str, str | None]]:
        """Ids and clients' names of all that the tenant has, oldest first."""

    def record(self, tenant: str, reference: str) -> RecordEntry: ...

    def set_ttl(self, tenant: str, reference: str, ttl: float | None) -> RecordEntry:
        """Counts from now, and makes a lease of a record that is none; None makes it warm.

        Raises RetentionTooLarge, InsufficientRetention; InvalidRequest while it runs or when its blocks are gone.
        """

    def forget(self, tenant: str, reference: str) -> str:
        """Releases a record, its tokens too; its children live on. One that runs goes on, without a record.

        Returns its id.
        """

    def free_name(self, tenant: str, reference: str) -> None:
        """Of an ended request whose answer was given up with others that were a part of it: another may have the
        name. Nothing, where there is none."""

    async def written(self) -> None:
        """Returns when files say what `set_ttl` and `forget` have done, or the disk is too slow."""

    def prefetch(self, tenant: str, reference: str) -> RecordEntry:
        """The bytes of a lease in files will be at hand for its children."""

    async def export_estate(self, tenant: str, reference: str) -> Estate:
        """All that an ended request owns. Raises InsufficientRetention if its blocks are gone."""

    async def import_estate(self, tenant: str, estate: Estate, ttl: float) -> str:
        """Leases it; its id. Raises InvalidEstate, EstateMismatch, NameInUse, and what `set_ttl` raises."""

    @property
    def asleep(self) -> bool:
        """Its memory is given back."""

    async def sleep(self, *, wakes_itself: bool) -> int:
        """Bytes given back. `wakes_itself`: by a request, too, else these raise EngineAsleep. Raises EngineBusy."""

    async def wake(self) -> None:
        """Raises EngineAsleep if the memory is not there any more."""

    def load(self) -> EngineLoad: ...

    def snapshot(self) -> Snapshot:
        """Takes time in proportion to the blocks in use."""

    def expect_tenants(self, count: int) -> None:
        """So many may come: room is kept for those who have not yet."""

    def num_waiting(self, tenant: str) -> int:
        """Requests of the tenant that wait to run."""

    def check_room(self, tenant: str) -> None:
        """Raises QueueFull if a generation of the tenant would be refused now: its text need not be tokenised."""

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""

    @property
    def num_steps(self) -> int:
        """Steps that came back from the device."""

    async def cross_weights(self, asked: CrossHeads) -> FloatRows:
        """Of a model that hears: where heads of its decoder look (engine/types/listening.py)."""
        ...

    async def probe(self) -> None:
        """Returns when the device has passed everything that was launched before; never, if it hangs."""

    async def drain(self, timeout: float) -> bool:  # noqa: ASYNC109 - the engine's to enforce
        """Takes no new work; True if everything that ran finished in time."""

    async def stop(self, grace: float = 10.0) -> None:
        """Open requests get an error; what the device works on gets `grace` seconds."""

    async def wait_dead(self) -> BaseException:
        """Returns when the engine has died, with what killed it."""


class TokenizerLike(Protocol):
    @property
    def max_chars_per_token(self) -> int | None:
        """The most characters of text one token can stand for; None where nothing bounds it."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def spells_bytes(self) -> bool:
        """Whether a text is its tokens' bytes put together."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_behind(self, text: str, last: int | None = None) -> list[int]:
        """Of a text that goes on behind another, whose last token is `last`."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def id_of(self, token: str) -> int | None:
        """By its string in the vocabulary."""

    def token_string(self, token_id: int | None) -> str | None: ...

    @property
    def role_tokens(self) -> Mapping[str, str]:
        """What templates know by name: `bos_token`, `eos_token` and others, where the model has them."""


class ChatTemplateLike(Protocol):
    @property
    def source(self) -> str: ...

    @property
    def tool_source(self) -> str:
        """The template of requests with tools."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Raises InvalidRequest where the template refuses the conversation. Maps `developer` to `system` for a
        template that does not know it, and parses the arguments of tool calls."""


class TextLike(Protocol):
    @property
    def tokenizer(self) -> TokenizerLike: ...

    @property
    def chat_template(self) -> ChatTemplateLike | None: ...
