"""Every key of sd-scripts that can stand in a training for Anima, and what it is here.

Most keep name and meaning, and are listed by our section. The others have a row: a conversion, or what to do instead.
Facts: sd-scripts, library/train_util.py, train_network.py, anima_train_network.py, docs/config_README-en.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast, get_args

from finitune.config.datasets import ConfigSection, Dataset, DatasetOptions, Subset, SubsetOptions
from finitune.config.imported_config import KeyStatus
from finitune.config.schema import TrainConfig
from finitune.importers import kohya_conversions as rules
from finitune.importers import kohya_network as network
from finitune.importers.conversions import convert_compute_dtype, convert_saved_dtype
from finitune.importers.mapping import (
    ConvertedValue,
    KeyMapping,
    ValueConverter,
    convert_as_is,
    convert_boolean,
    convert_number,
    convert_positive,
    convert_whole_number,
    map_to,
    mark_no_effect,
    mark_unsupported,
)

_SAME_KEYS_BY_SECTION = {
    "model": "pretrained_model_name_or_path qwen3 vae",
    "network": "network_dim network_alpha network_dropout scale_weight_norms network_weights",
    "objective": "timestep_sampling sigmoid_scale discrete_flow_shift weighting_scheme logit_mean logit_std mode_scale "
    "loss_type huber_c masked_loss prior_loss_weight ip_noise_gamma",
    "optimizer": "max_grad_norm lr_scheduler_num_cycles lr_scheduler_power lr_scheduler_min_lr_ratio",
    "training": "max_train_epochs train_batch_size gradient_accumulation_steps seed gradient_checkpointing "
    "torch_compile vae_batch_size qwen3_max_token_length t5_max_token_length",
    "saving": "output_dir output_name save_every_n_steps save_every_n_epochs save_state training_comment",
    "preview": "sample_every_n_steps sample_every_n_epochs sample_at_first sample_steps sample_cfg sample_seed",
    "validation": "validate_every_n_steps validate_every_n_epochs max_validation_steps",
}
"""Keys with kohya's name and meaning, by our section."""

_OPTIONS_WITHOUT_FLAG = {"batch_size", "caption_variants", "background", "num_repeats"}
"""Options of datasets that have no key on sd-scripts' command line."""

KOHYA_DEFAULTS = {
    "network.algorithm": "lora",
    "network.network_dim": 4,
    "network.network_alpha": 1.0,
    "network.conv_dim": 0,
    "optimizer.learning_rate": 2e-6,
    "model.precision": "fp32",
    "saving.output_name": "last",
    "saving.save_state": False,
    "general.enable_bucket": False,
}
"""What sd-scripts takes for an absent key where our default is another; beside it, 1600 steps and the text encoder."""

_KEYS_WITHOUT_EFFECT = {
    "the objective of rectified flow has no use for it": "noise_offset noise_offset_random_strength noise_offset_type "
    "adaptive_noise_scale multires_noise_iterations multires_noise_discount min_snr_gamma zero_terminal_snr "
    "scale_v_pred_loss_like_noise_pred v_pred_like_loss debiased_estimation_loss v_parameterization "
    "guidance_scale model_prediction_type",
    "ignored for Anima; objective.min_sigma and max_sigma do what was meant": "min_timestep max_timestep",
    "Anima has no CLIP text encoder": "clip_skip max_token_length weighted_captions no_token_padding clip_l clip_g "
    "t5xxl t5xxl_max_token_length apply_t5_attn_mask t5xxl_device t5xxl_dtype clip_l_dropout_rate clip_g_dropout_rate "
    "t5_dropout_rate use_t5xxl_cache_only",
    "of another model family": "ae v2 split_mode train_blocks gemma2 gemma2_max_token_length single_blocks_to_swap "
    "double_blocks_to_swap split_qkv train_double_block_indices train_single_block_indices",
    "read, and not used": "llm_adapter_path sample_sampler",
    "only training of the whole model reads it": "self_attn_lr cross_attn_lr mlp_lr mod_lr fused_backward_pass "
    "blockwise_fused_optimizers learning_rate_te learning_rate_te1 learning_rate_te2 mem_eff_save train_text_encoder "
    "use_safetensors",
    "only training of the whole model reads it; here: optimizer.llm_adapter_lr": "llm_adapter_lr",
}
"""Keys without effect in sd-scripts' training of an adapter for Anima, by the reason."""

_UNNEEDED_KEYS = {
    "attention is torch's own, in the precision of the plan": "xformers sdpa mem_eff_attn attn_mode split_attn",
    "models are moved as they are used": "lowram highvram lowvram disable_mmap_load_safetensors",
    "caches know their content by hash": "skip_cache_check cache_info",
    "pictures and texts are read from the cache": "max_data_loader_n_workers persistent_data_loader_workers "
    "text_encoder_batch_size",
    "the VAE's numbers are checked as they are made": "no_half_vae vae_chunk_size vae_disable_cache qwen_image_vae_2d",
    "several processes: accelerate launch, or torchrun, around finitune train": "ddp_timeout "
    "ddp_gradient_as_bucket_view ddp_static_graph",
    "torch_compile takes torch's own back end": "dynamo_backend compile_backend compile_mode compile_dynamic "
    "compile_fullgraph compile_cache_size_limit cuda_allow_tf32 cuda_cudnn_benchmark",
    "the effective configuration is saved with each run": "output_config",
    "messages go to the terminal": "console_log_level console_log_file console_log_simple",
    "tokenizers come with the model; a folder with both is model.tokenizers": "tokenizer_cache_dir t5_tokenizer_path",
    "metadata is always written": "no_metadata",
}
"""Keys that changed how sd-scripts works, not what it learns, by the reason why nothing stands in their place."""

_REPLACED_KEYS = {
    "fp16 arithmetic of the optimiser gives NaN: masters are fp32, products are half: model.precision.": "full_fp16",
    "bf16 loses small updates of the optimiser: masters are fp32, products are bf16: model.precision.": "full_bf16",
    "training.offload_blocks moves blocks to main memory.": "cpu_offload_checkpointing unsloth_offload_checkpointing",
    "state the rank: network.network_dim.": "dim_from_weights",
    "merge it into the model first: finitune merge.": "base_weights base_weights_multiplier",
    "train both, network.train_text_encoder, or make optimizer.learning_rate 0.": "network_train_text_encoder_only",
    "optimizer.lr_scheduler and its options.": "lr_scheduler_args lr_decay_steps lr_scheduler_timescale",
    "the deviation stays at ip_noise_gamma.": "ip_noise_gamma_random_strength",
    "the loss is not scaled: huber_c.": "huber_scale",
    "say every how many: saving.save_every_n_epochs.": "save_n_epoch_ratio",
    "saving.resume = 'auto' goes on from our own states.": "initial_epoch initial_step skip_until_initial_step",
    "upload the file yourself when it is verified.": "huggingface_repo_id huggingface_repo_type "
    "huggingface_path_in_repo huggingface_token huggingface_repo_visibility save_state_to_huggingface "
    "resume_from_huggingface async_upload",
    "TensorBoard and the report are there: logging.log_with.": "log_prefix log_tracker_name log_tracker_config "
    "wandb_run_name wandb_api_key log_config",
    "say it in saving.training_comment.": "metadata_title metadata_author metadata_description metadata_license "
    "metadata_tags metadata_usage_hint metadata_thumbnail metadata_merged_from metadata_preprocessor "
    "metadata_is_negative_embedding",
    "several processes: accelerate launch around finitune train; training.offload_blocks for memory.": "deepspeed "
    "zero_stage offload_optimizer_device offload_optimizer_nvme_path offload_param_device offload_param_nvme_path "
    "zero3_init_flag zero3_save_16bit_model fp16_master_weights_and_gradients",
    "finitune check looks at a dataset.": "debug_dataset",
    "finitune train --explain shows what would be done.": "show_timesteps show_timesteps_resolution",
    "datasets are folders, or a metadata_file.": "dataset_class",
    "rates and ranks by pattern: network.network_reg_lrs and network_reg_dims.": "down_lr_weight mid_lr_weight "
    "up_lr_weight block_lr_zero_threshold block_dims block_alphas conv_block_dims conv_block_alphas",
    "captions are text files, or a metadata_file.": "prefer_json_caption",
    "preview.sample_prompts names a file of prompts, drawn in their order.": "prompt_file randomly_choice_prompt",
}
"""Keys that we do not have, by what to do in their place."""

KOHYA_NEUTRAL_VALUES = (*rules.KOHYA_OFF_VALUES, False, 0, "0", "False", "false")
_OFF_VALUES_BY_KEY: Mapping[str, tuple[object, ...]] = {
    "huber_scale": (1, "1"),
    "zero_stage": (2, "2"),
    "base_weights_multiplier": (1, "1"),
    "huggingface_repo_type": ("model",),
    "metadata_is_negative_embedding": ("False",),
}
"""Where a key that we do not have is off at more values than the usual ones."""

KOHYA_SECRET_KEYS = ("wandb_api_key", "huggingface_token")
"""Keys whose value is a secret."""


def map_same_key(section: str, model: type[ConfigSection], name: str) -> KeyMapping:
    """The row of a key with our name and meaning: numbers and switches that stand as text are read as such."""
    option = model.model_fields[name]
    kinds = set(get_args(option.annotation)) or {option.annotation}
    convert: ValueConverter = convert_as_is
    if bool in kinds:
        convert = convert_boolean
    elif kinds & {int, float}:
        convert = convert_number if float in kinds else convert_whole_number
        if option.default is None and name != "validation_seed":
            convert = convert_positive if int in kinds else convert_zero_to_off
    return map_to(f"{section}.{name}", convert)


def convert_zero_to_off(value: object, beside: Mapping[str, object]) -> ConvertedValue:
    """A number where 0 means none."""
    answer = convert_number(value, beside)
    return mark_no_effect("off") if answer.value == 0 else answer


def map_unneeded_key(why: str) -> KeyMapping:
    """A row of what has no counterpart and wants none."""
    return KeyMapping("", "", lambda value, _: ConvertedValue(None, KeyStatus.UNSUPPORTED, f"not needed here: {why}"))


def map_replaced_key(name: str, todo: str) -> KeyMapping:
    """A row of what we do not have."""
    off = (*KOHYA_NEUTRAL_VALUES, *_OFF_VALUES_BY_KEY.get(name, ()))
    return KeyMapping(
        "", "", lambda value, _: mark_no_effect("off") if value in off or value == [] else mark_unsupported(todo)
    )


def build_same_key_table() -> dict[str, KeyMapping]:
    """The keys of SAME, and the options of datasets, which count for all of them."""
    rows = {}
    for section, names in _SAME_KEYS_BY_SECTION.items():
        model = cast("type[ConfigSection]", TrainConfig.model_fields[section].annotation)
        rows |= {name: map_same_key(section, model, name) for name in names.split()}
    shared = DatasetOptions.model_fields.keys() - _OPTIONS_WITHOUT_FLAG
    return (
        rows
        | {name: map_same_key("general", DatasetOptions, name) for name in shared}
        | map_structured_options("general")
    )


def map_structured_options(section: str) -> dict[str, KeyMapping]:
    """Options of datasets whose values have a form of their own."""
    return {
        "resolution": map_to(f"{section}.resolution", rules.convert_kohya_resolution),
        "skip_image_resolution": map_to(f"{section}.skip_image_resolution", rules.convert_kohya_resolution),
        "bucket_reso_steps": map_to(f"{section}.bucket_reso_steps", rules.convert_bucket_steps),
        "caption_extension": map_to(f"{section}.caption_extension", rules.convert_caption_extension),
        "face_crop_aug_range": KeyMapping("", "", rules.convert_face_crop),
    }


def map_grouped_keys(groups: Mapping[str, str], row: Callable[[str, str], KeyMapping]) -> dict[str, KeyMapping]:
    """One row for each name in a table of names by reason."""
    return {name: row(name, reason) for reason, names in groups.items() for name in names.split()}


_CONVERTED_KEYS = {
    "network_module": map_to("network.algorithm", network.convert_network_module),
    "network_train_unet_only": map_to("network.train_text_encoder", rules.convert_unet_only),
    "mixed_precision": map_to("model.precision", convert_compute_dtype),
    "fp8_base": map_to("model.storage", rules.convert_fp8_base),
    "fp8_base_unet": map_to("model.storage", rules.convert_fp8_base),
    "learning_rate": map_to("optimizer.learning_rate", rules.convert_kohya_learning_rate),
    "unet_lr": map_to("optimizer.learning_rate", convert_number),
    "text_encoder_lr": map_to("optimizer.text_encoder_lr", rules.convert_text_encoder_lr),
    "optimizer_type": map_to("optimizer.optimizer_type", rules.convert_kohya_optimizer),
    "use_8bit_adam": map_to("optimizer.optimizer_type", rules.make_old_switch_converter("AdamW8bit")),
    "use_lion_optimizer": map_to("optimizer.optimizer_type", rules.make_old_switch_converter("Lion")),
    "lr_scheduler": map_to("optimizer.lr_scheduler", rules.convert_kohya_schedule),
    "lr_scheduler_type": KeyMapping("", "", rules.convert_to_nearest_schedule),
    "lr_warmup_steps": map_to("optimizer.lr_warmup_steps", rules.convert_kohya_warmup),
    "huber_schedule": KeyMapping("", "", rules.convert_huber_schedule),
    "max_train_steps": map_to("training.max_train_steps", rules.convert_max_steps),
    "blocks_to_swap": map_to("training.offload_blocks", rules.convert_blocks_to_swap),
    "compile": map_to("training.torch_compile", convert_boolean),
    "save_precision": map_to("saving.save_precision", convert_saved_dtype),
    "save_model_as": KeyMapping("", "", rules.convert_save_model_as),
    "save_last_n_epochs": map_to("saving.save_last_n", rules.convert_last_n_epochs),
    "save_last_n_steps": map_to("saving.save_last_n", rules.convert_last_n_steps),
    "save_last_n_epochs_state": KeyMapping("", "", rules.make_last_n_state_converter("save_last_n_epochs")),
    "save_last_n_steps_state": KeyMapping("", "", rules.make_last_n_state_converter("save_last_n_steps")),
    "save_state_on_train_end": map_to("saving.save_state", rules.convert_state_at_end),
    "resume": KeyMapping("", "", rules.convert_kohya_resume),
    "metadata_trigger_phrase": map_to("saving.trigger_phrase"),
    "sample_prompts": map_to("preview.sample_prompts", rules.convert_prompt_file),
    "sample_width": map_to("preview.sample_size", rules.convert_preview_size),
    "sample_height": map_to("preview.sample_size", rules.convert_preview_size),
    "positive_prompts": map_to("preview.sample_prompts", rules.convert_positive_prompts),
    "log_with": map_to("logging.log_with", rules.convert_log_with),
    "logging_dir": map_to("logging.logging_dir", rules.convert_logging_dir),
    "cache_latents": KeyMapping("", "", rules.convert_cache_switch),
    "cache_latents_to_disk": KeyMapping("", "", rules.convert_cache_switch),
    "cache_text_encoder_outputs": KeyMapping("", "", rules.convert_cache_switch),
    "cache_text_encoder_outputs_to_disk": KeyMapping("", "", rules.convert_cache_switch),
    "train_data_dir": map_to("datasets.image_dir", rules.convert_data_folder),
    "reg_data_dir": map_to("datasets.image_dir", rules.convert_data_folder),
    "in_json": map_to("datasets.metadata_file", rules.convert_data_folder),
    "dataset_repeats": map_to("datasets.num_repeats", rules.convert_json_repeats),
    "conditioning_data_dir": map_to("datasets.conditioning_data_dir", rules.convert_data_folder),
    "dataset_config": KeyMapping("", "", lambda value, _: ConvertedValue(None, note="its datasets follow")),
    "config_file": KeyMapping(
        "", "", lambda value, _: ConvertedValue(None, note="its keys follow; the flags stand over them")
    ),
}
"""Keys whose value or meaning is converted."""

_NETWORK_ARGUMENT_KEYS = {
    "algo": map_to("network.algorithm", network.convert_lycoris_algo),
    "preset": map_to("network.only_patterns", network.convert_lycoris_preset),
    "conv_dim": map_to("network.conv_dim", network.convert_conv_rank),
    "conv_alpha": map_to("network.conv_alpha", convert_number),
    "dropout": map_to("network.network_dropout", network.convert_lycoris_dropout),
    "rank_dropout": map_to("network.rank_dropout", convert_number),
    "module_dropout": map_to("network.module_dropout", convert_number),
    "factor": map_to("network.factor", network.restrict_to_algorithms(("lokr",), convert_whole_number)),
    "decompose_both": map_to("network.decompose_both", network.restrict_to_algorithms(("lokr",), convert_boolean)),
    "full_matrix": map_to(
        "network.full_matrix", network.restrict_to_algorithms(("lokr",), network.convert_full_matrix)
    ),
    "unbalanced_factorization": map_to(
        "network.unbalanced", network.restrict_to_algorithms(("lokr",), convert_boolean)
    ),
    "use_tucker": map_to("network.use_tucker", network.convert_tucker),
    "use_cp": map_to("network.use_tucker", network.convert_tucker),
    "use_conv_cp": map_to("network.use_tucker", network.convert_tucker),
    "dora_wd": map_to("network.dora", network.convert_lycoris_dora),
    "rs_lora": map_to("network.rs_lora", convert_boolean),
    "constraint": map_to(
        "network.constraint", network.restrict_to_algorithms(("oft", "boft", "oft_v2"), convert_number)
    ),
    "exclude_patterns": map_to("network.exclude_patterns", network.convert_pattern_list),
    "include_patterns": map_to("network.include_patterns", network.convert_pattern_list),
    "network_reg_dims": map_to("network.network_reg_dims", network.make_pattern_table_converter(int)),
    "network_reg_lrs": map_to("network.network_reg_lrs", network.make_pattern_table_converter(float)),
    "train_llm_adapter": map_to("network.train_llm_adapter", network.convert_llm_adapter),
    "loraplus_lr_ratio": map_to("optimizer.loraplus_lr_ratio", network.convert_loraplus_ratio),
    "loraplus_unet_lr_ratio": map_to("optimizer.loraplus_lr_ratio", convert_zero_to_off),
    "loraplus_text_encoder_lr_ratio": KeyMapping("", "", network.convert_text_loraplus_ratio),
    "bypass_mode": KeyMapping(
        "", "", lambda value, _: mark_no_effect("how it is computed, not what: chosen here by speed")
    ),
    "verbose": KeyMapping("", "", lambda value, _: mark_no_effect("finitune train --explain lists the modules")),
}
"""What stands in network_args: of sd-scripts' networks, and of LyCORIS."""

REPLACED_NETWORK_ARGUMENTS = {
    "norms of Anima have nothing to learn in most places; LyCORIS stops there.": "train_norm",
    "the change is scaled by alpha / rank.": "use_scalar rescaled",
    "dropped ranks are not made up for.": "rank_dropout_scale",
    "magnitudes are those of the outputs.": "wd_on_output wd_on_out",
    "DyLoRA is not here.": "block_size unit",
    "only the input side is learned there; an IA3 here learns what its layer says.": "train_on_input",
    "rates and ranks by pattern: network.network_reg_lrs and network_reg_dims.": "down_lr_weight mid_lr_weight "
    "up_lr_weight block_lr_zero_threshold block_dims block_alphas conv_block_dims conv_block_alphas",
    "network.only_patterns says the layers.": "enable_conv disable_conv_cp train_blocks split_qkv in_dims "
    "train_double_block_indices train_single_block_indices img_attn_dim txt_attn_dim img_mlp_dim txt_mlp_dim "
    "img_mod_dim txt_mod_dim single_dim single_mod_dim enable_all_linear train_t5xxl emb_dims ggpo_beta ggpo_sigma",
}
"""What we do not have of network_args, by what to do or to know."""

KOHYA_NAME_BY_ALIAS = {
    "caption_extention": "caption_extension",
    "network_args_custom": "network_args",
    "optimizer_args_custom": "optimizer_args",
    "lycoris_algo": "network_args.algo",
    "lokr_factor": "network_args.factor",
    "conv_dim": "network_args.conv_dim",
    "conv_alpha": "network_args.conv_alpha",
    "dropout": "network_args.dropout",
    "train_norm": "network_args.train_norm",
}
"""Older spellings, and keys of lora-scripts' forms, by sd-scripts' name."""

_FORM_KEYS = {
    "a field of lora-scripts' form; sd-scripts is not given it": "model_train_type lora_type enable_preview name "
    "version author description train_type gpu_ids ui_custom_params",
}
"""Keys of lora-scripts' forms that it does not hand on."""

KOHYA_TRAINING_KEYS: Mapping[str, KeyMapping] = {
    **map_grouped_keys(
        _KEYS_WITHOUT_EFFECT, lambda name, why: KeyMapping("", "", lambda value, _: mark_no_effect(why))
    ),
    **map_grouped_keys(_UNNEEDED_KEYS, lambda name, why: map_unneeded_key(why)),
    **map_grouped_keys(_REPLACED_KEYS, map_replaced_key),
    **build_same_key_table(),
    **_CONVERTED_KEYS,
    **{
        f"network_args.{name}": row
        for name, row in (
            map_grouped_keys(REPLACED_NETWORK_ARGUMENTS, map_replaced_key) | _NETWORK_ARGUMENT_KEYS
        ).items()
    },
    **map_grouped_keys(_FORM_KEYS, lambda name, why: KeyMapping("", "", lambda value, _: mark_no_effect(why))),
    "negative_prompts": KeyMapping("", "", lambda value, _: ConvertedValue(None, note="goes with positive_prompts")),
    "network_args": KeyMapping(
        "", "", lambda value, _: ConvertedValue(None, note="item by item below" if value else "empty")
    ),
    "optimizer_args": map_to("optimizer.optimizer_args", rules.convert_optimizer_args),
}
"""Every key of a training."""


def build_dataset_key_table() -> dict[str, KeyMapping]:
    """The keys of a dataset TOML by level."""
    levels = {"general": DatasetOptions, "datasets[]": Dataset, "datasets[].subsets[]": Subset}
    sections = {"general": "general", "datasets[]": "dataset", "datasets[].subsets[]": "subset"}
    rows: dict[str, KeyMapping] = {}
    for level, model in levels.items():
        section = sections[level]
        names = model.model_fields.keys() - {"subsets", "caption_variants", "background", "custom_attributes"}
        own = {name: map_same_key(section, model, name) for name in names}
        own |= {name: row for name, row in map_structured_options(section).items() if name in names}
        rows |= {f"{level}.{name}": row for name, row in own.items()}
        for name in ("custom_attributes", "custom_attributes.*"):
            rows[f"{level}.{name}"] = KeyMapping(
                "", "", lambda value, _: mark_no_effect("free text for other programs")
            )
        rows[f"{level}.cache_info"] = map_unneeded_key("sizes are read from headers each time, in a moment")
    for name in ("datasets", "datasets[].subsets"):
        rows[name] = KeyMapping(
            "", "", lambda value, _: mark_unsupported("write it as tables: [[datasets]], [[datasets.subsets]]")
        )
    return rows


KOHYA_DATASET_KEYS: Mapping[str, KeyMapping] = build_dataset_key_table()
"""Every key of a dataset TOML."""

DATASET_LEVEL_BY_OPTION = {
    **dict.fromkeys(Subset.model_fields, "[[datasets.subsets]]"),
    **dict.fromkeys(DatasetOptions.model_fields, "[[datasets]] or [general]"),
    **dict.fromkeys(SubsetOptions.model_fields, "[general], [[datasets]] or [[datasets.subsets]]"),
}
"""The level of a dataset TOML that an option belongs to."""
