"""Tests of the core that also use an add-on: without it they are skipped."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from stretto import addons


def is_here(name: str) -> bool:
    """Whether an add-on, such as `view`, is installed."""
    return find_spec(f"stretto_{name}") is not None


def needs(*names: str) -> pytest.MarkDecorator:
    """A mark for tests that use these add-ons."""
    missing = [f"stretto_{name}" for name in names if not is_here(name)]
    return pytest.mark.skipif(bool(missing), reason=f"without {', '.join(missing)}")


def skip_without_verb(verb: str) -> None:
    """Skip a test of a verb whose add-on is not installed."""
    for group in ("stretto.verbs", "stretto.config_verbs"):
        if verb in addons.registered(group) and verb not in addons.offers(group):
            pytest.skip(f"without {addons.package_of(addons.registered(group)[verb])}")
