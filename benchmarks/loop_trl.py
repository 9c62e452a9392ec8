"""TRL's GRPOTrainer on the loop benchmark's work; run by benchmarks/loop.py in TRL's own virtual environment.

    python loop_trl.py MODEL_DIR STEPS WORK_DIR [COMPLETIONS GROUP NEW_TOKENS]

One thread, one process, CPU. The same random Qwen3, the same prompts, COMPLETIONS of exactly NEW_TOKENS per step, in
groups of GROUP (64 of 32 in groups of 8), AdamW, no KL to a reference model. A reward that differs within every group
keeps the gradient non-zero. The last line is one JSON object.
"""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimes(TrainerCallback):
    """Wall and CPU clock at the end of every step."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_step_end(self, *args, **kwargs) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())


def reward(completions: list, **kwargs) -> list[float]:
    """Share of distinct characters: cheap, and different within a group of random completions."""
    texts = [c[0]["content"] for c in completions]
    return [len(set(text)) / max(len(text), 1) for text in texts]


def main(
    model_dir: str, steps: int, work_dir: str, completions: int = 64, group: int = 8, new_tokens: int = 32
) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model.generation_config.eos_token_id = None
    prompts = json.loads(Path(work_dir, "prompts.json").read_text())
    times = StepTimes()
    args = GRPOConfig(
        output_dir=f"{work_dir}/trl",
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=completions,
        num_generations=group,
        max_completion_length=new_tokens,
        generation_kwargs={"min_new_tokens": new_tokens},
        learning_rate=1e-4,
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
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": p}] for p in prompts]}),
        processing_class=tokenizer,
        callbacks=[times],
    )
    trainer.train()
    print(json.dumps({"wall": times.wall, "cpu": times.cpu, "tokens_per_step": completions * new_tokens}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *(int(word) for word in sys.argv[4:]))
