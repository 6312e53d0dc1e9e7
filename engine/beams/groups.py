"""A group of beams in the scheduler's hands: who continues whose blocks. Owned by the event-loop thread.

All beams of a group step together, and the group waits for the result of a step before the next is planned. Its one
sequence, the leader, stands for the best of them: it has that beam's tokens and all beams' counts, while the blocks of
all beams lie in `group.beams` from the first result on. When beams change places, tables are forked: whole blocks by
reference, and the partly filled last one is copied by whoever writes to it first. A beam that has ended keeps its
blocks until the search is over, since the best ones become the group's choices, which others may continue from. They
become sequences only where there is more to do for each: a lease to hold, hidden states to compute.

A group that has to give way starts again from its prompt: its search is short, and its result the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from bequest.engine._C import BeamTables
from bequest.engine.beams.answers import BeamAnswer
from bequest.engine.beams.search import BeamSearch, Finished, Turn
from bequest.engine.inheritance.records import KeptBeams
from bequest.engine.outputs import ChoiceOutput
from bequest.engine.scheduling.sequence import Group, Sequence, Status
from bequest.engine.states.capture import capture_of


def start_search(group: Group, eos_token_ids: Iterable[int]) -> BeamSearch:
    params = group.request.params
    stops = set(params.stop_token_ids)
    if params.ends_at_eos:
        stops.update(eos_token_ids)
    return BeamSearch.start(params, frozenset(stops))


def keep_ended(group: Group, turn: Turn) -> None:
    """Beams that ended in this step share the blocks of those they came from; those they displaced give theirs back."""
    beams = group.beams
    assert beams is not None
    if turn.finished:
        first = beams.end(np.asarray([ended.blocks_of for ended in turn.finished], np.int32))
        for place, ended in enumerate(turn.finished, first):
            ended.place = place
    for dropped in turn.dropped:
        beams.take_ended(dropped.place).free()


def take_over(group: Group) -> None:
    """The first result has come: from now on the leader's blocks are those of the first beam."""
    if group.beams is None:
        group.beams = BeamTables(group.sequences[0].table)


def reorder(group: Group, search: BeamSearch, turn: Turn) -> None:
    """Each surviving beam gets its blocks, and the leader the tokens of the best."""
    assert group.beams is not None
    group.beams.reorder(turn.parents, turn.tokens)
    leader = group.sequences[0]
    if turn.parents[0] == 0:
        leader.accept_known(int(turn.tokens[0]))
        return
    leader.tokens.truncate(leader.num_prompt)
    leader.tokens.extend(search.path_of(0)[:-1])
    leader.accept_known(int(turn.tokens[0]))


def keep_best(group: Group) -> None:
    """The search ends without a result: its best beam stands for what was computed."""
    if group.beams is not None:
        group.sequences[0].table = group.beams.fork(0)
        drop_beams(group)


def drop_beams(group: Group) -> None:
    if group.beams is not None:
        group.beams.free()
        group.beams = None


def ends_as_one(group: Group) -> bool:
    """Whether the answer can be kept and delivered without a sequence for each of its choices."""
    leased = group.record is not None and group.record.ttl is not None
    return not leased and group.request.hidden_states is None


def estates_of(group: Group, answer: BeamAnswer) -> KeptBeams:
    """What the beams of an answer leave to those who continue from them."""
    leader = group.sequences[0]
    assert group.beams is not None
    prompt = leader.tokens.fork()
    prompt.truncate(leader.num_prompt)
    computed = [leader.num_prompt + beam.length - 1 for beam in answer.beams]
    # Those that ended in the last step have no tables of their own, but those of the running ones.
    epochs = group.beams.epochs(
        places=np.asarray([beam.place for beam in answer.beams], np.int32),
        rows=np.asarray([beam.blocks_of for beam in answer.beams], np.int32),
        num_tokens=np.asarray(computed, np.int32),
    )
    return KeptBeams(prompt, leader.salt, answer.token_ids, answer.num_shown, epochs)


def choices_of(group: Group, answer: BeamAnswer) -> list[Sequence]:
    """The best beams as the complete choices of the group, best first."""
    leader = group.sequences[0]
    leader.tokens.truncate(leader.num_prompt)
    assert group.beams is not None
    choices: list[Sequence] = []
    for index, (ended, generated) in enumerate(zip(answer.beams, answer.token_ids, strict=True)):
        tokens = leader.tokens.fork(generated)
        output = _output(leader.output, index, answer, ended, generated)
        choice = Sequence(
            group,
            index,
            tokens,
            group.beams.take_ended(ended.place),
            leader.salt,
            output,
            num_computed=len(tokens) - 1,
            status=Status.RUNNING,
        )
        choice.num_output = len(generated)
        choice.planned_len = len(tokens)
        # Beams that were given up on the way have states that nobody wants: those of the best are computed at the end.
        # An encoder's are all the same, and may be here already.
        first = choices[0].capture if choices else leader.capture
        choice.capture = capture_of(group.request) if first is None else first.sibling()
        choices.append(choice)
    return choices


def _output(first: ChoiceOutput, index: int, answer: BeamAnswer, ended: Finished, token_ids: list[int]) -> ChoiceOutput:
    search = answer.search
    logprobs = None if search.params.logprobs is None else search.logprobs_of(ended)
    output = first.whole_sibling(index, token_ids, answer.num_shown[index], logprobs)
    output.set_beam(ended.score, ended.beam_score)
    output.finish(*answer.end_of(ended))
    return output
