"""The verbs of a training service: all of it, and its parts alone."""

from __future__ import annotations

from stretto.addons import ConfigVerb

SCREEN = "stretto_service.launch:screen"
SERVE = ConfigVerb("ServeConfig", "stretto_service.launch:main", SCREEN, is_process=False)
HUB = ConfigVerb("ServeConfig", "stretto_service.main:main", SCREEN)
TENANTS = ConfigVerb("ServeConfig", "stretto_service.tenants.main:main", SCREEN, computes=True)
