"""What a beam search over the paged fake must give: the same search without any cache."""

from __future__ import annotations

from engine.beams import BeamSearch
from engine.types import Request
from tests.engine.harness import EOS
from tests.engine.paged_fake import best_continuations


def expected_beams(asked: Request) -> list[tuple[list[int], float]]:
    """Tokens and score of each returned beam, best first."""
    search = BeamSearch(asked.params, frozenset({EOS} | asked.params.stop_token_ids))
    prompt = list(asked.prompt_token_ids)
    done = False
    while not done:
        histories = [prompt + search.path_of(beam) for beam in range(search.num_running)]
        held_back = () if search.may_end else sorted(search.stop_token_ids)
        offered = best_continuations(histories, search.scores, search.num_candidates, held_back)
        done = search.advance(offered).done
    best = search.best()
    return [(tokens, ended.beam_score) for tokens, ended in zip(search.tokens_of(best), best, strict=True)]
