"""TRL's GRPOTrainer on the quickstart's prompts; runs in an environment that has TRL.

    PYTHONPATH=. PYTHON tests/benchmarks/peers/trl_quickstart.py SETTINGS.json

Writes `trl.json` (the time at the end of every step, the mean reward of its completions) into the
folder of the settings. Fails unless each prompt was trained, in order.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(settings: dict[str, Any]) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["num_threads"])
    rewards: list[float] = []
    times: list[float] = []
    trained: list[int] = []

    def exact_match(
        completions: list[str], answer: list[str], prompt_index: list[int], **_: Any
    ) -> list[float]:
        trained.extend(prompt_index[:: settings["group_size"]])
        pairs = zip(completions, answer, strict=True)
        scores = [float(completion == right) for completion, right in pairs]
        rewards.append(sum(scores) / len(scores))
        return scores

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.time())

    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1.0,
        betas=tuple(settings["betas"]),
        weight_decay=settings["weight_decay"],
    )
    rates = settings["rates"]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[step])
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        reward_funcs=exact_match,
        args=GRPOConfig(
            output_dir=settings["folder"],
            seed=settings["seed"],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=settings["groups_per_step"] * settings["group_size"],
            gradient_accumulation_steps=1,
            steps_per_generation=1,
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
            scale_rewards="group",
            max_grad_norm=settings["max_grad_norm"],
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
        ),
        train_dataset=Dataset.from_list(
            [
                {"prompt": prompt, "answer": answer, "prompt_index": i}
                for i, (prompt, answer) in enumerate(settings["prompts"])
            ]
        ),
        optimizers=(optimizer, schedule),
        callbacks=[Clock()],
    )
    trainer.train()
    if trained != list(range(len(settings["prompts"]))):
        raise ValueError(f"prompts: TRL trained others, of {len(trained)}, than those given")
    record = {"times": times, "rewards": rewards}
    (Path(settings["folder"]) / "trl.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
