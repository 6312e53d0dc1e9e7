"""What a client asked for, tokenised: server → engine. Frozen, complete when constructed."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from bequest.engine.types.adapter import AdapterRef
from bequest.engine.types.encoder import EncoderInput
from bequest.engine.types.hidden import HiddenStatesParams, most_positions
from bequest.engine.types.image import Image, without_images
from bequest.engine.types.sampling import SamplingParams
from bequest.engine.types.speculation import Speculation


class OutputMode(enum.Enum):
    """What each Delta of a request carries: what is new, all so far, or nothing until the end."""

    DELTA = "delta"
    CUMULATIVE = "cumulative"
    FINAL = "final"


@dataclass(frozen=True, slots=True)
class Lineage:
    """The beginning of a prompt is the first `at` tokens of a parent's choice, whose KV may still be there."""

    parent: str  # id of the parent's record
    choice: int
    at: int  # 0: nothing of it is in the prompt, or it is gone


@dataclass(frozen=True, slots=True)
class Retain:
    """Leases every choice of a request from its end for `ttl` seconds.

    `open_ended`: the client set no max_tokens, so the budget is charged in steps while it generates.
    `durable`: the lease shall outlive the process.
    """

    ttl: float
    open_ended: bool = False
    durable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms of inheritance: whose heir a request is, and what it leaves to its own."""

    lineage: Lineage | None = None
    name: str | None = None  # the client's own, unique among the tenant's records
    keep_record: bool = True  # whether others may continue from it
    retain: Retain | None = None
    origin: object = None  # the server's own notes, kept with the record: what the prompt was made from

    def __post_init__(self) -> None:
        assert self.keep_record or self.retain is None


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for, tokenised. `id` is unique in the process and made by the server."""

    id: str
    tenant: str
    prompt_token_ids: tuple[int, ...]  # of a continuation too: the parent's tokens and the new ones
    params: SamplingParams
    priority: int = 0  # lower is earlier
    deadline: float | None = None  # on the engine's clock (time.monotonic)
    cache_salt: str = ""  # divides the prefix cache inside a tenant
    output: OutputMode = OutputMode.DELTA
    terms: Terms = Terms()
    encoder: EncoderInput | None = None  # of an encoder-decoder model, whose decoder's prompt is prompt_token_ids
    images: tuple[Image, ...] = ()  # whose ids are among prompt_token_ids, in any order
    hidden_states: HiddenStatesParams | None = None
    speculation: Speculation = Speculation()
    adapter: AdapterRef | None = None  # a LoRA adapter that is loaded; None: the model itself
    suffixes: tuple[tuple[int, ...], ...] = ()  # each is scored behind the prompt, alone; nothing is sampled

    def __post_init__(self) -> None:
        assert self.prompt_token_ids, "a prompt has at least one token"
        lineage = self.terms.lineage
        assert lineage is None or 0 <= lineage.at <= len(self.prompt_token_ids)
        assert self.encoder is not None or not self.states_of_encoder
        assert self.terms.retain is None or not self.encodes_only, "it leaves nothing that could be leased"
        assert all(self.suffixes), "a suffix has at least one token"
        assert not self.suffixes or self._scores_alone, "scores are told as log-probabilities, and of nothing else"

    @property
    def said_token_ids(self) -> tuple[int, ...]:
        """The prompt without its images."""
        return without_images(self.prompt_token_ids) if self.images else self.prompt_token_ids

    @property
    def _scores_alone(self) -> bool:
        params = self.params
        return params.max_tokens == 0 and params.n == 1 and params.logprobs is not None and self.hidden_states is None

    @property
    def extracts(self) -> bool:
        """Whether it wants nothing but hidden states: it then has a queue of its own, below generation."""
        return self.hidden_states is not None and self.params.max_tokens == 0

    @property
    def encodes_only(self) -> bool:
        """Whether it wants nothing but its encoder's states: its decoder does not run."""
        return self.extracts and self.states_of_encoder

    @property
    def states_of_encoder(self) -> bool:
        return self.hidden_states is not None and self.hidden_states.stack == "encoder"

    @property
    def states_lens(self) -> tuple[int, int]:
        """Tokens that positions of hidden states count in: of the prompt, and the most that may be sampled."""
        if self.states_of_encoder and self.encoder is not None:
            return self.encoder.length, 0
        return len(self.prompt_token_ids), self.params.max_tokens

    @property
    def most_states(self) -> int:
        """Positions whose states it may come to hold. Choices have those of the encoder in common."""
        if self.hidden_states is None:
            return 0
        return most_positions(self.hidden_states, *self.states_lens) * (1 if self.states_of_encoder else self.params.n)
