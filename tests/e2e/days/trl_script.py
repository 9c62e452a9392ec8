"""A script for TRL as its documents write one: four letters are to be put in order. Needs trl; tests read it only."""

from datasets import Dataset
from letters import is_right, length_is_four, places, rows
from trl import GRPOConfig, GRPOTrainer

if __name__ == "__main__":
    trainer = GRPOTrainer(
        model="warmed-up",
        reward_funcs=[is_right, places, length_is_four],
        train_dataset=Dataset.from_list(rows(0, 1200)),
        eval_dataset=Dataset.from_list(rows(1200, 1328)),
        args=GRPOConfig(
            output_dir="out",
            run_name="letters",
            num_generations=8,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=8,
            reward_weights=[1.0, 0.5, 0.1],
            learning_rate=1e-3,
            lr_scheduler_type="linear",
            warmup_steps=5,
            max_steps=60,
            max_completion_length=8,
            temperature=1.0,
            beta=0.001,
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            eval_strategy="steps",
            eval_steps=30,
            save_steps=30,
            logging_steps=1,
            log_completions=True,
            report_to="none",
            seed=7,
        ),
    )
    trainer.train()
