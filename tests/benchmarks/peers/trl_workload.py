"""TRL's GRPOTrainer on the prompts of bench_async; runs in an environment that has TRL.

    PYTHONPATH=. PYTHON tests/benchmarks/peers/trl_workload.py SETTINGS.json

Prompts come in the order of their indices. Writes `checkpoint-STEP` and `trl.json` (the time at the
end of every step; prompt index and response length of every completion, in the order of training)
into the folder of the settings.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.async_runs.spans import Spans


def main(settings: dict[str, Any]) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["num_threads"])
    prompts = Spans(settings["seed"], **settings["source_kwargs"])
    rows = [prompts[i] for i in range(settings["steps"] * settings["groups_per_step"])]
    completed: list[tuple[int, int]] = []
    times: list[float] = []

    def exact_match(
        completions: list[str],
        completion_ids: list[list[int]],
        answer: list[str],
        prompt_index: list[int],
        **_: Any,
    ) -> list[float]:
        completed.extend(zip(prompt_index, map(len, completion_ids), strict=True))
        pairs = zip(completions, answer, strict=True)
        return [float(completion == right) for completion, right in pairs]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.time())

    num_samples = settings["groups_per_step"] * settings["group_size"]
    config = GRPOConfig(
        output_dir=settings["folder"],
        seed=settings["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        # Sampled at once, and trained in micro-batches.
        per_device_train_batch_size=num_samples // settings["micro_batches"],
        gradient_accumulation_steps=settings["micro_batches"],
        steps_per_generation=settings["micro_batches"],
        num_generations=settings["group_size"],
        max_completion_length=settings["max_new_tokens"],
        max_steps=settings["steps"],
        shuffle_dataset=False,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        num_iterations=1,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group" if settings["scale_rewards"] else "none",
        learning_rate=settings["lr"],
        warmup_steps=settings["warmup_steps"],
        lr_scheduler_type="constant_with_warmup",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.01,
        max_grad_norm=1.0,
        save_strategy="steps",
        save_steps=settings["save_every"],
        save_only_model=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        reward_funcs=exact_match,
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": row.content, "answer": row.answer, **row.row} for row in rows]
        ),
        callbacks=[Clock()],
    )
    trainer.train()
    record = {"times": times, "completed": completed}
    (Path(settings["folder"]) / "trl.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
