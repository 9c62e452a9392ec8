"""Pictures of tasks. JSON cannot hold them, so a task has only their names, and the environment has the pictures."""

from __future__ import annotations

from typing import Any

from stretto.data.pictures import identity_of, image_parts, is_image, is_path
from stretto.envs.base import Message

_NAME = "picture:"


class Pictures:
    """Pictures by name. A name depends only on the picture, so a resumed run finds the picture again."""

    def __init__(self) -> None:
        self._by_name: dict[str, Any] = {}

    def replace_by_names(self, messages: list[Message], where: str) -> list[Message]:
        """The messages with names instead of data URLs, bytes and pictures of Pillow; paths stay."""
        return [self._renamed(message, where) for message in messages]

    def restore(self, messages: list[Message]) -> list[Message]:
        """The messages with the pictures that are named in them."""
        return [_mapped(message, self._picture) if any(image_parts([message])) else message for message in messages]

    def _renamed(self, message: Message, where: str) -> Message:
        if not any(image_parts([message])):
            return message
        return _mapped(message, lambda source: self._name(source, where))

    def _name(self, source: Any, where: str) -> Any:
        if is_path(source):
            return source
        name = _NAME + identity_of(source, where).hex()
        self._by_name[name] = source
        return name

    def _picture(self, source: Any) -> Any:
        return self._by_name.get(source, source) if isinstance(source, str) else source


def _mapped(message: Message, change: Any) -> Message:
    content = [part | {"image": change(part["image"])} if is_image(part) else part for part in message["content"]]
    return message | {"content": content}
