"""Preference pairs: the forms of rows, losses against one reply at a time, and against TRL where it is installed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from cases.pairs import PAIR_LOSSES, build_pair_learner, random_pairs, score_alone
from sft_runs import SCRATCH, config, same_weights, undisturbed_threads_and_logging, weights  # noqa: F401

from stretto.base.errors import ConfigError, DataError
from stretto.chat.render import build_renderer
from stretto.config.sections.sft import LossMaskSection, PreferenceData
from stretto.monitors.file import read_metrics
from stretto_preference.learner import reference_of
from stretto_preference.loss import bradley_terry_loss, dpo_loss
from stretto_preference.rows import Pairs, load_pairs, pack_pairs, parse_pair, render_pair
from stretto_sft import training as sft
from stretto_sft.dry_run import sft_screen
from stretto_sft.rows import parse_row, render_row

pytestmark = pytest.mark.heavy

USER = {"role": "user", "content": "sort dcab"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("abcd", "acbd"))


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    from stretto.chat.scratch import build_scratch_files
    from stretto.config.sections.model import ScratchSection

    return build_scratch_files(tmp_path_factory.mktemp("tokenizer"), ScratchSection(**SCRATCH))


@pytest.fixture(scope="module")
def renderer(tokenizer_dir):
    return build_renderer(tokenizer_dir)


def data(**keys):
    return PreferenceData(name="pairs.jsonl", **keys)


def rendered(record, renderer, *, is_scored=False, **keys):
    return render_pair(parse_pair(record, data(**keys), "f:1"), renderer, LossMaskSection(), is_scored=is_scored)


@pytest.mark.parametrize("is_scored", [False, True])
def test_replies_that_are_equal_are_no_pair(is_scored, renderer):
    for record in (
        {"prompt": [USER], "chosen": [GOOD], "rejected": [GOOD]},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
    ):
        assert rendered(record, renderer, is_scored=is_scored) == "are equal, so that none is the better one"
    assert not isinstance(rendered({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, renderer), str)


def texts(pair, renderer):
    """What is trained of each reply."""
    return [renderer.decode(each.token_ids[each.is_trained]) for each in pair.replies]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "sort dcab", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "sort dcab", "chosen": "abcd", "rejected": "acbd"},
        {"prompt": [USER], "chosen": "abcd", "rejected": "acbd", "step": 3},
        {"prompt": USER, "chosen": GOOD, "rejected": BAD},
    ],
    ids=["messages", "implicit", "repeated", "texts", "mixed", "alone"],
)
@pytest.mark.parametrize("is_scored", [False, True])
def test_forms_of_a_row_are_the_same_pair(record, is_scored, renderer):
    found = rendered(record, renderer, is_scored=is_scored)
    wanted = rendered({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, renderer, is_scored=is_scored)
    for mine, other in zip(found.replies, wanted.replies, strict=True):
        assert np.array_equal(mine.token_ids, other.token_ids) and np.array_equal(mine.is_trained, other.is_trained)
    if is_scored:
        whole = renderer.render_leading([USER, GOOD])
        assert np.array_equal(found.replies[0].token_ids[:-1], whole) and found.replies[0].is_trained.sum() == 1
    else:
        assert [text.removesuffix("<|im_end|>") for text in texts(found, renderer)] == ["abcd", "acbd"]


def test_earlier_replies_of_the_prompt_are_not_trained(renderer):
    before = [USER, BAD, {"role": "user", "content": "again"}]
    found = rendered({"prompt": before, "chosen": [GOOD], "rejected": [BAD]}, renderer)
    assert [text.removesuffix("<|im_end|>") for text in texts(found, renderer)] == ["abcd", "acbd"]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "sort dcab: ", "chosen": "abcd", "rejected": "acbd"},
        {"chosen": "sort dcab: abcd", "rejected": "sort dcab: bacd"},
    ],
    ids=["prompt", "implicit"],
)
def test_raw_texts_are_tokens_as_they_are(record, renderer):
    found = rendered(record, renderer, text="raw")
    whole = renderer.decode(found.replies[0].token_ids)
    assert whole.startswith("sort dcab: abcd") and found.replies[0].token_ids[-1] == renderer.tokenizer.eos_token_id
    assert texts(found, renderer)[0].lstrip().startswith("abcd")


def test_text_that_the_template_has_shown_already_is_not_shown_again(renderer):
    """As `stretto export --text` writes it."""
    prompt = renderer.render_text([USER])
    record = {"prompt": prompt, "chosen": "abcd<|im_end|>", "rejected": "acbd<|im_end|>"}
    with pytest.raises(DataError, match=r'f:1: the prompt begins with .* set data.text = "raw"'):
        rendered(record, renderer)
    assert renderer.decode(rendered(record, renderer, text="raw").replies[0].token_ids) == prompt + "abcd<|im_end|>"
    row = parse_row({"prompt": prompt, "completion": "abcd"}, "f:1")
    with pytest.raises(DataError, match=r"f:1: the prompt begins with .* give messages"):
        render_row(row, renderer, LossMaskSection())


@pytest.mark.parametrize("keys", [{}, {"text": "raw"}], ids=["chat", "raw"])
def test_the_end_of_a_reply_that_was_cut_is_not_trained(keys, renderer):
    """It was not sampled: DPO would push down the end of what should have ended."""
    record = {"prompt": "sort dcab ", "chosen": "abcd", "rejected": "acbd"}
    whole = rendered(record, renderer, **keys)
    cut = rendered(record | {"chosen_is_cut": None, "rejected_is_cut": True}, renderer, **keys)
    assert [text.strip() for text in texts(whole, renderer)] == ["abcd<|im_end|>", "acbd<|im_end|>"]
    assert [text.strip() for text in texts(cut, renderer)] == ["abcd<|im_end|>", "acbd"]
    swapped = rendered(
        record | {"rejected_is_cut": True}, renderer, chosen_key="rejected", rejected_key="chosen", **keys
    )
    assert [text.strip() for text in texts(swapped, renderer)] == ["acbd", "abcd<|im_end|>"]


def test_the_close_of_a_thought_in_which_a_reply_was_cut_is_not_trained(renderer):
    """The template closes it, and the policy did not: DPO would teach it never to close one."""
    thinking = {"role": "assistant", "reasoning_content": "so a", "content": ""}
    for rejected, end in ((thinking, "so a"), (thinking | {"content": "acbd"}, "acbd")):
        record = {"prompt": [USER], "chosen": [GOOD], "rejected": [rejected], "rejected_is_cut": True}
        assert texts(rendered(record, renderer), renderer)[1].endswith(end)


@pytest.mark.parametrize(
    "record, keys, said",
    [
        ({"prompt": "a", "chosen": "b"}, {}, r"f:1: no 'rejected' \(data.rejected_key\); the row has chosen, prompt"),
        ({"chosen": "b", "rejected": "c"}, {}, 'set data.text = "raw"'),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, {}, "are the same, or one begins the other"),
        ({"chosen": [GOOD], "rejected": [BAD]}, {}, "begin with different messages"),
        ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, {}, "both be messages, or both texts"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, {}, "margin must be a number"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "chosen_is_cut": 1},
            {},
            "chosen_is_cut must be true or false",
        ),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {"text": "raw"}, 'text with data.text = "raw"'),
        ({"chosen": "b", "rejected": "c"}, {"text": "raw"}, "begin with different text"),
        (
            {"conversations": [], "chosen": {"from": "gpt", "value": "b"}, "rejected": {"from": "gpt", "value": "c"}},
            {"prompt_key": "conversations"},
            "f:1: chosen has no role; it has from, value: rename from to role, rename value to content",
        ),
    ],
)
def test_a_wrong_row_is_refused_with_its_place(record, keys, said):
    with pytest.raises(DataError, match=said):
        parse_pair(record, data(**keys), "f:1")


def test_a_system_prompt_beside_the_prompt_of_a_pair_is_refused():
    record = {"system": "Be brief.", "question": "ba?", "chosen": "ab", "rejected": "ba"}
    with pytest.raises(DataError, match=r"f:1: 'system' beside the conversation would not reach the model"):
        parse_pair(record, data(prompt_key="question"), "f:1")


def write_pairs(path, count=24):
    """Sorted letters are better than others."""
    rng = np.random.default_rng(5)
    with path.open("w") as file:
        for _ in range(count):
            letters = rng.choice(list("abcdef"), 4, replace=False)
            good, bad = "".join(sorted(letters)), "".join(sorted(letters)[::-1])
            row = {"prompt": "sort " + "".join(letters), "chosen": good, "rejected": bad, "margin": 0.5}
            file.write(json.dumps(row) + "\n")
    return path


def test_long_pairs_are_cut_for_dpo_and_left_out_for_a_reward_model(tmp_path, renderer, caplog):
    path = write_pairs(tmp_path / "p.jsonl", 3)
    long = {"prompt": "sort ba", "chosen": "ab" * 40, "rejected": "ba"}
    path.write_text(path.read_text() + json.dumps(long) + "\n")
    section = PreferenceData(name=str(path))
    found = load_pairs(section, renderer, LossMaskSection(), 60, is_scored=False)
    assert len(found) == 4 and len(found[3].replies[0].token_ids) == 60
    assert "1 of 4 pairs were cut to 60 tokens" in caplog.text
    scored = load_pairs(section, renderer, LossMaskSection(), 60, is_scored=True)
    assert len(scored) == 3 and "1 of 4 pairs are left out: 1 are longer than 60 tokens" in caplog.text
    with pytest.raises(DataError, match=r"no pair is left to train on .*check \[loss_mask\] and seq_len"):
        load_pairs(section, renderer, LossMaskSection(), 10, is_scored=False)


@pytest.mark.parametrize("row_tokens", [40, 400])
@pytest.mark.parametrize("loss", PAIR_LOSSES)
def test_a_packed_step_is_the_mean_of_pairs_computed_alone(loss, row_tokens, tmp_path):
    section = PAIR_LOSSES[loss]
    pairs = random_pairs(is_scored=section.type == "reward")
    learner = build_pair_learner(loss)
    policy = learner.policy
    reference, wanted = None, range(len(pairs))
    if learner.needs_reference:
        reference = reference_of(learner, pairs, wanted, row_tokens, kept=tmp_path / "r.npz", start="it")
        alone = [[score_alone(policy, each).item() for each in pair.replies] for pair in pairs.examples]
        np.testing.assert_allclose(reference, alone, rtol=1e-5, atol=1e-4)
    with torch.no_grad():  # away from the start, where both rewards are 0
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    scores = torch.stack([torch.stack([score_alone(policy, each) for each in pair.replies]) for pair in pairs.examples])
    if section.type == "reward":
        margins = torch.tensor([pair.margin for pair in pairs.examples])
        losses = bradley_terry_loss(scores, margins, center_coefficient=section.center_rewards_coefficient)
    else:
        ratios = scores if reference is None else scores - torch.from_numpy(reference).float()
        counts = torch.tensor([[float(e.is_trained.sum()) for e in pair.replies] for pair in pairs.examples])
        losses = dpo_loss(
            ratios, counts, loss_type=section.loss_type, beta=section.beta, label_smoothing=section.label_smoothing
        )
        if section.nll_coef is not None:
            losses = losses - section.nll_coef * scores[:, 0] / counts[:, 0]
    trained = [p for p in policy.parameters() if p.requires_grad]
    slow = torch.autograd.grad(losses.mean(), trained)
    batches = pack_pairs(pairs, wanted, row_tokens, reference)
    assert len(batches) > 1 or row_tokens == 400
    assert learner.evaluate(batches)["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    learner.forward_backward(batches)
    for parameter, gradient in zip(trained, slow):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)


def test_the_reference_of_an_adapter_is_the_model_without_it(tmp_path):
    pairs = random_pairs(is_scored=False)
    found = [
        reference_of(build_pair_learner("dpo", lora=lora), pairs, range(5), 64, kept=tmp_path / f"{lora}", start="it")
        for lora in (False, True)
    ]
    assert np.array_equal(found[0][:5], found[1][:5])


def test_a_reference_that_was_kept_is_not_computed_again_and_one_of_other_weights_is(tmp_path):
    pairs, kept = random_pairs(is_scored=False), tmp_path / "r.npz"
    learner = build_pair_learner("dpo")
    first = reference_of(learner, pairs, range(10), 64, kept=kept, start="it")
    learner.forward_backward(pack_pairs(pairs, range(10), 64, first))
    learner.optim_step()
    assert np.array_equal(reference_of(learner, pairs, range(10), 64, kept=kept, start="it"), first)
    other = reference_of(learner, pairs, range(10), 64, kept=kept, start="other")
    assert not np.array_equal(other, first)
    whole = kept.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], bytes([*whole[:100], whole[100] ^ 1, *whole[101:]])):
        kept.write_bytes(damaged)  # as a power cut leaves it
        assert np.array_equal(reference_of(learner, pairs, range(10), 64, kept=kept, start="other"), other)


def pair_config(tmp_path, loss, **changes):
    path = tmp_path / "pairs.jsonl"
    if not path.exists():
        tmp_path.mkdir(parents=True, exist_ok=True)
        write_pairs(path)
    rows = {"type": "preference", "name": str(path)}
    keys = {"data": rows, "val": {"interval": 4, "data": rows}, "loss": loss, "batch_size": 8}
    return config(tmp_path, **keys | changes)


def test_a_schedule_that_does_not_fit_into_the_epochs_of_pairs_is_refused_by_a_dry_run(tmp_path):
    run = {"max_steps": None, "max_epochs": 2, "ckpt": None}
    linear = {"type": "linear", "warmup_steps": 3, "decay_steps": 4}
    cfg = pair_config(tmp_path, {"type": "dpo"}, scheduler=linear, **run)
    with pytest.raises(ConfigError, match=r"3 \+ 4, but max_epochs = 2 of 24 examples in batches of 8 are 6 steps"):
        sft_screen(cfg)
    fits = pair_config(tmp_path, {"type": "dpo"}, scheduler=linear | {"decay_steps": 3}, **run)
    assert "trains 2 epochs" in sft_screen(fits)


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "lora"])
@pytest.mark.parametrize("loss", [{"type": "dpo", "beta": 0.2}, {"type": "reward"}], ids=["dpo", "reward"])
def test_a_resumed_run_on_pairs_ends_with_the_same_bits_and_it_learns(tmp_path, loss, lora):
    model = {"scratch": SCRATCH} | ({} if lora is None else {"lora": lora})
    whole = pair_config(tmp_path / "whole", loss, model=model, max_steps=12)
    sft.main(whole)
    parts = {"model": model, "max_steps": 12}
    first = pair_config(tmp_path / "parts", loss, ckpt={"interval": 5}, **parts)
    sft.main(first)
    for step in (10, 12):
        first.run_dir.complete_marker(step).unlink()
    resumed = pair_config(tmp_path / "parts", loss, resume={}, **parts)
    sft.main(resumed)
    assert same_weights(weights(whole, 12), weights(resumed, 12))
    straight, again = (read_metrics(cfg.run_dir.metrics("sft")) for cfg in (whole, resumed))
    assert [row["loss/mean"] for row in straight] == [row["loss/mean"] for row in again]
    margin = 0.5 if loss["type"] == "reward" else 0.0  # the policy is the start, and the head is 0
    assert straight[0]["loss/mean"] == pytest.approx(np.log1p(np.exp(margin)), abs=1e-5)
    assert straight[-1]["val/rewards/margins"] > straight[3]["val/rewards/margins"] > 0


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "lora"])
def test_a_reward_model_is_one_of_transformers(tmp_path, lora):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    cfg = pair_config(tmp_path, {"type": "reward"}, model={"scratch": SCRATCH} | ({"lora": lora} if lora else {}))
    sft.main(cfg)
    model = AutoModelForSequenceClassification.from_pretrained(cfg.run_dir.latest_weights)
    tokenizer = AutoTokenizer.from_pretrained(cfg.run_dir.latest_weights)
    assert model.config.num_labels == 1
    session = sft.build_session(pair_config(tmp_path, {"type": "reward"}, model=cfg.model, val=None), (cfg.run_dir, 8))
    shown = [tokenizer.apply_chat_template([USER, reply], tokenize=False) for reply in (GOOD, BAD)]
    inputs = tokenizer(shown, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        theirs = model(**inputs).logits[:, 0].tolist()
    row = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    pairs = Pairs((rendered(row, build_renderer(session.tokenizer_dir), is_scored=True),))
    mine = session.learner.reply_scores(pack_pairs(pairs, [0], 128))[0][0].tolist()
    assert mine == pytest.approx(theirs, abs=1e-5) and mine[0] != mine[1]
    start = {"name": str(cfg.run_dir.latest_weights)}
    again = pair_config(tmp_path / "more", {"type": "reward"}, model=start, val=None)
    assert "own head" in _log_of(again)


def _log_of(cfg):
    sft.main(cfg)
    return cfg.run_dir.log("sft").read_text()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"data": {"type": "environment", "id": "sort-letters"}, "val": None}, 'give data.type = "preference"'),
        ({"val": {"data": {"type": "environment", "id": "sort-letters"}}}, "the loss of both must be the same"),
        ({"model": {"scratch": SCRATCH, "impl": "hf"}}, "model.impl with loss.type"),
        ({"eval": {"env": [{"id": "sort-letters"}]}}, "a reward model writes no text"),
        ({"loss": {"type": "dpo", "loss_type": "ipo", "label_smoothing": 0.1}}, "0.1 does nothing with"),
    ],
)
def test_what_does_not_go_with_pairs_is_refused(tmp_path, changes, said):
    from stretto.config.load import load
    from stretto.config.root import SFTConfig

    path = tmp_path / "c.json"
    keys = {"loss": {"type": "reward"}, "data": {"type": "preference", "name": "p.jsonl"}, "max_steps": 1}
    path.write_text(json.dumps(keys | changes))
    with pytest.raises(ConfigError, match=said):
        load(SFTConfig, ["@", str(path)])
