"""`algorithm.distillation`: teachers whose log-probabilities say what each sampled token is worth.

A teacher is a model folder, which every rank of the learner scores with, or an engine behind a URL,
which the generators ask once a group is sampled.

Invariant: teachers have names of their own, and each is in one place.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from streamrl.config.section import (
    NotNegative,
    NotNegativeNumber,
    Positive,
    PositiveNumber,
    Seconds,
    Section,
    twice,
)


class TeacherSettings(Section):
    """One teacher: `path` or `url`."""

    name: str = "teacher"
    """In rows, logs and errors."""
    path: str | None = None
    """Folder or hub name of a model in the learner, with the policy's tokenizer."""
    url: str | None = None
    """Engine that generators ask, such as http://host:8000."""
    engine: Literal["vllm", "sglang"] = "vllm"
    """Whose requests `url` understands."""
    model: str | None = None
    """As `url` names it; null: the one that it serves."""
    api_key_env: str | None = None
    """Environment variable with the key of `url`."""
    weight: PositiveNumber = 1.0
    """Share among the teachers of a prompt, scaled to a sum of 1."""

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
    """On-policy distillation: the advantage of a sampled token is log pi_T - log pi, alone or
    beside the reward's; with `top_k` the KL is a term of the loss."""

    teachers: Annotated[tuple[TeacherSettings, ...], Field(min_length=1)]
    """With names of their own."""
    column: str | None = None
    """Column with the name of a row's teacher; null: all score every prompt."""
    template: str | None = None
    """Jinja of what teachers read instead of the prompt, with the row's columns, `prompt` and
    `answer`; null: what the policy reads."""
    coef: PositiveNumber = 1.0
    """Factor of the difference, or of the KL."""
    reward_coef: NotNegativeNumber = 0.0
    """Factor of the reward's advantage, which is added; 0: teachers alone."""
    top_k: NotNegative = 0
    """Likeliest tokens of the teacher over which the KL is taken; 0: the sampled token alone."""
    divergence: Literal["reverse_kl", "forward_kl"] = "reverse_kl"
    """Of `top_k`: KL(pi, pi_T), or KL(pi_T, pi), which covers all that the teacher may say."""
    student: Literal["behavior", "proximal"] = "proximal"
    """Whose log-probability is subtracted: that of the policy that sampled, or of the one at the
    start of the step, by a pass."""
    timeout_s: Seconds = 120.0
    """Of a request by url."""
    retries: NotNegative = 3
    """Further tries of a failed request; then the group fails."""
    max_concurrent: Positive = 32
    """Requests of a generator to a teacher at a time."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [teacher.name for teacher in self.teachers]
        if name := twice(names):
            raise ValueError(
                f"teachers: {names.count(name)} have the name {name!r}; give each a name of its own"
            )
        if self.column is not None and len(self.teachers) == 1:
            raise ValueError(
                f"column: was {self.column!r}, and there is one teacher, so it cannot act; leave "
                "it out"
            )
        self._check_idle()
        self._check_candidates()
        return self

    def _check_idle(self) -> None:
        """Settings that no teacher reads."""
        weighed = [t for t in self.teachers if t.weight != 1.0]
        if weighed and (len(self.teachers) == 1 or self.column is not None):
            raise ValueError(
                f"teachers: {weighed[0].name!r} has the weight {weighed[0].weight:g}, and a prompt "
                "has one teacher, so it cannot act; leave it out (coef is the factor of all)"
            )
        fields = type(self).model_fields
        asked = ("timeout_s", "retries", "max_concurrent")
        given = [name for name in asked if getattr(self, name) != fields[name].default]
        if given and not self.by_url:
            raise ValueError(
                f"{given[0]}: was {getattr(self, given[0]):g}, and no teacher is asked by url, so "
                "it cannot act; leave it out"
            )

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
