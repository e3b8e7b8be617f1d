"""Contradictions between the sections of a configuration.

A new one is a few lines in the function of its subject: yield a sentence that names both settings;
`$section.key` becomes the setting's name and value. `RunConfig` collects all sentences, so a user
reads them at once.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from streamrl.config.addresses import host_of, is_loopback, lacks_keys, port_of
from streamrl.config.section import twice, unfolded
from streamrl.errors import did_you_mean
from streamrl.types.ranges import MAX_NAMES

if TYPE_CHECKING:
    from streamrl.config.run_config import RunConfig

_OURS_OF_ENGINES = {
    "hf": frozenset({"dtype", "torch_dtype", "trust_remote_code"}),
    "vllm": frozenset(
        {"logprobs_mode", "generation_config", "disable_log_stats", "skip_tokenizer_init"}
    ),
    "sglang": frozenset(
        {"model_path", "host", "port", "enable_metrics", "skip_tokenizer_init", "random_seed"}
    ),
}
"""Arguments of engines that may not be changed, for correctness."""
_COMPARE_SIBLINGS = (
    *("grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "opob"),
    *("otb", "maxrl", "gdpo", "gigpo"),
)
_READ_THE_MEAN = {"rae": "compares them with that of their role", "maxrl": "divides them by it"}
"""Advantages for which rewards must not be centered before, since the mean carries information."""
_SHAPING = (
    *("agentic", "clip", "format_penalty", "length"),
    *("norm_mean", "norm_std", "truncated", "whiten"),
)


def contradictions(c: "RunConfig") -> Iterator[str]:
    """A sentence for each contradiction, by subject. Raises ValidationError if
    `validation.generator`, or `data` of an environment, is itself refused."""
    subjects = (
        *(_of_lengths, _of_groups, _of_what_is_recorded, _of_weights, _of_engines, _of_passes),
        *(_of_learner, _of_rewards, _of_critic, _of_episodes),
        *(_of_validation, _of_validated_checkpoints, _of_environments),
    )
    for sentence in chain.from_iterable(subject(c) for subject in subjects):
        yield NAMED.sub(lambda found: _with_value(c, found[1]), unfolded(sentence))


NAMED = re.compile(r"\$([a-z]+(?:\.[a-z_]+)+)")


def _with_value(c: "RunConfig", name: str) -> str:
    value: Any = c
    for field in name.split("."):
        if field not in getattr(type(value), "model_fields", ()):
            # It stands in a value, and is no setting.
            return f"${name}"
        value = getattr(value, field)
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


def _of_lengths(c: "RunConfig") -> Iterator[str]:
    generator, learner = c.generator, c.learner
    longest = c.data.max_prompt_length + generator.max_new_tokens
    parts = "$data.max_prompt_length + $generator.max_new_tokens"
    by_role = learner.max_tokens_per_forward_pass.model_dump(exclude_none=True)
    limits = {f"learner.max_tokens_per_forward_pass.{role}": n for role, n in by_role.items()}
    limits |= {"learner.max_tokens_per_micro_batch": learner.max_tokens_per_micro_batch}
    setting = min(limits, key=limits.__getitem__)
    if longest > limits[setting]:
        yield f"${setting} cannot hold one trajectory: {parts} = {longest}"
    if c.max_model_len < longest:
        yield f"generator.max_model_len {c.max_model_len} is shorter than {parts}"
    if generator.min_new_tokens > generator.max_new_tokens:
        yield "$generator.min_new_tokens is above $generator.max_new_tokens"
    smallest = c.group_bytes(1 + max(1, generator.min_new_tokens))
    if smallest > c.buffer.max_group_bytes:
        yield f"""$buffer.max_group_bytes refuses every group: with groups of {c.max_group_size} the
            smallest has {smallest} bytes, and one of generator.max_model_len {c.max_model_len}
            tokens {c.group_bytes(c.max_model_len)}"""


def _of_groups(c: "RunConfig") -> Iterator[str]:
    generator, algorithm, learner = c.generator, c.algorithm, c.learner
    if learner.updates_per_batch > learner.groups_per_step:
        yield """$learner.updates_per_batch is more than $learner.groups_per_step: each update
            trains whole groups"""
    if generator.temperature <= 0:
        yield """$generator.temperature makes the $generator.group_size siblings of a prompt alike
            and leaves nothing to learn from; it must be > 0 for training"""
    if algorithm.dynamic_sampling is not None and generator.num_siblings <= 1:
        yield """algorithm.dynamic_sampling leaves out groups whose siblings are alike, and with
            generator.group_size 1 every group would be; use a group, or null"""
    oversample = generator.oversample
    is_cut = oversample.num_siblings > 0 and oversample.keep == "first_finished"
    if is_cut and algorithm.needs_greedy_rewards:
        yield """$algorithm.advantage needs a greedy completion of each prompt, which
            $generator.oversample.keep may cancel; use each_reward"""
    if c.max_num_episodes > MAX_NAMES:
        yield f"""$generator.oversample.num_siblings and {_largest_group(c)} make groups of
            {c.max_num_episodes} episodes; the buffer keeps at most {MAX_NAMES} apart"""
    places = [entry.place or "generator." for entry in c.entries if entry.group_size == 1]
    if places and algorithm.reads_rewards and algorithm.advantage in _COMPARE_SIBLINGS:
        yield f"""$algorithm.advantage compares siblings, and with {places[0]}group_size 1 there are
            none; use reinforce_plus_plus, or a larger group_size"""


def _of_what_is_recorded(c: "RunConfig") -> Iterator[str]:
    """Records of tokens, besides their log-probabilities."""
    generator, algorithm = c.generator, c.algorithm
    if generator.keep_sampling_mask and not generator.top_k:
        yield """generator.keep_sampling_mask records the tokens that each token was sampled among,
            and $generator.top_k sets no bound to them: set top_k, such as 512, which top_p alone
            seldom exceeds"""
    if c.num_top_logprobs and algorithm.proximal != "behavior":
        # A loss of the user's own may have it too, where it is no field.
        yield f"""algorithm.loss_config.divergence_topk {c.num_top_logprobs} compares with the
            candidates that the behavior policy recorded, and $algorithm.proximal has another
            policy: set it to behavior"""
    if c.learner.compile is True and algorithm.records_experts:
        yield """learner.compile compiles the routers, and $algorithm.router_replay stands in for
            what they choose: set one of them off"""
    by_url = algorithm.distillation is not None and algorithm.distillation.by_url
    wanted = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    others = [name for name, value in wanted.items() if getattr(generator, name) != value]
    if by_url and others:
        yield f"""$generator.{others[0]} samples from another distribution than the one whose
            log-probabilities a teacher by url answers with: set it to {wanted[others[0]]:g}, or
            name a model folder in algorithm.distillation.teachers"""
    seen = [n for e in c.entries for n in ("image_key", "video_key") if getattr(e.data, n)]
    if by_url and seen:
        yield f"""data.{seen[0]}: a teacher by url reads token ids alone, in which an image is
            places without content: name a model folder in algorithm.distillation.teachers"""
    if algorithm.num_taught and generator.keep_sampling_mask:
        yield """$algorithm.distillation.top_k compares the likeliest tokens of the vocabulary, and
            generator.keep_sampling_mask leaves the policy some of them: set one of them off"""
    if algorithm.loss == "topr" and not algorithm.reads_rewards:
        yield """$algorithm.loss tells trajectories apart by their rewards, and with
            $algorithm.distillation.reward_coef the teachers alone decide: use another loss, such as
            reinforce, or set reward_coef"""


def _of_weights(c: "RunConfig") -> Iterator[str]:
    weights, buffer, generator = c.weights, c.buffer, c.generator
    bound = buffer.largest_staleness
    if weights.publish_every > bound + 1:
        yield f"""$weights.publish_every with buffer.max_staleness {bound} would deadlock:
            generators would wait for a version that is not published; publish_every may be at most
            {bound + 1}"""
    devices = {"learner": c.learner.device, "generator": generator.device}
    on_cpu = [f"{owner}.device" for owner, device in devices.items() if device == "cpu"]
    if weights.backend == "nccl" and on_cpu:
        yield f"$weights.backend needs GPUs at both ends, but {on_cpu[0]} is cpu"
    crosses = c.learner.device.startswith("cuda") and generator.device == "cpu"
    if weights.backend == "shared" and crosses:
        yield f"""$weights.backend needs generators on the learner's GPU, but learner.device is
            {c.learner.device} and generator.device is cpu; auto, or gloo, crosses"""
    if weights.transport == "store" and generator.url is not None:
        yield f"""$weights.transport with generator.{generator.engine}.url: a generator reads a
            store into memory of its own machine, for an engine that runs there; leave url out, so
            that the generator starts its server, or use broadcast"""
    if why := lacks_keys("weights.address", weights.address, buffer.curve):
        yield why
    if buffer.is_steered and c.algorithm.rollout_is.threshold is None:
        yield """buffer.max_staleness with min and max is steered by the effective sample size of
            importance weights, and with algorithm.rollout_is.threshold null there are none: set it,
            and apply false for the metrics alone, or give a fixed bound"""
    url, address = buffer.url, weights.address
    is_one_port = buffer.binds_url and 0 < port_of(url) == port_of(address)
    is_here = is_loopback(url) and is_loopback(address)
    if is_one_port and (is_here or host_of(url) == host_of(address)):
        yield """$buffer.url and $weights.address are one port, where the buffer and the learner
            listen each: give one of them another"""


def _of_engines(c: "RunConfig") -> Iterator[str]:
    generator, data = c.generator, c.data
    yield from _of_engine_kwargs("generator", generator.engine, generator.engine_kwargs)
    if c.is_validated and {"engine", "engine_kwargs"} & c.validation.generator.keys():
        own = c.validation.engine_settings(generator)
        given = c.validation.generator.get("engine_kwargs", {})
        kwargs = {name: value for name, value in own.engine_kwargs.items() if name in given}
        yield from _of_engine_kwargs("validation.generator", own.engine, kwargs)
    columns = [name for name in ("image_key", "video_key") if getattr(data, name) is not None]
    engine = "sglang" if generator.engine == "sglang" else "vllm.url"
    is_served = engine == "sglang" or (generator.engine == "vllm" and generator.vllm.url)
    if columns and is_served:
        yield f"""data.{columns[0]} with generator.{engine}: a server samples from token ids alone;
            use generator.engine hf, or vllm without a URL"""
    if data.video_key is not None and generator.engine == "vllm":
        yield """data.video_key with $generator.engine, which cuts videos into frames of its own:
            use generator.engine hf"""


def _of_engine_kwargs(place: str, engine: str, kwargs: Mapping[str, Any]) -> Iterator[str]:
    if clash := min(_OURS_OF_ENGINES.get(engine, frozenset()) & kwargs.keys(), default=None):
        yield f"{place}.engine_kwargs.{clash}: is set by StreamRL; leave it out"
    if engine == "sglang":
        yield from _of_sglang(place, kwargs)


def _of_sglang(place: str, kwargs: Mapping[str, Any]) -> Iterator[str]:
    for name in ("tp_size", "tensor_parallel_size"):
        if name in kwargs:
            yield f"{place}.engine_kwargs.{name}: stands elsewhere; set {place}.sglang.tp_size"
    # Replicas of attention alone are within the ranks of tp_size.
    replicas = () if kwargs.get("enable_dp_attention") else ("dp_size", "data_parallel_size")
    for name in (*replicas, "pp_size", "pipeline_parallel_size"):
        if (size := kwargs.get(name, 1)) != 1:
            yield f"""{place}.engine_kwargs.{name}: was {size}, and updates reach the ranks of
                {place}.sglang.tp_size alone in SGLang: leave it out"""


def _of_passes(c: "RunConfig") -> Iterator[str]:
    """Settings of a pass that does not take place."""
    limits, algorithm = c.learner.max_tokens_per_forward_pass, c.algorithm
    if limits.proximal is not None and not c.needs_policy_pass:
        yield """$learner.max_tokens_per_forward_pass.proximal has no pass: with these settings the
            training pass yields the proximal log-probabilities; learner.updates_per_batch or
            learner.epochs > 1 makes one"""
    if limits.values is not None and not algorithm.needs_values:
        yield f"""$learner.max_tokens_per_forward_pass.values has no critic: algorithm.advantage is
            {algorithm.advantage}; only gae has one"""
    has_pass = algorithm.needs_reference_logprobs or algorithm.has_teachers
    if limits.reference is not None and not has_pass:
        yield """$learner.max_tokens_per_forward_pass.reference has no pass of a reference policy or
            a teacher: algorithm.kl_loss.coef (but for kind full) or algorithm.kl_reward.coef > 0
            makes one, and a path in algorithm.distillation.teachers"""
    if c.learner.offload.reference and not (algorithm.needs_reference or algorithm.has_teachers):
        yield """learner.offload.reference has no reference policy to move: algorithm.kl_loss.coef
            and algorithm.kl_reward.coef are 0, and no teacher of algorithm.distillation has a
            path"""


def _of_learner(c: "RunConfig") -> Iterator[str]:
    learner, num_steps, optimizer = c.learner, c.run.max_steps, c.learner.optimizer
    if learner.compile is True and learner.liger_layers is True:
        yield """learner.compile fuses what learner.liger_layers has kernels for: set one of them to
            auto or false"""
    if learner.lora is not None and learner.mesh.tensor != 1:
        yield f"""learner.mesh.tensor: was {learner.mesh.tensor}, and the matrices of learner.lora
            are not divided: set it to 1"""
    if c.run.total_epochs is not None:
        # `load_config` counts them, and leaves none.
        yield """$run.total_epochs is not counted in steps: read the configuration with load_config,
            or set run.max_steps"""
    if optimizer.warmup_steps > num_steps:
        yield """$learner.optimizer.warmup_steps is longer than $run.max_steps; lower it, or set
            warmup_ratio, a share of the steps"""
    num_warmup = optimizer.num_warmup_steps(num_steps)
    num_decay = optimizer.num_decay_steps(num_steps)
    if optimizer.schedule == "warmup_stable_decay" and num_warmup + num_decay > num_steps:
        yield f"""$learner.optimizer.decay_ratio begins within the warm-up: {num_warmup} steps of
            warm-up and {num_decay} of decay are more than $run.max_steps"""
    if c.is_evaluated and "hf_model" not in learner.checkpoint.contents:
        yield """run.evaluate scores the Hugging Face folder in the last checkpoint, and
            learner.checkpoint.contents has no hf_model: add it, or set run.evaluate=false"""


def _of_rewards(c: "RunConfig") -> Iterator[str]:
    algorithm, reward, correction = c.algorithm, c.algorithm.reward, c.algorithm.rollout_is
    shaped = [n for n in _SHAPING if getattr(reward, n) not in (None, 0.0, "train", "mask")]
    if algorithm.needs_greedy_rewards and shaped:
        # The baseline of remax is a score, so what is added to the others would be in no baseline.
        yield f"""$algorithm.advantage subtracts the score of a greedy completion, which
            algorithm.reward.{shaped[0]} does not change; leave it out, or use another advantage"""
    length = reward.length
    first = 0 if length is None else length.max_length - length.buffer
    if length and _is_single_turn(c) and first >= c.generator.max_new_tokens:
        yield f"""algorithm.reward.length begins behind max_length {length.max_length} - buffer
            {length.buffer} tokens, and $generator.max_new_tokens ends every response before; lower
            max_length, or leave it out"""
    centered = [name for name in ("agentic", "norm_mean", "whiten") if getattr(reward, name)]
    if reward.agentic is not None and reward.agentic.method == "identity":
        centered.remove("agentic")
    reads_mean = _READ_THE_MEAN.get(algorithm.advantage)
    if reads_mean and algorithm.reads_rewards and centered:
        yield f"""algorithm.reward.{centered[0]} takes a mean from the rewards before
            $algorithm.advantage {reads_mean}; leave it out, or use another advantage"""
    if algorithm.advantage == "maxrl" and algorithm.kl_reward.coef:
        yield """$algorithm.kl_reward.coef leaves siblings of which none succeeds a mean of noise
            around 0, which $algorithm.advantage divides by; set algorithm.kl_loss.coef, or use
            another advantage"""
    named = getattr(algorithm.advantage_config, "rewards", {})
    if algorithm.advantage == "gdpo" and not named:
        yield """$algorithm.advantage adds the rewards that algorithm.advantage_config.rewards
            names, each normalized, and it names none; set it to metrics of the environment, each
            with its weight, such as {reward/math: 1.0, reward/format: 0.5}"""
    labels = {one.label for one in c.data.rewards}
    own = [name.split("/") for name in named if name.partition("/")[0] == "reward"]
    unknown = ["/".join(parts) for parts in own if not {*parts[1:2]} & labels]
    if algorithm.advantage == "gdpo" and labels and len(c.entries) == 1 and unknown:
        yield (
            f"algorithm.advantage_config.rewards: names {unknown[0]!r}, none of data.rewards; "
            + did_you_mean(unknown[0], [f"reward/{label}" for label in labels])
        )
    weighs_zero = not algorithm.ratio_holds_correction and correction.weighs_tokens_zero
    takes_out = (correction.masks_tokens or weighs_zero) and correction.normalize_by != "kept"
    if algorithm.loss == "geo_mean" and takes_out:
        yield """$algorithm.loss multiplies the weights of a sequence, and a token that
            algorithm.rollout_is gives weight 0 would silence all of it; set
            algorithm.rollout_is.normalize_by=kept, which leaves that token out"""


def _of_critic(c: "RunConfig") -> Iterator[str]:
    algorithm, value = c.algorithm, c.algorithm.value
    own = value.model_dump(exclude_defaults=True)
    if own and not algorithm.needs_values:
        yield f"""$algorithm.value.{next(iter(own))} has no critic to act on: algorithm.advantage is
            {algorithm.advantage}; only gae has one"""
    if not algorithm.needs_values:
        return
    if value.critic_warmup >= c.run.max_steps:
        yield "$algorithm.value.critic_warmup leaves none of $run.max_steps to the policy"
    lr, decay = c.critic_optimizer.lr, c.critic_optimizer.weight_decay
    if lr * decay >= 1:
        yield f"""algorithm.value.weight_decay: the critic has {decay:g} with learning rate {lr:g};
            their product is the share of each weight that a step removes, and must be below 1"""


def _of_episodes(c: "RunConfig") -> Iterator[str]:
    episode, group_s = c.generator.episode, c.generator.group_deadline_s
    if episode.max_turns is not None and _is_single_turn(c):
        yield """$generator.episode.max_turns cannot act: generator.environment single_turn has one
            turn; name another environment, or leave it out"""
    if c.algorithm.echo_coef and _is_single_turn(c):
        yield """$algorithm.echo_coef cannot act: generator.environment single_turn has one turn,
            behind which nothing is read; name another environment, or leave it out"""
    if episode.turn_deadline_s is not None and episode.turn_deadline_s >= group_s:
        yield """$generator.episode.turn_deadline_s cannot act: $generator.group_deadline_s ends the
            whole episode before; it must be below that"""
    if episode.turn_deadline_s is not None and all(e.environment == "agent" for e in c.entries):
        yield """$generator.episode.turn_deadline_s cannot act: agents take turns at their own pace,
            within $generator.group_deadline_s and $generator.agent.silence_s; leave it out"""
    if episode.max_in_flight is not None and episode.max_in_flight < c.max_num_episodes:
        yield f"""$generator.episode.max_in_flight cannot hold one group, which is sampled as
            {c.max_num_episodes} episodes ({_largest_group(c)} and what is sampled beside them)"""
    if episode.truncated != "keep" and c.algorithm.reward.truncated != "train":
        yield """$algorithm.reward.truncated cannot act: $generator.episode.truncated leaves out
            every truncated trajectory; set one or the other"""


def _is_single_turn(c: "RunConfig") -> bool:
    return all(entry.environment == "single_turn" for entry in c.entries)


def _of_validation(c: "RunConfig") -> Iterator[str]:
    v = c.validation
    if c.is_validated and v.num_samples != 1 and v.temperature <= 0:
        yield """$validation.num_samples with $validation.temperature samples the same response each
            time: set a temperature, or num_samples to 1"""
    if isinstance(v.every, int) and v.every % c.weights.publish_every:
        yield """$validation.every is no multiple of $weights.publish_every: versions in between are
            not published, so no validator gets them"""
    if v.num_prompts is not None and v.num_prompts > c.data.num_eval_prompts:
        yield """$validation.num_prompts is more than $data.num_eval_prompts, and no others are held
            out"""
    own = v.engine_settings(c.generator)
    if c.is_validated and own.url is not None and own.url == c.generator.url:
        yield f"""$validation.every needs an engine of its own, which keeps a version while
            generators get newer ones, but {own.url} is the server of the generators: name another
            in validation.generator: {{{own.engine}: {{url: ...}}}}"""
    agents = [entry.setting for entry in c.entries if entry.environment == "agent"]
    if c.is_validated and agents:
        yield f"""$validation.every cannot validate {agents[0]} agent: agents play in the generators
            of a run alone; set validation.every=0"""


def _largest_group(c: "RunConfig") -> str:
    entry = max(c.entries, key=lambda entry: entry.group_size)
    return f"{entry.place or 'generator.'}group_size {entry.group_size}"


def _of_validated_checkpoints(c: "RunConfig") -> Iterator[str]:
    every, checkpoint = c.validation.every, c.learner.checkpoint
    if c.validation.early_stop.patience and not c.is_validated:
        yield """$validation.early_stop.patience needs validations: set validation.every; with
            generator.engine hf, data.eval_source is enough"""
    if not checkpoint.keep_best or not checkpoint.is_best_validated:
        return
    if not isinstance(every, int) or not every:
        yield f"""$learner.checkpoint.best_by needs validation.every as a number, such as
            {checkpoint.every}, so that the versions of checkpoints are validated"""
    elif max(checkpoint.every, every) % min(checkpoint.every, every):
        yield """$validation.every and $learner.checkpoint.every rarely meet, and only a validated
            checkpoint can be the best: make one a multiple of the other"""


def _of_environments(c: "RunConfig") -> Iterator[str]:
    chosen = c.generator.model_dump(
        include={"environment", "environment_kwargs"}, exclude_defaults=True
    )
    if c.environments and chosen:
        yield f"""generator.{min(chosen)} and environments both say what answers the policy; leave
            out one of them"""
    names = [entry.name for entry in c.environments]
    if name := twice(names):
        yield f"environments: {names.count(name)} entries have the name {name!r}"
    is_agent = [entry.environment == "agent" for entry in c.entries]
    of_agents = c.generator.agent.model_dump(exclude_defaults=True)
    if of_agents and not any(is_agent):
        yield f"""generator.agent.{min(of_agents)} cannot act: no environment is agent; set
            generator.environment to agent, or leave it out"""
    if c.parity.is_required and all(is_agent):
        name = "max_gap" if c.parity.max_gap is not None else "max_mean_gap"
        yield f"""$parity.{name} cannot be compared with anything: every environment is agent, and
            agents play in the generators of a run alone; leave it out"""
    limits = [entry.max_groups for entry in c.entries]
    if 0 in limits:
        i, entry = limits.index(0), c.entries[limits.index(0)]
        yield f"""environments.{i}.max_trajectories {entry.max_trajectories} is less than one group
            of {entry.group_size}, so {entry.name} would never play"""
    num_groups = sum(limit or 0 for limit in limits)
    if None not in limits and num_groups < c.learner.groups_per_step:
        yield f"""environments.max_trajectories allow {num_groups} groups of
            $learner.groups_per_step: raise one, or leave it out"""
