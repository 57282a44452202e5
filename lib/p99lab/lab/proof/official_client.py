"""The official `openai` package as a client: every kind of answer it can read, every refusal as its own error class."""

from __future__ import annotations

import asyncio
import http.client
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from p99lab.lab.proof.check import Check
from p99lab.serving.process import server_process

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI
    from openai.types import CompletionUsage
    from openai.types.chat import ChatCompletionUserMessageParam

PROMPT = "The three primary colours are"
NUM_TOKENS = 16
NUM_CLIENTS = 8
SLACK_S = 10.0
KEY_VARIABLE = "P99LAB_PROOF_KEY"
NARROW = ("--max-num-seqs", "1", "--max-num-waiting", "1", "--api-key-env", KEY_VARIABLE)


def checks(model: str, directory: Path) -> Iterator[Check]:
    """Against servers of `model`, whose weights lie in `directory`."""
    from openai import OpenAI

    with server_process([model]) as url, OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield _equal("models.list", [model], [listed.id for listed in client.models.list()])
        yield _equal("models.retrieve", model, client.models.retrieve(model).id)
        yield from _completions(client, model, directory)
        yield from _logprobs(client, model)
        yield from _several(client, model)
        yield from _chat(client, model)
        yield from _wrong_requests(client, model)
        yield asyncio.run(_at_once(url, model))
        yield _hanging_up(client, model, url)
    yield from _refusals(model)


def _completions(client: OpenAI, model: str, directory: Path) -> Iterator[Check]:
    """Text, ids and a stream: one greedy answer, which is that of transformers."""
    ids, expected = _transformers_greedy(directory)
    whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0)
    yield _equal("completions.create, text: as transformers' generate", expected, whole.choices[0].text)
    assert whole.usage is not None
    yield _equal("completions.create: usage", (len(ids), NUM_TOKENS), _counts(whole.usage))
    by_ids = client.completions.create(model=model, prompt=ids, max_tokens=NUM_TOKENS, temperature=0)
    yield _equal("completions.create, token ids: the same text", expected, by_ids.choices[0].text)
    stream = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    yield _equal("completions.create, stream: the same text", expected, text)
    bills = [chunk.usage for chunk in chunks if chunk.usage is not None]
    yield _equal("completions.create, stream: usage, once", [(len(ids), NUM_TOKENS)], [_counts(bill) for bill in bills])


def _logprobs(client: OpenAI, model: str) -> Iterator[Check]:
    """`echo` gives the prompt's log-probabilities, and the same as those with which the tokens were sampled."""
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, logprobs=2)
    sampled = answer.choices[0].logprobs
    assert sampled is not None
    assert sampled.token_logprobs is not None
    assert sampled.top_logprobs is not None
    pairs = zip(sampled.token_logprobs, sampled.top_logprobs, strict=True)
    num_best = sum(own == max(top.values()) for own, top in pairs)
    yield _equal("completions.create, logprobs: greedy tokens that are the top one", NUM_TOKENS, num_best)
    whole = PROMPT + answer.choices[0].text
    echo = client.completions.create(model=model, prompt=whole, max_tokens=1, temperature=0, logprobs=0, echo=True)
    scored = echo.choices[0].logprobs
    assert scored is not None
    assert scored.token_logprobs is not None
    yield _equal("completions.create, echo: the first token has none", None, scored.token_logprobs[0])
    again = scored.token_logprobs[-1 - NUM_TOKENS : -1]
    apart = max(abs(one - other) for one, other in zip(again, sampled.token_logprobs, strict=True))
    name = "completions.create, echo: what was sampled, scored again"
    yield Check(f"openai: {name}", "within 1e-3", f"{apart:.1e} apart at most", apart <= 1e-3)


def _several(client: OpenAI, model: str) -> Iterator[Check]:
    def draw() -> list[str]:
        answer = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=1, seed=7, n=3
        )
        return [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    drawn = draw()
    yield _equal("completions.create, n=3: different texts", 3, len(set(drawn)))
    alike = sum(one == other for one, other in zip(drawn, draw(), strict=True))
    yield _equal("completions.create, n=3 and a seed: the same again", 3, alike)
    batch = client.completions.create(
        model=model, prompt=[PROMPT, "One, two,"], max_tokens=4, temperature=0, stop=["\n"]
    )
    yield _equal("completions.create, two prompts: indices", [0, 1], [choice.index for choice in batch.choices])


def _chat(client: OpenAI, model: str) -> Iterator[Check]:
    question: ChatCompletionUserMessageParam = {"role": "user", "content": "Name three colours."}
    whole = client.chat.completions.create(
        model=model, messages=[question], max_completion_tokens=NUM_TOKENS, temperature=0, logprobs=True, top_logprobs=2
    )
    message, logprobs = whole.choices[0].message, whole.choices[0].logprobs
    yield _equal("chat.completions.create: role", "assistant", message.role)
    assert whole.usage is not None
    assert logprobs is not None
    num_scored = len(logprobs.content or ())
    yield _equal("chat.completions.create, logprobs: one a token", whole.usage.completion_tokens, num_scored)
    stream = client.chat.completions.create(
        model=model, messages=[question], max_completion_tokens=NUM_TOKENS, temperature=0, stream=True
    )
    text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    yield _equal("chat.completions.create, stream: the same text", message.content, text)


def _wrong_requests(client: OpenAI, model: str) -> Iterator[Check]:
    import openai

    create = client.completions.create
    bad, missing = openai.BadRequestError, openai.NotFoundError
    yield _raises("temperature=-1", bad, lambda: create(model=model, prompt=PROMPT, temperature=-1))
    yield _raises("an empty prompt", bad, lambda: create(model=model, prompt=[]))
    yield _raises("more tokens than the model has", bad, lambda: create(model=model, prompt=PROMPT, max_tokens=10**6))
    yield _raises("a model that is not served", missing, lambda: create(model="no-such-model", prompt=PROMPT))
    yield _raises("models.retrieve of such", missing, lambda: client.models.retrieve("no-such-model"))


async def _at_once(url: str, model: str) -> Check:
    """Many clients in one event loop get what each would alone."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        prompts = [f"{PROMPT} {number}" for number in range(NUM_CLIENTS)]
        alone = [await _text(client, model, prompt) for prompt in prompts]
        together = await asyncio.gather(*(_text(client, model, prompt) for prompt in prompts))
    num_alike = sum(one == other for one, other in zip(alone, together, strict=True))
    return _equal(f"{NUM_CLIENTS} at once: as each alone", NUM_CLIENTS, num_alike)


def _hanging_up(client: OpenAI, model: str, url: str) -> Check:
    """A stream is left after its first chunks; the server's own account tells when its pages are free."""
    prompt = PROMPT * 100
    stream = client.completions.create(model=model, prompt=prompt, max_tokens=2000, temperature=0, stream=True)
    for _ in range(3):
        next(stream)
    held = _active_pages(url)
    stream.close()
    left_s = time.monotonic()
    while _active_pages(url) and time.monotonic() - left_s < SLACK_S:
        time.sleep(0.02)
    waited_s, still_held = time.monotonic() - left_s, _active_pages(url)
    found = f"{held:.0f} pages held before, {still_held:.0f} held {waited_s:.2f} s later"
    return Check("openai: a stream left early", "its pages are free", found, held > 0 and still_held == 0)


def _refusals(model: str) -> Iterator[Check]:
    """A server with a key, where one request runs and one waits."""
    import openai

    key = secrets.token_hex(8)
    os.environ[KEY_VARIABLE] = key  # inherited by the server
    try:
        with server_process([model, *NARROW]) as url:
            with openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
                yield _raises("a wrong key", openai.AuthenticationError, client.models.list)
            outcomes = asyncio.run(_crowd(url, model, key, max_retries=0))
            expected = "some RateLimitError, the others answered"
            passed = set(outcomes) == {"answered", "RateLimitError"}
            yield Check("openai: a full queue, no retries", expected, _told(outcomes), passed)
            outcomes = asyncio.run(_crowd(url, model, key, max_retries=100))
            expected = f"answered {NUM_CLIENTS}"
            passed = _told(outcomes) == expected
            yield Check("openai: a full queue, the client's own retries", expected, _told(outcomes), passed)
    finally:
        del os.environ[KEY_VARIABLE]


async def _crowd(url: str, model: str, key: str, max_retries: int) -> Counter[str]:
    """How many clients that come at once are answered, and what happens to the others."""
    from openai import APIError, AsyncOpenAI

    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=max_retries) as client:

        async def outcome() -> str:
            try:
                await _text(client, model, PROMPT)
            except APIError as error:
                return type(error).__name__
            return "answered"

        return Counter(await asyncio.gather(*(outcome() for _ in range(NUM_CLIENTS))))


async def _text(client: AsyncOpenAI, model: str, prompt: str) -> str:
    answer = await client.completions.create(model=model, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0)
    return answer.choices[0].text


def _transformers_greedy(directory: Path) -> tuple[list[int], str]:
    """Token ids of the prompt, and the text that transformers continues it with."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    output = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    ids: list[int] = inputs["input_ids"][0].tolist()
    return ids, str(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))


def _active_pages(url: str) -> float:
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=SLACK_S)) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith('p99lab_pages{state="active"}'))


def _counts(usage: CompletionUsage) -> tuple[int, int]:
    return usage.prompt_tokens, usage.completion_tokens


def _told(outcomes: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items()))


def _equal(name: str, expected: object, found: object) -> Check:
    return Check(f"openai: {name}", _short(expected), _short(found), expected == found)


def _raises(name: str, expected: type[Exception], call: Callable[[], object]) -> Check:
    """The error's class, and that it says in a line what is wrong."""
    from openai import APIStatusError

    try:
        call()
    except APIStatusError as error:
        body = error.body if isinstance(error.body, dict) else {}
        message = str(body.get("message", ""))
        passed = type(error) is expected and bool(message) and "\n" not in message
        return Check(f"openai: {name}", expected.__name__, type(error).__name__, passed, _short(message))
    return Check(f"openai: {name}", expected.__name__, "an answer", False)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
