"""Which backend renders a model's messages: its own template, a family's renderer, or a template that is given.

The model's own template is what it was trained with, so it decides. A hand-written renderer of its family
(family_backend.py) knows more of replies, and is taken where it gives the same tokens on fixed conversations.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

from stretto.base.errors import ConfigError, StrettoError
from stretto.chat.backend import Backend
from stretto.chat.conversations import FIXED
from stretto.chat.family_backend import FamilyBackend, UnfitVocabularyError, build_family
from stretto.chat.template_backend import TemplateBackend
from stretto.chat.templates import (
    CHATML,
    DEFAULT,
    THINKING_SWITCHES,
    ChatTemplate,
    TemplateFiles,
    named_template,
    template_of,
    variables_of,
)
from stretto.chat.tokenizer import TURN_END, Tokenizer, is_letters_tokenizer
from stretto.config.sections.model import RendererSection
from stretto.families.own.dense import QWEN3
from stretto.families.table import FAMILIES, traits_of

logger = logging.getLogger(__name__)


class Choice(NamedTuple):
    """A backend, and one line that says which and why."""

    backend: Backend
    description: str


class Difference(NamedTuple):
    """A conversation to which a family's renderer and the template give other tokens."""

    conversation: str
    by_family: str
    by_template: str


def choose_backend(
    tokenizer: Tokenizer, section: RendererSection, model_type: str | None, image_token_id: int | None
) -> Choice:
    """The backend that `section` asks for.

    Raises: ConfigError if a family or a template does not fit the tokenizer.
    """
    own = tokenizer.templates
    if section.template is not None:
        return _by_template(
            tokenizer, given_template(tokenizer, section.template, section.place), section, image_token_id
        )
    if section.name == "text":
        return _as_text(tokenizer, section)
    if section.name == "template":
        if not own:
            raise ConfigError(
                f'[{section.place}] name = "template": {tokenizer.name_or_path} has no chat template; give one as '
                f'{section.place}.template = "FILE.jinja" or "chatml", or use name = "text"'
            )
        return _by_template(tokenizer, own, section, image_token_id)
    if section.name != "auto":
        return _by_hand(tokenizer, section)
    return _auto(tokenizer, section, model_type, image_token_id)


def given_template(tokenizer: Tokenizer, name: str, place: str = RendererSection.place) -> TemplateFiles:
    """The template that `renderer.template` names.

    "chatml" has the end token of a tokenizer that lacks <|im_end|>, and begins with its BOS token if it writes one: an
    end in several tokens would be a part of the reply.

    place: the path of that section, for messages.

    Raises: ConfigError if there is none.
    """
    files = template_of(name, tokenizer.templates, place)
    if name != CHATML or name in tokenizer.templates.sources or tokenizer.turn_end in ("", TURN_END):
        return files
    source = tokenizer.leading_text + files.sources[DEFAULT].replace(TURN_END, tokenizer.turn_end)
    return TemplateFiles({DEFAULT: source}, f"{files.where}, with {tokenizer.turn_end!r} as its end")


def _auto(tokenizer: Tokenizer, section: RendererSection, model_type: str | None, image_token_id: int | None) -> Choice:
    own = tokenizer.templates
    if model_type in FAMILIES and is_letters_tokenizer(tokenizer):
        family = QWEN3.traits.renderer
        assert family is not None
        return Choice(build_family(tokenizer, family, section), f"the family {family}, for the letters tokenizer")
    family = traits_of(model_type or "").renderer
    backend = None
    if family is not None:
        try:
            backend = build_family(tokenizer, family, section)
        except UnfitVocabularyError as error:
            logger.debug("the family %s does not fit: %s", family, error)
        except ConfigError:  # of a setting that the family does not have; the template may
            if not own:
                raise
    if not own:
        if backend is not None:
            return Choice(backend, f"the family {family}; the model has no chat template of its own")
        return _as_text(tokenizer, section, is_fallback=True)
    if backend is None:
        return _by_template(tokenizer, own, section, image_token_id)
    difference = next(differences(tokenizer, backend, section), None)
    if difference is None:
        return Choice(backend, f"the family {family}, which gives the tokens of the model's own template")
    note = f"the family {family} writes the conversation '{difference.conversation}' otherwise"
    if only := sorted(settings_for(own, section).keys() - _variables(own)):
        return Choice(
            backend, f"the family {family}, for its setting {only[0]}; the model's template has none, and {note}"
        )
    choice = _by_template(tokenizer, own, section, image_token_id)
    return choice._replace(description=f"{choice.description}; {note}")


def _by_hand(tokenizer: Tokenizer, section: RendererSection) -> Choice:
    """A family that the config names; if the model has another template, that is a warning."""
    backend = build_family(tokenizer, section.name, section)
    for difference in differences(tokenizer, backend, section):
        logger.warning(
            "[%s] name = %r writes the conversation '%s' otherwise than the chat template in the model's files; "
            'leave name out, or set it to "auto", to use that.\n  %s: %r\n  the template: %r',
            section.place,
            section.name,
            difference.conversation,
            section.name,
            difference.by_family,
            difference.by_template,
        )
        return Choice(backend, f"the family {section.name}, which differs from the model's own template")
    return Choice(backend, f"the family {section.name}")


def _by_template(
    tokenizer: Tokenizer, files: TemplateFiles, section: RendererSection, image_token_id: int | None
) -> Choice:
    settings = settings_for(files, section)
    template = ChatTemplate(files, tokenizer.template_tokens, settings, section.place)
    try:
        backend = TemplateBackend(tokenizer, template, tool_parser=section.tool_parser, image_token_id=image_token_id)
    except StrettoError as error:
        raise ConfigError(f"{tokenizer.name_or_path}: {error}") from error
    calls = backend.tool_format or ("not read" if backend.traits.shows_calls else "none")
    ends = ", ".join(repr(tokenizer.token_text(token)) for token in backend.stop_ids) or "none"
    if backend.spelled_end:
        logger.warning(
            "[%s] the chat template (%s) ends a reply with %r, which is no token of this tokenizer: it is sampled and "
            "trained as text, and only %s ends a reply. Give a template that ends replies with such a token as "
            '%s.template, or let the text end rollouts by `stop` of their sampling',
            section.place, files.where, backend.spelled_end, ends, section.place,
        )  # fmt: skip
    what = "the model's own template" if section.template is None else "the template that the config names"
    return Choice(backend, f"{what} ({files.where}); tool calls: {calls}; ends: {ends}")


def _as_text(tokenizer: Tokenizer, section: RendererSection, *, is_fallback: bool = False) -> Choice:
    """Prompts as they stand, for base models."""
    files = named_template("text")
    tokens = tokenizer.template_tokens | {"bos_token": tokenizer.leading_text}
    template = ChatTemplate(files, tokens, place=section.place)
    name = "the renderer of plain text"
    backend = TemplateBackend(tokenizer, template, tool_parser=section.tool_parser, name=name, is_bare=True)
    description = "prompts as they stand, without a chat format"
    if is_fallback:
        way = f"if it is a chat model, give its template as {section.place}.template"
        description += f"; the model has no chat template: {way}"
        logger.warning("[%s] %s: %s", section.place, tokenizer.name_or_path, description)
    return Choice(backend, description)


def settings_for(files: TemplateFiles, section: RendererSection) -> dict[str, object]:
    """The variables of a template that a config sets.

    `enable_thinking` is called `thinking` by some; a template that has neither does not get it.
    """
    known = _variables(files)
    settings: dict[str, object] = {}
    if (switch := next((name for name in THINKING_SWITCHES if name in known), None)) is not None:
        settings[switch] = section.enable_thinking
    if section.clear_thinking is not None:
        settings["clear_thinking"] = section.clear_thinking
    return settings | section.settings


def differences(tokenizer: Tokenizer, backend: FamilyBackend, section: RendererSection) -> Iterator[Difference]:
    """The fixed conversations to which a family and the model's own template give other tokens.

    A conversation that the template refuses is not compared.
    """
    files = tokenizer.templates
    if not files:
        return
    try:
        template = ChatTemplate(files, tokenizer.template_tokens, _shared(settings_for(files, section), files))
        reference = TemplateBackend(tokenizer, template, tool_parser="none")
    except StrettoError as error:
        logger.debug("the template in the model's files cannot be compared: %s", error)
        return
    for name, (messages, tools) in FIXED.items():
        try:
            expected = reference.render(messages, tools, add_generation_prompt=True).token_ids
        except StrettoError:
            continue
        try:
            found = backend.render(messages, tools, add_generation_prompt=True).token_ids
        except Exception as error:  # a renderer of the library may refuse what the template takes
            yield Difference(name, f"refused: {error}", tokenizer.decode(expected))
            continue
        if list(found) != list(expected):
            yield Difference(name, tokenizer.decode(found), tokenizer.decode(expected))


def _shared(settings: dict[str, object], files: TemplateFiles) -> dict[str, object]:
    """Settings without those that only the family has."""
    known = _variables(files)
    return {name: value for name, value in settings.items() if name in known}


def _variables(files: TemplateFiles) -> frozenset[str]:
    """What the templates read besides messages, tools and special tokens."""
    return frozenset().union(*(variables_of(source) for source in files.sources.values()))
