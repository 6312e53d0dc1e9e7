"""Whisper's rule for timestamps, on rows of logits before they are sampled.

A transcript with timestamps begins with one, no later than a second; they come in pairs or end it, never go back, and
one is due where all of them together are likelier than the likeliest text. The model was trained on such transcripts,
but without the rule it often leaves them out. What a row said is kept on the device, so that the next step need not
wait for anybody to look at it; masking and recording do not synchronise, and can be captured in a graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bequest.engine.types import NO_ROW, StepRows

_LATEST_BEGIN = 50  # timestamps, of 20 ms


class TimestampRows:
    """The rule of each sampler row that has one. Device thread only."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._ids = torch.arange(vocab_size, device=device)[None, :]  # [1, V]
        # The model's own, and so the same for all rows.
        self._never_ids: tuple[int, ...] = ()
        self._never = torch.zeros((1, vocab_size), dtype=torch.bool, device=device)
        # By row, and one more for what is no row: <|0.00|> (0: no rule), the end token, the last token and the one
        # before it, the last timestamp (0: none), tokens so far.
        self._state = torch.zeros((6, num_rows + 1), dtype=torch.int64, device=device)
        self._open: set[int] = set()

    @property
    def any(self) -> bool:
        return bool(self._open)

    def update_rows(self, rows: StepRows) -> None:
        for row in self._open.intersection(rows.close):
            self._state[:, row] = 0
            self._open.remove(row)
        for spec in rows.open:
            rule = spec.timestamps
            if rule is None:
                continue
            first, end = rule.first, rule.end
            said = spec.output_token_ids
            times = [token for token in said if token >= first]
            last, before = (said[-1] if said else 0), (said[-2] if len(said) > 1 else 0)
            values = [first, end, last, before, times[-1] if times else 0, len(said)]
            self._state[:, spec.row] = torch.tensor(values, device=self._state.device)
            self._open.add(spec.row)
            if rule.never != self._never_ids:
                self._never_ids = rule.never
                self._never[0, list(rule.never)] = True

    def masked(self, logits: Tensor, rows: Tensor, drafts: Tensor | None = None) -> Tensor:
        """A copy of logits [N, V] with -inf where the rule of rows [N] (NO_ROW: none) forbids.

        With drafts [N] a row may be there several times, in a run: what follows a draft has that behind it.
        """
        first, end, last, before, latest, count = self._ahead(rows, drafts)[..., None]  # [N, 1] each
        ids, on = self._ids, first > 0
        is_time = on & (ids >= first)  # [N, V]
        begins = count == 0
        after_time = (count > 0) & (last >= first)
        after_pair = after_time & ((count < 2) | (before >= first))
        # A single timestamp may come twice: the end of one segment is the beginning of the next.
        least = torch.where(latest > 0, latest + torch.where(after_time & ~after_pair, 0, 1), first)
        denied = is_time & (after_pair | (ids < least) | (begins & (ids > first + _LATEST_BEGIN)))
        denied |= ~is_time & (begins | (after_time & ~after_pair & (ids < end)) | (ids == first - 1))
        allowed = logits.masked_fill(on & denied, -torch.inf)
        likely = allowed.masked_fill(self._never, -torch.inf)
        times = likely.masked_fill(~is_time, -torch.inf).logsumexp(dim=1, keepdim=True)
        text = likely.masked_fill(is_time, -torch.inf).amax(dim=1, keepdim=True)
        return allowed.masked_fill_(on & (times > text) & ~is_time, -torch.inf)

    def record(self, rows: Tensor, tokens: Tensor, drafts: Tensor | None = None) -> None:
        """`tokens` [N] were sampled in rows [N]; of a run those count that follow right drafts."""
        places = self._places(rows)
        first, end, last, _, latest, count = self._ahead(rows, drafts)
        said = tokens.to(torch.int64)
        if drafts is not None:
            places = torch.where(_last_counted(rows, said, drafts), places, self._state.shape[1] - 1)
        self._state[:, places] = torch.stack(
            [first, end, said, last, torch.where(said >= first, said, latest), count + 1]
        )

    def _ahead(self, rows: Tensor, drafts: Tensor | None) -> Tensor:
        """[6, N] the state that each sample finds, if the drafts before it were right."""
        state = self._state[:, self._places(rows)]
        if drafts is None or not len(rows):
            return state
        first, end, last, before, latest, count = state
        begins, numbers = _begins(rows), torch.arange(len(rows), device=rows.device)
        inside = numbers - torch.where(begins, numbers, 0).cummax(0).values  # the number of each in its run
        told = drafts.to(torch.int64)
        one_before, two_before = told.roll(1), told.roll(2)
        # Times only grow. What an earlier run has is below what a later one begins with.
        base = begins.cumsum(0) << 32
        times = torch.where(~begins & (one_before >= first), one_before, 0)
        latest = torch.maximum((times + base).cummax(0).values - base, latest)
        before = torch.where(inside == 0, before, torch.where(inside == 1, last, two_before))
        return torch.stack([first, end, torch.where(inside == 0, last, one_before), before, latest, count + inside])

    def _places(self, rows: Tensor) -> Tensor:
        return torch.where(rows == NO_ROW, self._state.shape[1] - 1, rows.to(torch.int64))


def _begins(rows: Tensor) -> Tensor:
    """[N] whether a sample is the first of its run."""
    begins = rows != rows.roll(1)
    begins[0] = True
    return begins


def _last_counted(rows: Tensor, said: Tensor, drafts: Tensor) -> Tensor:
    """[N] whether a sample is the last of its run that counts: it differs from its draft, and none before it does."""
    wrong = said != drafts
    before = wrong.cumsum(0) - wrong.to(torch.int64)  # wrong ones before each, of all runs
    at_begin = torch.where(_begins(rows), before, 0).cummax(0).values
    return wrong & (before == at_begin)
