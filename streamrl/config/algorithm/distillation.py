"""`algorithm.distillation`: teachers whose log-probabilities say what each sampled token is worth.

A teacher is a model folder, which every rank of the learner scores with, or an engine behind a URL,
which the generators ask once a group is sampled.

Invariant: teachers have names of their own, and each is in one place.
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
