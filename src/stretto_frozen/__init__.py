"""Frozen models beside the policy: judges and reward models that environments ask, teachers, and their engines."""
