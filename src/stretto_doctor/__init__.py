"""`stretto doctor`: whether this machine and the hosts of a deployment can run a config; imports no torch."""

SUMMARIES = {"doctor": "what of this machine, and for a config, will go wrong: stretto doctor [CONFIG]"}
MEANT = {"check": "doctor"}
