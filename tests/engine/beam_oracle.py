"""What a beam search over the paged fake must give: the same search without any cache."""

from __future__ import annotations

from bequest.engine.beams.search import BeamSearch
from bequest.engine.types import Request
from tests.engine.harness import EOS
from tests.engine.paged_fake import CROSS, best_continuations


def expected_beams(asked: Request) -> list[tuple[list[int], float]]:
    """Tokens and score of each returned beam, best first."""
    search = BeamSearch.start(asked.params, frozenset({EOS} | asked.params.stop_token_ids))
    encoder = () if asked.encoder is None else asked.encoder.token_ids
    prompt = [CROSS + token for token in encoder] + list(asked.prompt_token_ids)
    done = False
    while not done:
        histories = [prompt + search.path_of(beam) for beam in range(search.num_running)]
        offered = best_continuations(histories, search.scores, search.num_candidates, search.forbidden)
        done = search.advance(offered).done
    best = search.best()
    return [(list(tokens), ended.beam_score) for tokens, ended in zip(search.tokens_of(best), best, strict=True)]
