"""By embeddings: the cosine of the angle between two vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bequest.engine.types import Usage
from bequest.server.answers.extraction import extracted
from bequest.server.asks.prompts import TextSource
from bequest.server.asks.terms import AskTerms
from bequest.server.context import Context
from bequest.server.doors.ranking.body import Pair
from bequest.server.states.embeddings import pooled_ask, vectors_of
from bequest.server.wire.bodies import InputField
from bequest.server.wire.names import new_id


class Embedder:
    """Of one request."""

    def __init__(self, context: Context, terms: AskTerms, pooling: str | None) -> None:
        self._context = context
        self._terms = terms
        self._pooling = pooling
        self.usages: list[Usage] = []

    async def scores(self, pairs: Sequence[Pair], fields: tuple[str, str]) -> list[float]:
        """`fields` are the client's names of queries and of documents. The same query is embedded once."""
        queries = {query: place for place, query in enumerate(dict.fromkeys(pair.query for pair in pairs))}
        asked = await self._rows([*queries], fields[0])
        found = await self._rows([pair.document for pair in pairs], fields[1])
        own = asked[[queries[pair.query] for pair in pairs]]
        scores: list[float] = np.clip((own * found).sum(axis=1), -1.0, 1.0).tolist()
        return scores

    async def _rows(self, texts: list[str], field: str) -> npt.NDArray[np.float64]:
        """Normalised. [texts, H]"""
        context = self._context
        given: InputField = [*texts]
        source = TextSource(given=given, field=field)
        ask = await pooled_ask(context, new_id("score-"), source, self._terms, self._pooling)
        async with extracted(context, ask.requests) as results:
            length = context.engine.info.hidden_size
            vectors = await vectors_of(context, [result.states for result in results], length, normalize=True)
            self.usages += [result.usage for result in results]
            return np.stack([vector.assemble() for vector in vectors]).astype(np.float64)
