from __future__ import annotations

from pathlib import Path

import pytest

from megatron_grpo.config import ConfigError, load_config, save_config
from tests.unit.config.configs import values, write


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "run.yaml", values())


def test_overrides_nested_lists_null_and_numbers(file: Path) -> None:
    config = load_config(
        file,
        [
            "grpo.seed=7",
            "policy.optimizer.lr=1e-5",
            "policy.scheduler.lr_decay_style=cosine",
            "generation.vllm.extra_args=[--swap-space, '0']",
            "env.args.partial_credit=true",
            "data.system_prompt=null",
            "loss_fn.kl_input_clamp_value=",
        ],
    )
    assert config.grpo.seed == 7
    assert config.policy.optimizer.lr == 1e-5
    assert config.policy.scheduler.lr_decay_style == "cosine"  # a section that the file does not have
    assert config.generation.vllm.extra_args == ("--swap-space", "0")
    assert config.env.args == {"partial_credit": True}
    assert config.data.system_prompt is None
    assert config.loss_fn.kl_input_clamp_value is None  # no text after '=' is YAML's null


def test_the_last_override_wins_and_a_value_may_hold_equals_signs(file: Path) -> None:
    config = load_config(file, ["grpo.seed=1", "grpo.seed=2", "data.system_prompt=x=1"])
    assert config.grpo.seed == 2
    assert config.data.system_prompt == "x=1"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.seed", "override 'grpo.seed' is not of the form section.key=value"),
        ("=1", "override '=1' is not of the form section.key=value"),
        ("grpo.seed.x=1", "'grpo.seed.x=1': grpo.seed is the value 3, not a section"),
        ("grpo.seed=[1", r"'grpo.seed=\[1': the value is not valid YAML"),
        ("grpo.sed=1", "unknown key 'sed'; did you mean 'seed'"),
        ("grop.seed=1", "unknown key 'grop'; did you mean 'grpo'"),
    ],
)
def test_malformed_overrides(tmp_path: Path, override: str, message: str) -> None:
    file = write(tmp_path / "run.yaml", values(grpo={"seed": 3}))
    with pytest.raises(ConfigError, match=message):
        load_config(file, [override])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file .*nowhere\.yaml; see configs/"):
        load_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grpo: [1", "is not valid YAML"),
        ("- a\n- b\n", "must hold a mapping of sections, not list"),
        ("", "must hold a mapping of sections, not NoneType"),
        ("grpo: {}\npolicy: {}\ngrpo: {}\n", "is not valid YAML: the key 'grpo' comes twice.*line 3"),
        ("grpo:\n  seed: 1\n  'seed': 2\n", "is not valid YAML: the key 'seed' comes twice.*line 3"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"(?s)run\.yaml.* {message}"):
        load_config(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("run_dir: é".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml is not valid YAML: 'utf-8' codec"):
        load_config(tmp_path / "latin.yaml")


def test_an_override_changes_no_other_section_that_shares_an_anchor(tmp_path: Path) -> None:
    content = values()
    task = "{kind: reasoning_gym, task: chain_sum, size: 20, task_args: {max_digits: 1, rate: 1e-5}}"
    content["data"] = "DATA"
    file = write(tmp_path / "run.yaml", content)
    text = f"\n  train: &task {task}\n  validation: {{<<: *task, size: 5}}\n"
    file.write_text(file.read_text().replace("data: DATA", f"data: {text}"))
    data = load_config(file, ["data.train.task_args.max_digits=3"]).data
    assert data.train.task_args == {"max_digits": 3, "rate": 1e-5}
    assert data.validation is not None
    assert data.validation.task_args == {"max_digits": 1, "rate": 1e-5}
    assert (data.train.size, data.validation.size) == (20, 5)


def test_a_merged_key_that_is_given_again_is_no_duplicate(tmp_path: Path) -> None:
    content = values()
    del content["data"], content["env"]
    file = write(tmp_path / "run.yaml", content)
    with file.open("a") as appended:
        appended.write("""
data:
  train: {kind: reasoning_gym, task: chain_sum, size: 20, task_args: &args {max_digits: 1}}
  validation: {kind: reasoning_gym, task: chain_sum, size: 5, task_args: &more {<<: *args, max_digits: 2}}
env: {name: reasoning_gym, args: {<<: *more}}
""")
    config = load_config(file)
    assert config.data.validation is not None
    assert config.data.validation.task_args == config.env.args == {"max_digits": 2}


def test_every_fault_has_its_key_and_the_given_value(tmp_path: Path) -> None:
    content = values(grpo={"max_num_steps": "many", "num_generations_per_prompt": 1})
    content["policy"]["optimizer"] = {"lr": -1.0}
    del content["env"]
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path / "run.yaml", content))
    header, *lines = str(error.value).splitlines()
    assert header.endswith("run.yaml:")
    assert [line.split(":")[0].strip() for line in lines] == [
        "grpo.max_num_steps",
        "grpo.num_generations_per_prompt",
        "policy.optimizer.lr",
        "env",
    ]
    assert [line.partition(" (given: ")[2] for line in lines] == ["'many')", "1)", "-1.0)", ""]


def test_save_and_load_give_the_same_configuration(file: Path, tmp_path: Path) -> None:
    overrides = [
        "policy.optimizer.adam_eps=1e-9",
        "generation.vllm.extra_args=[--swap-space, b]",
        "data.validation={kind: reasoning_gym, task: chain_sum, size: 10, task_args: {min_terms: 2}}",
        "loss_fn.kl_output_clamp_value=null",
    ]
    config = load_config(file, overrides)
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config
