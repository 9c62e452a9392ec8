"""Checkpoints of Megatron: files that megatron-core 0.19.2 wrote, and what is written here.

cases/megatron/NAME is a random model of a family, NAME.KIND what a GPTModel with its weights saved: `torch_dist` of
one rank by dist_checkpointing, `torch` of two ranks, each with the
state_dict() of its part. dense.torch_dist_optim has a distributed optimizer after two updates, too, saved with
`fully_reshardable`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from processes.add_ons import families, needs
from tiny import build_learner

from stretto.base.errors import DataError
from stretto.base.paths import RunDir
from stretto.config.sections.model import ScratchSection
from stretto.models import hub
from stretto.models.tensor_map import TensorMap
from stretto.trainer.state.checkpoint import load
from stretto_megatron.checkpoints import as_hugging_face, read_megatron
from stretto_megatron.convert import check_megatron, convert, to_hugging_face, to_megatron
from stretto_megatron.moments import check_state, find_optimizer, write_state
from stretto_megatron.places import find_iteration, is_megatron
from stretto_megatron.torch_dist import TorchDist

CASES = Path(__file__).parents[2] / "cases" / "megatron"
KINDS = (
    "dense.torch_dist", "moe.torch_dist", "glm4_moe.torch_dist", "deepseek_v3.torch_dist", "dense.torch_tp2",
    "moe.torch_ep2", "gpt_oss.torch_dist", "glm_moe_dsa.torch_dist", "gpt_oss.torch_tp2_ep2",
)  # fmt: skip
OWN_KINDS = ("dense", "moe", "glm4_moe")
"""Models of the core's own families."""


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: source[tuple(slice(0, n) for n in shape)] for name, shape, source in hub.read_tensors(directory)}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind.split(".")[0] in OWN_KINDS else needs("families")) for kind in KINDS]
)
def test_what_megatron_wrote_has_the_bits_of_the_model(kind):
    model = CASES / kind.split(".")[0]
    cfg, wanted = hub.load_config(model), tensors_of(model)
    found = {name: (shape, tensor) for name, shape, tensor in as_hugging_face(CASES / kind, cfg, map_of(model))}
    assert found.keys() == wanted.keys()
    for name, (shape, tensor) in found.items():
        assert torch.equal(tensor[tuple(slice(0, n) for n in shape)], wanted[name]), name
        inner = tuple(slice(n // 3, n - n // 4) for n in shape)
        assert torch.equal(tensor[inner], wanted[name][inner]), name


def map_of(directory: Path) -> TensorMap:
    return hub.build_tensor_map(hub.load_config(directory))


@pytest.mark.heavy
@pytest.mark.parametrize(
    "family",
    families("qwen2", "qwen3", "llama", "glm4", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "glm_moe_dsa"),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_that_goes_to_megatron_and_back_has_its_bits(family, dtype, tmp_path):
    scratch = ScratchSection(family=family, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2)
    hub.save_hf(hub.random_model(scratch, 50).to(dtype), tmp_path / "model")
    to_megatron(tmp_path / "model", tmp_path / "megatron")
    check_megatron(tmp_path / "megatron", tmp_path / "model")
    to_hugging_face(tmp_path / "megatron", tmp_path / "model", tmp_path / "back")
    wanted, found = tensors_of(tmp_path / "model"), tensors_of(tmp_path / "back")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) and found[name].dtype is wanted[name].dtype for name in wanted)


@pytest.mark.heavy
def test_a_tensor_in_several_chunks_is_put_together(monkeypatch, tmp_path):
    monkeypatch.setattr("stretto_megatron.torch_dist._MAX_CHUNK_BYTES", 200)
    to_megatron(CASES / "moe", tmp_path / "megatron")
    to_hugging_face(tmp_path / "megatron", CASES / "moe", tmp_path / "back")
    found = tensors_of(tmp_path / "back")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors_of(CASES / "moe").items())


def test_a_padded_vocabulary_is_cut(tmp_path):
    wide = hub.random_model(ScratchSection(hidden_size=32, num_layers=1), 56)
    hub.save_hf(wide, tmp_path / "wide")
    to_megatron(tmp_path / "wide", tmp_path / "megatron")
    narrow = hub.random_model(ScratchSection(hidden_size=32, num_layers=1), 50)
    hub.save_hf(narrow, tmp_path / "narrow")
    to_hugging_face(tmp_path / "megatron", tmp_path / "narrow", tmp_path / "back")
    rows = tensors_of(tmp_path / "back")["model.embed_tokens.weight"]
    assert torch.equal(rows, wide.model.embed_tokens.weight[:50])


def test_iterations_are_found_by_number_by_pointer_and_as_directories(tmp_path):
    checkpoint = shutil.copytree(CASES / "dense.torch_dist", tmp_path / "c")
    shutil.copytree(checkpoint / "iter_0000003", checkpoint / "iter_0000012")
    assert is_megatron(checkpoint) and is_megatron(checkpoint / "iter_0000003") and not is_megatron(CASES / "dense")
    assert find_iteration(checkpoint).name == "iter_0000003"
    assert find_iteration(checkpoint, 12).name == "iter_0000012"
    assert find_iteration(checkpoint / "iter_0000012").name == "iter_0000012"
    with pytest.raises(DataError, match=r"no iter_0000004.*iter_0000003, iter_0000012"):
        find_iteration(checkpoint, 4)
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("soon")
    with pytest.raises(DataError, match="'soon'"):
        find_iteration(checkpoint)


def damaged(name: str, checkpoint: Path) -> None:
    place = checkpoint / "iter_0000003"
    if name == "metadata":
        (place / ".metadata").write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/x'\ntR.")
    elif name == "cut":
        data = (place / "__0_0.distcp").read_bytes()
        (place / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    else:
        (place / "__0_0.distcp").unlink()


@pytest.mark.parametrize("name", ["metadata", "cut", "no data"])
def test_a_damaged_checkpoint_is_named_and_nothing_is_left(name, tmp_path):
    checkpoint = shutil.copytree(CASES / "dense.torch_dist", tmp_path / "c")
    damaged(name, checkpoint)
    with pytest.raises(DataError, match=r"iter_0000003/(\.metadata|__0_0\.distcp)"):
        to_hugging_face(checkpoint, CASES / "dense", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "family, said",
    [
        ("glm4_moe_lite", "a glm4_moe_lite cannot be read, for it has no modules here"),
        pytest.param(
            "qwen3_5_text", "a qwen3_5_text cannot be read, for it has recurrent layers", marks=needs("families")
        ),
    ],
)
def test_a_family_that_cannot_be_read_is_answered_with_what_to_give(family, said, tmp_path):
    if family == "qwen3_5_text":
        hub.save_hf(hub.random_model(ScratchSection(family=family, hidden_size=32, num_layers=4), 50), tmp_path)
    else:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(DataError, match=rf"{said}; give its Hugging Face weights$"):
        check_megatron(CASES / "dense.torch_dist", tmp_path)


def test_names_of_norms_behind_the_parts_are_those_of_vime(tmp_path):
    hub.save_hf(hub.random_model(ScratchSection(family="glm4", hidden_size=32, num_layers=2), 50), tmp_path / "model")
    to_megatron(tmp_path / "model", tmp_path / "megatron")
    cfg = hub.load_config(tmp_path / "model")
    names = {name for name, _ in read_megatron(tmp_path / "megatron", cfg)}
    for part in ("post_self_attn_layernorm", "post_mlp_layernorm", "mlp.linear_fc1.layer_norm"):
        assert {name for name in names if part in name} == {
            f"decoder.layers.{layer}.{part}{'_' if part.endswith('layer_norm') else '.'}weight" for layer in range(2)
        }


def test_another_shape_is_refused():
    with pytest.raises(DataError, match=r"missing: decoder\.layers\.0\.mlp\.router\.weight"):
        check_megatron(CASES / "dense.torch_dist", CASES / "moe")


def test_weights_that_the_model_does_not_have_are_named(tmp_path):
    for family, layers in (("qwen2", 2), ("llama", 2), ("qwen2", 1)):
        scratch = ScratchSection(family=family, hidden_size=32, num_layers=layers, num_heads=4, num_kv_heads=2)
        hub.save_hf(hub.random_model(scratch, 50), tmp_path / f"{family}{layers}")
    to_megatron(tmp_path / "qwen22", tmp_path / "megatron")
    with pytest.raises(DataError, match=r"linear_qkv\.bias is not part of a llama"):
        check_megatron(tmp_path / "megatron", tmp_path / "llama2")
    with pytest.raises(DataError, match=r"decoder\.layers\.1\.\S+ is not part of a qwen2"):
        check_megatron(tmp_path / "megatron", tmp_path / "qwen21")


def test_a_missing_rank_is_named(tmp_path):
    checkpoint = shutil.copytree(CASES / "moe.torch_ep2", tmp_path / "c")
    shutil.rmtree(checkpoint / "iter_0000007" / "mp_rank_00_001")
    with pytest.raises(DataError, match="experts"):
        check_megatron(checkpoint, CASES / "moe")


def test_objects_of_a_rank_file_are_not_loaded(tmp_path):
    checkpoint = shutil.copytree(CASES / "dense.torch_tp2", tmp_path / "c")
    path = checkpoint / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    found = torch.load(path, weights_only=False)
    torch.save(found | {"args": Bomb(tmp_path / "boom")}, path)
    check_megatron(checkpoint, CASES / "dense")
    assert not (tmp_path / "boom").exists()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_the_verb_says_what_it_needs_and_overwrites_nothing(tmp_path, capsys):
    from stretto.base.errors import ConfigError

    with pytest.raises(ConfigError, match="--model"):
        convert([str(CASES / "dense.torch_dist"), str(tmp_path / "out")])
    assert convert([str(CASES / "dense.torch_dist"), str(tmp_path / "out"), "--model", str(CASES / "dense")]) == 0
    with pytest.raises(ConfigError, match="there already"):
        convert([str(CASES / "dense.torch_dist"), str(tmp_path / "out"), "--model", str(CASES / "dense")])
    with pytest.raises(ConfigError, match="no checkpoint of Megatron"):
        convert([str(CASES / "dense"), str(tmp_path / "other"), "--step", "3"])
    with pytest.raises(
        ConfigError, match=r"/otu: there is no such directory; did you mean .*/out\?; give the directory"
    ):
        convert([str(tmp_path / "otu"), str(tmp_path / "other")])
    with pytest.raises(ConfigError, match=r"config\.json: this is a file; give the directory"):
        convert([str(CASES / "dense" / "config.json"), str(tmp_path / "other")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


OPTIMIZER = CASES / "dense.torch_dist_optim" / "iter_0000002"


@pytest.mark.parametrize(
    ("kind", "found"),
    [("dense.torch_dist_optim", "by_name"), ("dense.torch_dist", "none"), ("dense.torch_tp2", "other")],
)
def test_what_a_checkpoint_has_of_its_optimizer_is_found(kind, found):
    assert find_optimizer(find_iteration(CASES / kind)) == found


def test_the_state_of_megatrons_optimizer_is_that_of_a_run_that_begins_with_it(tmp_path):
    run = RunDir(tmp_path / "run")
    check_state(OPTIMIZER, CASES / "dense")
    assert not run.path.exists()
    write_state(OPTIMIZER, CASES / "dense", run)
    assert run.complete_checkpoints() == [2]
    learner = build_learner(hub.load_model(CASES / "dense", dtype=torch.float32))
    load(run, learner, 2)
    learner.begin_anew()
    assert learner.step == 0 and learner.next_lr == learner.network.optim.lr
    weights = learner.network.weights
    states = {name: learner.network.optimizer.state[each] for name, each in zip(weights.names, weights.parameters)}
    assert {float(state["step"]) for state in states.values()} == {2.0}
    whole = lambda key, name: TorchDist(OPTIMIZER, state=key).find(name)[:, :]
    name = "model.embed_tokens.weight"
    for key, found in (("param", learner.policy.model.embed_tokens.weight), ("exp_avg", states[name]["exp_avg"])):
        assert torch.equal(found, whole(key, "embedding.word_embeddings.weight")), key
    # A layer has gate before up, in one matrix of all layers.
    gate_up = TorchDist(OPTIMIZER, state="exp_avg_sq").find("decoder.layers.1.mlp.linear_fc1.weight")[:, :]
    own = [states[f"model.layers.1.mlp.{part}_proj.weight"]["exp_avg_sq"] for part in ("gate", "up")]
    assert torch.equal(torch.cat(own), gate_up) and float(gate_up.max()) > 0


def test_a_state_of_another_model_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"dense.*has shape|missing"):
        write_state(OPTIMIZER, CASES / "moe", RunDir(tmp_path / "run"))
    assert not RunDir(tmp_path / "run").complete_checkpoints()


@pytest.mark.parametrize(
    ("name", "said"),
    [("missing", r"__0_0\.distcp: this file of the checkpoint is missing"),
     ("short", r"__0_0\.distcp has 100 bytes, and \d+ are stored in it"),
     ("uncounted", "how many updates its optimizer has made is not said$")],
)  # fmt: skip
def test_a_state_whose_files_are_damaged_is_refused_before_anything_is_written(name, said, tmp_path):
    place = Path(shutil.copytree(OPTIMIZER, tmp_path / OPTIMIZER.name))
    data = place / "__0_0.distcp"
    if name == "uncounted":
        groups = [{"step": float("nan")}]
        torch.save({"iteration": 2, "optimizer": {"optimizer": {"param_groups": groups}}}, place / "common.pt")
    elif name == "short":
        data.write_bytes(data.read_bytes()[:100])
    else:
        data.unlink()
    for check in (check_state, lambda *where: write_state(*where, RunDir(tmp_path / "run"))):
        with pytest.raises(DataError, match=said):
            check(place, CASES / "dense")
    if name != "uncounted":
        with pytest.raises(DataError, match=said):
            check_megatron(place, CASES / "dense")
    assert not (tmp_path / "run").exists()
