"""The verbs of a training service: all of it, and its parts alone."""

from __future__ import annotations

from stretto.addons import ConfigVerb

ROOT = "stretto_service.config:ServeConfig"
SCREEN = "stretto_service.launch:screen"
SERVE = ConfigVerb(
    ROOT,
    "stretto_service.launch:main",
    SCREEN,
    is_process=False,
    common="""
        model.name seq_len output_dir run.name clean dry_run print_config service.host service.port
        service.max_concurrent_runs service.max_lora_rank service.max_tokens_per_turn service.idle_timeout_s
        service.save_steps trainer.num_ranks inference.engine inference.deployment.num_replicas trainer_gpu_ids
        inference_gpu_ids
    """,
)
HUB = ConfigVerb(ROOT, "stretto_service.main:main", SCREEN)
TENANTS = ConfigVerb(ROOT, "stretto_service.tenants.main:main", SCREEN, computes=True)
