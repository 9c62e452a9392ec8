"""Filters of the messages that are echoed."""


def ends_with_two(message: dict) -> bool:
    return message["content"].endswith("2")
