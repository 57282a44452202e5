"""Frozen pydantic models that refuse what they do not know, in one readable line."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from p99lab.errors import BadParameterError, did_you_mean


class StrictModel(BaseModel):
    """Frozen, no unknown keys, no NaN or infinity, no silent conversion of one type into another."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=False, protected_namespaces=())

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Build the model from a plain dict.

        Raises:
            BadParameterError: one line that names every key at fault, what it was and what was expected.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise BadParameterError(cls.explain(error)) from None

    @classmethod
    def explain(cls, error: ValidationError) -> str:
        """All problems of a validation error in one line, unknown keys with the nearest known one."""
        return " · ".join(cls._explain_one(dict(problem)) for problem in error.errors())

    @classmethod
    def _explain_one(cls, problem: dict[str, Any]) -> str:
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] != "extra_forbidden":
            return f"{path}: {problem['msg']}, got {problem['input']!r}"
        known = cls._fields_at(problem["loc"][:-1])
        return f"unknown parameter '{path}'{did_you_mean(str(problem['loc'][-1]), known)}"

    @classmethod
    def _fields_at(cls, path: tuple[Any, ...]) -> list[str]:
        model: Any = cls
        for part in path:
            field = getattr(model, "model_fields", {}).get(part)
            model = field.annotation if field is not None else None
        return list(getattr(model, "model_fields", {}))
