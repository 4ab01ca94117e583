"""Every key of sd-scripts that can stand in a training for Anima, and what it is here.

Most keep name and meaning, and are listed by our section. The others have a row: a conversion, or what to do instead.
Facts: sd-scripts, library/train_util.py, train_network.py, anima_train_network.py, docs/config_README-en.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast, get_args

from finitune.config.datasets import Dataset, DatasetOptions, Section, Subset, SubsetOptions
from finitune.config.imported import Fate
from finitune.config.importers import kohya_network as network
from finitune.config.importers import kohya_rules as rules
from finitune.config.importers.mapping import (
    Answer,
    Conversion,
    Row,
    no_effect,
    number,
    plainly,
    positive,
    switch,
    to,
    unsupported,
    whole,
)
from finitune.config.importers.terms import compute_dtype, saved_dtype
from finitune.config.schema import TrainConfig

SAME = {
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

OURS_ONLY = {"batch_size", "caption_variants", "background", "num_repeats"}
"""Options of datasets that have no key on sd-scripts' command line."""

ABSENT = {
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

DEAD = {
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

NOT_NEEDED = {
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

INSTEAD = {
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

NEUTRAL = (*rules.OFF, False, 0, "0", "False", "false")
OFF_AT: Mapping[str, tuple[object, ...]] = {
    "huber_scale": (1, "1"),
    "zero_stage": (2, "2"),
    "base_weights_multiplier": (1, "1"),
    "huggingface_repo_type": ("model",),
    "metadata_is_negative_embedding": ("False",),
}
"""Where a key that we do not have is off at more values than the usual ones."""

HIDDEN = ("wandb_api_key", "huggingface_token")
"""Keys whose value is a secret."""


def same(section: str, model: type[Section], name: str) -> Row:
    """The row of a key with our name and meaning: numbers and switches that stand as text are read as such."""
    option = model.model_fields[name]
    kinds = set(get_args(option.annotation)) or {option.annotation}
    convert: Conversion = plainly
    if bool in kinds:
        convert = switch
    elif kinds & {int, float}:
        convert = number if float in kinds else whole
        if option.default is None and name != "validation_seed":
            convert = positive if int in kinds else zero_is_off
    return to(f"{section}.{name}", convert)


def zero_is_off(value: object, beside: Mapping[str, object]) -> Answer:
    """A number where 0 means none."""
    answer = number(value, beside)
    return no_effect("off") if answer.value == 0 else answer


def not_needed(why: str) -> Row:
    """A row of what has no counterpart and wants none."""
    return Row("", "", lambda value, _: Answer(None, Fate.UNSUPPORTED, f"not needed here: {why}"))


def instead(name: str, todo: str) -> Row:
    """A row of what we do not have."""
    off = (*NEUTRAL, *OFF_AT.get(name, ()))
    return Row("", "", lambda value, _: no_effect("off") if value in off or value == [] else unsupported(todo))


def same_rows() -> dict[str, Row]:
    """The keys of SAME, and the options of datasets, which count for all of them."""
    rows = {}
    for section, names in SAME.items():
        model = cast("type[Section]", TrainConfig.model_fields[section].annotation)
        rows |= {name: same(section, model, name) for name in names.split()}
    shared = DatasetOptions.model_fields.keys() - OURS_ONLY
    return rows | {name: same("general", DatasetOptions, name) for name in shared} | shaped("general")


def shaped(section: str) -> dict[str, Row]:
    """Options of datasets whose values have a form of their own."""
    return {
        "resolution": to(f"{section}.resolution", rules.resolution),
        "skip_image_resolution": to(f"{section}.skip_image_resolution", rules.resolution),
        "bucket_reso_steps": to(f"{section}.bucket_reso_steps", rules.bucket_steps),
        "caption_extension": to(f"{section}.caption_extension", rules.caption_extension),
        "face_crop_aug_range": Row("", "", rules.face_crop),
    }


def listed(groups: Mapping[str, str], row: Callable[[str, str], Row]) -> dict[str, Row]:
    """One row for each name in a table of names by reason."""
    return {name: row(name, reason) for reason, names in groups.items() for name in names.split()}


CONVERTED = {
    "network_module": to("network.algorithm", network.network_module),
    "network_train_unet_only": to("network.train_text_encoder", rules.unet_only),
    "mixed_precision": to("model.precision", compute_dtype),
    "fp8_base": to("model.storage", rules.fp8_base),
    "fp8_base_unet": to("model.storage", rules.fp8_base),
    "learning_rate": to("optimizer.learning_rate", rules.learning_rate),
    "unet_lr": to("optimizer.learning_rate", number),
    "text_encoder_lr": to("optimizer.text_encoder_lr", rules.text_encoder_lr),
    "optimizer_type": to("optimizer.optimizer_type", rules.optimizer),
    "use_8bit_adam": to("optimizer.optimizer_type", rules.old_switch("AdamW8bit")),
    "use_lion_optimizer": to("optimizer.optimizer_type", rules.old_switch("Lion")),
    "lr_scheduler": to("optimizer.lr_scheduler", rules.schedule),
    "lr_scheduler_type": Row("", "", rules.nearest_schedule),
    "lr_warmup_steps": to("optimizer.lr_warmup_steps", rules.warmup),
    "huber_schedule": Row("", "", rules.huber_schedule),
    "max_train_steps": to("training.max_train_steps", rules.max_steps),
    "blocks_to_swap": to("training.offload_blocks", rules.offload),
    "compile": to("training.torch_compile", switch),
    "save_precision": to("saving.save_precision", saved_dtype),
    "save_model_as": Row("", "", rules.save_model_as),
    "save_last_n_epochs": to("saving.save_last_n", rules.last_n_epochs),
    "save_last_n_steps": to("saving.save_last_n", rules.last_n_steps),
    "save_last_n_epochs_state": Row("", "", rules.last_n_state("save_last_n_epochs")),
    "save_last_n_steps_state": Row("", "", rules.last_n_state("save_last_n_steps")),
    "save_state_on_train_end": to("saving.save_state", rules.state_at_end),
    "resume": Row("", "", rules.resume),
    "metadata_trigger_phrase": to("saving.trigger_phrase"),
    "sample_prompts": to("preview.sample_prompts", rules.prompts),
    "sample_width": to("preview.sample_size", rules.preview_size),
    "sample_height": to("preview.sample_size", rules.preview_size),
    "positive_prompts": to("preview.sample_prompts", rules.positive_prompts),
    "log_with": to("logging.log_with", rules.log_with),
    "logging_dir": to("logging.logging_dir", rules.logging_dir),
    "cache_latents": Row("", "", rules.cached),
    "cache_latents_to_disk": Row("", "", rules.cached),
    "cache_text_encoder_outputs": Row("", "", rules.cached),
    "cache_text_encoder_outputs_to_disk": Row("", "", rules.cached),
    "train_data_dir": to("datasets.image_dir", rules.folder),
    "reg_data_dir": to("datasets.image_dir", rules.folder),
    "in_json": to("datasets.metadata_file", rules.folder),
    "dataset_repeats": to("datasets.num_repeats", rules.repeats),
    "conditioning_data_dir": to("datasets.conditioning_data_dir", rules.folder),
    "dataset_config": Row("", "", lambda value, _: Answer(None, note="its datasets follow")),
    "config_file": Row("", "", lambda value, _: Answer(None, note="its keys follow; the flags stand over them")),
}
"""Keys whose value or meaning is converted."""

ARGUMENTS = {
    "algo": to("network.algorithm", network.algo),
    "preset": to("network.only_patterns", network.preset),
    "conv_dim": to("network.conv_dim", network.conv_rank),
    "conv_alpha": to("network.conv_alpha", number),
    "dropout": to("network.network_dropout", network.dropout),
    "rank_dropout": to("network.rank_dropout", number),
    "module_dropout": to("network.module_dropout", number),
    "factor": to("network.factor", network.only_for(("lokr",), whole)),
    "decompose_both": to("network.decompose_both", network.only_for(("lokr",), switch)),
    "full_matrix": to("network.full_matrix", network.only_for(("lokr",), network.full_matrix)),
    "unbalanced_factorization": to("network.unbalanced", network.only_for(("lokr",), switch)),
    "use_tucker": to("network.use_tucker", network.tucker),
    "use_cp": to("network.use_tucker", network.tucker),
    "use_conv_cp": to("network.use_tucker", network.tucker),
    "dora_wd": to("network.dora", network.dora),
    "rs_lora": to("network.rs_lora", switch),
    "constraint": to("network.constraint", network.only_for(("oft", "boft", "oft_v2"), number)),
    "exclude_patterns": to("network.exclude_patterns", network.patterns),
    "include_patterns": to("network.include_patterns", network.patterns),
    "network_reg_dims": to("network.network_reg_dims", network.by_pattern(int)),
    "network_reg_lrs": to("network.network_reg_lrs", network.by_pattern(float)),
    "train_llm_adapter": to("network.train_llm_adapter", network.llm_adapter),
    "loraplus_lr_ratio": to("optimizer.loraplus_lr_ratio", network.loraplus),
    "loraplus_unet_lr_ratio": to("optimizer.loraplus_lr_ratio", zero_is_off),
    "loraplus_text_encoder_lr_ratio": Row("", "", network.loraplus_text),
    "bypass_mode": Row("", "", lambda value, _: no_effect("how it is computed, not what: chosen here by speed")),
    "verbose": Row("", "", lambda value, _: no_effect("finitune train --explain lists the modules")),
}
"""What stands in network_args: of sd-scripts' networks, and of LyCORIS."""

ARGUMENTS_INSTEAD = {
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

RENAMED = {
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

FORM = {
    "a field of lora-scripts' form; sd-scripts is not given it": "model_train_type lora_type enable_preview name "
    "version author description train_type gpu_ids ui_custom_params",
}
"""Keys of lora-scripts' forms that it does not hand on."""

TRAINING: Mapping[str, Row] = {
    **listed(DEAD, lambda name, why: Row("", "", lambda value, _: no_effect(why))),
    **listed(NOT_NEEDED, lambda name, why: not_needed(why)),
    **listed(INSTEAD, instead),
    **same_rows(),
    **CONVERTED,
    **{f"network_args.{name}": row for name, row in (listed(ARGUMENTS_INSTEAD, instead) | ARGUMENTS).items()},
    **listed(FORM, lambda name, why: Row("", "", lambda value, _: no_effect(why))),
    "negative_prompts": Row("", "", lambda value, _: Answer(None, note="goes with positive_prompts")),
    "network_args": Row("", "", lambda value, _: Answer(None, note="item by item below" if value else "empty")),
    "optimizer_args": to("optimizer.optimizer_args", rules.optimizer_args),
}
"""Every key of a training."""


def dataset_rows() -> dict[str, Row]:
    """The keys of a dataset TOML by level."""
    levels = {"general": DatasetOptions, "datasets[]": Dataset, "datasets[].subsets[]": Subset}
    sections = {"general": "general", "datasets[]": "dataset", "datasets[].subsets[]": "subset"}
    rows: dict[str, Row] = {}
    for level, model in levels.items():
        section = sections[level]
        names = model.model_fields.keys() - {"subsets", "caption_variants", "background", "custom_attributes"}
        own = {name: same(section, model, name) for name in names}
        own |= {name: row for name, row in shaped(section).items() if name in names}
        rows |= {f"{level}.{name}": row for name, row in own.items()}
        for name in ("custom_attributes", "custom_attributes.*"):
            rows[f"{level}.{name}"] = Row("", "", lambda value, _: no_effect("free text for other programs"))
        rows[f"{level}.cache_info"] = not_needed("sizes are read from headers each time, in a moment")
    for name in ("datasets", "datasets[].subsets"):
        rows[name] = Row("", "", lambda value, _: unsupported("write it as tables: [[datasets]], [[datasets.subsets]]"))
    return rows


DATASETS: Mapping[str, Row] = dataset_rows()
"""Every key of a dataset TOML."""

BELONGS = {
    **dict.fromkeys(Subset.model_fields, "[[datasets.subsets]]"),
    **dict.fromkeys(DatasetOptions.model_fields, "[[datasets]] or [general]"),
    **dict.fromkeys(SubsetOptions.model_fields, "[general], [[datasets]] or [[datasets.subsets]]"),
}
"""The level of a dataset TOML that an option belongs to."""
