"""`algorithm.distillation`: teachers whose log-probabilities say what each sampled token is worth.

A teacher is a model folder, which every rank of the learner scores with, or an engine behind a URL,
which the generators ask once a group is sampled.

Invariant: teachers have names of their own, and each is in one place.
"""

from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from streamrl.config.section import NotNegative, Positive, Seconds, Section


class TeacherSettings(Section):
    """One teacher: `path` or `url`."""

    name: str = "teacher"
    """What rows, logs and errors call it."""
    path: str | None = None
    """Folder or hub name of a model that the learner scores with, of any size and architecture,
    with the policy's tokenizer."""
    url: str | None = None
    """Address of an engine that the generators ask, such as http://host:8000."""
    engine: Literal["vllm", "sglang"] = "vllm"
    """Whose requests the engine at `url` understands."""
    model: str | None = None
    """The model as the engine at `url` names it; null: the one that it serves."""
    api_key_env: str | None = None
    """Name of the environment variable that has the key of `url`."""
    weight: float = Field(default=1.0, gt=0)
    """Share among the teachers that score a prompt; shares are scaled to a sum of 1."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.url is None):
            has = "neither path nor url" if self.path is None else "both path and url"
            raise ValueError(f"path: teacher {self.name!r} has {has}; set one of them")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: was {self.url!r}; it begins with http:// or https://")
        of_url = {"engine": "vllm", "model": None, "api_key_env": None}
        given = [name for name, default in of_url.items() if getattr(self, name) != default]
        if self.path is not None and given:
            raise ValueError(
                f"{given[0]}: is for a teacher by url, and {self.name!r} has a path; leave it out"
            )
        return self


class DistillationSettings(Section):
    """On-policy distillation: log pi_T - log pi of each sampled token as its advantage, alone or
    beside that of the reward (Thinking Machines, On-Policy Distillation, 2025), or, with `top_k`,
    the KL over a teacher's likeliest tokens as a term of the loss."""

    teachers: Annotated[tuple[TeacherSettings, ...], Field(min_length=1)]
    """The teachers; `path` or `url` each."""
    column: str | None = None
    """Column of a row that names the teacher of its prompt; null: all teachers score every prompt,
    mixed by their weights."""
    template: str | None = None
    """Jinja of what teachers read in the place of the prompt, or of its last message of the user:
    the columns of the row, `prompt`, that text, and `answer`; null: what the policy reads. With it
    a model can teach itself."""
    coef: float = Field(default=1.0, gt=0)
    """What the difference of the log-probabilities is multiplied by."""
    reward_coef: float = Field(default=0.0, ge=0)
    """What the advantage of the reward is multiplied by before it is added; 0: the teachers
    alone."""
    top_k: NotNegative = 0
    """The teacher's likeliest tokens, at each place, over which the KL is taken, with all others as
    one more; 0: the sampled token alone, by the advantage."""
    divergence: Literal["reverse_kl", "forward_kl"] = "reverse_kl"
    """Of `top_k`: KL(pi, pi_T), which stays where the teacher is likely, or KL(pi_T, pi), which
    covers all that it may say."""
    student: Literal["behavior", "proximal"] = "proximal"
    """Whose log-probability is subtracted: of the policy at the start of the step, which costs a
    pass, or of the policy that sampled the token, which at lag pushes away from that, too."""
    timeout_s: Seconds = 120.0
    """Of one request to a teacher by url."""
    retries: NotNegative = 3
    """Further tries of a request that fails, is late or is answered with other tokens; then the
    group fails with the reason."""
    max_concurrent: Positive = 32
    """Requests of a generator to one teacher at a time."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = Counter(teacher.name for teacher in self.teachers)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ValueError(
                f"teachers: {names[twice[0]]} have the name {twice[0]!r}; give each a name of its "
                "own"
            )
        if self.column is not None and len(self.teachers) == 1:
            raise ValueError(
                f"column: was {self.column!r}, and there is one teacher, so it cannot act; leave "
                "it out"
            )
        self._check_candidates()
        return self

    def _check_candidates(self) -> None:
        if not self.top_k and self.divergence != "reverse_kl":
            raise ValueError(
                f"divergence: was {self.divergence}, and top_k 0 compares the sampled token alone, "
                "which is the reverse KL; set top_k, such as 32"
            )
        if self.top_k and self.student != "proximal":
            raise ValueError(
                f"student: was {self.student}, and the KL of top_k is that of the policy as it is "
                "trained; leave it out"
            )
        if self.top_k and len(self.teachers) > 1 and self.column is None:
            raise ValueError(
                f"top_k: was {self.top_k}, and a token has the candidates of one teacher; name "
                f"that of each prompt by column, or give one teacher ({len(self.teachers)} are "
                "given)"
            )

    @property
    def compares_proximal(self) -> bool:
        """Whether an advantage is made of the log-probabilities at the start of the step."""
        return self.student == "proximal" and not self.top_k

    @property
    def in_learner(self) -> tuple[TeacherSettings, ...]:
        """Those that are model folders."""
        return tuple(teacher for teacher in self.teachers if teacher.path is not None)

    @property
    def by_url(self) -> tuple[TeacherSettings, ...]:
        """Those that are engines."""
        return tuple(teacher for teacher in self.teachers if teacher.url is not None)

    def share(self, teacher: TeacherSettings) -> float:
        """Of the log-probability of a token that this teacher scores."""
        if self.column is not None:
            return 1.0
        return teacher.weight / sum(other.weight for other in self.teachers)
