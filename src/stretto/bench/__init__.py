"""`--bench`: a few steps of `rl`, `sft` or `inference` on made-up data of a given shape, measured."""
