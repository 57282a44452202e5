"""Ctrl-C waits for the end of what must not be cut in two."""

from __future__ import annotations

import signal
import threading

import pytest

from p99lab.engine.interrupts import uninterrupted

pytestmark = pytest.mark.light


def test_an_interrupt_takes_effect_at_the_end_of_the_outermost_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, the block must go on
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("after")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_does_not_swallow_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        raise ValueError("first")
    assert isinstance(caught.value.__context__, ValueError)


def test_other_threads_have_nothing_to_hold_back() -> None:
    handlers = []

    def work() -> None:
        with uninterrupted():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_a_process_that_ignores_interrupts_goes_on_ignoring_them() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
