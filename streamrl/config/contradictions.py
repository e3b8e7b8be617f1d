"""Contradictions between the sections of a configuration.

A new one is a function here, which returns a sentence that names both settings, or None, and a line
in `CONTRADICTIONS`; `RunConfig` calls them all, so a person reads every sentence at once. They are
in the order of their subjects: sizes, tokens that were not sampled, daemons, the learner, episodes,
validation, environments.
"""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic import ValidationError

from streamrl.config.addresses import host_of, is_loopback, port_of
from streamrl.config.learner import setting_without_pass
from streamrl.errors import did_you_mean

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
"""Arguments of engines that correctness needs as they are."""
_COMPARE_SIBLINGS = (
    *("grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "opob"),
    *("otb", "maxrl", "gdpo", "gigpo"),
)


def micro_batch_too_small(c: "RunConfig") -> str | None:
    longest = c.data.max_prompt_length + c.generator.max_new_tokens
    by_role = c.learner.max_tokens_per_forward_pass.model_dump(exclude_none=True)
    limits = {f"learner.max_tokens_per_forward_pass.{role}": n for role, n in by_role.items()}
    limits |= {"learner.max_tokens_per_micro_batch": c.learner.max_tokens_per_micro_batch}
    setting = min(limits, key=limits.__getitem__)
    if longest <= limits[setting]:
        return None
    return (
        f"{setting} {limits[setting]} cannot hold one trajectory: data.max_prompt_length "
        f"{c.data.max_prompt_length} + generator.max_new_tokens {c.generator.max_new_tokens} = "
        f"{longest}"
    )


def more_updates_than_groups(c: "RunConfig") -> str | None:
    if c.learner.updates_per_batch <= c.learner.groups_per_step:
        return None
    return (
        f"learner.updates_per_batch {c.learner.updates_per_batch} is more than "
        f"learner.groups_per_step {c.learner.groups_per_step}: each update trains whole groups"
    )


def argument_of_streamrl(c: "RunConfig") -> str | None:
    ours = _OURS_OF_ENGINES.get(c.generator.engine, frozenset())
    clash = min(ours & c.generator.engine_kwargs.keys(), default=None)
    return clash and f"generator.engine_kwargs.{clash}: is set by StreamRL; leave it out"


def adapter_of_divided_matrices(c: "RunConfig") -> str | None:
    if c.learner.lora is None or c.learner.mesh.tensor == 1:
        return None
    return (
        f"learner.mesh.tensor: was {c.learner.mesh.tensor}, and the matrices of learner.lora are "
        "not divided: set it to 1"
    )


def model_len_too_short(c: "RunConfig") -> str | None:
    longest = c.data.max_prompt_length + c.generator.max_new_tokens
    if c.max_model_len >= longest:
        return None
    return (
        f"generator.max_model_len {c.max_model_len} is shorter than data.max_prompt_length "
        f"{c.data.max_prompt_length} + generator.max_new_tokens {c.generator.max_new_tokens}"
    )


def min_tokens_above_max(c: "RunConfig") -> str | None:
    if c.generator.min_new_tokens <= c.generator.max_new_tokens:
        return None
    return (
        f"generator.min_new_tokens {c.generator.min_new_tokens} is above generator.max_new_tokens "
        f"{c.generator.max_new_tokens}"
    )


def groups_too_large(c: "RunConfig") -> str | None:
    smallest = c.group_bytes(1 + max(1, c.generator.min_new_tokens))
    if smallest <= c.buffer.max_group_bytes:
        return None
    return (
        f"buffer.max_group_bytes {c.buffer.max_group_bytes} refuses every group: with "
        f"groups of {c.max_group_size} the smallest has {smallest} bytes, and one "
        f"of generator.max_model_len {c.max_model_len} tokens {c.group_bytes(c.max_model_len)}"
    )


def greedy_siblings(c: "RunConfig") -> str | None:
    if c.generator.temperature > 0:
        return None
    return (
        f"generator.temperature 0 makes the generator.group_size {c.generator.group_size} siblings "
        "of a prompt alike and leaves nothing to learn from; it must be > 0 for training"
    )


def nothing_to_differ_from(c: "RunConfig") -> str | None:
    if c.algorithm.dynamic_sampling is None or c.generator.num_siblings > 1:
        return None
    return (
        "algorithm.dynamic_sampling leaves out groups whose siblings are alike, and with "
        "generator.group_size 1 every group would be; use a group, or null"
    )


def finished_before_the_greedy_one(c: "RunConfig") -> str | None:
    oversample = c.generator.oversample
    is_cut = oversample.num_siblings > 0 and oversample.keep == "first_finished"
    if not is_cut or not c.algorithm.needs_greedy_rewards:
        return None
    return (
        f"algorithm.advantage {c.algorithm.advantage} needs a greedy completion of each prompt, "
        "which generator.oversample.keep first_finished may cancel; use each_reward"
    )


def alone_in_its_group(c: "RunConfig") -> str | None:
    alone = [entry for entry in c.entries if entry.group_size == 1]
    compares = c.algorithm.reads_rewards and c.algorithm.advantage in _COMPARE_SIBLINGS
    if not alone or not compares:
        return None
    setting = alone[0].group_size_setting
    return (
        f"algorithm.advantage {c.algorithm.advantage} compares siblings, and with "
        f"{setting} 1 there are none; use reinforce_plus_plus, or a group"
    )


def mask_without_a_bound(c: "RunConfig") -> str | None:
    if not c.generator.keep_sampling_mask or c.generator.top_k:
        return None
    return (
        "generator.keep_sampling_mask records the tokens that each token was sampled among, and "
        "generator.top_k 0 sets no bound to them: set top_k, such as 512, which top_p alone seldom "
        "exceeds"
    )


def divergence_from_another_policy(c: "RunConfig") -> str | None:
    if not c.num_top_logprobs or c.algorithm.proximal == "behavior":
        return None
    return (
        f"algorithm.loss_config.divergence_topk {c.num_top_logprobs} compares with the candidates "
        f"that the behavior policy recorded, and algorithm.proximal {c.algorithm.proximal} has "
        "another policy: set it to behavior"
    )


def compiled_routers(c: "RunConfig") -> str | None:
    if c.learner.compile is not True or not c.algorithm.records_experts:
        return None
    return (
        f"learner.compile compiles the routers, and algorithm.router_replay "
        f"{c.algorithm.router_replay} stands in for what they choose: set one of them off"
    )


def teacher_of_another_distribution(c: "RunConfig") -> str | None:
    found = c.algorithm.distillation
    if found is None or not found.by_url:
        return None
    wanted = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    for name, value in wanted.items():
        if (given := getattr(c.generator, name)) != value:
            return (
                f"generator.{name} {given:g} samples from another distribution than the one whose "
                f"log-probabilities a teacher by url answers with: set it to {value:g}, or name a "
                "model folder in algorithm.distillation.teachers"
            )
    return None


def loss_of_rewards_alone(c: "RunConfig") -> str | None:
    if c.algorithm.reads_rewards or c.algorithm.loss != "topr":
        return None
    return (
        "algorithm.loss topr tells trajectories apart by their rewards, and with "
        "algorithm.distillation.reward_coef 0 the teachers alone decide: use another loss, such as "
        "reinforce, or set reward_coef"
    )


def weights_too_rare(c: "RunConfig") -> str | None:
    if c.weights.publish_every <= c.buffer.max_staleness + 1:
        return None
    return (
        f"weights.publish_every {c.weights.publish_every} with buffer.max_staleness "
        f"{c.buffer.max_staleness} would deadlock: generators would wait for a version that is not "
        f"published; publish_every may be at most {c.buffer.max_staleness + 1}"
    )


def images_to_a_server(c: "RunConfig") -> str | None:
    columns = [name for name in ("image_key", "video_key") if getattr(c.data, name) is not None]
    engine = "sglang" if c.generator.engine == "sglang" else "vllm.url"
    is_served = engine == "sglang" or (c.generator.engine == "vllm" and c.generator.vllm.url)
    if not columns or not is_served:
        return None
    return (
        f"data.{columns[0]} with generator.{engine}: a server samples from token ids alone; use "
        "generator.engine hf, or vllm without a URL"
    )


def videos_to_vllm(c: "RunConfig") -> str | None:
    if c.data.video_key is None or c.generator.engine != "vllm":
        return None
    return (
        "data.video_key with generator.engine vllm, which cuts videos into frames of its own: use "
        "generator.engine hf"
    )


def nccl_without_gpu(c: "RunConfig") -> str | None:
    on_cpu = [
        f"{owner}.device"
        for owner, device in (("learner", c.learner.device), ("generator", c.generator.device))
        if device == "cpu"
    ]
    if c.weights.backend != "nccl" or not on_cpu:
        return None
    return f"weights.backend nccl needs GPUs at both ends, but {on_cpu[0]} is cpu"


def shared_between_gpu_and_cpu(c: "RunConfig") -> str | None:
    crosses = c.learner.device.startswith("cuda") and c.generator.device == "cpu"
    if c.weights.backend != "shared" or not crosses:
        return None
    return (
        "weights.backend shared needs generators on the learner's GPU, but learner.device is "
        f"{c.learner.device} and generator.device is cpu; auto, or gloo, crosses"
    )


def store_for_a_server_elsewhere(c: "RunConfig") -> str | None:
    if c.weights.transport != "store" or c.generator.url is None:
        return None
    return (
        f"weights.transport store with generator.{c.generator.engine}.url: a generator reads a "
        "store into memory of its own machine, for an engine that runs there; leave url out, so "
        "that the generator starts its server, or use broadcast"
    )


def weights_without_keys(c: "RunConfig") -> str | None:
    if c.buffer.curve is not None or is_loopback(c.weights.address):
        return None
    return (
        f"weights.address: was {c.weights.address!r}, which other machines can reach; that needs "
        "keys: make them with `streamrl keys new FOLDER` and set buffer.curve to FOLDER"
    )


def one_address(c: "RunConfig") -> str | None:
    buffer, weights = c.buffer.url, c.weights.address
    if not c.buffer.binds_url or not 0 < port_of(buffer) == port_of(weights):
        return None
    if host_of(buffer) != host_of(weights) and not (is_loopback(buffer) and is_loopback(weights)):
        return None
    return (
        f"buffer.url {buffer} and weights.address {weights} are one port, where the buffer and the "
        "learner listen each: give one of them another"
    )


_SHAPING = (
    "agentic",
    "clip",
    "format_penalty",
    "length",
    "norm_mean",
    "norm_std",
    "truncated",
    "whiten",
)


def memory_setting_without_its_pass(c: "RunConfig") -> str | None:
    return setting_without_pass(c.learner, c.algorithm, c.needs_policy_pass)


def epochs_not_counted(c: "RunConfig") -> str | None:
    """`load_config` counts them, and leaves none."""
    if c.run.total_epochs is None:
        return None
    return (
        f"run.total_epochs {c.run.total_epochs:g} is not counted in steps: read the configuration "
        "with load_config, or set run.max_steps"
    )


def warmup_longer_than_run(c: "RunConfig") -> str | None:
    if c.learner.optimizer.warmup_steps <= c.run.max_steps:
        return None
    return (
        f"learner.optimizer.warmup_steps {c.learner.optimizer.warmup_steps} is longer than "
        f"run.max_steps {c.run.max_steps}"
    )


def decay_within_warmup(c: "RunConfig") -> str | None:
    settings, num_steps = c.learner.optimizer, c.run.max_steps
    num_warmup = settings.num_warmup_steps(num_steps)
    num_decay = settings.num_decay_steps(num_steps)
    if settings.schedule != "warmup_stable_decay" or num_warmup + num_decay <= num_steps:
        return None
    return (
        f"learner.optimizer.decay_ratio {settings.decay_ratio:g} begins within the warm-up: "
        f"{num_warmup} steps of warm-up and {num_decay} of decay are more than run.max_steps "
        f"{num_steps}"
    )


def shaped_beside_a_greedy_reward(c: "RunConfig") -> str | None:
    """The baseline of remax is a score, so what is added to the others would be in no baseline."""
    if not c.algorithm.needs_greedy_rewards:
        return None
    reward = c.algorithm.reward
    for name in _SHAPING:
        if getattr(reward, name) not in (None, 0.0, "train", "mask"):
            return (
                f"algorithm.advantage {c.algorithm.advantage} subtracts the score of a greedy "
                f"completion, which algorithm.reward.{name} does not change; leave it out, or use "
                "another advantage"
            )
    return None


def several_rewards_of_no_name(c: "RunConfig") -> str | None:
    algorithm = c.algorithm
    if algorithm.advantage != "gdpo" or getattr(algorithm.advantage_config, "rewards", None):
        return None
    return (
        "algorithm.advantage gdpo adds the rewards that algorithm.advantage_config.rewards names, "
        "each normalized, and it names none; set it to metrics of the environment, each with its "
        "weight, such as {reward/math: 1.0, reward/format: 0.5}"
    )


def reward_that_is_none_of_the_run(c: "RunConfig") -> str | None:
    named = getattr(c.algorithm.advantage_config, "rewards", ())
    labels = {reward.label for reward in c.data.rewards}
    if c.algorithm.advantage != "gdpo" or not labels or len(c.entries) > 1:
        return None
    for name in named:
        prefix, _, label = name.partition("/")
        if prefix == "reward" and label.partition("/")[0] not in labels:
            known = [f"reward/{label}" for label in labels]
            return (
                f"algorithm.advantage_config.rewards: names {name!r}, none of data.rewards; "
                + did_you_mean(name, known)
            )
    return None


def token_that_silences_its_sequence(c: "RunConfig") -> str | None:
    """geo_mean multiplies the weights of a sequence."""
    correction, weights_act = c.algorithm.rollout_is, not c.algorithm.ratio_holds_correction
    if c.algorithm.loss != "geo_mean" or correction.normalize_by == "kept":
        return None
    if not (correction.masks_tokens or (weights_act and correction.weighs_tokens_zero)):
        return None
    return (
        "algorithm.loss geo_mean multiplies the weights of a sequence, and a token that "
        "algorithm.rollout_is gives weight 0 would silence all of it; set "
        "algorithm.rollout_is.normalize_by=kept, which leaves that token out"
    )


def setting_without_a_critic(c: "RunConfig") -> str | None:
    own = c.algorithm.value.model_dump(exclude_defaults=True)
    if c.algorithm.needs_values or not own:
        return None
    name, value = next(iter(own.items()))
    return (
        f"algorithm.value.{name} {value} has no critic to act on: "
        f"algorithm.advantage is {c.algorithm.advantage}; only gae has one"
    )


def warmup_longer_than_run_of_a_critic(c: "RunConfig") -> str | None:
    warmup = c.algorithm.value.critic_warmup
    if warmup < c.run.max_steps or not c.algorithm.needs_values:
        return None
    return (
        f"algorithm.value.critic_warmup {warmup} leaves none of run.max_steps {c.run.max_steps} "
        "to the policy"
    )


def decay_of_all_of_a_critic(c: "RunConfig") -> str | None:
    lr, decay = c.critic_optimizer.lr, c.critic_optimizer.weight_decay
    if not c.algorithm.needs_values or lr * decay < 1:
        return None
    return (
        f"algorithm.value.weight_decay: the critic has {decay:g} with learning rate {lr:g}; their "
        "product is the share of each weight that a step removes, and must be below 1"
    )


def evaluation_without_a_model(c: "RunConfig") -> str | None:
    if not c.run.evaluate or "hf_model" in c.learner.checkpoint.contents:
        return None
    return (
        "run.evaluate scores the Hugging Face folder in the last checkpoint, and "
        "learner.checkpoint.contents has no hf_model: add it, or set run.evaluate=false"
    )


def turns_of_a_single_turn(c: "RunConfig") -> str | None:
    max_turns = c.generator.episode.max_turns
    if max_turns is None or any(entry.environment != "single_turn" for entry in c.entries):
        return None
    return (
        f"generator.episode.max_turns {max_turns} cannot act: generator.environment single_turn "
        "has one turn; name another environment, or leave it out"
    )


def turn_deadline_after_that_of_the_episode(c: "RunConfig") -> str | None:
    turn_s, episode_s = c.generator.episode.turn_deadline_s, c.generator.group_deadline_s
    if turn_s is None or turn_s < episode_s:
        return None
    return (
        f"generator.episode.turn_deadline_s {turn_s:g} cannot act: generator.group_deadline_s "
        f"{episode_s:g} ends the whole episode before; it must be below that"
    )


def group_beyond_what_may_be_in_flight(c: "RunConfig") -> str | None:
    most = c.generator.episode.max_in_flight
    num_episodes = c.max_num_episodes
    if most is None or most >= num_episodes:
        return None
    return (
        f"generator.episode.max_in_flight {most} cannot hold one group, which is sampled as "
        f"{num_episodes} episodes (group_size {c.max_group_size} and what is "
        "sampled beside them)"
    )


def truncated_of_nothing(c: "RunConfig") -> str | None:
    shaping = c.algorithm.reward.truncated
    if c.generator.episode.truncated == "keep" or shaping == "train":
        return None
    return (
        f"algorithm.reward.truncated {shaping} cannot act: generator.episode.truncated drop leaves "
        "out every truncated trajectory; set one or the other"
    )


def alike_samples(c: "RunConfig") -> str | None:
    v = c.validation
    if not c.is_validated or v.num_samples == 1 or v.temperature > 0:
        return None
    return (
        f"validation.num_samples {v.num_samples} with validation.temperature 0 samples the same "
        "response each time: set a temperature, or num_samples to 1"
    )


def never_published(c: "RunConfig") -> str | None:
    every, publish_every = c.validation.every, c.weights.publish_every
    if not isinstance(every, int) or every % publish_every == 0:
        return None
    return (
        f"validation.every {every} is no multiple of weights.publish_every {publish_every}: "
        "versions in between are not published, so no validator gets them"
    )


def more_prompts_than_held_out(c: "RunConfig") -> str | None:
    wanted, held_out = c.validation.num_prompts, c.data.num_eval_prompts
    if wanted is None or wanted <= held_out:
        return None
    return (
        f"validation.num_prompts {wanted} is more than data.num_eval_prompts {held_out}, and no "
        "others are held out"
    )


def bad_generator(c: "RunConfig") -> str | None:
    if names := c.validation.sampling_in_generator:
        return (
            f"validation.generator: {names[0]} has no effect there; set validation.{_own(names[0])}"
        )
    try:
        engine = c.validation.engine_settings(c.generator)
    except ValidationError as error:
        return f"validation.generator: {_sentence(error, tuple(type(c.generator).model_fields))}"
    if not c.is_validated or engine.url is None or engine.url != c.generator.url:
        return None
    return (
        f"validation.every {c.validation.every} needs an engine of its own, which keeps a version "
        f"while generators get newer ones, but {engine.url} is the server of the generators: name "
        f"another in validation.generator: {{{engine.engine}: {{url: ...}}}}"
    )


def early_stop_without_validation(c: "RunConfig") -> str | None:
    patience = c.validation.early_stop.patience
    if c.is_validated or not patience:
        return None
    return f"validation.early_stop.patience {patience} needs validations: set validation.every"


def best_without_validation(c: "RunConfig") -> str | None:
    checkpoint = c.learner.checkpoint
    if not checkpoint.keep_best or not checkpoint.is_best_validated:
        return None
    every = c.validation.every
    if not isinstance(every, int) or not every:
        return (
            f"learner.checkpoint.best_by {checkpoint.best_by} needs validation.every as a number, "
            f"such as {checkpoint.every}, so that the versions of checkpoints are validated"
        )
    if max(checkpoint.every, every) % min(checkpoint.every, every) == 0:
        return None
    return (
        f"validation.every {every} and learner.checkpoint.every {checkpoint.every} "
        "rarely meet, and only a validated checkpoint can be the best: make one a multiple of the "
        "other"
    )


def agents_of_others(c: "RunConfig") -> str | None:
    agents = [entry.setting for entry in c.entries if entry.environment == "agent"]
    if not c.is_validated or not agents:
        return None
    return (
        f"validation.every {c.validation.every} cannot validate {agents[0]} agent: agents play in "
        "the generators of a run alone; set validation.every=0"
    )


def _own(name: str) -> str:
    return "num_samples" if name == "group_size" else name


def _sentence(error: ValidationError, allowed: tuple[str, ...]) -> str:
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"generator has no {name!r}; {did_you_mean(name, allowed)}"
    return f"{name} was {first['input']!r}: {first['msg']}"


def environment_twice(c: "RunConfig") -> str | None:
    is_set = c.generator.model_fields_set & {"environment", "environment_kwargs"}
    default = type(c.generator)()
    if not c.environments or all(getattr(c.generator, n) == getattr(default, n) for n in is_set):
        return None
    return (
        f"generator.{min(is_set)} and environments both say what answers the policy; leave out one "
        "of them"
    )


def one_name_for_two(c: "RunConfig") -> str | None:
    counts = Counter(entry.name for entry in c.environments)
    twice = next((name for name, count in counts.items() if count > 1), None)
    return (
        None if twice is None else f"environments: {counts[twice]} entries have the name {twice!r}"
    )


def agent_of_no_environment(c: "RunConfig") -> str | None:
    agent = c.generator.agent
    if agent == type(agent)() or any(entry.environment == "agent" for entry in c.entries):
        return None
    return (
        f"generator.agent.{min(agent.model_fields_set)} cannot act: no environment is agent; set "
        "generator.environment to agent, or leave it out"
    )


def limit_below_a_group(c: "RunConfig") -> str | None:
    for i, entry in enumerate(c.entries):
        if entry.max_groups == 0:
            return (
                f"environments.{i}.max_trajectories {entry.max_trajectories} is less than one "
                f"group of {entry.group_size}, so {entry.name} would never play"
            )
    return None


def limits_leave_prompts(c: "RunConfig") -> str | None:
    limits = [entry.max_groups for entry in c.entries]
    if None in limits or sum(n or 0 for n in limits) >= c.learner.groups_per_step:
        return None
    return (
        f"environments.max_trajectories allow {sum(n or 0 for n in limits)} groups of "
        f"learner.groups_per_step {c.learner.groups_per_step}: raise one, or leave it out"
    )


def parity_of_agents_alone(c: "RunConfig") -> str | None:
    is_measurable = any(entry.environment != "agent" for entry in c.entries)
    if not c.parity.is_required or is_measurable:
        return None
    name = "max_gap" if c.parity.max_gap is not None else "max_mean_gap"
    return (
        f"parity.{name} {getattr(c.parity, name)} cannot be compared with anything: every "
        "environment is agent, and agents play in the generators of a run alone; leave it out"
    )


CONTRADICTIONS: tuple[Callable[["RunConfig"], str | None], ...] = (
    micro_batch_too_small,
    memory_setting_without_its_pass,
    more_updates_than_groups,
    adapter_of_divided_matrices,
    argument_of_streamrl,
    model_len_too_short,
    min_tokens_above_max,
    greedy_siblings,
    mask_without_a_bound,
    divergence_from_another_policy,
    compiled_routers,
    teacher_of_another_distribution,
    loss_of_rewards_alone,
    weights_too_rare,
    images_to_a_server,
    store_for_a_server_elsewhere,
    videos_to_vllm,
    nccl_without_gpu,
    shared_between_gpu_and_cpu,
    weights_without_keys,
    epochs_not_counted,
    warmup_longer_than_run,
    decay_within_warmup,
    setting_without_a_critic,
    warmup_longer_than_run_of_a_critic,
    decay_of_all_of_a_critic,
    shaped_beside_a_greedy_reward,
    several_rewards_of_no_name,
    reward_that_is_none_of_the_run,
    token_that_silences_its_sequence,
    alone_in_its_group,
    nothing_to_differ_from,
    finished_before_the_greedy_one,
    groups_too_large,
    one_address,
    evaluation_without_a_model,
    turns_of_a_single_turn,
    turn_deadline_after_that_of_the_episode,
    group_beyond_what_may_be_in_flight,
    truncated_of_nothing,
    alike_samples,
    never_published,
    more_prompts_than_held_out,
    bad_generator,
    early_stop_without_validation,
    best_without_validation,
    agents_of_others,
    environment_twice,
    one_name_for_two,
    agent_of_no_environment,
    parity_of_agents_alone,
    limit_below_a_group,
    limits_leave_prompts,
)
