"""What a run will need and how long it will take, before it is started: memory, time, proposals. No torch, no GPU."""
