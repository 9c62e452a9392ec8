"""TRL's GRPOTrainer on sort-letters; run by benchmarks/time_to_reward.py in TRL's own virtual environment.

    python time_to_reward_trl.py MODEL_DIR STEPS WORK_DIR SEED EXPORT_EVERY TASKS_JSON RATE

Weights of every EXPORT_EVERY-th step are put aside in memory and written when training is over. Prints one JSON object
on its last line: when each was made, and the mean reward of every step.
"""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

COMPLETIONS, GROUP, MAX_TOKENS, LR, WARMUP = 256, 8, 8, 1e-3, 20


class Exports(TrainerCallback):
    """Copies of the weights with the clock."""

    def __init__(self, every: int) -> None:
        self.every, self.held = every, []
        self.begun = self.away = 0.0

    def on_train_begin(self, *args, **kwargs) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        if state.global_step % self.every == 0:
            now, at = time.perf_counter(), time.time()
            weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            self.held.append((state.global_step, now - self.begun - self.away, at, weights))
            self.away += time.perf_counter() - now


def main(model_dir: str, steps: int, work_dir: str, seed: int, every: int, tasks_file: str, rate: str) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tasks = json.loads(Path(tasks_file).read_text())
    curve: list[float] = []

    def reward(completions: list, answer: list[str], **kwargs) -> list[float]:
        rewards = [float(c[0]["content"].strip() == right) for c, right in zip(completions, answer)]
        curve.append(sum(rewards) / len(rewards))
        return rewards

    exports = Exports(every)
    args = GRPOConfig(
        output_dir=f"{work_dir}/trl",
        seed=seed,
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=COMPLETIONS,
        num_generations=GROUP,
        max_completion_length=MAX_TOKENS,
        learning_rate=LR,
        lr_scheduler_type="linear" if rate == "linear" else "constant_with_warmup",
        warmup_steps=WARMUP,
        weight_decay=0.01,
        scale_rewards="none",
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": t["prompt"]}], "answer": t["answer"]} for t in tasks]
        ),
        processing_class=tokenizer,
        callbacks=[exports],
    )
    trainer.train()
    found = []
    for step, train_s, at, weights in exports.held:
        directory = Path(work_dir, f"step_{step}")
        model.save_pretrained(directory, state_dict=weights)
        tokenizer.save_pretrained(directory)
        found.append({"step": step, "train_s": train_s, "at": at, "directory": str(directory)})
    print(json.dumps({"exports": found, "curve": curve}))


if __name__ == "__main__":
    model_dir, steps, work_dir, seed, every, tasks_file, rate = sys.argv[1:]
    main(model_dir, int(steps), work_dir, int(seed), int(every), tasks_file, rate)
