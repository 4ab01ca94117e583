"""What becomes of each key of ai-toolkit.

Source of names, defaults and meanings: ostris/ai-toolkit toolkit/config_modules.py (MIT) and its example files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finitune.config.importers.mapping import (
    Answer,
    Row,
    always,
    changed,
    no_effect,
    not_here,
    number,
    one_of,
    otherwise,
    positive,
    switch,
    taken,
    to,
    under,
    unsupported,
    whole,
    without_effect,
)
from finitune.config.importers.terms import (
    LOSSES,
    compute_dtype,
    optimizer_name,
    patterns_of_parts,
    prompt_line,
    saved_dtype,
    schedule,
    stored_dtype,
    whole_number,
)

PROCESS = "config.process[]"
FULL_RANK = 1_000_000
CACHED = otherwise("latents and texts are always cached on disk here")
VIDEO = not_here("videos cannot be trained on; use pictures", 1, False)
NOISE = "the noise is N(0, 1) here; leave it out"


def _rank(value: Any, beside: Mapping[str, Any]) -> Answer:
    if beside.get("rank") is not None and value is not beside["rank"]:
        return no_effect("rank is given, too, and counts")
    if beside.get("type") == "lokr" and whole_number(value) >= FULL_RANK:
        return changed(1, "so large a rank means a full second factor", network__full_matrix=True)
    return whole(value, beside)


def _alpha(value: Any, beside: Mapping[str, Any]) -> Answer:
    if beside.get("type") == "lokr" and beside.get("lokr_full_rank", True):
        return no_effect("a full second factor has the scale 1")
    return number(value, beside)


def _full_rank(value: Any, beside: Mapping[str, Any]) -> Answer:
    if beside.get("type") != "lokr":
        return no_effect("only for lokr")
    return taken(value)


def _ema(value: Any, beside: Mapping[str, Any]) -> Answer:
    return number(value, beside) if beside.get("use_ema") else no_effect("use_ema is not set")


def _use_ema(value: Any, beside: Mapping[str, Any]) -> Answer:
    if not value:
        return no_effect()
    return changed(0.999 if beside.get("ema_decay") is None else beside["ema_decay"], "the decay switches it on")


def _quantize(value: Any, beside: Mapping[str, Any]) -> Answer:
    return stored_dtype(beside.get("qtype") or "qfloat8", beside) if value else no_effect()


def _qtype(value: Any, beside: Mapping[str, Any]) -> Answer:
    return stored_dtype(value, beside) if beside.get("quantize") else no_effect("quantize is not set")


def _learning_rate(value: Any, beside: Mapping[str, Any]) -> Answer:
    answer = number(value, beside)
    finds_itself = str(beside.get("optimizer", "")).lower().startswith(("prodigy", "dadaptation"))
    if finds_itself and isinstance(answer.value, (int, float)) and answer.value < 0.1:
        return changed(1.0, "below 0.1 ai-toolkit takes 1 for an optimiser that finds the rate itself")
    return answer


def _caption_extension(value: Any, beside: Mapping[str, Any]) -> Answer:
    return taken("." + str(value).lstrip("."))


def _walk_seed(value: Any, beside: Mapping[str, Any]) -> Answer:
    if value:
        return no_effect("each prompt has the next seed here anyway")
    return unsupported("each prompt has the next seed here; write --d SEED behind each prompt for one and the same")


def _repeats(value: Any, beside: Mapping[str, Any]) -> Answer:
    answer = whole(value, beside)
    return changed(1, "0 shows each picture once") if answer.value == 0 else answer


def _trigger(value: Any, beside: Mapping[str, Any]) -> Answer:
    note = "put in front of every caption, whether it is there already or not"
    return changed(f"{value} ", note, saving__trigger_phrase=value)


def _own_trigger(value: Any, beside: Mapping[str, Any]) -> Answer:
    return changed(f"{value} ", "put in front of every caption, whether it is there already or not")


TIMESTEPS: Mapping[str, object] = {
    "sigmoid": "sigmoid",
    "linear": "uniform",
    "shift": changed(
        "sigma",
        "uniform draws, shifted by Anima's 3",
        objective__weighting_scheme="none",
        objective__discrete_flow_shift=3.0,
    ),
    **dict.fromkeys(
        ("flux_shift", "lumina2_shift"),
        changed("flux_shift", "shifted by the size of the picture; draws are by sigmoid here, uniform there"),
    ),
}
TYPES: Mapping[str, object] = {
    "lora": "lora",
    "locon": changed("lora", "LoRA; convolutions get conv_dim"),
    "lokr": "lokr",
}

NETWORK: dict[str, Row] = {
    "type": to("network.algorithm", one_of(TYPES, "choose lora, loha, lokr or another algorithm.")),
    "rank": to("network.network_dim", _rank),
    "linear": to("network.network_dim", _rank),
    "alpha": to("network.network_alpha", lambda v, b: number(v, b) if b.get("linear_alpha") is None else no_effect()),
    "linear_alpha": to("network.network_alpha", _alpha),
    "conv": to("network.conv_dim", whole),
    "conv_alpha": to("network.conv_alpha", number),
    "dropout": to("network.network_dropout", number),
    "lokr_full_rank": to("network.full_matrix", _full_rank),
    "lokr_factor": to("network.factor", whole),
    "network_kwargs.only_if_contains": to("network.only_patterns", patterns_of_parts),
    "network_kwargs.ignore_if_contains": to("network.exclude_patterns", patterns_of_parts),
    "network_kwargs.*": not_here("leave it out"),
    "transformer_only": without_effect("only the denoiser is trained here unless train_text_encoder is set"),
    "split_multistage_loras": without_effect("Anima has one stage"),
    "pretrained_lora_path": to("network.network_weights"),
    "normalize": not_here("leave it out", False),
    "old_lokr_format": without_effect("files have today's form"),
    "lorm.*": not_here("LoRM cannot be trained here; choose lora"),
}

SAVE: dict[str, Row] = {
    "dtype": to("saving.save_precision", saved_dtype),
    "save_every": to("saving.save_every_n_steps", positive),
    "max_step_saves_to_keep": to("saving.save_last_n", positive),
    "save_format": to(
        "saving.save_as",
        one_of({"safetensors": taken(["kohya"]), "diffusers": taken(["diffusers"])}, "choose save_as."),
    ),
    "push_to_hub": not_here("upload the file yourself", False),
    "hf_repo_id": without_effect("nothing is uploaded"),
    "hf_private": without_effect("nothing is uploaded"),
}

DATASET: dict[str, Row] = {
    "folder_path": to("subset.image_dir"),
    "dataset_path": to("subset.image_dir"),
    "mask_path": to("subset.conditioning_data_dir", lambda v, b: taken(v, objective__masked_loss=True)),
    "alpha_mask": to("subset.alpha_mask", lambda v, b: taken(v, objective__masked_loss=True) if v else no_effect()),
    "mask_min_value": not_here("paint the mask's black as grey instead", 0, 0.0),
    "invert_mask": not_here("invert the mask files", False),
    "default_caption": to("subset.class_tokens"),
    "trigger_word": to("subset.caption_prefix", _own_trigger),
    "caption_ext": to("subset.caption_extension", _caption_extension),
    "caption_type": to("subset.caption_extension", _caption_extension),
    "caption_dropout_rate": to("subset.caption_dropout_rate", number),
    "shuffle_tokens": to("subset.shuffle_caption", switch),
    "keep_tokens": to("subset.keep_tokens", whole),
    "token_dropout_rate": to("subset.caption_tag_dropout_rate", number),
    "num_repeats": to("subset.num_repeats", _repeats),
    "is_reg": to("subset.is_reg", switch),
    "prior_reg": not_here("regularisation pictures (is_reg) are weighted by prior_loss_weight instead", False),
    "flip_x": to(
        "subset.flip_aug", switch, "every other appearance is mirrored; there all pictures are added mirrored"
    ),
    "flip_y": not_here("add pictures upside down as files", False),
    "random_crop": to("subset.random_crop", switch),
    "random_scale": not_here("leave it out", False),
    "resolution": to(
        "dataset.resolution",
        lambda v, b: changed(v, f"one [[datasets]] for each of {len(v)} sizes") if isinstance(v, list) else whole(v, b),
    ),
    "buckets": to("dataset.enable_bucket", switch),
    "bucket_tolerance": to("dataset.bucket_reso_steps", whole),
    "square_crop": to(
        "dataset.enable_bucket", lambda v, b: changed(False, "no buckets: one square") if v else no_effect()
    ),
    "network_weight": to("dataset.network_multiplier", number),
    "loss_multiplier": not_here("repeat the folder (num_repeats) instead", 1, 1.0),
    "type": always("image", todo="only pictures can be trained on"),
    "scale": not_here("set resolution", 1, 1.0),
    "augments": not_here("color_aug, flip_aug and random_crop are what there is"),
    "augmentations.*": not_here("color_aug, flip_aug and random_crop are what there is"),
    "shuffle_augmentations": without_effect("there are no augmentations to shuffle"),
    "random_triggers": not_here("use a wildcard {a|b} in captions, with enable_wildcard"),
    "random_triggers_max": without_effect("there are no random triggers"),
    "replacements": not_here("edit the captions"),
    "use_short_captions": not_here("write the short captions to .txt files", False),
    "standardize_images": not_here(NOISE, False),
    "control_path": not_here("Anima takes no control pictures"),
    "controls": not_here("Anima takes no control pictures"),
    "inpaint_path": not_here("Anima takes no inpainting input"),
    "unconditional_path": not_here("leave it out"),
    "clip_image_path": not_here("leave it out"),
    "poi": not_here("crop the pictures yourself"),
    "extra_values": not_here("leave it out"),
    "num_frames": VIDEO,
    **dict.fromkeys(("shrink_video_to_frames", "fps", "do_i2v"), without_effect("for videos")),
    **dict.fromkeys(
        ("cache_latents", "cache_latents_to_disk", "cache_text_embeddings", "cache_clip_vision_to_disk"), CACHED
    ),
    **dict.fromkeys(("num_workers", "prefetch_factor"), otherwise("pictures are read once, into the cache")),
    **dict.fromkeys(
        ("full_size_control_images", "control_transparent_color", "replay_transforms"), without_effect("for controls")
    ),
    **dict.fromkeys(("debug", "fast_image_size"), without_effect("changes no result")),
}

TRAIN: dict[str, Row] = {
    "batch_size": to("training.train_batch_size", whole),
    "steps": to("training.max_train_steps", whole),
    "lr": to("optimizer.learning_rate", _learning_rate),
    "unet_lr": to("optimizer.learning_rate", _learning_rate),
    "text_encoder_lr": to("optimizer.text_encoder_lr", number),
    "optimizer": to("optimizer.optimizer_type", optimizer_name),
    "optimizer_params.*": to("optimizer.optimizer_args.*", number),
    "lr_scheduler": to("optimizer.lr_scheduler", schedule),
    "lr_scheduler_params.num_warmup_steps": to("optimizer.lr_warmup_steps", number),
    "lr_scheduler_params.*": not_here("set lr_scheduler_num_cycles, _power or _min_lr_ratio"),
    "noise_scheduler": always("flowmatch", todo="Anima is trained by flow matching"),
    "timestep_type": to(
        "objective.timestep_sampling",
        one_of(TIMESTEPS, "choose timestep_sampling; sigmoid is taken."),
    ),
    "content_or_style": always("balanced", todo="choose timestep_sampling; balanced is taken"),
    "linear_timesteps": not_here("set weighting_scheme", False),
    "linear_timesteps2": not_here("set weighting_scheme", False),
    "min_denoising_steps": to("objective.min_sigma", lambda v, b: taken(float(v) / 1000) if v else no_effect()),
    "max_denoising_steps": to(
        "objective.max_sigma", lambda v, b: taken(float(v) / 1000) if float(v) < 999 else no_effect("all of them")
    ),
    "num_train_timesteps": otherwise("sigmas are continuous here"),
    "dtype": to("model.precision", compute_dtype),
    "gradient_checkpointing": to("training.gradient_checkpointing", switch),
    "gradient_accumulation": to("training.gradient_accumulation_steps", whole),
    "gradient_accumulation_steps": to("training.gradient_accumulation_steps", whole),
    "train_unet": always(True, todo="the denoiser is always trained here"),
    "train_text_encoder": to("network.train_text_encoder", switch),
    "ema_config.use_ema": to("optimizer.ema_decay", _use_ema),
    "ema_config.ema_decay": to("optimizer.ema_decay", _ema),
    "ema_config.use_feedback": not_here("leave it out", False),
    "ema_config.param_multiplier": not_here("leave it out", 1, 1.0),
    "loss_type": to("objective.loss_type", one_of(LOSSES, "choose l2, l1, huber or smooth_l1 as loss_type.")),
    "max_grad_norm": to("optimizer.max_grad_norm", number),
    "reg_weight": to("objective.prior_loss_weight", number),
    "seed": to("training.seed", whole),
    "prompt_dropout_prob": to("general.caption_dropout_rate", number),
    "skip_first_sample": to("preview.sample_at_first", lambda v, b: taken(not v)),
    "force_first_sample": to("preview.sample_at_first", switch),
    "disable_sampling": not_here("leave out sample.sample_every", False),
    "start_step": not_here("resume from a state"),
    "diff_output_preservation": not_here("use regularisation pictures (is_reg)", False),
    "diff_output_preservation_multiplier": without_effect("diff_output_preservation is not supported"),
    "diff_output_preservation_class": without_effect("diff_output_preservation is not supported"),
    "inverted_mask_prior": not_here("leave it out", False),
    "inverted_mask_prior_multiplier": without_effect("inverted_mask_prior is not supported"),
    "bypass_guidance_embedding": without_effect("Anima has no guidance embedding"),
    "noise_offset": not_here(NOISE, 0, 0.0),
    "min_snr_gamma": not_here("set weighting_scheme", 0),
    "snr_gamma": not_here("set weighting_scheme", 0),
    **dict.fromkeys(("noise_multiplier", "img_multiplier", "latent_multiplier"), not_here(NOISE, 1, 1.0)),
    **dict.fromkeys(("weight_jitter", "random_noise_shift", "random_noise_multiplier"), not_here(NOISE, 0, 0.0)),
    **dict.fromkeys(
        ("learnable_snr_gos", "match_noise_norm", "single_item_batching", "short_and_long_captions", "do_cfg"),
        not_here("leave it out", False),
    ),
    **dict.fromkeys(("train_refiner", "xformers", "sdp"), without_effect("for other models or other attention code")),
    **dict.fromkeys(("cache_text_embeddings", "unload_text_encoder"), CACHED),
    **dict.fromkeys(("switch_boundary_every", "merge_network_on_save"), not_here("leave it out", 1, False)),
}

MODEL: dict[str, Row] = {
    "name_or_path": to("model.pretrained_model_name_or_path"),
    "vae_path": to("model.vae"),
    "te_name_or_path": to("model.qwen3"),
    "arch": otherwise("the family is read from the model itself"),
    "quantize": to("model.storage", _quantize),
    "qtype": to("model.storage", _qtype),
    "quantize_te": otherwise("texts are encoded once, before training, in full precision"),
    "qtype_te": otherwise("texts are encoded once, before training, in full precision"),
    "low_vram": not_here("set offload_blocks, gradient_checkpointing or storage", False),
    "layer_offloading": not_here("set offload_blocks", False),
    "layer_offloading_transformer_percent": not_here("set offload_blocks", 0),
    "layer_offloading_text_encoder_percent": otherwise("texts are encoded once, before training"),
    "compile": to("training.torch_compile", switch),
    "dtype": otherwise("the dtype of the arithmetic is train.dtype; the file's own is kept in memory"),
    "model_kwargs.*": not_here("leave it out"),
    "assistant_lora_path": not_here("merge it into the base model first: finitune merge"),
    "inference_lora_path": not_here("merge it into the base model first: finitune merge"),
    "lora_path": to("network.network_weights"),
    "only_if_contains": to("network.only_patterns", patterns_of_parts),
    "ignore_if_contains": to("network.exclude_patterns", patterns_of_parts),
    "split_model_over_gpus": not_here("several GPUs share batches here: accelerate launch", False),
    "attn_masking": without_effect("Anima pads its text and attends to all of it"),
    **dict.fromkeys(("vae_dtype", "te_dtype", "vae_device", "te_device"), otherwise("chosen by model.precision")),
    **dict.fromkeys(
        ("is_flux", "is_lumina2", "is_xl", "is_v2", "is_v3", "is_pixart", "is_pixart_sigma", "is_auraflow"),
        otherwise("the family is read from the model itself"),
    ),
}

SAMPLE: dict[str, Row] = {
    "sampler": otherwise("previews are drawn by the family's own sampler"),
    "sample_every": to("preview.sample_every_n_steps", positive),
    "sample_start_step": not_here("previews begin with the first sample_every_n_steps", 0),
    "width": to("preview.sample_size", lambda v, b: taken(f"{v}x{b.get('height', 512)}")),
    "height": to("preview.sample_size", lambda v, b: taken(f"{b.get('width', 512)}x{v}")),
    "prompts": to("preview.sample_prompts", lambda v, b: taken([prompt_line(str(p), {"n": b.get("neg")}) for p in v])),
    "samples[].prompt": to("sample.prompt"),
    "samples[].neg": to("sample.n"),
    "samples[].seed": to("sample.d"),
    "samples[].width": to("sample.w"),
    "samples[].height": to("sample.h"),
    "samples[].guidance_scale": to("sample.l"),
    "samples[].sample_steps": to("sample.s"),
    "samples[].*": not_here("leave it out"),
    "neg": to("preview.sample_prompts", lambda v, b: changed(None, "--n behind each prompt") if v else no_effect()),
    "seed": to("preview.sample_seed", whole),
    "walk_seed": to("preview.sample_seed", _walk_seed),
    "guidance_scale": to("preview.sample_cfg", number),
    "sample_steps": to("preview.sample_steps", whole),
    "network_multiplier": not_here("previews are drawn at strength 1", 1, 1.0),
    "guidance_rescale": not_here("leave it out", 0, 0.0),
    "format": otherwise("previews are PNG files"),
    "num_frames": VIDEO,
    "fps": without_effect("for videos"),
}

TOP: dict[str, Row] = {
    "job": always("extension", "train", todo="only training jobs are imported"),
    "config.name": to("saving.output_name"),
    "meta.*": not_here("the run writes its own metadata; add a training_comment"),
    f"{PROCESS}.type": always(
        "sd_trainer", "diffusion_trainer", "ui_trainer", todo="only trainers of adapters are imported"
    ),
    f"{PROCESS}.training_folder": to("saving.output_dir"),
    f"{PROCESS}.device": to("model.device"),
    f"{PROCESS}.trigger_word": to("general.caption_prefix", _trigger),
    f"{PROCESS}.performance_log_every": without_effect("speed is always shown"),
    f"{PROCESS}.sqlite_db_path": without_effect("for its user interface"),
    f"{PROCESS}.logging.log_every": otherwise("every step is logged"),
    f"{PROCESS}.logging.use_wandb": not_here("set log_with to tensorboard", False),
    f"{PROCESS}.logging.*": otherwise("the run's name is the output folder's"),
}
ROWS: dict[str, Row] = {
    **TOP,
    **under(f"{PROCESS}.network", NETWORK),
    **under(f"{PROCESS}.save", SAVE),
    **under(f"{PROCESS}.datasets[]", DATASET),
    **under(f"{PROCESS}.train", TRAIN),
    **under(f"{PROCESS}.model", MODEL),
    **under(f"{PROCESS}.sample", SAMPLE),
}
