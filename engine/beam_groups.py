"""A group of beams in the scheduler's hands: who continues whose blocks. Owned by the event-loop thread.

Every running beam is a sequence of the group; all of them step together, and the group waits for the result of a step
before the next is planned. When beams change places, tables are forked: whole blocks by reference, and the partly
filled last one is copied by whoever writes to it first. A beam that has ended keeps its blocks until the search is
over, since the best ones become the group's choices, which others may continue from.

A group that has to give way starts again from its prompt: its search is short, and its result the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine._C import TokenList
from engine.beams import BeamSearch, Finished, Turn
from engine.outputs import ChoiceOutput
from engine.sequence import Group, Sequence, Status
from engine.types import TokenLogprob


def start_search(group: Group, eos_token_ids: Iterable[int]) -> BeamSearch:
    params = group.request.params
    stops = set(params.stop_token_ids)
    if params.ends_at_eos:
        stops.update(eos_token_ids)
    return BeamSearch.start(params, frozenset(stops))


def keep_ended(group: Group, turn: Turn) -> None:
    """Beams that ended in this step share the blocks of those they came from; those they displaced give theirs back."""
    for ended in turn.finished:
        group.ended_beams[ended] = group.sequences[ended.parent].table.fork()
    for dropped in turn.dropped:
        group.ended_beams.pop(dropped).free()


def reorder(group: Group, turn: Turn) -> tuple[list[Sequence], list[Sequence]]:
    """Gives each surviving beam its sequence; returns those that are new and those that are not needed any more."""
    before = group.sequences
    heirs = Counter(parent for parent, _ in turn.survivors)
    forks: list[Sequence] = []
    after: list[Sequence] = []
    for parent, _ in turn.survivors:
        # The last heir of a beam takes over its sequence, after the others were forked off it.
        heirs[parent] -= 1
        if heirs[parent] == 0:
            after.append(before[parent])
        else:
            forks.append(_fork(before[parent]))
            after.append(forks[-1])
    for choice, (beam, (_, token)) in enumerate(zip(after, turn.survivors, strict=True)):
        beam.choice = choice
        beam.accept_known(token)
    group.sequences = after
    return forks, [beam for number, beam in enumerate(before) if number not in heirs]


def choices_of(group: Group, search: BeamSearch, deadline: bool) -> list[Sequence]:
    """The best beams as the complete choices of the group, best first."""
    beam = group.sequences[0]
    choices = []
    for index, ended in enumerate(search.best()):
        tokens = TokenList(group.request.prompt_token_ids)
        tokens.extend(step.token for step in ended.path.steps())
        output = beam.output.sibling(index)
        _fill(output, search, ended, deadline)
        choice = Sequence(
            group,
            index,
            tokens,
            group.ended_beams.pop(ended),
            beam.salt,
            output,
            num_computed=len(tokens) - 1,
            status=Status.RUNNING,
        )
        choice.num_output = len(tokens) - choice.num_prompt
        choice.planned_len = len(tokens)
        choices.append(choice)
    return choices


def release_ended(group: Group) -> None:
    for table in group.ended_beams.values():
        table.free()
    group.ended_beams.clear()


def _fork(beam: Sequence) -> Sequence:
    fork = Sequence(
        beam.group,
        beam.choice,
        beam.tokens.fork(),
        beam.table.fork(),
        beam.salt,
        beam.output,
        num_computed=beam.num_computed,
        status=Status.RUNNING,
    )
    fork.planned_len, fork.num_output = beam.planned_len, beam.num_output
    return fork


def _fill(output: ChoiceOutput, search: BeamSearch, ended: Finished, deadline: bool) -> None:
    params = search.params
    steps = ended.path.steps()
    last = steps[-1].token
    stopped = last in search.stop_token_ids
    for number, step in enumerate(steps):
        hidden = stopped and number == len(steps) - 1 and not params.include_stop_str_in_output
        output.push(step.token, TokenLogprob(step.token, step.logprob, 0, step.top), shown=not hidden)
    output.set_beam(float(ended.score), float(ended.beam_score))
    if stopped:
        output.finish("stop", last if last in params.stop_token_ids else None)
    else:
        output.finish("length", "deadline" if deadline else None)
