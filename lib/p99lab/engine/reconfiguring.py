"""What an engine may be changed to while it keeps its weights, pool and graphs."""

from __future__ import annotations

from p99lab.engine.config import AttentionConfig, EngineConfig, GraphsConfig, GroupingConfig, SchedulerConfig
from p99lab.errors import BadParameterError


def changed(
    config: EngineConfig,
    scheduler: SchedulerConfig | None,
    grouping: GroupingConfig | None,
    prefix_cache: bool | None,
    attention: AttentionConfig | None,
    graphs: GraphsConfig | None,
) -> EngineConfig:
    """`config` with what is given in place of its own; None: as before.

    Raises:
        BadParameterError: graphs of other sizes than those that were captured at the start.
    """
    if graphs is not None and graphs.max_num_tokens != config.graphs.max_num_tokens:
        raise BadParameterError("graphs: 'max_num_tokens' is fixed when the engine starts")
    parts = config.model_dump()
    given = {"scheduler": scheduler, "grouping": grouping, "attention": attention, "graphs": graphs}
    parts |= {name: part.model_dump() for name, part in given.items() if part is not None}
    if prefix_cache is not None:
        parts["cache"]["prefix_cache"] = prefix_cache
    return EngineConfig.parse(parts)
