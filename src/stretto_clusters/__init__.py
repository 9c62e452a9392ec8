"""Launchers of clusters: Slurm, Ray, Kubernetes; engines of other machines that join a run."""

SUMMARIES = {
    "engines": "engines that join and leave a run while it goes on: stretto engines add RUN URL",
    "pod": "the part of an rl run that belongs to this Kubernetes pod",
}
