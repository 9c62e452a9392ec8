"""Launchers of clusters: Slurm, Ray, Kubernetes."""
