"""The same with stretto; rows and reward functions are those of the script for TRL, untouched."""

from datasets import Dataset
from letters import is_right, length_is_four, places, rows

import stretto

if __name__ == "__main__":
    run = stretto.rl(
        model="warmed-up",
        reward=[is_right, places, length_is_four],
        dataset=Dataset.from_list(rows(0, 1200)),
        eval_dataset=Dataset.from_list(rows(1200, 1328)),
        name="letters",
        group_size=8,
        batch_size=128,
        reward_weights=[1.0, 0.5, 0.1],
        lr=1e-3,
        steps=60,
        max_completion_tokens=8,
        seq_len=512,
        eval_steps=30,
        seed=7,
        **{
            "trainer.scheduler.type": "linear",
            "trainer.scheduler.warmup_steps": 5,
            "trainer.loss.type": "ppo",
            "trainer.loss.clip_low": 0.2,
            "trainer.loss.clip_high": 0.28,
            "trainer.loss.reduction": "token",
            "trainer.loss.reference_kl.coef": 0.001,
            "orchestrator.train.sampling.temperature": 1.0,
            "ckpt.interval": 30,
        },
    )
    print(run.evals()[-1])
