"""The cases of the rules about datasets and subsets: see `conflict_cases`."""

from tests.conflict_cases import NO

CASES = (
    ("DATASET-NONE", "datasets", "datasets.datasets = []", "datasets.datasets = [{subsets = [{image_dir = 'a'}]}]"),
    ("DATASET-WITHOUT-SUBSETS", "datasets", "dataset.subsets = []", "dataset.subsets = [{image_dir = 'a'}]"),
    (
        "SIDE-NOT-MULTIPLE",
        "datasets.bucket_reso_steps",
        "general.bucket_reso_steps = 40",
        "dataset.bucket_reso_steps = 32",
    ),
    (
        "SIDE-NOT-MULTIPLE",
        "datasets.resolution",
        "general.resolution = [1000, 1024]; dataset.enable_bucket = false",
        "dataset.resolution = [1008, 1024]",
    ),
    ("RESOLUTION-IS-AREA", "datasets.resolution", "general.resolution = 1000", "general.resolution = 1008"),
    ("BUCKETS-CROSSED", "datasets.min_bucket_reso", "general.min_bucket_reso = 2048", "general.max_bucket_reso = 2048"),
    (
        NO,
        "datasets.min_bucket_reso",
        "general.enable_bucket = false; general.min_bucket_reso = 512",
        "dataset.enable_bucket = true",
    ),
    (
        NO,
        "datasets.max_bucket_reso",
        "general.enable_bucket = false; general.max_bucket_reso = 512",
        "dataset.enable_bucket = true",
    ),
    (
        NO,
        "datasets.bucket_reso_steps",
        "general.enable_bucket = false; general.bucket_reso_steps = 32",
        "dataset.enable_bucket = true",
    ),
    (
        NO,
        "datasets.bucket_no_upscale",
        "general.enable_bucket = false; general.bucket_no_upscale = true",
        "dataset.enable_bucket = true",
    ),
    (NO, "datasets.validation_seed", "dataset.validation_seed = 3", "general.validation_split = 0.1"),
    (
        "MULTIPLIER-ZERO",
        "datasets.network_multiplier",
        "dataset.network_multiplier = 0",
        "dataset.network_multiplier = 1",
    ),
    (
        "DATASET-SUBSET-TWICE",
        "datasets.subsets.image_dir",
        "dataset.subsets = [{image_dir = 'a'}, {image_dir = './a'}]",
        "dataset.subsets = [{image_dir = 'a'}, {image_dir = 'a', is_reg = true}]",
    ),
    ("DATASET-NO-FOLDER", "datasets.subsets.image_dir", "subset.image_dir = -", "subset.metadata_file = 'meta.json'"),
    (
        "REGULARISATION-ONLY",
        "datasets.subsets.is_reg",
        "subset.is_reg = true",
        "dataset.subsets = [{image_dir = 'a', is_reg = true}, {image_dir = 'b'}]",
    ),
    (
        "CROP-NOT-SUPPORTED",
        "datasets.subsets.face_crop_aug_range",
        "general.face_crop_aug_range = [2.0, 4.0]",
        "general.face_crop_aug_range = -",
    ),
    (
        "MASKS-TWO-KINDS",
        "datasets.subsets.alpha_mask",
        "subset.alpha_mask = true; subset.conditioning_data_dir = 'm'",
        "subset.alpha_mask = false",
    ),
    (
        "MASKS-ARE-PICTURES",
        "datasets.subsets.conditioning_data_dir",
        "subset.conditioning_data_dir = 'pictures'",
        "subset.conditioning_data_dir = 'masks'",
    ),
    ("LATENTS-NOT-CACHED", "datasets.subsets.random_crop", "general.random_crop = true", "subset.random_crop = false"),
    ("LATENTS-NOT-CACHED", "datasets.subsets.color_aug", "subset.color_aug = true", "subset.color_aug = false"),
    (
        "CAPTIONS-ALL-EMPTY",
        "datasets.subsets.caption_dropout_rate",
        "general.caption_dropout_rate = 1",
        "general.caption_dropout_rate = 0.1",
    ),
    (
        "TAGS-ALL-DROPPED",
        "datasets.subsets.caption_tag_dropout_rate",
        "general.caption_tag_dropout_rate = 1",
        "general.caption_tag_dropout_rate = 0.1",
    ),
    (NO, "datasets.subsets.keep_tokens", "general.keep_tokens = 1", "dataset.token_warmup_step = 100"),
    (NO, "datasets.subsets.token_warmup_min", "general.token_warmup_min = 2", "subset.token_warmup_step = 0.5"),
    (NO, "datasets.subsets.caption_variants", "general.caption_variants = 4", "subset.enable_wildcard = true"),
    (
        NO,
        "datasets.subsets.caption_extension",
        "subset.caption_extension = '.txt'; subset.metadata_file = 'm.json'",
        "subset.metadata_file = -",
    ),
    (NO, "datasets.subsets.custom_attributes", "subset.custom_attributes = {a = 1}", "subset.custom_attributes = -"),
    (NO, "datasets.subsets.cache_info", "subset.cache_info = true", "subset.cache_info = false"),
)
