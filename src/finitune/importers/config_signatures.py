"""The option names that each program is known by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ConfigSignature:
    """A sort of document: names of options that leave no doubt, others of its own, and all there may be on top.

    A name is a path (`config.process`), or with a star in front the last part of one (`*network_module`).
    """

    name: str
    sure: tuple[str, ...]
    marks: tuple[str, ...]
    top: frozenset[str] = frozenset()

    def found(self, names: frozenset[str], top: frozenset[str]) -> list[str]:
        """The marks that the document has, the sure ones first; none where there is more than there may be."""
        if self.top and not top <= self.top:
            return []
        return [mark.lstrip("*") for mark in (*self.sure, *self.marks) if mark in names]


def make_config_signature(name: str, sure: str, marks: str, top: str = "") -> ConfigSignature:
    """A kind, its names written as words."""
    return ConfigSignature(name, tuple(sure.split()), tuple(marks.split()), frozenset(top.split()))


FINITUNE_CONFIG = "finitune"
KOHYA_TRAINING_TOML = "sd-scripts training TOML"
KOHYA_DATASET_TOML = "sd-scripts dataset TOML"
KOHYA_GUI_JSON = "kohya_ss GUI JSON"
AI_TOOLKIT_CONFIG = "ai-toolkit"
ONETRAINER_CONFIG = "OneTrainer"
ONETRAINER_CONCEPTS = "OneTrainer concepts"
SIMPLETUNER_CONFIG = "SimpleTuner"
SIMPLETUNER_BACKENDS = "SimpleTuner data backends"
DIFFUSION_PIPE_CONFIG = "diffusion-pipe"
DIFFUSION_PIPE_DATASET = "diffusion-pipe dataset"
KOHYA_COMMAND_LINE = "sd-scripts command line"

CONFIG_SIGNATURES = (
    make_config_signature(
        FINITUNE_CONFIG,
        "network.algorithm guard.max_skips objective.timestep_sampling saving.output_dir",
        """
        model.precision model.storage network.network_dim optimizer.optimizer_type preview.sample_prompts
        training.max_train_steps training.max_train_epochs training.offload_blocks saving.output_name
        """,
    ),
    make_config_signature(
        KOHYA_TRAINING_TOML,
        "*network_module *model_train_type",
        """
        *dataset_config *network_args *mixed_precision *save_model_as *unet_lr *sdpa *max_token_length
        *network_train_unet_only *cache_latents *max_data_loader_n_workers *xformers *train_data_dir *full_bf16
        *blocks_to_swap *no_half_vae *cache_text_encoder_outputs pretrained_model_name_or_path network_dim
        optimizer_type lr_warmup_steps
        """,
    ),
    make_config_signature(
        KOHYA_DATASET_TOML,
        "datasets[].subsets[].image_dir datasets[].subsets[].metadata_file",
        """
        datasets[].subsets[].num_repeats datasets[].subsets[].class_tokens datasets[].batch_size
        datasets[].resolution general.resolution general.caption_extension
        """,
        top="datasets general",
    ),
    make_config_signature(
        KOHYA_GUI_JSON,
        "LoRA_type LyCORIS_preset",
        """
        additional_parameters model_list max_resolution lr_warmup epoch num_cpu_threads_per_process sdxl
        stop_text_encoder_training train_batch_size network_dim unet_lr text_encoder_lr xformers
        sample_every_n_steps gradient_checkpointing block_dims v_parameterization mem_eff_attn cache_latents
        mixed_precision save_model_as train_data_dir dataset_config pretrained_model_name_or_path
        """,
    ),
    make_config_signature(
        AI_TOOLKIT_CONFIG,
        "config.process[].train config.process[].type",
        """
        job config.name config.process[].model config.process[].network config.process[].datasets
        config.process[].save config.process[].sample meta
        """,
    ),
    make_config_signature(
        ONETRAINER_CONFIG,
        "training_method concept_file_name peft_type",
        """
        model_type base_model_name train_dtype learning_rate_scheduler timestep_distribution concepts
        output_model_destination output_model_format transformer.weight_dtype optimizer.optimizer
        layer_filter workspace_dir dynamic_timestep_shifting text_encoder.train fallback_train_dtype
        """,
    ),
    make_config_signature(
        ONETRAINER_CONCEPTS,
        "[].balancing [].text.prompt_source [].image_variations",
        "[].text_variations [].path [].enabled [].loss_weight [].include_subdirectories [].image [].text",
    ),
    make_config_signature(
        SIMPLETUNER_CONFIG,
        "model_family data_backend_config",
        """
        model_flavour lora_type base_model_precision checkpointing_steps checkpoint_step_interval
        checkpoints_total_limit num_train_epochs validation_prompt validation_num_inference_steps
        validation_resolution lycoris_config flow_schedule_shift resolution_type report_to
        aspect_bucket_rounding minimum_image_size num_validation_images
        """,
    ),
    make_config_signature(
        SIMPLETUNER_BACKENDS,
        "[].instance_data_dir [].cache_dir_vae",
        """
        [].dataset_type [].caption_strategy [].crop_aspect [].crop_style [].resolution_type [].repeats [].id
        [].minimum_image_size [].metadata_backend
        """,
    ),
    make_config_signature(
        DIFFUSION_PIPE_CONFIG,
        "micro_batch_size_per_gpu pipeline_stages activation_checkpointing",
        """
        model.type model.transformer_path model.timestep_sample_method adapter.type adapter.rank
        optimizer.type optimizer.lr dataset gradient_clipping caching_batch_size steps_per_print
        checkpoint_every_n_minutes eval_every_n_epochs monitoring.enable_wandb
        """,
    ),
    make_config_signature(
        DIFFUSION_PIPE_DATASET,
        "directory[].path enable_ar_bucket",
        """
        resolutions min_ar max_ar num_ar_buckets ar_buckets frame_buckets directory[].num_repeats
        directory[].mask_path cache_shuffle_num
        """,
    ),
)
