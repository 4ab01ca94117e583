"""The schema of a training: every option once, under kohya's name where the meaning is kohya's.

Sections group the options for people; each name is in one section only, so that a misplaced one can be told from an
unknown one. Options that have no equal in sd-scripts say "Ours". Nothing here reads a file: see `read`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from finitune.adapters import list_algorithms
from finitune.config.datasets import ConfigSection, DatasetConfig, UnitShare

DEFAULT_TRAIN_STEPS = 1600
"""Optimiser steps where neither steps nor epochs are given."""
PrecisionMode = Literal["auto", "planned-half", "current-half", "bf16", "fp32"]
if TYPE_CHECKING:
    AlgorithmName = str
else:
    AlgorithmName = Literal[list_algorithms(trainable=True)]
SpellingName = Literal["kohya", "comfy", "diffusers", "peft"]
LrSchedulerName = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "cosine_with_min_lr",
]


class ModelSection(ConfigSection):
    """The base model; it is never changed."""

    pretrained_model_name_or_path: str = Field(examples=["pico-anima"])
    """`pico-anima`, a diffusers folder, or the file of the diffusion transformer."""
    qwen3: Path | None = Field(default=None, examples=["qwen3.safetensors"])
    """The text encoder's file, where the model is a file."""
    vae: Path | None = Field(default=None, examples=["vae.safetensors"])
    """The VAE's file, where the model is a file."""
    tokenizers: Path | None = Field(default=None, examples=["tokenizers"])
    """Ours: a folder with `tokenizer` and `t5_tokenizer`, where the model is a file."""
    device: str = "auto"
    """Ours: where to compute: `auto` takes the first GPU if there is one, else the CPU."""
    precision: PrecisionMode = "auto"
    """Ours: how to compute; `auto` takes what holds on this machine and says why."""
    plan: Path | None = Field(default=None, examples=["plan.toml"])
    """Ours: a precision plan, as `finitune plan` writes it, for planned-half."""
    storage: Literal["auto", "fp16", "bf16", "fp32", "fp8"] = "auto"
    """Ours: how the frozen weights are held in memory; `auto` is the dtype of the arithmetic."""


class NetworkSection(ConfigSection):
    """The adapter."""

    algorithm: AlgorithmName = "lora"
    """Ours: what kind of adapter. kohya: network_module, and algo in network_args."""
    network_dim: int = Field(default=16, ge=1)
    """The rank."""
    network_alpha: float = Field(default=16.0, ge=0)
    """The scale is alpha / rank. kohya's default is 1; 0 means the rank, as there."""
    conv_dim: int | None = Field(default=None, ge=0, examples=[8])
    """The rank of convolutions with a kernel; 0 leaves them out; left out: network_dim."""
    conv_alpha: float | None = Field(default=None, ge=0, examples=[8.0])
    """Their alpha; left out: network_alpha."""
    dora: bool = False
    """Ours: learn magnitudes beside the change (DoRA). LyCORIS: dora_wd."""
    rs_lora: bool = False
    """The scale is alpha / sqrt(rank)."""
    projection_prng_key: int = 0
    """Ours: VeRA: the number that the shared random matrices are drawn from."""
    factor: int = -1
    """LoKr: the size of the first factor; -1 is the most square split. OFT, BOFT: not used."""
    full_matrix: bool = False
    """LoKr: the second factor is not decomposed."""
    decompose_both: bool = False
    """LoKr: the first factor is decomposed, too."""
    unbalanced: bool = False
    """LoKr: the larger factor of the outputs comes first. LyCORIS: unbalanced_factorization."""
    use_tucker: bool = False
    """A core for convolutions with a kernel."""
    constraint: float = Field(default=0.0, ge=0)
    """OFT, BOFT: the largest size of a rotation; 0 is none."""
    network_dropout: UnitShare = Field(default=0.0, ge=0, lt=1)
    """The share of activations at the rank that are dropped."""
    rank_dropout: UnitShare = Field(default=0.0, ge=0, lt=1)
    """The share of ranks that are dropped for a sample."""
    module_dropout: UnitShare = Field(default=0.0, ge=0, lt=1)
    """The share of steps in which a module goes without its adapter."""
    scale_weight_norms: float | None = Field(default=None, gt=0, examples=[1.0])
    """The largest norm of a module's change; larger ones are scaled down after each step."""
    exclude_patterns: tuple[str, ...] = ()
    """Regular expressions of whole module names, of the checkpoint's or diffusers' spelling, that get no adapter,
    beside the model's own list (for Anima: modulation, norms, embedders, the last layer)."""
    include_patterns: tuple[str, ...] = ()
    """Modules that get one although they are excluded."""
    only_patterns: tuple[str, ...] = ()
    """Ours: where given, only these modules get one."""
    network_reg_dims: dict[str, int] = Field(default_factory=dict)
    """The rank by regular expression; the first that matches counts."""
    network_reg_alphas: dict[str, float] = Field(default_factory=dict)
    """Ours: alpha by regular expression."""
    network_reg_lrs: dict[str, float] = Field(default_factory=dict)
    """The learning rate by regular expression."""
    train_llm_adapter: bool = False
    """Train the text conditioner (kohya: llm_adapter), too."""
    train_text_encoder: bool = False
    """Ours: train Qwen3, too. kohya: without network_train_unet_only."""
    network_weights: Path | None = Field(default=None, examples=["earlier.safetensors"])
    """An adapter file to start from."""


class ObjectiveSection(ConfigSection):
    """What is learned: rectified flow, the velocity noise - latent."""

    timestep_sampling: Literal["sigmoid", "uniform", "shift", "flux_shift", "sigma"] = "sigmoid"
    """How sigmas are drawn."""
    sigmoid_scale: float = Field(default=1.0, gt=0)
    """The deviation of the logits, for sigmoid, shift and flux_shift."""
    discrete_flow_shift: float = Field(default=1.0, gt=0)
    """The shift k in k u / (1 + (k - 1) u), for shift and sigma. Pictures are drawn with 3."""
    weighting_scheme: Literal["uniform", "none", "sigma_sqrt", "logit_normal", "mode", "cosmap"] = "uniform"
    """The density of u for `sigma`, and the weight of the loss: sigma_sqrt is 1 / sigma^2, cosmap of SD3."""
    logit_mean: float = 0.0
    """For logit_normal; positive values ask for small sigmas, as sd-scripts indexes a falling table."""
    logit_std: float = Field(default=1.0, gt=0)
    """For logit_normal."""
    mode_scale: float = Field(default=1.29, ge=-1, le=1.75)
    """For mode."""
    min_sigma: float = Field(default=0.0, ge=0, lt=1)
    """Ours: the smallest sigma that is drawn. kohya's min_timestep has no effect."""
    max_sigma: float = Field(default=1.0, gt=0, le=1)
    """Ours: the largest sigma that is drawn."""
    loss_type: Literal["l2", "l1", "huber", "smooth_l1"] = "l2"
    """The error of one number."""
    huber_c: float = Field(default=0.1, gt=0)
    """Where huber and smooth_l1 turn from square to straight."""
    masked_loss: bool = False
    """Learn only where the mask is white."""
    mask_normalised: bool = False
    """Ours: divide by the area of the mask, so that small masks count as much as large ones."""
    mask_area_floor: float = Field(default=0.05, gt=0, le=1)
    """Ours: the smallest area to divide by."""
    prior_loss_weight: float = Field(default=1.0, ge=0)
    """The weight of regularisation pictures."""
    ip_noise_gamma: float = Field(default=0.0, ge=0)
    """The deviation of extra noise on the model's input, which the target does not have."""


class OptimizerSection(ConfigSection):
    """How it is learned."""

    optimizer_type: str = "AdamW"
    """A name from torch, pytorch-optimizer or bitsandbytes: AdamW, AdamW8bit, Lion, Adafactor, Prodigy, CAME ..."""
    optimizer_args: dict[str, Any] = Field(default_factory=dict)
    """Its arguments."""
    learning_rate: float = Field(default=1e-4, ge=0)
    """The learning rate; 1 for Prodigy and other optimisers that find it themselves."""
    text_encoder_lr: float | None = Field(default=None, ge=0, examples=[1e-5])
    """That of the text encoder."""
    llm_adapter_lr: float | None = Field(default=None, ge=0, examples=[1e-5])
    """That of the text conditioner."""
    loraplus_lr_ratio: float | None = Field(default=None, gt=0, examples=[4.0])
    """LoRA+: how much larger the rate of up factors (LoHa: w2_a, LoKr: w1) is."""
    lr_scheduler: LrSchedulerName = "constant"
    """The course of the learning rate."""
    lr_warmup_steps: float = Field(default=0.0, ge=0)
    """Optimiser steps of linear warm-up; below 1, the share of all steps."""
    lr_scheduler_num_cycles: float = Field(default=1.0, gt=0)
    """For cosine_with_restarts."""
    lr_scheduler_power: float = Field(default=1.0, gt=0)
    """For polynomial."""
    lr_scheduler_min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """For cosine_with_min_lr: the last rate as a share of the first."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """The norm to which the gradient is cut; 0 is no cut."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1, examples=[0.99])
    """Ours: save a moving average of the adapter, with this decay for each step."""


class TrainingSection(ConfigSection):
    """How long, how much at once, and how it fits."""

    max_train_steps: int | None = Field(default=None, ge=1, examples=[DEFAULT_TRAIN_STEPS])
    """Optimiser steps; 1600 if nothing is said."""
    max_train_epochs: int | None = Field(default=None, ge=1, examples=[10])
    """Epochs, in place of steps."""
    train_batch_size: int = Field(default=1, ge=1)
    """Pictures in a micro-batch on each device, where a dataset does not say."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches in an optimiser step."""
    seed: int = Field(default=0, ge=0)
    """The seed of everything that is random."""
    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them: about a third slower, much less memory."""
    offload_blocks: int = Field(default=0, ge=0)
    """kohya: blocks_to_swap. Hold this many blocks of the denoiser in main memory, one of them on the GPU at a time."""
    torch_compile: bool = False
    """Compile the denoiser's blocks."""
    cache_dir: Path | None = Field(default=None, examples=["cache"])
    """Ours: where latents and texts are kept between runs; left out: a folder `cache` in the output folder."""
    qwen3_max_token_length: int = Field(default=512, ge=1, le=4096)
    """Tokens of a caption that Qwen3 is given."""
    t5_max_token_length: int = Field(default=512, ge=1, le=4096)
    """Tokens of a caption that T5's tokenizer makes."""
    vae_batch_size: int = Field(default=1, ge=1)
    """Pictures that the VAE encodes at once."""

    def count_steps(self, steps_per_epoch: int) -> int:
        """Optimiser steps of the whole run, by its epochs where these are given."""
        epochs = self.max_train_epochs
        return epochs * steps_per_epoch if epochs else self.max_train_steps or DEFAULT_TRAIN_STEPS


class GuardSection(ConfigSection):
    """Ours: what happens when a number is not finite. A step with one never reaches the adapter."""

    max_skips: int = Field(default=3, ge=1)
    """Steps in a row that may be skipped; then the run goes back to the last good state."""
    max_rollbacks: int = Field(default=3, ge=0)
    """How often it may go back without snapshot_every good steps in between; then it stops with the last good file."""
    snapshot_every: int = Field(default=25, ge=1)
    """Steps between two good states kept in memory."""
    quarantine: bool = True
    """Leave out pictures whose loss is not finite on their own, and name them."""
    spike_zscore: float = Field(default=6.0, gt=0)
    """Losses and gradients further from the median than so many deviations are reported."""


class SavingSection(ConfigSection):
    """What is written, and when."""

    output_dir: Path = Field(examples=["runs/first"])
    """The folder of the run."""
    output_name: str = "adapter"
    """The name of adapter files."""
    save_every_n_steps: int | None = Field(default=None, ge=1, examples=[200])
    """Optimiser steps between two files."""
    save_every_n_epochs: int | None = Field(default=None, ge=1, examples=[1])
    """Epochs between two files."""
    save_last_n: int | None = Field(default=None, ge=1, examples=[3])
    """Ours: how many files and states to keep; the last is always kept."""
    save_state: bool = True
    """Write the state of the run with each file, to resume from."""
    save_precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    """The dtype of adapter files. kohya calls fp32 float."""
    save_as: tuple[SpellingName, ...] = ("kohya",)
    """Ours: the spellings to write."""
    resume: Literal["never", "auto"] | Path = "never"
    """`auto`: go on from the last state in the output folder, if there is one; or a state's folder."""
    trigger_phrase: str = ""
    """Written to the file's metadata. kohya: metadata_trigger_phrase."""
    training_comment: str = ""
    """Written to the file's metadata."""


class PreviewSection(ConfigSection):
    """Pictures drawn on the way, with fixed prompts and seeds."""

    sample_every_n_steps: int | None = Field(default=None, ge=1, examples=[200])
    """Optimiser steps between previews."""
    sample_every_n_epochs: int | None = Field(default=None, ge=1, examples=[1])
    """Epochs between previews."""
    sample_at_first: bool = False
    """Draw before the first step; where there are others, that is done anyhow, to measure the time."""
    sample_prompts: tuple[str, ...] | Path = ()
    """The prompts, or a text file with one a line; kohya's flags behind a prompt are read: --n --w --h --d --s --l."""
    sample_steps: int = Field(default=28, ge=1)
    """Denoising steps."""
    sample_cfg: float = Field(default=4.0, ge=1)
    """Guidance."""
    sample_seed: int = 0
    """Seed of the noise of the first prompt; the next ones count on."""
    sample_size: str | None = Field(default=None, examples=["1024x1024"])
    """WIDTHxHEIGHT; left out: the model's own."""

    @property
    def is_scheduled(self) -> bool:
        """Whether pictures are to be drawn at some time."""
        return bool(self.sample_every_n_steps or self.sample_every_n_epochs or self.sample_at_first)


class ValidationSection(ConfigSection):
    """The loss on pictures kept out, at fixed sigmas and fixed noise."""

    validate_every_n_steps: int | None = Field(default=None, ge=1, examples=[200])
    """Optimiser steps between two measurements."""
    validate_every_n_epochs: int | None = Field(default=None, ge=1, examples=[1])
    """Epochs between two; once an epoch if there are pictures to measure on and nothing is said."""
    validation_sigmas: tuple[float, ...] = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95)
    """Ours: the sigmas."""
    max_validation_steps: int | None = Field(default=None, ge=1, examples=[8])
    """The largest number of pictures to measure on."""


class LoggingSection(ConfigSection):
    """What is kept to look at."""

    log_with: Literal["none", "tensorboard"] = "none"
    """TensorBoard needs its package: pip install tensorboard."""
    logging_dir: Path | None = Field(default=None, examples=["logs"])
    """Where TensorBoard's files go; left out: `logs` in the output folder."""
    report: bool = True
    """Ours: write report.html into the output folder."""


class TrainConfig(DatasetConfig):
    """All of a training."""

    model: ModelSection
    """The base model."""
    network: NetworkSection = NetworkSection()
    """The adapter."""
    objective: ObjectiveSection = ObjectiveSection()
    """What is learned."""
    optimizer: OptimizerSection = OptimizerSection()
    """How it is learned."""
    training: TrainingSection = TrainingSection()
    """How long, how much at once."""
    guard: GuardSection = GuardSection()
    """What happens when a number is not finite."""
    saving: SavingSection
    """What is written, and when."""
    preview: PreviewSection = PreviewSection()
    """Pictures on the way."""
    validation: ValidationSection = ValidationSection()
    """The loss on pictures kept out."""
    logging: LoggingSection = LoggingSection()
    """What is kept to look at."""


CONFIG_SECTION_NAMES = (
    "model",
    "network",
    "objective",
    "optimizer",
    "training",
    "guard",
    "saving",
    "preview",
    "validation",
    "logging",
)
"""The tables of a training TOML beside [general] and [[datasets]]."""
