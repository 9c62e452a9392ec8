"""Images of records: their columns in files, prompts of tasks, and examples that are cut to length."""

from __future__ import annotations

import io
import json
from base64 import b64decode
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image as pillow
from processes.add_ons import needs

from stretto.base.errors import ConfigError, DataError
from stretto.chat.patches import ImageProcessor
from stretto.chat.placeholders import VISION_TOKENS
from stretto.chat.render import Renderer, build_renderer
from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.config.sections.sft import EnvData, FileData, LossMaskSection
from stretto.data.pictures import data_url
from stretto.envs.base import load_environment
from stretto.records.images import placeholder_spans

ANSWER = {"role": "assistant", "content": "2"}


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)
    file = io.BytesIO()
    pillow.fromarray(pixels).save(file, "png")
    return file.getvalue()


@pytest.fixture(scope="module")
def renderer(tmp_path_factory) -> Renderer:
    tokenizer = load_tokenizer(build_letters_tokenizer(tmp_path_factory.mktemp("letters"), phrases=VISION_TOKENS))
    processor = ImageProcessor(patch_size=4, min_pixels=64, max_pixels=4096)
    return build_renderer(tokenizer, model_type="qwen3", images=processor)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    for seed in range(3):
        (tmp_path / "pictures" / f"{seed}.png").write_bytes(png(seed))
    return tmp_path


def written(folder: Path, *records: dict) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def parquet(folder: Path, records: list[dict]) -> str:
    path = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return str(path)


def hashes(renderer: Renderer, messages: list[dict]) -> list[str]:
    return [image.hash for image in renderer.images_of(messages)]


def wanted(renderer: Renderer, *seeds: int) -> list[str]:
    parts = [{"type": "image", "image": png(seed)} for seed in seeds]
    return hashes(renderer, [{"role": "user", "content": parts}])


def prompts(path: str) -> list[list[dict]]:
    env = load_environment("dataset", {"path": path, "shuffle": False})
    source = env.tasks("train")
    tasks = [source.make(i) for i in range(source.num_tasks)]
    assert all(b"base64" not in json.dumps(task.data).encode() for task in tasks)  # names, not pictures
    again = load_environment("dataset", {"path": path, "shuffle": False})
    assert [env.prompt(task) for task in tasks] == [again.prompt(task) for task in tasks]
    return [env.prompt(task) for task in tasks]


def test_every_form_of_a_column_is_shown_where_the_prompt_says(folder: Path, renderer: Renderer) -> None:
    url = data_url(png(1))
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    openai = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    rows = [
        {"prompt": "<image> or <image>?", "images": ["pictures/0.png", url], "label": "a"},
        {"prompt": [{"role": "user", "content": parts}], "images": ["pictures/2.png", url], "label": "a"},
        {"prompt": "one <image>", "image": "pictures/2.png", "label": "a"},
        {"prompt": [{"role": "user", "content": openai}], "label": "a"},
        {"prompt": "no <image> at all", "images": [], "label": "a"},
    ]
    found = prompts(written(folder, *rows))
    shown = [(0, 1), (2, 1), (2,), (1,), ()]
    assert [hashes(renderer, each) for each in found] == [wanted(renderer, *seeds) for seeds in shown]
    assert [part["type"] for part in found[0][0]["content"]] == ["image", "text", "image", "text"]
    assert found[4][0]["content"] == "no <image> at all"


def test_parquet_has_bytes_and_the_form_of_hugging_face(folder: Path, renderer: Renderer) -> None:
    rows = [{"prompt": "<image>?", "images": [{"bytes": png(0), "path": None}], "label": "a"}]
    rows += [{"prompt": "<image>?", "images": [{"bytes": None, "path": "pictures/1.png"}], "label": "a"}]
    assert [hashes(renderer, each) for each in prompts(parquet(folder, rows))] == [
        wanted(renderer, 0),
        wanted(renderer, 1),
    ]
    rows = [{"prompt": "<image>?", "image": png(2), "label": "a"}]
    assert [hashes(renderer, each) for each in prompts(parquet(folder, rows))] == [wanted(renderer, 2)]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "<image>", "images": ["pictures/9.png"]}, r"rows\.jsonl:1: messages\[0\].content\[0\]: the image "
         r"cannot be read from .*9\.png: No such file"),
        ({"prompt": "<image>", "images": ["rows.jsonl"]}, r"rows\.jsonl:1: .*no image format that Pillow knows"),
        ({"prompt": "what?", "images": ["pictures/0.png"]}, r"rows\.jsonl:1: 1 images, and the messages show 0"),
        ({"prompt": "<image><image>", "images": ["pictures/0.png"]}, r":1: 1 images, and the messages show 2"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, r":1: 0 images, and the messages show 1"),
        ({"prompt": [{"role": "system", "content": "<image>"}, {"role": "user", "content": "?"}],
          "images": ["pictures/0.png"]}, "the role 'system' has an image"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_file_and_line(folder: Path, record: dict, message: str) -> None:
    path = written(folder, record | {"label": "a"})
    with pytest.raises(DataError, match=message):
        load_environment("dataset", {"path": path})


def test_plain_text_prompts_have_no_images(folder: Path) -> None:
    from stretto.envs.base import RunInfo

    path = written(folder, {"prompt": "<image>", "images": ["pictures/0.png"], "label": "a"})
    run = RunInfo(encode=lambda text: np.zeros(1, np.int32))
    with pytest.raises(DataError, match=r"apply_chat_template = false .*images"):
        load_environment("dataset", {"path": path, "apply_chat_template": False}, run=run)


# -- examples of supervised fine-tuning --


def conversation(*seeds: int) -> list[dict]:
    turns = []
    for seed in seeds:
        shown = {"type": "image", "image": f"pictures/{seed}.png"}
        turns += [{"role": "user", "content": [shown, {"type": "text", "text": "how many?"}]}, ANSWER]
    return turns


@needs("sft")
def test_examples_have_their_images_and_rows_know_whose_they_are(folder: Path, renderer: Renderer) -> None:
    from stretto_sft.rows import load_examples, pack

    path = written(folder, {"messages": conversation(0, 1)}, {"messages": conversation(2)},
                   {"prompt": "<image>?", "completion": "2", "images": "pictures/1.png"})  # fmt: skip
    found = load_examples(FileData(name=path), renderer, LossMaskSection(), 500, seed=0)
    wanted_images = [wanted(renderer, *seeds) for seeds in ((0, 1), (2,), (1,))]
    assert [[image.hash for image in each.images] for each in found.examples] == wanted_images
    (row,) = pack(found.examples, 500)
    for document, index in enumerate(map(int, row.sample_ids)):
        assert [image.hash for image in row.images_of(document)] == wanted_images[index]
    assert placeholder_spans(row.token_ids, renderer.image_token_id, [4] * 4) is not None


@needs("sft")
def test_truncation_drops_an_image_with_all_its_tokens_or_not_at_all(folder: Path, renderer: Renderer) -> None:
    from stretto_sft.rows import load_examples

    path = written(folder, {"messages": conversation(0, 1)})
    mask = LossMaskSection(user=True, assistant=True)
    (whole,) = load_examples(FileData(name=path), renderer, mask, 500, seed=0).examples
    (_, second) = placeholder_spans(whole.token_ids, renderer.image_token_id, [4, 4])
    for length in range(12, len(whole.token_ids) + 1):
        (cut,) = load_examples(FileData(name=path), renderer, mask, length, seed=0).examples
        assert len(cut.token_ids) <= length
        np.testing.assert_array_equal(cut.token_ids, whole.token_ids[: len(cut.token_ids)])
        assert placeholder_spans(cut.token_ids, renderer.image_token_id, [4] * len(cut.images)) is not None
        assert len(cut.images) == 1 + (len(cut.token_ids) >= second[1])


@needs("sft")
def test_the_fingerprint_of_examples_depends_on_the_pictures(folder: Path, renderer: Renderer) -> None:
    from stretto_sft.rows import load_examples

    prints = set()
    for seed in (0, 1):
        path = written(folder, {"messages": conversation(seed)})
        prints.add(load_examples(FileData(name=path), renderer, LossMaskSection(), 500, seed=0).fingerprint())
    assert len(prints) == 2


@needs("sft")
def test_an_example_with_an_image_for_a_model_of_text_is_named(folder: Path, tmp_path: Path) -> None:
    from stretto_sft.rows import load_examples

    text = build_renderer(build_letters_tokenizer(tmp_path / "text"), model_type="qwen3")
    path = written(folder, {"messages": conversation(0)})
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: .*\[0\] is an image"):
        load_examples(FileData(name=path), text, LossMaskSection(), 500, seed=0)


# -- the bundled environment --


def test_count_shapes_draws_what_it_asks_for(renderer: Renderer) -> None:
    env = load_environment("count-shapes", {"max_shapes": 4, "size": 32})
    train, held_out = env.tasks("train"), env.tasks("eval")
    tasks = [train.make(i) for i in range(200)]
    counts = np.bincount([task.data["num_shapes"] for task in tasks], minlength=5)
    assert counts[0] == 0 and counts[1:].min() > 25 and len(counts) == 5
    known = {tuple(task.data.values()) for task in tasks}
    assert known.isdisjoint(tuple(held_out.make(i).data.values()) for i in range(50))
    for task in tasks[:20]:
        (message,) = env.prompt(task)
        (image,) = renderer.images_of([message])
        assert env.prompt(task) == [message] and image.grid == (1, 8, 8)
        assert env.score(task, f" {task.data['num_shapes']}\n") == 1.0 and env.score(task, "9") == 0.0
        picture = pillow.open(io.BytesIO(b64decode(message["content"][0]["image"].split(",")[1])))
        assert num_blobs(np.asarray(picture)) == task.data["num_shapes"]


def num_blobs(pixels: np.ndarray) -> int:
    """Connected regions that are not white."""
    left = set(map(tuple, np.argwhere((pixels < 255).any(axis=2)).tolist()))
    count = 0
    while left:
        count, open_ = count + 1, [left.pop()]
        while open_:
            y, x = open_.pop()
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            open_ += near
    return count


@needs("sft")
def test_count_shapes_solves_its_own_tasks(renderer: Renderer) -> None:
    from stretto_sft.rows import load_examples

    data = EnvData(id="count-shapes", num_rows=5)
    examples = load_examples(data, renderer, LossMaskSection(), 500, seed=0)
    assert all(len(example.images) == 1 for example in examples.examples)


@pytest.mark.parametrize("args", [{"max_shapes": 1}, {"max_shapes": 10}, {"size": 8}])
def test_count_shapes_refuses_what_it_cannot_draw(args: dict) -> None:
    with pytest.raises(ConfigError, match=r"count-shapes: .* must be"):
        load_environment("count-shapes", args)
