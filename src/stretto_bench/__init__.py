"""`--bench`: a verb on made-up data, its rates, phases and memory, and what GPUs and CPUs can reach."""
