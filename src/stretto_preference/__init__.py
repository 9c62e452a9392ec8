"""`sft` on preference pairs, `[data] type = "preference"`: DPO of a policy, or a reward model; what serves those."""
