"""Supervised fine-tuning, `sft`: a verb of its own, which trains on rows with the trainer's learner."""

from stretto.addons import ConfigVerb

SUMMARIES = {"sft": "supervised fine-tuning", "evals": "the process beside an sft run that evaluates its versions"}
MEANT = {"finetune": "sft", "fine-tune": "sft"}
SFT = ConfigVerb(
    "stretto.config.root:SFTConfig",
    "stretto_sft.command:main",
    "stretto_sft.dry_run:sft_screen",
    is_process=False,
    computes=True,
    trains=True,
    common="""
        max_steps max_epochs batch_size seq_len seed output_dir run.name resume clean dry_run print_config
        model.name model.lora.rank model.dtype data.type data.name data.id val.interval optim.lr
        scheduler.type scheduler.warmup_steps
        ckpt.interval num_threads deployment.num_train_gpus monitors.wandb
    """,
)
EVALS = ConfigVerb("stretto.config.root:EvalsConfig", "stretto_sft.follow:main", "stretto.dry_run:evaluate")
