"""The client of `bench ingest`, in a process of its own: prompts at fixed times, as JSON that was made beforehand.

Executed as a module it reads an order from stdin, says `ready`, reads a URL, sends, and writes what came of it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from typing import Self

import aiohttp
import numpy as np
import orjson
from pydantic import Field

from p99lab.engine.request import IntArray
from p99lab.strict import StrictModel

VOCAB_SIZE = 128_000
TIMEOUT_S = 120.0


class Order(StrictModel):
    """What to send: lengths in tokens."""

    prompts_per_s: float = Field(gt=0)
    prompt_len: int = Field(ge=2)
    question_len: int = Field(ge=1)
    answer_len: int = Field(ge=1)
    num_documents: int = Field(ge=1)
    seconds: float = Field(gt=0)

    @property
    def num_prompts(self) -> int:
        return max(1, round(self.prompts_per_s * self.seconds))


@dataclass(frozen=True, slots=True)
class IngestPrompts:
    """Documents and questions: the same ones wherever they are drawn."""

    documents: tuple[IntArray, ...]
    questions: IntArray  # [num_prompts, question_len]

    @classmethod
    def draw(cls, order: Order) -> Self:
        rng = np.random.default_rng(0)
        length = order.prompt_len - order.question_len
        documents = rng.integers(0, VOCAB_SIZE, (order.num_documents, length), dtype=np.int32)
        questions = rng.integers(0, VOCAB_SIZE, (order.num_prompts, order.question_len), dtype=np.int32)
        return cls(tuple(documents), questions)

    def prompt(self, number: int) -> IntArray:
        return np.concatenate([self.documents[number % len(self.documents)], self.questions[number]])


class Bodies:
    """Requests of the completions API; a document is written once."""

    def __init__(self, order: Order) -> None:
        asked = IngestPrompts.draw(order)
        self._documents = [_digits(document) for document in asked.documents]
        self._questions = [_digits(question) for question in asked.questions]
        fields = {"model": "ingest", "max_tokens": order.answer_len, "ignore_eos": True, "temperature": 0}
        self._head = orjson.dumps(fields)[:-1] + b',"prompt":['

    def __getitem__(self, number: int) -> bytes:
        document = self._documents[number % len(self._documents)]
        return b"%b%b,%b]}" % (self._head, document, self._questions[number])


def _digits(token_ids: IntArray) -> bytes:
    return orjson.dumps(token_ids, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


async def send(url: str, order: Order, bodies: Bodies) -> int:
    """Send every prompt at its time; returns how many were answered in full."""
    headers, timeout = {"content-type": "application/json"}, aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers=headers, timeout=timeout, trust_env=False
    ) as session:
        began_s = time.perf_counter()

        async def ask(number: int) -> bool:
            await asyncio.sleep(max(0.0, began_s + number / order.prompts_per_s - time.perf_counter()))
            async with session.post(f"{url}/completions", data=bodies[number]) as response:
                return response.status == 200 and _num_tokens(await response.read()) == order.answer_len

        return sum(await asyncio.gather(*map(ask, range(order.num_prompts))))


def _num_tokens(answer: bytes) -> int:
    return int(orjson.loads(answer)["usage"]["completion_tokens"])


def main() -> None:
    order = Order.parse(orjson.loads(sys.stdin.buffer.readline()))
    bodies = Bodies(order)
    _say(b"ready")
    url = sys.stdin.buffer.readline().decode().strip()
    _say(orjson.dumps({"num_answered": asyncio.run(send(url, order, bodies))}))


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
