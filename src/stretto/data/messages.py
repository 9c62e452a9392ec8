"""Messages and tools of a record, checked the same way wherever conversations and prompts are read."""

from __future__ import annotations

from typing import Any

from stretto.base.errors import DataError
from stretto.data.records import from_json

ROLES = ("system", "user", "assistant", "tool")


def parse_messages(value: Any, key: str, where: str, role_of_text: str | None = None) -> list[dict[str, Any]]:
    """A conversation; a text is one message where a role for it is given.

    Raises: DataError saying which message is wrong.
    """
    if isinstance(value, str) and role_of_text is not None:
        return [{"role": role_of_text, "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: `{key}` must be a list of messages, got {shown(value)}.")
    return [parse_message(message, f"{where}: {key}[{i}]") for i, message in enumerate(value)]


def parse_message(message: Any, where: str) -> dict[str, Any]:
    """A message without its empty fields, which columns of a parquet file always have.

    Raises: DataError.
    """
    if not isinstance(message, dict):
        raise DataError(f"{where} must be an object with role and content, got {shown(message)}.")
    message = {key: value for key, value in message.items() if value is not None}
    if message.get("role") not in ROLES:
        raise DataError(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(message.get('role'))}.")
    if message.get("step_loss_mask", 1) not in (0, 1):
        rule = "must be 1 or, for a turn that is not trained, 0"
        raise DataError(f"{where}.step_loss_mask {rule}, got {shown(message['step_loss_mask'])}.")
    message.setdefault("content", "" if message.get("tool_calls") else None)
    if not isinstance(message["content"], str | list):
        raise DataError(f"{where}.content must be text, got {shown(message['content'])}.")
    return message


def parse_tools(value: Any, key: str, where: str) -> list[dict[str, Any]] | None:
    """Tools of a record, as a list or as its JSON text; None where there are none.

    Raises: DataError.
    """
    if isinstance(value, str):
        value = from_json(value, f"{where}: {key}")
    if value is not None and not isinstance(value, list):
        raise DataError(f"{where}: {key!r} must be a list of tools, got {type(value).__name__}.")
    for i, tool in enumerate(value or ()):
        if not isinstance(tool, dict):
            raise DataError(
                f"{where}: {key}[{i}] must be an object that describes a tool, got {shown(tool)}."
            )
    return value or None


def shown(value: Any) -> str:
    """A value as a message shows it: not more than a line of it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
