accelerate launch \
    --config_file deepspeed_zero3.yaml \
    examples/scripts/grpo_vlm.py \
    --model_name_or_path models/base \
    --dataset_name rows/train.jsonl \
    --output_dir output \
    --learning_rate 1e-5 \
    --gradient_checkpointing \
    --dtype bfloat16 \
    --max_completion_length 64 \
    --use_peft \
    --lora_target_modules q_proj v_proj \
    --log_completions \
    --per_device_train_batch_size 8 \
    --num_generations 8 \
    --max_steps 20 \
    --reward_funcs accuracy_reward
