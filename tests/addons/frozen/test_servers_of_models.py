"""A dry run asks the servers of frozen models, and says what each answers."""

from __future__ import annotations

import json

import pytest
from processes.answering import served

from stretto import dry_run
from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import EvalConfig, OrchestratorConfig, RLConfig
from stretto.launch.plan.beside import engines_beside
from stretto.orchestrator.servers import servers_of


def judge(url: str, **settings: str) -> RLConfig:
    words = [f"--models.judge.{key}={value}" for key, value in {"base_url": url, **settings}.items()]
    return load(RLConfig, [*words, "--orchestrator.env.0.id", "sort-letters"])


def answers(cfg: RLConfig) -> list[str]:
    return [text for _, text in dry_run._servers(cfg_of(cfg), has_engine=True)]


def cfg_of(cfg: RLConfig) -> OrchestratorConfig:
    return engines_beside(cfg).with_names(cfg).orchestrator_config()


def test_one_that_answers_is_shown_with_its_models() -> None:
    with served() as url:
        [text] = answers(judge(url))
    assert text == f"models.judge.base_url: {url}/v1/models answers and serves large"


@pytest.mark.parametrize(
    ("answer", "settings", "message"),
    [
        (
            {},
            {"served_model_name": "small"},
            "serves large, and not small (asked for it: HTTP 404); correct models.judge.served_model_name",
        ),
        ({"status": 404}, {}, "answers HTTP 404"),
        ({"status": 500, "body": b"out of memory"}, {"served_model_name": "large"}, "HTTP 500 (out of memory)"),
        ({"body": b"<html>"}, {}, "answers with no list of models, but '<html>'"),
        ({"body": b'{"data": []}'}, {}, "lists no model; name one as models.judge.served_model_name"),
        ({"status": 403}, {}, "it needs a key, so set the environment variable TEACHER_API_KEY"),
    ],
)
def test_an_answer_with_which_the_run_would_fail_says_what_to_do(answer, settings, message, monkeypatch) -> None:
    monkeypatch.delenv("TEACHER_API_KEY", raising=False)
    with served(**answer) as url:
        [text] = answers(judge(url, **settings))
    assert text.startswith("NOT READY: models.judge.base_url: ") and message in text, text


def test_a_name_that_is_not_listed_is_asked_for() -> None:
    with served(alias="small") as url:
        [text] = answers(judge(url, served_model_name="small"))
    assert text == f"models.judge.base_url: {url}/v1/models lists large, and also answers as small"


def test_a_wrong_key_names_its_variable(monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "wrong")
    with served() as url:
        cfg = judge(url, **{"client.api_key_var": "JUDGE_KEY"})
        [text] = answers(cfg)
        assert "HTTP 401: correct the key in the environment variable JUDGE_KEY" in text
        monkeypatch.setenv("JUDGE_KEY", "right")
        assert answers(cfg) == [f"models.judge.base_url: {url}/v1/models answers and serves large"]
        monkeypatch.delenv("JUDGE_KEY")
        with pytest.raises(ConfigError, match="JUDGE_KEY is not set"):
            answers(cfg)


@pytest.mark.parametrize("answer", [{"status": 404}, {"status": 405}, {"body": b"<html>"}])
def test_a_server_without_a_list_is_taken_as_it_is_if_its_model_is_named(answer) -> None:
    with served(**answer) as url:
        [text] = answers(judge(url, served_model_name="large"))
    assert not text.startswith("NOT READY") and text.endswith("it is taken as it is")


def test_every_server_that_is_not_started_by_the_run_is_asked_once() -> None:
    algo = {"type": "opd", "teacher": {"base_url": "http://t:1/v1"}}
    reward = {"reward": "remote_rm", "path": "x.jsonl", "hook_args": {"rm_url": "http://r:2/score"}}
    env = [{"id": "dataset", "args": reward, "algo": algo}]
    cfg = load(RLConfig, [f"--orchestrator.env={json.dumps(env)}", "--no-inference", "--models.own.model", "/nowhere"])
    player = cfg_of(cfg)
    found = {server.key: server.url for server in servers_of(player, has_engine=False, started=["models.own"])}
    assert found == {
        "orchestrator.client.base_url": "http://127.0.0.1:8000/v1/models",
        "orchestrator.env.0.algo.teacher.base_url": "http://t:1/v1/models",
        "orchestrator.env.0.args.hook_args.rm_url": "http://r:2/score",
    }
    assert "orchestrator.client.base_url" not in {
        s.key for s in servers_of(player, has_engine=True, started=["models.own"])
    }


def test_eval_asks_its_engines_and_models() -> None:
    words = ["--client.base_url", "http://a:1/v1", "--models.judge.base_url", "https://j/v1", "--eval.env.0.id", "x"]
    cfg = load(EvalConfig, words)
    found = [server.key for server in servers_of(cfg, has_engine=False, started=())]
    assert found == ["client.base_url", "models.judge.base_url"]
