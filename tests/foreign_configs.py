"""Small configurations of other trainers, written for these tests after their documented schemas."""

from __future__ import annotations

import json

AI_TOOLKIT = """
job: extension
config:
  name: moss_v1
  process:
    - type: diffusion_trainer
      training_folder: runs
      device: cuda:1
      trigger_word: mosskin
      network:
        type: lokr
        linear: 16
        lokr_full_rank: true
        lokr_factor: 8
        network_kwargs:
          only_if_contains: ["attn1", "ff.net"]
          ignore_if_contains: ["norm"]
      save: {dtype: bf16, save_every: 200, max_step_saves_to_keep: 3, save_format: diffusers}
      datasets:
        - folder_path: data/moss
          mask_path: data/masks
          caption_ext: caption
          resolution: [512, 768]
          num_repeats: 3
          flip_x: true
        - {folder_path: data/others, is_reg: true, resolution: 768}
      train:
        batch_size: 2
        steps: 1200
        lr: 1e-4
        optimizer: prodigy
        optimizer_params: {weight_decay: 0.02, d_coef: "1e-1"}
        gradient_accumulation_steps: 4
        timestep_type: linear
        dtype: float16
        ema_config: {use_ema: true, ema_decay: 0.99}
        loss_type: mae
      model: {name_or_path: models/anima, arch: anima, quantize: true, qtype: qfloat8, low_vram: false}
      sample:
        sample_every: 100
        width: 768
        height: 1024
        seed: 7
        walk_seed: true
        guidance_scale: 4
        sample_steps: 24
        samples:
          - {prompt: "[trigger] in rain", seed: 11, neg: blurry}
          - prompt: "[name] at night"
meta: {name: "[name]", version: '1.0'}
"""

ONETRAINER = {
    "__version": 10,
    "training_method": "LORA",
    "model_type": "ANIMA",
    "base_model_name": "models/anima",
    "workspace_dir": "runs/moss",
    "output_model_destination": "models/moss.safetensors",
    "output_dtype": "FLOAT_16",
    "output_model_format": "COMFY_LORA",
    "train_dtype": "FLOAT_16",
    "peft_type": "LOKR",
    "lora_alpha": 8.0,
    "lokr_dim": 12,
    "lokr_decompose_factor": 4,
    "layer_filter": "attn1,ff",
    "layer_filter_regex": False,
    "learning_rate": 0.0002,
    "learning_rate_scheduler": "COSINE",
    "learning_rate_min_factor": 0.1,
    "learning_rate_warmup_steps": 0.05,
    "epochs": 20,
    "batch_size": 2,
    "resolution": "512,768",
    "clip_grad_norm": None,
    "ema": "GPU",
    "ema_decay": 0.99,
    "ema_update_step_interval": 2,
    "timestep_distribution": "LOGIT_NORMAL",
    "noising_weight": 0.5,
    "noising_bias": 0.0,
    "timestep_shift": 3.0,
    "mse_strength": 0.0,
    "huber_strength": 1.0,
    "huber_delta": 0.2,
    "masked_training": True,
    "normalize_masked_area_loss": True,
    "transformer": {"train": True, "weight_dtype": "FLOAT_8", "gradient_checkpointing": False},
    "text_encoder": {"train": False, "weight_dtype": "BFLOAT_16"},
    "unet": {"train": False},
    "optimizer": {"optimizer": "ADAMW", "beta1": 0.9, "beta2": 0.95, "eps": None, "fused": True, "nnmf_factor": False},
    "concept_file_name": "concepts.json",
    "samples": [
        {"enabled": True, "prompt": "moss", "negative_prompt": "blurry", "seed": 5, "width": 768, "height": 512},
        {"enabled": False, "prompt": "never"},
    ],
    "sample_after": 2,
    "sample_after_unit": "EPOCH",
    "save_every": 500,
    "save_every_unit": "STEP",
    "backup_after": 30,
    "backup_after_unit": "MINUTE",
    "tensorboard": False,
}
ONETRAINER_CONCEPTS = [
    {
        "name": "moss",
        "path": "data/moss",
        "enabled": True,
        "type": "STANDARD",
        "balancing": 3.0,
        "balancing_strategy": "REPEATS",
        "text_variations": 4,
        "image": {"enable_random_flip": False, "enable_crop_jitter": False},
        "text": {"prompt_source": "sample", "enable_tag_shuffling": True, "tag_delimiter": ",", "keep_tags_count": 2},
    },
    {"name": "others", "path": "data/others", "type": "PRIOR_PREDICTION", "balancing": 0.4},
    {"name": "kept", "path": "data/kept", "type": "VALIDATION"},
    {"name": "off", "path": "data/off", "enabled": False},
]

SIMPLETUNER = {
    "--model_type": "lora",
    "--model_family": "anima",
    "--lora_type": "standard",
    "--lora_rank": 32,
    "--pretrained_model_name_or_path": "models/anima",
    "--output_dir": "runs/moss",
    "--data_backend_config": "config/multidatabackend.json",
    "--optimizer": "adamw_bf16",
    "--optimizer_config": "weight_decay=0.05,eps=1e-7",
    "--learning_rate": "1e-4",
    "--lr_scheduler": "polynomial",
    "--lr_warmup_steps": 100,
    "--max_train_steps": 3000,
    "--num_train_epochs": 0,
    "--train_batch_size": 2,
    "--mixed_precision": "bf16",
    "--base_model_precision": "int8-quanto",
    "--gradient_checkpointing": "true",
    "--flow_schedule_shift": 2.5,
    "--flow_sigmoid_scale": 1.2,
    "--use_ema": "true",
    "--ema_decay": 0.99,
    "--caption_dropout_probability": 0.1,
    "--checkpoint_step_interval": 250,
    "--checkpoints_total_limit": 2,
    "--resume_from_checkpoint": "latest",
    "--validation_prompt": "moss on a stone",
    "--validation_negative_prompt": "blurry",
    "--validation_step_interval": 250,
    "--validation_seed": 42,
    "--validation_resolution": "768x1024,512x512",
    "--validation_num_inference_steps": 24,
    "--validation_guidance": 4.0,
    "--report_to": "tensorboard",
    "--seed": 3,
}
SIMPLETUNER_BACKENDS = [
    {
        "id": "moss",
        "type": "local",
        "instance_data_dir": "data/moss",
        "caption_strategy": "textfile",
        "crop": True,
        "crop_aspect": "preserve",
        "crop_style": "random",
        "resolution": 1.05,
        "resolution_type": "area",
        "minimum_image_size": 0,
        "repeats": 4,
        "cache_dir_vae": "cache/vae",
        "conditioning_data": "masks",
    },
    {"id": "plain", "type": "local", "instance_data_dir": "data/plain", "caption_strategy": "instanceprompt",
     "instance_prompt": "a stone", "crop": False, "resolution": 512},
    {"id": "masks", "dataset_type": "conditioning", "conditioning_type": "mask", "instance_data_dir": "data/masks"},
    {"id": "text", "type": "local", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache/text"},
]  # fmt: skip

DIFFUSION_PIPE = """
output_dir = 'runs/moss'
dataset = 'moss_dataset.toml'
epochs = 40
micro_batch_size_per_gpu = [[512, 4], [1024, 1]]
pipeline_stages = 1
gradient_accumulation_steps = 2
gradient_clipping = 0.5
warmup_steps = 50
blocks_to_swap = 12
save_every_n_epochs = 2
checkpoint_every_n_minutes = 60
activation_checkpointing = 'unsloth'
partition_method = 'parameters'
save_dtype = 'bfloat16'
caching_batch_size = 2
steps_per_print = 1
eval_every_n_epochs = 1

[model]
type = 'anima'
transformer_path = 'models/anima.safetensors'
vae_path = 'models/vae.safetensors'
qwen_path = 'models/qwen3'
dtype = 'bfloat16'
transformer_dtype = 'float8'
timestep_sample_method = 'logit_normal'
sigmoid_scale = 1.3
shift = 3.0
llm_adapter_lr = 0.0

[adapter]
type = 'lora'
rank = 24
dtype = 'bfloat16'

[optimizer]
type = 'adamw_optimi'
lr = 2e-5
betas = [0.9, 0.99]
weight_decay = 0.01

[monitoring]
enable_wandb = false
"""
DIFFUSION_PIPE_DATASET = """
resolutions = [512, 1024]
enable_ar_bucket = true
min_ar = 0.5
max_ar = 2.0
num_ar_buckets = 7
cache_shuffle_num = 5
cache_shuffle_delimiter = ', '

[[directory]]
path = 'data/moss'
num_repeats = 2

[[directory]]
path = 'data/others'
mask_path = 'data/masks'
resolutions = [768]
"""

KOHYA = """
[model_arguments]
pretrained_model_name_or_path = "models/anima.safetensors"
qwen3 = "models/qwen3.safetensors"
vae = "models/vae.safetensors"
[network_arguments]
network_module = "networks.lora_anima"
network_dim = 16
network_alpha = 16
network_args = ["rank_dropout=0.1"]
[training_arguments]
output_dir = "runs/moss"
output_name = "moss"
train_data_dir = "data"
max_train_steps = 400
learning_rate = 1e-4
mixed_precision = "fp16"
cache_latents = true
sdpa = true
"""
KOHYA_DATASET = """
[general]
caption_extension = ".txt"
[[datasets]]
resolution = 768
batch_size = 2
  [[datasets.subsets]]
  image_dir = "data/moss"
  num_repeats = 3
"""
KOHYA_GUI = {
    "LoRA_type": "Standard",
    "LyCORIS_preset": "full",
    "additional_parameters": "",
    "epoch": 10,
    "lr_warmup": 5,
    "max_resolution": "768,768",
    "model_list": "custom",
    "network_dim": 16,
    "output_dir": "runs/moss",
    "pretrained_model_name_or_path": "models/anima.safetensors",
    "sdxl": False,
    "train_batch_size": 2,
    "train_data_dir": "data",
    "xformers": "sdpa",
}
OURS = """
[model]
pretrained_model_name_or_path = "pico-anima"
precision = "planned-half"
[network]
algorithm = "lokr"
network_dim = 4
[optimizer]
optimizer_type = "AdamW"
learning_rate = 1e-3
[training]
max_train_steps = 100
[saving]
output_dir = "runs/moss"
[[datasets]]
resolution = 256
  [[datasets.subsets]]
  image_dir = "data/moss"
"""
COMMAND_LINE = (
    "accelerate launch --num_cpu_threads_per_process 1 anima_train_network.py "
    '--pretrained_model_name_or_path="models/anima.safetensors" --qwen3 models/qwen3.safetensors '
    "--vae models/vae.safetensors --network_module networks.lora_anima --network_dim 16 --network_alpha 16 "
    "--output_dir runs/moss --max_train_steps 400 --learning_rate 1e-4 --train_data_dir data"
)

FILES = {
    "finitune": ("ours.toml", OURS),
    "sd-scripts training TOML": ("kohya.toml", KOHYA),
    "sd-scripts dataset TOML": ("kohya_dataset.toml", KOHYA_DATASET),
    "kohya_ss GUI JSON": ("gui.json", json.dumps(KOHYA_GUI)),
    "ai-toolkit": ("moss.yaml", AI_TOOLKIT),
    "OneTrainer": ("onetrainer.json", json.dumps(ONETRAINER)),
    "OneTrainer concepts": ("concepts.json", json.dumps(ONETRAINER_CONCEPTS)),
    "SimpleTuner": ("config.json", json.dumps(SIMPLETUNER)),
    "SimpleTuner data backends": ("multidatabackend.json", json.dumps(SIMPLETUNER_BACKENDS)),
    "diffusion-pipe": ("moss.toml", DIFFUSION_PIPE),
    "diffusion-pipe dataset": ("moss_dataset.toml", DIFFUSION_PIPE_DATASET),
}
"""A file name and its text, by the kind that it should be recognised as."""
