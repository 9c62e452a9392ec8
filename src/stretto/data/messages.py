"""Checks of messages and tools of a record, shared by conversations for SFT and prompts for RL."""

from __future__ import annotations

from typing import Any

from stretto.base.errors import DataError
from stretto.data.records import from_json

ROLES = ("system", "user", "assistant", "tool")


def parse_messages(value: Any, key: str, where: str, role_of_text: str | None = None) -> list[dict[str, Any]]:
    """The messages of a conversation; with role_of_text, a text is one message of that role.

    Raises: DataError that names the invalid message.
    """
    if isinstance(value, str) and role_of_text is not None:
        return [{"role": role_of_text, "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: `{key}` must be a list of messages, got {short_repr(value)}.")
    return [parse_message(message, f"{where}: {key}[{i}]") for i, message in enumerate(value)]


def parse_message(message: Any, where: str) -> dict[str, Any]:
    """One message, without the empty fields that parquet columns add.

    Raises: DataError if it is not valid.
    """
    if not isinstance(message, dict):
        raise DataError(f"{where} must be an object with role and content, got {short_repr(message)}.")
    message = {key: value for key, value in message.items() if value is not None}
    if message.get("role") not in ROLES:
        raise DataError(
            f"{where}.role must be one of {', '.join(ROLES)}, got {short_repr(message.get('role'))}."
        )
    if message.get("step_loss_mask", 1) not in (0, 1):
        rule = "must be 1, or 0 for a message that is not trained"
        raise DataError(f"{where}.step_loss_mask {rule}, got {short_repr(message['step_loss_mask'])}.")
    message.setdefault("content", "" if message.get("tool_calls") else None)
    if not isinstance(message["content"], str | list):
        raise DataError(f"{where}.content must be text, got {short_repr(message['content'])}.")
    return message


def parse_tools(value: Any, key: str, where: str) -> list[dict[str, Any]] | None:
    """The tools of a record, given as a list or as JSON text; None if there are none.

    Raises: DataError if they are not valid.
    """
    if isinstance(value, str):
        value = from_json(value, f"{where}: {key}")
    if value is not None and not isinstance(value, list):
        raise DataError(f"{where}: {key!r} must be a list of tools, got {type(value).__name__}.")
    for i, tool in enumerate(value or ()):
        if not isinstance(tool, dict):
            raise DataError(
                f"{where}: {key}[{i}] must be an object that describes a tool, got {short_repr(tool)}."
            )
    return value or None


def short_repr(value: Any) -> str:
    """The repr of a value for an error message, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
