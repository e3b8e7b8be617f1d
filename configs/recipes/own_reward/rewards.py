"""The reward of this run: `share_of_digits(episode) -> float`. Change it, or add others."""


def share_of_digits(episode):
    """How much of the answer stands at its place in the response."""
    answer, response = episode.prompt.answer, episode.response.strip()
    right = sum(given == wanted for given, wanted in zip(response, answer, strict=False))
    return right / max(len(answer), len(response), 1)
