"""What becomes of each key of ai-toolkit.

Source of names, defaults and meanings: ostris/ai-toolkit toolkit/config_modules.py (MIT) and its example files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finitune.importers.conversions import (
    IMPORTED_LOSS_TYPES,
    convert_compute_dtype,
    convert_name_parts,
    convert_optimizer_name,
    convert_saved_dtype,
    convert_schedule_name,
    convert_self_tuned_rate,
    convert_storage_dtype,
    convert_walk_seed,
    format_prompt_line,
    to_whole_number,
)
from finitune.importers.mapping import (
    ConvertedValue,
    KeyMapping,
    convert_boolean,
    convert_number,
    convert_positive,
    convert_whole_number,
    make_choice_converter,
    map_constant,
    map_implicit,
    map_no_effect,
    map_to,
    map_unsupported,
    mark_no_effect,
    prefix_keys,
    take_changed,
    take_value,
)

_PROCESS_PATH = "config.process[]"
_FULL_FACTOR_RANK = 1_000_000
_ALWAYS_CACHED = map_implicit("latents and texts are always cached on disk here")
_NO_VIDEO = map_unsupported("videos cannot be trained on; use pictures", 1, False)
_NOISE_REMEDY = "the noise is N(0, 1) here; leave it out"


def _convert_rank(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    if beside.get("rank") is not None and value is not beside["rank"]:
        return mark_no_effect("rank is given, too, and counts")
    if beside.get("type") == "lokr" and to_whole_number(value) >= _FULL_FACTOR_RANK:
        return take_changed(1, "so large a rank means a full second factor", network__full_matrix=True)
    return convert_whole_number(value, beside)


def _convert_alpha(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    if beside.get("type") == "lokr" and beside.get("lokr_full_rank", True):
        return mark_no_effect("a full second factor has the scale 1")
    return convert_number(value, beside)


def _convert_full_rank(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    if beside.get("type") != "lokr":
        return mark_no_effect("only for lokr")
    return take_value(value)


def _convert_ema(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    return convert_number(value, beside) if beside.get("use_ema") else mark_no_effect("use_ema is not set")


def _convert_use_ema(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    if not value:
        return mark_no_effect()
    return take_changed(0.999 if beside.get("ema_decay") is None else beside["ema_decay"], "the decay switches it on")


def _convert_quantize(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    return convert_storage_dtype(beside.get("qtype") or "qfloat8", beside) if value else mark_no_effect()


def _convert_qtype(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    return convert_storage_dtype(value, beside) if beside.get("quantize") else mark_no_effect("quantize is not set")


def _convert_caption_extension(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    return take_value("." + str(value).lstrip("."))


def _convert_repeats(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    answer = convert_whole_number(value, beside)
    return take_changed(1, "0 shows each picture once") if answer.value == 0 else answer


def _convert_trigger(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    note = "put in front of every caption, whether it is there already or not"
    return take_changed(f"{value} ", note, saving__trigger_phrase=value)


def _convert_own_trigger(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    return take_changed(f"{value} ", "put in front of every caption, whether it is there already or not")


_SAMPLING_BY_TIMESTEP_TYPE: Mapping[str, object] = {
    "sigmoid": "sigmoid",
    "linear": "uniform",
    "shift": take_changed(
        "sigma",
        "uniform draws, shifted by Anima's 3",
        objective__weighting_scheme="none",
        objective__discrete_flow_shift=3.0,
    ),
    **dict.fromkeys(
        ("flux_shift", "lumina2_shift"),
        take_changed("flux_shift", "shifted by the size of the picture; draws are by sigmoid here, uniform there"),
    ),
}
_ALGORITHM_BY_TYPE: Mapping[str, object] = {
    "lora": "lora",
    "locon": take_changed("lora", "LoRA; convolutions get conv_dim"),
    "lokr": "lokr",
}

_NETWORK_KEYS: dict[str, KeyMapping] = {
    "type": map_to(
        "network.algorithm", make_choice_converter(_ALGORITHM_BY_TYPE, "choose lora, loha, lokr or another algorithm.")
    ),
    "rank": map_to("network.network_dim", _convert_rank),
    "linear": map_to("network.network_dim", _convert_rank),
    "alpha": map_to(
        "network.network_alpha",
        lambda v, b: convert_number(v, b) if b.get("linear_alpha") is None else mark_no_effect(),
    ),
    "linear_alpha": map_to("network.network_alpha", _convert_alpha),
    "conv": map_to("network.conv_dim", convert_whole_number),
    "conv_alpha": map_to("network.conv_alpha", convert_number),
    "dropout": map_to("network.network_dropout", convert_number),
    "lokr_full_rank": map_to("network.full_matrix", _convert_full_rank),
    "lokr_factor": map_to("network.factor", convert_whole_number),
    "network_kwargs.only_if_contains": map_to("network.only_patterns", convert_name_parts),
    "network_kwargs.ignore_if_contains": map_to("network.exclude_patterns", convert_name_parts),
    "network_kwargs.*": map_unsupported("leave it out"),
    "transformer_only": map_no_effect("only the denoiser is trained here unless train_text_encoder is set"),
    "split_multistage_loras": map_no_effect("Anima has one stage"),
    "pretrained_lora_path": map_to("network.network_weights"),
    "normalize": map_unsupported("leave it out", False),
    "old_lokr_format": map_no_effect("files have today's form"),
    "lorm.*": map_unsupported("LoRM cannot be trained here; choose lora"),
}

_SAVE_KEYS: dict[str, KeyMapping] = {
    "dtype": map_to("saving.save_precision", convert_saved_dtype),
    "save_every": map_to("saving.save_every_n_steps", convert_positive),
    "max_step_saves_to_keep": map_to("saving.save_last_n", convert_positive),
    "save_format": map_to(
        "saving.save_as",
        make_choice_converter(
            {"safetensors": take_value(["kohya"]), "diffusers": take_value(["diffusers"])}, "choose save_as."
        ),
    ),
    "push_to_hub": map_unsupported("upload the file yourself", False),
    "hf_repo_id": map_no_effect("nothing is uploaded"),
    "hf_private": map_no_effect("nothing is uploaded"),
}

_DATASET_KEYS: dict[str, KeyMapping] = {
    "folder_path": map_to("subset.image_dir"),
    "dataset_path": map_to("subset.image_dir"),
    "mask_path": map_to("subset.conditioning_data_dir", lambda v, b: take_value(v, objective__masked_loss=True)),
    "alpha_mask": map_to(
        "subset.alpha_mask", lambda v, b: take_value(v, objective__masked_loss=True) if v else mark_no_effect()
    ),
    "mask_min_value": map_unsupported("paint the mask's black as grey instead", 0, 0.0),
    "invert_mask": map_unsupported("invert the mask files", False),
    "default_caption": map_to("subset.class_tokens"),
    "trigger_word": map_to("subset.caption_prefix", _convert_own_trigger),
    "caption_ext": map_to("subset.caption_extension", _convert_caption_extension),
    "caption_type": map_to("subset.caption_extension", _convert_caption_extension),
    "caption_dropout_rate": map_to("subset.caption_dropout_rate", convert_number),
    "shuffle_tokens": map_to("subset.shuffle_caption", convert_boolean),
    "keep_tokens": map_to("subset.keep_tokens", convert_whole_number),
    "token_dropout_rate": map_to("subset.caption_tag_dropout_rate", convert_number),
    "num_repeats": map_to("subset.num_repeats", _convert_repeats),
    "is_reg": map_to("subset.is_reg", convert_boolean),
    "prior_reg": map_unsupported("regularisation pictures (is_reg) are weighted by prior_loss_weight instead", False),
    "flip_x": map_to(
        "subset.flip_aug", convert_boolean, "every other appearance is mirrored; there all pictures are added mirrored"
    ),
    "flip_y": map_unsupported("add pictures upside down as files", False),
    "random_crop": map_to("subset.random_crop", convert_boolean),
    "random_scale": map_unsupported("leave it out", False),
    "resolution": map_to(
        "dataset.resolution",
        lambda v, b: (
            take_changed(v, f"one [[datasets]] for each of {len(v)} sizes")
            if isinstance(v, list)
            else convert_whole_number(v, b)
        ),
    ),
    "buckets": map_to("dataset.enable_bucket", convert_boolean),
    "bucket_tolerance": map_to("dataset.bucket_reso_steps", convert_whole_number),
    "square_crop": map_to(
        "dataset.enable_bucket", lambda v, b: take_changed(False, "no buckets: one square") if v else mark_no_effect()
    ),
    "network_weight": map_to("dataset.network_multiplier", convert_number),
    "loss_multiplier": map_unsupported("repeat the folder (num_repeats) instead", 1, 1.0),
    "type": map_constant("image", todo="only pictures can be trained on"),
    "scale": map_unsupported("set resolution", 1, 1.0),
    "augments": map_unsupported("color_aug, flip_aug and random_crop are what there is"),
    "augmentations.*": map_unsupported("color_aug, flip_aug and random_crop are what there is"),
    "shuffle_augmentations": map_no_effect("there are no augmentations to shuffle"),
    "random_triggers": map_unsupported("use a wildcard {a|b} in captions, with enable_wildcard"),
    "random_triggers_max": map_no_effect("there are no random triggers"),
    "replacements": map_unsupported("edit the captions"),
    "use_short_captions": map_unsupported("write the short captions to .txt files", False),
    "standardize_images": map_unsupported(_NOISE_REMEDY, False),
    "control_path": map_unsupported("Anima takes no control pictures"),
    "controls": map_unsupported("Anima takes no control pictures"),
    "inpaint_path": map_unsupported("Anima takes no inpainting input"),
    "unconditional_path": map_unsupported("leave it out"),
    "clip_image_path": map_unsupported("leave it out"),
    "poi": map_unsupported("crop the pictures yourself"),
    "extra_values": map_unsupported("leave it out"),
    "num_frames": _NO_VIDEO,
    **dict.fromkeys(("shrink_video_to_frames", "fps", "do_i2v"), map_no_effect("for videos")),
    **dict.fromkeys(
        ("cache_latents", "cache_latents_to_disk", "cache_text_embeddings", "cache_clip_vision_to_disk"), _ALWAYS_CACHED
    ),
    **dict.fromkeys(("num_workers", "prefetch_factor"), map_implicit("pictures are read once, into the cache")),
    **dict.fromkeys(
        ("full_size_control_images", "control_transparent_color", "replay_transforms"), map_no_effect("for controls")
    ),
    **dict.fromkeys(("debug", "fast_image_size"), map_no_effect("changes no result")),
}

_TRAIN_KEYS: dict[str, KeyMapping] = {
    "batch_size": map_to("training.train_batch_size", convert_whole_number),
    "steps": map_to("training.max_train_steps", convert_whole_number),
    "lr": map_to("optimizer.learning_rate", convert_self_tuned_rate),
    "unet_lr": map_to("optimizer.learning_rate", convert_self_tuned_rate),
    "text_encoder_lr": map_to("optimizer.text_encoder_lr", convert_number),
    "optimizer": map_to("optimizer.optimizer_type", convert_optimizer_name),
    "optimizer_params.*": map_to("optimizer.optimizer_args.*", convert_number),
    "lr_scheduler": map_to("optimizer.lr_scheduler", convert_schedule_name),
    "lr_scheduler_params.num_warmup_steps": map_to("optimizer.lr_warmup_steps", convert_number),
    "lr_scheduler_params.*": map_unsupported("set lr_scheduler_num_cycles, _power or _min_lr_ratio"),
    "noise_scheduler": map_constant("flowmatch", todo="Anima is trained by flow matching"),
    "timestep_type": map_to(
        "objective.timestep_sampling",
        make_choice_converter(_SAMPLING_BY_TIMESTEP_TYPE, "choose timestep_sampling; sigmoid is taken."),
    ),
    "content_or_style": map_constant("balanced", todo="choose timestep_sampling; balanced is taken"),
    "linear_timesteps": map_unsupported("set weighting_scheme", False),
    "linear_timesteps2": map_unsupported("set weighting_scheme", False),
    "min_denoising_steps": map_to(
        "objective.min_sigma", lambda v, b: take_value(float(v) / 1000) if v else mark_no_effect()
    ),
    "max_denoising_steps": map_to(
        "objective.max_sigma",
        lambda v, b: take_value(float(v) / 1000) if float(v) < 999 else mark_no_effect("all of them"),
    ),
    "num_train_timesteps": map_implicit("sigmas are continuous here"),
    "dtype": map_to("model.precision", convert_compute_dtype),
    "gradient_checkpointing": map_to("training.gradient_checkpointing", convert_boolean),
    "gradient_accumulation": map_to("training.gradient_accumulation_steps", convert_whole_number),
    "gradient_accumulation_steps": map_to("training.gradient_accumulation_steps", convert_whole_number),
    "train_unet": map_constant(True, todo="the denoiser is always trained here"),
    "train_text_encoder": map_to("network.train_text_encoder", convert_boolean),
    "ema_config.use_ema": map_to("optimizer.ema_decay", _convert_use_ema),
    "ema_config.ema_decay": map_to("optimizer.ema_decay", _convert_ema),
    "ema_config.use_feedback": map_unsupported("leave it out", False),
    "ema_config.param_multiplier": map_unsupported("leave it out", 1, 1.0),
    "loss_type": map_to(
        "objective.loss_type",
        make_choice_converter(IMPORTED_LOSS_TYPES, "choose l2, l1, huber or smooth_l1 as loss_type."),
    ),
    "max_grad_norm": map_to("optimizer.max_grad_norm", convert_number),
    "reg_weight": map_to("objective.prior_loss_weight", convert_number),
    "seed": map_to("training.seed", convert_whole_number),
    "prompt_dropout_prob": map_to("general.caption_dropout_rate", convert_number),
    "skip_first_sample": map_to("preview.sample_at_first", lambda v, b: take_value(not v)),
    "force_first_sample": map_to("preview.sample_at_first", convert_boolean),
    "disable_sampling": map_unsupported("leave out sample.sample_every", False),
    "start_step": map_unsupported("resume from a state"),
    "diff_output_preservation": map_unsupported("use regularisation pictures (is_reg)", False),
    "diff_output_preservation_multiplier": map_no_effect("diff_output_preservation is not supported"),
    "diff_output_preservation_class": map_no_effect("diff_output_preservation is not supported"),
    "inverted_mask_prior": map_unsupported("leave it out", False),
    "inverted_mask_prior_multiplier": map_no_effect("inverted_mask_prior is not supported"),
    "bypass_guidance_embedding": map_no_effect("Anima has no guidance embedding"),
    "noise_offset": map_unsupported(_NOISE_REMEDY, 0, 0.0),
    "min_snr_gamma": map_unsupported("set weighting_scheme", 0),
    "snr_gamma": map_unsupported("set weighting_scheme", 0),
    **dict.fromkeys(
        ("noise_multiplier", "img_multiplier", "latent_multiplier"), map_unsupported(_NOISE_REMEDY, 1, 1.0)
    ),
    **dict.fromkeys(
        ("weight_jitter", "random_noise_shift", "random_noise_multiplier"), map_unsupported(_NOISE_REMEDY, 0, 0.0)
    ),
    **dict.fromkeys(
        ("learnable_snr_gos", "match_noise_norm", "single_item_batching", "short_and_long_captions", "do_cfg"),
        map_unsupported("leave it out", False),
    ),
    **dict.fromkeys(("train_refiner", "xformers", "sdp"), map_no_effect("for other models or other attention code")),
    **dict.fromkeys(("cache_text_embeddings", "unload_text_encoder"), _ALWAYS_CACHED),
    **dict.fromkeys(("switch_boundary_every", "merge_network_on_save"), map_unsupported("leave it out", 1, False)),
}

_MODEL_KEYS: dict[str, KeyMapping] = {
    "name_or_path": map_to("model.pretrained_model_name_or_path"),
    "vae_path": map_to("model.vae"),
    "te_name_or_path": map_to("model.qwen3"),
    "arch": map_implicit("the family is read from the model itself"),
    "quantize": map_to("model.storage", _convert_quantize),
    "qtype": map_to("model.storage", _convert_qtype),
    "quantize_te": map_implicit("texts are encoded once, before training, in full precision"),
    "qtype_te": map_implicit("texts are encoded once, before training, in full precision"),
    "low_vram": map_unsupported("set offload_blocks, gradient_checkpointing or storage", False),
    "layer_offloading": map_unsupported("set offload_blocks", False),
    "layer_offloading_transformer_percent": map_unsupported("set offload_blocks", 0),
    "layer_offloading_text_encoder_percent": map_implicit("texts are encoded once, before training"),
    "compile": map_to("training.torch_compile", convert_boolean),
    "dtype": map_implicit("the dtype of the arithmetic is train.dtype; the file's own is kept in memory"),
    "model_kwargs.*": map_unsupported("leave it out"),
    "assistant_lora_path": map_unsupported("merge it into the base model first: finitune merge"),
    "inference_lora_path": map_unsupported("merge it into the base model first: finitune merge"),
    "lora_path": map_to("network.network_weights"),
    "only_if_contains": map_to("network.only_patterns", convert_name_parts),
    "ignore_if_contains": map_to("network.exclude_patterns", convert_name_parts),
    "split_model_over_gpus": map_unsupported("several GPUs share batches here: accelerate launch", False),
    "attn_masking": map_no_effect("Anima pads its text and attends to all of it"),
    **dict.fromkeys(("vae_dtype", "te_dtype", "vae_device", "te_device"), map_implicit("chosen by model.precision")),
    **dict.fromkeys(
        ("is_flux", "is_lumina2", "is_xl", "is_v2", "is_v3", "is_pixart", "is_pixart_sigma", "is_auraflow"),
        map_implicit("the family is read from the model itself"),
    ),
}

_SAMPLE_KEYS: dict[str, KeyMapping] = {
    "sampler": map_implicit("previews are drawn by the family's own sampler"),
    "sample_every": map_to("preview.sample_every_n_steps", convert_positive),
    "sample_start_step": map_unsupported("previews begin with the first sample_every_n_steps", 0),
    "width": map_to("preview.sample_size", lambda v, b: take_value(f"{v}x{b.get('height', 512)}")),
    "height": map_to("preview.sample_size", lambda v, b: take_value(f"{b.get('width', 512)}x{v}")),
    "prompts": map_to(
        "preview.sample_prompts", lambda v, b: take_value([format_prompt_line(str(p), {"n": b.get("neg")}) for p in v])
    ),
    "samples[].prompt": map_to("sample.prompt"),
    "samples[].neg": map_to("sample.n"),
    "samples[].seed": map_to("sample.d"),
    "samples[].width": map_to("sample.w"),
    "samples[].height": map_to("sample.h"),
    "samples[].guidance_scale": map_to("sample.l"),
    "samples[].sample_steps": map_to("sample.s"),
    "samples[].*": map_unsupported("leave it out"),
    "neg": map_to(
        "preview.sample_prompts", lambda v, b: take_changed(None, "--n behind each prompt") if v else mark_no_effect()
    ),
    "seed": map_to("preview.sample_seed", convert_whole_number),
    "walk_seed": map_to("preview.sample_seed", convert_walk_seed),
    "guidance_scale": map_to("preview.sample_cfg", convert_number),
    "sample_steps": map_to("preview.sample_steps", convert_whole_number),
    "network_multiplier": map_unsupported("previews are drawn at strength 1", 1, 1.0),
    "guidance_rescale": map_unsupported("leave it out", 0, 0.0),
    "format": map_implicit("previews are PNG files"),
    "num_frames": _NO_VIDEO,
    "fps": map_no_effect("for videos"),
}

_TOP_LEVEL_KEYS: dict[str, KeyMapping] = {
    "job": map_constant("extension", "train", todo="only training jobs are imported"),
    "config.name": map_to("saving.output_name"),
    "meta.*": map_unsupported("the run writes its own metadata; add a training_comment"),
    f"{_PROCESS_PATH}.type": map_constant(
        "sd_trainer", "diffusion_trainer", "ui_trainer", todo="only trainers of adapters are imported"
    ),
    f"{_PROCESS_PATH}.training_folder": map_to("saving.output_dir"),
    f"{_PROCESS_PATH}.device": map_to("model.device"),
    f"{_PROCESS_PATH}.trigger_word": map_to("general.caption_prefix", _convert_trigger),
    f"{_PROCESS_PATH}.performance_log_every": map_no_effect("speed is always shown"),
    f"{_PROCESS_PATH}.sqlite_db_path": map_no_effect("for its user interface"),
    f"{_PROCESS_PATH}.logging.log_every": map_implicit("every step is logged"),
    f"{_PROCESS_PATH}.logging.use_wandb": map_unsupported("set log_with to tensorboard", False),
    f"{_PROCESS_PATH}.logging.*": map_implicit("the run's name is the output folder's"),
}
AI_TOOLKIT_KEYS: dict[str, KeyMapping] = {
    **_TOP_LEVEL_KEYS,
    **prefix_keys(f"{_PROCESS_PATH}.network", _NETWORK_KEYS),
    **prefix_keys(f"{_PROCESS_PATH}.save", _SAVE_KEYS),
    **prefix_keys(f"{_PROCESS_PATH}.datasets[]", _DATASET_KEYS),
    **prefix_keys(f"{_PROCESS_PATH}.train", _TRAIN_KEYS),
    **prefix_keys(f"{_PROCESS_PATH}.model", _MODEL_KEYS),
    **prefix_keys(f"{_PROCESS_PATH}.sample", _SAMPLE_KEYS),
}
