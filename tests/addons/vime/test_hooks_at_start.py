"""Functions of the trainer that a run cannot call are found before any of its processes is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.base.errors import ConfigError
from stretto.check.code import check_code, check_user_code
from stretto.config.root import RLConfig

HOOKS = """
import os

def init(args): ...
def before(args, model): ...
def megatron(pre_process, post_process, vp_stage=None): ...
def needs_variable(args): ...

if "HOOK_NAME" not in os.environ:
    del needs_variable
"""
ENV = {"orchestrator": {"env": [{"id": "sort-letters"}]}}


def with_hooks(**trainer) -> RLConfig:
    return RLConfig.model_validate(ENV | {"trainer": trainer})


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({"before_log_prob": "my_hooks:before"}, r"trainer\.hooks\.before_log_prob = 'my_hooks:before': too many"),
        ({"init": "my_hooks:initt"}, r"trainer\.hooks\.init = .*my_hooks\.py has no 'initt'; did you mean 'init'\?"),
        (
            {"model": "my_hooks:megatron"},
            r"trainer\.hooks\.model = 'my_hooks:megatron' builds a module of Megatron-LM's",
        ),
        ({"model": "my_hooks:init"}, r"defined as init\(args\) and called with 2; write `def provider\(args, build\)`"),
        ({"init": "no_such_module:f"}, r"trainer\.hooks\.init = 'no_such_module:f'"),
        ({"init": "dies:f"}, r"importing dies:f ended its process: .*"),
    ],
)
def test_a_wrong_function_is_refused_with_its_setting(
    hooks: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_hooks.py").write_text(HOOKS)
    (tmp_path / "dies.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_code(with_hooks(hooks=hooks))


@pytest.mark.heavy
def test_right_functions_are_imported_with_the_trainers_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_hooks.py").write_text(HOOKS)
    monkeypatch.chdir(tmp_path)
    check_code(with_hooks())
    hooks = {"init": "my_hooks:needs_variable"}
    check_code(with_hooks(hooks=hooks, env_vars={"HOOK_NAME": "x"}))
    with pytest.raises(ConfigError, match="needs_variable"):
        check_code(with_hooks(hooks=hooks))


def test_a_generate_function_of_other_arguments_is_refused_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_generate.py").write_text("def reward(args, sample): ...\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2", "label": "4"}\n')
    monkeypatch.chdir(tmp_path)
    args = {"path": "rows.jsonl", "generate": "my_generate:reward"}
    cfg = RLConfig.model_validate({"orchestrator": {"env": [{"id": "dataset", "args": args}]}})
    with pytest.raises(ConfigError, match=r"generate = 'my_generate:reward'.*called with 3; write `async def generate"):
        check_user_code(cfg.orchestrator)


@pytest.mark.heavy
def test_code_that_imports_vime_is_told_where_its_names_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "from_vime.py").write_text("from vime.utils.types import Sample\n\ndef init(args): ...\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"from_vime\.py:1: No module named 'vime'; import its names from stretto"):
        check_code(with_hooks(hooks={"init": "from_vime:init"}))


def test_functions_of_a_dataset_are_imported_in_the_order_of_their_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_data.py").write_text("def one(args): ...\ndef two(args, sample): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    args = {"data_source": "of_data:one", "reward": "of_data:two", "generate": "of_data:two"}
    for wrong in ("generate", "reward", "data_source"):
        args[wrong] = "of_data:one" if wrong == "reward" else "of_data:two"
        cfg = RLConfig.model_validate({"orchestrator": {"env": [{"id": "dataset", "args": args}]}})
        with pytest.raises(ConfigError, match=f"^dataset: {wrong} = "):
            check_user_code(cfg.orchestrator)
