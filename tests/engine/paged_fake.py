"""A runner that is a hash function, but reads its inputs the way attention does: through slots and block tables.

Each slot of the fake cache holds a token id. A step writes its tokens to their slots, and to sample after position p it
reads positions 0…p back through the block table and hashes what it finds. So any error in slot mapping, sharing,
chunking, preemption, copy on write or token feedback changes the tokens. `expected_tokens` computes the same from the
plain list of tokens, without any cache: it is the oracle.

In a strip with a window a slot holds a whole history instead, up to its own token: like a layer's values, which have
seen all that came before. A step reads there no more than the window, and checks every slot of it. Where all strips
have windows, a token's history is that of the token before it and itself.

An encoder's run writes its input to the cross slots, marked as such; whoever samples reads all of it back through the
cross table and hashes it before its own history.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import threading
from collections.abc import Sequence

import numpy as np

from bequest.engine.runner.following import Followed
from bequest.engine.types import (
    NO_DRAFT,
    NO_ROW,
    NO_SLOT,
    BeamCandidates,
    BeamSpec,
    CatalogueSpec,
    LogprobArrays,
    MaskSource,
    PromptLogprobSpec,
    RowSpec,
    StepMoves,
    StepPlan,
    StepResult,
)
from bequest.engine.types.blocks import (
    BlockBytes,
    BlockLayout,
    BlockRead,
    BlockWrite,
    KeptMemory,
    StateRead,
    StateWrite,
)
from bequest.engine.types.catalogue import Catalogue
from bequest.engine.types.hidden import NOT_TAPPED, StepTaps

VOCAB = 997
BEAM_VOCAB = 40  # the first tokens of it: enough for beams to part and meet
_EMPTY = -7  # a slot nothing was written to
_NOT_SAMPLED = -3  # what a sample holds that means nothing
CROSS = 1 << 20  # marks what an encoder wrote: a cross table must read nothing else, and a self table none of it


_WEIGHT, _MASK, _ONE = 0x9E3779B97F4A7C15, 2**64 - 1, np.uint64(1)


def _weights(count: int) -> np.ndarray:
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_WEIGHT)


_WEIGHTS = _weights(1024)  # of histories as most are


def next_token(history: Sequence[int] | np.ndarray, seed: int, choice: int, greedy: bool) -> int:
    """The token after `history`. Like a model's, it depends on every token before it, and if sampled on the seed."""
    return _token_behind(_mix(history), seed, choice, greedy)


def _mix(history: Sequence[int] | np.ndarray) -> int:
    """Of all its tokens, each in its place."""
    values = np.asarray(history, dtype=np.uint64)
    weights = _WEIGHTS[: len(values)] if len(values) <= len(_WEIGHTS) else _weights(len(values))
    return int(np.bitwise_xor.reduce((values + _ONE) * weights))


def _token_behind(mixed: int, seed: int, choice: int, greedy: bool) -> int:
    state = mixed if greedy else mixed ^ (seed * 31 + choice + 1) & _MASK
    state = (state ^ (state >> 31)) * 0xBF58476D1CE4E5B9 & _MASK
    return (state ^ (state >> 29)) % VOCAB


def next_logprobs(history: Sequence[int] | np.ndarray) -> np.ndarray:
    """Log-probabilities of the beams' vocabulary after `history`: like a model's, and without ties."""
    return _drawn_logprobs(next_token(history, 0, 0, greedy=True), len(history))


@functools.lru_cache(20_000)
def _drawn_logprobs(seed: int, length: int) -> np.ndarray:
    """The runner and the oracle ask for the same, and making a generator of random numbers takes longest."""
    values = np.random.default_rng([seed, length]).normal(size=BEAM_VOCAB)
    values = (values - np.log(np.exp(values).sum())).astype(np.float32)
    values.setflags(write=False)
    return values


def best_continuations(
    histories: Sequence[np.ndarray] | Sequence[list[int]], scores: np.ndarray, most: int, held_back: Sequence[int]
) -> BeamCandidates:
    """The candidates that a runner owes to beams with these histories."""
    raw = np.stack([next_logprobs(history) for history in histories])  # [R, V]
    ranked = raw + scores[:, None]
    ranked[:, list(held_back)] = -np.inf
    order = np.argsort(-ranked.ravel(), kind="stable")[:most]
    order = order[np.isfinite(ranked.ravel()[order])]
    rows, tokens = np.divmod(order, BEAM_VOCAB)
    return BeamCandidates(
        scores=ranked.ravel()[order],
        rows=rows.astype(np.int32),
        tokens=tokens.astype(np.int32),
        logprobs=raw.ravel()[order],
    )


NUM_LAYERS, HIDDEN = 5, 3  # of the fake's hidden states
_STATE_BYTES = 1500  # of the fake's recurrent layers; no multiple of a block
NUM_ENCODER_LAYERS = 4


def hidden_state(history: Sequence[int] | np.ndarray, layer: int) -> np.ndarray:
    """[HIDDEN] what a layer makes of the last token of `history`: it depends on every token before it."""
    return _state_behind(_mix(history), layer)


def _state_behind(mixed: int, layer: int) -> np.ndarray:
    return np.asarray([_token_behind(mixed, layer, i, greedy=False) for i in range(HIDDEN)], np.float32)


def expected_states(
    tokens: Sequence[int], positions: Sequence[int], layers: Sequence[int], encoder: Sequence[int] = ()
) -> np.ndarray:
    """[K, P, HIDDEN]"""
    before = [CROSS + token for token in encoder]
    mixed = [_mix([*before, *tokens[: p + 1]]) for p in positions]
    return np.asarray([[_state_behind(one, layer) for one in mixed] for layer in layers])


def expected_encoder_states(encoder: Sequence[int], positions: Sequence[int], layers: Sequence[int]) -> np.ndarray:
    """[K, P, HIDDEN] of an encoder's layers: each depends on the whole input."""
    mixed = [_mix([*encoder, CROSS + p]) for p in positions]
    return np.asarray([[_state_behind(one, layer) for one in mixed] for layer in layers])


def expected_tokens(
    prompt: Sequence[int],
    count: int,
    *,
    seed: int = 0,
    choice: int = 0,
    greedy: bool = True,
    eos: int | None = None,
    encoder: Sequence[int] = (),
) -> list[int]:
    """What a request must get: `count` tokens, or fewer when `eos` comes."""
    before = [CROSS + token for token in encoder] + list(prompt)
    mixed = _mix(before)
    tokens: list[int] = []
    for place in range(len(before) + 1, len(before) + 1 + count):
        token = _token_behind(mixed, seed, choice, greedy)
        tokens.append(token)
        if token == eos:
            break
        mixed ^= (token + 1) * (place * _WEIGHT) & _MASK
    return tokens


_HISTORY = 1 << 40  # marks the number of a history, in slots of windows
_histories: list[tuple[int, ...]] = []  # by number; of all runners, whose blocks may move from one to another


def history_in(slot: int) -> list[int] | None:
    """What a slot of a window holds; None: no history."""
    return list(_histories[slot - _HISTORY]) if slot >= _HISTORY else None


class PagedFakeRunner:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 1,
        *,
        num_states: int = 0,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        """With `num_states` it has recurrent layers: their states are the tokens that they stand for. `windows`: of the
        strips; where none keeps all tokens, one of them sees more than its own."""
        self.block_size = block_size
        self.states: list[tuple[int, ...] | None] = [None] * num_states
        self.windows = windows
        self._whole = [strip for strip, window in enumerate(windows) if window == 0]
        self._sliding = [strip for strip, window in enumerate(windows) if window]
        self.slots = np.full(num_blocks * block_size, _EMPTY, dtype=np.int64)
        self.host_slots = np.full(num_host_blocks * block_size, _EMPTY, dtype=np.int64)
        self.rows: dict[int, RowSpec] = {}
        self.catalogues: dict[int, Catalogue] = {}  # registered ones by their handles
        self.last_tokens: dict[int, int] = {}
        self._starts: list[int] = []  # of the step that runs: where sequences begin, and the positions of tokens
        self._positions: list[int] = []
        self._followed = Followed(self._child_of_each)
        self.num_followed = 0  # groups of beams that the runner chose
        self.num_steps = 0
        self.num_copies = 0
        self.num_swapped_out = 0
        self.num_swapped_in = 0
        self.num_encoded = 0  # positions
        self.most_encoded = 0  # in one step
        self.num_tokens = 0
        self.num_states = 0
        self.num_moved_states = 0
        self.num_read = self.num_written = 0  # blocks
        self.scored: list[tuple[tuple[int, ...], int]] = []  # histories, and the tokens behind them
        self.closed = False
        self.asleep = self.cannot_wake = False
        self.gate: threading.Event | None = None  # if there, steps from number `hold_from` on wait for it
        self.hold_from = 0
        self.fail_at: int | None = None
        self.bad_prompt_token: int | None = None  # a history that holds it gives NaN

    def connect(self, masks: MaskSource) -> None:
        pass

    def register(self, handle: int, catalogue: Catalogue) -> None:
        assert handle not in self.catalogues
        self.catalogues[handle] = catalogue

    def release(self, handle: int) -> None:
        del self.catalogues[handle]

    def is_quick(self, plan: StepPlan) -> bool:
        return False

    def _child_of_each(self, spec: CatalogueSpec, nodes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return self.catalogues[spec.handle].child_of_each(nodes, tokens)

    def launch(self, plan: StepPlan) -> StepResult:
        assert not self.asleep
        self.num_followed += sum(spec.following is not None for spec in plan.beams)
        plan = self._followed.fill(plan)
        if self.gate is not None and self.num_steps >= self.hold_from:
            self.gate.wait()
        self.num_steps += 1
        if self.fail_at is not None and self.num_steps >= self.fail_at:
            raise RuntimeError("the device fell off the bus")
        self.num_tokens += plan.num_tokens
        self.move(plan.moves)
        for row in plan.rows.close:
            del self.rows[row]
        for spec in plan.rows.open:
            assert spec.row not in self.rows, "a row was opened twice"
            self.rows[spec.row] = spec
        for bound in (*plan.rows.open, *plan.beams):
            assert bound.catalogue is None or bound.catalogue.handle in self.catalogues, "nobody registered it"
        batch = plan.batch
        inputs = zip(batch.input_ids.tolist(), batch.input_rows.tolist(), strict=True)
        input_ids = [token if row == NO_ROW else self.last_tokens[row] for token, row in inputs]
        assert not plan.num_tokens or len(batch.slot_mapping) == len(batch.block_tables) == len(self.windows)
        self._starts, self._positions = batch.query_start.tolist(), batch.positions.tolist()
        written = self._write(plan, input_ids)
        if self._sliding:
            for index in written:
                self._write_history(plan, index, input_ids[index])
        if len(written) < len(input_ids):
            for index in sorted({*range(len(input_ids))} - {*written}):
                assert self._history(plan, index)[-1] == input_ids[index], "a row that is only read is another token's"
        if self.states:
            self._recur(plan, input_ids)
        tokens, bad = self._sample(plan)
        beams = tuple(self._candidates(plan, spec) for spec in plan.beams)
        if beams:
            self._followed.note(plan.beams, beams)
        top = plan.samples.num_logprobs
        return StepResult(
            step=plan.step,
            tokens=np.asarray(tokens, np.int32),
            bad_rows=np.asarray(bad, np.bool_),
            logprobs=None if top is None else _fake_logprobs(np.asarray(tokens, np.int32), top),
            prompt_logprobs=tuple(self._score(plan, spec) for spec in plan.prompt_logprobs),
            beams=beams,
            states=() if plan.taps is None else self._states(plan, plan.taps),
        )

    @property
    def block_layout(self) -> BlockLayout:
        shape, num_bytes = (1, 1, 1, self.block_size, 1), 8 * self.block_size
        state_bytes = _STATE_BYTES if self.states else 0
        return BlockLayout(
            dtype="int64", shape=shape, num_bytes=num_bytes, windows=self.windows, state_bytes=state_bytes
        )

    def read_blocks(self, read: BlockRead) -> BlockBytes:
        assert not self.asleep
        self.move(read.moves)
        self.num_read += len(read.device) + len(read.host)
        return np.concatenate([self._blocks(self.slots)[read.device], self._blocks(self.host_slots)[read.host]])

    def write_blocks(self, write: BlockWrite) -> None:
        assert (write.blocks > 0).all() and len(set(write.blocks.tolist())) == len(write.blocks)
        self.move(write.moves)
        self.num_written += len(write.blocks)
        self._blocks(self.slots)[write.blocks] = write.content

    def sleep(self, kept: KeptMemory) -> int:
        """Whatever is not kept is gone."""
        assert not self.asleep
        self.move(kept.moves)
        self.asleep = True
        for slots, blocks in ((self.slots, kept.blocks), (self.host_slots, kept.host)):
            lost = np.ones(len(slots) // self.block_size, np.bool_)
            lost[blocks] = False
            slots.reshape(-1, self.block_size)[lost] = _EMPTY
        held = set(kept.slots.tolist())
        self.states = [state if slot in held else None for slot, state in enumerate(self.states)]
        return 1000

    def wake(self) -> None:
        assert self.asleep
        self.rows.clear()  # as a runner that was built anew
        if self.cannot_wake:
            raise MemoryError("others have the memory")
        self.asleep = False

    def read_states(self, read: StateRead) -> BlockBytes:
        """A state is a length and its tokens, as many as fit."""
        self._move_states(read.moves)
        content = np.zeros((len(read.slots), _STATE_BYTES // 4), np.int32)
        for row, slot in zip(content, read.slots.tolist(), strict=True):
            history = self.states[slot]
            assert history is not None, "a state that nobody has left"
            row[: len(history) + 1] = len(history), *history
        return content.view(np.uint8)

    def write_states(self, write: StateWrite) -> None:
        self._move_states(write.moves)
        for slot, content in zip(write.slots.tolist(), write.content, strict=True):
            length, *tokens = np.ascontiguousarray(content).view(np.int32).tolist()
            self.states[slot] = tuple(tokens[:length])

    def _blocks(self, slots: np.ndarray) -> np.ndarray:
        """[NB, bytes of a block], the same memory."""
        return slots.reshape(-1, self.block_size).view(np.uint8)

    def close(self) -> None:
        self.closed = True

    def _write(self, plan: StepPlan, input_ids: list[int]) -> list[int]:
        """What encoders read, and the tokens to strips that keep all: those that have slots, which it returns."""
        mapping = plan.batch.slot_mapping.tolist()  # of most steps a few numbers, and lists are quicker there
        written = [index for index, slot in enumerate(mapping[0]) if slot != NO_SLOT]
        slots = [slot for strip in mapping for slot in strip if slot != NO_SLOT]
        everywhere = all(strip[index] != NO_SLOT for strip in mapping[1:] for index in written)
        assert everywhere and len(slots) == len(written) * len(mapping), "a token is written in some strips only"
        assert len(set(slots)) == len(slots), "two tokens of a step share a slot"
        assert min(slots, default=self.block_size) >= self.block_size, "a token was written to the null block"
        self._encode(plan, slots)
        if written:
            tokens = input_ids if len(written) == len(input_ids) else [input_ids[index] for index in written]
            for strip in self._whole:
                self.slots[[mapping[strip][index] for index in written]] = tokens
        return written

    def _encode(self, plan: StepPlan, written: list[int]) -> None:
        if not plan.encoders:
            return
        filling = [(spec, spec.slots) for spec in plan.encoders if spec.slots is not None]
        assert all(spec.slots is None for spec in plan.encoders[len(filling) :]), "those without slots are the last"
        slots = [slot for _, filled in filling for slot in filled.tolist()]
        assert len({*slots, *written}) == len(slots) + len(written), "two writes to one slot"
        for spec, filled in filling:
            assert len(filled) == spec.input.length and (filled >= self.block_size).all()
            self.slots[filled] = CROSS + np.asarray(spec.input.token_ids)
        read = sum(spec.input.length for spec in plan.encoders)
        self.num_encoded += read
        self.most_encoded = max(self.most_encoded, read)

    def move(self, moves: StepMoves) -> None:
        self._swap(self.slots, self.host_slots, moves.swaps_out)
        self._swap(self.host_slots, self.slots, moves.swaps_in)
        self.num_swapped_out += len(moves.swaps_out)
        self.num_swapped_in += len(moves.swaps_in)
        self._move_states(moves.states)
        self._copy_blocks(moves.copies)

    def _move_states(self, moves: np.ndarray) -> None:
        for source, destination in moves.tolist():
            assert self.states[source] is not None, "a state that nobody has left"
            self.states[destination], self.states[source] = self.states[source], None
        self.num_moved_states += len(moves)

    def _copy_blocks(self, pairs: np.ndarray) -> None:
        self.num_copies += len(pairs)
        self._swap(self.slots, self.slots, pairs)

    def _swap(self, source: np.ndarray, destination: np.ndarray, pairs: np.ndarray) -> None:
        """All sources are read before anything is written: the copies of a step have no order."""
        if not len(pairs):
            return
        assert len(set(pairs[:, 1].tolist())) == len(pairs), "two copies go to one block"
        content = source.reshape(-1, self.block_size)[pairs[:, 0]].copy()
        destination.reshape(-1, self.block_size)[pairs[:, 1]] = content

    def _recur(self, plan: StepPlan, input_ids: list[int]) -> None:
        """Each sequence goes on from a state, which must be of the tokens that its blocks hold."""
        batch = plan.batch
        assert batch.state_starts is not None and batch.state_slots is not None
        starts, slots = batch.state_starts.tolist(), batch.state_slots.tolist()
        written = [slot for slot in slots if slot >= 0]
        assert len(set(written)) == len(written), "two states go to one slot"
        assert not {*written} & {start for start in starts if start >= 0}, "a slot is both read and written"
        before = [() if start < 0 else self.states[start] for start in starts]
        for sequence, history in enumerate(before):
            begin, end = batch.query_start[sequence : sequence + 2].tolist()
            assert history is not None, "a state that nobody has left"
            assert begin == end or slots[end - 1] >= 0, "the state behind a chunk has no place"
            for index in range(begin, end):
                history = (*history, input_ids[index])
                assert history == tuple(self._history(plan, index).tolist()), "a state of other tokens"
                if slots[index] >= 0:
                    self.states[slots[index]] = history

    def _sample(self, plan: StepPlan) -> tuple[list[int], list[bool]]:
        tokens: list[int] = []
        bad: list[bool] = []
        samples = plan.samples
        drafts = [NO_DRAFT] * len(samples) if samples.drafts is None else samples.drafts.tolist()
        for number, (index, row, position) in enumerate(
            zip(samples.tokens.tolist(), samples.rows.tolist(), samples.positions.tolist(), strict=True)
        ):
            follows = number > 0 and drafts[number - 1] != NO_DRAFT
            assert not follows or samples.rows[number - 1] == row, "a draft is followed by its row's next sample"
            if row == NO_ROW or (follows and tokens[-1] != drafts[number - 1]):
                # A beam's, or behind a draft that was wrong: nobody may look at it, nor at what follows it.
                tokens.append(_NOT_SAMPLED)
                bad.append(False)
                continue
            history = self._history(plan, index)
            before = self._positions[index] + 1  # as many tokens as were read of the cache, beside those of an encoder
            assert position == before, "a sampled token's position is the number of tokens before it"
            spec = self.rows[row]
            token = next_token(history, spec.draw.seed, spec.draw.choice, spec.draw.greedy)
            self.last_tokens[row] = token
            tokens.append(token)
            bad.append(self.bad_prompt_token is not None and self.bad_prompt_token in history.tolist())
        return tokens, bad

    def _score(self, plan: StepPlan, spec: PromptLogprobSpec) -> LogprobArrays:
        for number, target in enumerate(spec.targets.tolist()):
            self.scored.append(((*self._history(plan, spec.first_token + number).tolist(),), target))
        return _fake_logprobs(spec.targets, spec.top)

    def _states(self, plan: StepPlan, taps: StepTaps) -> tuple[np.ndarray, ...]:
        ring = np.full((taps.num_rows, HIDDEN), np.nan, np.float32)
        tapped = [frozenset(taps.tokens_of_layer(layer).tolist()) for layer in range(NUM_LAYERS + 1)]
        for token in np.flatnonzero(taps.rows != NOT_TAPPED).tolist():
            history = self._history(plan, token)
            mixed = _mix(history)
            wanted = [layer for layer, tokens in enumerate(tapped) if token in tokens]
            for number, layer in enumerate(wanted):
                row = int(taps.rows[token]) + number
                assert np.isnan(ring[row]).all(), "two states share a row"
                ring[row] = _state_behind(mixed, layer)
        inputs = [(spec.input.token_ids, p) for spec in plan.encoders for p in range(spec.input.length)]
        for tap in taps.encoders:
            for number, (token, layer) in enumerate(itertools.product(tap.tokens.tolist(), tap.layers)):
                row = tap.first_row + number
                assert np.isnan(ring[row]).all(), "two states share a row"
                ids, position = inputs[token]
                ring[row] = expected_encoder_states(ids, [position], [layer])[0, 0]
        self.num_states += len(ring)
        assert not np.isnan(ring).any(), "a row of the ring was not written"
        return taps.split(ring)

    def _candidates(self, plan: StepPlan, spec: BeamSpec) -> BeamCandidates:
        histories = [
            self._history(plan, int(plan.samples.tokens[spec.first_sample + row])) for row in range(len(spec.scores))
        ]
        if self.bad_prompt_token is not None and any(self.bad_prompt_token in h.tolist() for h in histories):
            floats, ints = np.empty(0, np.float32), np.empty(0, np.int32)
            return BeamCandidates(scores=floats, rows=ints, tokens=ints, logprobs=floats, bad=True)
        return best_continuations(histories, spec.scores, spec.num_candidates, spec.held_back)

    def _history(self, plan: StepPlan, token_index: int) -> np.ndarray:
        """What the encoder wrote for the token's sequence, then the tokens up to it."""
        batch = plan.batch
        sequence, end = self._place(token_index)
        history = self._tokens(plan, sequence, end)
        assert len(history) == end, "a table is too short"
        assert np.minimum.reduce(history) >= 0, "read a slot that nothing was written to"
        for strip in self._sliding:
            self._check_window(plan, sequence, strip, history)
        assert np.maximum.reduce(history) < CROSS, "a self table holds what an encoder wrote"
        if batch.cross_tables is None or batch.cross_lens is None:
            return history
        cross = self._read(batch.cross_tables[sequence], int(batch.cross_lens[sequence]))
        assert (cross >= CROSS).all(), "a cross table holds what no encoder wrote"
        return np.concatenate([cross, history])

    def _place(self, token_index: int) -> tuple[int, int]:
        """The sequence of a token, and how many tokens it has with this one."""
        return bisect.bisect_right(self._starts, token_index) - 1, self._positions[token_index] + 1

    def _tokens(self, plan: StepPlan, sequence: int, end: int) -> np.ndarray:
        """Its first `end` tokens, as the strips have them."""
        tables = plan.batch.block_tables[:, sequence]
        if not self._whole:
            return self._known(tables, end)
        first, *others = (self._read(tables[strip], end) for strip in self._whole)
        assert all(np.array_equal(first, other) for other in others), "two strips hold different tokens"
        return first

    def _known(self, tables: np.ndarray, end: int) -> np.ndarray:
        """The history of position end - 1, which every window that sees it knows."""
        numbers = {int(self._read(tables[strip], end, end - 1)[0]) for strip in self._sliding}
        assert min(numbers) >= _HISTORY, "a window holds no history"
        known = {_histories[number - _HISTORY] for number in numbers}
        assert len(known) == 1, "two windows hold different histories"
        return np.asarray(known.pop(), np.int64)

    def _write_history(self, plan: StepPlan, token_index: int, token: int) -> None:
        sequence, end = self._place(token_index)
        if self._whole:
            history = tuple(self._tokens(plan, sequence, end).tolist())
        else:
            tables = plan.batch.block_tables[:, sequence]
            history = (*(self._known(tables, end - 1).tolist() if end > 1 else ()), token)
        _histories.append(history)
        for strip in self._sliding:
            self.slots[plan.batch.slot_mapping[strip, token_index]] = _HISTORY + len(_histories) - 1

    def _check_window(self, plan: StepPlan, sequence: int, strip: int, history: np.ndarray) -> None:
        """All that a query behind `history` sees is there."""
        end = len(history)
        begin = max(0, end - self.windows[strip])
        assert plan.batch.block_tables[strip, sequence, begin // self.block_size] > 0, "the null block is in a window"
        whole = tuple(history.tolist())
        for position, number in enumerate(self._read(plan.batch.block_tables[strip, sequence], end, begin), begin):
            assert number >= _HISTORY, "a window holds no history"
            assert _histories[number - _HISTORY] == whole[: position + 1], "a window holds another history"

    def _read(self, blocks: np.ndarray, length: int, begin: int = 0) -> np.ndarray:
        size = self.block_size
        first = begin // size
        held = self.slots.reshape(-1, size)[blocks[first : -(-length // size)]].ravel()
        return held[begin - first * size : length - first * size]


def _fake_logprobs(chosen: np.ndarray, top: int) -> LogprobArrays:
    ids = (chosen[:, None] + np.arange(top, dtype=np.int32)) % VOCAB
    return LogprobArrays(
        chosen=(-chosen / VOCAB).astype(np.float32),
        rank=np.ones(len(chosen), np.int32),
        top_ids=ids.astype(np.int32),
        top=(-ids / VOCAB).astype(np.float32),
    )
