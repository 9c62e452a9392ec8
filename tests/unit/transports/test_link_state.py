"""One end of a link without its socket: messages are delivered once, in order, and kept until they are acknowledged.

Over a wire that loses, doubles and reorders them: tests/wires/test_control.py.
"""

from __future__ import annotations

import pytest

from stretto.base.errors import EngineError
from stretto.transports.stream import MESSAGE, Link, Wire

WIRE = Wire(name="w", title="wire", section="control", host="127.0.0.1", port=1, heartbeat_s=1.0, dead_after_s=5.0)


def numbers(frames: list) -> list[int]:
    assert all(each[0] == MESSAGE for each in frames)
    return [int.from_bytes(each[1], "little") for each in frames]


def test_a_message_is_delivered_once_and_in_order_and_every_repetition_acknowledged():
    link = Link(0.0)
    assert link.accept(2) == (False, False)  # too early: it will be sent again
    assert link.accept(1) == (True, True)
    assert link.accept(1) == (False, True)
    assert link.accept(2) == (True, True)


def test_an_acknowledgement_is_for_all_up_to_it_and_ends_repetitions():
    link = Link(0.0)
    for _ in range(3):
        link.add_message([b"body"], 0.0)
    assert link.due_resends(1.0) == []
    assert numbers(link.due_resends(2.0)) == [1, 2, 3]
    assert link.due_resends(3.0) == []
    link.mark_acknowledged(2)
    assert numbers(link.due_resends(4.0)) == [3]


def test_a_new_process_at_the_other_end_gets_what_was_not_acknowledged_from_one():
    link = Link(0.0)
    for body in (b"a", b"b", b"c"):
        link.add_message([body], 0.0)
    link.mark_acknowledged(1)
    link.accept(1)
    again = link.restart(9.0)
    assert numbers(again) == [1, 2] and [each[2] for each in again] == [b"b", b"c"]
    assert link.accept(1) == (True, True)
    assert link.add_message([b"d"], 9.0)[0] == 3 and list(link.unacked) == [1, 2, 3]


def test_silence_is_an_error_but_not_the_time_that_this_process_itself_stood_still():
    link = Link(0.0)
    for now in (0.5, 1.5, 2.5, 3.5, 4.5):
        link.heartbeat(now, WIRE, "rank 0")
    with pytest.raises(EngineError, match=r"rank 0 .*control\.dead_after_s"):
        link.heartbeat(5.5, WIRE, "rank 0")
    stopped = Link(0.0)
    stopped.heartbeat(0.5, WIRE, "rank 0")
    stopped.heartbeat(60.5, WIRE, "rank 0")
