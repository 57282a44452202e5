"""Frozen pydantic models that refuse what they do not know, in one readable line."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from p99lab.errors import BadParameterError, did_you_mean


class StrictModel(BaseModel):
    """Frozen, no unknown keys, no NaN or infinity.

    Parameters come as text too, from files and the command line, so a value is converted where its type's whole content
    survives: `"7"` and `7.0` are 7, `"7.5"` is no integer, and a number is never taken for text.

    Raises:
        BadParameterError: one line that names every key at fault, what it was and what was expected.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=False, protected_namespaces=())

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise BadParameterError(self.explain(error)) from None

    # pydantic's own mark of an `__init__` that only validates: a nested model is then validated as a part of the outer
    # one, whose error names the whole path, and not by a call of its own.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """The model from a plain dict, as the constructor makes it."""
        return cls(**values)

    @classmethod
    def explain(cls, error: ValidationError) -> str:
        """All problems of a validation error in one line, unknown keys with the nearest known one."""
        return " · ".join(cls._explain_one(dict(problem)) for problem in error.errors())

    @classmethod
    def _explain_one(cls, problem: dict[str, Any]) -> str:
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "value_error":  # a rule of ours, which says itself what it got
            return f"{path or cls.__name__}: {problem['ctx']['error']}"
        if problem["type"] != "extra_forbidden":
            return f"{path or cls.__name__}: {problem['msg']}, got {problem['input']!r}"
        known = cls._fields_at(problem["loc"][:-1])
        return f"unknown parameter '{path}'{did_you_mean(str(problem['loc'][-1]), known)}"

    @classmethod
    def _fields_at(cls, path: tuple[Any, ...]) -> list[str]:
        """The fields of the model at `path`; those of every model where the field takes several."""
        models: list[Any] = [cls]
        for part in path:
            fields = [model.model_fields[part] for model in models if part in model.model_fields]
            models = [kind for field in fields for kind in _models(field.annotation)]
        return [name for model in models for name in model.model_fields]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The model classes in a field's annotation: itself, or the members of a union."""
    kinds = typing.get_args(annotation) or (annotation,)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
