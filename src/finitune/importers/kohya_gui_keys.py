"""The fields of the kohya_ss GUI that are not called as sd-scripts calls them."""

from __future__ import annotations

from finitune.importers.kohya_keys import REPLACED_NETWORK_ARGUMENTS

_ALGO_BY_LYCORIS_KIND = {
    "LoCon": "locon",
    "LoHa": "loha",
    "LoKr": "lokr",
    "iA3": "ia3",
    "Diag-OFT": "diag-oft",
    "BOFT": "boft",
    "DyLoRA": "dylora",
    "GLoRA": "glora",
    "Native Fine-Tuning": "full",
}

NETWORK_BY_GUI_KIND = {
    "Standard": ("network_module", "networks.lora"),
    "Kohya LoCon": ("network_module", "networks.lora"),
    "Kohya DyLoRA": ("network_module", "networks.dylora"),
    "Kohya LoHa": ("network_module", "networks.loha"),
    "Kohya LoKr": ("network_module", "networks.lokr"),
    "LoRA-FA": ("network_module", "networks.lora_fa"),
    "Anima": ("network_module", "networks.lora_anima"),
    "Flux1": ("network_module", "networks.lora_flux"),
    "Flux1 OFT": ("network_module", "networks.oft_flux"),
    "SD3": ("network_module", "networks.lora_sd3"),
    "Lumina": ("network_module", "networks.lora_lumina"),
    "HunyuanImage": ("network_module", "networks.lora_hunyuan_image"),
    **{f"LyCORIS/{name}": ("network_args.algo", algo) for name, algo in _ALGO_BY_LYCORIS_KIND.items()},
}
"""LoRA_type as sd-scripts' key and value."""

FAMILY_BY_GUI_CHECKBOX = {
    "sdxl": "Stable Diffusion XL",
    "flux1_checkbox": "FLUX.1",
    "sd3_checkbox": "Stable Diffusion 3",
    "lumina_checkbox": "Lumina",
    "hunyuan_image_checkbox": "HunyuanImage",
    "v2": "Stable Diffusion 2",
}
"""Boxes that choose the script, and so the model family; with none of them it is Stable Diffusion 1.5."""

OTHER_FAMILY_PREFIXES = ("sd3_", "flux1_", "flux_", "lumina_", "hunyuan_", "sdxl_", "chroma_")
"""How fields of other model families begin."""

KOHYA_NAME_BY_GUI_FIELD = {
    "max_resolution": "resolution",
    "optimizer": "optimizer_type",
    "lora_network_weights": "network_weights",
    "sdxl_no_half_vae": "no_half_vae",
    **dict.fromkeys(
        (
            "sdxl_cache_text_encoder_outputs",
            "sd3_cache_text_encoder_outputs",
            "flux1_cache_text_encoder_outputs",
            "lumina_cache_text_encoder_outputs",
        ),
        "cache_text_encoder_outputs",
    ),
    **dict.fromkeys(
        ("sd3_cache_text_encoder_outputs_to_disk", "flux1_cache_text_encoder_outputs_to_disk"),
        "cache_text_encoder_outputs_to_disk",
    ),
    "conv_dims": "network_args.conv_block_dims",
    "conv_alphas": "network_args.conv_block_alphas",
}
"""Fields under another name."""

_LYCORIS_FIELD_NAMES = (
    "factor decompose_both full_matrix use_tucker use_cp use_scalar rank_dropout_scale bypass_mode dora_wd rs_lora "
    "unbalanced_factorization rescaled train_norm train_on_input unit"
)
LYCORIS_ARGUMENT_BY_FIELD = {
    "constrain": "constraint",
    "LyCORIS_preset": "preset",
    **{name: name for name in _LYCORIS_FIELD_NAMES.split()},
}
"""Fields that go into network_args under LyCORIS only, by their name there."""

LYCORIS_KIND_BY_FIELD = {"unit": "DyLoRA", "train_on_input": "iA3"}
"""Fields that only one of LyCORIS's kinds reads."""

CONVOLUTION_FIELDS = ("conv_dim", "conv_alpha")
"""Fields that go into network_args under LyCORIS and for the GUI's kinds called Kohya."""

SHARED_NETWORK_FIELDS = {
    name
    for names in REPLACED_NETWORK_ARGUMENTS.values()
    for name in names.split()
    if name not in LYCORIS_ARGUMENT_BY_FIELD
} | {
    "rank_dropout",
    "module_dropout",
    "loraplus_lr_ratio",
    "loraplus_unet_lr_ratio",
    "loraplus_text_encoder_lr_ratio",
    "train_llm_adapter",
}
"""Fields that go into network_args for every kind."""

_LAUNCHER_FIELDS = (
    "num_processes num_machines machine_rank multi_gpu gpu_ids main_process_port num_cpu_threads_per_process "
    "extra_accelerate_launch_args dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic"
)
_FORM_FIELDS = "model_list save_as_bool save_as training_preset headless print_only dataset_preparation"
UNUSED_GUI_FIELDS = {
    **dict.fromkeys(_LAUNCHER_FIELDS.split(), "not needed here: accelerate launch takes it in front of finitune train"),
    **dict.fromkeys(_FORM_FIELDS.split(), "not needed here: it belongs to the form"),
    "stop_text_encoder_training": "not needed here: the GUI ignores it, too",
}
"""Fields of which the GUI makes no key of sd-scripts."""

ZERO_IS_OFF_FIELDS = {"vae_batch_size", "seed", "lr_scheduler_num_cycles", "lr_scheduler_power", "sample_steps"}
"""Fields whose 0 is nothing."""

KOHYA_GUI_DEFAULTS = {
    "network_dim": ("network.network_dim", 8),
    "learning_rate": ("optimizer.learning_rate", 1e-4),
    "lr_scheduler": ("optimizer.lr_scheduler", "cosine"),
    "lr_warmup": ("optimizer.lr_warmup_steps", 0.1),
    "optimizer": ("optimizer.optimizer_type", "AdamW8bit"),
    "max_resolution": ("general.resolution", [512, 512]),
    "enable_bucket": ("general.enable_bucket", True),
    "max_bucket_reso": ("general.max_bucket_reso", 2048),
    "epoch": ("training.max_train_epochs", 1),
    "save_every_n_epochs": ("saving.save_every_n_epochs", 1),
    "mixed_precision": ("model.precision", "auto"),
    "save_precision": ("saving.save_precision", "fp16"),
}
"""What the form holds where a preset leaves a field out."""
