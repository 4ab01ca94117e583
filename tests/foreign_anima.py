"""Small trainings of Anima for six programs, as people write them; paths are relative to where the command is given.

The pictures lie in `pictures`, and in `numbered/2_blue ink` as kohya's folders have them.
"""

from __future__ import annotations

import json

KOHYA = """
[model_arguments]
pretrained_model_name_or_path = "pico-anima"
qwen3 = "models/qwen_3_06b_base.safetensors"
vae = "models/qwen_image_vae.safetensors"
dataset_config = "dataset.toml"

[network_arguments]
network_module = "networks.lora_anima"
network_dim = 4
network_alpha = 2
network_train_unet_only = true
network_args = ["rank_dropout=0.1", "train_llm_adapter=False", "exclude_patterns=['.*q_proj.*']"]

[optimizer_arguments]
optimizer_type = "AdamW"
optimizer_args = ["weight_decay=0.01", "betas=(0.9, 0.99)"]
learning_rate = 1e-3
lr_scheduler = "cosine"
lr_warmup_steps = 0

[training_arguments]
output_dir = "run"
output_name = "blue_ink"
save_model_as = "safetensors"
save_precision = "bf16"
max_train_steps = 2
mixed_precision = "bf16"
gradient_checkpointing = true
timestep_sampling = "sigmoid"
discrete_flow_shift = 1.0
seed = 42
cache_latents = true
cache_latents_to_disk = true
cache_text_encoder_outputs = true
max_data_loader_n_workers = 2
persistent_data_loader_workers = true
sdpa = true
logging_dir = "logs"
log_prefix = "blue"
"""
KOHYA_DATASET = """
[general]
caption_extension = ".txt"
enable_bucket = true
shuffle_caption = false
keep_tokens = 1

[[datasets]]
resolution = [64, 64]
batch_size = 1
min_bucket_reso = 64
max_bucket_reso = 128
bucket_no_upscale = false

  [[datasets.subsets]]
  image_dir = "pictures"
  num_repeats = 2
"""
FLAGS = """accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 anima_train_network.py \\
  --pretrained_model_name_or_path=pico-anima --qwen3 models/qwen3.safetensors --vae models/vae.safetensors \\
  --network_module networks.lora_anima --network_dim 4 --network_alpha 2 --network_train_unet_only \\
  --network_args "rank_dropout=0.1" "module_dropout=0.1" --optimizer_type AdamW --optimizer_args weight_decay=0.01 \\
  --learning_rate 1e-3 --max_train_steps 2 --train_batch_size 1 --mixed_precision bf16 --seed 42 \\
  --train_data_dir "numbered" --resolution 64,64 --enable_bucket --min_bucket_reso 64 --caption_extension .txt \\
  --output_dir run --output_name blue_ink --save_precision float"""

KOHYA_GUI = {
    "LoRA_type": "Standard",
    "LyCORIS_preset": "full",
    "additional_parameters": "",
    "anima_checkbox": True,
    "anima_qwen3": "models/qwen3.safetensors",
    "anima_vae": "models/vae.safetensors",
    "enable_bucket": True,
    "epoch": 1,
    "learning_rate": 0.001,
    "lr_scheduler": "constant",
    "lr_warmup": 0,
    "max_resolution": "64,64",
    "max_train_steps": 2,
    "min_bucket_reso": 64,
    "mixed_precision": "fp16",
    "model_list": "custom",
    "network_alpha": 2,
    "network_dim": 4,
    "optimizer": "AdamW",
    "output_dir": "run",
    "output_name": "blue_ink",
    "pretrained_model_name_or_path": "pico-anima",
    "save_precision": "float",
    "sdxl": False,
    "train_batch_size": 1,
    "train_data_dir": "numbered",
    "unet_lr": 0.001,
    "xformers": "sdpa",
}
AI_TOOLKIT = """
job: extension
config:
  name: blue_ink
  process:
    - type: diffusion_trainer
      training_folder: run
      device: cpu
      trigger_word: blue ink
      network: {type: lora, linear: 4, linear_alpha: 2}
      save: {dtype: float32, save_every: 2, max_step_saves_to_keep: 4}
      datasets:
        - folder_path: pictures
          caption_ext: txt
          caption_dropout_rate: 0.05
          cache_latents_to_disk: true
          resolution: [64]
      train:
        batch_size: 1
        steps: 2
        gradient_accumulation: 1
        train_unet: true
        train_text_encoder: false
        gradient_checkpointing: true
        noise_scheduler: flowmatch
        optimizer: adamw
        lr: 1e-3
        dtype: bf16
      model: {name_or_path: pico-anima, arch: anima, quantize: false}
      sample:
        sampler: flowmatch
        sample_every: 2
        width: 64
        height: 64
        samples: [{prompt: "[trigger] apple"}]
        neg: ""
        seed: 42
        guidance_scale: 4
        sample_steps: 1
"""
ONETRAINER = {
    "__version": 10,
    "training_method": "LORA",
    "model_type": "ANIMA",
    "base_model_name": "pico-anima",
    "workspace_dir": "run",
    "output_model_destination": "models/blue_ink.safetensors",
    "output_dtype": "FLOAT_32",
    "output_model_format": "SAFETENSORS",
    "train_dtype": "FLOAT_32",
    "peft_type": "LORA",
    "lora_rank": 4,
    "lora_alpha": 2.0,
    "learning_rate": 0.001,
    "learning_rate_scheduler": "CONSTANT",
    "learning_rate_warmup_steps": 0,
    "epochs": 1,
    "batch_size": 2,
    "resolution": "64",
    "timestep_distribution": "UNIFORM",
    "optimizer": {"optimizer": "ADAMW", "weight_decay": 0.01},
    "concept_file_name": "concepts.json",
}
ONETRAINER_CONCEPTS = [
    {
        "name": "blue ink",
        "path": "pictures",
        "enabled": True,
        "type": "STANDARD",
        "balancing": 1.0,
        "balancing_strategy": "REPEATS",
        "image": {"enable_random_flip": False, "enable_crop_jitter": False},
        "text": {"prompt_source": "sample", "enable_tag_shuffling": False},
    }
]
SIMPLETUNER = {
    "--model_type": "lora",
    "--model_family": "anima",
    "--lora_type": "standard",
    "--lora_rank": 4,
    "--lora_alpha": 4,
    "--pretrained_model_name_or_path": "pico-anima",
    "--output_dir": "run",
    "--data_backend_config": "config/multidatabackend.json",
    "--optimizer": "adamw_bf16",
    "--learning_rate": "1e-3",
    "--lr_scheduler": "constant",
    "--lr_warmup_steps": 0,
    "--max_train_steps": 2,
    "--num_train_epochs": 0,
    "--train_batch_size": 1,
    "--mixed_precision": "bf16",
    "--checkpoint_step_interval": 2,
    "--gradient_checkpointing": "true",
    "--seed": 3,
}
SIMPLETUNER_BACKENDS = [
    {
        "id": "blue-ink",
        "type": "local",
        "instance_data_dir": "pictures",
        "caption_strategy": "textfile",
        "crop": True,
        "crop_aspect": "square",
        "resolution": 64,
        "resolution_type": "pixel",
        "repeats": 0,
        "cache_dir_vae": "cache/vae",
    },
    {"id": "text", "type": "local", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache/text"},
]
DIFFUSION_PIPE = """
output_dir = 'run'
dataset = 'dataset.toml'
epochs = 1
micro_batch_size_per_gpu = 2
pipeline_stages = 1
gradient_accumulation_steps = 1
gradient_clipping = 1.0
warmup_steps = 0
save_every_n_epochs = 1
activation_checkpointing = true
save_dtype = 'float32'

[model]
type = 'anima'
transformer_path = 'pico-anima'
vae_path = 'models/vae.safetensors'
qwen_path = 'models/qwen3'
dtype = 'bfloat16'
llm_adapter_lr = 0.0

[adapter]
type = 'lora'
rank = 4
dtype = 'bfloat16'

[optimizer]
type = 'adamw'
lr = 1e-3
betas = [0.9, 0.99]
"""
DIFFUSION_PIPE_DATASET = """
resolutions = [64]
enable_ar_bucket = true
min_ar = 0.5
max_ar = 2.0
num_ar_buckets = 3

[[directory]]
path = 'pictures'
num_repeats = 1
"""

PROGRAMS: dict[str, dict[str, str]] = {
    "sd-scripts training TOML": {"kohya.toml": KOHYA, "dataset.toml": KOHYA_DATASET},
    "sd-scripts command line": {},
    "kohya_ss GUI JSON": {"gui.json": json.dumps(KOHYA_GUI)},
    "ai-toolkit": {"blue.yaml": AI_TOOLKIT},
    "OneTrainer": {"onetrainer.json": json.dumps(ONETRAINER), "concepts.json": json.dumps(ONETRAINER_CONCEPTS)},
    "SimpleTuner": {
        "config.json": json.dumps(SIMPLETUNER),
        "multidatabackend.json": json.dumps(SIMPLETUNER_BACKENDS),
    },
    "diffusion-pipe": {"blue.toml": DIFFUSION_PIPE, "dataset.toml": DIFFUSION_PIPE_DATASET},
}
"""The files of each program's training by name, the first the one to give; FLAGS where there is none."""
