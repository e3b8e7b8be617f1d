"""TRL's GRPOTrainer on the task of `steps`; runs in an environment that has TRL.

    PYTHONPATH=. PYTHON tests/benchmarks/peers/trl_steps.py SETTINGS.json

Writes `trl.json` (the time at the end of every step, the length of every response) into the folder
of the settings.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.learner_runs.fixed_lengths import Numbers, response_length, reward_of


def main(settings: dict[str, Any]) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["num_threads"])
    lengths: list[int] = []
    times: list[float] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [reward_of(len(ids)) for ids in completion_ids]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.time())

    first = settings["first_prompt"]
    prompts = range(first, first + settings["steps"] * settings["groups_per_step"])
    num_samples = settings["groups_per_step"] * settings["group_size"]
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    keep_lengths(model, settings)
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=settings["folder"],
            seed=0,
            use_cpu=True,
            bf16=settings["dtype"] == "bfloat16",
            gradient_checkpointing=False,
            per_device_train_batch_size=num_samples // settings["micro_batches"],
            gradient_accumulation_steps=settings["micro_batches"],
            steps_per_generation=settings["micro_batches"],
            num_generations=settings["group_size"],
            max_completion_length=settings["longest"],
            max_steps=settings["steps"],
            shuffle_dataset=False,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            num_iterations=1,
            beta=0.0,
            loss_type="dapo",
            learning_rate=settings["lr"],
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{i:06d}"} for i in prompts]),
        callbacks=[Clock()],
    )
    trainer.train()
    record = {"times": times, "lengths": lengths}
    (Path(settings["folder"]) / "trl.json").write_text(json.dumps(record))


def keep_lengths(model: Any, settings: dict[str, Any]) -> None:
    """End every completion of the model at its length, and not before."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    class EndAt(LogitsProcessor):
        def __init__(self, lengths: list[int], prompt_width: int) -> None:
            self._lengths, self._width = torch.tensor(lengths), prompt_width

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            ends = self._lengths <= input_ids.shape[1] - self._width + 1
            scores[:, settings["eos"]] = -torch.inf
            scores[ends] = -torch.inf
            scores[ends, settings["eos"]] = 0.0
            return scores

    generate, size = model.generate, settings["group_size"]

    def kept(input_ids: Any, **arguments: Any) -> Any:
        lengths = [
            response_length(row.tolist(), i % size, settings["median"], settings["longest"])
            for i, row in enumerate(input_ids)
        ]
        ending = LogitsProcessorList([EndAt(lengths, input_ids.shape[1])])
        return generate(input_ids=input_ids, logits_processor=ending, **arguments)

    model.generate = kept


if __name__ == "__main__":
    assert Numbers, "both sides read one task"
    main(json.loads(Path(sys.argv[1]).read_text()))
