"""Prompts of token ids as JSON, quickly: 100 prompts of 130 000 ids a second must not make a client late."""

from __future__ import annotations

import numpy as np
import orjson

from p99lab.engine.request import IntArray
from p99lab.probe.workload import Query

MAX_DOCUMENTS = 16  # kept: a workload asks about a few of them, a trace about any number


class PromptJson:
    """Encodes what follows a document, and copies what a document became the first time.

    A document is known by its number and compared as memory: another version of it is encoded anew.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[IntArray, bytes]] = {}

    def of(self, query: Query, token_ids: IntArray) -> bytes:
        """A JSON array of a query's prompt, [num_prompt_tokens] int32."""
        place = query.num_document_tokens
        if not 0 < place < len(token_ids):
            return _dumps(token_ids)
        head = token_ids[:place]
        known = self._known.get(query.document)
        if known is None or not np.array_equal(known[0], head):
            known = (head.copy(), _dumps(head).removesuffix(b"]"))
            if len(self._known) >= MAX_DOCUMENTS:
                self._known.clear()
            self._known[query.document] = known
        return b"%b,%b" % (known[1], _dumps(token_ids[place:]).removeprefix(b"["))


def _dumps(token_ids: IntArray) -> bytes:
    return orjson.dumps(np.ascontiguousarray(token_ids), option=orjson.OPT_SERIALIZE_NUMPY)
