"""`/v1/chat/completions`: a conversation, answered, in the model's own chat template."""

from __future__ import annotations

from dataclasses import dataclass

from p99lab.serving.openai_api.answers import Job, Json
from p99lab.serving.openai_api.choices import ChoiceRequest, Piece
from p99lab.serving.openai_api.errors import ApiError
from p99lab.serving.openai_api.fields import Body, ChatFields, parse_fields, parse_messages
from p99lab.serving.openai_api.logprobs import TokenTexts, chat_logprobs
from p99lab.serving.openai_api.service import Service

PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class ChatShape:
    texts: TokenTexts
    with_logprobs: bool
    prefix: str = "chatcmpl"
    object_name: str = "chat.completion"
    chunk_name: str = "chat.completion.chunk"

    def opening(self, index: int) -> Json | None:
        """Who speaks, with the first token."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, piece: Piece) -> Json:
        return self._choice(piece, "delta", {"content": piece.text} if piece.text else {})

    def whole(self, piece: Piece) -> Json:
        return self._choice(piece, "message", {"role": "assistant", "content": piece.text, "refusal": None})

    def _choice(self, piece: Piece, name: str, content: Json) -> Json:
        logprobs = chat_logprobs(piece.scored, self.texts) if self.with_logprobs else None
        end = {"logprobs": logprobs, "finish_reason": piece.finish_reason}
        return {"index": piece.index, name: content, **end, **piece.ids_field}


async def prepare(service: Service, body: Body, arrival_s: float) -> Job:
    """Check a request and write its conversation in the model's template.

    Raises:
        ApiError: 400 or 404, what is wrong with it; also that the model has no chat template.
    """
    fields, content = parse_fields(ChatFields, body, "messages")
    service.require_model(fields.model)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
    if fields.n > service.max_choices:
        raise ApiError(400, f"n: at most {service.max_choices} choices a request", param="n")
    token_ids = await service.encode(parse_messages(content), "messages")
    max_tokens = fields.max_completion_tokens or fields.max_tokens or max(service.context_len - len(token_ids), 1)
    service.require_room(len(token_ids), max_tokens, "messages")
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    requests = [
        ChoiceRequest(
            token_ids, fields.sampling(number, max_tokens, logprobs), return_token_ids=fields.return_token_ids
        )
        for number in range(fields.n)
    ]
    shape = ChatShape(service.token_texts, fields.logprobs)
    return Job(service, PATH, requests, fields.n, shape, arrival_s, fields.stream, fields.stream_options.include_usage)
