"""prime-rl's spellings: what its keys are here, and docs/from-prime-rl.md."""
