"""The fixture of tests that hold with kernels and with torch's operations."""

from __future__ import annotations

from engine_runs import both_engines  # noqa: F401
