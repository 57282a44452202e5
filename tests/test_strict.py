from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import Field, model_validator

from p99lab.engine.config import EngineConfig
from p99lab.errors import BadParameterError
from p99lab.strict import StrictModel

pytestmark = pytest.mark.light


class Pool(StrictModel):
    num_pages: int = Field(ge=1)
    ratio: float = 1.0


class Tree(StrictModel):
    depth: int = 0

    @model_validator(mode="after")
    def _shallow(self) -> Tree:
        if self.depth > 3:
            raise ValueError("too deep")
        return self


class Engine(StrictModel):
    name: str
    pool: Pool
    tree: Tree | None = None
    pools: tuple[Pool, ...] = ()


@pytest.mark.parametrize("build", [lambda values: Engine(**values), Engine.parse], ids=["constructor", "parse"])
@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"nmae": "a", "pool": {"num_pages": 1}}, "unknown parameter 'nmae'; did you mean 'name'?"),
        ({"name": "a"}, "pool: Field required"),
        ({"name": 7, "pool": {"num_pages": 1}}, "name: Input should be a valid string, got 7"),
        ({"name": "a", "pool": {"num_page": 1}}, "unknown parameter 'pool.num_page'; did you mean 'num_pages'?"),
        ({"name": "a", "pool": {"num_pages": 0}}, "pool.num_pages: Input should be greater than or equal to 1, got 0"),
        ({"name": "a", "pool": {"num_pages": 1, "ratio": "nan"}}, "pool.ratio: Input should be a finite number"),
        (
            {"name": "a", "pool": {"num_pages": 1}, "tree": {"dept": 1}},
            "unknown parameter 'tree.dept'; did you mean 'depth'?",
        ),
        ({"name": "a", "pool": {"num_pages": 1}, "tree": {"depth": 4}}, "tree: too deep"),
        ({"name": "a", "pool": {"num_pages": 1}, "pools": [{"num_pages": 1}, {}]}, "pools.1.num_pages: Field required"),
    ],
)
def test_what_does_not_fit_is_one_line_with_its_whole_path(
    build: Callable[[dict[str, object]], Engine], values: dict[str, object], says: str
) -> None:
    with pytest.raises(BadParameterError) as caught:
        build(values)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_several_problems_are_named_together() -> None:
    with pytest.raises(BadParameterError, match=r"pool: Field required.* · unknown parameter 'nme'"):
        Engine(name="a", nme="b")  # type: ignore[call-arg]


def test_a_rule_of_the_whole_model_names_the_model() -> None:
    with pytest.raises(BadParameterError, match=r"^Tree: too deep$"):
        Tree(depth=4)


def test_parts_may_be_models_or_plain_values() -> None:
    pool = Pool(num_pages=2)
    assert Engine(name="a", pool=pool) == Engine.parse({"name": "a", "pool": {"num_pages": 2}})
    assert Engine.parse(Engine(name="a", pool=pool).model_dump()) == Engine(name="a", pool=pool)


@pytest.mark.parametrize("given", ["7", 7.0, 7])
def test_a_value_is_converted_where_nothing_is_lost(given: object) -> None:
    assert Pool.parse({"num_pages": given}).num_pages == 7


@pytest.mark.parametrize("given", ["7.5", 7.5, "seven", None])
def test_a_value_that_would_lose_something_is_refused(given: object) -> None:
    with pytest.raises(BadParameterError, match="num_pages"):
        Pool.parse({"num_pages": given})


def test_a_mistyped_part_of_an_engine_is_told_by_the_constructor() -> None:
    with pytest.raises(BadParameterError, match=r"unknown parameter 'modle'; did you mean 'model'\?"):
        EngineConfig(modle="smollm2-135m")  # type: ignore[call-arg]
    assert EngineConfig.parse({"model": "smollm2-135m"}).model.name == "smollm2-135m"
