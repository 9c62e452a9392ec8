"""Answers in replies: finds them, normalises them and compares them with the label."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.base.errors import EnvError
from stretto.envs.rewards.math_reward import boxed, quick_verdict

END_OF_THINKING = ("</think>", "###Response")
DAPO_CHARS = 300
"""`dapo` looks for the answer in this many last characters of a reply."""
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_UNITS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "points", "feet", "digits",
    "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples",
)  # fmt: skip
_YES_NO = {"yes", "no", "noanswer"}
"""Answers that get no partial credit."""
_LETTER_PATTERNS = (
    r"(?:answer|option|choice)\s*(?:is|:|=)?\s*\(?\*{0,2}([A-Z])\*{0,2}\)?(?![A-Za-z])",
    r"\\text\{\(?([A-Z])\)?\}",
    r"(?:^|\s)\(?([A-Z])\)?[.):]?\s*$",
)


def solution_after_thinking(reply: str) -> str | None:
    """The text after the end of the model's thinking; None if the thinking did not end."""
    for mark in END_OF_THINKING:
        if mark in reply:
            return reply.rpartition(mark)[2]
    return None


# -- dapo --


def dapo(reply: str, label: str) -> dict[str, Any]:
    """Score 1 if the last `Answer:` line equals the label in normal form, else -1.

    Source: DAPO, arXiv:2503.14476, section 4.1.
    """
    found = _ANSWER_LINE.findall(reply[-DAPO_CHARS:])
    answer = normal_answer(found[-1]) if found else "[INVALID]"
    gold = normal_answer(boxed(label) or label)
    is_right = quick_verdict(answer, gold) is True
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": answer}


def normal_answer(text: str) -> str:
    """A final answer without box, text, units, spaces and thousands separators."""
    text = text.rpartition("=")[2]
    inner = boxed(text)
    text = text if inner is None else inner
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"\b(?:an?|the)\b ", "", text)
    for mark in ("\\%", "%", "\\$", "$", "\\left", "\\right", "\\!", "\\,", "\\;", "^\\circ", "\\ "):
        text = text.replace(mark, "")
    text = re.sub(rf"(?<=\d)\s*\b(?:{'|'.join(_UNITS)})\b", "", text)
    text = re.sub(r"\s+", "", text).rstrip(".")
    return text.replace(",", "") if text.replace(",", "").isdigit() else text


# -- f1 --


def f1(reply: str, label: str) -> float:
    """Harmonic mean of precision and recall over the words of both, as in SQuAD (arXiv:1606.05250, section 6.1)."""
    ours, gold = _words(reply), _words(label)
    closed = {" ".join(ours), " ".join(gold)} & _YES_NO
    if closed and ours != gold:
        return 0.0
    common = sum((Counter(ours) & Counter(gold)).values())
    return 2 * common / (len(ours) + len(gold)) if common else 0.0


def _words(text: str) -> list[str]:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in plain.split() if word not in ("a", "an", "the")]


# -- gpqa --


def gpqa(reply: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """1 if the reply chooses the right letter, or ends with the text of the right choice.

    metadata: `choices` (a list, or a table by letter), `correct_letter`, `valid_letters`. Without `correct_letter` the
    label is the letter or the text of the choice.

    Raises: EnvError if nothing says what is right.
    """
    choices = _choices(metadata.get("choices"))
    letters = [str(each).upper() for each in metadata.get("valid_letters") or choices or "ABCDEFGH"]
    right = _right_letter(label, metadata, choices, letters)
    answer = solution_after_thinking(reply)
    answer = reply if answer is None else answer
    chosen = chosen_letter(answer, letters)
    if right is not None and chosen is not None:
        return float(chosen == right)
    gold = choices.get(right or "", label)
    if gold is None:
        raise EnvError("rm_type = 'gpqa': neither metadata.correct_letter nor the label says which choice is right")
    last = boxed(answer) or answer.strip().rpartition("\n")[2]
    return float(bool(_words(str(gold))) and _words(str(gold)) == _words(last))


def chosen_letter(reply: str, letters: Sequence[str]) -> str | None:
    """The letter that a reply chooses: in its last box, after the word answer, or at its end."""
    inner = boxed(reply)
    if inner is not None:
        alone = re.sub(r"\\text\{([^{}]*)\}", r"\1", inner).strip(" ().$").upper()
        if alone in letters:
            return alone
    for pattern in _LETTER_PATTERNS:
        flags = re.IGNORECASE if "answer" in pattern else 0
        found = [each.upper() for each in re.findall(pattern, reply.strip(), flags) if each.upper() in letters]
        if found:
            return found[-1]
    return None


def _choices(given: Any) -> dict[str, str]:
    if isinstance(given, Mapping):
        return {str(letter).upper(): str(text) for letter, text in given.items()}
    return dict(zip(string.ascii_uppercase, map(str, given or ())))


def _right_letter(
    label: Any, metadata: Mapping[str, Any], choices: Mapping[str, str], letters: Sequence[str]
) -> str | None:
    given = metadata.get("correct_letter")
    if given is None and isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(letters):
        return letters[label]
    text = str(label if given is None else given).strip()
    if text.upper() in letters:
        return text.upper()
    return next((letter for letter, choice in choices.items() if _words(choice) == _words(text)), None)
