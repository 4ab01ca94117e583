"""Which modules get an adapter: kohya's choice for Anima by default, patterns, and what is told of a wrong one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn

from finitune.config.schema import NetworkSection
from finitune.errors import UsageError
from finitune.models.anima import ANIMA
from finitune.models.sd15 import SD15
from finitune.report import Level
from finitune.training.sites import SelectedSite, SiteSelection, choose_sites

BLOCK = {
    *(f"{attention}.{part}_proj" for attention in ("self_attn", "cross_attn") for part in ("q", "k", "v", "output")),
    "mlp.layer1",
    "mlp.layer2",
}
"""What sd-scripts' networks/lora_anima.py finds in a block, by the checkpoint's names."""


@cache
def anima() -> dict[str, nn.Module]:
    """Anima's denoiser with all of its 28 blocks and its conditioner with 6, without memory."""
    from diffusers import AnimaTextConditioner, CosmosTransformer3DModel

    with torch.device("meta"):
        return {
            "transformer": CosmosTransformer3DModel(
                num_attention_heads=16,
                attention_head_dim=128,
                num_layers=28,
                text_embed_dim=1024,
                adaln_lora_dim=256,
                extra_pos_embed_type=None,
            ),
            "text_conditioner": AnimaTextConditioner(),
        }


def chosen(**options) -> SiteSelection:
    return choose_sites({"transformer": anima()["transformer"]}, ANIMA, NetworkSection(**options))


def originals(choice: SiteSelection) -> set[str]:
    return {one.original for one in choice.chosen}


def test_by_default_it_is_kohyas_280_modules_by_name():
    found = originals(chosen())
    assert found == {f"blocks.{i}.{name}" for i in range(28) for name in BLOCK}
    assert len(found) == 280


def test_what_is_left_out_is_said_with_the_reason():
    left = chosen().left_out
    assert "transformer.transformer_blocks.0.norm1.linear_1" in left
    assert left["transformer.patch_embed.proj"] == "left alone by default (Anima)"
    linears = [n for n, m in anima()["transformer"].named_modules() if isinstance(m, nn.Linear)]
    assert len(left) + 280 == len(linears)


def test_a_site_has_both_names_and_the_shape():
    (one,) = chosen(only_patterns=[r"blocks\.3\.mlp\.layer1"]).chosen
    assert (one.site, one.shape) == ("transformer.transformer_blocks.3.ff.net.0.proj", (8192, 2048))
    assert (one.rank, one.alpha, one.reason) == (16, 16.0, "network_dim")


@pytest.mark.parametrize("pattern", [r"blocks\.3\.self_attn\.q_proj", r"transformer_blocks\.3\.attn1\.to_q"])
def test_patterns_are_of_either_spelling_and_of_whole_names(pattern: str):
    assert originals(chosen(only_patterns=[pattern])) == {"blocks.3.self_attn.q_proj"}
    with pytest.raises(UsageError, match="no module"):
        chosen(only_patterns=[pattern[:-1]])


def test_exclusion_and_what_saves_from_it():
    without = chosen(exclude_patterns=[r".*cross_attn.*"])
    assert len(without.chosen) == 28 * 6
    assert without.left_out["transformer.transformer_blocks.0.attn2.to_q"] == "exclude_patterns: .*cross_attn.*"
    saved = chosen(exclude_patterns=[r".*cross_attn.*"], include_patterns=[r".*cross_attn\.q_proj"])
    assert originals(saved) - originals(without) == {f"blocks.{i}.cross_attn.q_proj" for i in range(28)}


def test_what_is_left_alone_by_default_can_be_asked_for():
    modulation = chosen(include_patterns=[r".*adaln_modulation.*"])
    extra = originals(modulation) - originals(chosen())
    counted = Counter(name.partition(".adaln")[0].partition(".")[0] for name in extra)
    assert counted == {"blocks": 28 * 6, "final_layer": 2}


def test_ranks_alphas_and_rates_by_the_first_pattern_that_fits():
    choice = chosen(
        network_dim=8,
        network_alpha=4,
        network_reg_dims={r"blocks\.0\..*": 32, r".*mlp.*": 2},
        network_reg_alphas={r".*mlp.*": 1.0},
        network_reg_lrs={r".*self_attn.*": 1e-5},
    )
    by_name = {one.original: one for one in choice.chosen}

    def of(name: str) -> tuple[int, float, float | None]:
        one = by_name[name]
        return one.rank, one.alpha, one.rate

    assert of("blocks.0.mlp.layer1") == (32, 1.0, None)
    assert of("blocks.1.mlp.layer1") == (2, 1.0, None)
    assert of("blocks.0.self_attn.q_proj") == (32, 4.0, 1e-5)
    assert of("blocks.1.cross_attn.q_proj") == (8, 4.0, None)
    assert by_name["blocks.1.mlp.layer1"].reason == "network_reg_dims: .*mlp.*; network_reg_alphas: .*mlp.*"


def test_an_alpha_of_0_is_the_rank():
    assert {one.alpha for one in chosen(network_dim=8, network_alpha=0).chosen} == {8.0}


def test_a_pattern_that_fits_nothing_is_an_error_with_names_to_go_by():
    choice = chosen(exclude_patterns=[r"self_attn"], network_reg_dims={r"blocks\.99\..*": 4})
    found = {finding.evidence["pattern"]: finding for finding in choice.findings}
    assert found.keys() == {"self_attn", r"blocks\.99\..*"}
    assert all(finding.level is Level.ERROR for finding in found.values())
    assert found["self_attn"].code == "PATTERN-MATCHES-NOTHING"
    assert found["self_attn"].subject == "network.exclude_patterns"
    assert "`.*`" in found["self_attn"].remedy


def test_nothing_chosen_is_an_error_that_says_why():
    with pytest.raises(UsageError) as caught:
        chosen(exclude_patterns=[r".*"])
    error = caught.value
    assert (error.code, error.exit_code) == ("SITES-NONE", 2)
    assert "exclude_patterns: .*" in error.message and "--explain" in error.remedy
    assert error.evidence["modules"] == len(chosen().left_out) + 280


def test_a_pattern_that_is_none_is_named_with_its_place():
    with pytest.raises(UsageError) as caught:
        chosen(only_patterns=["blocks.(0"])
    assert (caught.value.code, caught.value.subject) == ("PATTERN-UNREADABLE", "network.only_patterns")


def test_the_conditioner_has_adapters_in_its_blocks_alone():
    choice = choose_sites(anima(), ANIMA, NetworkSection(train_llm_adapter=True))
    modules = [one.module for one in choice.chosen if one.component == "text_conditioner"]
    assert modules and all(module.startswith("blocks.") for module in modules)
    assert len(choice.of("transformer")) == 280
    assert {one.original.split(".")[0] for one in choice.chosen if one.module in modules} == {"llm_adapter"}


def test_the_table_puts_the_blocks_together():
    table = chosen().table()
    assert len(table.rows) == 10
    assert {row[-1] for row in table.rows} == {"28"}
    assert ("transformer.transformer_blocks.*.attn1.to_q", "blocks.*.self_attn.q_proj") in {r[:2] for r in table.rows}


# --- convolutions -----------------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """A convolution with a kernel and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 4, 1)


def of_convolutions(**options) -> dict[str, SelectedSite]:
    everywhere = dataclasses.replace(SD15.adapters, trained={})
    family = dataclasses.replace(SD15, adapters=everywhere)
    return choose_sites({"unet": Convolutions()}, family, NetworkSection(**options)).of("unet")


def test_a_kernel_has_a_rank_of_its_own():
    both = of_convolutions(network_dim=16, conv_dim=4, conv_alpha=2)
    assert {name: (one.rank, one.alpha) for name, one in both.items()} == {"conv1": (4, 2.0), "conv2": (16, 16.0)}
    assert of_convolutions(conv_dim=0).keys() == {"conv2"}
    assert of_convolutions(network_dim=8)["conv1"].rank == 8


@pytest.mark.parametrize("algorithm", ["lora", "loha", "glora"])
def test_a_rank_above_the_smaller_side_is_told_with_numbers(algorithm: str):
    options = {"algorithm": algorithm, "only_patterns": [r"blocks\.3\.(mlp\.layer1|cross_attn\.[kq]_proj)"]}
    assert not chosen(**options, network_dim=1024).findings
    (finding,) = chosen(**options, network_dim=1025).findings
    assert (finding.level, finding.code) == (Level.WARNING, "NETWORK-RANK-ABOVE")
    assert (finding.evidence["modules"], finding.evidence["rank"], finding.evidence["full_rank"]) == (1, 1025, 1024)
    assert "1025" in finding.message and "attn2.to_k" in finding.message and "1024" in finding.remedy


def test_a_kernel_counts_with_its_inputs():
    (one,) = chosen(only_patterns=[r"blocks\.3\.mlp\.layer1"]).chosen
    assert dataclasses.replace(one, shape=(64, 4, 3, 3)).full_rank == 36
    assert dataclasses.replace(one, shape=(8, 4, 3, 3)).full_rank == 8


def test_lokr_takes_a_large_rank_for_full_factors_and_is_not_warned():
    assert not chosen(algorithm="lokr", network_dim=100_000, only_patterns=[r"blocks\.3\.mlp\.layer1"]).findings
