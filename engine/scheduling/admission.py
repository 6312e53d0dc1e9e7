"""Whether a request can be taken: what it asks for is there, fits, and the queue has room. Event-loop thread."""

from __future__ import annotations

import hashlib
import math

from bequest.engine.cache.kv_cache import KvCache
from bequest.engine.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from bequest.engine.scheduling.fairness import FairQueue
from bequest.engine.scheduling.policy.pace import Pace
from bequest.engine.scheduling.scheduler import Scheduler
from bequest.engine.types import MAX_BEAM_CANDIDATES, BeamParams, ModelInfo, Request
from bequest.engine.types.encoder import check_encoder
from bequest.engine.types.hidden import HiddenStatesParams, select_positions


def check_admissible(
    request: Request, info: ModelInfo, scheduler: Scheduler, max_queued: int, pace: Pace, now: float
) -> None:
    """Raises the EngineError that says why not. `pace` is that of requests of its kind."""
    check_encoder(request.encoder, info.encoder)
    _check_tokens(request, info)
    params = request.params
    prompt, limit = len(request.prompt_token_ids), info.max_model_len
    more = params.max_tokens + max(map(len, request.suffixes), default=0)
    if prompt + more > limit or prompt + 1 > limit + (more == 0):
        raise ContextLengthExceeded(
            f"{prompt} tokens and {more} behind them are more than the model's {limit}.",
            reason="context_length",
            details={"max_model_len": limit, "prompt_tokens": prompt, "max_tokens": more},
            total=prompt + more,
        )
    if params.beams is not None:
        _check_beams(request, params.beams, info, scheduler)
    if request.hidden_states is not None:
        _check_hidden_states(request, request.hidden_states, info)
    if request.extracts:
        most = scheduler.limits.extraction.max_queued
        _check_queue("extractions", scheduler.extractions.waiting, request.tenant, most, pace, now)
    else:
        check_room(request.tenant, scheduler, max_queued, pace, now)


def _check_tokens(request: Request, info: ModelInfo) -> None:
    """A tokenizer may know tokens that its model has no row for: computing one would be the end of everybody's step.
    Those of a parent were looked at when it came, or were sampled."""
    new = request.prompt_token_ids[0 if request.lineage is None else request.lineage.at :]
    encoded = () if request.encoder is None else request.encoder.token_ids
    wrong = max(max(part, default=0) for part in (new, encoded, *request.suffixes))
    if wrong >= info.vocab_size:
        raise InvalidRequest(
            f"The model has no token {wrong}: its tokens are 0 to {info.vocab_size - 1}.",
            reason="token_unknown",
            token=wrong,
            last=info.vocab_size - 1,
        )


def check_room(tenant: str, scheduler: Scheduler, max_queued: int, pace: Pace, now: float) -> None:
    """Whether a generation of the tenant may wait. Raises QueueFull."""
    _check_queue("requests", scheduler.waiting, tenant, max_queued, pace, now)


def _check_hidden_states(request: Request, wanted: HiddenStatesParams, info: ModelInfo) -> None:
    most = info.num_layers_of(wanted.stack)
    if max(wanted.layers) > most:
        stack = "model" if info.encoder is None else wanted.stack
        raise InvalidRequest(
            f"Layer {max(wanted.layers)} is not there: this {stack} has the layers 0 to {most}.",
            reason="layer_missing",
            field="layers",
            details={"num_layers": most},
            layer=max(wanted.layers),
            stack=stack,
        )
    if request.extracts and request.params.n > 1:
        raise InvalidRequest("Without tokens to generate there is one choice.", reason="one_choice", field="n")
    if request.extracts or request.states_of_encoder:
        select_positions(wanted.positions, request.states_lens[0])


def _check_queue(kind: str, queue: FairQueue, tenant: str, most: int, pace: Pace, now: float) -> None:
    """Extractions and generations do not take each other's places."""
    if not queue.has_room(tenant, most):
        seconds = math.ceil(pace.seconds_to_try_again(most, now))
        raise QueueFull(
            f"The queue is full: {most} {kind} wait.",
            reason="queue_full",
            details={"max_queued": most, "retry_after": seconds},
            kind=kind,
        )


def _check_beams(request: Request, beams: BeamParams, info: ModelInfo, scheduler: Scheduler) -> None:
    """All beams of a group run at once, so that it must fit the cache by itself."""
    ends = len({*request.params.stop_token_ids, *info.eos_token_ids})
    if beams.width * max(2, 1 + ends) > MAX_BEAM_CANDIDATES:
        raise InvalidRequest(
            f"{beams.width} beams × (1 + {ends} end tokens) may be {MAX_BEAM_CANDIDATES} at most.",
            reason="too_many_ends",
            field="stop_token_ids",
            details={"limit": MAX_BEAM_CANDIDATES},
            width=beams.width,
            ends=ends,
        )
    needed, most = most_blocks_of_beams(request, beams, scheduler.cache), scheduler.blocks_beside_leases
    if needed > most:
        raise InvalidRequest(
            f"{beams.width} beams may take {needed} cache blocks, but there are {most}.",
            reason="beams_too_large",
            field="beams.width",
            details={"needed_blocks": needed, "blocks": most},
            width=beams.width,
            max_tokens=request.params.max_tokens,
            prompt_tokens=len(request.prompt_token_ids),
        )


def most_blocks_of_beams(request: Request, beams: BeamParams, cache: KvCache) -> int:
    """Running and ended beams each have a tail of their own; copies are made before what they replace is free."""
    prompt, block_size = len(request.prompt_token_ids), cache.pool.block_size
    shared = prompt // block_size
    tail = -(-(prompt + request.params.max_tokens) // block_size) - shared
    return shared + 2 * beams.width * tail + beams.width + cache.cross.num_blocks(request.encoder)


def seed_of(request: Request, engine_seed: int) -> int:
    """64 bits: the client's seed, or one drawn from the engine's and the request's id."""
    if request.params.seed is not None:
        return request.params.seed & (2**64 - 1)
    digest = hashlib.blake2b(f"{engine_seed}/{request.id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
