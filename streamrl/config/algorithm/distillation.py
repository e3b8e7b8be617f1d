"""`algorithm.distillation`: teachers whose log-probabilities give each sampled token its advantage.

A teacher is a model folder, with which every rank of the learner scores, or an engine at a URL,
which the generators ask once a group is sampled.

Invariant: each teacher has its own name, and either a folder or a URL.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

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
    """A teacher: `path` or `url`."""

    name: str = "teacher"
    """Name in rows, logs and errors."""
    path: str | None = None
    """Folder or hub name of a model that the learner loads; it must have the policy's tokenizer."""
    url: str | None = None
    """Engine that the generators ask, such as http://host:8000."""
    engine: Literal["vllm", "sglang"] = "vllm"
    """Which engine's API `url` has."""
    model: str | None = None
    """Name of the model at `url`; null: the only one it serves."""
    api_key_env: str | None = None
    """Environment variable that holds the API key of `url`."""
    weight: PositiveNumber = 1.0
    """Weight among the teachers of a prompt; the weights are scaled to sum to 1."""

    def contradictions(self) -> Iterator[str]:
        if (self.path is None) == (self.url is None):
            has = "neither path nor url" if self.path is None else "both path and url"
            yield f"path: teacher {self.name!r} has {has}; set one of them"
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            yield f"url: was {self.url!r}; it begins with http:// or https://"
        of_url = self.not_default(["engine", "model", "api_key_env"])
        if self.path is not None and of_url:
            yield f"""{of_url[0]}: is for a teacher by url, and {self.name!r} has a path; leave it
                out"""


class DistillationSettings(Section):
    """On-policy distillation (docs/distillation.md)."""

    teachers: Annotated[tuple[TeacherSettings, ...], Field(min_length=1)]
    """The teachers; their names must differ."""
    column: str | None = None
    """Column with the name of the row's teacher; null: every teacher scores every prompt."""
    template: str | None = None
    """Jinja template of the prompt for teachers, with the row's columns, `prompt` and `answer`;
    null: the policy's prompt."""
    coef: PositiveNumber = 1.0
    """Weight of the difference, or of the KL."""
    reward_coef: NotNegativeNumber = 0.0
    """Weight of the reward's advantage, which is added; 0: teachers alone."""
    top_k: NotNegative = 0
    """Number of the teacher's likeliest tokens over which the KL is taken; 0: only the sampled
    token."""
    divergence: Literal["reverse_kl", "forward_kl"] = "reverse_kl"
    """Direction of the KL with `top_k`: KL(pi, pi_T) or KL(pi_T, pi)."""
    student: Literal["behavior", "proximal"] = "proximal"
    """Whose log-probability is subtracted: the sampling policy's, or that at the start of the step
    (a pass)."""
    timeout_s: Seconds = 120.0
    """Seconds that a request to `url` may take."""
    retries: NotNegative = 3
    """Retries of a failed request; then the group fails."""
    max_concurrent: Positive = 32
    """Most requests of one generator to a teacher at a time."""

    def contradictions(self) -> Iterator[str]:
        names = [teacher.name for teacher in self.teachers]
        if name := twice(names):
            yield f"""teachers: {names.count(name)} have the name {name!r}; give each a name of its
                own"""
        if self.column is not None and len(names) == 1:
            yield f"""column: was {self.column!r}, and there is one teacher, so it cannot act; leave
                it out"""
        weighed = [t for t in self.teachers if t.weight != 1.0]
        if weighed and (len(names) == 1 or self.column is not None):
            yield f"""teachers: {weighed[0].name!r} has the weight {weighed[0].weight:g}, and a
                prompt has one teacher, so it cannot act; leave it out (coef is the factor of
                all)"""
        of_url = self.not_default(["timeout_s", "retries", "max_concurrent"])
        if of_url and not self.by_url:
            yield f"""{of_url[0]}: was {getattr(self, of_url[0]):g}, and no teacher is asked by url,
                so it cannot act; leave it out"""
        if not self.top_k and self.divergence != "reverse_kl":
            yield f"""divergence: was {self.divergence}, and top_k 0 compares the sampled token
                alone, which is the reverse KL; set top_k, such as 32"""
        if self.top_k and self.student != "proximal":
            yield f"""student: was {self.student}, and the KL of top_k is that of the policy as it
                is trained; leave it out"""
        if self.top_k and len(names) > 1 and self.column is None:
            yield f"""top_k: was {self.top_k}, and a token has the candidates of one teacher; name
                that of each prompt by column, or give one teacher ({len(names)} are given)"""

    @property
    def compares_proximal(self) -> bool:
        """Whether the advantage uses log-probabilities of the policy at the start of the step."""
        return self.student == "proximal" and not self.top_k

    @property
    def in_learner(self) -> tuple[TeacherSettings, ...]:
        """The teachers that are model folders."""
        return tuple(teacher for teacher in self.teachers if teacher.path is not None)

    @property
    def by_url(self) -> tuple[TeacherSettings, ...]:
        """The teachers that are engines."""
        return tuple(teacher for teacher in self.teachers if teacher.url is not None)

    def share(self, teacher: TeacherSettings) -> float:
        """The teacher's part of the advantage of a prompt that it scores, from 0 to 1."""
        if self.column is not None:
            return 1.0
        return teacher.weight / sum(other.weight for other in self.teachers)
