"""Math answers: plain numbers are compared here, all others by math-verify in worker processes."""

from __future__ import annotations

import asyncio
import logging
from fractions import Fraction

import psutil
import pytest

from stretto.envs.rewards.math_reward import MathVerifier, boxed, fault_of, number, quick_verdict

SLOW = r"\boxed{9^{9^{9^{9}}}}"  # blocks math-verify for five seconds


def test_the_last_complete_box_counts():
    assert boxed(r"so \boxed{1} and then \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert boxed(r"\boxed{1} or \boxed{2") == "1"
    assert boxed(r"\boxed{2") is boxed("2") is boxed("") is None
    assert boxed(r"\boxed{}") == ""


def test_numbers_are_exact():
    for text in ("1/2", "0.5", "50%", r"50\%", r"\frac{1}{2}", r"\dfrac{2}{4}", " $0.50$ "):
        assert number(text) == Fraction(1, 2), text
    assert number("1,200") == 1200 and number("-3") == -3 and number(r"-\frac{1}{2}") == Fraction(-1, 2)
    for text in ("", "x", "1,20", "1/0", "nan", "1e5", "--1", "-", ".", "²", "9" * 100, "1;2"):
        assert number(text) is None, text


def test_plain_answers_are_compared_without_a_library():
    assert quick_verdict("0.5", "1/2") is True
    assert quick_verdict("3", "4") is False
    assert quick_verdict("x+1", "x+1 ") is True
    assert quick_verdict("1+x", "x+1") is None


async def test_plain_answers_start_no_worker():
    verifier = MathVerifier()
    assert await verifier.verify(r"\boxed{12}", "12")
    assert not await verifier.verify(r"\boxed{13}", "12")
    assert not await verifier.verify("12", "12")
    assert not verifier._idle


def test_a_library_that_compares_nothing_is_a_fault_and_not_a_wrong_answer():
    def raises(text: str) -> list[str]:
        raise ImportError("antlr4 4.9 was found")

    assert "damaged (ImportError: antlr4 4.9 was found); install it anew" in fault_of(raises, lambda a, b: True)
    assert "does not find x/2 equal to 0.5x" in fault_of(lambda text: [], lambda a, b: bool(a))
    assert fault_of(lambda text: [text], lambda a, b: True) == ""


async def test_without_the_library_other_answers_are_compared_as_text_with_one_warning(caplog):
    verifier = MathVerifier()
    verifier._has_library = False
    with caplog.at_level(logging.WARNING):
        assert not await verifier.verify(r"\boxed{1+x}", "x+1")
        assert await verifier.verify(r"\boxed{x+1}", "x+1")
        assert not await verifier.verify(r"\boxed{2+x}", "x+1")
    assert len(caplog.records) == 1 and "stretto[math]" in caplog.text


@pytest.mark.heavy
async def test_expressions_are_compared_as_mathematics():
    pytest.importorskip("math_verify")
    verifier = MathVerifier(num_workers=1, timeout_s=30)
    try:
        assert await verifier.verify(r"\boxed{1+x}", "x+1")
        assert await verifier.verify(r"\boxed{\{2,1\}}", r"\{1,2\}")
        assert not await verifier.verify(r"\boxed{x-1}", "x+1")
        assert not await verifier.verify(r"\boxed{\}}", "x+1")
        assert len(verifier._idle) == 1 and verifier.num_replaced == 0
    finally:
        await verifier.close()


@pytest.mark.heavy
async def test_a_worker_that_blocks_is_killed_and_replaced():
    pytest.importorskip("math_verify")
    verifier = MathVerifier(num_workers=1, timeout_s=30)
    try:
        assert await verifier.verify(r"\boxed{1+x}", "x+1")
        worker = verifier._idle[0].pid
        verifier.timeout_s = 0.3
        assert not await verifier.verify(SLOW, "x+1")
        assert verifier.num_replaced == 1 and not psutil.pid_exists(worker)
        verifier.timeout_s = 30
        assert await verifier.verify(r"\boxed{1+x}", "x+1")
    finally:
        await verifier.close()


@pytest.mark.heavy
async def test_the_verdict_of_a_cancelled_request_does_not_reach_the_next():
    pytest.importorskip("math_verify")
    verifier = MathVerifier(num_workers=1, timeout_s=30)
    try:
        assert await verifier.verify(r"\boxed{1+x}", "x+1")
        task = asyncio.create_task(verifier.verify(SLOW, "x+1"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await verifier.verify(r"\boxed{1+x}", "x+1")
        assert verifier.num_replaced == 1
    finally:
        await verifier.close()
