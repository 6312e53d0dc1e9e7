"""A group of beams in the scheduler's hands: who continues whose blocks. Owned by the event-loop thread.

All beams of a group step together, and the group waits for the result of a step before the next is planned. Its one
sequence, the leader, stands for the best of them: it has that beam's tokens and all beams' counts, while the blocks of
all beams lie in `group.beams` from the first result on. When beams change places, tables are forked: whole blocks by
reference, and the partly filled last one is copied by whoever writes to it first. A beam that has ended keeps its
blocks until the search is over, since the best ones become the group's choices, which others may continue from.

A group that has to give way starts again from its prompt: its search is short, and its result the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine._C import BeamTables
from engine.beams import BeamSearch, Finished, Turn
from engine.capture import capture_of
from engine.outputs import ChoiceOutput
from engine.sequence import Group, Sequence, Status


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
    for ended in turn.finished:
        group.ended_beams[ended] = beams.fork(ended.blocks_of)
    for dropped in turn.dropped:
        group.ended_beams.pop(dropped).free()


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


def release_ended(group: Group) -> None:
    for table in group.ended_beams.values():
        table.free()
    group.ended_beams.clear()


def choices_of(group: Group, search: BeamSearch, deadline: bool) -> list[Sequence]:
    """The best beams as the complete choices of the group, best first."""
    leader = group.sequences[0]
    leader.tokens.truncate(leader.num_prompt)
    choices: list[Sequence] = []
    best = search.best()
    for index, (ended, generated) in enumerate(zip(best, search.tokens_of(best), strict=True)):
        tokens = leader.tokens.fork(generated)
        output = _output(leader.output, index, search, ended, generated, deadline)
        choice = Sequence(
            group,
            index,
            tokens,
            group.ended_beams.pop(ended),
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


def _output(
    first: ChoiceOutput, index: int, search: BeamSearch, ended: Finished, tokens: list[int], deadline: bool
) -> ChoiceOutput:
    params = search.params
    stopped = ended.token in search.stop_token_ids
    hides_last = stopped and not params.include_stop_str_in_output
    logprobs = None if params.logprobs is None else search.logprobs_of(ended)
    output = first.whole_sibling(index, tokens, len(tokens) - hides_last, logprobs)
    output.set_beam(ended.score, ended.beam_score)
    if stopped:
        output.finish("stop", ended.token if ended.token in params.stop_token_ids else None)
    else:
        output.finish("length", "deadline" if deadline else None)
    return output
