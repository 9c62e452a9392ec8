"""The one check of messages and tools that users give: in records, from environments, from rollout functions.

A record is refused with its file and line. A message of an environment is refused too, and fails its rollout; only
lone surrogates, which come from the output of programs, become U+FFFD there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stretto.base.errors import DataError, EnvError, StrettoError
from stretto.data.records import from_json
from stretto.data.values import checked_json, is_unicode, refuse_surrogates

ROLES = ("system", "user", "assistant", "tool")
KNOWN_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "step_loss_mask")
"""Keys of a message in a record."""
PARTS = ("text", "image", "image_url")
"""Types of the parts of a content."""
THOUGHT_KEYS = ("reasoning", "thinking")
"""Other spellings of `reasoning_content`."""
MASK_KEYS = ("weight", "loss", "train", "trainable")
"""Other spellings of `step_loss_mask`, with 0 and 1 or false and true."""
NO_EFFECT = ("id", "audio", "annotations", "refusal", "timestamp")
"""Keys that say nothing to a chat template, and may be empty or not."""
_SYSTEM = "write it as the first message, of the role 'system'"
NOT_READ = {
    "system": _SYSTEM, "system_prompt": _SYSTEM, "system_message": _SYSTEM,
    "functions": "write each as {'type': 'function', 'function': ...} in a list under 'tools'",
    "chat_template_kwargs": "variables of the template are those of all records, in the config's section renderer",
}  # fmt: skip
"""Keys beside a conversation by which other programs change what the model is shown, and what to write here."""
BESIDE_INSTRUCTIONS = ("input", "context")
"""Keys of Alpaca's and Dolly's form that hold a part of the question."""
EMPTY_TEXTS = ("", "null", "None", "[]", "{}")
"""Texts that stand for nothing in a column of texts."""
_ROLE_WORDS = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant"}
_ROLE_WORDS |= {"developer": "system", "function": "tool", "ipython": "tool", "observation": "tool"}


def parse_messages(value: Any, key: str, where: str, role_of_text: str | None = None) -> list[dict[str, Any]]:
    """The messages of a conversation in a record; one message may stand alone, and with role_of_text its text.

    Raises: DataError that names the invalid message.
    """
    if isinstance(value, str) and role_of_text is not None:
        refuse_surrogates(value, f"{where}: {key}")
        return [{"role": role_of_text, "content": value}]
    if isinstance(value, dict):
        return [parse_message(value, f"{where}: {key}")]
    if not isinstance(value, list) or not value:
        text = "" if role_of_text is None else "a text or "
        raise DataError(f"{where}: `{key}` must be {text}a list of messages, got {short_repr(value)}.")
    return [parse_message(message, f"{where}: {key}[{i}]") for i, message in enumerate(value)]


def refuse_unread(
    record: Mapping[str, Any], shown: Sequence[Mapping[str, Any]] | str, read: Sequence[str | None], where: str
) -> None:
    """Check that a record has no text for the model beside what it is shown; read: the keys that the config names.

    shown: the messages, or the text of a prompt without a template.

    Raises: DataError with the key and what to write.
    """
    has_system = not isinstance(shown, str) and bool(shown) and shown[0].get("role") == "system"
    ways = {key: way for key, way in NOT_READ.items() if not (has_system and way is _SYSTEM)}
    if "instruction" in read:
        ways |= dict.fromkeys(BESIDE_INSTRUCTIONS, "it is a part of the question: join the two")
    for key, way in ways.items():
        value = record.get(key)
        if key in read or not _says_something(value):
            continue
        if isinstance(shown, str):
            if isinstance(value, str) and value.strip() in shown:
                continue
            way = "write it into the text of the prompt"
        raise DataError(
            f"{where}: {key!r} beside the conversation would not reach the model: {way}; or remove it, in the file "
            "or by the function that `convert` names."
        )


def _says_something(value: Any) -> bool:
    """Whether a column holds more than what stands for nothing: nulls, blanks, empty lists and tables, also as JSON."""
    if isinstance(value, str):
        return value.strip() not in EMPTY_TEXTS
    if isinstance(value, Mapping):
        return any(map(_says_something, value.values()))
    return value is not None and value != []


def parse_message(message: Any, where: str) -> dict[str, Any]:
    """One message of a record, without the empty fields that parquet columns add, and with our names of keys.

    Raises: DataError if it is not valid.
    """
    if not isinstance(message, dict):
        raise DataError(f"{where} must be an object with role and content, got {short_repr(message)}.")
    message = {key: value for key, value in message.items() if value is not None and key not in NO_EFFECT}
    _check_role(message, where, DataError)
    message = _with_known_names(message, where, DataError)
    if unknown := [key for key in message if key not in KNOWN_KEYS]:
        import difflib

        near = difflib.get_close_matches(str(unknown[0]), KNOWN_KEYS, n=1)
        meant = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(KNOWN_KEYS)};"
        raise DataError(
            f"{where} has the key {unknown[0]!r}, which no chat template is given; {meant} rename or remove it, in the "
            "file or by the function that `convert` names."
        )
    message.setdefault("content", "" if message.get("tool_calls") or message.get("reasoning_content") else None)
    _check_content(message, where, DataError)
    if "tool_calls" in message:
        message["tool_calls"] = _checked_calls(message["tool_calls"], where, DataError)
    refuse_surrogates(message, where)
    return message


def checked_messages(messages: Sequence[Any], where: str, *, first: int = 0) -> list[dict[str, Any]]:
    """Messages that an environment gave; `where` names the environment and the call, `first` the first one's number.

    Keys that are not ours stay: the model's template may read them.

    Raises: EnvError that names the message and what to give in its place.
    """
    return [
        dict(message) if is_plain(message) else _checked(message, f"{where}[{index}]")
        for index, message in enumerate(messages, first)
    ]


def is_plain(message: Any) -> bool:
    """Whether a message has a role and a text, and nothing else: most do, and there is nothing to check."""
    if type(message) is not dict or len(message) != 2 or message.get("role") not in ROLES:
        return False
    return isinstance(content := message.get("content"), str) and is_unicode(content)


def _checked(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        example = '{"role": "user", "content": "..."}'
        raise EnvError(f"{where} is {short_repr(message)}, not a message; give an object such as {example}.")
    _check_role(message, where, EnvError)
    known = _with_known_names(dict(message), where, EnvError)
    _check_content(known, where, EnvError)
    if known.get("tool_calls") is not None:
        known["tool_calls"] = _checked_calls(known["tool_calls"], where, EnvError)
    for key in ("content", "tool_calls", "reasoning_content", "name", "tool_call_id"):
        if isinstance(known.get(key), str) or (key == "tool_calls" and known.get(key)):
            known[key] = checked_json(known[key], f"{where}.{key}")
    if isinstance(known.get("content"), list):
        known["content"] = [
            part | {"text": checked_json(part["text"], where)} if "text" in part else part for part in known["content"]
        ]
    return known


def _check_role(message: Mapping[str, Any], where: str, kind: type[StrettoError]) -> None:
    role = message.get("role")
    if isinstance(role, str) and role in ROLES:
        return
    if role is None and message:
        names = {"from": "role", "value": "content"} if {"from", "value"} <= message.keys() else {}
        way = ": " + ", ".join(f"rename {old} to {new}" for old, new in names.items()) if names else ""
        raise kind(
            f"{where} has no role; it has {', '.join(map(str, message))}{way or f'; give a role of {_listed_roles()}'}."
        )
    import difflib

    word = role.lower() if isinstance(role, str) else ""
    near = [_ROLE_WORDS[word]] if word in _ROLE_WORDS else difflib.get_close_matches(word, ROLES, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    raise kind(f"{where}.role must be one of {_listed_roles()}, got {short_repr(role)}{meant}")


def _listed_roles() -> str:
    return ", ".join(ROLES)


def _with_known_names(message: dict[str, Any], where: str, kind: type[StrettoError]) -> dict[str, Any]:
    """The message with `reasoning_content` and `step_loss_mask` in the place of their other spellings."""
    if message.get("function_call") is not None:
        raise kind(
            f"{where}.function_call is OpenAI's old form of a call; write "
            '"tool_calls": [{"type": "function", "function": {"name": ..., "arguments": {...}}}].'
        )
    for ours, others in (("reasoning_content", THOUGHT_KEYS), ("step_loss_mask", MASK_KEYS)):
        for other in others:
            if message.get(other) is None:
                continue
            value = message.pop(other)
            if ours == "step_loss_mask" and value in (0, 1):
                value = int(value)
            if message.setdefault(ours, value) != value:
                raise kind(f"{where} has {ours!r} and {other!r}, which differ; leave one of them.")
    if message.get("step_loss_mask", 1) not in (0, 1):
        rule = "must be 1, or 0 for a message that is not trained"
        raise kind(f"{where}.step_loss_mask {rule}, got {short_repr(message['step_loss_mask'])}.")
    thought = message.get("reasoning_content")
    if thought is not None and not isinstance(thought, str):
        raise kind(f"{where}.reasoning_content must be text, got {short_repr(thought)}.")
    return message


def _check_content(message: Mapping[str, Any], where: str, kind: type[StrettoError]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None and kind is EnvError and message["role"] == "assistant":
        return  # a reply that only calls tools
    if "content" not in message and message.keys() - {"role", "name"}:
        raise kind(f"{where} has no content; it has {', '.join(sorted(message))}: name the one with the text content.")
    if not isinstance(content, list):
        way = "write it as text, such as JSON" if isinstance(content, Mapping) else "write str(...)"
        way = 'write "" for an empty one' if content is None else way
        raise kind(f"{where}.content must be text, got {short_repr(content)}; {way}.")
    for index, part in enumerate(content):
        place = f"{where}.content[{index}]"
        if not isinstance(part, Mapping) or not {"type", "text", "image", "image_url"} & part.keys():
            example = '{"type": "text", "text": "..."}'
            raise kind(f"{place} must be an object with a type, such as {example}, got {short_repr(part)}.")
        form = part.get("type", "text" if "text" in part else "image")
        if form not in PARTS:
            raise kind(f"{place}.type must be one of {', '.join(PARTS)}, got {short_repr(form)}; no template shows it.")
        if form == "text" and not isinstance(part.get("text"), str):
            raise kind(f"{place}.text must be text, got {short_repr(part.get('text'))}; write str(...).")


def _checked_calls(calls: Any, where: str, kind: type[StrettoError]) -> list[dict[str, Any]]:
    if isinstance(calls, str) or not isinstance(calls, Sequence):
        raise kind(f"{where}.tool_calls must be a list of calls, got {short_repr(calls)}.")
    checked = []
    for index, call in enumerate(calls):
        place = f"{where}.tool_calls[{index}]"
        if not isinstance(call, Mapping):
            example = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
            raise kind(f"{place} must be an object such as {example}, got {short_repr(call)}.")
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise kind(f"{place} needs a function with a name, got {short_repr(call)}.")
        arguments = function.get("arguments")
        if not isinstance(arguments, str | Mapping | None):
            rule = "must be an object, or JSON as text"
            raise kind(f"{place}: the arguments of {function['name']} {rule}, got {short_repr(arguments)}.")
        if kind is DataError:
            given = _given_arguments(arguments, f"{place}: the arguments of {function['name']}")
            function = {**function, "arguments": given}
        if "function" not in call:  # as some data sets write them
            call = {key: call[key] for key in ("id", "type") if key in call}
            function = {key: value for key, value in function.items() if key not in call}
        checked.append({**call, "function": function})
    return checked


def _given_arguments(arguments: Any, where: str) -> Any:
    """The arguments of a call in a record; none are an empty object.

    Raises: DataError for a text that is no JSON object, or a number that is not finite: no parser of calls reads it.
    """
    is_text = isinstance(arguments, str) and arguments.strip()
    given = from_json(arguments, where) if is_text else arguments or {}
    if not isinstance(given, Mapping):
        raise DataError(f"{where} must be an object, or JSON as text, got {short_repr(arguments)}.")
    refuse_surrogates(given, where)
    held = checked_json(given, where, DataError)
    return arguments if is_text else held


def check_column(record: Mapping[str, Any], key: str, setting: str, where: str) -> None:
    """Check that a record has a column; setting: the key that names the column, "" if none does.

    Raises: DataError if it is not there, or null.
    """
    if record.get(key) is not None:
        return
    named = f" ({setting})" if setting else ""
    if key in record:
        raise DataError(f"{where}: {key!r}{named} is null; give it a value, or leave the row out.")
    raise DataError(f"{where}: no {key!r}{named}; the row has {columns_of(record)}.")


def columns_of(record: Mapping[str, Any]) -> str:
    """The names of a record's columns, for a message."""
    return ", ".join(sorted(map(str, record))) or "nothing"


def parse_tools(value: Any, key: str, where: str) -> list[dict[str, Any]] | None:
    """The tools of a record, given as a list or as JSON text; None if there are none.

    Raises: DataError if they are not valid.
    """
    if isinstance(value, str):
        value = from_json(value, f"{where}: {key}") if value.strip() not in EMPTY_TEXTS else None
    if value is not None and not isinstance(value, list):
        raise DataError(f"{where}: {key!r} must be a list of tools, got {type(value).__name__}; put it in [ ].")
    for i, tool in enumerate(value or ()):
        if not isinstance(tool, dict):
            raise DataError(f"{where}: {key}[{i}] must be an object that describes a tool, got {short_repr(tool)}.")
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            example = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
            raise DataError(f"{where}: {key}[{i}] names no function, got {short_repr(tool)}; write {example}.")
    refuse_surrogates(value, f"{where}: {key}")
    return value or None


def short_repr(value: Any) -> str:
    """The repr of a value for an error message, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
