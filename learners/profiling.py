"""The profile of a trainer's steps: phases, operations and traces, observed from outside.

Forward and backward passes are seen by hooks of the networks, so that whoever calls a network is
measured without knowing it: with gradient a pass is `forward`, without `score`, and `backward` is
from the first gradient that reaches a network's output to the end of that backward pass.

Invariant: nothing here waits for a device before the end of a step, and nothing changes what is
computed.

`ScalingWindow`: how busy generators and learner are over the last steps, for
`streamrl.diagnosis.scaling`.
"""

import logging
import math
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from learners.policy.network import Network, NetworkOutput
from streamrl.config.learner import LearnerSettings, ProfilerSettings
from streamrl.diagnosis.scaling import FREE_CORES, Load, busy_frac, scaling_metrics
from streamrl.errors import ConfigError
from streamrl.types import BufferStats, GeneratorStatus

log = logging.getLogger(__name__)

Moment = float | torch.cuda.Event


class StepTimes:
    """Seconds of the phases of a step, summed under their names; of one thread at a time.

    On a GPU a phase is the time between two events of its stream, read at the end of the step, on a
    CPU wall-clock time. A phase that is open when the seconds are read counts in the next step.
    """

    def __init__(self, device: torch.device | None = None, *, with_nvtx: bool = False) -> None:
        self._has_events = device is not None and device.type == "cuda"
        self._with_nvtx = with_nvtx
        self._spans: list[tuple[str, Moment, Moment]] = []
        self._open: dict[str, tuple[Moment, int | None]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside under this name."""
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def begin(self, name: str) -> None:
        mark = torch.cuda.nvtx.range_start(f"streamrl/{name}") if self._with_nvtx else None
        self._open[name] = (self._now(), mark)

    def end(self, name: str) -> None:
        started, mark = self._open.pop(name)
        if mark is not None:
            torch.cuda.nvtx.range_end(mark)
        self._spans.append((name, started, self._now()))

    def is_open(self, name: str) -> bool:
        return name in self._open

    def clear(self) -> None:
        self._spans = []

    def take(self, *names: str) -> dict[str, float]:
        """`learner/NAME_s` of each name, 0 where nothing ran under it; counting starts anew."""
        seconds = dict.fromkeys(names, 0.0)
        for name, started, ended in self._spans:
            seconds[name] += _seconds(started, ended)
        self.clear()
        return {f"learner/{name}_s": value for name, value in seconds.items()}

    def _now(self) -> Moment:
        if not self._has_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(started: Moment, ended: Moment) -> float:
    if isinstance(started, float) and isinstance(ended, float):
        return ended - started
    assert isinstance(started, torch.cuda.Event)
    assert isinstance(ended, torch.cuda.Event)
    ended.synchronize()
    return float(started.elapsed_time(ended)) / 1e3


PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "NVIDIA B200": {"bfloat16": 2250.0, "float32": 80.0},
    "NVIDIA H200": {"bfloat16": 989.5, "float32": 67.0},
    "NVIDIA GH200": {"bfloat16": 989.5, "float32": 67.0},
    "NVIDIA H100 PCIe": {"bfloat16": 756.0, "float32": 51.0},
    "NVIDIA H100 NVL": {"bfloat16": 835.0, "float32": 60.0},
    "NVIDIA H100": {"bfloat16": 989.5, "float32": 67.0},
    "NVIDIA A100": {"bfloat16": 312.0, "float32": 19.5},
    "NVIDIA L40S": {"bfloat16": 362.0, "float32": 91.6},
    "NVIDIA L4": {"bfloat16": 121.0, "float32": 30.3},
    "NVIDIA GeForce RTX 4090": {"bfloat16": 165.2, "float32": 82.6},
    "AMD Instinct MI300X": {"bfloat16": 1307.4, "float32": 163.4},
}
"""Dense, by the beginning of `torch.cuda.get_device_name` and by compute dtype; the first that fits
counts. From the vendors' data sheets; float32 without tensor cores."""


def peak_flops(device: torch.device, dtype: str, given_tflops: float | None) -> float | None:
    """Operations per second of one device, as given or as known by its name; None if neither."""
    if given_tflops is not None:
        return 1e12 * given_tflops
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    # Whole words: an L4 is no L40. Both halves are multiplied alike.
    known = (peaks for words, peaks in PEAK_TFLOPS.items() if re.match(rf"{words}\b", name))
    tflops = next(known, {}).get("bfloat16" if dtype == "float16" else dtype)
    return None if tflops is None else 1e12 * tflops


@dataclass(frozen=True)
class NetworkFlops:
    """The model's own count of the floating-point operations of a pass.

    A forward pass costs two operations per token for each weight of a matrix product, and attention
    four per pair of tokens for each of its channels, where a token sees itself and earlier ones. A
    backward pass costs twice as much, half of it only for weights that are trained. The LM head
    counts for the response tokens alone; of experts those that a token is routed to. A token that
    several trajectories share counts once, except in attention. What is recomputed to save memory
    does not count, nor do element-wise operations and the state of recurrent layers.
    """

    num_weights: float
    """Of the decoder's matrices, those that a token meets."""
    num_trained: float
    """Those of them that are trained."""
    num_head_weights: int
    attention_channels: tuple[tuple[int, int | None], ...]
    """Per layer that attends: heads times their width, and the sliding window."""

    @classmethod
    def of(cls, network: Network) -> "NetworkFlops":
        model: Any = network.model
        config = model.config.get_text_config()
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        routed = _routed_share(config)
        tables = (m for m in decoder.modules() if isinstance(m, torch.nn.Embedding))
        embeddings = {p for table in tables for p in table.parameters()}
        weights = [
            (parameter.numel() * (routed if ".experts." in f".{name}" else 1.0), parameter)
            for name, parameter in decoder.named_parameters()
            if parameter.ndim > 1 and parameter not in embeddings
        ]
        return cls(
            num_weights=sum(count for count, _ in weights),
            num_trained=sum(count for count, parameter in weights if parameter.requires_grad),
            num_head_weights=head.weight.numel(),
            attention_channels=_attention(config),
        )

    def forward(self, lengths: Sequence[int], num_logits: int, num_tokens: int) -> float:
        """Of trajectories of these lengths, with logits for so many tokens; together they have
        `num_tokens`, fewer where they share some."""
        linear = 2.0 * (self.num_weights * num_tokens + self.num_head_weights * num_logits)
        return linear + self._attention(lengths)

    def backward(self, lengths: Sequence[int], num_logits: int, num_tokens: int) -> float:
        heads = 4.0 * self.num_head_weights * num_logits
        linear = 2.0 * (self.num_weights + self.num_trained) * num_tokens
        return linear + heads + 2.0 * self._attention(lengths)

    def _attention(self, lengths: Sequence[int]) -> float:
        windows = {window for _, window in self.attention_channels}
        pairs = {window: sum(_num_pairs(n, window) for n in lengths) for window in windows}
        return sum(4.0 * channels * pairs[window] for channels, window in self.attention_channels)


def _num_pairs(length: int, window: int | None) -> float:
    """Of a token and one that it sees.

    >>> _num_pairs(4, None), _num_pairs(4, 2)
    (10.0, 7.0)
    """
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) / 2 + (length - seen) * seen


def _attention(config: Any) -> tuple[tuple[int, int | None], ...]:
    num_heads = getattr(config, "num_attention_heads", 0)
    if not num_heads:
        return ()
    width = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    return tuple(
        (num_heads * width, window if kind == "sliding_attention" else None)
        for kind in kinds
        if kind in ("full_attention", "sliding_attention", "chunked_attention")
    )


def _routed_share(config: Any) -> float:
    """The part of the experts' weights that a token meets."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((n for n in (getattr(config, name, None) for name in names) if n), None)
    return getattr(config, "num_experts_per_tok", num_experts) / num_experts if num_experts else 1.0


MAX_ALLOCATIONS = 100_000


class Tracer:
    """Traces of chosen steps of one rank, or marks of them for Nsight Systems. `begin` and `end`
    stand around the steps; what cannot be written is logged.

        <run>/profiler/step3-rank0.json.gz        chrome://tracing, Perfetto, HTA
        <run>/profiler/step3-rank0.pickle         pytorch.org/memory_viz
    """

    def __init__(
        self, settings: ProfilerSettings, run: Path, device: torch.device, rank: int
    ) -> None:
        self._settings = settings
        for name in ("memory", "nvtx"):
            if getattr(settings, name) and device.type != "cuda":
                raise ConfigError(
                    f"learner.profiler.{name}: was true, and the learner runs on "
                    f"{device.type}; it needs a GPU"
                )
        is_chosen = rank in settings.ranks or not settings.ranks
        self._steps = frozenset(settings.steps) if is_chosen else frozenset()
        self._folder = run / "profiler"
        self._rank = rank
        self._step: int | None = None
        self._profile: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        """Record this step, if it is chosen."""
        if step not in self._steps:
            return
        self._step = step
        if self._settings.memory:
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
        if self._settings.nvtx:
            # What `nsys profile --capture-range=cudaProfilerApi` waits for.
            torch.cuda.profiler.start()
        else:
            self._profile = torch.profiler.profile(record_shapes=True)
            self._profile.start()

    def end(self) -> None:
        """Write what was recorded."""
        if self._step is None:
            return
        path = self._folder / f"step{self._step}-rank{self._rank}"
        if self._settings.nvtx:
            torch.cuda.profiler.stop()
        if self._profile is not None:
            self._profile.stop()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._settings.memory:
                torch.cuda.memory._dump_snapshot(f"{path}.pickle")
                torch.cuda.memory._record_memory_history(enabled=None)
            if self._profile is not None:
                self._profile.export_chrome_trace(f"{path}.json.gz")
        except OSError as error:
            log.warning("the trace %s could not be written: %s", path.name, error)
        else:
            log.info("recorded %s", path)
        self._step = self._profile = None


PHASES = ("plan", "score", "forward", "backward", "update")


class StepProfile:
    """Of the networks of one rank; `run` is the run's folder. Whoever trains begins and ends each
    step, also one that is given up."""

    def __init__(
        self, learner: LearnerSettings, run: Path, networks: Mapping[str, Network], rank: int = 0
    ) -> None:
        device = networks["policy"].device
        self._times = StepTimes(device, with_nvtx=learner.profiler.nvtx)
        self._tracer = Tracer(learner.profiler, run, device, rank)
        self._peak = peak_flops(device, learner.dtype, learner.peak_tflops)
        # The ranks of one block share the trajectories of its data rank.
        self._ranks_per_share = learner.mesh.sequence * learner.mesh.tensor
        self._num_flops = 0.0
        self._pass: AbstractContextManager[None] = nullcontext()
        for network in networks.values():
            self._watch(network)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(f"streamrl/{name}"), self._times.phase(name):
            yield

    def begin(self, step: int) -> None:
        """Count from here on, and trace the step if it is chosen."""
        self._times.clear()
        self._num_flops = 0.0
        self._tracer.begin(step)

    def end(self) -> None:
        self._tracer.end()

    def take(self, train_s: float) -> dict[str, float]:
        """Metrics of the step that ended, whose computation took `train_s`, of this rank."""
        per_s = self._num_flops / self._ranks_per_share / train_s
        mfu = {} if self._peak is None else {"learner/mfu": per_s / self._peak}
        return {**self._times.take(*PHASES), "learner/tflops_per_s": per_s / 1e12, **mfu}

    def _watch(self, network: Network) -> None:
        cost = NetworkFlops.of(network)

        def before(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._pass = self.phase("forward" if torch.is_grad_enabled() else "score")
            self._pass.__enter__()
            packing = (network.shared_prompts(args[0]) or args[0]).packing
            num_logits = len(args[0].targets) if kwargs.get("with_logprobs", True) else 0
            size = (packing.lengths, num_logits, packing.num_tokens)
            self._num_flops += cost.forward(*size)
            if torch.is_grad_enabled():
                self._num_flops += cost.backward(*size)

        def after(module: torch.nn.Module, args: Any, output: NetworkOutput) -> None:
            self._pass.__exit__(None, None, None)
            for column in (output.logprobs, output.entropy, output.values, output.kl):
                if column is not None and column.requires_grad:
                    column.register_hook(self._begin_backward)

        network.register_forward_pre_hook(before, with_kwargs=True)
        network.register_forward_hook(after)

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        if not self._times.is_open("backward"):
            self._times.begin("backward")
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._times.end("backward"))


NUM_STEPS = 20
WINDOW_S = 60.0
_MIN_STEPS = 3


class _Step(NamedTuple):
    step_s: float
    wait_s: float
    train_s: float
    generators: Mapping[str, GeneratorStatus]
    """At its end, by session."""


class ScalingWindow:
    """The last NUM_STEPS steps, or those of WINDOW_S if they are more, with the same generators."""

    def __init__(self, num_ranks: int, free_cores: float = math.nan) -> None:
        self._num_ranks = num_ranks
        self._free_cores = free_cores
        self._steps: deque[_Step] = deque()

    def metrics(
        self, stats: BufferStats, step_s: float, metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Those of the window that ends with this step, whose metrics are given."""
        generators = {status.session: status for status in stats.generators}
        if self._steps and self._steps[-1].generators.keys() != generators.keys():
            self._steps.clear()
        waits = metrics.get("learner/wait_s", 0.0), metrics.get("learner/train_s", 0.0)
        self._steps.append(_Step(step_s, *waits, generators))
        total_s = sum(step.step_s for step in self._steps)
        while len(self._steps) > NUM_STEPS + 1 and total_s - self._steps[0].step_s > WINDOW_S:
            total_s -= self._steps.popleft().step_s
        return {**scaling_metrics(self._load(stats.capacity)), FREE_CORES: self._free_cores}

    def _load(self, capacity: int) -> Load | None:
        """None before there are enough steps, or unless every generator says how busy it is. The
        window begins where its first step ends."""
        first, *steps = self._steps
        last = steps[-1].generators if len(steps) >= _MIN_STEPS else {}
        if not last or not all(status.max_num_groups for status in last.values()):
            return None
        busy = (
            status.max_num_groups * busy_frac(status, first.generators[session])
            for session, status in last.items()
        )
        num_steps = len(steps)
        return Load(
            step_s=sum(step.step_s for step in steps) / num_steps,
            wait_s=sum(step.wait_s for step in steps) / num_steps,
            train_s=sum(step.train_s for step in steps) / num_steps,
            num_generators=len(last),
            num_ranks=self._num_ranks,
            max_groups=sum(status.max_num_groups for status in last.values()),
            busy_groups=sum(busy),
            capacity=capacity,
        )
