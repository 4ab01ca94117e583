"""Nothing in the planner knows Anima: other families of diffusers, with branch outputs that leave fp16's range."""

from __future__ import annotations

import pytest
import torch

from finitune.precision.certificate import prove_component_plan
from finitune.precision.planner import RecordedCall, plan_component

LOUD = ("to_out.0.weight", "to_add_out.weight", "net.2.weight", "proj_out.weight", "conv2.weight")
TEXT = {"encoder_hidden_states": (1, 8, 32)}


def flux():
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    shapes = {"hidden_states": (1, 16, 16), **TEXT, "pooled_projections": (1, 32)}
    return model, shapes, {"timestep": torch.tensor([0.5]), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3)}


def sd3():
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=8,
    )
    shapes = {"hidden_states": (1, 4, 8, 8), **TEXT, "pooled_projections": (1, 32)}
    return model, shapes, {"timestep": torch.tensor([500.0])}


def qwen_image():
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    shapes = {"hidden_states": (1, 16, 16), **TEXT}
    mask = torch.ones(1, 8, dtype=torch.long)
    grid = [[(1, 4, 4)]]
    return model, shapes, {"encoder_hidden_states_mask": mask, "timestep": torch.tensor([0.5]), "img_shapes": grid}


def unet():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    return model, {"sample": (1, 4, 8, 8), **TEXT}, {"timestep": torch.tensor(500.0)}


@pytest.mark.parametrize("exponent", [0, 18])
@pytest.mark.parametrize("family", [flux, sd3, qwen_image, unet], ids=lambda family: family.__name__)
def test_the_planner_keeps_its_promises_on_other_families(family, exponent):
    torch.manual_seed(0)
    model, shapes, rest = family()
    model = model.bfloat16().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith(LOUD) and name != "proj_out.weight":
            parameter.data *= 2.0**exponent
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    calls = [RecordedCall((), {**tensors, **rest, "return_dict": False})]
    plan = plan_component(model, calls, 2, "fp32")
    certificate = prove_component_plan(model, plan, calls, 2)
    assert bool(plan.lines) == bool(exponent) and not plan.islands
    assert certificate.exact_rel_l2 == 0.0 and certificate.finite and certificate.headroom_bits_min >= 2
    assert certificate.half_flops_share >= 0.99 and certificate.droppable_lines == 0
    assert certificate.step_rel_l2 <= certificate.bf16_step_rel_l2 / 2
