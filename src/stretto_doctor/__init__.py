"""`stretto doctor`: whether this machine and the hosts of a deployment can run a config; `stacks`: what a run does now.

`diagnosis.py` is part of a run: it warns of learning that goes wrong.

No torch is imported.
"""

SUMMARIES = {
    "doctor": "what of this machine, and for a config, will go wrong: stretto doctor [CONFIG]",
    "stacks": "what every process of a run is doing now, also when it hangs: stretto stacks RUN",
}
MEANT = {"check": "doctor"}
