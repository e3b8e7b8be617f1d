"""The checkpoints of a run, as everybody finds and trusts them: learner, evaluation and audit.

    checkpoints/step-00000020/   state.json, manifest.json, the model and the optimizer
    checkpoints/history.json     which of them belong to the run (`streamrl.checkpoints.history`)
    abandoned/                   those that do not any more (`streamrl.checkpoints.abandoned`)

What a checkpoint holds for training is written and read by `learners.checkpoints`. This package
imports no torch.

The rule. A run has one surviving history. A learner that starts from a checkpoint, whether
`run.resume` names it or a newer one is damaged, makes its history the surviving one; checkpoints
and lines of other histories are set aside, and nobody reads them as the run's again. In the
surviving history each prompt is trained once, or dropped with a reason. The buffer may have freed
groups of prompts that only an abandoned history has trained: as the learner attaches with the books
of its checkpoint, those prompts are open again, so that generators sample them anew.
"""
