"""The reward of this run: `share_of_digits(episode) -> float`. Change it, or add others."""


def share_of_digits(episode):
    """Return the number of digits in the right place, divided by the longer text's length."""
    answer, response = episode.prompt.answer, episode.response.strip()
    right = sum(given == wanted for given, wanted in zip(response, answer, strict=False))
    return right / max(len(answer), len(response), 1)
