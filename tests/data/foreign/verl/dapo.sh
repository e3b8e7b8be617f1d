project_name='sums'
exp_name='dapo'
n_resp_per_prompt=16
train_prompt_bsz=32

DATA=(
    data.train_files=rows/train.parquet
    data.prompt_key=prompt
    data.truncation=left
    data.train_batch_size=${train_prompt_bsz}
    data.max_prompt_length=256
    data.max_response_length=256
)
ACTOR=(
    actor_rollout_ref.model.path="${MODEL_PATH:-models/base}"
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.clip_ratio_c=10.0
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    actor_rollout_ref.actor.ppo_mini_batch_size=8
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.grad_clip=1.0
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=hf
    actor_rollout_ref.rollout.n=${n_resp_per_prompt}
    actor_rollout_ref.rollout.top_k=-1
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=0.7
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" \
    algorithm.adv_estimator=grpo \
    algorithm.filter_groups.enable=True \
    algorithm.filter_groups.metric=acc \
    +algorithm.filter_groups.max_num_gen_batches=10 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    trainer.experiment_name="${exp_name}" \
    trainer.project_name="${project_name}" \
    trainer.total_training_steps=40
