"""Launchers of clusters: Slurm, Ray, Kubernetes."""

SUMMARIES = {"pod": "the part of an rl run that belongs to this Kubernetes pod"}
