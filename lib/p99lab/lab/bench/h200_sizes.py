"""The sizes of `p99lab bench h200`, its cases, and the bars that they are held against. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field

from p99lab.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from p99lab.errors import BadParameterError, did_you_mean
from p99lab.probe.workload import Workload
from p99lab.strict import StrictModel

CASES: Mapping[str, str] = MappingProxyType(
    {
        "decode-1": "step, 1 request, whole context",
        "decode-64": "step, all on the documents",
        "decode-short": "step, nothing shared",
        "questions-64": "a question each on the documents",
        "prefill": "TTFT, cold prompt, in process",
        "warm": "TTFT, known document, in process",
        "closed-idle": "time without a step, closed load, in process",
        "groups": "step with groups ÷ the faster plain one, the slowest",
        "compile": "a layer without attention, by torch.compile and by us",
        "itl-1": "ITL over HTTP, 1 client",
        "ttft-1": "TTFT over HTTP, known document",
        "itl-64": "ITL over HTTP, all on the documents",
        "itl-short": "ITL over HTTP, nothing shared",
        "cold": "TTFT over HTTP, cold prompts, the slowest",  # after the others: they may put documents out of a cache
        "steps": "steps of the loads, beside their predicted times",
    }
)
OVER_HTTP = frozenset({"itl-1", "itl-64", "itl-short", "cold", "ttft-1"})
BESIDE_TRANSFORMERS = frozenset({"decode-1", "prefill"})
APART = frozenset({"compile"})  # in a process of its own, before the engine's
WITHOUT_ENGINE = frozenset({"steps", "groups"})  # by its runner alone, over a pool that they overwrite
ON_DOCUMENTS = frozenset(CASES) - APART - WITHOUT_ENGINE - {"decode-short", "prefill", "itl-short", "cold"}
SHORT_FLOOR_MS = 5.6  # of decode-short, when its bar was stated: no ceiling measured later moves the bar
SHORT_TIMES_FLOOR = 1.25
BARS_MS: Mapping[str, float] = MappingProxyType(  # on one H200, at the default sizes; that of itl-short is vLLM's time
    {
        "decode-1": 8.9,
        "itl-1": 9.0,
        "decode-64": 24.0,
        "decode-short": SHORT_TIMES_FLOOR * SHORT_FLOOR_MS,
        "questions-64": 600.0,
        "prefill": 10_200.0,
        "cold": 10_200.0,
        "warm": 30.0,
        "ttft-1": 30.0,
    }
)
IDLE_BAR = 3.0  # per cent, of closed-idle
GROUPS_BAR = 1.03  # times the faster of the same step without groups by our kernels, and by the plain ones
FAKE = "documents' keys and values are random, not computed"

Way = Literal["own", "eager", "default", "max-autotune-no-cudagraphs", "max-autotune"]
"""A decoder layer's products: our kernels, plain torch, or torch.compile in one of its modes."""
Counts = tuple[Annotated[int, Field(ge=1)], ...]
UNJUDGED = frozenset({"device", "transformers", "num_transformers_steps"})  # and all of `compile`


class H200Bench(StrictModel):
    """Sizes, in tokens unless named otherwise. The defaults are those that the bars are stated for."""

    model: str = "dummy:llama-3.1-8b"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: str = "cuda"
    num_pages: int | None = Field(None, ge=2)  # None: as many as the device's free memory holds
    vocab_size: int = Field(49_152, ge=2)  # of the random ids
    context_len: int = Field(131_072, ge=16)  # the model's own
    num_documents: int = Field(4, ge=1)
    document_len: int = Field(130_816, ge=1)
    question_len: int = Field(64, ge=1)
    num_requests: int = Field(64, ge=1)
    short_len: int = Field(1024, ge=4)  # the mean context of requests that share nothing
    num_alone_steps: int = Field(1040, ge=2)
    answer_len: int = Field(128, ge=2)  # where the time between tokens is measured
    num_questions: int = Field(40, ge=1)  # of one client, for their first tokens
    repeats: int = Field(5, ge=1)
    num_prefills: int = Field(2, ge=1)
    num_cold: int = Field(3, ge=1)  # prompts over HTTP, of which the slowest counts
    num_transformers_steps: int = Field(20, ge=1)
    chunk_tokens: int = Field(8192, ge=1)
    transformers: bool = True
    primed: Literal["real", "fake"] = "real"  # fake: documents' keys and values are random, nobody computes them
    closed_s: float = Field(20.0, gt=0)  # of the closed load, after `closed_warmup_s`
    closed_warmup_s: float = Field(3.0, gt=0)
    closed_answer_len: int = Field(16, ge=1)
    closed_chunk_tokens: int | None = Field(None, ge=1)  # None: as notebook 01 has it in its tier h200
    closed_max_step_s: float | None = Field(None, gt=0)  # None: likewise
    group_requests: Counts = (1, 2, 8, 16, 64)
    group_documents: Counts = (1, 2, 4, 16, 64)  # where there are as many requests
    group_prefixes: Counts = (256, 2048, 16_384, 131_072)  # where the pool holds as many documents
    group_cell_s: float = Field(0.25, gt=0)  # of each step's repeats
    compile_tokens: Counts = (1, 64, 512, 4096)
    compile_ways: tuple[Way, ...] = ("own", "eager", "default", "max-autotune-no-cudagraphs", "max-autotune")
    compile_budget_s: float = Field(70.0, gt=0)  # nothing is begun after it; what has begun may take 20 more
    seed: int = Field(0, ge=0)

    @property
    def deviations(self) -> tuple[str, ...]:
        """What is not as the bars are stated for, as `name=value`; of sizes that no judged figure depends on, none."""
        stated = H200Bench()
        names = [n for n in type(self).model_fields if n not in UNJUDGED and not n.startswith("compile_")]
        changed = [n for n in names if getattr(self, n) != getattr(stated, n)]
        elsewhere = () if self.device.startswith("cuda") else ("device",)
        return tuple(f"{name}={getattr(self, name)}" for name in (*elsewhere, *changed))

    @property
    def is_stated(self) -> bool:
        """Whether the bars apply: the scenario that they are stated for, on a GPU."""
        return not self.deviations

    @property
    def shared(self) -> Workload:
        """Questions about the documents."""
        return self._workload(self.num_documents, self.document_len, self.answer_len)

    @property
    def short(self) -> Workload:
        """Documents that begin differently each time: half the answer later their length is `short_len`."""
        length = max(1, self.short_len - self.answer_len // 2 - self.question_len)
        return self._workload(1, length, self.answer_len, fresh=True)

    @property
    def whole(self) -> Workload:
        """A cold prompt as long as the context allows, and two tokens of an answer."""
        return self._workload(1, self.context_len - self.question_len - 2, 2, fresh=True)

    @property
    def closed(self) -> Workload:
        """What the clients of the closed load ask: questions of lengths around `question_len`."""
        spread = self.question_len // 4
        lengths = (self.question_len - spread, self.question_len + spread)
        answers = (self.closed_answer_len, self.closed_answer_len)
        return self.shared.model_copy(update={"question_tokens": lengths, "answer_tokens": answers})

    @property
    def engine(self) -> EngineConfig:
        """Everything on: chunks, shared-prefix groups, graphs, overlap."""
        scheduler = SchedulerConfig(
            max_num_batched_tokens=self.chunk_tokens, max_num_seqs=2 * self.num_requests, overlap=True
        )
        return EngineConfig(
            model=ModelConfig(name=self.model, dtype=self.dtype, device=self.device),
            cache=CacheConfig(num_pages=self.num_pages),
            scheduler=scheduler,
        )

    def _workload(self, num_documents: int, document_len: int, answer_len: int, fresh: bool = False) -> Workload:
        return Workload(
            num_documents=num_documents,
            document_tokens=(document_len, document_len),
            question_tokens=(self.question_len, self.question_len),
            answer_tokens=(answer_len, answer_len),
            vocab_size=self.vocab_size,
            fresh_documents=fresh,
            seed=self.seed,
        )


def chosen(only: Iterable[str]) -> frozenset[str]:
    """The cases that are named, all where none is.

    Raises:
        BadParameterError: no such case.
    """
    names = list(only)
    for name in names:
        if name not in CASES:
            raise BadParameterError(f"no case '{name}'{did_you_mean(name, CASES)} (known: {', '.join(CASES)})")
    return frozenset(names or CASES)
