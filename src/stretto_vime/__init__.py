"""vime's command line: its flags and files, and the config that they mean."""

SUMMARIES = {"vime": "the same as rl, by the flags of vime: stretto vime --hf-checkpoint DIR ..."}
