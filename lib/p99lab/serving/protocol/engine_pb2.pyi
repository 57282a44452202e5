from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_STOP: _ClassVar[Reason]
    REASON_LENGTH: _ClassVar[Reason]
    REASON_CANCELLED: _ClassVar[Reason]

class Problem(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROBLEM_UNSPECIFIED: _ClassVar[Problem]
    PROBLEM_BAD_PARAMETER: _ClassVar[Problem]
    PROBLEM_QUEUE_FULL: _ClassVar[Problem]
    PROBLEM_ENGINE_CLOSED: _ClassVar[Problem]
    PROBLEM_ENGINE_FAILED: _ClassVar[Problem]
    PROBLEM_INTERNAL: _ClassVar[Problem]
REASON_UNSPECIFIED: Reason
REASON_STOP: Reason
REASON_LENGTH: Reason
REASON_CANCELLED: Reason
PROBLEM_UNSPECIFIED: Problem
PROBLEM_BAD_PARAMETER: Problem
PROBLEM_QUEUE_FULL: Problem
PROBLEM_ENGINE_CLOSED: Problem
PROBLEM_ENGINE_FAILED: Problem
PROBLEM_INTERNAL: Problem

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Json(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    def __init__(self, value: _Optional[bytes] = ...) -> None: ...

class FromGateway(_message.Message):
    __slots__ = ("add", "cancel")
    ADD_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    add: Add
    cancel: int
    def __init__(self, add: _Optional[_Union[Add, _Mapping]] = ..., cancel: _Optional[int] = ...) -> None: ...

class Add(_message.Message):
    __slots__ = ("number", "request_id", "token_ids", "sampling", "priority", "deadline_s", "arrival_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    request_id: str
    token_ids: bytes
    sampling: Sampling
    priority: int
    deadline_s: float
    arrival_s: float
    def __init__(self, number: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., priority: _Optional[int] = ..., deadline_s: _Optional[float] = ..., arrival_s: _Optional[float] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: str
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[str] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class FromEngine(_message.Message):
    __slots__ = ("numbers", "token_ids", "times_s", "scored", "ends", "refusals", "config", "failure")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMES_S_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    times_s: _containers.RepeatedScalarFieldContainer[float]
    scored: _containers.RepeatedCompositeFieldContainer[Scored]
    ends: _containers.RepeatedCompositeFieldContainer[End]
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    config: bytes
    failure: Error
    def __init__(self, numbers: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., times_s: _Optional[_Iterable[float]] = ..., scored: _Optional[_Iterable[_Union[Scored, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[End, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., config: _Optional[bytes] = ..., failure: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Scored(_message.Message):
    __slots__ = ("index", "token", "prompt")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    index: int
    token: Scores
    prompt: Scores
    def __init__(self, index: _Optional[int] = ..., token: _Optional[_Union[Scores, _Mapping]] = ..., prompt: _Optional[_Union[Scores, _Mapping]] = ...) -> None: ...

class Scores(_message.Message):
    __slots__ = ("chosen", "top_ids", "top_values")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_VALUES_FIELD_NUMBER: _ClassVar[int]
    chosen: _containers.RepeatedScalarFieldContainer[float]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, chosen: _Optional[_Iterable[float]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_values: _Optional[_Iterable[float]] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("number", "at_token", "time_s", "reason", "usage")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    number: int
    at_token: int
    time_s: float
    reason: Reason
    usage: Usage
    def __init__(self, number: _Optional[int] = ..., at_token: _Optional[int] = ..., time_s: _Optional[float] = ..., reason: _Optional[_Union[Reason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "timeline")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    timeline: Timeline
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., timeline: _Optional[_Union[Timeline, _Mapping]] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("arrival_s", "accounted_s", "admitted_s", "first_token_s", "finished_s", "queue_s", "prefill_s", "decode_s", "stalled_s", "scheduling_s", "num_preemptions")
    ARRIVAL_S_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTED_S_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    FINISHED_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    STALLED_S_FIELD_NUMBER: _ClassVar[int]
    SCHEDULING_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    arrival_s: float
    accounted_s: float
    admitted_s: float
    first_token_s: float
    finished_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    stalled_s: float
    scheduling_s: float
    num_preemptions: int
    def __init__(self, arrival_s: _Optional[float] = ..., accounted_s: _Optional[float] = ..., admitted_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., finished_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., stalled_s: _Optional[float] = ..., scheduling_s: _Optional[float] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("number", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: Error
    def __init__(self, number: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("problem", "message")
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    problem: Problem
    message: str
    def __init__(self, problem: _Optional[_Union[Problem, str]] = ..., message: _Optional[str] = ...) -> None: ...
