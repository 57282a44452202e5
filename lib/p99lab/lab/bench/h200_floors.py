"""What a step must take at least: bytes over a bandwidth, FLOPs over a rate, whichever is longer.

Arithmetic over a geometry and this machine's measured ceilings. Weights are read once a step, and so are the keys and
values of every distinct token that is attended to, however many requests attend to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from p99lab.engine.geometry import Geometry

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})


@dataclass(frozen=True, slots=True)
class Rates:
    """Ceilings: bytes per second of device memory (reading it or copying it, whichever is faster), FLOP per second of a
    large product."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """A step in numbers: tokens computed, rows of the output head, distinct tokens whose keys and values are read, and
    (token, key) pairs attended."""

    num_tokens: int
    num_sampled: int
    num_kv_tokens: int
    num_pairs: int

    @classmethod
    def decode_alone(cls, context_len: int) -> Work:
        return cls(1, 1, context_len, context_len)

    @classmethod
    def decode_shared(cls, num_requests: int, num_documents: int, document_len: int, private_len: int) -> Work:
        """Each request attends to one document, read once for all, and to tokens of its own."""
        num_kv_tokens = num_documents * document_len + num_requests * private_len
        return cls(num_requests, num_requests, num_kv_tokens, num_requests * (document_len + private_len))

    @classmethod
    def decode_apart(cls, num_requests: int, context_len: int) -> Work:
        """Nothing is shared."""
        return cls.decode_shared(num_requests, 0, 0, context_len)

    @classmethod
    def questions(cls, num_requests: int, num_documents: int, document_len: int, question_len: int) -> Work:
        """Prefill of one question per request behind its document, causal within itself."""
        num_tokens = num_requests * question_len
        pairs = num_tokens * document_len + num_requests * question_len * (question_len + 1) // 2
        return cls(num_tokens, num_requests, num_documents * document_len, pairs)

    @classmethod
    def answers(
        cls, num_requests: int, num_documents: int, document_len: int, question_len: int, answer_len: int
    ) -> Work:
        """Whole requests: each one's question and answer, as if decode rows rode the reading that questions need
        anyway. So long does a closed load of these requests take for a round at least."""
        num_tokens = question_len + answer_len - 1  # the last token of an answer is not computed
        pairs = num_tokens * document_len + num_tokens * (num_tokens + 1) // 2
        num_kv_tokens = num_documents * document_len + num_requests * num_tokens
        return cls(num_requests * num_tokens, num_requests * answer_len, num_kv_tokens, num_requests * pairs)

    @classmethod
    def prefill(cls, num_tokens: int) -> Work:
        """A prompt that nothing is known of."""
        return cls(num_tokens, 1, 0, num_tokens * (num_tokens + 1) // 2)


def floor_s(geometry: Geometry, work: Work, rates: Rates, element_bytes: int = 2) -> float:
    """Seconds of the work, were nothing lost: memory and arithmetic at once, each at its ceiling.

    Attention counts at the rate of a large product, which no attention kernel reaches.
    """
    flops = product_flops(geometry, work) + attention_flops(geometry, work)
    return max(read_bytes(geometry, work, element_bytes) / rates.bytes_per_s, flops / rates.flops_per_s)


def read_bytes(geometry: Geometry, work: Work, element_bytes: int = 2) -> float:
    """All weights but the embedding's (a step reads a few rows of it), and keys and values once."""
    weights = layer_weights(geometry) + geometry.vocab_size * geometry.hidden_size
    return element_bytes * weights + geometry.kv_bytes_per_token(element_bytes) * work.num_kv_tokens


def product_flops(geometry: Geometry, work: Work) -> float:
    """Of the matrix products: the layers' for every token, the output head's for those that sample."""
    head = geometry.vocab_size * geometry.hidden_size
    return 2.0 * (layer_weights(geometry) * work.num_tokens + head * work.num_sampled)


def attention_flops(geometry: Geometry, work: Work) -> float:
    """Scores and weighted values of each pair, in every query head of every layer."""
    return 4.0 * geometry.num_layers * geometry.q_size * work.num_pairs


def layer_floor_s(geometry: Geometry, num_tokens: int, rates: Rates, element_bytes: int = 2) -> float:
    """Seconds of one layer's matrix products."""
    weights = layer_weights(geometry) / geometry.num_layers
    return max(element_bytes * weights / rates.bytes_per_s, 2.0 * weights * num_tokens / rates.flops_per_s)


def layer_weights(geometry: Geometry) -> int:
    """Elements of all layers' matrices."""
    attention = 2 * geometry.hidden_size * (geometry.q_size + geometry.kv_size)
    return geometry.num_layers * (attention + 3 * geometry.hidden_size * geometry.intermediate_size)
