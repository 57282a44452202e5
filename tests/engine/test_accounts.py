"""Accounts that do not add up are found."""

from __future__ import annotations

import pytest

from p99lab.engine.accounts import check_accounts
from p99lab.engine.request import Request, Status
from p99lab.errors import AccountingError
from tests.engine.scheduler_bench import Bench

pytestmark = pytest.mark.light


class Accounts:
    """One request that runs and one that waits, between two steps; sound as they are."""

    def __init__(self) -> None:
        bench = Bench(max_num_seqs=1)
        first, second = bench.add([0, 1], request_id="first"), bench.add([1, 1], request_id="second")
        bench.step()
        self.tree = bench.scheduler.tree
        self.live: dict[str, Request] = {"first": first, "second": second}
        self.waiting, self.running = [second], [first]

    def check(self) -> None:
        check_accounts(self.tree, self.live, self.waiting, self.running, in_flight=())


def test_sound_accounts_pass() -> None:
    Accounts().check()


def test_a_request_that_nobody_knows_is_found() -> None:
    accounts = Accounts()
    del accounts.live["second"]
    with pytest.raises(AccountingError, match="request 'second' is not known"):
        accounts.check()


def test_a_request_that_neither_waits_nor_runs_is_found() -> None:
    accounts = Accounts()
    accounts.waiting.clear()
    with pytest.raises(AccountingError, match="neither waits nor runs"):
        accounts.check()


@pytest.mark.parametrize(
    ("status", "problem"), [(Status.RUNNING, "is misplaced"), (Status.FINISHED, "has finished")], ids=str
)
def test_a_request_of_another_status_than_its_place_is_found(status: Status, problem: str) -> None:
    accounts = Accounts()
    accounts.live["second"].status = status
    with pytest.raises(AccountingError, match=f"request 'second' {problem}"):
        accounts.check()


def test_pages_that_no_table_holds_are_found() -> None:
    accounts = Accounts()
    accounts.live["first"].num_pages = 0
    with pytest.raises(AccountingError):
        accounts.check()


@pytest.mark.parametrize("name", ["num_placeholders", "num_computed_tokens", "num_pages"])
def test_wrong_accounts_are_found_while_steps_are_in_flight(name: str) -> None:
    bench = Bench(page_size=2, overlap=True)
    request = bench.add([0, 1, 2], max_tokens=9)
    bench.schedule()
    bench.schedule()
    setattr(request, name, getattr(request, name) - 1)
    with pytest.raises(AccountingError):
        bench.scheduler.check()
