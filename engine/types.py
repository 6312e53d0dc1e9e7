"""The values that cross a boundary.

server → engine: Request; engine → device thread and back: StepPlan, StepResult; engine → server: Delta.
All are frozen and complete when constructed. No torch here: the server imports this module.
Arrays are numpy, int32 unless said otherwise; a plan's arrays belong to the plan and are not written again.
Dims: T tokens of the step, S sequences of the step, N sampled rows, MB blocks per row, K alternatives.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from engine.encoder import EncoderInfo, EncoderInput, EncoderSpec, TokenRules
from engine.errors import EngineError
from engine.states.hidden import HiddenStatesParams, Stack, StatesDType, StepTaps, most_positions
from engine.states.values import ExtractedStates, StatesArray

if TYPE_CHECKING:
    from engine.beams.catalogue import Catalogue
    from engine.constraints.grammar import Grammar
    from engine.constraints.masks import StepMasks

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

FinishReason = Literal["stop", "length"]
StopReason = int | str | None  # None: the end token. str: the stop string, or "deadline". int: the stop token id


class OutputMode(enum.Enum):
    """What each Delta of a request carries: what is new, all so far, or nothing until the end."""

    DELTA = "delta"
    CUMULATIVE = "cumulative"
    FINAL = "final"


MAX_BEAM_WIDTH = 1024
MAX_BEAM_CANDIDATES = 4096  # of one request in one step: see BeamSearch.num_candidates


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search instead of sampling: the best `n` of `width` beams are returned."""

    width: int
    length_penalty: float = 1.0
    early_stopping: Literal[True, False, "never"] = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. Ranges are the server's to check; the engine asserts them."""

    max_tokens: int
    n: int = 1
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None: the engine draws one
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences whose last token is never sampled
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # alternatives per sampled token; 0: the sampled one alone
    prompt_logprobs: int | None = None
    beams: BeamParams | None = None
    catalogue: Catalogue | None = None  # only its items, then an end token
    grammar: Grammar | None = None  # only what it describes, then an end token; not with beams or a catalogue
    rules: TokenRules | None = None  # of the model's own

    def __post_init__(self) -> None:
        assert self.beams is None or self.n <= self.beams.width
        assert self.grammar is None or (self.beams is None and self.catalogue is None)
        assert self.n >= 1 and self.max_tokens >= 0 and 0 <= self.min_tokens <= self.max_tokens
        assert self.temperature >= 0 and 0 < self.top_p <= 1 and self.top_k >= 0 and 0 <= self.min_p <= 1
        assert self.repetition_penalty > 0

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def ends_at_eos(self) -> bool:
        """The end of a catalogue's item or of what a grammar describes is always an end: nothing can follow it."""
        return not self.ignore_eos or self.catalogue is not None or self.grammar is not None


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
    """

    ttl: float
    open_ended: bool = False


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
    name: str | None = None  # the client's own, unique among the tenant's records
    lineage: Lineage | None = None
    retain: Retain | None = None
    keep_record: bool = True  # whether others may continue from it
    origin: object = None  # the server's own notes, kept with the record: what the prompt was made from
    encoder: EncoderInput | None = None  # of an encoder-decoder model, whose decoder's prompt is prompt_token_ids
    hidden_states: HiddenStatesParams | None = None

    def __post_init__(self) -> None:
        assert self.prompt_token_ids, "a prompt has at least one token"
        assert self.keep_record or self.retain is None
        assert self.lineage is None or 0 <= self.lineage.at <= len(self.prompt_token_ids)
        assert self.encoder is not None or not self.states_of_encoder
        assert self.retain is None or not self.encodes_only, "it leaves nothing that could be leased"

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


# --- engine → server ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The raw model's log-probability of one token at one position, and the best alternatives, best first."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[int, float], ...] = ()


# Structs, not dataclasses: one of each is made for every token, and a frozen dataclass costs ten times as much to make.


class ChoiceDelta(msgspec.Struct, frozen=True, gc=False):
    """What one choice gained. `text` and `token_ids` are new or cumulative as the request's OutputMode says."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token of token_ids, if asked for
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    cumulative_logprob: float | None = None  # set with finish_reason if logprobs were asked for, or of a beam
    beam_score: float | None = None  # of a beam, with finish_reason: the same with the length penalty


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


Source = Literal["blocks", "host", "prefix_cache", "recompute"]


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What a continuation took over and what it had to compute; `source` is the costliest way that was used."""

    parent: str
    at: int
    inherited_tokens: int
    computed_tokens: int
    source: Source


@dataclass(frozen=True, slots=True)
class Retained:
    """A lease that was granted. `tokens` and `blocks` are those of all choices, shared ones counted once."""

    id: str
    expires_at: float  # seconds since 1970
    tokens: int
    blocks: int


class Delta(msgspec.Struct, frozen=True, gc=False):
    """One delivery to one request: choices that moved since the last one, in index order.

    `first` marks the first delivery; it names every choice of the request, with what each has so far (maybe nothing).
    The last delivery has `usage`, or `error`, and nothing follows it.
    """

    request_id: str
    choices: tuple[ChoiceDelta, ...] = ()
    first: bool = False
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # on the first delivery, if asked for
    usage: Usage | None = None
    error: EngineError | None = None
    inheritance: Inheritance | None = None  # on the first delivery of a continuation
    retained: Retained | None = None  # on the last delivery, if a lease was asked for and granted
    retention_lost: str | None = None  # on the last delivery, if a lease was asked for and outgrew the budget: why
    hidden_states: ExtractedStates | None = None  # on the last delivery, if asked for

    @property
    def finished(self) -> bool:
        return self.usage is not None or self.error is not None


# Called on the event-loop thread for each Delta. It must not block, and it must not raise.
Sink = Callable[[Delta], None]


# --- what is retained --------------------------------------------------------------------------------------------

Grade = Literal["running", "leased", "warm", "tokens"]


@dataclass(frozen=True, slots=True)
class ParentChoice:
    """The tokens of a parent's choice at this moment."""

    token_ids: tuple[int, ...]  # prompt and sampled
    num_prompt: int
    shown_len: int  # tokens the client was shown: without a trailing end token or what reaches into a stop string


@dataclass(frozen=True, slots=True)
class Parent:
    """A record as somebody who wants to continue from it sees it."""

    id: str
    running: bool
    cache_salt: str
    choices: Sequence[ParentChoice]
    origin: object
    encoder: EncoderInput | None = None  # a child has the same one


@dataclass(frozen=True, slots=True)
class ChoiceEntry:
    index: int
    tokens: int
    blocks: int  # that are still there, on the device or on the host
    shared_blocks: int  # of those, that somebody else holds too


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """A record as its owner may inspect it."""

    id: str
    name: str | None
    created_at: float  # seconds since 1970
    expires_at: float | None  # of a lease
    grade: Grade
    parent: str | None
    at: int | None
    children: int
    choices: tuple[ChoiceEntry, ...]


# --- event-loop thread → device thread ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowSpec:
    """Opens a sampler row: the device keeps the row's penalty counts, masks, seed and last token until it is closed."""

    row: int
    params: SamplingParams
    seed: int  # 64 bits
    choice: int
    prompt_token_ids: tuple[int, ...]  # for penalties and bad words
    output_token_ids: tuple[int, ...] = ()  # sampled before, when a preempted sequence comes back
    held_back: tuple[int, ...] = ()  # end tokens that must not come before min_tokens
    end_token_ids: tuple[int, ...] = ()  # that may follow an item of the catalogue, if there is one


@dataclass(frozen=True, slots=True)
class PromptLogprobSpec:
    """Asks for log-probabilities of `targets`: target i is the token after the step's token `first_token + i`."""

    request_id: str
    first_token: int  # index in [0, T)
    targets: IntArray
    top: int


@dataclass(frozen=True, slots=True)
class BeamSpec:
    """Asks for the best continuations of a group's beams: samples [first_sample, first_sample + R) of the step."""

    request_id: str
    params: SamplingParams
    first_sample: int
    scores: FloatArray  # [R] summed log-probabilities so far
    num_candidates: int
    held_back: tuple[int, ...]  # tokens that must not come: ends before min_tokens, the model's rules
    nodes: IntArray | None = None  # [R] where each beam stands in the catalogue, if there is one
    end_token_ids: tuple[int, ...] = ()  # that may follow an item of the catalogue


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step for the device thread: swaps out, swaps in, copies, rows closed and opened, encoders, forward, sampling.

    input_ids holds token ids; -(row + 1) means "the last token sampled in sampler row `row`", which the device knows
    before the event-loop thread does.
    """

    step: int
    input_ids: IntArray  # [T]
    positions: IntArray  # [T]
    query_start: IntArray  # [S + 1]
    seq_lens: IntArray  # [S], computed tokens after this step
    slot_mapping: npt.NDArray[np.int64]  # [T], -1: not written
    block_tables: IntArray  # [S, MB], padded with block 0
    swaps_out: IntArray  # [C, 2] (device block, host block)
    swaps_in: IntArray  # [C, 2] (host block, device block)
    block_copies: IntArray  # [C, 2] (source, destination) in the device pool, copy on write
    close_rows: tuple[int, ...]  # sampler rows that no later step names under their old meaning
    open_rows: tuple[RowSpec, ...]
    sample_tokens: IntArray  # [N] index in [0, T) whose logits are sampled
    sample_rows: IntArray  # [N] sampler row of each; -1: a beam's, which is not sampled
    sample_positions: IntArray  # [N] absolute position of the sampled token: keys its random number
    num_logprobs: int | None  # the largest number of alternatives any sampled row wants; None: nobody wants any
    prompt_logprobs: tuple[PromptLogprobSpec, ...]
    beams: tuple[BeamSpec, ...] = ()
    masks: StepMasks | None = None  # of the rows with a grammar: the last sampled ones before the beams'
    taps: StepTaps | None = None  # None: nobody wants hidden states of this step
    encoders: tuple[EncoderSpec, ...] = ()
    cross_tables: IntArray | None = None  # [S, MBX], padded with block 0; None: the model has no encoder
    cross_lens: IntArray | None = None  # [S]

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])


@dataclass(frozen=True, slots=True)
class LogprobArrays:
    """Raw log-probabilities of R rows: of the chosen token, its rank (1 is best), and the K best tokens, best first."""

    chosen: FloatArray  # [R]
    rank: IntArray  # [R]
    top_ids: IntArray  # [R, K]
    top: FloatArray  # [R, K]


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    tokens: IntArray  # [N]
    bad_rows: BoolArray  # [N] logits held a NaN: the row's request fails, nobody else's
    logprobs: LogprobArrays | None
    prompt_logprobs: tuple[LogprobArrays, ...] = ()  # as in the plan
    beams: tuple[BeamCandidates, ...] = ()  # as in the plan
    device_seconds: float = 0.0  # that the device worked on it
    states: tuple[StatesArray, ...] = ()  # as plan.taps splits them: [R, layers, H], owned by nobody else


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """The best continuations of one group's beams, best first; only allowed ones. `bad`: logits held a NaN."""

    scores: FloatArray  # [K] the beam's score and the token's log-probability
    rows: IntArray  # [K] which of the group's beams
    tokens: IntArray  # [K]
    logprobs: FloatArray  # [K] the raw model's, of the token
    bad: bool = False


class PendingStep(Protocol):
    """A step that is queued on a device. Called from another thread than the one that launched it."""

    @property
    def slow_to_read(self) -> bool:
        """Whether reading its results takes so long that the device should not wait for that."""
        ...

    @property
    def done(self) -> bool:
        """Whether `wait` would not block."""
        ...

    def wait_computed(self) -> None:
        """Blocks until the device has done what later steps wait for."""

    def wait(self) -> StepResult:
        """Blocks until it is done. Called once."""


class Runner(Protocol):
    """What the device thread runs. The paged fake of the tests and the real runners implement it."""

    def launch(self, plan: StepPlan) -> StepResult | PendingStep: ...
    def is_quick(self, plan: StepPlan) -> bool:
        """Whether to launch it takes less time than to wake threads: `launch` gives a PendingStep, and soon."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the server and the scheduler need to know of the loaded model."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_parameters: int
    default_sampling: dict[str, float | int] = field(default_factory=dict)  # from generation_config.json
    num_layers: int = 0  # L
    hidden_size: int = 0  # H
    states_dtype: StatesDType = "float32"  # what hidden states are computed in
    encoder: EncoderInfo | None = None  # of an encoder-decoder model
    kv_cache_dtype: str = ""

    def num_layers_of(self, stack: Stack) -> int:
        """REQUIRES: there is such a stack"""
        if stack == "decoder":
            return self.num_layers
        assert self.encoder is not None
        return self.encoder.num_layers
