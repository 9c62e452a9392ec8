"""A training service: one trainer for many runs, behind an HTTP API; `stretto serve`."""

SUMMARIES = {
    "serve": "a training service: one trainer for many runs, behind an HTTP API",
    "hub": "the hub of a training service alone",
    "tenants": "a rank of a training service's trainer alone",
}
