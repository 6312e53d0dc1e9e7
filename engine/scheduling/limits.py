"""What a scheduler was started with."""

from __future__ import annotations

from dataclasses import dataclass

from bequest.engine.scheduling.policy.tuning import DEFAULT, Tuning
from bequest.engine.state.draft import StepLimits
from bequest.engine.types import MAX_BEAM_WIDTH
from bequest.engine.types.plan import MIXED_SIZES

_ANY = 1 << 30  # tokens: as many as a step has


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractionLimits:
    share: float = 0.1  # of the computed tokens, while generations run and extractions wait
    max_queued: int = 1024
    max_request_bytes: int = 1 << 30  # of the states of one request
    max_bytes: int = 4 << 30  # of all that are collected or being sent
    max_step_rows: int = 1 << 16  # states, of one token and one layer each, that a step stores
    # Of steps of nothing else, which a generation that comes meanwhile waits for: their tokens, what these may be cut
    # to where generations come and go (ascending), and whether one is queued while another step runs.
    max_step_tokens: int | None = None
    short_steps: tuple[int, ...] = ()
    queues_steps: bool = True
    # Others pass such a step while it runs, if it has so many tokens. So it may be long, and one more is queued behind
    # it. None: nobody does.
    yields_from: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    max_num_tokens_alone: int | None = None  # of a step that no running stream waits for; None: as of the others
    extraction: ExtractionLimits = ExtractionLimits()
    max_num_encoder_tokens: int = 1 << 30  # positions of all encoder inputs of a step; a longer one is alone in it
    max_image_rows: int = 1 << 30  # rows of images that the device keeps
    turns_images: bool = False  # rows of images turn otherwise than other tokens
    takes_embeds: bool = False  # requests may bring rows of their own instead of tokens
    images_together: bool = False  # rows of an image see each other, so that one step computes all that are left of it
    # How fast prompts are computed while requests wait for slots, by how fast slots become free: the faster, the fewer
    # slots hold a prompt that is not done, and the longer are the steps that streams wait for. Below 1 it is the part
    # of the slots that stream.
    prompt_pace: float = 2.0
    draft_rows: int = 8  # of a step that checks drafts (engine/types/speculation.py)
    follows_beams: bool = False  # a search's next step may be launched before the result of the one that it waits for
    tuning: Tuning = DEFAULT

    @property
    def max_num_beams(self) -> int:
        """Of all groups that run at once. Beams take no sampler rows: how much a step may compute limits them."""
        return max(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def beams_of_step(self) -> int:
        """That one step ranks."""
        return min(self.max_num_batched_tokens, MAX_BEAM_WIDTH)

    def tokens_of_step(self, streaming: bool) -> int:
        """The budget of a step, by whether a running sequence is past its prompt."""
        if streaming or self.max_num_tokens_alone is None:
            return self.max_num_batched_tokens
        return self.max_num_tokens_alone

    @property
    def most_tokens(self) -> int:
        """Of any step."""
        return max(self.max_num_batched_tokens, self.max_num_tokens_alone or 0, self.extraction.max_step_tokens or 0)

    @property
    def extraction_sizes(self) -> tuple[int, ...]:
        """Tokens that a step of nothing but extractions may have, ascending; the last is for when nobody generates."""
        return (*self.extraction.short_steps, self.extraction.max_step_tokens or _ANY)

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """Tokens that a step with prompts and streams may have, ascending."""
        most = self.max_num_batched_tokens
        return (*(size for size in (8, 16, *MIXED_SIZES) if size < most), most)

    @property
    def step(self) -> StepLimits:
        return StepLimits(
            max_chunks=max(self.max_num_seqs, MAX_BEAM_WIDTH),
            max_encoders=self.max_num_seqs,
            max_encoder_tokens=self.max_num_encoder_tokens,
        )
