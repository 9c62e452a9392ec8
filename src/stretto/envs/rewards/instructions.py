"""Instructions that code can check: the 25 of IFEval, by their names in its records.

A record's metadata has `instruction_id_list` and `kwargs`, one table of arguments per instruction.
Source: IFEval, arXiv:2311.07911, table 1. Differs: sentences are found by their final punctuation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from stretto.base.errors import EnvError

Check = Callable[..., bool]
"""Called with the reply and the arguments of the instruction: is it followed?"""
RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "less than": lambda count, limit: count < limit,
    "at least": lambda count, limit: count >= limit,
    "at most": lambda count, limit: count <= limit,
    "more than": lambda count, limit: count > limit,
    "exactly": lambda count, limit: count == limit,
}
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def follows_all(reply: str, metadata: Mapping[str, Any], *, prompt: Any = "") -> bool:
    """Does a reply follow every instruction of its record? An empty reply follows none.

    Raises: EnvError for a record without instructions, or with one that is not known or lacks an argument.
    """
    names = metadata.get("instruction_id_list")
    if not names:
        raise EnvError("rm_type = 'ifbench': the record's metadata has no instruction_id_list")
    arguments = metadata.get("kwargs") or [{}] * len(names)
    if len(arguments) != len(names):
        raise EnvError(
            f"rm_type = 'ifbench': {len(names)} instructions with {len(arguments)} kwargs; give one for each"
        )
    prompt = metadata.get("prompt_text") or prompt
    return bool(reply.strip()) and all(
        follows(reply, name, {"prompt": prompt} | dict(given or {})) for name, given in zip(names, arguments)
    )


def follows(reply: str, name: str, arguments: Mapping[str, Any]) -> bool:
    """Does a reply follow one instruction?

    Raises: EnvError as `follows_all`.
    """
    check = CHECKS.get(name)
    if check is None:
        raise EnvError(f"rm_type = 'ifbench': instruction {name!r} is not known; known are {', '.join(sorted(CHECKS))}")
    given = {key: value for key, value in arguments.items() if value is not None}
    try:
        return check(reply, **{key: given[key] for key in _parameters(check) if key in given})
    except (TypeError, KeyError) as cause:
        raise EnvError(f"rm_type = 'ifbench': instruction {name!r} with {dict(arguments)}: {cause}") from None


def _parameters(check: Check) -> tuple[str, ...]:
    code = check.__code__
    return code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _sentences(text: str) -> list[str]:
    parts = re.split(r"(?<=[.!?])[\"')\]]*\s+", re.sub(r"\b(?:Mr|Mrs|Ms|Dr|St|etc|e\.g|i\.e)\.", "x", text.strip()))
    return [part for part in parts if re.search(r"\w", part)]


def _find(word: str, text: str) -> int:
    return len(re.findall(re.escape(word), text, re.IGNORECASE))


def _existence(reply: str, keywords: list[str]) -> bool:
    return all(_find(word, reply) for word in keywords)


def _frequency(reply: str, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return RELATIONS[relation](_find(keyword.strip(), reply), frequency)


def _forbidden(reply: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", reply, re.IGNORECASE) for word in forbidden_words)


def _letters(reply: str, letter: str, let_frequency: int, let_relation: str = "at least") -> bool:
    return RELATIONS[let_relation](reply.lower().count(letter.lower()), let_frequency)


def _language(reply: str, language: str) -> bool:
    try:
        import langdetect
    except ImportError:
        raise EnvError("language:response_language needs the package langdetect; pip install langdetect") from None
    try:
        return langdetect.detect(reply) == language
    except langdetect.LangDetectException:  # no letters in it
        return True


def _num_sentences(reply: str, num_sentences: int, relation: str = "at least") -> bool:
    return RELATIONS[relation](len(_sentences(reply)), num_sentences)


def _num_paragraphs(reply: str, num_paragraphs: int) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", reply)
    inner = parts[1:-1] if len(parts) > 2 else []
    if not all(part.strip() for part in inner):
        return False
    return sum(bool(part.strip()) for part in parts) == num_paragraphs


def _num_words(reply: str, num_words: int, relation: str = "at least") -> bool:
    return RELATIONS[relation](len(_words(reply)), num_words)


def _first_word(reply: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = [part.strip() for part in re.split(r"\n\n", reply) if part.strip()]
    if len(parts) != num_paragraphs or nth_paragraph > len(parts):
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("\"'")
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def _placeholders(reply: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", reply)) >= num_placeholders


def _postscript(reply: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip().lower()
    spaced = {"p.p.s": r"p\.\s?p\.\s?s", "p.s.": r"p\.\s?s\."}.get(marker, re.escape(marker))
    return re.search(rf"\s*{spaced}.*$", reply.lower(), re.MULTILINE) is not None


def _bullets(reply: str, num_bullets: int) -> bool:
    return len(re.findall(r"^\s*(?:\*[^*\n].*|-[^-\n].*)$", reply, re.MULTILINE)) == num_bullets


def _highlights(reply: str, num_highlights: int) -> bool:
    bold = re.findall(r"\*\*([^\n*]+)\*\*", reply)
    italic = re.findall(r"(?<!\*)\*([^\n*]+)\*(?!\*)", reply)
    return sum(bool(each.strip()) for each in (*bold, *italic)) >= num_highlights


def _sections(reply: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", reply)) >= num_sections


def _json(reply: str) -> bool:
    text = re.sub(r"^```(?:json)?|```$", "", reply.strip(), flags=re.IGNORECASE)
    try:
        json.loads(text.strip())
    except ValueError:
        return False
    return True


def _title(reply: str) -> bool:
    return any(each.strip() for each in re.findall(r"<<([^\n]+?)>>", reply))


def _two_responses(reply: str) -> bool:
    parts = reply.split("******")
    inner = [part.strip() for index, part in enumerate(parts) if part.strip() or 0 < index < len(parts) - 1]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def _repeats_prompt(reply: str, prompt: str = "", prompt_to_repeat: str | None = None) -> bool:
    text = prompt if prompt_to_repeat is None else prompt_to_repeat
    return reply.strip().lower().startswith(str(text).strip().lower())


def _ends(reply: str, end_phrase: str) -> bool:
    return reply.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _capital_words(reply: str, capital_frequency: int, capital_relation: str = "at least") -> bool:
    capitals = [word for word in re.findall(r"[\w'-]+", reply) if word.isupper()]
    return RELATIONS[capital_relation](len(capitals), capital_frequency)


CHECKS: dict[str, Check] = {
    "keywords:existence": _existence,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letters,
    "language:response_language": _language,
    "length_constraints:number_sentences": _num_sentences,
    "length_constraints:number_paragraphs": _num_paragraphs,
    "length_constraints:number_words": _num_words,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda reply: any(each in reply for each in CONSTRAINED),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeats_prompt,
    "startend:end_checker": _ends,
    "startend:quotation": lambda reply: len(reply.strip()) > 1 and reply.strip()[0] == reply.strip()[-1] == '"',
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda reply: reply.isupper(),
    "change_case:english_lowercase": lambda reply: reply.islower(),
    "punctuation:no_comma": lambda reply: "," not in reply,
}
