"""A sampler row: what the device has to know of a sequence to sample its tokens. Data, as all of a plan."""

from __future__ import annotations

from bequest.engine.types.data import Data


class DrawParams(Data, frozen=True, kw_only=True, eq=False):
    """How a token is drawn from what is allowed."""

    temperature: float
    top_p: float
    top_k: int  # 0: all
    min_p: float
    seed: int  # 64 bits
    choice: int

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


class Penalties(Data, frozen=True, kw_only=True, eq=False):
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0

    @property
    def any(self) -> bool:
        return self.presence != 0 or self.frequency != 0 or self.repetition != 1


class TokenBounds(Data, frozen=True, kw_only=True, eq=False):
    """Which tokens may come at all, and which are favoured."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences whose last token is never sampled
    held_back: tuple[int, ...] = ()  # tokens that must not come before min_tokens
    min_tokens: int = 0


class CatalogueSpec(Data, frozen=True, kw_only=True, eq=False):
    """Only items of a catalogue may come, then an end token."""

    handle: int  # that it was registered under
    end_token_ids: tuple[int, ...]


class TimestampSpec(Data, frozen=True, kw_only=True, eq=False):
    """Whisper's rule of transcripts with timestamps (engine/runner/timestamps.py)."""

    first: int  # <|0.00|>
    end: int  # <|endoftext|>
    never: tuple[int, ...]  # tokens that the model never says


class RowSpec(Data, frozen=True, kw_only=True, eq=False):
    """Opens a sampler row: the device keeps the row's penalty counts, masks, seed and last token until it is closed."""

    row: int
    draw: DrawParams
    penalties: Penalties
    bounds: TokenBounds
    max_tokens: int
    prompt_token_ids: tuple[int, ...] = ()  # for penalties and bad words
    output_token_ids: tuple[int, ...] = ()  # sampled before, when a preempted sequence comes back
    catalogue: CatalogueSpec | None = None
    timestamps: TimestampSpec | None = None
