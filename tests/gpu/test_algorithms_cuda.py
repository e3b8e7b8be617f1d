"""The algorithms give on a GPU what they give on a CPU."""

import pytest

from tests.settings import AdvantageConfig, LossConfig, RolloutISConfig

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from streamrl.algorithms.advantages import ADVANTAGES, AdvantageInput  # noqa: E402
from streamrl.algorithms.kl import full_kl, kl_penalty  # noqa: E402
from streamrl.algorithms.logprobs import LogitTransform, token_logprobs  # noqa: E402
from streamrl.algorithms.losses import POLICY_LOSSES, LossInput  # noqa: E402
from streamrl.algorithms.reward_shaping import (  # noqa: E402
    RunningMoments,
    normalize,
    sample_weights,
    token_rewards,
)
from streamrl.algorithms.rollout_is import rollout_is_weights  # noqa: E402
from streamrl.algorithms.sequences import Sequences  # noqa: E402
from streamrl.config.algorithm.advantages import ADVANTAGE_SETTINGS  # noqa: E402
from streamrl.config.algorithm.losses import LOSS_SETTINGS  # noqa: E402
from streamrl.config.algorithm.rewards import SampleWeightSettings  # noqa: E402
from streamrl.config.algorithm.rollout_is import ROLLOUT_IS_PRESETS  # noqa: E402
from streamrl.config.algorithm.settings import KL_ESTIMATORS  # noqa: E402

LENGTHS = [7, 0, 300, 41, 1]
NUM_TOKENS = sum(LENGTHS)
CUDA = torch.device("cuda")


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_sequences_reduce_and_expand() -> None:
    values = _random(NUM_TOKENS)
    on_cpu, on_gpu = Sequences.from_lengths(LENGTHS), Sequences.from_lengths(LENGTHS)
    for name in ("sum", "mean", "max"):
        expected, found = getattr(on_cpu, name)(values), getattr(on_gpu, name)(values.to(CUDA))
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), expected)
    expanded = on_gpu.expand(torch.arange(5, device=CUDA))
    torch.testing.assert_close(expanded.cpu(), on_cpu.expand(torch.arange(5)))


@pytest.mark.parametrize("preset", sorted(set(ROLLOUT_IS_PRESETS) - {"m2po"}))
@pytest.mark.parametrize("has_nan", [False, True])
def test_rollout_is_weights_and_metrics(preset: str, has_nan: bool) -> None:
    config = ROLLOUT_IS_PRESETS[preset]
    behavior, staleness = -_random(NUM_TOKENS).abs(), torch.arange(NUM_TOKENS) % 12
    train = behavior + 0.3 * _random(NUM_TOKENS, seed=1)
    if has_nan:
        train[-1] = torch.nan
    sequences = Sequences.from_lengths(LENGTHS)
    expected = rollout_is_weights(train, behavior, sequences, config, staleness)
    found = rollout_is_weights(
        train.to(CUDA), behavior.to(CUDA), sequences, config, staleness.to(CUDA)
    )
    assert found.keep.cpu().equal(expected.keep)
    assert (found.weights is None) == (expected.weights is None)
    if found.weights is not None:
        torch.testing.assert_close(found.weights.cpu(), expected.weights)
    # There a sequence that is not finite is measured, as one without mismatch.
    names = [name for name in expected.metrics if not has_nan or "nonfinite" in name]
    for name in names:
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-9), name


def test_rejection_rules() -> None:
    config = RolloutISConfig(rejection=[{"token_k1": 2.0}, {"seq_max_k3": 0.5}])
    train, behavior = 0.4 * _random(NUM_TOKENS), torch.zeros(NUM_TOKENS, dtype=torch.float64)
    sequences = Sequences.from_lengths(LENGTHS)
    expected = rollout_is_weights(train, behavior, sequences, config)
    found = rollout_is_weights(train.to(CUDA), behavior.to(CUDA), sequences, config)
    assert found.keep.cpu().equal(expected.keep)


@pytest.mark.parametrize("name", ADVANTAGE_SETTINGS)
def test_advantages(name: str) -> None:
    def batch(device: torch.device) -> AdvantageInput:
        columns = [_random(NUM_TOKENS, seed=seed).to(device) for seed in range(5)]
        return AdvantageInput(
            columns[0],
            torch.tensor([3, 3, 1, 1, 1], device=device),
            Sequences.from_lengths(LENGTHS),
            columns[1],
            _random(5, seed=5).to(device),
            logprobs=-columns[2].abs(),
            behavior_logprobs=-columns[3].abs(),
            squared_probabilities=columns[4].sigmoid(),
            components=_random(5, 2, seed=6).to(device),
            anchors=1 + torch.arange(NUM_TOKENS, device=device) % 3,
        )

    config = AdvantageConfig(gamma=0.99, lam=0.95, rewards={"one": 1.0, "two": 0.5})
    expected = ADVANTAGES[name](batch(torch.device("cpu")), config)
    found = ADVANTAGES[name](batch(CUDA), config)
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("name", LOSS_SETTINGS)
def test_losses_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randperm", torch.arange)

    def run(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = (0.4 * _random(NUM_TOKENS)).to(device).requires_grad_()
        batch = LossInput(
            logprobs,
            (0.4 * _random(NUM_TOKENS, seed=1)).to(device),
            _random(NUM_TOKENS, seed=2).to(device),
            _random(NUM_TOKENS, seed=3).abs().to(device),
            Sequences.from_lengths(LENGTHS),
            rewards=_random(5, seed=4).to(device),
        )
        output = POLICY_LOSSES[name](batch, LossConfig(clip_cov_lb=0.1))
        return output.loss.detach(), torch.autograd.grad(output.loss, logprobs)[0]

    for found, expected in zip(run(CUDA), run(torch.device("cpu")), strict=True):
        torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_kl_penalties(kind: str) -> None:
    first, second = _random(9), _random(9, seed=1)
    found = kl_penalty(first.to(CUDA), second.to(CUDA), kind).cpu()
    torch.testing.assert_close(found, kl_penalty(first, second, kind))


def test_the_exact_kl_from_hidden_states() -> None:
    inputs = [_random(5, 8), _random(11, 8, seed=1), _random(5, 8, seed=2), _random(11, 8, seed=3)]
    found = full_kl(*(tensor.to(CUDA) for tensor in inputs)).cpu()
    torch.testing.assert_close(found, full_kl(*inputs))


def test_reward_shaping() -> None:
    rewards, groups = _random(5), torch.tensor([0, 0, 1, 1, 1])
    sequences = Sequences.from_lengths(LENGTHS)
    scopes = ("group", "batch", RunningMoments())
    found = normalize(rewards.to(CUDA), groups.to(CUDA), *scopes).cpu()
    torch.testing.assert_close(found, normalize(rewards, groups, *scopes))
    placed = token_rewards(rewards.to(CUDA), sequences).cpu()
    torch.testing.assert_close(placed, token_rewards(rewards, sequences))
    lengths, config = sequences.lengths, SampleWeightSettings(length=True)
    weights = sample_weights(lengths.to(CUDA), config, rewards.to(CUDA)).cpu()
    torch.testing.assert_close(weights, sample_weights(lengths, config, rewards))


@pytest.mark.parametrize(
    "transform", [LogitTransform(), LogitTransform(temperature=0.7), LogitTransform(softcap=8.0)]
)
def test_logprobs_and_gradients_agree_with_log_softmax(transform: LogitTransform) -> None:
    hidden = _random(64, 128).float().to(CUDA).requires_grad_()
    weight = _random(5003, 128, seed=1).float().to(CUDA).mul(0.1).requires_grad_()
    targets = torch.arange(64, device=CUDA) * 70
    upstream = _random(64, seed=2).float().to(CUDA)
    ours = token_logprobs(hidden, weight, targets, transform=transform)
    plain = transform(hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(ours.logprobs, plain, rtol=1e-4, atol=1e-4)
    first = torch.autograd.grad((ours.logprobs * upstream).sum(), (hidden, weight))
    second = torch.autograd.grad((plain * upstream).sum(), (hidden, weight))
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)
