"""What a request may say, read from its body.

A prompt of 130 000 ids is 0.8 MB of JSON: its digits become an array at once, without an object for each id, and only
the fields beside it become a model. A field that is null counts as absent, as in the API. Others are

- known: a field of the models below, strictly typed (`"16"` is no integer);
- harmless: nothing in the answer depends on them, so they are ignored;
- unsupported: they would change the answer, so anything but their neutral value is refused;
- unknown: refused, as the API itself does, with the known field that is nearest.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from p99lab.engine.request import SamplingParams
from p99lab.errors import did_you_mean
from p99lab.serving.openai_api.errors import ApiError
from p99lab.strict import StrictModel

MAX_CHOICES = 128  # the API's limit of n
MAX_STOPS = 4  # the API's
MAX_TOP_LOGPROBS = 20  # the API's, of chat

HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# Each with the values that mean the same as its absence.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "bad_words": ([],),
        "frequency_penalty": (0,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "guided_json": (),
        "logit_bias": ({},),
        "min_tokens": (0,),
        "modalities": (["text"],),
        "moderation": (),
        "presence_penalty": (0,),
        "prompt_logprobs": (),
        "reasoning_effort": ("none",),
        "repetition_penalty": (1,),
        "response_format": ({"type": "text"},),
        "structured_outputs": ({},),
        "suffix": ("",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "use_beam_search": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
)

IdArray = NDArray[np.int64]
RawPrompt = str | IdArray
Body = dict[str, Any]


def _as_tuple(value: Any) -> Any:
    """A text or a list of them, as a tuple."""
    return tuple(value) if isinstance(value, list) else (value,)


class StreamOptions(StrictModel):
    """Other options (`include_obfuscation`, `continuous_usage_stats`) are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False


class GenerationFields(StrictModel):
    """What both kinds of completion share.

    `ignore_eos`, `min_p`, `stop_token_ids`, `top_k` and `return_token_ids` extend the API. With the last, each choice
    has `token_ids`, and a stream has a chunk for every token, whether it shows text or not.
    """

    model_config = ConfigDict(strict=True)

    model: str
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=MAX_STOPS), BeforeValidator(_as_tuple)
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_as_tuple)] = ()
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    seed: int | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)  # 0 and -1: all tokens
    min_p: float = Field(0.0, ge=0, le=1)
    ignore_eos: bool = False
    return_token_ids: bool = False

    def sampling(
        self, number: int, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """Of the `number`-th of a prompt's choices: each has a seed of its own, and the first that of n=1."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed + number,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class CompletionFields(GenerationFields):
    """`/v1/completions`, without its prompt. `max_tokens` may be 0 where the prompt is echoed."""

    max_tokens: int = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1)


class ChatFields(GenerationFields):
    """`/v1/chat/completions`, without its messages. Without a limit, an answer may fill the model's context."""

    max_tokens: int | None = Field(None, ge=1)  # the older name
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


Fields = TypeVar("Fields", bound=GenerationFields)


def parse_body(body: bytes) -> Body:
    """A request's JSON object, without the fields that are null. A prompt that is one list of ids is an array already.

    Raises:
        ApiError: 400, no JSON object.
    """
    return _parse_around_ids(body) or _parse(body)


PROMPT_LIST = re.compile(rb'"prompt"\s{0,4}:\s{0,4}\[(?=\s{0,4}\d)')
COMMA, ZERO = ord(","), ord("0")
MAX_ID = 2**31 - 1


def _parse_around_ids(body: bytes) -> Body | None:
    """The object whose prompt is a list of ids: these are read by themselves, and orjson reads what is around them.

    None: there is no such list, or anything is unusual about it. Where it stands is only guessed from the bytes; what
    decides is that the mark put in its place, which no client can know, is what orjson finds as the prompt.
    """
    found = PROMPT_LIST.search(body)
    end = body.find(b"]", found.end()) if found is not None else -1
    if found is None or end < 0 or (ids := _read_ids(body[found.end() : end])) is None:
        return None
    mark = secrets.token_hex(16)
    try:
        values = orjson.loads(b'%b"%b"%b' % (body[: found.end() - 1], mark.encode(), body[end + 1 :]))
    except orjson.JSONDecodeError:
        return None
    if not isinstance(values, dict) or values.get("prompt") != mark:
        return None
    return _present({**values, "prompt": ids})


def _read_ids(text: bytes) -> IdArray | None:
    """The numbers of a JSON list, [n] int64; None where it is not plain ids with commas and single spaces between."""
    digits = b"," + (text.replace(b", ", b",") if b" " in text else text)
    if digits.translate(None, b"0123456789,"):
        return None
    read = np.frombuffer(digits, np.uint8)
    is_comma = read == COMMA
    begins_with_zero = is_comma[:-2] & (read[1:-1] == ZERO) & ~is_comma[2:]  # 01 is no number in JSON
    if is_comma[-1] or np.any(is_comma[:-1] & is_comma[1:]) or np.any(begins_with_zero):
        return None
    ids: IdArray = np.fromstring(digits[1:], np.int64, sep=",")
    return ids if ids.max() <= MAX_ID else None


def _parse(body: bytes) -> Body:
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is no valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body must be a JSON object")
    return _present(values)


def _present(values: Body) -> Body:
    return {name: value for name, value in values.items() if value is not None}


def parse_fields(kind: type[Fields], body: Body, content: Literal["prompt", "messages"]) -> tuple[Fields, Any]:
    """The fields of a request, and its `content` field as it came.

    Raises:
        ApiError: 400, with the first field at fault as `param`.
    """
    values = {name: value for name, value in body.items() if not _is_ignored(name, value)}
    for name in values:
        if name not in kind.model_fields and name != content:
            near = did_you_mean(name, [*kind.model_fields, content])
            raise ApiError(400, f"unknown parameter '{name}'{near}", param=name, code="unknown_parameter")
    prompt = values.pop(content, None)
    if prompt is None:
        raise ApiError(400, f"{content}: Field required", param=content, code="missing_required_parameter")
    try:
        return kind.model_validate(values), prompt
    except ValidationError as error:
        raise ApiError(400, kind.explain(error), param=str(error.errors()[0]["loc"][0])) from None


def _is_ignored(name: str, value: Any) -> bool:
    """
    Raises:
        ApiError: 400, the field asks for something that this server does not do.
    """
    if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
        problem = f"'{name}' is not supported by this server"
        raise ApiError(400, problem, param=name, code="unsupported_parameter")
    return name in UNSUPPORTED or name in HARMLESS


def parse_prompts(value: Any) -> list[RawPrompt]:
    """The prompts of a completion: a text, several, token ids, or several lists of them ([n] int64 each).

    Raises:
        ApiError: 400, anything else.
    """
    if isinstance(value, str | np.ndarray):
        return [value]
    kinds = _kinds(value)
    if kinds == {str}:
        return list(value)
    if kinds == {list}:
        return [_ids(ids) for ids in value]
    return [_ids(value)]


def _ids(value: Any) -> IdArray:
    """Checked and converted without a loop of Python's: there may be 130 000 of them."""
    try:
        if _kinds(value) == {int}:  # a bool is none
            return np.array(value, np.int64)
    except OverflowError:
        pass
    problem = "prompt: must be a text, a list of texts, a list of token ids or a list of such lists, none of them empty"
    raise ApiError(400, problem, param="prompt")


def _kinds(value: Any) -> set[type]:
    return set(map(type, value)) if isinstance(value, list) else set()


def parse_messages(value: Any) -> list[dict[str, str]]:
    """A conversation as the engine takes it: role and text of each message.

    Raises:
        ApiError: 400, no messages, an unknown role, or content other than text.
    """
    if not isinstance(value, list) or not value:
        raise ApiError(400, "messages: must be a list with at least one message", param="messages")
    return [_message(message, f"messages.{number}") for number, message in enumerate(value)]


ROLES = ("system", "developer", "user", "assistant")
MESSAGE_FIELDS = ("role", "content", "name")  # a name is ignored: chat templates have no place for it


def _message(message: Any, path: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ApiError(400, f"{path}: must be an object with role and content", param=path)
    for name, value in message.items():
        if name not in MESSAGE_FIELDS and value not in (None, [], {}):
            raise ApiError(400, f"{path}.{name}: is not supported by this server", param=f"{path}.{name}")
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{path}.role: must be one of {', '.join(ROLES)}, got {role!r}", param=f"{path}.role")
    role = "system" if role == "developer" else role  # the API's newer name of the same part
    return {"role": role, "content": _text(message.get("content"), f"{path}.content")}


def _text(content: Any, path: str) -> str:
    """A text, or the texts of its parts, one a line."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "\n".join(_parts(content, path))
    raise ApiError(400, f"{path}: must be a text or a list of parts", param=path)


def _parts(parts: list[Any], path: str) -> Iterable[str]:
    for number, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(400, f"{path}.{number}: this server takes parts of text only", param=f"{path}.{number}")
        yield part["text"]
