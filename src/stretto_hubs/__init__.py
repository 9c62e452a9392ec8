"""Environments that others publish, by name: OpenEnv, NeMo Gym, Harbor, and the tasksets of verifiers."""
