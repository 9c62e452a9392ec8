"""What a run will need and how long it will take, before it is started: memory, time, proposals. No torch, no GPU."""

SUMMARIES = {"plan": "foresee memory and time of a run of rl or sft, without a GPU: stretto plan rl.toml"}
MEANT = {"estimate": "plan"}
