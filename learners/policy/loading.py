"""Loads a network: whole on one rank, in shards on several.

If ranks share the parameters, the first one loads the model into host memory and compares packed
passes with plain ones there. Every rank divides a model without memory as the mesh says, allocates
its own shards, and receives their content from the first rank, tensor by tensor.

Invariant: parameters, buffers and the random state are bit for bit those of loading on one rank.
All ranks call it together; the others wait for the first one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain, compress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from learners.batch.training_batch import TrainingBatch
from learners.parallel.mesh import Mesh, assign
from learners.parallel.ranks import Ranks, in_time
from learners.policy import attention
from learners.policy.fusion import fuse_layers
from learners.policy.hugging_face import make_skeleton
from learners.policy.lora import add_adapter
from learners.policy.network import Network
from learners.policy.packing_check import choose_packing
from learners.policy.router_replay import RouterRecords
from learners.policy.sequence_parallel import sequence_block
from learners.policy.sharding import (
    checkpoint_layers,
    is_sharded,
    narrow_frozen,
    require_gpu,
    shard,
    split_matrices,
)
from streamrl.config import RunConfig
from streamrl.config.algorithm.settings import RouterReplay
from streamrl.config.learner import LearnerSettings, LoraSettings, OffloadSettings
from streamrl.errors import ConfigError
from streamrl.model_folder import require_same_tokens
from streamrl.placement.limits import facts_of, require_undivided_images
from streamrl.vision.families import load_pretrained
from streamrl.vision.patches import PatchReader
from streamrl.vision.tower import VisionTower, vision_tower

# Nobody watches the ranks yet, so waiting for a rank that is gone must end by itself.
_LONGEST_LOAD = timedelta(hours=6)


def distribute(
    network: Network,
    mesh: Mesh | None,
    settings: LearnerSettings,
    *,
    is_reference: bool = False,
    router_replay: RouterReplay = "off",
) -> None:
    """Distribute a network in place, as `settings` say; without a mesh, on one rank. Its results
    stay the same. Every rank calls it before an optimizer takes the parameters.

        matrices (tensor) -> tokens (sequence) -> experts (router replay) -> recomputed layers
            -> shards

    Raises:
        ConfigError: the model cannot be divided this way, or the device is the CPU, where
            offloading makes no sense.
    """
    require_gpu(settings.offload, network.device)
    if mesh is not None:
        split_matrices(network.model, mesh)
        network.sequence_block = sequence_block(network.model, mesh, is_packed=network.is_packed)
    if router_replay != "off":
        network.router_records = RouterRecords(network.model, router_replay)
    if every := int(settings.gradient_checkpointing):
        checkpoint_layers(network, every, on_host=settings.offload.activations)
    if is_reference:
        network.requires_grad_(False)
    on_host = is_on_host(settings.offload, is_reference)
    shard(network, mesh, getattr(torch, settings.dtype), on_host=on_host)


def is_on_host(offload: OffloadSettings, is_reference: bool) -> bool:
    """Whether the parameters of this network are in the memory of the host."""
    return offload.parameters or (offload.reference and is_reference)


def load_network(
    config: RunConfig,
    path: Path | str | None = None,
    *,
    has_values: bool = False,
    lora: LoraSettings | None = None,
    is_reference: bool = False,
    mesh: Mesh | None = None,
    setting: str = "model.path",
) -> Network:
    """Load a network with the weights at `path`, by default `model.path`, and distribute it over a
    mesh.

    `setting` names the path; it is not `model.path` for a model other than the policy's.

    Raises:
        ConfigError: there is no model, or the settings of `learner` do not fit it.
    """
    source = _Source(config, str(path or config.model.path), has_values, lora, mesh, setting)
    learner, on_host = config.learner, is_on_host(config.learner.offload, is_reference)
    is_policy = not (has_values or is_reference)
    sharded = mesh if mesh is not None and is_sharded(mesh, on_host) else None
    whole: Network | None = None
    dtype = getattr(torch, learner.dtype)
    narrows = lora is not None and dtype != torch.float32
    if sharded is None:
        device = device_of(learner.device) if mesh is None else mesh.device
        # A GPU with room for a frozen model in the narrow dtype may have none for the wide one.
        network = source.load(torch.device("cpu") if narrows else device)
        if narrows:
            narrow_frozen(network, dtype)
            network.to(device)
            network.device = device
    else:
        # Created first, since the others then wait while the first rank reads or downloads the
        # model.
        waiting = dist.new_group(backend="gloo", timeout=_LONGEST_LOAD)
        whole = source.load(torch.device("cpu")) if sharded.rank == 0 else None
        network = source.without_memory()
        _agree(network, whole, Ranks.of(waiting))
        dist.destroy_process_group(waiting)
        if narrows:
            _narrow_together(network, whole, sharded, dtype)
        network.device = sharded.device
    attention.use_flash_attention(learner.flash_attention, network.device)
    fuse_layers(network, config)
    router_replay = config.algorithm.router_replay if is_policy else "off"
    distribute(network, mesh, learner, is_reference=is_reference, router_replay=router_replay)
    if sharded is not None:
        _allocate(network, sharded.device, on_host=on_host)
        _fill(network, whole, sharded)
    return network


@dataclass(frozen=True)
class _Source:
    """A model's folder or hub name, and how to load it."""

    config: RunConfig
    name: str
    has_values: bool
    lora: LoraSettings | None
    mesh: Mesh | None
    setting: str

    def load(self, device: torch.device) -> Network:
        """Load with weights, in float32, and decide about packing."""
        with self._explained():
            model = load_pretrained(
                self.name,
                dtype=torch.float32,
                trust_remote_code=self._trust,
                setting=self.setting,
                needs_head=not self.has_values,
            )
        self._require_declared_head(model)
        network = self._network(model.to(device))
        if self.config.learner.check_packing:
            choose_packing(network)
        return network

    def without_memory(self) -> Network:
        """The model on the device `meta`."""
        with self._explained():
            facts = AutoConfig.from_pretrained(self.name, trust_remote_code=self._trust)
        # Creating an adapter draws random numbers even there.
        with torch.random.fork_rng([]):
            skeleton = make_skeleton(facts, self.config.model, torch.float32)
            # As if loaded by transformers, though a family may freeze what no gradient reaches.
            return self._network(skeleton.requires_grad_(True))

    def _network(self, model: PreTrainedModel) -> Network:
        if self.lora is not None:
            add_adapter(model, self.lora)
        return Network(
            model,
            temperature=self.config.generator.temperature,
            has_values=self.has_values,
            tower=self._tower(model),
        )

    def _tower(self, model: PreTrainedModel) -> VisionTower | None:
        """The vision tower. Raise ConfigError if ranks would share tokens or matrices of a model
        that sees images."""
        is_policy = self.setting == "model.path"
        place = self.config.model.path if is_policy else self.name
        reader = PatchReader.of(place, trust_remote_code=self._trust, setting=self.setting)
        is_trained = not self.config.learner.freeze_vision_tower
        tower = vision_tower(model, reader, is_trained=is_trained)
        if tower is not None and self.mesh is not None:
            sizes = {axis: self.mesh.size(axis) for axis in ("sequence", "tensor")}
            require_undivided_images(facts_of(model.config), sizes)
        return tower

    def _require_declared_head(self, model: PreTrainedModel) -> None:
        """Raise ConfigError if transformers found an LM head in the files although config.json says
        there is none, which the generators' library or the weights sent to it rely on."""
        engine, may_tie = self.config.generator.engine, bool(model._tied_weights_keys)
        is_denied = may_tie and model.config.tie_word_embeddings and not _is_tied(model)
        if self.setting == "model.path" and engine != "hf" and is_denied:
            of_text, name = model.config.get_text_config(), "tie_word_embeddings"
            is_text = of_text is not model.config and getattr(of_text, name, False)
            place = f"text_config.{name}" if is_text else name
            raise ConfigError(
                f"model.path: {self.name} has an LM head of its own, and its config.json says "
                f"{place}: true, which generator.engine {engine} goes by: set it to false there"
            )

    @property
    def _trust(self) -> bool:
        return self.config.model.trust_remote_code

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.setting}: no model at {self.name!r}: {error}") from error


def require_same_input(config: RunConfig, setting: str, path: str) -> None:
    """Raise ConfigError if the model at `path`, which `setting` names, does not read the policy's
    tokens and images."""
    trust = config.model.trust_remote_code
    vocabularies = []
    for name in (config.model.tokenizer_path, path):
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{setting}: {path}: no tokenizer at {name!r}: {error}") from error
        vocabularies.append(tokenizer.get_vocab())
    require_same_tokens(setting, path, *vocabularies)
    policy = PatchReader.of(config.model.path, trust_remote_code=trust)
    if policy is None:
        return
    other = PatchReader.of(path, trust_remote_code=trust, setting=setting)
    if other is None or other.settings != policy.settings:
        raise ConfigError(
            f"{setting}: {path} does not see images as the policy of {config.model.path} does, "
            "whose prompts it reads: name a model of the same family, or leave it out"
        )


def within_vocabulary(network: Network, batch: TrainingBatch) -> TrainingBatch:
    """The policy's batch for another model; unchanged if that model has all of its tokens.
    Embeddings may be padded with rows that belong to no token, larger models' more."""
    last = network.model.config.get_text_config().vocab_size - 1
    if all(t.token_ids.max() <= last for t in batch.trajectories):
        return batch
    trajectories = (
        structs.replace(t, token_ids=t.token_ids.clip(max=last)) for t in batch.trajectories
    )
    return replace(batch, trajectories=tuple(trajectories))


def _agree(network: Network, whole: Network | None, ranks: Ranks) -> None:
    """Run packed as the first rank has decided, and tie embeddings as in its file, which may differ
    from the configuration."""
    deciding = whole or network
    facts = ranks.first(torch.tensor([deciding.is_packed, _is_tied(deciding.model)]))
    is_packed, is_tied = map(bool, facts.tolist())
    network.run_packed(is_packed)
    if _is_tied(network.model) and not is_tied:
        head: Any = network.model.get_output_embeddings()
        weight = head.weight
        head.weight = Parameter(torch.empty_like(weight), requires_grad=weight.requires_grad)


@torch.no_grad()
def _narrow_together(
    network: Network, whole: Network | None, mesh: Mesh, dtype: torch.dtype
) -> None:
    """`narrow_frozen`, decided by the first rank, which sees which weights the dtype holds
    exactly."""
    if whole is not None:
        narrow_frozen(whole, dtype)
    named, seen = (dict(one.named_parameters()) for one in (network, whole or network))
    is_narrow = torch.tensor([seen[name].dtype == dtype for name in named])
    is_narrow = Ranks(mesh.rank, mesh.world_size).first(is_narrow)
    for parameter in compress(named.values(), is_narrow.tolist()):
        parameter.data = parameter.data.to(dtype)


def _tensors(network: Network, *, remove_duplicate: bool = True) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; without `remove_duplicate` under each of their names."""
    parameters = network.named_parameters(remove_duplicate=remove_duplicate)
    return dict(chain(parameters, network.named_buffers(remove_duplicate=remove_duplicate)))


def _is_tied(model: PreTrainedModel) -> bool:
    head: Any = model.get_output_embeddings()
    embeddings: Any = model.get_input_embeddings()
    return head.weight is embeddings.weight


@torch.no_grad()
def _fill(network: Network, whole: Network | None, mesh: Mesh) -> None:
    """Copy the first rank's `whole` tensors into this rank's shards; the first rank frees them."""
    given = {} if whole is None else _tensors(whole, remove_duplicate=False)
    for name, target in _tensors(network).items():
        tensor = torch.empty(target.shape, dtype=target.dtype, device=mesh.device)
        if given:
            tensor.copy_(given[name])
            if isinstance(given[name], Parameter):
                given[name].data = tensor.new_empty(0, device="cpu")
        with in_time():
            dist.broadcast(tensor, src=0)
        assign(target, tensor)
    ranks = Ranks(mesh.rank, mesh.world_size)
    torch.set_rng_state(ranks.first(torch.get_rng_state()))


def _allocate(network: Network, device: torch.device, *, on_host: bool) -> None:
    """Replace tensors on the device `meta` by allocated ones; tied ones stay tied."""
    names: dict[Parameter, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)

    def allocated(tensor: torch.Tensor) -> torch.Tensor:
        is_offloaded = on_host and isinstance(tensor, DTensor)
        return torch.empty_like(tensor, device="cpu" if is_offloaded else device)

    network._apply(allocated)  # type: ignore[no-untyped-call]
    for first, *others in names.values():
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(network.get_submodule(owner), attribute, network.get_parameter(first))


def device_of(name: str) -> torch.device:
    """The device; `auto` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
