"""`--bench`: a few steps of `rl`, `sft` or `inference` on made-up data of a stated shape, and what they took."""
