"""Stub."""

from streamrl.config.section import Section


class AlgorithmSection(Section):
    advantage: str = "grpo"
