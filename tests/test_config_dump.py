"""Writing a configuration: what is dumped reads back, and the commented example is the schema itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomlkit
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from finitune.config.datasets import ConfigSection, Dataset, DatasetOptions, Subset, resolve_datasets
from finitune.config.option_types import list_union_members
from finitune.config.read import dump_config, read_train_config, validate_config
from finitune.config.schema import CONFIG_SECTION_NAMES, TrainConfig
from finitune.config.template import build_config_template, list_option_documentation

texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=8)
leaves = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False) | texts
free = st.recursive(leaves, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=4)
NAMES = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)


def values(kind: Any, bounds: dict[str, float]) -> st.SearchStrategy[Any]:
    """Values of a type of the schema, within bounds."""
    kinds = list_union_members(kind)
    if len(kinds) > 1:
        return st.one_of([values(each, bounds) for each in kinds])
    kind, origin, arguments = kinds[0], get_origin(kinds[0]), get_args(kinds[0])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0], {}), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(values(each, {}) for each in arguments))
    if origin is dict:
        value = free if arguments[1] is Any else values(arguments[1], {})
        return st.dictionaries(NAMES if arguments[1] is Any else texts, value, max_size=2)
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(int(bounds.get("ge", bounds.get("gt", -5))), int(bounds.get("le", 4096)))
    if kind is float:
        low, high = bounds.get("ge", bounds.get("gt", 0.0)), bounds.get("le", bounds.get("lt", 1e9))
        return st.floats(low, high, exclude_min="gt" in bounds, exclude_max="lt" in bounds)
    return texts.map(Path) if kind is Path else texts if kind is str else st.integers()


@st.composite
def sections(draw: st.DrawFn, kind: type[ConfigSection]) -> Any:
    """A section with some of its options set, lists of sections included."""
    chosen: dict[str, Any] = {}
    some = draw(st.sets(st.sampled_from(sorted(kind.model_fields)), max_size=4))
    for name, field in kind.model_fields.items():
        if not field.is_required() and name not in some:
            continue
        each = get_args(field.annotation)[0] if get_origin(field.annotation) is tuple else None
        if isinstance(each, type) and issubclass(each, ConfigSection):
            chosen[name] = tuple(draw(st.lists(sections(each), max_size=2)))
            continue
        bounds = {b: getattr(m, b) for m in field.metadata for b in ("ge", "gt", "le", "lt") if hasattr(m, b)}
        chosen[name] = draw(values(field.annotation, bounds))
    return kind(**chosen)


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    kinds: dict[str, Any] = {name: TrainConfig.model_fields[name].annotation for name in CONFIG_SECTION_NAMES}
    return TrainConfig(
        **{name: draw(sections(kind)) for name, kind in kinds.items()},
        general=draw(sections(DatasetOptions)),
        datasets=tuple(draw(st.lists(sections(Dataset), max_size=2))),
    )


def read_back(text: str) -> TrainConfig:
    config, findings = validate_config(tomlkit.parse(text).unwrap())
    assert not findings
    return config


@settings(deadline=None, max_examples=40, phases=[Phase.explicit, Phase.generate])
@given(configs())
def test_what_is_dumped_reads_back_equal_and_resolves_alike(config: TrainConfig):
    text = dump_config(config)
    again = read_back(text)
    assert again == config
    assert resolve_datasets(again) == resolve_datasets(config)
    assert dump_config(read_back(dump_config(again))) == dump_config(again)


def test_every_option_is_written_out_and_none_left_out():
    config, _ = validate_config({"model": {"pretrained_model_name_or_path": "x"}, "saving": {"output_dir": "y"}})
    document = tomlkit.parse(dump_config(config)).unwrap()
    for name in (*CONFIG_SECTION_NAMES, "general"):
        section = getattr(config, name)
        expected = {option for option in type(section).model_fields if getattr(section, option) is not None}
        assert set(document[name]) == expected


def test_a_level_that_says_nothing_goes_on_inheriting():
    document = {
        "model": {"pretrained_model_name_or_path": "x"},
        "saving": {"output_dir": "y"},
        "general": {"num_repeats": 5, "batch_size": 2},
        "datasets": [{"resolution": 512, "subsets": [{"image_dir": "a"}, {"image_dir": "b", "num_repeats": 1}]}],
    }
    again = read_back(dump_config(validate_config(document)[0]))
    (dataset,) = resolve_datasets(again)
    assert (dataset.batch_size, [subset.num_repeats for subset in dataset.subsets]) == (2, [5, 1])
    assert again.datasets[0].subsets[0].model_fields_set == {"image_dir"}


def test_none_among_the_arguments_of_an_optimiser_survives():
    config, _ = validate_config(
        {
            "model": {"pretrained_model_name_or_path": "x"},
            "saving": {"output_dir": "y"},
            "optimizer": {"optimizer_args": ["eps=(None, 1e-3)", "name='a b'"]},
        }
    )
    assert read_back(dump_config(config)).optimizer.optimizer_args == {"eps": (None, 1e-3), "name": "a b"}


# --- the commented example -------------------------------------------------------------------------------------------


def test_the_commented_example_reads_without_a_word(tmp_path: Path):
    path = tmp_path / "train.toml"
    path.write_text(build_config_template(), encoding="utf-8")
    read = read_train_config(path)
    assert not read.findings
    assert read.config.model.pretrained_model_name_or_path == "pico-anima"
    assert [str(subset.image_dir) for dataset in read.config.datasets for subset in dataset.subsets] == ["pictures"]


def test_each_commented_option_is_the_default_or_an_example(tmp_path: Path):
    path = tmp_path / "train.toml"
    path.write_text(
        re.sub(r"^#(?=\w+ = (?!.*  # example$))", "", build_config_template(), flags=re.MULTILINE), encoding="utf-8"
    )
    defaults = read_train_config(path)
    path.write_text(build_config_template(), encoding="utf-8")
    assert defaults.config == read_train_config(path).config and not defaults.findings
    path.write_text(re.sub(r"^#(?=\w)", "", build_config_template(), flags=re.MULTILINE), encoding="utf-8")
    everything = read_train_config(path).config
    assert all(getattr(everything, name) != getattr(defaults.config, name) for name in ("model", "saving", "training"))
    assert all(getattr(everything.network, n) is not None for n in type(everything.network).model_fields)


def test_every_option_is_in_the_example_once_and_has_words():
    rows = list_option_documentation()
    assert all(text for *_, text in rows)
    assert len({(section, option) for section, option, *_ in rows}) == len(rows)
    told = {option for _, option, *_ in rows}
    kinds: list[Any] = [TrainConfig.model_fields[name].annotation for name in CONFIG_SECTION_NAMES]
    everything = {name: field for kind in (*kinds, DatasetOptions, Subset) for name, field in kind.model_fields.items()}
    assert told == set(everything)
    lines = re.findall(r"^#?(\w+) = ", build_config_template(), flags=re.MULTILINE)
    assert sorted(lines) == sorted(option for _, option, *_ in rows)
    without = {option for _, option, _, default, _ in rows if not default}
    required = {"pretrained_model_name_or_path", "output_dir"}
    assert {option for option, field in everything.items() if field.examples} == without | required


def test_the_example_is_pleasant_to_read():
    lines = build_config_template().splitlines()
    assert max(map(len, lines)) <= 100
    assert not re.search(r"\n\n\n", build_config_template())
    for words in ("One of sigmoid, uniform, shift, flux_shift, sigma.", "[[datasets.subsets]]", "planned-half"):
        assert words in build_config_template()
