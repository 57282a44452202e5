"""`/v1/completions`: text or token ids, continued."""

from __future__ import annotations

from dataclasses import dataclass, field

from p99lab.serving.openai_api.answers import Job, Json
from p99lab.serving.openai_api.choices import ChoiceRequest, Piece
from p99lab.serving.openai_api.errors import ApiError
from p99lab.serving.openai_api.fields import Body, CompletionFields, RawPrompt, parse_fields, parse_prompts
from p99lab.serving.openai_api.logprobs import TokenTexts, completion_logprobs
from p99lab.serving.openai_api.service import Service

PATH = "/v1/completions"


@dataclass(slots=True)
class CompletionShape:
    """`offsets`: the characters that each choice's scored tokens have spelled so far."""

    texts: TokenTexts
    with_logprobs: bool
    offsets: dict[int, int] = field(default_factory=dict)
    prefix: str = "cmpl"
    object_name: str = "text_completion"
    chunk_name: str = "text_completion"

    def opening(self, index: int) -> Json | None:
        return None

    def chunk(self, piece: Piece) -> Json:
        return self.whole(piece)

    def whole(self, piece: Piece) -> Json:
        logprobs = None
        if self.with_logprobs:
            offset = self.offsets.get(piece.index, 0)
            logprobs = completion_logprobs(piece.scored, self.texts, offset)
            self.offsets[piece.index] = offset + sum(map(len, logprobs["tokens"]))
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            **piece.ids_field,
        }


async def prepare(service: Service, body: Body, arrival_s: float) -> Job:
    """Check a request and tokenise its prompts.

    Raises:
        ApiError: 400 or 404, what is wrong with it.
    """
    fields, content = parse_fields(CompletionFields, body, "prompt")
    service.require_model(fields.model)
    prompts = parse_prompts(content)
    _check(fields, len(prompts), service.max_choices)
    requests = [one for prompt in prompts for one in await _requests(service, fields, prompt)]
    shape = CompletionShape(service.token_texts, fields.logprobs is not None)
    return Job(service, PATH, requests, fields.n, shape, arrival_s, fields.stream, fields.stream_options.include_usage)


def _check(fields: CompletionFields, num_prompts: int, max_choices: int) -> None:
    if fields.best_of not in (None, fields.n):
        raise ApiError(400, "best_of: only a value equal to n is supported", param="best_of")
    if fields.max_tokens == 0 and not fields.echo:
        raise ApiError(400, "max_tokens: 0 gives an answer only where the prompt is echoed", param="max_tokens")
    if num_prompts * fields.n > max_choices:
        problem = f"{num_prompts} prompts with {fields.n} choices each: at most {max_choices} choices a request"
        raise ApiError(400, problem, param="n" if num_prompts == 1 else "prompt")


async def _requests(service: Service, fields: CompletionFields, prompt: RawPrompt) -> list[ChoiceRequest]:
    """All choices of one prompt."""
    token_ids = await service.encode(prompt, "prompt")
    max_tokens = max(fields.max_tokens, 1)  # the engine samples at least one
    service.require_room(len(token_ids), max_tokens, "prompt")
    echo = None
    if fields.echo:
        echo = prompt if isinstance(prompt, str) else service.engine.tokenizer.decode(token_ids)
    prompt_logprobs = fields.logprobs if fields.echo else None
    return [
        ChoiceRequest(
            token_ids,
            fields.sampling(number, max_tokens, fields.logprobs, prompt_logprobs),
            echo,
            return_token_ids=fields.return_token_ids,
            discards_token=fields.max_tokens == 0,
        )
        for number in range(fields.n)
    ]
