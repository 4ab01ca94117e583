"""For each rule of the table: its code and option, what sets it off, and what silences it again."""

NO = "CONFIG-NO-EFFECT"
EPOCHS = "training.max_train_epochs = 4; training.max_train_steps = -"
PREVIEWS = "preview.sample_every_n_steps = 10; preview.sample_prompts = ['a cat']"

MODEL = (
    (
        "OFFLOAD-TEXT-ENCODER",
        "training.offload_blocks",
        "training.offload_blocks = 4; network.train_text_encoder = true",
        "network.train_text_encoder = false",
    ),
    (
        "OFFLOAD-NEEDS-GPU",
        "training.offload_blocks",
        "training.offload_blocks = 4; model.device = 'cpu'",
        "model.device = 'cuda'",
    ),
    (
        "STORAGE-TEXT-ENCODER",
        "model.storage",
        "model.storage = 'fp8'; network.train_text_encoder = true",
        "model.storage = 'auto'",
    ),
    (NO, "model.plan", "model.plan = 'p.toml'; model.precision = 'bf16'", "model.precision = 'planned-half'"),
    *(
        (
            NO,
            f"model.{name}",
            f"model.{name} = 'x'; model.pretrained_model_name_or_path = 'pico-anima'",
            "model.pretrained_model_name_or_path = 'anima.safetensors'",
        )
        for name in ("qwen3", "vae", "tokenizers")
    ),
)

NETWORK = (
    ("DORA-ALGORITHM", "network.dora", "network.dora = true; network.algorithm = 'oft'", "network.algorithm = 'loha'"),
    (
        "NETWORK-SCALE",
        "network.network_alpha",
        "network.network_dim = 4; network.network_alpha = 128",
        "network.network_alpha = 0",
    ),
    (
        "NETWORK-SCALE-BY-PATTERN",
        "network.network_reg_dims",
        "network.network_reg_dims = {'.*q_proj' = 4}",
        "network.network_reg_alphas = {'.*q_proj' = 4}",
    ),
    (
        "PATTERN-UNREADABLE",
        "network",
        "network.exclude_patterns = ['*.mlp']",
        r"network.exclude_patterns = ['.*\.mlp']",
    ),
    ("PATTERN-VALUE", "network", "network.network_reg_dims = {'.*' = 0}", "network.network_reg_dims = {'.*' = 1}"),
    (
        "NETWORK-RATE-ZERO",
        "network.network_reg_lrs",
        "network.network_reg_lrs = {'.*' = 0}",
        "network.network_reg_lrs = {'.*' = 1e-5}",
    ),
    (NO, "network.factor", "network.factor = 4", "network.algorithm = 'lokr'"),
    (NO, "network.full_matrix", "network.full_matrix = true", "network.algorithm = 'lokr'"),
    (NO, "network.decompose_both", "network.decompose_both = true", "network.algorithm = 'lokr'"),
    (NO, "network.unbalanced", "network.unbalanced = true", "network.algorithm = 'lokr'"),
    (NO, "network.use_tucker", "network.use_tucker = true; network.algorithm = 'full'", "network.algorithm = 'lora'"),
    (NO, "network.projection_prng_key", "network.projection_prng_key = 3", "network.algorithm = 'vera'"),
    (NO, "network.constraint", "network.constraint = 0.1; network.algorithm = 'oft_v2'", "network.algorithm = 'boft'"),
    (NO, "network.network_dim", "network.network_dim = 8; network.algorithm = 'ia3'", "network.algorithm = 'oft'"),
    (NO, "network.network_alpha", "network.network_alpha = 8; network.algorithm = 'oft'", "network.algorithm = 'lokr'"),
    (NO, "network.conv_dim", "network.conv_dim = 8; network.algorithm = 'full'", "network.conv_dim = 0"),
    (NO, "network.conv_alpha", "network.conv_alpha = 8; network.conv_dim = 0", "network.conv_dim = 8"),
    (NO, "network.rs_lora", "network.rs_lora = true; network.algorithm = 'oft'", "network.algorithm = 'glora'"),
    (
        NO,
        "network.network_reg_dims",
        "network.network_reg_dims = {'.*' = 16}; network.algorithm = 'full'",
        "network.algorithm = 'oft'",
    ),
    (
        NO,
        "network.network_reg_alphas",
        "network.network_reg_alphas = {'.*' = 16}; network.algorithm = 'oft'",
        "network.algorithm = 'lora'",
    ),
)

OBJECTIVE = (
    (
        "SIGMA-RANGE",
        "objective.min_sigma",
        "objective.min_sigma = 0.5; objective.max_sigma = 0.5",
        "objective.max_sigma = 1.0",
    ),
    (
        "WEIGHT-UNBOUNDED",
        "objective.weighting_scheme",
        "objective.weighting_scheme = 'sigma_sqrt'",
        "objective.min_sigma = 0.02",
    ),
    (
        NO,
        "objective.sigmoid_scale",
        "objective.sigmoid_scale = 2.0; objective.timestep_sampling = 'uniform'",
        "objective.timestep_sampling = 'shift'",
    ),
    (
        NO,
        "objective.discrete_flow_shift",
        "objective.discrete_flow_shift = 3.0",
        "objective.timestep_sampling = 'sigma'",
    ),
    (NO, "objective.weighting_scheme", "objective.weighting_scheme = 'mode'", "objective.timestep_sampling = 'sigma'"),
    (
        NO,
        "objective.logit_mean",
        "objective.logit_mean = 0.5; objective.timestep_sampling = 'sigma'",
        "objective.weighting_scheme = 'logit_normal'",
    ),
    (
        NO,
        "objective.logit_std",
        "objective.logit_std = 0.5; objective.weighting_scheme = 'logit_normal'",
        "objective.timestep_sampling = 'sigma'",
    ),
    (
        NO,
        "objective.mode_scale",
        "objective.mode_scale = 1.0",
        "objective.weighting_scheme = 'mode'; objective.timestep_sampling = 'sigma'",
    ),
    (NO, "objective.huber_c", "objective.huber_c = 0.2", "objective.loss_type = 'smooth_l1'"),
    (NO, "objective.mask_normalised", "objective.mask_normalised = true", "objective.masked_loss = true"),
    (
        NO,
        "objective.mask_area_floor",
        "objective.mask_area_floor = 0.1; objective.masked_loss = true",
        "objective.mask_normalised = true",
    ),
    ("MASKS-MISSING", "objective.masked_loss", "objective.masked_loss = true", "subset.alpha_mask = true"),
    (
        "MASKS-NOT-USED",
        "objective.masked_loss",
        "subset.conditioning_data_dir = 'masks'",
        "objective.masked_loss = true",
    ),
    (
        "REGULARISATION-WEIGHTLESS",
        "objective.prior_loss_weight",
        "objective.prior_loss_weight = 0; subset.is_reg = true",
        "objective.prior_loss_weight = 1",
    ),
    (NO, "objective.prior_loss_weight", "objective.prior_loss_weight = 0.5", "subset.is_reg = true"),
)

OPTIMIZER = (
    (
        "RATE-ZERO",
        "optimizer.learning_rate",
        "optimizer.learning_rate = 0",
        "optimizer.text_encoder_lr = 1e-5; network.train_text_encoder = true",
    ),
    (
        "OPTIMIZER-RATE",
        "optimizer.learning_rate",
        "optimizer.learning_rate = 1.0",
        "optimizer.optimizer_type = 'Prodigy'",
    ),
    (
        "OPTIMIZER-RATE-SELF-TUNED",
        "optimizer.learning_rate",
        "optimizer.optimizer_type = 'prodigyopt.Prodigy'",
        "optimizer.learning_rate = 1.0",
    ),
    (
        "OPTIMIZER-ONE-RATE",
        "optimizer.optimizer_type",
        "optimizer.optimizer_type = 'DAdaptAdam'; optimizer.loraplus_lr_ratio = 4",
        "optimizer.loraplus_lr_ratio = -",
    ),
    (
        "OPTIMIZER-ARGUMENT",
        "optimizer.optimizer_args",
        "optimizer.optimizer_args = {lr = 1e-4}",
        "optimizer.optimizer_args = {eps = 1e-8}",
    ),
    (
        "OPTIMIZER-NEEDS-CUDA",
        "optimizer.optimizer_type",
        "optimizer.optimizer_type = 'AdamW8bit'; model.device = 'cpu'",
        "optimizer.optimizer_type = 'AdamW'",
    ),
    (
        "LORAPLUS-WITHOUT-EFFECT",
        "optimizer.loraplus_lr_ratio",
        "optimizer.loraplus_lr_ratio = 4; network.algorithm = 'glora'",
        "network.algorithm = 'lokr'",
    ),
    (
        "SCHEDULE-FREE",
        "optimizer.lr_scheduler",
        "optimizer.optimizer_type = 'ScheduleFreeAdamW'; optimizer.lr_scheduler = 'cosine'",
        "optimizer.lr_scheduler = 'constant'",
    ),
    (
        "AVERAGE-SLOW",
        "optimizer.ema_decay",
        "optimizer.ema_decay = 0.9999; training.max_train_steps = 1000",
        "optimizer.ema_decay = 0.99",
    ),
    (
        "WARMUP-TOO-LONG",
        "optimizer.lr_warmup_steps",
        "optimizer.lr_warmup_steps = 1600; optimizer.lr_scheduler = 'linear'",
        "training.max_train_steps = 1601",
    ),
    (
        NO,
        "optimizer.lr_warmup_steps",
        "optimizer.lr_warmup_steps = 0.1",
        "optimizer.lr_scheduler = 'constant_with_warmup'",
    ),
    (
        NO,
        "optimizer.lr_scheduler_num_cycles",
        "optimizer.lr_scheduler_num_cycles = 3; optimizer.lr_scheduler = 'cosine'",
        "optimizer.lr_scheduler = 'cosine_with_restarts'",
    ),
    (NO, "optimizer.lr_scheduler_power", "optimizer.lr_scheduler_power = 2.0", "optimizer.lr_scheduler = 'polynomial'"),
    (
        NO,
        "optimizer.lr_scheduler_min_lr_ratio",
        "optimizer.lr_scheduler_min_lr_ratio = 0.2",
        "optimizer.lr_scheduler = 'cosine_with_min_lr'",
    ),
    (NO, "optimizer.text_encoder_lr", "optimizer.text_encoder_lr = 1e-5", "network.train_text_encoder = true"),
    (NO, "optimizer.llm_adapter_lr", "optimizer.llm_adapter_lr = 1e-5", "network.train_llm_adapter = true"),
    (
        NO,
        "optimizer.learning_rate",
        "optimizer.optimizer_args = {relative_step = true}",
        "optimizer.optimizer_args = {relative_step = false}",
    ),
)

RUN = (
    (
        "LENGTH-TWICE",
        "training.max_train_epochs",
        "training.max_train_epochs = 4; training.max_train_steps = 100",
        EPOCHS,
    ),
    (
        "COMPILE-OFFLOAD",
        "training.torch_compile",
        "training.torch_compile = true; training.offload_blocks = 4",
        "training.offload_blocks = 0",
    ),
    (
        "COUNTED-TWICE",
        "saving.save_every_n_epochs",
        "saving.save_every_n_epochs = 1; saving.save_every_n_steps = 9",
        "saving.save_every_n_steps = -",
    ),
    ("NEVER-REACHED", "saving.save_every_n_steps", "saving.save_every_n_steps = 2000", EPOCHS),
    ("SAVED-ONCE", "saving.save_every_n_steps", "training.max_train_steps = 3000", "saving.save_every_n_epochs = 1"),
    (NO, "saving.save_last_n", "saving.save_last_n = 3", "saving.save_every_n_epochs = 1"),
    (
        "RESUME-WEIGHTS",
        "network.network_weights",
        "network.network_weights = 'a.safetensors'; saving.resume = 'auto'",
        "saving.resume = 'never'",
    ),
    (
        "RESUME-WITHOUT-STATE",
        "saving.save_state",
        "saving.save_state = false; saving.resume = 'auto'",
        "saving.save_state = true",
    ),
    ("SPELLING-NONE", "saving.save_as", "saving.save_as = []", "saving.save_as = ['comfy']"),
    ("OUTPUT-NAME", "saving.output_name", "saving.output_name = 'runs/a'", "saving.output_name = 'my style, v1.5'"),
    ("OUTPUT-NAME-ENDING", "saving.output_name", "saving.output_name = 'a.safetensors'", "saving.output_name = 'a'"),
    (
        "COUNTED-TWICE",
        "preview.sample_every_n_epochs",
        f"{PREVIEWS}; preview.sample_every_n_epochs = 1",
        "preview.sample_every_n_epochs = -",
    ),
    (
        "NEVER-REACHED",
        "preview.sample_every_n_steps",
        f"{PREVIEWS}; training.max_train_steps = 5",
        "training.max_train_steps = 10",
    ),
    ("PROMPTS-MISSING", "preview.sample_prompts", "preview.sample_at_first = true", PREVIEWS),
    (NO, "preview.sample_prompts", "preview.sample_prompts = 'prompts.txt'", "preview.sample_at_first = true"),
    (NO, "preview.sample_steps", "preview.sample_steps = 8", PREVIEWS),
    (NO, "preview.sample_cfg", "preview.sample_cfg = 1.0", PREVIEWS),
    (NO, "preview.sample_seed", "preview.sample_seed = 1", PREVIEWS),
    (NO, "preview.sample_size", "preview.sample_size = '512x512'", PREVIEWS),
    (
        "COUNTED-TWICE",
        "validation.validate_every_n_epochs",
        "validation.validate_every_n_epochs = 1; validation.validate_every_n_steps = 9",
        "validation.validate_every_n_steps = -",
    ),
    (
        "NEVER-REACHED",
        "validation.validate_every_n_steps",
        "validation.validate_every_n_steps = 2000",
        "validation.validate_every_n_steps = 1600",
    ),
    (
        NO,
        "validation.validate_every_n_steps",
        "validation.validate_every_n_steps = 2000",
        "validation.validate_every_n_steps = 200; dataset.validation_split = 0.1",
    ),
    (
        NO,
        "validation.validate_every_n_epochs",
        "validation.validate_every_n_epochs = 1",
        "general.validation_split = 0.1",
    ),
    (NO, "validation.validation_sigmas", "validation.validation_sigmas = [0.5]", "general.validation_split = 0.1"),
    (NO, "validation.max_validation_steps", "validation.max_validation_steps = 4", "general.validation_split = 0.1"),
    (
        "VALIDATION-SIGMAS",
        "validation.validation_sigmas",
        "validation.validation_sigmas = [0.5, 1.5]",
        "validation.validation_sigmas = [0.5, 1.0]",
    ),
    (NO, "logging.logging_dir", "logging.logging_dir = 'logs'", "logging.log_with = 'tensorboard'"),
    (
        NO,
        "training.train_batch_size",
        "training.train_batch_size = 2; dataset.batch_size = 4",
        "dataset.batch_size = -",
    ),
)

CASES = (*MODEL, *NETWORK, *OBJECTIVE, *OPTIMIZER, *RUN)
