"""The orchestrator under a virtual clock: the clock, the other ends of its wires, and the run of some steps."""
